"""Fine-tuning from end to end on a tiny model: training, scores, resume, sweeps, prediction, and what is refused."""

from __future__ import annotations

import io
import json
import sys

import jax
import numpy as np
import pytest
from tiny_finetune import TASK, checkpoint, rows, task, write_tsv
from tiny_run import Flag, programs_kept

from bert_jax import main as program
from bert_jax.finetune import evaluation, predict
from bert_jax.finetune.forward import Forward
from bert_jax.finetune.loading import best_of, load_encoder, load_finetuned
from bert_jax.finetune.sweep import best_training, finetune, summarise
from bert_jax.finetune.task import FinetuneTask
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.interop.exports import export_checkpoint
from transformer_jax import checkpoint as checkpoints
from transformer_jax import sharding
from transformer_jax.config import ConfigError, MeshConfig, UserError
from transformer_jax.report import read_records


def quiet(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint that everything here starts from; programs are kept for the whole file."""
    folder = tmp_path_factory.mktemp("base")
    with programs_kept(folder / "programs"):
        yield checkpoint(folder / "pretrained")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A finished fine-tuning: (its folder, what it gave)."""
    folder = tmp_path_factory.mktemp("finetuned")
    found = finetune(task(folder), str(base), say=quiet)
    return folder / "run", found


@pytest.mark.slow
def test_a_run_learns_and_keeps_what_it_needs(run):
    folder, found = run
    (training,) = found["trainings"]
    assert training["dev"]["dev"]["n"] == 13
    assert training["dev"]["dev"]["accuracy"] > 0.9
    assert sum(map(sum, training["confusion"]["dev"]["counts"])) == 13
    loaded = load_finetuned(folder)
    assert loaded.head.labels == ("thing", "animal") and loaded.step == training["step"]
    assert {"config.toml", "tokenizer", "checkpoints", "metrics.jsonl", "results.json"} <= {
        p.name for p in folder.iterdir()
    }
    held_out = [r for r in read_records(folder / "metrics.jsonl") if r["split"] == "heldout"]
    assert [r["step"] for r in held_out] == [12, 24] and all(r["n"] == 13 for r in held_out)
    lines = (folder / "predictions_dev.tsv").read_text().splitlines()
    assert lines[0] == "id\tlabel\tprediction\tthing\tanimal" and len(lines) == 14


def test_the_best_step_is_kept_and_of_equals_the_earlier(run):
    folder, found = run
    held_out = {r["step"]: r["accuracy"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "heldout"}
    best = max(held_out, key=lambda step: (held_out[step], -step))
    assert found["trainings"][0]["step"] == best
    assert checkpoints.locate(best_of(folder))[1] == best


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "batch_size"), [(1, 4), (1, 13), (8, 16)])
def test_every_example_is_scored_once_whatever_the_batch(run, devices, batch_size):
    """C001: 13 rows at batch sizes that do not divide them, on 1 and on 8 devices."""
    found = load_finetuned(run[0])
    data = evaluation.load_set(found.task, "dev", found.task.data.dev, found.tokenizer, quiet)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
    forward = Forward(FinetuneTask(found.config, found.head, 24), mesh, batch_size, "data_parallel")
    logits, loss = forward(forward.put(found.params), data.features.arrays, loss=True)
    expected = run[1]["trainings"][0]["dev"]["dev"]
    assert loss == pytest.approx(expected["loss"], abs=1e-6)
    assert logits.shape == (13, 2)
    said = ["animal" if x > y else "thing" for y, x in logits]
    assert np.mean([a == b for a, (_, _, b) in zip(said, rows(13), strict=True)]) == pytest.approx(expected["accuracy"])


def test_labels_are_matched_by_name_whatever_their_order(run, tmp_path):
    """C053: another task file lists the labels the other way round; unknown names stop."""
    task(tmp_path, TASK.replace('["thing", "animal"]', '["animal", "thing"]'))
    again = predict.evaluate(str(run[0]), str(tmp_path / "task.toml"), quiet)
    expected = run[1]["trainings"][0]["dev"]["dev"]
    assert again["dev"]["dev"]["accuracy"] == expected["accuracy"] > 0.9
    assert again["dev"]["dev"]["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    task(tmp_path, TASK.replace('["thing", "animal"]', '["animal", "plant"]'))
    with pytest.raises(UserError, match="plant"):
        predict.evaluate(str(run[0]), str(tmp_path / "task.toml"), quiet)


def test_predict_needs_no_labels_and_names_its_columns(run, tmp_path, capsys):
    """C104: a file with only texts; rows in order, one a line, that sum to 1."""
    file = write_tsv(tmp_path / "new.tsv", 13, label=False)
    assert program.main(["predict", str(run[0]), str(file)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["id", "prediction", "thing", "animal"]
    assert [line[0] for line in lines[1:]] == [str(i) for i in range(13)]
    for _, said, thing, animal in lines[1:]:
        assert float(thing) + float(animal) == pytest.approx(1, abs=2e-6)
        assert said == ("thing" if float(thing) > float(animal) else "animal")
    expected = [line.split("\t") for line in (run[0] / "predictions_dev.tsv").read_text().splitlines()]
    assert [line[1] for line in lines[1:]] == [line[2] for line in expected[1:]]


def test_standard_input_is_predicted_in_order_and_in_chunks(run, monkeypatch, capsys):
    """Two texts a line; blank ones count, long ones are cut and counted, a line with one text is named."""
    monkeypatch.setattr(predict, "CHUNK", 2)

    def feed(text: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
        return program.main(["predict", str(run[0])])

    given = "hello hello hello\tthe\n\t\n" + "world " * 30 + "\tthe\r\nhello hello the\tgoing\nworld world\tthe"
    assert feed(given) == 0
    captured = capsys.readouterr()
    said = [line.split("\t")[1] for line in captured.out.splitlines()[1:]]
    assert [said[i] for i in (0, 2, 3, 4)] == ["animal", "thing", "animal", "thing"] and len(said) == 5
    assert "in 1 of 5 examples (line 3)" in captured.err
    assert feed("hello\tworld\nhello\n") == 2
    assert "line 2 has 1 text" in capsys.readouterr().err


def test_predictions_do_not_replace_the_file_that_they_are_of(run, tmp_path, monkeypatch, capsys):
    file = write_tsv(tmp_path / "new.tsv", 3, label=False)
    before = file.read_text()
    monkeypatch.chdir(tmp_path)
    assert program.main(["predict", str(run[0]), str(file), "--out", "new.tsv"]) == 2
    assert "new.tsv is read and would be written over; name another file" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "RUN", "--threshold", "0.5"), "--threshold is for questions"),
        (("predict", "RUN", "--train.epochs", "9"), "of [train] a prediction heeds batch_size and eval_batch_size"),
        (("predict", "RUN", "."), ". is a folder; name a file"),
        (
            ("evaluate", "RUN", "--prepared", "x"),
            "RUN is fine-tuned, and --prepared and --max-seq-length are of pretraining",
        ),
    ],
)
def test_what_would_be_passed_over_in_silence_is_refused(run, capsys, arguments, message):
    folder = str(run[0])
    assert program.main([folder if a == "RUN" else a for a in arguments]) == 2
    err = capsys.readouterr().err
    assert message.replace("RUN", folder) in err and "Traceback" not in err


def test_predict_lists_the_keys_of_the_task(run, capsys):
    with pytest.raises(SystemExit) as left:
        program.main(["predict", str(run[0]), "--keys"])
    assert left.value.code == 0 and "--data.columns.text-a" in capsys.readouterr().out.replace("_", "-")


def test_rows_past_the_position_table_are_refused_before_anything_is_compiled(base, run, tmp_path, monkeypatch, capsys):
    """C014: in finetune and in predict; the model has 32 positions."""
    task(tmp_path)
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("compiled"))
    arguments = [str(tmp_path / "task.toml"), "--from", str(base), "--out", str(tmp_path / "run")]
    assert program.main(["finetune", *arguments, "--inputs.max_seq_length", "33"]) == 2
    assert program.main(["predict", str(run[0]), str(tmp_path / "dev.tsv"), "--inputs.max_seq_length", "33"]) == 2
    message = "inputs.max_seq_length is 33, and the model has 32 positions"
    assert capsys.readouterr().err.count(message) == 2


def test_the_order_of_a_pair_reaches_the_model(run):
    """C105: (x, y) is not (y, x): the same pieces in another order give other probabilities."""
    found = load_finetuned(run[0])
    predictor = predict.Predictor(found)
    lines = [(1, "hello hello\tworld world"), (2, "world world\thello hello")]
    there, back = predictor(list(predict.plain_examples(found.task, lines, "test"))).probabilities
    assert abs(there[0] - back[0]) > 0.01


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_parameters(base, run, tmp_path):
    stop = Flag()

    def on_step(number, values):
        stop.raised = stop.raised or number == 1

    assert finetune(task(tmp_path), str(base), stop=stop, on_step=on_step, say=quiet) is None
    stopped = checkpoints.read_meta(tmp_path / "run")[0]
    assert 0 < stopped < 24
    half = [f"{tmp_path / 'run'} is not finished: step {stopped} of 24; the same `finetune` command goes on"]
    said: list[str] = []
    predict.evaluate(str(tmp_path / "run"), say=said.append)
    assert said == half
    export_checkpoint(tmp_path / "run", tmp_path / "exported", say=said.append)
    assert said == half * 2
    found = finetune(task(tmp_path), str(base), say=quiet)
    assert found["trainings"][0]["dev"] == run[1]["trainings"][0]["dev"]
    predict.evaluate(str(tmp_path / "run"), say=said.append)
    assert said == half * 2
    for a, b in zip(*(jax.tree.leaves(checkpoints.read_params(r)[1]) for r in (tmp_path / "run", run[0])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_is_kept_and_other_settings_are_refused(base, run):
    folder = run[0].parent
    said: list[str] = []
    again = finetune(task(folder), str(base), say=said.append)
    assert again["trainings"] == run[1]["trainings"] and any("finished before" in line for line in said)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        finetune(task(folder, TASK, "--train.learning_rate", "1e-4"), str(base), say=quiet)


@pytest.mark.parametrize("file", ["train", "dev"])
def test_a_finished_run_does_not_stand_for_files_that_have_changed(base, run, file):
    """The same number of rows and the same settings, and other labels: the old figures would be of other data."""
    folder = run[0].parent
    settings = task(folder)
    path = folder / f"{file}.tsv"
    before = path.read_text()
    try:
        path.write_text(before.replace("thing", "@").replace("animal", "thing").replace("@", "animal"))
        with pytest.raises(ConfigError, match=r"is finished, and what is in the task's files has changed since"):
            finetune(settings, str(base), say=quiet)
    finally:
        path.write_text(before)
    assert finetune(settings, str(base), say=quiet)["trainings"] == run[1]["trainings"]


def test_seeds_are_summed_up_by_rate_and_the_best_rate_wins():
    def training(rate, seed, accuracy):
        dev = {"dev": {"accuracy": accuracy, "n": 10.0}}
        return {"learning_rate": rate, "seed": seed, "folder": f"{rate}/{seed}", "step": 5, "dev": dev}

    results = [training(*t) for t in ((1e-5, 0, 0.9), (1e-5, 1, 0.5), (3e-5, 0, 0.8), (3e-5, 1, 0.8), (3e-5, 2, 0.8))]
    first, second = summarise(results)
    assert first["dev"]["dev"]["accuracy"] == {"mean": 0.7, "std": pytest.approx(0.08**0.5), "n": 2}
    assert second["dev"]["dev"]["accuracy"] == {"mean": pytest.approx(0.8), "std": pytest.approx(0), "n": 3}
    best = best_training(TaskConfig(), results, [first, second])
    assert (best["learning_rate"], best["seed"]) == (3e-5, 0), "the best mean, and of equals the first"


@pytest.mark.slow
def test_every_seed_is_a_training_of_its_own(base, tmp_path):
    settings = task(tmp_path, TASK, "--train.learning_rate", "5e-3", "--train.seeds", "0", "1")
    found = finetune(settings, str(base), say=quiet)
    assert [(t["learning_rate"], t["seed"]) for t in found["trainings"]] == [(5e-3, 0), (5e-3, 1)]
    best = max(found["trainings"], key=lambda t: t["dev"]["dev"]["accuracy"])
    assert found["best"]["folder"] == best["folder"]
    assert load_finetuned(tmp_path / "run").task.train.seeds == (best["seed"],)
    losses = [t["dev"]["dev"]["loss"] for t in found["trainings"]]
    assert losses[0] != losses[1], "two seeds gave the same model"
    whole = (tmp_path / "run" / "results.json").read_text()
    for damaged in ("", "[]", "{}", whole[: len(whole) // 2]):
        (tmp_path / "run" / "results.json").write_text(damaged)
        with pytest.raises(UserError, match=r"results\.json is damaged: it does not say which training is the best"):
            best_of(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()  # as where it was stopped between two trainings
    with pytest.raises(UserError, match=r"those of several trainings lie apart: name .*seed0"):
        load_finetuned(tmp_path / "run")


def test_a_random_start_takes_the_tokenizer_and_nothing_else(base, run):
    drawn = load_encoder(base, random=True, say=quiet)
    assert drawn.params == {} and drawn.tokenizer.digest == load_finetuned(run[0]).tokenizer.digest
    again = load_encoder(run[0], say=quiet)
    assert set(again.params) == {"embeddings", "encoder", "pooler"}


@pytest.mark.slow
def test_a_regression_keeps_its_decimals(base, tmp_path, capsys):
    """C123: float labels in, Pearson and Spearman and decimals out."""
    scores = (0, 0.4, 3.8, 5, 2.25, 1, 4.75, 3)
    text = TASK.replace('"classification"', '"regression"').replace(
        'labels = ["thing", "animal"]', 'labels = ["score"]'
    )
    settings = task(tmp_path, text, "--train.epochs", "1", "--train.batch_size", "8")
    body = "".join(f"{a}\t{b}\t{s}\n" for (a, b, _), s in zip(rows(8), scores, strict=True))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("text\tsecond\tlabel\n" + body)
    found = finetune(settings, str(base), say=quiet)["trainings"][0]["dev"]["dev"]
    lines = (tmp_path / "run" / "predictions_dev.tsv").read_text().splitlines()
    assert lines[0] == "id\tlabel\tprediction"
    said = np.array([float(line.split("\t")[2]) for line in lines[1:]])
    assert found["mse"] == pytest.approx(np.mean((said - np.array(scores)) ** 2), rel=1e-4)
    assert found["loss"] == pytest.approx(found["mse"], rel=1e-5)
    assert np.any(said != np.round(said)) and {"pearson", "spearman", "pearson_spearman"} <= set(found)


def test_the_json_results_and_the_table_go_to_standard_output(base, run, capsys):
    folder = run[0].parent
    arguments = ["finetune", str(folder / "task.toml"), "--from", str(base), "--out", str(folder / "run")]
    assert program.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["step"] == run[1]["best"]["step"]
    assert program.main(arguments) == 0
    assert "n = 13" in capsys.readouterr().out
    assert program.main(arguments[:2]) == 2 and "--from is missing" in capsys.readouterr().err


HEADER = {"multi_label": "text\tlabel", "choice": "text\tfirst\tsecond\tlabel"}
COLUMNS = {
    "multi_label": '{ text_a = "text", label = "label" }',
    "choice": '{ text_a = "text", choices = ["first", "second"], label = "label" }',
}


def by_heart(folder, kind):
    """A task of 12 examples of `kind` to be learnt and, as its dev file, recalled."""
    lines, questions = [], []
    for i in range(12):
        word, place = ("hello", "world")[i % 2], i // 2 % 3
        filler = ["the"] * (2 + i % 3)
        if kind == "multi_label":
            named = [name for name, is_there in (("odd", i % 2), ("late", place == 2)) if is_there]
            text = [word, *filler, *(["going"] if place == 2 else [])]
            lines.append(f"{' '.join(text)}\t{','.join(named)}")
        elif kind == "choice":
            lines.append(f"{' '.join(filler)}\t{('hello', 'world')[i % 2]}\t{('world', 'hello')[i % 2]}\t{i % 2}")
        elif kind == "tagging":
            words = [*filler[:place], word, *filler]
            lines += [f"{w} {'B-greeting' if w == 'hello' else 'B-place' if w == 'world' else 'O'}" for w in words]
            lines.append("")
        else:
            context = " ".join([*filler[:place], word, *filler, "going"])
            asked = {"id": str(i), "question": "the", "answers": [{"text": word, "answer_start": context.index(word)}]}
            questions.append({"context": context, "qas": [asked]})
    if kind == "span":
        text = json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": questions}]})
    else:
        text = "\n".join([HEADER[kind], *lines] if kind in HEADER else lines) + "\n"
    data = {"multi_label": ("d.tsv", "tsv"), "choice": ("d.tsv", "tsv"), "tagging": ("d.txt", "conll")}
    name, form = data.get(kind, ("d.json", "squad"))
    folder.joinpath(name).write_text(text, encoding="utf-8")
    labels = {"multi_label": 'labels = ["odd", "late"]', "tagging": 'labels = ["O", "B-greeting", "B-place"]'}
    columns = f"columns = {COLUMNS[kind]}\n" if kind in COLUMNS else ""
    return (
        f'kind = "{kind}"\n{labels.get(kind, "")}\n'
        f'[data]\ntrain = "{name}"\ndev = "{name}"\nformat = "{form}"\n{columns}'
        "[inputs]\nmax_seq_length = 24\n[train]\nepochs = 40\nbatch_size = 8\nlearning_rate = 1e-2\neval_every = 40\n"
        "dropout = 0.0\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "figure"), [("multi_label", "exact"), ("choice", "accuracy"), ("tagging", "f1"), ("span", "exact")]
)
def test_every_kind_learns_a_dozen_examples_by_heart(base, tmp_path, kind, figure):
    """From the file to the figures: what says which label, tag, place or choice reaches the model as it should."""
    settings = task(tmp_path, by_heart(tmp_path, kind))
    found = finetune(settings, str(base), say=quiet)
    assert found["trainings"][0]["dev"]["dev"][figure] == 1.0
    assert list((tmp_path / "run").glob("predictions_dev*"))
