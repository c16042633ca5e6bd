"""The prepared folder: what is written comes back, and what is broken is noticed by name."""

import itertools
import json
import pickle
import tracemalloc

import numpy as np
import pytest

from transformer_jax import shards
from transformer_jax.config import UserError
from transformer_jax.shards import Shards


class Pieces:
    """Stands for a tokenizer: shards need only its size, files and digest."""

    def __init__(self, vocab_size=100):
        self.vocab_size = vocab_size
        self.digest = f"digest-{vocab_size}"

    def files(self):
        return {"vocab.txt": "".join(f"piece{i}\n" for i in range(self.vocab_size))}


TRAIN = [
    [[5, 6, 7], [8]],
    [[9, 10]],
    [[11, 12, 13, 14], [15, 16], [17]],
    [[18, 19]],
    [[20]],
]
HELDOUT = [[[30, 31], [32]]]


@pytest.fixture
def prepared(tmp_path):
    folder = tmp_path / "prepared"
    shards.write_prepared(
        folder,
        Pieces(),
        {"train": TRAIN, "heldout": HELDOUT},
        sources={"train": [0, 1, 1, 0, 1], "heldout": [0]},
        source_names=["a.txt", "b.txt"],
        documents_per_shard=2,
    )
    return folder


def sentences_of(split):
    lengths = np.diff(split.sentence_offsets)
    flat = split.gather(split.sentence_offsets[:-1], lengths)
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


def test_documents_come_back_in_order_over_shard_borders(prepared):
    train = Shards.open(prepared, "train")
    sentences = sentences_of(train)
    starts = train.document_offsets
    assert [sentences[a:b] for a, b in itertools.pairwise(starts)] == TRAIN
    assert (train.num_documents, train.num_sentences, train.num_tokens) == (5, 8, 16)
    assert train.document_sources.tolist() == [0, 1, 1, 0, 1]
    assert train.source_names == ["a.txt", "b.txt"]
    assert len(set(train.document_hashes.tolist())) == 5
    assert sentences_of(Shards.open(prepared, "heldout")) == HELDOUT[0]


def test_gather_takes_any_ranges_in_the_order_asked_for(prepared):
    train = Shards.open(prepared, "train")
    flat = np.array([token for document in TRAIN for sentence in document for token in sentence])
    rng = np.random.default_rng(0)
    shard_ends = np.array([6, 15, 16])
    starts = rng.integers(0, 16, 200)
    lengths = rng.integers(0, 5, 200)
    lengths = np.minimum(lengths, shard_ends[np.searchsorted(shard_ends, starts, side="right")] - starts)
    expected = np.concatenate([flat[s : s + n] for s, n in zip(starts, lengths, strict=True)])
    got = train.gather(starts, lengths.astype(np.int32))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)
    assert train.gather(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (15, 2), (5, 2), (3, -1)])
def test_gather_refuses_ranges_that_leave_the_split_or_cross_shards(prepared, start, length):
    with pytest.raises(IndexError):
        Shards.open(prepared, "train").gather(np.array([start]), np.array([length]))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_ids_are_as_narrow_as_the_vocabulary_allows_and_the_highest_survives(tmp_path, vocab_size, dtype):
    shards.write_prepared(
        tmp_path, Pieces(vocab_size), {"train": [[[0, vocab_size - 1]], [[1]]]}, documents_per_shard=1
    )
    assert np.load(tmp_path / "train-00000" / "tokens.npy").dtype == dtype
    assert sentences_of(Shards.open(tmp_path)) == [[0, vocab_size - 1], [1]]


@pytest.mark.parametrize("bad", [-1, 100, 70000])
def test_ids_out_of_range_are_refused_and_leave_no_finished_folder(tmp_path, bad):
    with pytest.raises(UserError, match=f"token id {bad} is out of range for a vocabulary of 100"):
        shards.write_prepared(tmp_path, Pieces(), {"train": [[[1, bad]]]})
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob("*train*"))


def test_empty_documents_and_sentences_are_refused(tmp_path):
    """C080: an empty document must never be drawn as the random side."""
    for bad in ([[[1]], []], [[[1], []]]):
        with pytest.raises(UserError, match="empty document or sentence"):
            shards.write_prepared(tmp_path, Pieces(), {"train": bad})


def test_word_marks_follow_the_pieces(tmp_path, prepared):
    documents = [[[5, 6], [7]], [[8, 9, 10]]]
    marks = [[[1, 0], [1]], [[1, 0, 1]]]
    shards.write_prepared(tmp_path / "w", Pieces(), {"train": documents}, words={"train": marks}, documents_per_shard=1)
    train = Shards.open(tmp_path / "w")
    assert train.has_words
    assert train.gather_words(np.array([3, 1]), np.array([3, 2])).tolist() == [True, False, True, False, True]
    plain = Shards.open(prepared)
    assert not plain.has_words
    with pytest.raises(UserError, match="no word boundaries"):
        plain.gather_words(np.array([0]), np.array([1]))
    with pytest.raises(UserError, match="2 word marks were given for 3 pieces"):
        shards.write_prepared(tmp_path / "w", Pieces(), {"train": [[[1, 2, 3]]]}, words={"train": [[[1, 0]]]})


@pytest.mark.parametrize("file", ["train-00001/tokens.npy", "train-00000/sentences.npy", "tokenizer/vocab.txt"])
def test_a_file_cut_in_half_is_noticed_at_open_by_name(prepared, file):
    """C121: partial data is an error."""
    path = prepared / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"{file} has \d+ bytes, the manifest says \d+"):
        Shards.open(prepared, "train")


def test_a_missing_file_is_named(prepared):
    (prepared / "train-00002" / "hashes.npy").unlink()
    with pytest.raises(UserError, match=r"train-00002/hashes.npy is missing"):
        Shards.open(prepared, "train")


def test_one_flipped_bit_in_any_file_is_found_by_verify(prepared):
    assert shards.verify(prepared) == []
    files = [path for path in prepared.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == 5 * 4 + 1
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert [str(path) in problem for problem in shards.verify(prepared)] == [True]
        path.write_bytes(whole)
    assert shards.verify(prepared) == []


def test_open_checks_digests_when_asked(prepared):
    path = prepared / "train-00000" / "tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    Shards.open(prepared, "train")
    with pytest.raises(UserError, match=r"train-00000/tokens.npy has been changed"):
        Shards.open(prepared, "train", check="digests")
    Shards.open(prepared, "heldout", check="digests")


def test_unfinished_absent_and_foreign_folders_are_told_apart(prepared, tmp_path):
    with pytest.raises(UserError, match="no prepared data here"):
        Shards.open(tmp_path / "nowhere")
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(UserError, match="version 99"):
        Shards.open(prepared)
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"format": "something else"}))
    with pytest.raises(UserError, match="not the manifest of a prepared folder"):
        Shards.open(prepared)
    (prepared / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Shards.open(prepared)
    (prepared / "manifest.json").unlink()
    with pytest.raises(UserError, match="not a finished prepared folder"):
        Shards.open(prepared)


def test_a_split_without_documents_opens_empty_and_an_unknown_one_is_an_error(tmp_path):
    shards.write_prepared(tmp_path, Pieces(), {"train": [[[1]]], "heldout": []})
    heldout = Shards.open(tmp_path, "heldout")
    assert (heldout.num_documents, heldout.num_sentences, heldout.num_tokens) == (0, 0, 0)
    assert heldout.tokens_by_id().sum() == 0 and not heldout.has_words
    assert len(heldout.document_sources) == len(heldout.document_hashes) == 0
    with pytest.raises(IndexError, match="empty"):
        heldout.gather(np.array([0]), np.array([1]))
    with pytest.raises(UserError, match="has no split `test`; it has train, heldout"):
        Shards.open(tmp_path, "test")


def test_the_fingerprint_is_of_content_and_not_of_place(prepared, tmp_path):
    def fingerprint(name, train, tokenizer=None, split="train"):
        shards.write_prepared(tmp_path / name, tokenizer or Pieces(), {"train": train, "heldout": HELDOUT})
        return Shards.open(tmp_path / name, split).fingerprint

    first = fingerprint("one", TRAIN)
    assert fingerprint("two", TRAIN) == first
    assert fingerprint("three", [*TRAIN[:-1], [[21]]]) != first
    assert fingerprint("four", TRAIN, Pieces(101)) != first
    assert fingerprint("five", TRAIN, split="heldout") != first


def test_counts_by_id_are_those_of_the_split(prepared):
    counts = Shards.open(prepared, "train").tokens_by_id()
    assert counts.dtype == np.int64 and counts.shape == (100,)
    assert counts.tolist() == [0] * 5 + [1] * 16 + [0] * 79


def test_a_split_travels_to_another_process(prepared):
    train = pickle.loads(pickle.dumps(Shards.open(prepared, "train")))
    assert train.gather(np.array([4]), np.array([2])).tolist() == [9, 10]


def test_more_shards_than_open_files_are_read_all_the_same(prepared):
    train = Shards.open(prepared, "train")
    train._maps.limit = 1
    assert [s for document in TRAIN for s in document] == sentences_of(train)
    assert len(train._maps._open) == 1


def test_tokens_stay_on_disk(tmp_path):
    arrays = shards.ShardArrays(
        tokens=np.ones(4_000_000, np.int64),
        sentences=np.array([0, 4_000_000]),
        documents=np.array([0, 1]),
        sources=np.array([0]),
        hashes=np.array([1], np.uint64),
    )
    entry = shards.write_shard(tmp_path, "train-00000", arrays, 100)
    tokenizer = shards.write_tokenizer(tmp_path, Pieces())
    manifest = shards.make_manifest(vocab_size=100, tokenizer=tokenizer, source_names=["a"], splits={"train": [entry]})
    shards.write_manifest(tmp_path, manifest)
    tracemalloc.start()
    train = Shards.open(tmp_path)
    assert train.gather(np.array([3_999_000]), np.array([1000])).sum() == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000, "the 8 MB of tokens were read into memory"
