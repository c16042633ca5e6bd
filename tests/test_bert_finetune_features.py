"""Rows of every kind of task: nothing lost where it fits, and what does not fit is in a window or counted."""

import numpy as np
import pytest
from tiny_bert import tiny_tokenizer

from bert_jax.finetune import choice, features, sequence, tagging, windows
from bert_jax.finetune.encoded import Cut
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import InputsConfig
from transformer_jax.config import UserError

TOKENIZER = tiny_tokenizer()
CLS, SEP, PAD, UNK = TOKENIZER.cls_id, TOKENIZER.sep_id, TOKENIZER.pad_id, TOKENIZER.unk_id


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def letters(n: int, first: str = "a") -> str:
    """A text of n pieces."""
    return " ".join(chr(ord(first) + i % 13) for i in range(n))


def one(text_a: str, text_b: str | None = None, **settings: object) -> features.Features:
    example = Example("0", 7, text_a, text_b)
    inputs = InputsConfig(**{"max_seq_length": 16, **settings})  # type: ignore[arg-type]
    return sequence.encode([example], TOKENIZER, inputs, labelled=False)


def row(found: features.Features, n: int = 0) -> tuple[list[int], list[int]]:
    """Ids and segments of the real places of a row; padding, positions and lengths are checked."""
    arrays = found.arrays
    length = int(arrays["sequence_ids"][n].sum())
    assert arrays["sequence_ids"][n].tolist() == [1] * length + [0] * (arrays["input_ids"].shape[1] - length)
    assert arrays["position_ids"][n].tolist() == [*range(length)] + [0] * (arrays["input_ids"].shape[1] - length)
    assert (arrays["input_ids"][n, length:] == PAD).all() and not arrays["token_type_ids"][n, length:].any()
    return arrays["input_ids"][n, :length].tolist(), arrays["token_type_ids"][n, :length].tolist()


# --- lengths


@pytest.mark.parametrize(
    ("a", "b", "kept"),
    [(60, 65, (60, 65)), (61, 65, (61, 64)), (1, 200, (1, 124)), (200, 1, (124, 1)), (125, 0, (125, 0)),
     (126, 0, (125, 0)), (65, 60, (65, 60)), (63, 63, (63, 62)), (100, 90, (63, 62)), (62, 200, (62, 63))],
)  # fmt: skip
def test_of_a_pair_the_longer_side_gives_way_and_both_ends_stay(a: int, b: int, kept: tuple[int, int]) -> None:
    """C054: nothing is cut at exactly the maximum; ids, mask and segments are of one length."""
    found = one(letters(a), letters(b, "n"), max_seq_length=128)
    row_ids, segments = row(found)
    ids_a, ids_b = ids(letters(a)), ids(letters(b, "n"))
    assert row_ids == [CLS, *ids_a[: kept[0]], SEP, *ids_b[: kept[1]], SEP]
    assert segments == [0] * (kept[0] + 2) + [1] * (kept[1] + 1)
    lost = a + b - sum(kept)
    assert found.cut == ((Cut(7, lost, "pieces of the text"),) if lost else ())


def test_fair_lengths_are_those_of_taking_one_piece_after_the_other() -> None:
    """C054."""
    for a in range(12):
        for b in range(12):
            for room in range(12):
                x, y = a, b
                while x + y > room:
                    x, y = (x - 1, y) if x > y else (x, y - 1)
                assert windows.fair_lengths(a, b, room) == (x, y), (a, b, room)


@pytest.mark.parametrize(
    ("long_text", "which"),
    [
        ("truncate_tail", [*range(14)]),
        ("truncate_head", [*range(6, 20)]),
        ("head_tail", [*range(4), *range(10, 20)]),
    ],
)
def test_a_long_text_loses_what_was_asked_for_and_it_is_counted(long_text: str, which: list[int]) -> None:
    text = letters(20)
    found = one(text, long_text=long_text)
    assert row(found)[0] == [CLS, *(ids(text)[i] for i in which), SEP]
    assert found.cut == (Cut(7, 6, "pieces of the text"),)
    assert found.report("x.tsv") == [
        "x.tsv: 6 pieces of the text do not fit and are not seen, in 1 of 1 examples (line 7)"
    ]
    exact = one(letters(14), long_text=long_text)
    assert row(exact)[0] == [CLS, *ids(letters(14)), SEP] and not exact.cut and not exact.report("x.tsv")


def test_windows_hold_every_piece_and_overlap_by_the_stride() -> None:
    text = letters(30)
    found = one(text, long_text="windows", stride=5)
    assert [row(found, n)[0][1:-1] for n in range(5)] == [ids(text)[s : s + 14] for s in (0, 5, 10, 15, 16)]
    assert found.example_index_N.tolist() == [0] * 5 and not found.cut
    assert found.report("x.tsv") == ["x.tsv: 1 of 1 examples are read in windows, 5 in all"]
    assert len(one(letters(14), long_text="windows", stride=5).example_index_N) == 1


@pytest.mark.parametrize("swap", [False, True])
def test_in_windows_of_a_pair_the_longer_side_moves_and_the_other_is_in_each(swap: bool) -> None:
    short, long = letters(4, "n"), letters(20)
    found = one(long, short, long_text="windows", stride=6) if swap else one(short, long, long_text="windows", stride=6)
    seen = set()
    for n in range(len(found.example_index_N)):
        row_ids, segments = row(found, n)
        first = row_ids[1 : segments.index(1) - 1]
        second = row_ids[segments.index(1) : -1]
        assert (second if swap else first) == ids(short)
        part = first if swap else second
        assert part == ids(long)[6 * n : 6 * n + 9] or part == ids(long)[-9:]
        seen |= set(part)
    assert seen == set(ids(long)) and not found.cut
    both = one(letters(20), letters(20, "n"), long_text="windows", stride=6)
    assert both.cut == (Cut(7, 14, "pieces of the text"),)  # of the second side half of the room of 13 is kept


def test_window_starts_leave_no_gap_at_any_stride() -> None:
    for length in range(40):
        for width in (1, 2, 7, 40):
            for stride in (0, 1, 3, 7, 100):
                starts = windows.window_starts(length, width, stride)
                covered = np.zeros(length, bool)
                for start in starts:
                    covered[start : start + width] = True
                assert covered.all() and starts == sorted(set(starts)) and starts[-1] == max(0, length - width)


def test_each_piece_belongs_to_the_window_in_which_it_has_most_context() -> None:
    spans = [(0, 10), (5, 15), (8, 18)]
    owners = windows.most_context(spans)
    for piece in range(18):
        held = [n for n, (a, b) in enumerate(spans) if a <= piece < b]
        context = {n: min(piece - spans[n][0], spans[n][1] - 1 - piece) for n in held}
        mine = [n for n in held if owners[n][piece - spans[n][0]]]
        assert mine == [max(held, key=lambda n: context[n])], piece  # max takes the earlier of equals


def test_logits_of_windows_are_pooled_and_others_stay_as_they_are() -> None:
    logits = np.array([[1.0, -1.0], [0.0, 5.0], [2.0, 2.0], [4.0, 0.0]], np.float32)
    index = np.array([0, 1, 1, 2], np.int32)
    assert sequence.pool(logits, index, 3, "max").tolist() == [[1, -1], [2, 5], [4, 0]]
    mean = sequence.pool(logits, index, 3, "mean")
    assert mean.tolist() == [[1, -1], [1, 3.5], [4, 0]] and mean.dtype == np.float32


# --- pairs and labels


def test_the_second_text_has_segment_1_and_the_order_counts() -> None:
    """C105."""
    found = one("hello world", "the")
    assert row(found) == ([CLS, *ids("hello world"), SEP, *ids("the"), SEP], [0, 0, 0, 0, 1, 1])
    other = one("the", "hello world")
    assert not np.array_equal(found.arrays["input_ids"], other.arrays["input_ids"])
    assert row(one("hello"))[1] == [0, 0, 0]
    assert row(one("", "")) == ([CLS, SEP, SEP], [0, 0, 1]) and row(one("")) == ([CLS, SEP], [0, 0])


def test_labels_have_the_ids_of_the_models_list_whatever_the_files_order() -> None:
    """C053."""
    examples = [Example(str(i), i, "the", None, name) for i, name in enumerate("ecnee")]
    for labels in ("cen", "enc"):
        arrays = sequence.encode(examples, TOKENIZER, InputsConfig(), "classification", labels).arrays
        assert [labels[i] for i in arrays["labels"]] == [*"ecnee"] and arrays["labels"].dtype == np.int32


def test_targets_of_numbers_and_sets_and_of_windows() -> None:
    """C123: numbers are float32 [n], not [n, 1]."""
    inputs = InputsConfig(max_seq_length=8, long_text="windows", stride=6)
    numbers = [Example("0", 1, letters(9), None, 3.8), Example("1", 2, "the", None, 0.4)]
    found = sequence.encode(numbers, TOKENIZER, inputs, "regression", ("score",))
    assert found.arrays["labels"].tolist() == np.float32([3.8, 3.8, 0.4]).tolist()
    assert found.arrays["labels"].dtype == np.float32 and found.example_index_N.tolist() == [0, 0, 1]
    sets = [Example("0", 1, "a", None, ("x", "z")), Example("1", 2, "b", None, ())]
    labels = sequence.encode(sets, TOKENIZER, inputs, "multi_label", ("x", "y", "z")).arrays["labels"]
    assert labels.tolist() == [[1, 0, 1], [0, 0, 0]] and labels.dtype == np.float32
    without = sequence.encode(sets, TOKENIZER, inputs, "multi_label", ("x", "y", "z"), labelled=False)
    assert "labels" not in without.arrays


# --- tags

TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def sentence(words: list[str], tags: list[str] | None = None, line: int = 3) -> Example:
    return Example("0", line, words=tuple(words), tags=tuple(tags) if tags else None)


def tagged(example: Example, **settings: object) -> features.Features:
    inputs = InputsConfig(**{"max_seq_length": 16, **settings})  # type: ignore[arg-type]
    return tagging.encode([example], TOKENIZER, inputs, TAGS, example.tags is not None)


def by_word(found: features.Features, words: list[str], tag_of: dict[str, str]) -> tuple[str, ...]:
    """Tags as of a model that tags the first pieces of some words, and every other piece B-PER."""
    predicted = np.full(found.arrays["input_ids"].shape, TAGS.index("B-PER"))
    assert found.word_NL is not None
    for n, at in np.argwhere(found.word_NL >= 0):
        predicted[n, at] = TAGS.index(tag_of.get(words[found.word_NL[n, at]], "O"))
    (tags,) = tagging.decode(predicted, found, [sentence(words)], TAGS)
    return tags


def test_words_without_a_piece_get_o_and_shift_nothing() -> None:
    """C021."""
    words = ["Leipzig", "\u200b", "ist", "\u00ad", "Berlin"]
    found = tagged(sentence(words), max_seq_length=32)
    cities = {"Leipzig": "B-LOC", "Berlin": "B-LOC"}
    assert by_word(found, words, cities) == ("B-LOC", "O", "O", "O", "B-LOC")
    assert not found.cut
    empty = tagged(sentence(["\u200b"]))
    assert row(empty)[0] == [CLS, SEP] and by_word(empty, ["\u200b"], {}) == ("O",)


def test_a_word_of_several_pieces_has_one_tag_that_of_its_first() -> None:
    """C102: in the targets, and in what is predicted."""
    example = sentence(["xyzz", "the", "world"], ["B-PER", "O", "B-LOC"])
    found = tagged(example)
    assert len(ids("xyzz")) == 4
    assert found.arrays["labels"][0].tolist() == [-1, 3, -1, -1, -1, 0, 1, *[-1] * 9]
    assert by_word(found, ["xyzz", "the", "world"], {"xyzz": "B-PER"}) == ("B-PER", "O", "O")
    logits = np.eye(5)[np.maximum(found.arrays["labels"], 0)]
    assert tagging.decode(logits, found, [example], TAGS) == [example.tags]


@pytest.mark.parametrize("stride", [1, 3, 5, 14])
def test_in_windows_each_word_is_scored_once_where_it_has_most_context(stride: int) -> None:
    words = [f"{a}{b}" for a in "abcdef" for b in "uvwx"]  # 24 words of 2 pieces
    tags = [TAGS[i % 5] for i in range(24)]
    example = sentence(words, tags)
    found = tagged(example, long_text="windows", stride=stride)
    labels = found.arrays["labels"]
    assert (labels >= 0).sum() == 24 and len(labels) > 3 and not found.cut
    assert tagging.decode(labels, found, [example], TAGS) == [tuple(tags)]
    # What other windows say of a word does not count.
    assert found.owner_NL is not None
    assert tagging.decode(np.where(found.owner_NL, labels, 4), found, [example], TAGS) == [tuple(tags)]


@pytest.mark.parametrize(
    ("long_text", "lost"), [("truncate_tail", {7, 8, 9}), ("truncate_head", {0, 1, 2}), ("head_tail", {2, 3, 4})]
)
def test_words_that_do_not_fit_are_counted_and_get_o(long_text: str, lost: set[int]) -> None:
    words = ["au", "bu", "cu", "du", "eu", "fu", "gu", "hu", "iu", "ju"]
    example = sentence(words, ["B-LOC"] * 10)
    found = tagged(example, long_text=long_text)
    assert found.cut == (Cut(3, 3, "words"),)
    (tags,) = tagging.decode(found.arrays["labels"], found, [example], TAGS)
    assert {i for i, tag in enumerate(tags) if tag == "O"} == lost


# --- choices


def test_choices_are_rows_beside_each_other_with_the_choice_as_second_segment() -> None:
    examples = [
        Example("0", 1, "the world", "hello", "1", choices=("a", "b c", "d")),
        Example("1", 2, "the", None, "2", choices=("a", "b", "c")),
    ]
    found = choice.encode(examples, TOKENIZER, InputsConfig(max_seq_length=12))
    assert found.arrays["input_ids"].shape == (2, 3, 12) and found.arrays["labels"].tolist() == [1, 2]
    first = found.arrays["input_ids"][0, 1]
    assert first.tolist()[:8] == [CLS, *ids("the world"), SEP, *ids("hello b c"), SEP]
    assert found.arrays["token_type_ids"][0, 1].tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert found.arrays["input_ids"][1, 2].tolist()[:5] == [CLS, *ids("the"), SEP, *ids("c"), SEP]
    uneven = [*examples, Example("2", 9, "x", choices=("a",))]
    with pytest.raises(UserError, match="line 9 has 1 choices, and the first has 3"):
        choice.encode(uneven, TOKENIZER, InputsConfig())


def test_all_choices_of_a_window_see_the_same_part_of_the_text() -> None:
    example = Example("0", 4, letters(20), None, "0", choices=("n", "n o"))
    found = choice.encode([example], TOKENIZER, InputsConfig(max_seq_length=13, long_text="windows", stride=6))
    arrays = found.arrays["input_ids"]
    assert arrays.shape == (3, 2, 13) and found.example_index_N.tolist() == [0] * 3 and not found.cut
    assert found.arrays["labels"].tolist() == [0, 0, 0]
    for n, start in enumerate((0, 6, 12)):
        for k, text in enumerate(("n", "n o")):
            expected = [CLS, *ids(letters(20))[start : start + 8], SEP, *ids(text), SEP]
            assert arrays[n, k].tolist()[: len(expected)] == expected
    cut = choice.encode([example], TOKENIZER, InputsConfig(max_seq_length=13))
    assert cut.arrays["input_ids"].shape == (1, 2, 13) and cut.cut == (Cut(4, 23, "pieces of the text"),)
    assert sequence.pool(np.float32([[1, 2], [3, 0], [0, 1]]), found.example_index_N, 1, "max").tolist() == [[3, 2]]


def test_a_choice_too_long_for_a_window_is_cut_to_half_of_the_room_unless_the_text_is_short() -> None:
    settings = InputsConfig(max_seq_length=13, long_text="windows", stride=6)
    long = Example("0", 4, letters(9), None, "0", choices=(letters(8, "n"), "n"))
    found = choice.encode([long], TOKENIZER, settings)
    assert found.cut == (Cut(4, 3, "pieces of the text"),) and len(found.example_index_N) == 2
    short = Example("0", 4, letters(2), None, "0", choices=(letters(12, "n"), "n"))
    found = choice.encode([short], TOKENIZER, settings)
    assert found.cut == (Cut(4, 4, "pieces of the text"),) and len(found.example_index_N) == 1


def test_long_reports_name_the_first_lines_only() -> None:
    examples = [Example(str(i), i, letters(20)) for i in range(1, 15)]
    found = sequence.encode(examples, TOKENIZER, InputsConfig(max_seq_length=16), labelled=False)
    assert found.report("x") == [
        "x: 84 pieces of the text do not fit and are not seen, in 14 of 14 examples "
        "(lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 4 more)"
    ]
