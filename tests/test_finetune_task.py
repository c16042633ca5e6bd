"""Losses against hand computation, the order of training rows, and every task file that comes with the project."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.finetune import records, rows, task, task_file
from bert_jax.finetune.evaluation import check_metric, figure_names, with_labels
from bert_jax.finetune.task import loss_sums, scored
from bert_jax.finetune.task_file import METRICS, load_task, splits
from bert_jax.heads import HeadConfig
from transformer_jax import config as core
from transformer_jax.config import ConfigError

TASKS = sorted((Path(__file__).parents[1] / "launch" / "tasks").glob("*.toml"))
BUNDLED = [p for p in TASKS if 'folder = "../../data/' in p.read_text(encoding="utf-8")]
LOGITS_BC = np.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0], [-0.5, 0.0, 2.0]], np.float32)
WEIGHTS_B = np.array([1, 1, 0], np.float32)


def mean(kind, logits, names=(), **batch):
    head = HeadConfig(kind, tuple(names))
    batch = {"weights": jnp.asarray(WEIGHTS_B)} | {k: jnp.asarray(v) for k, v in batch.items()}
    return float(loss_sums(head, jnp.asarray(logits), batch)["head"] / scored(kind, batch).sum())


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_a_regression_is_the_mean_square_and_refuses_what_would_be_broadcast():
    """C123: 8 pairs by hand; labels [B, 1] against predictions [B], or a head of two numbers, stop."""
    labels_B = np.array([0, 0.4, 3.8, 5, 2.2, 1.0, 4.6, 3.0], np.float32)
    said_B = np.linspace(0.1, 4.9, 8, dtype=np.float32)
    head = HeadConfig("regression", ("score",))
    batch = {"weights": jnp.ones(8), "labels": jnp.asarray(labels_B)}
    found = loss_sums(head, jnp.asarray(said_B)[:, None], batch)["head"] / 8
    assert float(found) == pytest.approx(np.mean((labels_B - said_B) ** 2), rel=1e-6)
    with pytest.raises(ConfigError, match=r"\[8, 1\].*must be \[8\]"):
        loss_sums(head, jnp.asarray(said_B)[:, None], {**batch, "labels": jnp.asarray(labels_B)[:, None]})
    with pytest.raises(ConfigError, match="one number"):
        loss_sums(head, jnp.zeros((8, 2)), batch)


@pytest.mark.slow
def test_losses_are_those_of_the_definitions_and_fillers_weigh_nothing():
    labels_B = np.array([2, 0, 1], np.int32)
    hand = -log_softmax(LOGITS_BC)[np.arange(2), labels_B[:2]].mean()
    assert mean("classification", LOGITS_BC, "abc", labels=labels_B) == pytest.approx(hand, rel=1e-6)
    assert mean("choice", LOGITS_BC, labels=labels_B) == pytest.approx(hand, rel=1e-6)

    sets_BC = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 1]], np.float32)
    p_BC = 1 / (1 + np.exp(-LOGITS_BC))
    each = -(sets_BC * np.log(p_BC) + (1 - sets_BC) * np.log(1 - p_BC))[:2]
    assert mean("multi_label", LOGITS_BC, "abc", labels=sets_BC) == pytest.approx(each.mean(), rel=1e-6)
    extreme = mean("multi_label", np.full((3, 3), 1e4, np.float32), "abc", labels=np.zeros((3, 3), np.float32))
    assert extreme == pytest.approx(1e4)

    tags_BL = np.array([[0, -1], [2, 1], [1, 1]], np.int32)
    logits_BLC = np.stack([LOGITS_BC, LOGITS_BC[::-1]], axis=1)
    logs = log_softmax(logits_BLC)
    hand = -(logs[0, 0, 0] + logs[1, 0, 2] + logs[1, 1, 1]) / 3
    assert mean("tagging", logits_BLC, "abc", labels=tags_BL) == pytest.approx(hand, rel=1e-6)


@pytest.mark.slow
def test_the_loss_of_a_span_does_not_depend_on_padding():
    start, end = np.array([1, 0, 0], np.int32), np.array([2, 0, 0], np.int32)
    logits_BL2 = np.stack([LOGITS_BC, LOGITS_BC[:, ::-1]], axis=-1)
    real_BL = np.ones((3, 3), np.int32)
    logs = log_softmax(logits_BL2.swapaxes(1, 2))
    hand = -np.mean([(logs[i, 0, start[i]] + logs[i, 1, end[i]]) / 2 for i in range(2)])
    assert mean("span", logits_BL2, start=start, end=end, sequence_ids=real_BL) == pytest.approx(hand, rel=1e-6)
    padded = np.pad(logits_BL2, ((0, 0), (0, 2), (0, 0)), constant_values=5.0)
    real = np.pad(real_BL, ((0, 0), (0, 2)))
    assert mean("span", padded, start=start, end=end, sequence_ids=real) == pytest.approx(hand, rel=1e-6)


def arrays(n: int, length: int = 40):
    real = (np.arange(length)[None] < 3 + np.arange(n)[:, None]).astype(np.int32)
    ids = np.arange(n * length, dtype=np.int32).reshape(n, length)
    inputs = dict.fromkeys(task.INPUTS, ids) | {"sequence_ids": real}
    return inputs | {"labels": np.arange(n, dtype=np.int32)}


def test_training_rows_are_a_pure_function_of_seed_and_step_and_count_equally():
    made = rows.TrainingRows(arrays(13), ("labels",), 8, seed=3, epochs=3)
    batches = [made.batch(8 * step, 8) for step in range(made.steps)]
    seen = np.concatenate([b["labels"][b["weights"] > 0] for b in batches])
    assert sorted(seen[:13]) == list(range(13)) and (np.bincount(seen) == 3).all()
    assert (seen[:13] != seen[13:26]).any(), "each epoch has an order of its own"
    again = rows.TrainingRows(arrays(13), ("labels",), 8, seed=3, epochs=3)
    for name, value in again.batch(16, 8).items():
        np.testing.assert_array_equal(value, batches[2][name])
    part = again.batch(20, 4, offset=4)  # of another host: the same length, its own rows
    np.testing.assert_array_equal(part["input_ids"], batches[2]["input_ids"][4:])
    other = rows.TrainingRows(arrays(13), ("labels",), 8, seed=4, epochs=3)
    assert (other.batch(0, 8)["labels"] != batches[0]["labels"]).any()


def test_batches_are_no_longer_than_their_rows_need():
    fixed = rows.FixedRows(arrays(40, 100), ("labels",), 16)
    sizes = [fixed.batch(first, 16)["input_ids"].shape[1] for first in (0, 16, 32)]
    assert sizes == [32, 64, 64]
    last = fixed.batch(32, 16)
    assert last["weights"].sum() == 8 and not last["sequence_ids"][8:].any()


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.stem)
def test_every_task_file_loads_and_says_what_it_is(path):
    found = load_task(path)
    assert found.name == path.stem and found.best_metric in METRICS[found.kind]
    assert found.data.train and found.data.dev and found.data.columns.text_a
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert core.load(type(found), core.to_builtins(found), "stored") == found


@pytest.mark.parametrize("path", BUNDLED, ids=lambda p: p.stem)
def test_every_bundled_set_is_read_with_labels_that_its_training_file_has(path):
    found = load_task(path)
    train = records.read(found, found.data.train)
    assert not train.problems
    found = with_labels(found, train)
    check_metric(found)
    for files in (found.data.dev, found.data.test):
        for name in splits("part", files).values():
            records.check_labels(records.read(found, name), found.labels)


@pytest.mark.slow
def test_the_cards_state_the_sizes_of_the_bundled_sets():
    data = Path(__file__).parents[1] / "data" / "tasks"
    card = (data / "CARDS.md").read_text(encoding="utf-8")
    assert {p.stem for p in BUNDLED} == {p.name for p in data.iterdir() if p.is_dir()}
    for path in BUNDLED:
        found = load_task(path)
        row = next(line for line in card.splitlines() if line.startswith(f"| {path.stem} |"))
        for name in (found.data.train, found.data.dev, found.data.test):
            if name:
                assert f" {len(records.read(found, name).examples):,} " in row
    assert gzip.decompress((data / "sms_spam" / "dev.tsv.gz").read_bytes()).startswith(b"label\ttext\n")


def test_a_wrong_key_value_or_metric_is_named(tmp_path):
    path = tmp_path / "t.toml"
    for text, message in (
        ("[data]\ntrian = 'x'", r"data\.trian.*data\.train"),
        ("kind = 'clasification'", "classification"),
        ("metric = 'acuracy'", "accuracy"),
        ("kind = 'choice'\n[data]\ncolumns = { choices = ['a'] }", "two or more"),
        ("labels = ['a', 'a']", "once"),
        ("[train]\nlearning_rate = []", "above 0"),
        ("[train]\nwarmup = 2", "share"),
        ("[inputs]\nlong_text = 'windows'", "stride"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_task(path)
    with pytest.raises(ConfigError, match=r"'f1', which these labels do not allow; name the class .* in `positive`"):
        check_metric(task_file.TaskConfig(labels=("a", "b", "c"), metric="f1"))
    with pytest.raises(ConfigError, match="positive"):
        check_metric(task_file.TaskConfig(labels=("a", "b"), positive="c"))
    assert "f1" in figure_names(task_file.TaskConfig(labels=("a", "b", "c"), positive="b"))


def test_files_are_seen_from_the_task_file_and_those_of_overrides_from_here(tmp_path, monkeypatch):
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "tasks" / "t.toml"
    file.write_text('[data]\nfolder = "../sets"\ntrain = "a.tsv"\ndev = { m = "b.tsv", mm = "c.tsv" }\n')
    monkeypatch.chdir(tmp_path)
    plain = load_task(file).data
    assert Path(task_file.data_file(plain, plain.train)).resolve() == tmp_path / "sets" / "a.tsv"
    given = load_task(file, ["--data.train", "d.tsv"]).data
    assert Path(task_file.data_file(given, given.train)) == tmp_path / "d.tsv"
    moved = load_task(file, ["--data.folder", "elsewhere"]).data
    assert task_file.data_file(moved, moved.train) == "elsewhere/a.tsv"
    assert dataclasses.asdict(moved)["dev"] == {"m": "b.tsv", "mm": "c.tsv"}
