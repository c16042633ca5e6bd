"""From scores to predictions, their lines and their files, for every kind; and inputs without a header."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_bert import tiny_tokenizer

from bert_jax.finetune import features, outputs, sweep
from bert_jax.finetune.evaluation import Scores, figure_names, figures, matrix_lines
from bert_jax.finetune.loading import is_finetuned
from bert_jax.finetune.predict import plain_examples
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import ColumnsConfig, DataConfig, InputsConfig, TaskConfig
from bert_jax.heads import HeadConfig
from transformer_jax.config import UserError

TOKENIZER = tiny_tokenizer()


def made(kind, labels, examples, logits, **settings):
    """(header, lines, objects) of these scores."""
    settings.setdefault("inputs", InputsConfig(max_seq_length=16))
    task, head = TaskConfig(kind=kind, labels=labels, **settings), HeadConfig(kind, labels)
    encoded = features.encode(task, examples, TOKENIZER, labelled=False)
    found = outputs.predictions(task, head, examples, encoded, logits(encoded))
    lines = list(outputs.lines(task, head, found))
    return outputs.header(task, head), lines, list(outputs.records(task, head, found, None)), found


def texts(*given):
    return [Example(str(i), i + 1, text_a=text) for i, text in enumerate(given)]


def test_classes_have_a_column_each_and_no_text_breaks_a_line():
    scores = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    header, lines, objects, _ = made("classification", ("a\tb", "c\nd"), texts("hello", "world"), lambda _: scores)
    assert header == "id\tprediction\ta b\tc d"
    assert lines == ["0\tc d\t0.250000\t0.750000", "1\ta b\t0.900000\t0.100000"]
    assert objects[0]["probabilities"] == {"a\tb": pytest.approx(0.25), "c\nd": pytest.approx(0.75)}


def test_each_label_of_a_set_is_judged_by_itself():
    scores = np.array([[2.0, 3.0, -1.0], [-1.0, -1.0, -800.0]], np.float32)
    _, lines, objects, _ = made("multi_label", ("x", "y", "z"), texts("hello", "world"), lambda _: scores)
    assert [line.split("\t")[1] for line in lines] == ["x,y", ""]
    assert objects[0]["prediction"] == ["x", "y"] and objects[1]["probabilities"]["z"] == pytest.approx(0)


def test_a_number_keeps_its_decimals():
    scores = np.array([[3.8125], [0.4375]], np.float32)
    header, lines, objects, _ = made("regression", ("score",), texts("hello", "world"), lambda _: scores)
    assert (header, lines) == ("id\tprediction", ["0\t3.8125", "1\t0.4375"])
    assert objects[0] == {"id": "0", "prediction": 3.8125}


def test_windows_of_one_text_give_one_line():
    inputs = InputsConfig(max_seq_length=8, long_text="windows", stride=4)
    examples = texts("hello " * 20, "world")

    def scores(encoded):
        rows = (encoded.example_index_N == 0).sum()
        assert rows > 1
        return np.array([[float(i), 0.0] for i in range(rows)] + [[0.0, 1.0]], np.float32)

    for pooling, top in (("max", "max"), ("mean", "mean")):
        settings = InputsConfig(**{**vars(inputs), "pooling": pooling})
        _, lines, _, found = made("classification", ("a", "b"), examples, scores, inputs=settings)
        assert len(lines) == 2
        odds = np.log(found.probabilities[0, 0] / found.probabilities[0, 1])
        count = len(features.encode(TaskConfig(inputs=settings), examples, TOKENIZER, False).example_index_N) - 1
        assert odds == pytest.approx({"max": count - 1, "mean": (count - 1) / 2}[top], rel=1e-5)


def test_tags_are_a_line_a_sentence_and_one_a_word():
    examples = [
        Example("0", 1, words=("hello", "\u200b", "zzz")),
        Example("1", 5, words=()),
        Example("2", 6, words=("the",)),
    ]

    def scores(encoded):
        return np.broadcast_to(np.array([0.0, 1.0], np.float32), (*encoded.arrays["input_ids"].shape, 2))

    header, lines, _, _ = made("tagging", ("O", "B-X"), examples, scores)
    assert header is None and lines == ["B-X O B-X", "", "B-X"]


def test_answers_are_files_that_the_squad_scripts_read(tmp_path):
    examples = [Example("q1", 1, text_a="the", text_b="Hello World, going"), Example("q2", 2, text_a="the", text_b="")]

    def scores(encoded):
        logits = np.zeros((*encoded.arrays["input_ids"].shape, 2), np.float32)
        place = int(np.flatnonzero(encoded.offsets_NL2[0, :, 0] == 6)[0])
        logits[0, place] = 5
        return logits

    header, lines, objects, found = made("span", (), examples, scores)
    assert header == "id\tprediction" and lines == ["q1\tWorld", "q2\t"]
    assert objects[0]["n_best"][0]["text"] == "World"
    files = outputs.write_spans(tmp_path / "p.json", found, None)
    assert [f.name for f in files] == ["p.json", "p.nbest.json", "p.null_odds.json"]
    answers, best, odds = (json.loads(f.read_text(encoding="utf-8")) for f in files)
    assert answers == {"q1": "World", "q2": ""} and best["q1"][0]["text"] == "World" and odds["q1"] == -10
    assert all(x.text(-20.0) == "" for x in found.answers), "below the threshold of the null score nothing is answered"


def test_choices_are_named_by_their_columns():
    columns = ColumnsConfig(choices=("ending0", "ending1"))
    examples = [Example("0", 1, text_a="the", choices=("hello", "world"))]
    settings = {"data": DataConfig(columns=columns)}
    header, lines, objects, _ = made("choice", (), examples, lambda _: np.array([[0.0, 3.0]], np.float32), **settings)
    assert header == "id\tprediction\tending0\tending1" and lines[0].startswith("0\t1\t")
    assert objects[0]["prediction"] == "1"


def test_lines_without_a_header_hold_what_the_kind_needs():
    def read(task, *lines):
        return list(plain_examples(task, list(enumerate(lines, 1)), "here"))

    assert read(TaskConfig(), "a\tb", "")[0].text_a == "a\tb"
    question = read(TaskConfig(kind="span"), "what\tthis")[0]
    assert (question.text_a, question.text_b) == ("what", "this")
    assert read(TaskConfig(kind="tagging"), "a  b c")[0].words == ("a", "b", "c")
    columns = ColumnsConfig(text_b="second", choices=("c0", "c1"))
    four = read(TaskConfig(kind="choice", data=DataConfig(columns=columns)), "a\tb\tc\td")[0]
    assert (four.text_a, four.text_b, four.choices) == ("a", "b", ("c", "d"))
    with pytest.raises(UserError, match="here: line 2 has 1 text"):
        read(TaskConfig(kind="span"), "what\tthis", "what")


def test_many_classes_show_their_commonest_mistakes():
    counts = np.eye(13, dtype=int) * 5
    counts[2, 7] = 4
    lines = matrix_lines({"labels": [f"c{i}" for i in range(13)], "counts": counts.tolist()})
    assert lines[0] == "  4 of c2 taken for c7" and "1 kind of mistake" in lines[1]
    assert len(matrix_lines({"labels": ["a", "b"], "counts": [[1, 0], [0, 1]]})) == 3


def test_a_folder_inside_a_fine_tuned_run_is_not_that_run(tmp_path):
    (tmp_path / "config.toml").write_text("[head]\nkind = 'span'\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "exported").mkdir()
    assert is_finetuned(tmp_path) and not is_finetuned(tmp_path / "exported")


@pytest.mark.parametrize(("positive", "f1"), [("", None), ("b", 2 / 3)])
def test_the_f1_of_one_class_is_given_where_it_is_asked_for(positive, f1):
    examples = [Example(str(i), i, label=name) for i, name in enumerate("abcb")]
    found = outputs.Predictions(tuple(examples), probabilities=np.eye(3)[[0, 1, 2, 2]])
    task = TaskConfig(labels=("a", "b", "c"), positive=positive)
    scores = figures(task, HeadConfig("classification", task.labels), found, 0.5)
    assert tuple(scores) == figure_names(task) and scores["n"] == 4 and scores["accuracy"] == 0.75
    assert scores.get("f1") == (None if f1 is None else pytest.approx(f1))


def test_long_figures_do_not_run_together_in_the_table():
    figures = {"mse": 250048.8356, "loss": 250048.8438, "n": 4.0}
    one = {"learning_rate": 2e-5, "seed": 0, "step": 1, "folder": "", "dev": {"dev": figures}}
    best = {"learning_rate": 2e-5, "seed": 0, "step": 1, "folder": ""}
    said = sweep.table({"trainings": [one], "summary": [], "best": best, "metric": "mse", "run": "r"})
    assert said.splitlines()[2].split() == ["2e-05", "0", "1", "250048.8356", "250048.8438"]


def test_predictions_of_dev_and_test_files_of_one_name_are_kept_apart(tmp_path):
    """As MNLI's task file has them: matched and mismatched, of both."""
    examples = [Example("0", 1, text_a="hello", label="a")]
    task, head = TaskConfig(labels=("a", "b")), HeadConfig("classification", ("a", "b"))
    encoded = features.encode(task, examples, TOKENIZER, labelled=False)
    dev, test = (outputs.predictions(task, head, examples, encoded, np.array([x])) for x in ([2.0, 0.0], [0.0, 2.0]))
    scores = Scores(task, head, {}, {}, {}, {"matched": dev, "more": dev}, {"matched": test})
    names = [path.name for path in scores.write(tmp_path)]
    assert names == ["predictions_dev_matched.tsv", "predictions_more.tsv", "predictions_test_matched.tsv"]
    last = [(tmp_path / name).read_text().splitlines()[1].split("\t")[1:-2] for name in names]
    assert last == [["a", "a"], ["a", "a"], ["b"]]
