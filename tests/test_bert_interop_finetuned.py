"""A run of `finetune` taken elsewhere: its best step, with its head, labels and figures, by every way out."""

import numpy as np
import pytest
from tiny_finetune import TASK, checkpoint, task

from bert_jax import loading
from bert_jax.finetune.loading import load_finetuned
from bert_jax.finetune.sweep import finetune
from bert_jax.interop import exports, imports
from bert_jax.interop.huggingface_names import to_hf
from bert_jax.interop.probe import probe_logits
from transformer_jax.config import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuned")
    base = checkpoint(folder / "pretrained")
    finetune(task(folder / "task", TASK, "--train.epochs", "2"), str(base), say=print)
    return folder / "task" / "run"


def test_the_best_step_goes_out_with_its_labels_and_comes_in_again(run, tmp_path):
    tuned = load_finetuned(run)
    out = exports.export_checkpoint(run, tmp_path / "out")
    found = loading.read(out)
    assert found.head is not None and (found.head.kind, found.head.labels) == ("classification", ("thing", "animal"))
    written, meant = (to_hf(x.params, x.config, x.head) for x in (found, tuned))
    assert written.keys() == meant.keys() and all(np.array_equal(written[name], meant[name]) for name in meant)
    card = (out / "README.md").read_text()
    assert f"| step | {tuned.step} |" in card and "| heldout accuracy | " in card and "0. thing\n1. animal" in card
    assert "bert-jax finetune TASK.toml" in card and str(run.parent.parent) not in card
    with pytest.raises(UserError, match=r"a folder of another program, not a run; .*bert-jax import "):
        load_finetuned(out)
    again = load_finetuned(imports.import_folder(out, tmp_path / "again"))
    ours, theirs = (probe_logits(x.params, x.config, x.head)["classification"] for x in (tuned, again))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["onnx", "stablehlo", "tf1", "sentence-transformers"])
def test_every_other_format_takes_it(run, tmp_path, form):
    pytest.importorskip("onnxruntime")
    card = (exports.export_checkpoint(run, tmp_path / "out", form, say=print) / "README.md").read_text()
    assert f"--format {form}`" in card and str(run.parent.parent) not in card


def test_pretraining_starts_from_its_encoder(run):
    said: list[str] = []
    found = loading.load(run, say=said.append)
    assert (
        found.drawn == ("mlm", "nsp") and found.step is not None and "its head (classification) is left out" in said[0]
    )
