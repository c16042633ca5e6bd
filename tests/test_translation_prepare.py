"""Preparation of pairs: what comes out is what went in, whatever the workers and kills; and what the report says."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from transformer_jax import chunks, pieces, shards
from transformer_jax import lines as text_lines
from transformer_jax.config import ConfigError, UserError
from transformer_jax.shards import Shards
from transformer_jax.tokenizer import CONTROL_TOKENS, WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.translation import data, pairs, prepare
from transformer_jax.translation.config import BatchesConfig, PairsConfig, SentencePieceConfig, TranslationConfig
from transformer_jax.translation.vocabularies import Vocabularies

ROOT = Path(__file__).parents[1]


def rows(count=120, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(80)]

    def sentence():
        return " ".join(rng.choices(words, k=rng.randint(3, 9)))

    return [(sentence(), sentence().upper()) for _ in range(count)]


def write(folder, **splits):
    """A recipe with one file of pairs a split."""
    folder.mkdir(exist_ok=True)
    text = 'name = "tiny"\nsource_language = "en"\ntarget_language = "de"\n'
    for use, own in splits.items():
        (folder / f"{use}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in own), encoding="utf-8")
        text += f'[[sources]]\nformat = "tsv"\nfiles = ["{use}.tsv"]\nuse = "{use}"\n'
    (folder / "r.toml").write_text(text)
    return folder / "r.toml"


def config(recipe, out, data_=None, tokenizer=None, examples=None):
    return TranslationConfig(
        data=PairsConfig(recipe=str(recipe), prepared=str(out), **{"shard_mb": 0.001, **(data_ or {})}),
        tokenizer=SentencePieceConfig(**{"vocab_size": 100, **(tokenizer or {})}),
        model=dataclasses.replace(TranslationConfig().model, embeddings="untied"),
        examples=BatchesConfig(**(examples or {})),
    )


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def pairs_of(split):
    """What the shards hold, decoded."""
    vocabularies = data.load_vocabularies(split)
    ids = np.split(
        split.gather(split.sentence_offsets[:-1], np.diff(split.sentence_offsets)), split.sentence_offsets[1:-1]
    )
    assert split.document_offsets.tolist() == list(range(0, len(ids) + 1, 2))
    sides = vocabularies.source.decode, vocabularies.target.decode
    return [(sides[0](a), sides[1](b)) for a, b in zip(ids[::2], ids[1::2], strict=True)]


TRAIN, VALIDATION, TEST = rows(), rows(7, seed=1), rows(9, seed=2)


@pytest.fixture
def recipe(tmp_path):
    return write(tmp_path / "texts", train=TRAIN, validation=VALIDATION, test=TEST)


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


@pytest.mark.parametrize("joint", [True, False])
def test_every_pair_comes_out_once_in_order_and_in_its_split(recipe, tmp_path, joint):
    report = prepare.prepare(config(recipe, tmp_path / "p", tokenizer={"joint": joint}), workers=1)
    for split, own in (("train", TRAIN), ("validation", VALIDATION), ("test", TEST)):
        found = Shards.open(tmp_path / "p", split, check="digests")
        assert pairs_of(found) == own
        assert found.has_texts == (split != "train")
        assert report["pairs"][split] == len(own)
        if found.has_texts:
            assert data.pair_texts(found, range(len(own))) == own
    with pytest.raises(UserError, match="texts of the split `train` were not kept"):
        data.pair_texts(Shards.open(tmp_path / "p"), [0])
    assert len(found.manifest["splits"]["train"]) > 3
    vocabularies = data.load_vocabularies(found)
    assert vocabularies.joint == joint == (vocabularies.source.vocab == vocabularies.target.vocab)
    assert shards.verify(tmp_path / "p") == []


def test_text_is_kept_where_it_will_be_cut_anew(recipe, tmp_path):
    prepare.prepare(config(recipe, tmp_path / "p"), workers=1)
    sampled = BatchesConfig(subword_sampling=0.1)
    with pytest.raises(UserError, match=r"subword_sampling is 0\.1, but .* does not keep the text of training pairs"):
        data.TrainingData(Shards.open(tmp_path / "p"), sampled, seed=0)
    said = []
    prepare.prepare(config(recipe, tmp_path / "p", examples={"subword_sampling": 0.1}), workers=1, say=said.append)
    assert said[0].startswith('texts was ["validation", "test"]')
    assert data.pair_texts(Shards.open(tmp_path / "p"), [5, 0]) == [TRAIN[5], TRAIN[0]]


@pytest.mark.slow
def test_the_bytes_are_the_same_for_any_number_of_workers(recipe, tmp_path):
    for workers in (1, 2, 3):
        settings = config(recipe, tmp_path / f"w{workers}", tokenizer={"model": "unigram", "vocab_size": 60})
        prepare.prepare(settings, workers=workers)
    first = contents(tmp_path / "w1")
    assert {"manifest.json", "report.json", "report.txt", "chunks/survey.npy", "tokenizer/joint.json"} <= set(first)
    assert contents(tmp_path / "w2") == contents(tmp_path / "w3") == first


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import test_translation_prepare as t

    original = t.pairs.read

    def slow(*arguments):
        calls.append(1)
        for i, pair in enumerate(original(*arguments)):
            if len(calls) == 3 and i == 80:  # the third reading is that of the encoder
                time.sleep(120)
            yield pair

    if __name__ == "__main__":
        calls = []
        t.pairs.read = slow
        t.prepare.prepare(t.config({recipe!r}, {out!r}), workers=2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills a process")
def test_after_a_kill_work_goes_on_and_the_bytes_are_those_of_an_unbroken_run(recipe, tmp_path, encoded, monkeypatch):
    prepare.prepare(config(recipe, tmp_path / "straight"), workers=1)
    total = len(encoded)
    out = tmp_path / "killed"
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED.format(tests=str(ROOT / "tests"), out=str(out), recipe=str(recipe))))
    process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        give_up = time.monotonic() + 60
        while len(list(out.glob("chunks/chunk-*.json"))) < 3:
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(UserError, match="not a finished prepared folder"):
        Shards.open(out)
    readings = []
    original = pairs.read
    monkeypatch.setattr(pairs, "read", lambda *a: readings.append(1) or original(*a))
    time.sleep(1.0)  # the workers of the killed process end by themselves
    kept = len(list(out.glob("chunks/chunk-*.json")))
    encoded.clear()
    messages = []
    prepare.prepare(config(recipe, out), workers=1, say=messages.append)
    assert len(encoded) == total - kept and f"{kept} of {total} shards were kept from an earlier run" in messages
    assert len(readings) == 1, "survey and vocabulary were kept too"
    assert contents(out) == contents(tmp_path / "straight")


def test_a_second_run_does_nothing_and_changed_limits_make_it_anew(recipe, tmp_path, encoded):
    messages = []
    first = prepare.prepare(config(recipe, tmp_path / "p"), workers=1)
    encoded.clear()
    assert prepare.prepare(config(recipe, tmp_path / "p"), workers=1, say=messages.append) == first
    assert messages == [f"{tmp_path / 'p'} is up to date"] and encoded == []
    messages.clear()
    changed = config(recipe, tmp_path / "p", data_={"max_words": 5})
    report = prepare.prepare(changed, workers=1, say=messages.append)
    assert messages[0] == "cleaning.max_words was 250 and is 5 now: what depends on it is made anew"
    assert 0 < report["pairs"]["train"] < 120 and report["pairs"]["test"] == 9
    prepare.prepare(
        dataclasses.replace(changed, data=dataclasses.replace(changed.data, prepared=str(tmp_path / "q"))), workers=1
    )
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


def test_a_finished_folder_says_what_is_asked_otherwise(recipe, tmp_path):
    asked = config(recipe, tmp_path / "p")
    prepare.prepare(asked, workers=1)
    manifest = shards.read_manifest(tmp_path / "p")
    found = pairs.load_recipe(recipe)
    assert prepare.asked_otherwise(manifest, asked, found) == []
    other = config(recipe, tmp_path / "p", data_={"max_ratio": 2.0, "shard_mb": 1.0}, tokenizer={"model": "unigram"})
    assert prepare.asked_otherwise(manifest, other, None) == [
        "cleaning.max_ratio: 9.0 in the prepared data, 2.0 now",
        'tokenizer.model: "bpe" in the prepared data, "unigram" now',
    ]
    (changed,) = prepare.asked_otherwise(manifest, asked, dataclasses.replace(found, target_language="fr"))
    assert changed == 'recipe.target_language: "de" in the prepared data, "fr" now'


def test_progress_is_told_in_each_stage(recipe, tmp_path):
    told = []
    prepare.prepare(config(recipe, tmp_path / "p"), workers=1, progress=told.append)
    assert list(dict.fromkeys(state.stage for state in told)) == ["survey", "vocabulary", "encoding"]
    size = sum(len(a) + len(b) for a, b in TRAIN + VALIDATION + TEST)
    for stage in ("survey", "encoding"):
        last = [state for state in told if state.stage == stage][-1]
        assert last.documents == 136 and size <= last.text_bytes <= size + 136


def test_the_report_counts_reasons_tokens_and_unknown_pieces(tmp_path):
    bad = [("", "x"), TRAIN[0], ("same text", "same text"), (TEST[0][0], "neu " * 3), ("a " * 300, "b " * 300)]
    recipe = write(tmp_path / "texts", train=[*TRAIN, *bad, ("a b", "漢 A")], validation=VALIDATION, test=TEST)
    settings = config(recipe, tmp_path / "p", data_={"max_unknown_rate": 1.0}, tokenizer={"character_coverage": 0.999})
    report = prepare.prepare(settings, workers=1)
    assert report["pairs"] == {"read": 142, "train": 121, "validation": 7, "test": 9, "left out": 5}
    assert report["left out, by reason"] == {
        "empty side": 1, "identical sides": 1, "too many words": 1, "duplicate": 1, "side in the test set": 1,
        "no pieces on a side": 0,
    }  # fmt: skip
    assert report["training pairs left out because they are in"]["side in the test set"] == 1
    assert report["unknown pieces"]["target"]["unknown"] == 1 and report["unknown pieces"]["source"]["unknown"] == 0
    train = Shards.open(tmp_path / "p")
    lengths = np.diff(train.sentence_offsets).reshape(-1, 2).sum(axis=0)
    assert report["tokens"]["train"] == {"source": lengths[0], "target": lengths[1]}
    assert report["source lengths (train, pieces)"]["counts"] and 0.5 < report["examples"]["source fill"] <= 1
    text = (tmp_path / "p" / "report.txt").read_text()
    assert "side in the test set" in text and "target fill" in text
    assert json.loads((tmp_path / "p" / "report.json").read_text()) == json.loads(json.dumps(report))


def test_too_many_unknown_pieces_stop_preparation_by_name(tmp_path):
    odd = [(f"{a} б", b) for a, b in TRAIN]
    recipe = write(tmp_path / "texts", train=[*TRAIN[:5], *odd], test=TEST)
    model = pieces.train([s for pair in TRAIN for s in pair], vocab_size=90)
    (tmp_path / "own.spm").write_bytes(model.model)
    own = {"source_model": str(tmp_path / "own.spm")}
    with pytest.raises(UserError, match=r"Cyrillic: 120 of 120 pieces are .*\n.*tokenizer\.byte_fallback"):
        prepare.prepare(config(recipe, tmp_path / "p", tokenizer=own), workers=1)
    assert not (tmp_path / "p" / "manifest.json").exists()


def test_shares_make_splits_that_share_no_sentence(tmp_path):
    folder = tmp_path / "texts"
    recipe = write(folder, train=rows(200))
    recipe.write_text(recipe.read_text().replace('use = "train"', "").replace("[[", "validation = 0.1\ntest = 0.2\n[["))
    report = prepare.prepare(config(recipe, tmp_path / "p"), workers=1)
    splits = {s: pairs_of(Shards.open(tmp_path / "p", s)) for s in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == 200 and all(report["pairs"][s] == len(v) for s, v in splits.items())
    sides = {s: {side for pair in own for side in pair} for s, own in splits.items()}
    assert not sides["train"] & (sides["validation"] | sides["test"])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": []}, "0 training pairs are left: the files are empty"),
        ({"train": [("", "")] * 3}, "0 training pairs are left"),
        ({"train": TRAIN, "test": [("", "x")]}, "the test split has 0 pairs"),
    ],
)
def test_nothing_left_is_an_error_that_leaves_nothing(tmp_path, splits, message):
    """C089, C111: an empty result is an error, in words."""
    recipe = write(tmp_path / "texts", **splits)
    with pytest.raises(UserError, match=rf"{message}|no text to learn pieces from"):
        prepare.prepare(config(recipe, tmp_path / "p"), workers=1)
    assert not (tmp_path / "p" / "manifest.json").exists()


def test_what_is_read_and_left_out_is_told_with_reasons(tmp_path):
    """A wrong column leaves nothing, and the reason is in the message that goes before the error."""
    (tmp_path / "a.tsv").write_text("one\teins\ntwo\tzwei\n\n")
    recipe = tmp_path / "a.toml"
    recipe.write_text(
        'source_language = "en"\ntarget_language = "de"\n[[sources]]\nformat = "tsv"\nfiles = ["a.tsv"]\n'
        "target_column = 3\n"
    )
    said = []
    with pytest.raises(UserError, match=r"0 training pairs are left|no text to learn pieces from"):
        prepare.prepare(config(recipe, tmp_path / "p"), workers=1, say=said.append)
    assert "2 pairs read, 0 kept; left out: 2 line without both sides" in said


def test_mistakes_in_the_vocabularys_settings_are_early(recipe, tmp_path):
    model = pieces.train([s for pair in TRAIN for s in pair], vocab_size=90)
    own = tmp_path / "own.spm"
    own.write_bytes(model.model)
    (tmp_path / "no.spm").write_bytes(b"no model")
    Vocabularies(model, model).save(tmp_path / "run" / "tokenizer")
    for settings, message in [
        ({"source_model": str(own), "joint": False}, "target_model is needed too"),
        ({"target_model": str(own)}, "without tokenizer.source_model"),
        ({"source_model": str(own), "target_model": str(own)}, "joint is true; set it to false"),
        ({"source_model": str(tmp_path / "nowhere.spm")}, r"nowhere\.spm cannot be read"),
        ({"source_model": str(tmp_path / "no.spm")}, r"no\.spm: not a SentencePiece model"),
        ({"source_wordpiece": str(tmp_path)}, "set tokenizer.joint to false"),
        ({"vocabularies": str(tmp_path / "none")}, "none: no such folder; name a run folder"),
        ({"vocabularies": str(tmp_path), "source_model": str(own)}, r"take out tokenizer\.source_model"),
        ({"vocabularies": str(tmp_path / "run"), "joint": False}, "one list of pieces; set tokenizer.joint to true"),
        ({"source_wordpiece": str(tmp_path), "joint": False}, r"no vocab\.txt or tokenizer\.json"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare.prepare(config(recipe, tmp_path / "p", tokenizer=settings), workers=1)
        assert not (tmp_path / "p").exists()
    with pytest.raises(ConfigError, match=r"data\.recipe is not set"):
        prepare.prepare(config("", tmp_path / "p"))


def test_own_models_and_berts_wordpiece_make_the_ids(recipe, tmp_path):
    model = pieces.train([b for _, b in TRAIN], vocab_size=90)
    (tmp_path / "own.spm").write_bytes(model.model)
    letters = sorted("abcdefghij")
    vocab = [*CONTROL_TOKENS, *letters, *(f"##{c}" for c in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    settings = {
        "source_wordpiece": str(tmp_path / "vocab.txt"),
        "target_model": str(tmp_path / "own.spm"),
        "joint": False,
    }
    prepare.prepare(config(recipe, tmp_path / "p", tokenizer=settings), workers=1)
    train = Shards.open(tmp_path / "p")
    vocabularies = data.load_vocabularies(train)
    assert isinstance(vocabularies.source, WordPiece) and vocabularies.target.vocab == model.vocab
    assert vocabularies.source_start == (2,) and vocabularies.source_end == (3,)
    batch = data.TrainingData(train, BatchesConfig(pack=False), seed=0).batch(0, 4)
    for row, length in zip(batch["input_ids"], (batch["sequence_ids"] > 0).sum(1), strict=True):
        assert row[0] == vocabularies.source.cls_id and row[length - 1] == vocabularies.source.sep_id
    again = Vocabularies.from_files(vocabularies.files())
    assert again.digest == vocabularies.digest and again.source.vocab == vocab


def test_the_vocabularies_of_a_run_are_taken_as_they_are(recipe, tmp_path):
    """What training of that run's model on other pairs needs; data from before the key was there stays as it is."""
    one = pieces.train([side for pair in TRAIN for side in pair], vocab_size=90)
    own = Vocabularies(one, one)
    own.save(tmp_path / "run" / "tokenizer")
    settings = config(recipe, tmp_path / "p", tokenizer={"vocabularies": str(tmp_path / "run")})
    prepare.prepare(settings, workers=1)
    train = Shards.open(tmp_path / "p")
    assert data.load_vocabularies(train).digest == own.digest
    assert prepare.asked_otherwise(train.manifest, settings, None) == []
    (line,) = prepare.asked_otherwise(train.manifest, config(recipe, tmp_path / "p"), None)
    assert line.startswith("tokenizer.vocabularies: ")
    prepare.prepare(config(recipe, tmp_path / "old"), workers=1)
    assert "vocabularies" not in Shards.open(tmp_path / "old").manifest["made_from"]["tokenizer"]


def test_a_folder_of_documents_is_not_taken_for_pairs(tmp_path):
    tokenizer = WordPiece([*CONTROL_TOKENS, "a"], WordPieceConfig())
    shards.write_prepared(tmp_path / "p", tokenizer, {"train": [[[5], [5]]]})
    with pytest.raises(UserError, match="holds no pairs"):
        data.TrainingData(Shards.open(tmp_path / "p"), BatchesConfig(), seed=0)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pairs(tmp_path, monkeypatch):
    """C035: four times the pairs may cost a few dozen bytes a pair more, and no text."""
    model = pieces.train([s for pair in TRAIN for s in pair], vocab_size=90)
    (tmp_path / "own.spm").write_bytes(model.model)
    own = {"source_model": str(tmp_path / "own.spm")}
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 1 << 16)
    peaks = []
    for count in (2_000, 8_000):
        recipe = write(tmp_path / f"texts{count}", train=rows(count))
        settings = config(recipe, tmp_path / f"p{count}", data_={"shard_mb": 0.05}, tokenizer=own)
        tracemalloc.start()
        prepare.prepare(settings, workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 6_000 * 200
