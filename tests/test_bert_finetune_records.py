"""Labelled files: each row is read, or reported with its line; labels by name; nothing of labels in prediction."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from bert_jax.finetune import records
from bert_jax.finetune.task_file import TaskConfig
from transformer_jax import config as core
from transformer_jax.config import ConfigError, UserError


def task(folder: Path, kind: str = "classification", columns: dict | None = None, **data: object) -> TaskConfig:
    version_2 = data.pop("version_2", False)
    settings = {
        "kind": kind,
        "data": {"folder": str(folder), "columns": columns or {}, **data},
        "span": {"version_2": version_2},
    }
    return core.load(TaskConfig, settings, "test")


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path.name


# --- TSV and CSV


def test_a_quotation_mark_in_a_tsv_swallows_no_row_and_a_bad_row_is_reported(tmp_path: Path) -> None:
    """C078."""
    name = write(tmp_path / "train.tsv", 'text\tlabel\na "b\t1\n"c d\t0\ne\tf\t1\ng"\t1\n')
    found = records.read(task(tmp_path), name)
    assert [(e.line, e.text_a, e.label) for e in found.examples] == [(2, 'a "b', "1"), (3, '"c d', "0"), (5, 'g"', "1")]
    assert found.problems == ((4, "3 columns, where the header has 2"),)
    assert found.report() == (
        f"{tmp_path / name}: 3 examples read, 1 problem (line 4: 3 columns, where the header has 2)"
    )


def test_a_bad_row_without_header_is_the_one_unlike_most(tmp_path: Path) -> None:
    """C078: also where it comes first."""
    name = write(tmp_path / "train.tsv", "only one\nx\t1\ty one\nx\t0\ty two\n")
    settings = task(tmp_path, header=False, columns={"text_a": "-1", "label": "1", "id": ""})
    found = records.read(settings, name)
    assert [(e.line, e.text_a, e.label) for e in found.examples] == [(2, "y one", "1"), (3, "y two", "0")]
    assert found.problems == ((1, "1 column, where most rows have 3"),)


def test_a_bad_row_stops_a_prediction_since_each_line_is_to_have_one(tmp_path: Path) -> None:
    name = write(tmp_path / "test.tsv", "text\tmore\na\tb\nc\n")
    with pytest.raises(UserError, match=r"test.tsv: line 3 has 1 column, where the header has 2; each line"):
        records.read(task(tmp_path), name, labelled=False)


@pytest.mark.parametrize("name", ["a/b", "", "a b"])
def test_a_name_of_a_file_that_could_be_in_no_file_name_is_refused_before_training(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a name has letters, digits"):
        task(tmp_path, dev={name: "dev.tsv"})


def test_a_blank_line_of_jsonl_is_no_example_and_stops_a_prediction(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", '{"text": "a", "label": "x"}\n\n{"text": "b", "label": "y"}\n\n')
    found = records.read(task(tmp_path), name)
    assert len(found.examples) == 2 and found.problems == ((2, "nothing on it"),)
    with pytest.raises(UserError, match="line 2 has nothing on it; each line is to have a prediction"):
        records.read(task(tmp_path), name, labelled=False)


def test_a_column_that_is_there_twice_is_refused_and_a_like_name_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 columns are called 'text'; rename all but one"):
        records.read(task(tmp_path), write(tmp_path / "twice.tsv", "text\ttext\tlabel\na\tb\tx\n"))
    with pytest.raises(UserError, match=r"no column 'text'; set data\.columns, or .*; did you mean"):
        records.read(task(tmp_path), write(tmp_path / "other.tsv", "txt\tlabel\na\tx\n"))


def test_labels_have_no_white_space_around_them_and_no_separator_in_them(tmp_path: Path) -> None:
    found = records.read(task(tmp_path), write(tmp_path / "a.tsv", "label\ttext\nham \ta\n ham\tb\nham\tc\n"))
    assert [e.label for e in found.examples] == ["ham"] * 3
    name = write(tmp_path / "b.jsonl", '{"text": "a", "label": ["a,b", "c"]}\n')
    with pytest.raises(UserError, match=r"line 1: the label 'a,b' has a ',' in it"):
        records.read(task(tmp_path, "multi_label"), name)
    two = records.read(task(tmp_path, "multi_label", label_separator=";"), name)
    assert two.examples[0].label == ("a,b", "c")


def test_csv_has_quotes_with_line_ends_and_separators_in_them(tmp_path: Path) -> None:
    name = write(
        tmp_path / "train.csv", '\ufefftext,label\r\n"a, ""b""\nc",x\r\nd,"y"\r\n"e",z,1\r\n' + "f" * 200_000 + ",x\r\n"
    )
    found = records.read(task(tmp_path), name)
    assert [(e.line, e.text_a[:9], e.label) for e in found.examples] == [
        (2, 'a, "b"\nc', "x"), (4, "d", "y"), (6, "fffffffff", "x"),
    ]  # fmt: skip
    assert found.problems == ((5, "3 columns, where the header has 2"),)
    assert len(found.examples[2].text_a) == 200_000
    bare = task(tmp_path, quoting="none")
    with pytest.raises(UserError, match="5 problems"):
        records.read(bare, write(tmp_path / "quoted.csv", 'text,label\n"a\n"b\n"c\n"d\n"e\n'))


def test_a_quote_that_does_not_close_is_named_by_the_line_it_opens_in(tmp_path: Path) -> None:
    name = write(tmp_path / "train.csv", 'text,label\na,x\n"b,y\nc,z\n')
    with pytest.raises(UserError, match=r"the row that starts in line 3 is not valid CSV"):
        records.read(task(tmp_path), name)


def test_windows_line_ends_a_mark_and_lone_carriage_returns_are_as_everywhere(tmp_path: Path) -> None:
    """C036."""
    plain = write(tmp_path / "a.tsv", "text\tlabel\na b\tx\nc d\ty\n")
    windows = write(tmp_path / "b.tsv", "\ufefftext\tlabel\r\na b\tx\r\nc\rd\ty\r\n")
    assert records.read(task(tmp_path), windows).examples == records.read(task(tmp_path), plain).examples
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress((tmp_path / "b.tsv").read_bytes()))
    assert records.read(task(tmp_path), "c.tsv.gz").examples == records.read(task(tmp_path), plain).examples


@pytest.mark.parametrize("name", ["x.tsv", "x.csv", "x.jsonl", "x.conll", "x.json"])
def test_bytes_that_are_not_utf8_are_named_by_file_line_and_byte(tmp_path: Path, name: str) -> None:
    """C075."""
    write(tmp_path / name, b"one\ntwo\n{\xff}\nfour\nfive\n")
    kind = {"x.conll": "tagging", "x.json": "span"}.get(name, "classification")
    with pytest.raises(UserError, match=rf"{name}: line 3 is not UTF-8: byte 0xff at byte 2"):
        records.read(task(tmp_path, kind), name)


def test_bytes_that_are_not_utf8_can_be_replaced(tmp_path: Path) -> None:
    """C075."""
    name = write(tmp_path / "x.tsv", b"text\tlabel\na\t1\nb\xff\t1\n")
    assert records.read(task(tmp_path, encoding_errors="replace"), name).examples[1].text_a == "b\ufffd"


def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    name = write(tmp_path / "x.tsv", "sentence\tlabel\na\t1\n")
    with pytest.raises(UserError, match=r"no column 'sentense'; set data.columns.*; did you mean `sentence`"):
        records.read(task(tmp_path, columns={"text_a": "sentense"}), name)
    with pytest.raises(ConfigError, match=r"'sentence' is given by name, and data.header is false"):
        records.read(task(tmp_path, header=False, columns={"text_a": "sentence"}), name)
    with pytest.raises(UserError, match="no column 2; the file has 2, numbered from 0"):
        records.read(task(tmp_path, header=False, columns={"text_a": "2", "label": "1"}), name)
    with pytest.raises(ConfigError, match=r"the ending says no format; set data.format"):
        records.read(task(tmp_path), write(tmp_path / "x.data", "a"))


def test_a_file_without_examples_is_an_error(tmp_path: Path) -> None:
    """C089."""
    with pytest.raises(UserError, match="0 examples"):
        records.read(task(tmp_path), write(tmp_path / "x.tsv", "text\tlabel\n"))
    with pytest.raises(UserError, match="0 examples"):
        records.read(task(tmp_path), write(tmp_path / "y.tsv", ""))
    with pytest.raises(UserError, match=r"0 examples read, 2 problems \(line 2: 1 column"):
        records.read(task(tmp_path), write(tmp_path / "z.tsv", "text\tlabel\na\nb\n"))
    assert records.read(task(tmp_path), "x.tsv", labelled=False).examples == ()


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path / "x.tsv", "id\ttext\tlabel\n7\ta\tx\n8\tb\tx\n7\tc\tx\n")
    for labelled in (True, False):
        with pytest.raises(UserError, match="the id '7' is there twice, at lines 2 and 4"):
            records.read(task(tmp_path, columns={"id": "id"}), name, labelled)


# --- labels


def test_labels_are_names_and_an_unknown_one_stops_the_run(tmp_path: Path) -> None:
    """C053."""
    name = write(tmp_path / "x.tsv", "text\tlabel\na\tneutral\nb\tcontradiction\nc\tentailment\nd\tneutral\n")
    found = records.read(task(tmp_path), name)
    assert records.labels_of(found) == ("contradiction", "entailment", "neutral")
    records.check_labels(found, ("entailment", "neutral", "contradiction"))
    with pytest.raises(UserError) as e:
        records.check_labels(found, ("entailment", "contradiction"))
    assert str(e.value) == (
        f"{tmp_path / name}: line 2 has the label 'neutral', which the model does not know; known labels: entailment, "
        "contradiction"
    )


def test_an_unknown_tag_is_named_with_the_line_of_its_word(tmp_path: Path) -> None:
    name = write(tmp_path / "x.conll", "\nAnn B-PER\nran O\nto O\nRome B-LOC\n\nBob B-PER\n")
    found = records.read(task(tmp_path, "tagging"), name)
    with pytest.raises(UserError, match="line 5 has the label 'B-LOC'"):
        records.check_labels(found, ("O", "B-PER"))


def test_prediction_never_reads_labels(tmp_path: Path) -> None:
    """C104: neither a column that is not there nor one with nonsense in it."""
    only_text = records.read(task(tmp_path), write(tmp_path / "x.tsv", "text\na\nb\n"), labelled=False)
    assert [(e.text_a, e.label) for e in only_text.examples] == [("a", None), ("b", None)]
    for kind in ("classification", "multi_label", "regression"):
        name = write(tmp_path / "y.tsv", "text\tlabel\na\t\nb\t???\n")
        assert records.read(task(tmp_path, kind), name, labelled=False).examples == only_text.examples
    words = records.read(task(tmp_path, "tagging"), write(tmp_path / "w.conll", "Ann\nran\n\nBob\n"), labelled=False)
    assert [e.words for e in words.examples] == [("Ann", "ran"), ("Bob",)] and words.examples[0].tags is None
    qas = [{"id": "1", "question": "q", "answers": [{"text": "zzz", "answer_start": 99}]}, {"id": "2", "question": "r"}]
    squad = write(tmp_path / "s.json", json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": qas}]}]}))
    found = records.read(task(tmp_path, "span"), squad, labelled=False)
    assert [(e.id, e.text_a, e.text_b, e.answers) for e in found.examples] == [("1", "q", "c", ()), ("2", "r", "c", ())]
    assert not found.problems
    marked = {"id": "1", "question": "q", "is_impossible": True}
    squad = write(tmp_path / "s.json", json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [marked]}]}]}))
    assert not records.read(task(tmp_path, "span"), squad, labelled=False).examples[0].is_impossible


def test_numbers_sets_of_labels_and_labels_that_are_numbers(tmp_path: Path) -> None:
    """C123: a regression has float labels."""
    name = write(tmp_path / "x.tsv", "text\tlabel\na\t3.8\nb\t5\nc\t0\n")
    assert [e.label for e in records.read(task(tmp_path, "regression"), name).examples] == [3.8, 5.0, 0.0]
    thousand = write(tmp_path / "thousand.tsv", "text\tlabel\na\t1_000\n")
    with pytest.raises(UserError, match="line 2: column 'label' holds '1_000'; it must be a number"):
        records.read(task(tmp_path, "regression"), thousand)
    with pytest.raises(UserError, match="line 3: column 'label' holds 'nan'; it must be a number"):
        records.read(task(tmp_path, "regression"), write(tmp_path / "n.tsv", "text\tlabel\na\t3.8\nb\tnan\n"))
    name = write(tmp_path / "m.tsv", "text\tlabel\na\tred, blue,red\nb\t\nc\tblue\n")
    found = records.read(task(tmp_path, "multi_label"), name)
    assert [e.label for e in found.examples] == [("red", "blue"), (), ("blue",)]
    assert records.labels_of(found) == ("blue", "red")
    name = write(
        tmp_path / "j.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b", "label": true}\n{"text": "c", "label": 0.0}\n'
    )
    assert [(e.line, e.label) for e in records.read(task(tmp_path), name).examples] == [(1, "1"), (3, "true"), (4, "0")]
    with pytest.raises(UserError, match="line 1: column 'label' holds None; it must be a label"):
        records.read(task(tmp_path), write(tmp_path / "k.jsonl", '{"text": "a", "label": null}\n'))
    with pytest.raises(UserError, match="line 1: column 'text' holds 3; it must be a text"):
        records.read(task(tmp_path), write(tmp_path / "k.jsonl", '{"text": 3, "label": "x"}\n'))


def test_pairs_and_nested_keys(tmp_path: Path) -> None:
    name = write(tmp_path / "x.jsonl", '{"pair": {"a": "one", "b": "two"}, "gold": "yes"}\n')
    columns = {"text_a": "pair.a", "text_b": "pair.b", "label": "gold"}
    (example,) = records.read(task(tmp_path, columns=columns), name).examples
    assert (example.text_a, example.text_b, example.label, example.id) == ("one", "two", "yes", "0")
    with pytest.raises(UserError, match=r"line 1 has no key 'pair.c'.*set `data.columns`"):
        records.read(task(tmp_path, columns=columns | {"text_a": "pair.c"}), name)


def test_choices_have_a_column_each_and_their_label_is_a_number_or_a_columns_name(tmp_path: Path) -> None:
    columns = {"text_a": "sent1", "text_b": "sent2", "choices": ["e0", "e1"], "label": "label"}
    name = write(tmp_path / "x.csv", "sent1,sent2,e0,e1,label\ns,t,u,v,1\ns,t,u,v,e0\n")
    found = records.read(task(tmp_path, "choice", columns), name)
    assert [(e.choices, e.label, e.text_b) for e in found.examples] == [(("u", "v"), "1", "t"), (("u", "v"), "0", "t")]
    assert records.labels_of(found) == ()
    with pytest.raises(UserError, match="line 2: the label '2' is no choice; known are the numbers 0 to 1"):
        records.read(
            task(tmp_path, "choice", columns), write(tmp_path / "y.csv", "sent1,sent2,e0,e1,label\ns,t,u,v,2\n")
        )


# --- CoNLL

CONLL = "-DOCSTART- -X- O\n\nAnn NNP B-PER\nran VBD O\n \nin IN O\n\n\nRome NNP B-LOC"


@pytest.mark.parametrize(
    "text",
    [
        CONLL,
        CONLL.replace(" ", "\t"),
        CONLL.replace("\n", "\r\n"),
        "\ufeff" + CONLL + "\n\n\n",
        CONLL.replace(" ", "   "),
    ],
    ids=["spaces", "tabs", "crlf", "mark", "aligned"],
)
def test_conll_files_of_any_make_have_the_same_sentences(tmp_path: Path, text: str) -> None:
    """C103, C036."""
    found = records.read(task(tmp_path, "tagging"), write(tmp_path / "x.conll", text))
    assert [(e.line, e.words, e.tags) for e in found.examples] == [
        (3, ("Ann", "ran"), ("B-PER", "O")), (6, ("in",), ("O",)), (9, ("Rome",), ("B-LOC",)),
    ]  # fmt: skip
    assert records.labels_of(found) == ("O", "B-LOC", "B-PER")


def test_a_conll_line_with_another_number_of_columns_is_an_error_with_its_line(tmp_path: Path) -> None:
    """C103."""
    with pytest.raises(UserError, match=r"x.conll: line 3 has 3 columns, and the lines before have 2"):
        records.read(task(tmp_path, "tagging"), write(tmp_path / "x.conll", "Ann B-PER\n\nran fast O\n"))
    with pytest.raises(UserError, match=r"line 1 has 1 column; a word and its tag are needed"):
        records.read(task(tmp_path, "tagging"), write(tmp_path / "x.conll", "Ann\nran\n"))
    with pytest.raises(UserError, match=r"data.columns.tags is 'ner'; for the format conll it is a column's number"):
        settings = task(tmp_path, "tagging", {"tags": "ner"})
        records.read(settings, write(tmp_path / "x.conll", "Ann B-PER\n"))


def test_words_of_odd_characters_stay_one_word(tmp_path: Path) -> None:
    """C021: U+200B, U+00AD, U+3000 and U+0085 are words here, not breaks."""
    name = write(tmp_path / "x.conll", "Leipzig O\n\u200b O\n\u3000 O\n\x85 O\n\u2028 O\n")
    (example,) = records.read(task(tmp_path, "tagging"), name).examples
    assert example.words == ("Leipzig", "\u200b", "\u3000", "\x85", "\u2028")


@pytest.mark.parametrize(
    ("scheme", "tags", "expected"),
    [
        ("iob1", "I-X I-X B-X O I-Y", "B-X I-X B-X O B-Y"),
        ("bioes", "B-X I-X E-X S-X O", "B-X I-X I-X B-X O"),
        ("iob2", "NN VB . , IN", "NN VB . , IN"),
    ],
)
def test_tags_become_iob2(tmp_path: Path, scheme: str, tags: str, expected: str) -> None:
    name = write(tmp_path / "x.conll", "".join(f"w {t}\n" for t in tags.split()))
    (example,) = records.read(task(tmp_path, "tagging", tag_scheme=scheme), name).examples
    assert " ".join(example.tags or ()) == expected


def test_sentences_may_also_stand_one_a_line(tmp_path: Path) -> None:
    name = write(tmp_path / "x.tsv", "words\ttags\nAnn ran\tB-PER O\n")
    (example,) = records.read(task(tmp_path, "tagging", {"words": "words", "tags": "tags"}), name).examples
    assert example.words == ("Ann", "ran") and example.tags == ("B-PER", "O")
    with pytest.raises(UserError, match="line 2 has 2 words and 1 tags"):
        records.read(task(tmp_path, "tagging"), write(tmp_path / "y.tsv", "words\ttags\nAnn ran\tO\n"))


# --- SQuAD


def squad(path: Path, context: str, *qas: dict) -> str:
    return write(
        path, json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": context, "qas": list(qas)}]}]})
    )


def question(key: str, *answers: tuple[str, int], **more: object) -> dict:
    return {"id": key, "question": "who?", "answers": [{"text": t, "answer_start": s} for t, s in answers], **more}


def test_places_of_answers_are_code_points_of_the_context_and_mismatches_are_reported(tmp_path: Path) -> None:
    """C034: CRLF, U+202F, NBSP, an emoji beyond the basic plane and a combining accent stand before the answer."""
    context = "Line\r\nwith\u202f1\u00a0000 🎉 cafe\u0301: Zürich, Zürich"
    start = context.index("Zürich")
    name = squad(
        tmp_path / "x.json",
        context,
        question("a", ("Zürich", start), ("Zürich", start + 1)),
        question("b", ("Bern", 3)),
    )
    found = records.read(task(tmp_path, "span"), name)
    assert found.examples[0].answers == (("Zürich", start), ("Zürich", -1)) and found.examples[0].text_b == context
    assert found.examples[1].answers == (("Bern", -1),)
    assert found.problems == (
        (1, f"the answer 'Zürich' is not at {start + 1}: 'ürich,' is"),
        (2, "the answer 'Bern' is not at 3: 'e\\r\\nw' is"),
    )
    assert "2 problems" in found.report()
    name = squad(tmp_path / "y.json", "Ann ran", question("a", ("ra", -3)))
    assert records.read(task(tmp_path, "span"), name).examples[0].answers == (("ra", -1),)


def test_questions_without_answers_need_version_2(tmp_path: Path) -> None:
    impossible = question("b", ("plausible", 0), is_impossible=True)
    name = squad(tmp_path / "x.json", "Ann ran", question("a", ("Ann", 0)), impossible)
    with pytest.raises(UserError, match=r"question 2 \(b\) has no answer; set span.version_2"):
        records.read(task(tmp_path, "span"), name)
    found = records.read(task(tmp_path, "span", version_2=True), name)
    assert [(e.is_impossible, e.answers) for e in found.examples] == [(False, (("Ann", 0),)), (True, ())]
    assert "1 problem (question 2: it is marked as impossible, which counts, and has an answer" in found.report()


def test_a_squad_file_of_another_form_is_named(tmp_path: Path) -> None:
    name = write(tmp_path / "x.json", json.dumps({"data": [{"paragraphs": [{"qas": []}]}]}))
    with pytest.raises(UserError, match=r"after question 0: there is no key 'context'; a file of the format squad is"):
        records.read(task(tmp_path, "span"), name)
    with pytest.raises(UserError, match="not valid JSON"):
        records.read(task(tmp_path, "span"), write(tmp_path / "x.json", "[{]"))
    with pytest.raises(ConfigError, match="a file of the format squad is for the kind span; this task is tagging"):
        records.read(task(tmp_path, "tagging"), "x.json")
    with pytest.raises(UserError, match=r"y.json: no such file; did you mean `x.json`"):
        records.read(task(tmp_path, "span"), "y.json")


@pytest.mark.parametrize("name", ["x.json.gz", "x.tsv.gz"])
def test_a_gzip_file_cut_in_half_is_noticed(tmp_path: Path, name: str) -> None:
    """C121."""
    whole = gzip.compress(b"text\tlabel\n" + bytes(range(33, 120)) * 50)
    kind = "span" if "json" in name else "classification"
    with pytest.raises(UserError, match=f"{name}: .*gzip file"):
        records.read(task(tmp_path, kind), write(tmp_path / name, whole[: len(whole) // 2]))


def test_questions_one_a_line(tmp_path: Path) -> None:
    columns = {"id": "id", "text_a": "question", "text_b": "context", "label": "answers"}
    rows = [
        {"id": "a", "question": "q", "context": "Ann ran", "answers": {"text": ["Ann"], "answer_start": [0]}},
        {"id": "b", "question": "q", "context": "Ann ran", "answers": [{"text": "ran", "answer_start": 4}]},
    ]
    name = write(tmp_path / "x.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    assert [e.answers for e in records.read(task(tmp_path, "span", columns), name).examples] == [
        (("Ann", 0),),
        (("ran", 4),),
    ]


# --- Parquet and TFDS


def test_parquet_numbers_become_the_names_that_the_file_carries(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [1, 0], "tokens": [["x", "y"], ["z"]], "ner": [[0, 1], [0]]})
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["neg", "pos"], "_type": "ClassLabel"},
        "ner": {"feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": "Sequence"},
    }
    named = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(named, tmp_path / "x.parquet")
    assert [e.label for e in records.read(task(tmp_path), "x.parquet").examples] == ["pos", "neg"]
    tagging = task(tmp_path, "tagging", {"words": "tokens", "tags": "ner"})
    assert [(e.words, e.tags) for e in records.read(tagging, "x.parquet").examples] == [
        (("x", "y"), ("O", "B-X")), (("z",), ("O",)),
    ]  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "plain.parquet")
    assert [e.label for e in records.read(task(tmp_path), "plain.parquet").examples] == ["1", "0"]
    with pytest.raises(UserError, match=r"no column 'txt'; set data.columns; did you mean `text`"):
        records.read(task(tmp_path, columns={"text_a": "txt"}), "x.parquet")
    with pytest.raises(UserError, match="not a whole Parquet file"):
        records.read(task(tmp_path), write(tmp_path / "cut.parquet", (tmp_path / "x.parquet").read_bytes()[:60]))


@pytest.mark.slow
def test_a_tfds_set_is_read_with_the_names_of_its_classes(tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    def answers() -> object:
        return tfds.features.Sequence({"text": tfds.features.Text(), "answer_start": np.int32})

    rows = [
        {"text": "Ann é", "label": "pos", "words": ["Ann", "é"], "tags": ["B-X", "O"], "score": 0.5,
         "answers": {"text": ["é"], "answer_start": [4]}},
        {"text": "b", "label": "neg", "words": ["b"], "tags": ["O"], "score": 2.0,
         "answers": {"text": ["b"], "answer_start": [0]}},
    ]  # fmt: skip
    with tfds.core.registered.skip_registration():

        class Small(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
            VERSION = tfds.core.Version("1.0.0")

            def _info(self) -> object:
                features = {
                    "text": tfds.features.Text(),
                    "label": tfds.features.ClassLabel(names=["neg", "pos"]),
                    "words": tfds.features.Sequence(tfds.features.Text()),
                    "tags": tfds.features.Sequence(tfds.features.ClassLabel(names=["O", "B-X"])),
                    "score": np.float32,
                    "answers": answers(),
                }
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, dl_manager: object) -> object:
                return {"train": self._generate_examples()}

            def _generate_examples(self) -> object:
                yield from enumerate(rows)

    Small(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    folder = tmp_path / "small"

    def by_text(found: records.Records, what: str) -> list:
        return sorted((getattr(e, what) for e in found.examples), key=str)

    settings = {"format": "tfds"}
    assert by_text(records.read(task(folder, **settings), "train"), "label") == ["neg", "pos"]
    assert len(records.read(task(folder, **settings), "train[:50%]").examples) == 1
    tagging = records.read(task(folder, "tagging", {"words": "words", "tags": "tags"}, **settings), "train")
    assert by_text(tagging, "words") == [("Ann", "é"), ("b",)] and by_text(tagging, "tags") == [("B-X", "O"), ("O",)]
    numbers = records.read(task(folder / "1.0.0", "regression", {"label": "score"}, **settings), "train")
    assert by_text(numbers, "label") == [0.5, 2.0]
    columns = {"text_a": "text", "text_b": "text", "label": "answers"}
    spans = records.read(task(folder, "span", columns, **settings), "train")
    assert by_text(spans, "answers") == [(("b", 0),), (("é", 4),)]
    with pytest.raises(UserError, match=r"no feature 'txt'; set data.columns; did you mean `text`"):
        records.read(task(folder, columns={"text_a": "txt"}, **settings), "train")
