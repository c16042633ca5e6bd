"""Held-out figures: every example once, on any number of devices, beside baselines that one can recompute."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file, save_file
from tiny_run import Run

from bert_jax import evaluate as evaluating
from bert_jax.config import ExamplesConfig
from bert_jax.data import EvaluationData
from bert_jax.evaluate import Baselines, baselines, evaluate, table
from bert_jax.interop import exports, imports
from bert_jax.pretrain import make_meta
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig, UserError
from transformer_jax.shards import Shards


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with an untrained model at step 3, made for a batch and a mesh that this machine does not have."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_run.prepare(folder / "prepared")
    run = Run(tiny_run.config(folder), jax.devices()[:1])
    config = tiny_run.config(folder, train_batch_size=10, mesh_fsdp=5, mesh_data=2)
    save(folder / "run", run, config)
    return folder, run


def save(run_dir, run, config):
    config = dataclasses.replace(config, model=run.config.model)
    meta = make_meta(config, Shards.open(Path(config.data.prepared), "train"))
    checkpoints = Checkpoints(run_dir / "checkpoints", CheckpointConfig())
    checkpoints.save(3, run.engine.init()._asdict(), {}, meta)
    checkpoints.close()


@pytest.fixture(scope="module")
def scores(saved):
    return evaluate(str(saved[0] / "run"))


@pytest.mark.slow
def test_every_example_counts_once_on_any_number_of_devices(saved, scores):
    """C001: in batches of 16 on 8 devices here, and in batches of 8 and 5 rows on one."""
    folder, run = saved
    held_out = EvaluationData(Shards.open(folder / "prepared", "heldout"), run.config.examples)
    assert scores["step"] == 3 and scores["n/nsp"] == scores["n/sequences"] == held_out.num_examples
    for size in (8, 5):
        train = dataclasses.replace(run.config.train, eval_batch_size=size)
        other = Run(dataclasses.replace(run.config, train=train), jax.devices()[:1])
        alone = other.engine.evaluate(other.engine.init().params, held_out)
        assert held_out.num_rows % size, "the last batch has filler rows"
        assert {k: scores[k] for k in alone} == pytest.approx(alone, rel=1e-6)


def test_standard_errors_are_those_of_a_share(scores):
    p, n = scores["nsp_accuracy"], scores["n/nsp"]
    assert scores["nsp_accuracy_standard_error"] == pytest.approx(math.sqrt(p * (1 - p) / n))
    assert scores["mlm_loss"] == pytest.approx(math.log(61), rel=0.05), "an untrained model knows nothing"


def test_baselines_are_fitted_on_training_and_scored_on_the_same_targets(saved, scores):
    folder, run = saved
    held_out = EvaluationData(Shards.open(folder / "prepared", "heldout"), run.config.examples)
    counts = np.zeros(61)
    for document in tiny_run.documents(60, 0):
        for sentence in document:
            counts += np.bincount(sentence, minlength=61)
    batch = held_out.batch(0, held_out.num_rows)
    targets = batch["masked_lm_ids"][batch["masked_lm_weights"] > 0]
    labels = batch["next_sentence_labels"][batch["next_sentence_weights"] > 0]
    p = (counts + 1) / (counts.sum() + 61)
    expected = Baselines(
        mlm_loss=float(-np.log(p[targets]).mean()),
        mlm_accuracy=float((targets == counts.argmax()).mean()),
        nsp_accuracy=float(max(labels.mean(), 1 - labels.mean())),
    )
    assert scores["baselines"] == pytest.approx(dataclasses.asdict(expected))
    assert dataclasses.asdict(baselines(held_out, counts, 3)) == pytest.approx(dataclasses.asdict(expected))
    assert expected.mlm_loss < math.log(61), "some pieces are commoner"


def test_the_table_gives_each_figure_its_count_and_baseline(scores):
    lines = table(scores).splitlines()
    assert lines[0] == "held out, step 3, rows of 32, fixed masks and pairs"
    assert f"{scores['mlm_loss']:.4f}" in lines[2] and f"{scores['n/mlm']:.0f} masked pieces" in lines[2]
    assert f"standard error {scores['nsp_accuracy_standard_error']:.4f}" in lines[5]
    only_mlm = {k: v for k, v in scores.items() if not k.startswith("nsp")} | {"n/nsp": 0.0}
    assert len(table(only_mlm).splitlines()) == 4


def test_another_vocabulary_or_no_data_is_refused(saved, tmp_path):
    run = str(saved[0] / "run")
    with pytest.raises(UserError, match=r"no prepared data here; say where it lies with --prepared"):
        evaluate(run, prepared=str(tmp_path / "nothing"))
    exports.export_checkpoint(run, tmp_path / "hf")
    with pytest.raises(UserError, match=r"hf names no prepared data; .*--prepared DIR, or .* --data RECIPE"):
        evaluate(str(tmp_path / "hf"))
    imports.import_folder(tmp_path / "hf", tmp_path / "imported")
    with pytest.raises(UserError, match=r"imported names no prepared data; say where it lies with --prepared"):
        evaluate(str(tmp_path / "imported"))
    tiny_run.prepare(tmp_path / "other", vocab=[*tiny_run.VOCAB[:-1], "other"])
    with pytest.raises(UserError, match="made with another vocabulary than"):
        evaluate(run, prepared=str(tmp_path / "other"))
    tiny_run.write_prepared(tmp_path / "all", tiny_run.tokenizer(), {"train": tiny_run.documents(60, 0), "heldout": []})
    with pytest.raises(UserError, match="nothing was held out"):
        evaluate(run, prepared=str(tmp_path / "all"))
    with pytest.raises(UserError, match="no such folder"):
        evaluate(str(tmp_path / "nowhere"))


def write_text(folder):
    """A recipe, half held out, of nine documents."""
    rng = np.random.default_rng(0)
    words = [w for w in tiny_run.VOCAB if w.startswith("w")]
    text = "\n\n".join("\n".join(" ".join(rng.choice(words, 5)) for _ in range(6)) for _ in range(9))
    (folder / "new.txt").write_text(text + "\n")
    (folder / "r.toml").write_text('name = "new"\nheldout = 0.5\n[[sources]]\nfiles = ["new.txt"]\n')
    return str(folder / "r.toml")


@pytest.mark.slow
def test_the_documents_of_a_recipe_are_all_evaluated(saved, tmp_path, monkeypatch):
    """Tokenised with the checkpoint's own vocabulary; nothing is written beside the run or the recipe."""
    recipe = write_text(tmp_path)
    seen = []
    real = evaluating.EvaluationData
    noted = lambda shards, config: (seen.append(shards.num_documents), real(shards, config))[1]  # noqa: E731
    monkeypatch.setattr(evaluating, "EvaluationData", noted)
    found = evaluate(str(saved[0] / "run"), recipe=recipe)
    assert table(found).startswith(f"all of {recipe}, step 3")  # which need not be held out
    assert seen == [9] and found["n/nsp"] > 0 and found["baselines"]["mlm_loss"] > 0
    assert {p.name for p in tmp_path.iterdir()} == {"new.txt", "r.toml"}


@pytest.mark.slow
def test_a_hugging_face_folder_has_the_figures_of_the_run_it_came_from(saved, tmp_path):
    folder, run = saved
    length = run.config.examples.max_seq_length
    as_by_default = dataclasses.replace(run.config, examples=ExamplesConfig(max_seq_length=length))
    save(tmp_path / "run", run, as_by_default)
    expected = evaluate(str(tmp_path / "run"))
    assert expected["n/nsp"] > 20
    exports.export_checkpoint(tmp_path / "run", tmp_path / "hf")
    imports.import_folder(tmp_path / "hf", tmp_path / "imported")
    for name, step in (("hf", None), ("imported", 0)):
        found = evaluate(str(tmp_path / name), prepared=str(folder / "prepared"))
        assert found["step"] == step and found["text"] == "held out"
        figures = {
            k: v
            for k, v in expected.items()
            if k not in ("checkpoint", "step", "text", "baselines", "baselines_fitted_on")
        }
        assert {k: found[k] for k in figures} == pytest.approx(figures, rel=1e-6)
        assert found["baselines"] == expected["baselines"]
    shorter = evaluate(str(tmp_path / "hf"), prepared=str(folder / "prepared"), max_seq_length=16)
    assert shorter["max_seq_length"] == 16 and shorter["n/nsp"] > expected["n/nsp"]


def test_heads_that_a_folder_lacks_are_not_scored(saved, tmp_path):
    folder, _ = saved
    exports.export_checkpoint(folder / "run", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "pooler" not in k and "seq_relationship" not in k}, file)
    found = evaluate(str(tmp_path / "hf"), prepared=str(folder / "prepared"))
    assert "nsp_loss" not in found and found["n/mlm"] > 0
    save_file({k: v for k, v in load_file(file).items() if not k.startswith("cls.")}, file)
    with pytest.raises(UserError, match="has no masked-LM head"):
        evaluate(str(tmp_path / "hf"), prepared=str(folder / "prepared"))


def test_without_prepared_data_the_baselines_are_those_of_the_evaluated_text(saved, tmp_path):
    exports.export_checkpoint(saved[0] / "run", tmp_path / "hf")
    recipe = write_text(tmp_path)
    found = evaluate(str(tmp_path / "hf"), recipe=recipe)
    assert found["baselines_fitted_on"] == "the evaluated text itself"
    assert table(found).splitlines()[0] == f"all of {recipe}, rows of 32, fixed masks and pairs"
    assert "unigram of the evaluated text itself" in table(found)
