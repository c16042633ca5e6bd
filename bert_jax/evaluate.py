"""Held-out figures of a checkpoint, beside the baselines that they have to beat."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.data import EvaluationData
from bert_jax.pretrain import make_engine, open_prepared
from bert_jax.run_file import config_of
from transformer_jax import checkpoint, corpora, sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.prepare import prepare
from transformer_jax.shards import Shards
from transformer_jax.tokenizer import WordPiece


@dataclasses.dataclass(frozen=True)
class Baselines:
    """What knows nothing of context: unigram frequencies of the training part for MLM, the majority for NSP."""

    mlm_loss: float
    """Mean cross-entropy of the targets, in nats, under (count + 1) / (tokens + vocabulary)."""
    mlm_accuracy: float
    """Share of targets that are the most frequent piece of the training part."""
    nsp_accuracy: float
    """Share of the more frequent label among the evaluated pairs."""


def baselines(evaluation: EvaluationData, token_counts_V: np.ndarray, batch_size: int = 256) -> Baselines:
    """Fit on the training part's counts [V], score on the very targets that the model is scored on."""
    log_p_V = np.log((token_counts_V + 1.0) / (token_counts_V.sum() + len(token_counts_V)))
    loss = hits = count = 0.0
    labels = np.zeros(2)
    best = int(np.argmax(token_counts_V))
    for first in range(0, evaluation.num_rows, batch_size):
        batch = evaluation.batch(first, batch_size)
        weights_BP, ids_BP = batch["masked_lm_weights"], batch["masked_lm_ids"]
        loss -= float(np.sum(weights_BP * log_p_V[ids_BP]))
        hits += float(np.sum(weights_BP * (ids_BP == best)))
        count += float(np.sum(weights_BP))
        pairs_BS = batch["next_sentence_labels"], batch["next_sentence_weights"]
        labels += np.bincount(pairs_BS[0].ravel(), pairs_BS[1].ravel(), minlength=2)[:2]
    return Baselines(loss / max(count, 1.0), hits / max(count, 1.0), float(labels.max() / max(labels.sum(), 1.0)))


def evaluate(checkpoint_name: str, recipe: str | None = None, prepared: str | None = None) -> dict[str, Any]:
    """MLM and NSP loss and accuracy of a run (or RUN@STEP), with counts and baselines.

    The pairs and masks are fixed, so two checkpoints are scored on the same targets. All devices share the rows,
    whatever mesh the run was trained on.

    Args:
      checkpoint_name: a run folder (its newest step that verifies) or RUN@STEP.
      recipe: a recipe file whose documents are all evaluated, tokenised as the checkpoint says; without it, the
        held-out part of the run's own prepared data.
      prepared: where the run's prepared data lies now, if it was moved.

    Returns:
      checkpoint, step, loss, mlm_loss, mlm_accuracy, the same for nsp where the run has it, standard errors of the
      accuracies (NAME_standard_error), counts n/..., `text` (what was evaluated), and `baselines`.

    Raises:
      UserError: no checkpoint, no prepared data, another vocabulary, or nothing held out.
    """
    if (Path(checkpoint_name) / "config.json").is_file():
        raise UserError(f"{checkpoint_name} is a Hugging Face folder; make a run of it first, with `bert-jax import`")
    step, params, _, meta = checkpoint.read_params(checkpoint_name)
    config = config_of(meta)
    if prepared:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=prepared))
    where = config.data.prepared
    if not (Path(where) / "manifest.json").exists():
        missing = f"{where}: no prepared data here" if where else f"{checkpoint_name} names no prepared data"
        raise UserError(f"{missing}, and the baselines come from it; say where it lies with --prepared DIR")
    training = open_prepared(config, "train")
    if training.tokenizer.digest != meta["tokenizer_digest"]:
        raise UserError(f"{where}: made with another vocabulary than {checkpoint_name}")
    with contextlib.ExitStack() as stack:
        if recipe is None:
            documents = open_prepared(config, "heldout")
            if not documents.num_documents:
                raise UserError(f"{where}: nothing was held out; set `heldout` in the recipe, or give --data RECIPE")
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            documents = _tokenised(recipe, WordPiece.from_files(meta["tokenizer"]), folder)
        evaluation = EvaluationData(documents, config.examples)
        mesh = sharding.make_mesh(MeshConfig())
        devices = sharding.batch_devices(mesh)
        batch_size = -(-(config.train.eval_batch_size or config.train.batch_size) // devices) * devices
        train = dataclasses.replace(config.train, batch_size=batch_size, eval_batch_size=0, accumulate=1)
        engine = make_engine(dataclasses.replace(config, train=train, mesh=MeshConfig()), mesh)
        scores = engine.evaluate(jax.tree.map(jax.device_put, params, engine.shardings.params), evaluation)
        assert scores is not None
        base = baselines(evaluation, training.tokens_by_id())
    errors: dict[str, float] = {}
    for name in engine.task.losses:
        rate, count = scores[f"{name}_accuracy"], max(scores[f"n/{name}"], 1.0)
        errors[f"{name}_accuracy_standard_error"] = math.sqrt(max(rate * (1 - rate), 0.0) / count)
    text = "held out" if recipe is None else f"all of {recipe}"
    facts = {"checkpoint": checkpoint_name, "step": step, "text": text}
    return facts | scores | errors | {"baselines": dataclasses.asdict(base)}


def _tokenised(recipe: str, tokenizer: WordPiece, folder: Path) -> Shards:
    """All documents of a recipe under the checkpoint's own tokenizer, in a folder that is thrown away."""
    tokenizer.save(folder / "tokenizer")
    own = dataclasses.replace(tokenizer.config, vocab_file=str(folder / "tokenizer" / "vocab.txt"))
    prepare(corpora.load_recipe(Path(recipe)), own, folder / "prepared", heldout=0.0)
    documents = Shards.open(folder / "prepared", "train")
    if documents.tokenizer.digest != tokenizer.digest:
        raise UserError(f"{recipe}: asks for another pre_splitter than the checkpoint was trained with")
    return documents


def table(scores: dict[str, Any]) -> str:
    """The figures for people, each with its count and its baseline."""
    base = scores["baselines"]
    rows = [
        f"{scores['text']}, step {scores['step']}, fixed masks and pairs",
        f"{'':22}{'model':>9}  {'baseline':>9}  n",
        f"{'MLM cross-entropy':22}{scores['mlm_loss']:9.4f}  {base['mlm_loss']:9.4f}  {scores['n/mlm']:.0f}"
        " masked pieces  (baseline: unigram of the training part; nats)",
        f"{'MLM accuracy':22}{scores['mlm_accuracy']:9.4f}  {base['mlm_accuracy']:9.4f}  {scores['n/mlm']:.0f}"
        f"  ({scores['mlm_accuracy'] / max(base['mlm_accuracy'], 1e-9):.2f} times the baseline)",
    ]
    if scores["n/nsp"] and "nsp_loss" in scores:
        rows += [
            f"{'NSP cross-entropy':22}{scores['nsp_loss']:9.4f}  {math.log(2):9.4f}  {scores['n/nsp']:.0f} pairs"
            "  (baseline: a fair coin)",
            f"{'NSP accuracy':22}{scores['nsp_accuracy']:9.4f}  {base['nsp_accuracy']:9.4f}  {scores['n/nsp']:.0f}"
            f"  (standard error {scores['nsp_accuracy_standard_error']:.4f}; baseline: the majority)",
        ]
    return "\n".join(rows)
