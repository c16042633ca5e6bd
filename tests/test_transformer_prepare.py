"""Preparation: the same bytes whatever happens on the way, bounded memory, and errors that leave nothing half-made."""

import dataclasses
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from transformer_jax import chunks, corpora, data_report, preparation, prepare, shards
from transformer_jax.config import UserError
from transformer_jax.shards import Shards
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.vocabulary import train_wordpiece

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Document:
    """What preparation needs of a document."""

    source: int
    line: int
    sentences: list[str]


def corpus(count=60, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(80)]
    return [
        Document(i % 2, i, [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(rng.randint(1, 6))])
        for i in range(count)
    ]


def train(texts):
    return train_wordpiece(texts, WordPieceConfig(vocab_size=120), workers=1)


def run(out, documents, make_tokenizer=train, **settings):
    settings = {"heldout": 0.2, "shard_mb": 0.001, "workers": 1, "made_from": {}, **settings}
    settings["made_from"] = {"shard_mb": settings["shard_mb"], "heldout": settings["heldout"], **settings["made_from"]}
    return prepare.prepare_documents(lambda: iter(documents), ["a.txt", "b.txt"], make_tokenizer, out, **settings)


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def texts_of(split):
    """Documents of a split as lists of decoded sentences."""
    pieces = split.gather(split.sentence_offsets[:-1], np.diff(split.sentence_offsets))
    sentences = [split.tokenizer.decode(part) for part in np.split(pieces, split.sentence_offsets[1:-1])]
    return [sentences[a:b] for a, b in zip(split.document_offsets[:-1], split.document_offsets[1:], strict=True)]


@pytest.fixture
def encoded(monkeypatch):
    """Numbers of the chunks encoded (in this process) so far."""
    numbers = []
    original = chunks.encode_chunk

    def counting(tokenizer, settings, chunk):
        numbers.append(chunk.index)
        return original(tokenizer, settings, chunk)

    monkeypatch.setattr(chunks, "encode_chunk", counting)
    return numbers


def test_every_document_comes_out_once_whole_and_in_order(tmp_path):
    documents = corpus()
    report = run(tmp_path / "p", documents)
    train_split, heldout = Shards.open(tmp_path / "p", "train"), Shards.open(tmp_path / "p", "heldout")
    assert len(train_split.manifest["splits"]["train"]) > 3
    by_side = {True: [], False: []}
    for document in documents:
        content = chunks.content_hash(" ".join(document.sentences).encode())
        by_side[chunks.is_heldout(content, 0.2)].append(document)
    assert texts_of(train_split) == [d.sentences for d in by_side[False]]
    assert texts_of(heldout) == [d.sentences for d in by_side[True]]
    assert train_split.document_sources.tolist() == [d.source for d in by_side[False]]
    assert report["documents"]["train"] + report["documents"]["heldout"] == 60
    assert 4 <= report["documents"]["heldout"] <= 22, "about a fifth of 60"
    assert shards.verify(tmp_path / "p") == []


@pytest.mark.slow
def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path):
    documents = corpus()
    folders = []
    for workers in (1, 2, 3):
        folders.append(tmp_path / f"w{workers}")
        run(folders[-1], documents, workers=workers)
    first = contents(folders[0])
    assert {"manifest.json", "report.json", "report.txt", "chunks/chunk-00003.json"} <= set(first)
    for folder in folders[1:]:
        assert contents(folder) == first


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import test_transformer_prepare as t

    def documents():
        for i, document in enumerate(t.corpus()):
            if i == 40:
                if once:
                    time.sleep(120)
                once.append(1)
            yield document

    if __name__ == "__main__":
        once = []
        t.prepare.prepare_documents(
            documents, ["a.txt", "b.txt"], t.train, Path({out!r}), heldout=0.2, shard_mb=0.001, workers=2,
            made_from={{"shard_mb": 0.001, "heldout": 0.2}},
        )
"""


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_a_kill_finished_shards_are_kept_and_the_bytes_are_those_of_an_unbroken_run(tmp_path, encoded):
    run(tmp_path / "straight", corpus())
    total = len(encoded)
    out = tmp_path / "killed"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED.format(tests=str(ROOT / "tests"), out=str(out))))
    process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        give_up = time.monotonic() + 60
        while len(list(out.glob("chunks/chunk-*.json"))) < 3:
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        workers = children(process.pid)
        assert len(workers) >= 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    give_up = time.monotonic() + 20
    while any(map(alive, workers)):
        assert time.monotonic() < give_up, "workers outlive a killed preparation"
        time.sleep(0.05)
    with pytest.raises(UserError, match="not a finished prepared folder"):
        Shards.open(out)
    kept = len(list(out.glob("chunks/chunk-*.json")))
    (out / ".train-00001.99999.tmp").mkdir()  # as a kill in the middle of a write leaves it
    encoded.clear()
    messages = []
    run(out, corpus(), say=messages.append)
    assert len(encoded) == total - kept
    assert f"{kept} of {total} shards were kept from an earlier run" in messages
    assert contents(out) == contents(tmp_path / "straight")


def test_stale_broken_and_unknown_shards_are_made_again(tmp_path, encoded):
    out = tmp_path / "p"
    run(out, corpus())
    whole = contents(out)
    for file in ("manifest.json", "chunks/chunk-00002.json"):
        (out / file).unlink()
    damaged = out / "train-00001" / "tokens.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    encoded.clear()
    run(out, corpus())
    assert encoded == [1, 2]
    assert contents(out) == whole


def test_a_second_run_does_nothing_and_says_so(tmp_path, encoded):
    messages = []
    first = run(tmp_path, corpus())
    before = contents(tmp_path)
    encoded.clear()

    def never():
        raise AssertionError("the corpus was read again")

    again = prepare.prepare_documents(
        never, ["a.txt", "b.txt"], train, tmp_path,
        made_from={"shard_mb": 0.001, "heldout": 0.2}, heldout=0.2, shard_mb=0.001, say=messages.append,
    )  # fmt: skip
    assert messages == [f"{tmp_path} is up to date"]
    assert again == first and encoded == [] and contents(tmp_path) == before


def test_a_finished_folder_that_was_damaged_is_mended(tmp_path, encoded):
    run(tmp_path, corpus())
    whole = contents(tmp_path)
    (tmp_path / "heldout-00000" / "hashes.npy").unlink()
    encoded.clear()
    messages = []
    run(tmp_path, corpus(), say=messages.append)
    assert "heldout-00000/hashes.npy is missing; making it anew" in messages[0]
    assert encoded == [0] and contents(tmp_path) == whole


def test_changed_settings_are_named_and_the_folder_becomes_what_a_fresh_one_would_be(tmp_path, encoded):
    run(tmp_path / "changed", corpus(), shard_mb=0.0005)
    encoded.clear()
    messages = []
    run(tmp_path / "changed", corpus(), shard_mb=0.001, say=messages.append)
    assert messages[0] == "shard_mb was 0.0005 and is 0.001 now: what depends on it is made anew"
    assert len(encoded) > 3
    run(tmp_path / "fresh", corpus(), shard_mb=0.001)
    assert contents(tmp_path / "changed") == contents(tmp_path / "fresh")


def test_changes_of_a_recipe_are_told_file_by_file(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()

    def write(name, documents):
        (folder / name).write_text("\n\n".join("\n".join(d.sentences) for d in documents) + "\n")

    def prepared():
        messages = []
        (folder / "r.toml").write_text('heldout = 0.2\n[[sources]]\nfiles = ["*.txt"]\n')
        recipe = corpora.load_recipe(folder / "r.toml")
        settings = WordPieceConfig(vocab_size=100)
        prepare.prepare(recipe, settings, tmp_path / "p", workers=1, shard_mb=0.001, say=messages.append)
        return [re.sub('"[0-9a-f]{64}"', "DIGEST", m) for m in messages if "kept" not in m]

    tail = ": what depends on it is made anew"
    write("a.txt", corpus(20))
    write("b.txt", corpus(20, seed=1))
    assert prepared() == []
    assert prepared() == [f"{tmp_path / 'p'} is up to date"]
    write("a.txt", corpus(21))
    assert [m.partition(" was")[0] for m in prepared()] == ["recipe.inputs.a.txt.sha256"]
    write("c.txt", corpus(20, seed=2))
    changes = prepared()
    assert changes[0] == f"recipe.inputs.c.txt is new{tail}" and changes[1].startswith("recipe.order was [")
    (folder / "b.txt").unlink()
    assert prepared()[0] == f"recipe.inputs.b.txt is gone{tail}"
    assert Shards.open(tmp_path / "p").source_names == ["a.txt", "c.txt"]


def test_more_text_at_the_end_keeps_the_shards_before_it(tmp_path, encoded):
    tokenizer = train(s for d in corpus() for s in d.sentences)
    run(tmp_path, corpus(60), lambda texts: tokenizer, made_from={"documents": 60})
    encoded.clear()
    run(tmp_path, corpus(60) + corpus(20, seed=1), lambda texts: tokenizer, made_from={"documents": 80})
    last = len(list(tmp_path.glob("chunks/chunk-*.json")))
    assert min(encoded) > 2 and max(encoded) == last - 1


def test_without_resume_everything_is_made_anew(tmp_path, encoded):
    run(tmp_path, corpus())
    first = list(encoded)
    whole = contents(tmp_path)
    run(tmp_path, corpus(), resume=False)
    assert encoded == first * 2 and contents(tmp_path) == whole


def test_copies_of_a_document_are_never_on_both_sides(tmp_path):
    documents = corpus()
    copies = [Document(1, 0, [" ".join(d.sentences)]) for d in documents]  # even when cut into sentences otherwise
    report = run(tmp_path, documents + documents + copies)
    sides = [set(Shards.open(tmp_path, split).document_hashes.tolist()) for split in ("train", "heldout")]
    assert not sides[0] & sides[1]
    assert report["documents"]["duplicates"] == 120


def test_the_vocabulary_is_learned_from_training_documents_only(tmp_path):
    seen = []

    def spy(texts):
        seen.extend(texts)
        return train(seen)

    run(tmp_path, corpus(), spy)
    assert seen == [sentence for document in texts_of(Shards.open(tmp_path, "train")) for sentence in document]


@pytest.mark.parametrize("documents", [[], [Document(0, 0, [])]])
def test_an_empty_corpus_is_an_error_that_leaves_nothing(tmp_path, documents):
    """C089: an empty result is an error."""
    with pytest.raises(UserError, match="the corpus is empty: no document with any text was found"):
        run(tmp_path / "p", documents)
    assert not (tmp_path / "p").exists()


def test_a_corpus_of_nothing_but_control_characters_is_empty_too(tmp_path):
    tokenizer = train(s for d in corpus() for s in d.sentences)
    with pytest.raises(UserError, match="the corpus is empty"):
        run(tmp_path / "p", [Document(0, 0, ["\x07\x08"])], lambda texts: tokenizer)
    assert not (tmp_path / "p").exists()


def test_one_document_where_two_are_needed_is_an_error(tmp_path):
    """C018: three lines without a blank line between them are one document."""
    document = Document(0, 0, ["hello", "tom sawyer", "how are you"])
    known = {"heldout": 0.0, "max_unknown_rate": 1.0}
    expected = "has 1 of 1 documents; at least 2 are needed .*random next sentence.*blank line between documents"
    with pytest.raises(UserError, match=expected):
        run(tmp_path / "p", [document], **known, min_documents=2)
    assert not (tmp_path / "p").exists()
    run(tmp_path / "p", [document], **known, min_documents=1)


def test_a_split_without_documents_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"the held-out split has 0 of 60 documents.*raise `heldout` \(1e-06\)"):
        run(tmp_path / "p", corpus(), heldout=1e-6)
    with pytest.raises(UserError, match="the training split has 0 of 3 documents"):
        run(tmp_path / "p", corpus(3), heldout=0.999999)
    with pytest.raises(UserError, match=r"heldout is 1\.0"):
        run(tmp_path / "p", corpus(3), heldout=1.0)
    assert not (tmp_path / "p").exists()


def test_empty_documents_and_sentences_never_reach_a_shard(tmp_path):
    """C080: no empty document can be drawn as the random side."""
    documents = corpus(20)
    nothing = [Document(0, 0, []), Document(0, 0, ["\x07"]), Document(0, 0, ["\x07", "\x08"])]
    mixed = Document(0, 0, ["\x07", documents[0].sentences[0], "\x08"])
    report = run(tmp_path, [*documents, *nothing, mixed], heldout=0.0)
    split = Shards.open(tmp_path)
    assert np.diff(split.sentence_offsets).min() > 0 and np.diff(split.document_offsets).min() > 0
    assert texts_of(split)[-1] == [documents[0].sentences[0]]
    assert report["documents"]["empty, left out"] == 2


def test_a_script_that_turns_into_unknown_pieces_stops_preparation_by_name(tmp_path):
    documents = corpus(40) + [Document(0, 0, ["สวัสดีชาวโลก"])] * 20
    tokenizer = train(s for d in corpus() for s in d.sentences)
    with pytest.raises(UserError, match=r"Thai: \d+ of \d+ pieces are \[UNK\].*สวัสดีชาวโลก"):
        run(tmp_path / "p", documents, lambda texts: tokenizer)
    assert not (tmp_path / "p").exists()
    report = run(tmp_path / "p", documents, lambda texts: tokenizer, max_unknown_rate=1.0)
    assert report["unknown pieces by script"]["Thai"]["rate"] == 1.0
    assert report["unknown pieces"]["unknown"] == 20
    assert "สวัสดีชาวโลก" in (tmp_path / "p" / "report.txt").read_text(encoding="utf-8")


def test_a_hopeless_script_stops_preparation_early(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "HOPELESS_MIN_PIECES", 50)
    read = []

    def documents():
        for i in range(2000):
            read.append(i)
            yield Document(0, i, ["ภาษาไทย " * 10 + str(i)])

    tokenizer = train(s for d in corpus() for s in d.sentences)
    with pytest.raises(UserError, match="Thai"):
        prepare.prepare_documents(
            documents, ["a"], lambda texts: tokenizer, tmp_path / "p", made_from={}, shard_mb=0.001, workers=1
        )
    assert len(read) < 100 and not (tmp_path / "p").exists()


def test_a_full_disk_is_said_clearly_and_finished_shards_stay(tmp_path, monkeypatch, encoded):
    run(tmp_path / "straight", corpus())
    real, room = np.save, [15]  # files that fit: three shards of five files

    def save(path, array, **kwargs):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        room[0] -= 1
        real(path, array, **kwargs)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(UserError, match=r"cannot be written.*No space left.*MB free.*finished shards are kept"):
        run(tmp_path / "p", corpus())
    finished = len(list((tmp_path / "p").glob("chunks/chunk-*.json")))
    assert finished >= 1 and not list((tmp_path / "p").glob(".train*"))
    room[0] = 10**6
    encoded.clear()
    run(tmp_path / "p", corpus())
    assert min(encoded) == finished
    assert contents(tmp_path / "p") == contents(tmp_path / "straight")


def test_an_error_of_the_input_passes_and_work_is_kept(tmp_path, encoded):
    def broken():
        yield from corpus()[:30]
        raise UserError("a.txt: line 3 is not UTF-8")

    tokenizer = train(s for d in corpus() for s in d.sentences)
    settings = {"made_from": {"shard_mb": 0.001, "heldout": 0.2}, "heldout": 0.2, "shard_mb": 0.001, "workers": 1}
    with pytest.raises(UserError, match="line 3 is not UTF-8"):
        prepare.prepare_documents(broken, ["a.txt", "b.txt"], lambda texts: tokenizer, tmp_path, **settings)
    done = len(encoded)
    encoded.clear()
    run(tmp_path, corpus(), lambda texts: tokenizer)
    assert done >= 1 and min(encoded) == done


@pytest.fixture
def finished(tmp_path):
    """A recipe of 40 documents, and a function that prepares it with other settings."""
    text = "\n\n".join("\n".join(d.sentences) for d in corpus(40))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "r.toml").write_text('heldout = 0.2\n[[sources]]\nfiles = ["a.txt"]\n')

    def again(tokenizer=None, workers=1, **settings):
        tokenizer = WordPieceConfig(**{"vocab_size": 120, **(tokenizer or {})})
        recipe = corpora.load_recipe(tmp_path / "r.toml")
        return prepare.prepare(recipe, tokenizer, tmp_path / "p", workers=workers, **settings)

    again()
    return again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": {"vocab_size": 6}}, "vocab_size 6 is too small"),
        ({"tokenizer": {"unused_tokens": 200}}, "205 control, unused and keep tokens leave no room"),
        ({"tokenizer": {"pre_splitter": "foo"}}, "pre_splitter .*foo.* is not known"),
        ({"tokenizer": {"keep_tokens": ("[MASK]",)}}, r"\[MASK\]"),
        ({"tokenizer": {"vocab_file": "{0}/five.txt"}}, r"five\.txt has control and unused tokens only"),
        ({"tokenizer": {"vocab_file": "{0}/four.txt"}}, r"the vocabulary has no \[MASK\]"),
        ({"tokenizer": {"vocab_file": "{0}/none.txt"}}, "cannot be read"),
        ({"max_unknown_rate": -0.1}, "max_unknown_rate is -0.1; it must be between 0 and 1"),
        ({"shard_mb": float("nan")}, "shard_mb is nan; it must be a number above 0"),
        ({"workers": 0}, "workers is 0; it must be at least 1"),
    ],
)
def test_a_mistake_in_the_settings_leaves_what_was_prepared(tmp_path, finished, settings, message):
    (tmp_path / "five.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    (tmp_path / "four.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    before = contents(tmp_path / "p")
    if name := settings.get("tokenizer", {}).get("vocab_file"):
        settings = {"tokenizer": {"vocab_file": name.format(tmp_path)}}
    with pytest.raises(UserError, match=message):
        finished(**settings)
    assert contents(tmp_path / "p") == before


def test_a_finished_folder_says_what_is_asked_otherwise(tmp_path, finished):
    """Without reading any text: it may have gone, and so may a vocabulary file."""
    manifest = shards.read_manifest(tmp_path / "p")
    asked, config = prepare.asked_otherwise, WordPieceConfig(vocab_size=120)
    recipe = corpora.load_recipe(tmp_path / "r.toml")
    (tmp_path / "a.txt").write_text("")
    assert asked(manifest, config, recipe) == asked(manifest, config) == asked({"made_from": {}}, config) == []
    assert asked(manifest, WordPieceConfig(vocab_size=9), recipe) == [
        "tokenizer.vocab_size: 120 in the prepared data, 9 now"
    ]
    (line,) = asked(manifest, dataclasses.replace(config, vocab_file="v.txt"))
    assert line == 'tokenizer.vocab_file: "" in the prepared data, "another" now'
    spaced = dataclasses.replace(recipe, pre_splitter="characters", heldout=0.5)
    assert [line.split(":")[0] for line in asked(manifest, config, spaced)] == [
        "recipe.heldout", "recipe.pre_splitter", "tokenizer.pre_splitter"
    ]  # fmt: skip
    vocab = tmp_path / "v.txt"
    vocab.write_bytes((tmp_path / "p" / "tokenizer" / "vocab.txt").read_bytes())
    (tmp_path / "a.txt").write_text("\n\n".join("\n".join(d.sentences) for d in corpus(40)))
    finished({"vocab_file": str(vocab)})
    manifest, own = shards.read_manifest(tmp_path / "p"), dataclasses.replace(config, vocab_file=str(vocab))
    assert asked(manifest, own, recipe) == []
    vocab.write_text(vocab.read_text() + "zz\n")
    assert [line.split(":")[0] for line in asked(manifest, own)] == ["tokenizer.vocab_file"]
    vocab.unlink()
    assert asked(manifest, own) == []


def test_a_digest_that_is_wrong_leaves_what_was_prepared(tmp_path, finished):
    before = contents(tmp_path / "p")
    with (tmp_path / "r.toml").open("a") as f:
        f.write('[sources.sha256]\n"a.txt" = "00"\n')
    with pytest.raises(UserError, match=r"SHA-256 .* is not the recipe's 00"):
        finished()
    assert contents(tmp_path / "p") == before


@pytest.mark.parametrize(("added", "settings"), [(b"\n\n\xff\n", {}), (b"\n", {"min_documents": 100})])
def test_what_is_found_later_says_how_to_have_the_earlier_data_again(tmp_path, finished, added, settings, encoded):
    """Finished shards are not thrown away: they serve again."""
    before, old, made = contents(tmp_path / "p"), (tmp_path / "a.txt").read_bytes(), len(encoded)
    (tmp_path / "a.txt").write_bytes(old + added)
    with pytest.raises(UserError, match=r"what was prepared before in .* is not whole now: mend what is wrong, or"):
        finished(**settings)
    (tmp_path / "a.txt").write_bytes(old)
    finished()
    assert contents(tmp_path / "p") == before and len(encoded) == made


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds files that `prepare` did not make \(thesis.txt\)"):
        run(tmp_path, corpus())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_two_preparations_do_not_share_a_folder(tmp_path):
    def inner():
        with pytest.raises(UserError, match="another `prepare` is at work"):
            run(tmp_path / "p", corpus())
        return iter(corpus())

    prepare.prepare_documents(inner, ["a.txt", "b.txt"], train, tmp_path / "p", made_from={}, workers=1)
    assert not (tmp_path / "p" / ".lock").exists()


def test_given_word_boundaries_are_kept_beside_the_ids(tmp_path):
    text = [["我 喜欢 中国 。"], ["他们 去 北京"]]
    plain = ["hello there"]
    documents = [Document(0, 0, text[0]), Document(0, 0, text[1]), Document(1, 0, plain)]
    run(tmp_path, documents, heldout=0.0, word_sources=[True, False], max_unknown_rate=1.0)
    split = Shards.open(tmp_path)
    marks = split.gather_words(np.array([0]), np.array([split.num_tokens])).astype(int).tolist()
    ids = split.gather(np.array([0]), np.array([split.num_tokens]))
    assert ids.tolist() == [i for d in documents for s in d.sentences for i in split.tokenizer.encode(s)]
    chinese = [1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0]
    assert marks[: len(chinese)] == chinese
    assert marks[len(chinese) :] == (~split.tokenizer.is_continuation_V[ids[len(chinese) :]]).astype(int).tolist()


def test_progress_counts_up_to_the_whole_corpus(tmp_path):
    states = []
    run(tmp_path, corpus(), progress=states.append)
    encoding = [s for s in states if s.stage == "encoding"]
    size = sum(len(" ".join(d.sentences).encode()) for d in corpus())
    assert states[0].stage == "vocabulary"
    assert [s.chunks for s in encoding] == list(range(1, len(encoding) + 1))
    assert (encoding[-1].documents, encoding[-1].text_bytes, encoding[-1].total_bytes) == (60, size, size)


def test_a_task_adds_a_section_to_the_report_and_only_it_is_made_anew(tmp_path, encoded):
    def describe(split):
        return {"share_masked": 0.15, "documents": split.num_documents, "length_histogram": {"1-8": 3, "9-16": 1}}

    first = run(tmp_path, corpus(), describe=describe, described_with={"seq": 128})
    assert first["examples"]["share_masked"] == 0.15
    assert first["examples"]["documents"] == first["documents"]["train"]
    text = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert re.search(r"share_masked +15\.00%", text) and re.search(r"9-16 +1 +25\.0%  #+", text)
    encoded.clear()
    second = run(tmp_path, corpus(), describe=lambda s: {"share_masked": 0.2}, described_with={"seq": 128})
    third = run(tmp_path, corpus(), describe=lambda s: {"share_masked": 0.2}, described_with={"seq": 512})
    assert second == first
    assert third["examples"] == {"share_masked": 0.2}
    assert all(third[key] == first[key] for key in first if key not in ("examples", "described_with"))
    assert encoded == [] and json.loads((tmp_path / "report.json").read_text()) == third


def test_what_readers_keep_beside_the_shards_is_no_obstacle(tmp_path):
    (tmp_path / "p" / "plans").mkdir(parents=True)
    with pytest.raises(UserError, match="the corpus is empty"):
        run(tmp_path / "p", [], made_from={"documents": 0})
    assert not (tmp_path / "p").exists()
    (tmp_path / "p" / "plans").mkdir(parents=True)
    run(tmp_path / "p", corpus())
    assert (tmp_path / "p" / "manifest.json").exists()


def test_the_report_says_what_is_in_the_shards(tmp_path):
    report = run(tmp_path, corpus())
    split, heldout = Shards.open(tmp_path), Shards.open(tmp_path, "heldout")
    assert report["tokens"] == {"train": split.num_tokens, "heldout": heldout.num_tokens}
    assert report["sentences"] == {"train": split.num_sentences, "heldout": heldout.num_sentences}
    assert report["unknown pieces"]["pieces"] == split.num_tokens + heldout.num_tokens
    for key in ("documents", "sentences", "tokens"):
        total = sum(source[key] for source in report["sources"].values())
        assert total == report[key]["train"] + report[key]["heldout"]
    assert list(report["sources"]) == ["a.txt", "b.txt"]
    lengths = report["sentence lengths (train, pieces)"]
    assert sum(lengths["counts"].values()) == split.num_sentences
    assert lengths["longest"] == np.diff(split.sentence_offsets).max()
    text = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert f"{split.num_tokens:,}" in text and re.search(r"a\.txt +\d+ +\d+ +[\d,]+", text)


def test_lengths_are_counted_in_ranges_that_double():
    got = data_report.histogram(np.array([1, 2, 3, 4, 7, 8, 1024]))
    assert got["counts"] == {"1-1": 1, "2-3": 2, "4-7": 2, "8-15": 1, "1024-2047": 1}
    assert got["longest"] == 1024


@pytest.mark.slow
def test_a_wider_vocabulary_gives_wider_ids(tmp_path):
    pieces = [f"w{i}" for i in range(66_000)]
    tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces], WordPieceConfig())
    run(tmp_path, [Document(0, 0, ["w1 w65999"]), Document(0, 0, ["w2"])], lambda texts: tokenizer, heldout=0.0)
    split = Shards.open(tmp_path)
    assert split.gather(np.array([0]), np.array([3])).tolist() == [6, 66_004, 7]
    assert np.load(tmp_path / "train-00000" / "tokens.npy").dtype == np.uint32


MEMORY = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import test_transformer_prepare as t

    def documents():
        sentence = "the quick brown fox jumps over the lazy dog number "
        for i in range({megabytes} * 1000):
            yield t.Document(0, i, [sentence + str((i + j) % 5000) for j in range(18)])

    if __name__ == "__main__":
        tokenizer = t.train("the quick brown fox jumps over the lazy dog number 0123456789 9876543210".split() * 3)
        t.prepare.prepare_documents(
            documents, ["a"], lambda texts: tokenizer, Path({out!r}), shard_mb=0.5, workers=2, made_from={{}}
        )
        # Not RUSAGE_SELF, which starts with the peak of the process that started this one.
        own = next(int(s.split()[1]) for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
        print(own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """C035: 3 MB and 12 MB of text in chunks of 0.5 MB: no process grows with the corpus, or beyond 200 MB."""
    peaks = {}
    for megabytes in (3, 12):
        script = tmp_path / "script.py"
        out = tmp_path / str(megabytes)
        code = MEMORY.format(tests=str(ROOT / "tests"), out=str(out), megabytes=megabytes)
        script.write_text(textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peaks[megabytes] = [float(x) for x in done.stdout.split()]
    for small, large in zip(peaks[3], peaks[12], strict=True):
        assert large < small + 10, f"{peaks}: megabytes resident, of the reader and of the largest worker"
        assert large < 200, peaks
