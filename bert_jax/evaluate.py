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

from bert_jax import examples
from bert_jax.config import PretrainConfig
from bert_jax.data import EvaluationData
from bert_jax.loading import Loaded, load
from bert_jax.pretrain import make_engine, open_prepared, with_padding
from bert_jax.run_file import config_of
from transformer_jax import corpora, sharding, storage
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


def evaluate(
    checkpoint_name: str, recipe: str | None = None, prepared: str | None = None, max_seq_length: int = 0
) -> dict[str, Any]:
    """MLM and NSP loss and accuracy of a checkpoint, with counts and baselines.

    The pairs and masks are fixed, so two checkpoints are scored on the same targets. All devices share the rows,
    whatever mesh the run was trained on.

    Args:
      checkpoint_name: a run folder (its newest step that verifies), RUN@STEP, or a Hugging Face folder.
      recipe: a recipe file whose documents are all evaluated, tokenised as the checkpoint says; without it, the
        held-out part of the run's own prepared data.
      prepared: where prepared data lies, for a checkpoint that names none or whose data was moved. Its training part
        gives the baselines; without any, they are fitted on the evaluated text itself, which makes them stronger.
      max_seq_length: of a row; 0 is the run's own, and 128 for a model that comes without a run. Only figures of one
        length can be compared: pairs and masks are drawn for it.

    Returns:
      checkpoint, step (None for a Hugging Face folder), max_seq_length, loss, mlm_loss, mlm_accuracy, the same for nsp
      where the model has that head, standard errors of the accuracies (NAME_standard_error), counts n/..., `text` (what
      was evaluated), `baselines`, and `baselines_fitted_on`.

    Raises:
      UserError: no checkpoint, no prepared data and no recipe, another vocabulary, nothing held out, or a model without
        a masked-LM head.
    """
    found = load(checkpoint_name)
    config = _settings(found, prepared, max_seq_length)
    if "mlm" in found.drawn:
        raise UserError(
            f"{checkpoint_name} has no masked-LM head, so there is nothing to evaluate (one drawn at random would be "
            "measured); a fine-tuned folder can be evaluated once `bert-jax import` has made a run of it"
        )
    where = config.data.prepared
    training: Shards | None = None
    documents: Shards | None = None
    with contextlib.ExitStack() as stack:
        if where and (storage.path(where) / "manifest.json").exists():
            training = open_prepared(config, "train")
            if training.tokenizer.digest != found.tokenizer.digest:
                raise UserError(
                    f"{where}: made with another vocabulary than {checkpoint_name}; prepare the data again as it was "
                    "for that run, or name another folder with --prepared DIR"
                )
            documents = open_prepared(config, "heldout")
        elif recipe is None or where:
            missing = f"{where}: no prepared data here" if where else f"{checkpoint_name} names no prepared data"
            raise UserError(
                f"{missing}; say where it lies with --prepared DIR"
                + ("" if recipe else ", or which text to evaluate with --data RECIPE")
            )
        if recipe is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            documents = _tokenised(recipe, found.tokenizer, folder)
        assert documents is not None
        if not documents.num_documents:
            raise UserError(f"{where}: nothing was held out; set `heldout` in the recipe, or give --data RECIPE")
        evaluation = EvaluationData(documents, config.examples)
        mesh = sharding.make_mesh(MeshConfig())
        devices = sharding.batch_devices(mesh)
        batch_size = -(-(config.train.eval_batch_size or config.train.batch_size) // devices) * devices
        train = dataclasses.replace(config.train, batch_size=batch_size, eval_batch_size=0, accumulate=1)
        engine = make_engine(dataclasses.replace(config, train=train, mesh=MeshConfig()), mesh)
        params = with_padding(found.params, config.model)
        scores = engine.evaluate(jax.tree.map(jax.device_put, params, engine.shardings.params), evaluation)
        assert scores is not None
        base = baselines(evaluation, (training or documents).tokens_by_id())
    errors: dict[str, float] = {}
    for name in engine.task.losses:
        rate, count = scores[f"{name}_accuracy"], max(scores[f"n/{name}"], 1.0)
        errors[f"{name}_accuracy_standard_error"] = math.sqrt(max(rate * (1 - rate), 0.0) / count)
    text = "held out" if recipe is None else f"all of {recipe}"
    facts: dict[str, Any] = {"checkpoint": checkpoint_name, "step": found.step, "text": text}
    facts["max_seq_length"] = config.examples.max_seq_length
    fitted_on = "the training part" if training is not None else "the evaluated text itself"
    facts["baselines_fitted_on"] = fitted_on
    return facts | scores | errors | {"baselines": dataclasses.asdict(base)}


def _settings(found: Loaded, prepared: str | None, max_seq_length: int) -> PretrainConfig:
    """The settings of a run; for a model from elsewhere the defaults that suit it, and the heads that it has."""
    if found.meta and "imported_from" not in found.meta:
        config = dataclasses.replace(config_of(found.meta), model=found.config)
    else:
        config = PretrainConfig(model=found.config)
        max_seq_length = max_seq_length or min(config.examples.max_seq_length, found.config.max_position_embeddings)
    if max_seq_length:
        changed = dataclasses.replace(config.examples, max_seq_length=max_seq_length)
        config = dataclasses.replace(config, examples=changed)
        examples.check(changed, found.config)
    if {"nsp", "pooler"} & set(found.drawn):
        config = dataclasses.replace(config, examples=dataclasses.replace(config.examples, sentence_task="none"))
    if prepared:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=prepared))
    return config


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
        scores["text"]
        + (f", step {scores['step']}" if scores["step"] is not None else "")
        + f", rows of {scores['max_seq_length']}, fixed masks and pairs",
        f"{'':22}{'model':>9}  {'baseline':>9}  n",
        f"{'MLM cross-entropy':22}{scores['mlm_loss']:9.4f}  {base['mlm_loss']:9.4f}  {scores['n/mlm']:.0f}"
        f" masked pieces  (baseline: unigram of {scores['baselines_fitted_on']}; nats)",
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
