"""Linear models on frozen features: their optimum, and what a probe says of a task."""

import json

import numpy as np
import pytest
import tiny_bert
import tiny_finetune

from bert_jax import linear
from bert_jax.featurizer import FeatureConfig
from bert_jax.finetune import task_file
from bert_jax.main import main
from bert_jax.probe import PENALTIES, probe
from transformer_jax.config import ConfigError, UserError

PENALTY = 0.05


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(tiny_finetune.checkpoint(tmp_path_factory.mktemp("probe") / "run"))


def numbers(seed: int = 0):
    """Features of unlike sizes, one of them constant, and a label that two of them tell, but for some noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(200, 5)) * [1, 10, 0.1, 1, 0] + [0, 5, 0, 0, 3]
    return x, x[:, 0] + 0.1 * (x[:, 1] - 5) + 0.5 * rng.normal(size=200)


def scaled(x):
    return (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)


def test_logistic_regression_is_that_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = numbers()
    classes = np.digitize(y, [-0.5, 0.5])
    ours = linear.fit(x, classes, "classification", 3, (1.0, PENALTY))[1]
    theirs = sklearn.LogisticRegression(C=1 / (PENALTY * len(x)), tol=1e-10, max_iter=5000).fit(scaled(x), classes)
    expected = theirs.decision_function(scaled(x))
    got = ours(x)
    np.testing.assert_allclose(
        got - got.mean(-1, keepdims=True), expected - expected.mean(-1, keepdims=True), atol=1e-3
    )
    assert linear.loss(got, classes, "classification") < 0.6
    flat = np.tile(linear.constant(classes, "classification", 3), (len(x), 1))
    assert linear.loss(flat, classes, "classification") > 1.0


def test_labels_of_a_set_are_learned_each_by_itself():
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = numbers()
    sets = np.stack([y > 0, y < -0.5, np.ones(200) > 0], 1).astype(np.float32)
    got = linear.fit(x, sets, "multi_label", 3, (PENALTY,))[0](x)
    theirs = sklearn.LogisticRegression(C=1 / (PENALTY * len(x)), tol=1e-10, max_iter=5000)
    for label in (0, 1):
        expected = theirs.fit(scaled(x), sets[:, label]).decision_function(scaled(x))
        np.testing.assert_allclose(got[:, label], expected, atol=1e-3)
    assert (got[:, 2] > 3).all(), "a label that all have"
    assert (linear.constant(sets, "multi_label", 3) > 0).tolist() == [sets[:, 0].mean() > 0.5, False, True]


def test_ridge_regression_is_that_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = numbers()
    for penalty, ours in zip((1.0, PENALTY), linear.fit(x, y, "regression", 1, (1.0, PENALTY)), strict=True):
        theirs = sklearn.Ridge(alpha=penalty * len(x)).fit(scaled(x), y)
        np.testing.assert_allclose(ours(x)[:, 0], theirs.predict(scaled(x)), atol=1e-6)


def test_the_same_features_give_the_same_model_in_float32_too(monkeypatch):
    x, y = numbers()
    classes = (y > 0).astype(int)
    first, second = (linear.fit(x, classes, "classification", 2, (PENALTY,))[0] for _ in range(2))
    np.testing.assert_array_equal(first.kernel_FC, second.kernel_FC)
    monkeypatch.setattr(linear, "WIDE_BYTES", 0)
    narrow = linear.fit(x.astype(np.float32), classes, "classification", 2, (PENALTY,))[0]
    np.testing.assert_allclose(narrow(x), first(x), atol=2e-3)


@pytest.mark.slow
def test_a_probe_reads_what_the_text_says(run, tmp_path, capsys):
    """The label follows from one word of the text; random encoders keep words apart, so a probe finds it."""
    task = tiny_finetune.task(tmp_path, train=60, dev=14)
    found = probe(task, run, FeatureConfig(layers=(0, -1), batch_tokens=512))
    assert found["dev"]["dev"]["accuracy"] > 0.9 > found["majority"]["dev"]["accuracy"]
    assert found["l2"] in PENALTIES and found["tried"][str(found["l2"])] == max(found["tried"].values())
    labels = [label for *_, label in tiny_finetune.rows(14)]
    common = max(set(labels), key=[label for *_, label in tiny_finetune.rows(60)].count)
    assert found["majority"]["dev"]["accuracy"] == pytest.approx(labels.count(common) / 14)

    command = ["probe", str(tmp_path / "task.toml"), "--from", run, "--layers", "0", "-1", "--batch-tokens", "512"]
    assert main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["dev"] == found["dev"] and again["features"] == {
        "features": "mean",
        "layers": [0, -1],
        "join": "concat",
    }


def test_features_of_several_encoders_stand_beside_each_other(run, tmp_path, capsys, monkeypatch):
    """As ELMo's two directions; the first encoder's features are the first columns."""
    task = tiny_finetune.task(tmp_path, train=24, dev=8)
    seen = []

    def fit(x_NF, *arguments):
        seen.append(x_NF)
        return fitted(x_NF, *arguments)

    fitted = linear.fit
    monkeypatch.setattr(linear, "fit", fit)
    narrow = str(tiny_finetune.checkpoint(tmp_path / "narrow", hidden_size=16))
    probe(task, run, say=lambda line: None)
    assert main(["probe", str(tmp_path / "task.toml"), "--from", run, "--from", narrow]) == 0
    assert f"of {run} + {narrow}; 24 examples" in capsys.readouterr().out
    alone, both = seen
    assert both.shape == (24, 32 + 16) and (both[:, :32] == alone).all() and both[:, 32:].any()
    cased = tiny_bert.tiny_tokenizer(lowercase=False)
    monkeypatch.setattr(tiny_finetune, "tiny_tokenizer", lambda: cased)
    other = str(tiny_finetune.checkpoint(tmp_path / "cased"))
    with pytest.raises(UserError, match=r"cased has another vocabulary than"):
        probe(task, [run, other], say=lambda line: None)


def test_a_probe_of_tags_sees_the_first_piece_of_each_word(run, tmp_path, capsys):
    """Words of several pieces, some past the row's end: those count as O and are not learned from."""
    words = ["hello", "cat", "the", "dogs"]
    tags = {"hello": "B-X", "cat": "O", "the": "O", "dogs": "B-Y"}
    for name, count in (("train", 30), ("dev", 8)):
        sentences = [[words[(i * 3 + j * j) % 4] for j in range(2 + i % 3)] for i in range(count)]
        text = "\n\n".join("\n".join(f"{w} {tags[w]}" for w in sentence) for sentence in sentences)
        (tmp_path / f"{name}.conll").write_text(text + "\n")
    toml = 'kind = "tagging"\n[data]\ntrain = "train.conll"\ndev = "dev.conll"\n[inputs]\nmax_seq_length = 24\n'
    (tmp_path / "tags.toml").write_text(toml)
    command = ["probe", str(tmp_path / "tags.toml"), "--from", run, "--layers", "0", "--batch-tokens", "512"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "tags: a linear probe on tokens, layers 0" in out
    probe_line, majority_line = out.splitlines()[2:4]
    assert float(probe_line.split()[1]) == 1.0 and float(majority_line.split()[1]) == 0.0


def test_what_cannot_be_probed_is_refused(run, tmp_path):
    task = tiny_finetune.task(tmp_path)
    with pytest.raises(UserError, match="is of the kind span, and linear probes are for classification"):
        probe(task_file.override(task, ["--kind", "span"]), run)
    with pytest.raises(ConfigError, match=r"inputs\.max_seq_length is 64, and the model has 32 positions"):
        probe(task_file.override(task, ["--inputs.max_seq_length", "64"]), run)
    with pytest.raises(UserError, match="features of every piece are for tags"):
        probe(task, run, FeatureConfig(features="tokens"))
    with pytest.raises(ConfigError, match=r"data\.dev is empty"):
        probe(task_file.override(task, ["--data.dev", ""]), run, say=lambda line: None)
