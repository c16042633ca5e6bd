"""Lines in and out: one for one, in order, as they come, whatever is in them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import tiny_translation_run as tiny
from jax.sharding import NamedSharding, PartitionSpec
from tiny_translation import QUICK

from transformer_jax import pieces, sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.translation import batching, model, stream
from transformer_jax.translation import translate as translating
from transformer_jax.translation.decode import DecodeSettings
from transformer_jax.translation.translate import TranslateSettings, Translation, Translator, at_hand, translate
from transformer_jax.translation.vocabularies import Vocabularies

VOCABULARIES = tiny.vocabularies()
CONFIG = dataclasses.replace(
    tiny.MODEL,
    source_vocab_size=VOCABULARIES.source.vocab_size,
    target_vocab_size=VOCABULARIES.target.vocab_size,
)
SHORT = DecodeSettings(beam_size=2, min_length=2, max_extra=2)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """Programs that are compiled fast and run slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "jit", functools.partial(jax.jit, compiler_options=QUICK))
        batching.programs.cache_clear()
        yield
    batching.programs.cache_clear()


@functools.cache
def params() -> Any:
    leaves, tree = jax.tree.flatten(model.abstract_params(CONFIG))
    rng = np.random.default_rng(0)
    found = jax.tree.unflatten(tree, [rng.normal(0, 0.5, x.shape).astype(np.float32) for x in leaves])
    found["embeddings"]["target"]["embedding"][CONFIG.target_vocab_size - 1 :] = 0
    return found


def run(lines: Sequence[str], settings: DecodeSettings = SHORT, **others: Any) -> list[Translation]:
    others = {"batch_size": 4, "max_source_length": 16} | others
    return translate(CONFIG, params(), VOCABULARIES, lines, TranslateSettings(settings, **others))


def text(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(tiny.WORDS[i] for i in rng.integers(0, len(tiny.WORDS), words))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_blank_lines_stay_blank_and_in_place(batch_size: int) -> None:
    """C017: seven lines with blank ones at 1, 4 and 7, one of three spaces, no final newline."""
    given = "\n".join(["", text(1, 3), text(2, 2), "   ", text(3, 1), text(4, 4), ""]).encode()
    source = io.BytesIO(given + b"\xe2\x80\x83")  # the last line holds an em space, so that it is one
    translator = Translator(CONFIG, params(), VOCABULARIES, TranslateSettings(SHORT, batch_size, 16))
    found = list(translator.stream(stream.from_stream(source)))
    assert [t.line for t in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [bool(t.text) for t in found] == [False, True, True, False, True, True, False]


@pytest.mark.slow
def test_a_thousand_lines_some_very_odd_give_a_thousand() -> None:
    """C028: the line that was cut is named; no other is lost for it."""
    lines = [text(i, 1 + i % 3) for i in range(1000)]
    lines[499] = text(7, 5000)
    lines[700] = "'" * 300
    lines[800] = "🦉"
    found = run(lines, batch_size=64, long_lines="cut")
    assert [t.line for t in found] == list(range(1, 1001))
    assert all(t.text for t in found[:499] + found[500:700])
    assert any("cut: it has" in note for note in found[499].notes)
    for odd in (700, 800):
        assert any("not in the vocabulary" in note for note in found[odd].notes)
    limit = "its translation was cut at the limit of its length"
    assert not any(n for i, t in enumerate(found) for n in t.notes if i not in (499, 700, 800) and n != limit)
    few = run([lines[3], lines[499], lines[998]], long_lines="cut")
    assert [t.text for t in few] == [found[i].text for i in (3, 499, 998)]


def test_a_long_line_is_split_and_put_together() -> None:
    """C028: no piece of it is lost, and its parts are translated as they would be by themselves."""
    long = text(5, 30)
    (found,) = run([long])
    assert f"split into {len(found.pieces)} parts" in found.notes[0] and len(found.pieces) > 2
    ids = [i for part in found.pieces for i in part[:-1]]
    assert ids == VOCABULARIES.source.encode(long)
    parts = run([VOCABULARIES.source.decode(part) for part in found.pieces])
    assert found.text == " ".join(t.text for t in parts if t.text)


def test_a_least_length_beyond_the_limit_is_noted() -> None:
    short, long, blank = run([text(3, 1), text(3, 4), ""], DecodeSettings(beam_size=2, min_length=7, max_extra=0))
    most = len(short.pieces[0])
    assert most < 7 <= len(long.pieces[0])
    assert short.notes[0] == f"min_length is 7, but its translation may have {most} pieces (max_extra, max_length)"
    assert len(long.hypotheses[0].ids) + 1 >= 7 and not any("min_length" in note for note in long.notes)
    assert not blank.notes


def test_a_tag_at_the_start_of_a_long_line_stands_before_each_of_its_parts() -> None:
    """As models for several languages need it."""
    words = [a for a, _ in tiny.pairs(60, 0)]
    both = pieces.train(words, vocab_size=CONFIG.source_vocab_size, user_symbols=["<2de>"])
    translator = Translator(CONFIG, params(), Vocabularies(both, both), TranslateSettings(SHORT, 4, 16))
    parts, notes = translator.sentences(f"<2de> {text(5, 30)}")
    assert len(parts) > 2 and all(len(part) <= 16 and part[0] == 2 and part[-1] == 0 for part in parts) and notes
    assert [i for part in parts for i in part[1:-1]] == both.encode(text(5, 30))
    parts, _ = translator.sentences("<2de>" * 40)
    assert [i for part in parts for i in part[:-1]] == [2] * 40


def test_splits_come_after_sentences_then_before_words() -> None:
    vocab = ["▁a", ".", "b"]
    assert translating.split([0, 2, 0, 1, 0, 2, 0], 5, vocab) == [[0, 2, 0, 1], [0, 2, 0]]
    assert translating.split([0, 2, 2, 0, 2, 2, 2], 4, vocab) == [[0, 2, 2], [0, 2, 2, 2]]
    assert translating.split([2, 2, 2, 2, 2], 2, vocab) == [[2, 2], [2, 2], [2]]
    assert translating.split([0, 0], 2, vocab) == [[0, 0]]


@pytest.mark.slow
def test_the_first_lines_come_out_before_the_last_is_read() -> None:
    given = iter(range(100_000))
    read = []

    def lines() -> Iterator[str]:
        for i in given:
            read.append(i)
            yield text(i, 2)

    translator = Translator(CONFIG, params(), VOCABULARIES, TranslateSettings(SHORT, 4, 16))
    results = translator.stream(at_hand(lines()))
    first = [next(results) for _ in range(5)]
    assert [t.line for t in first] == [1, 2, 3, 4, 5]
    assert len(read) <= 4 * translator.window
    more = [next(results) for _ in range(300)]
    assert more[-1].line == 305
    assert len(read) <= 305 + 4 * translator.window


def test_a_pipe_is_answered_line_by_line() -> None:
    """The other end writes a line only after it has read the translation of the one before; a blank one too."""
    down, up = os.pipe()
    translator = Translator(CONFIG, params(), VOCABULARIES, TranslateSettings(SHORT, 2, 16))
    answers: list[Translation] = []
    answered = threading.Semaphore(0)

    def serve() -> None:
        with os.fdopen(down, "rb") as source:
            for translation in translator.stream(stream.from_stream(source)):
                answers.append(translation)
                answered.release()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with os.fdopen(up, "wb") as pipe:
        for line in (text(1, 2), "", text(2, 2)):
            pipe.write(line.encode() + b"\n")
            pipe.flush()
            assert answered.acquire(timeout=120)
    server.join(120)
    assert [bool(a.text) for a in answers] == [True, False, True]


def test_lines_of_a_stream_are_what_ends_with_a_line_feed() -> None:
    data = b"\xef\xbb\xbfone\r\ntwo\rhalf\n\n" + "x\u2028y\x85z".encode() + b"\nb\xffd\nlast"
    lines = stream.from_stream(io.BytesIO(data))
    found: list[str] = []
    while (more := lines(True, 2)) is not None:
        assert len(more) <= 2
        found += more
    assert found == ["one", "two half", "", "x\u2028y\x85z", "b\ufffdd", "last"]


def test_a_line_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_BYTES", 8)
    lines = stream.from_stream(io.BytesIO(b"12345678901234567890\nnext\n1234567\n12345678\n"))
    found: list[str] = []
    while (more := lines(True, 10)) is not None:
        found += more
    assert found == ["12345678\ufffd", "next", "1234567", "12345678"]
    assert any("not UTF-8" in note for note in run(["ba\ufffd"])[0].notes)


def test_forms_of_the_output() -> None:
    settings = DecodeSettings(beam_size=3, n_best=2, min_length=1, max_extra=3)
    blank, found = run(["", text(3, 3)], settings)
    assert len(found.hypotheses) == 2
    best = found.hypotheses[0]
    assert stream.written(found, "text") == best.text + "\n"
    assert stream.written(found, "scores") == f"{best.score:.6f}\t{best.text}\n"
    rows = stream.written(found, "n-best").splitlines()
    assert [row.split(" ||| ")[0] for row in rows] == ["1", "1"]
    record = json.loads(stream.written(found, "json"))
    assert record["line"] == 2 and record["source"] == text(3, 3)
    assert [t["text"] for t in record["translations"]] == [h.text for h in found.hypotheses]
    assert json.loads(stream.written(blank, "json"))["translations"][0]["text"] == ""
    assert translating.one_line("a\nb\rc") == "a b c"


@pytest.mark.slow
def test_validation_stops_when_asked() -> None:
    made = dataclasses.replace(tiny.config(tiny.Path("unused")), model=CONFIG)
    lines = [text(i, 2) for i in range(20)]
    mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    placed = jax.device_put(params(), NamedSharding(mesh, PartitionSpec()))
    found = translating.validation_translate(made, VOCABULARIES, placed, lines, lambda: False)
    assert found is not None and len(found) == 20
    assert translating.validation_translate(made, VOCABULARIES, placed, lines, lambda: True) is None


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"batch_size": -1}, "batch_size is -1"),
        ({"max_source_length": 65}, "max_source_length is 65, but the model has 64 positions"),
        ({"max_source_length": 1}, "no piece of a line fits"),
    ],
)
def test_settings_that_cannot_work_are_refused(others: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(["a"], **others)


def test_one_line_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(UserError, match="list of lines"):
        run("a line")
