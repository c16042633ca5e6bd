"""Questions: answers are slices of the context, found in the window that has them, and no crash for want of one."""

import json
import time

import numpy as np
import pytest
from tiny_bert import tiny_tokenizer

from bert_jax.finetune import features, span
from bert_jax.finetune.encoded import Cut
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import InputsConfig, SpanConfig, TaskConfig
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

TOKENIZER = tiny_tokenizer()


def example(context: str, answer: str = "", question: str = "hello", **more: object) -> Example:
    answers = ((answer, context.index(answer)),) if answer else ()
    return Example("q", 5, question, context, answers=answers, is_impossible=not answer, **more)  # type: ignore[arg-type]


def encoded(*examples: Example, length: int = 16, tokenizer: WordPiece = TOKENIZER, **settings) -> features.Features:
    training = settings.pop("training", False)
    return span.encode(examples, tokenizer, InputsConfig(max_seq_length=length, **settings), True, training)


def oracle(found: features.Features, margin: float = 10.0) -> np.ndarray:
    """Logits that point at the targets."""
    rows, length = found.arrays["input_ids"].shape
    logits = np.zeros((rows, length, 2), np.float32)
    logits[np.arange(rows), found.arrays["start"], 0] = margin
    logits[np.arange(rows), found.arrays["end"], 1] = margin
    return logits


def test_an_answer_is_a_slice_of_the_context_as_it_was_given() -> None:
    """C034: CRLF, U+202F, NBSP, an emoji beyond the basic plane and a combining accent before and within the answer."""
    for answer in ("Zürich", "Zu\u0308rich", "the\u202fworld", "world\r\nthe", "深度", "👨\u200d👩 x"):
        context = f"Hello\r\nworld\u202f1\u00a0000 🎉 cafe\u0301\u200b: {answer}, and the end."
        one = example(context, answer)
        found = encoded(one, length=64)
        start, end = int(found.arrays["start"][0]), int(found.arrays["end"][0])
        assert found.offsets_NL2 is not None
        a, b = found.offsets_NL2[0, start, 0], found.offsets_NL2[0, end, 1]
        assert context[a:b] == answer
        (best,) = span.decode(oracle(found), found, [one], SpanConfig())
        assert (best.best_text, best.best.start, best.best.end) == (answer, a, b)


def test_the_answer_of_an_uncased_model_has_case_and_accents() -> None:
    """C101."""
    one = example("Sie wohnt in Zürich.", "Zürich")
    found = encoded(one, length=32)
    assert TOKENIZER.unk_id not in found.arrays["input_ids"]
    (best,) = span.decode(oracle(found), found, [one], SpanConfig())
    assert best.text(None) == "Zürich"
    unknown = example("Sie wohnt in Zürich!", "Zürich!")
    found = encoded(unknown, length=32, tokenizer=tiny_tokenizer(lowercase=False))
    assert tiny_tokenizer(lowercase=False).unk_id in found.arrays["input_ids"]
    (best,) = span.decode(oracle(found), found, [unknown], SpanConfig())
    assert best.text(None) == "Zürich!"


def test_an_answer_between_characters_without_spaces_takes_no_neighbour() -> None:
    """C034: Chinese, and a part of a word."""
    for context, answer in (("深度深,度.", ",度"), ("the hello, world", "hello"), ("xyzz", "yz")):
        one = example(context, answer)
        found = encoded(one)
        (best,) = span.decode(oracle(found), found, [one], SpanConfig())
        assert best.best_text == answer


def test_the_layout_is_question_then_context() -> None:
    """C105."""
    found = encoded(example("the world", "world", "hello ."), length=10)
    t = TOKENIZER
    expected = [t.cls_id, *t.encode("hello ."), t.sep_id, *t.encode("the world"), t.sep_id]
    assert found.arrays["input_ids"][0].tolist() == expected + [t.pad_id] * (10 - len(expected))
    assert found.arrays["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert (found.arrays["start"].tolist(), found.arrays["end"].tolist()) == ([5], [5])
    assert found.offsets_NL2 is not None
    assert found.offsets_NL2[0].tolist() == [[-1, -1]] * 4 + [[0, 3], [4, 9]] + [[-1, -1]] * 4


def test_windows_with_stride_have_the_answer_where_it_is_whole_and_cls_elsewhere() -> None:
    context = " ".join("abcdefghijklmnopqrstuvwxyz")
    one = example(context, "m n o")
    found = encoded(one, length=14, stride=4)  # room for 10 pieces
    assert found.offsets_NL2 is not None
    first = [int(row[3, 0]) // 2 for row in found.offsets_NL2]
    assert first == [0, 4, 8, 12, 16]
    places = list(zip(found.arrays["start"].tolist(), found.arrays["end"].tolist(), strict=True))
    assert places == [(0, 0), (0, 0), (3 + 4, 3 + 6), (3, 5), (0, 0)]
    half = encoded(one, length=14)
    assert half.offsets_NL2 is not None and [int(r[3, 0]) // 2 for r in half.offsets_NL2] == [0, 5, 10, 15, 16]
    assert found.report("x") == ["x: 1 of 1 examples are read in windows, 5 in all"]


def test_an_answer_in_any_window_is_found_and_counts_once() -> None:
    context = " ".join("abcdefghijklmnopqrstuvwxyz")
    for answer in ("a", "m n o", "j k", "z"):
        one = example(context, answer)
        found = encoded(one, length=14, stride=4)
        logits = oracle(found)
        logits[found.arrays["start"] == 0] = 0
        (best,) = span.decode(logits, found, [one], SpanConfig(n_best=5))
        assert best.best_text == answer
        texts = [c.text for c in best.candidates]
        assert len(texts) == len(set(texts)) == 5
        assert sum(c.probability for c in best.candidates) == pytest.approx(1)
        assert [c.score for c in best.candidates] == sorted((c.score for c in best.candidates), reverse=True)


def test_candidates_are_those_of_a_plain_search_over_all_spans() -> None:
    rng = np.random.default_rng(0)
    context = " ".join("abcdefghijklmnopqrs")
    one = example(context)
    found = encoded(one, length=14, stride=4)
    assert found.offsets_NL2 is not None and found.owner_NL is not None
    for longest in (1, 3, 30):
        logits = rng.normal(size=(*found.arrays["input_ids"].shape, 2)).astype(np.float32)
        (best,) = span.decode(logits, found, [one], SpanConfig(version_2=True, n_best=7, max_answer_length=longest))
        scores: dict[str, float] = {}
        for n, offsets in enumerate(found.offsets_NL2):
            for i in range(len(offsets)):
                for j in range(i, min(i + longest, len(offsets))):
                    if offsets[i, 0] >= 0 and offsets[j, 0] >= 0 and found.owner_NL[n, i]:
                        text = context[offsets[i, 0] : offsets[j, 1]]
                        score = float(logits[n, i, 0]) + float(logits[n, j, 1])
                        scores[text] = max(score, scores.get(text, -np.inf))
        expected = sorted(scores, key=lambda text: -scores[text])[:7]
        assert [c.text for c in best.candidates if c.text] == expected
        null = min(float(row[0, 0]) + float(row[0, 1]) for row in logits)
        assert best.null_score == pytest.approx(null - scores[expected[0]], abs=1e-5)


def test_no_answer_is_the_answer_where_its_score_is_above_the_threshold() -> None:
    """C064: null logits forced high for one question; n_best 1 and 20; every list is valid JSON with an entry."""
    examples = [example("the world", "world"), example("the world")]
    found = encoded(*examples)
    logits = oracle(found)
    logits[1, 0] = 1e4
    for n_best in (1, 20):
        config = SpanConfig(version_2=True, n_best=n_best)
        answered, empty = span.decode(logits, found, examples, config)
        assert answered.text(0.0) == "world" and empty.text(0.0) == "" and empty.best_text
        assert empty.text(None) == empty.text(2e4) == empty.best_text
        assert empty.null_score > 1e4 > answered.null_score
        assert json.loads(json.dumps(empty.n_best_json(), allow_nan=False))[0]["text"] == ""
        assert next(c.text for c in answered.candidates) == "world"


def test_a_context_without_a_piece_has_the_empty_answer_and_a_finite_null_score() -> None:
    """C064: nothing to answer with."""
    for context in ("", " \u200b "):
        one = example(context)
        found = encoded(one)
        for version_2 in (False, True):
            (best,) = span.decode(oracle(found), found, [one], SpanConfig(version_2=version_2, n_best=1))
            assert best.text(None) == best.text(0.0) == "" and best.null_score == span.NO_CANDIDATE
            assert [c.text for c in best.candidates] == [""]


def test_a_question_without_room_for_its_context_is_refused_at_once() -> None:
    """C052: the numbers are named, and nothing loops."""
    one = example("a " * 50, question="b " * 20)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"x.json: the question of line 5 has 20 pieces; .* 16 leaves -7 .* has 50\)"):
        features.encode(
            TaskConfig(kind="span", inputs=InputsConfig(max_seq_length=16)), [one], TOKENIZER, where="x.json"
        )
    with pytest.raises(UserError, match="leaves 0 for"):
        encoded(one, length=23)
    assert len(encoded(one, length=24).example_index_N) == 50
    assert time.monotonic() - started < 5


def test_a_question_longer_than_its_limit_is_cut_and_counted() -> None:
    """C052."""
    one = example("a " * 50, question="b " * 20)
    found = encoded(one, length=16, max_query_length=6)
    assert found.arrays["token_type_ids"][0].tolist() == [0] * 8 + [1] * 8
    assert found.cut == (Cut(5, 14, "pieces of the question"),)
    assert "14 pieces of the question do not fit and are not seen, in 1 of 1 examples (line 5)" in found.report("x")[0]


def test_what_cannot_be_learned_from_is_left_out_of_training_only_and_counted() -> None:
    """C034: an answer that is elsewhere, or one without a piece."""
    examples = [
        Example("0", 1, "hello", "the world", answers=(("world", -1),)),
        Example("1", 2, "hello", "the \u200b world", answers=(("\u200b", 4),)),
        Example("2", 3, "hello", "the world", answers=(("moon", -1), ("world", 4))),
        Example("3", 4, "hello", "the world", is_impossible=True),
    ]
    found = encoded(*examples, training=True)
    assert found.example_index_N.tolist() == [2, 3] and found.arrays["start"].tolist() == [4, 0]
    assert found.left_out == ((1, span.NOT_THERE), (2, span.NO_PIECE))
    assert found.report("x") == [
        f"x: 1 of 4 examples are left out: {span.NOT_THERE} (line 1)",
        f"x: 1 of 4 examples are left out: {span.NO_PIECE} (line 2)",
    ]
    assert encoded(*examples).example_index_N.tolist() == [0, 1, 2, 3]


def test_without_labels_answers_are_not_looked_at() -> None:
    """C104."""
    one = Example("0", 1, "hello", "the world")
    found = span.encode([one], TOKENIZER, InputsConfig(max_seq_length=16), labelled=False, training=True)
    assert "start" not in found.arrays and len(found.example_index_N) == 1


def test_places_past_a_short_batch_are_never_an_answer() -> None:
    one = example("the world", "world")
    found = encoded(one, length=16)
    logits = np.full((1, 16, 2), -1e9, np.float32)
    logits[0, :6] = 0
    (best,) = span.decode(logits, found, [one], SpanConfig(n_best=20))
    assert {c.text for c in best.candidates} == {"the", "world", "the world"}
