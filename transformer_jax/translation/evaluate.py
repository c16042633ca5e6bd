"""Held-out figures of a trained model: cross-entropy, perplexity and accuracy, and scores of its translations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax

from transformer_jax import checkpoint, sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.run_file import with_value
from transformer_jax.translation import data
from transformer_jax.translation.run_file import config_of
from transformer_jax.translation.score import score
from transformer_jax.translation.score import table as score_table
from transformer_jax.translation.train import Translate, make_engine, open_prepared
from transformer_jax.translation.translate import validation_translate


def evaluate(
    checkpoint_name: str,
    split: Literal["test", "validation"] = "test",
    prepared: str | None = None,
    translate: Translate | None = validation_translate,
    beam_size: int | None = None,
) -> dict[str, Any]:
    """Figures of a run (or RUN@STEP) over all pairs of a split of its prepared data.

    All devices share the rows, whatever mesh the run was trained on.

    Args:
      checkpoint_name: a run folder (its newest step that verifies) or RUN@STEP.
      prepared: where the run's prepared data lies now, if it was moved.
      translate: the decoder; None gives no scores of translations.
      beam_size: of the search; None is the run's `validation.beam_size`.

    Returns:
      checkpoint, step, split, pairs; translation_loss (with label smoothing), translation_nll (nats a piece, without
      it), perplexity, translation_accuracy, counts n/...; and of the translations what `score.score` gives.

    Raises:
      UserError: no checkpoint, no prepared data, other vocabularies, or no pairs in the split.
    """
    step, params, _, meta = checkpoint.read_params(checkpoint_name)
    if "decoder" not in params:
        raise UserError(f"{checkpoint_name} holds no translation model: its parameters are {', '.join(sorted(params))}")
    config = config_of(meta)
    if beam_size is not None:
        config = with_value(config, "validation.beam_size", beam_size)
    if prepared:
        config = with_value(config, "data.prepared", prepared)
    if not config.data.prepared:
        raise UserError(
            f"{checkpoint_name} was not trained here and names no prepared data; name it with --prepared DIR "
            "(prepared with the vocabularies of that run: tokenizer.vocabularies)"
        )
    shards = open_prepared(config, split)
    vocabularies = data.load_vocabularies(shards)
    if vocabularies.digest != meta["tokenizer_digest"]:
        raise UserError(f"{config.data.prepared}: made with other vocabularies than {checkpoint_name}")
    if not shards.num_documents:
        raise UserError(f"{config.data.prepared} has no {split} pairs; set `{split}` in the recipe and prepare again")
    evaluation = data.EvaluationData(shards, config.examples)
    mesh = sharding.make_mesh(MeshConfig())
    devices = sharding.batch_devices(mesh)
    batch_size = -(-(config.train.eval_batch_size or config.train.batch_size) // devices) * devices
    train = dataclasses.replace(config.train, batch_size=batch_size, eval_batch_size=0, accumulate=1)
    # An imported model's settings need not make a schedule, and none is needed here.
    optimizer = dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0)
    engine = make_engine(dataclasses.replace(config, train=train, optimizer=optimizer, mesh=MeshConfig()), mesh)
    on_mesh = jax.tree.map(jax.device_put, params, engine.shardings.params)
    found = engine.evaluate(on_mesh, evaluation)
    assert found is not None
    facts = {"checkpoint": checkpoint_name, "step": step, "split": split, "pairs": shards.num_documents}
    figures: dict[str, Any] = facts | found | {"perplexity": math.exp(min(found["translation_nll"], 700.0))}
    if evaluation.too_long:
        figures["too_long"] = evaluation.too_long
    if translate is not None:
        texts = data.pair_texts(shards, range(shards.num_documents))
        hypotheses = translate(config, vocabularies, on_mesh, [source for source, _ in texts], lambda: False)
        assert hypotheses is not None
        references = [target for _, target in texts]
        figures |= score(hypotheses, references, language=shards.manifest["languages"][1])
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        f"{figures['split']} pairs, step {figures['step']}: {figures['n/translation']:.0f} pieces"
        f" of {figures['pairs'] - figures.get('too_long', 0):,} pairs",
        f"{'cross-entropy':22}{figures['translation_nll']:7.4f}  nats a piece, perplexity {figures['perplexity']:.2f}",
        f"{'accuracy':22}{figures['translation_accuracy']:7.4f}  of pieces, each given those before it",
    ]
    if "too_long" in figures:
        rows.append(f"{figures['too_long']} pairs are longer than a row, and not in these figures")
    return "\n".join([*rows, score_table(figures)] if "bleu" in figures else rows)
