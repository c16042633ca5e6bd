"""The plan of a pretraining run for a pod: its step on abstract arrays (see `transformer_jax.plan`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax import examples
from bert_jax.config import PretrainConfig
from bert_jax.pretrain import make_engine, open_prepared, resolve
from transformer_jax import config as core
from transformer_jax import sharding, storage
from transformer_jax.compiled_step import PlannedStep
from transformer_jax.manifest import MANIFEST
from transformer_jax.plan import Program


def abstract_batch(config: PretrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch as `PretrainingData.batch` makes it, without numbers, split over the mesh by rows."""
    rows, length = config.train.batch_size, config.examples.max_seq_length
    predictions, sequences = examples.max_predictions(config.examples), examples.max_sequences(config.examples)
    split = sharding.batch_sharding(mesh)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("input_ids", "token_type_ids", "position_ids", "sequence_ids"), (rows, length)),
        **dict.fromkeys(("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"), (rows, predictions)),
        **dict.fromkeys(("cls_positions", "next_sentence_labels", "next_sentence_weights"), (rows, sequences)),
        "row_ids": (rows,),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name.endswith("weights") else jnp.int32, sharding=split)
        for name, shape in shapes.items()
    }


def full_counts(config: PretrainConfig) -> dict[str, float]:
    """The counts of a batch in which each row is one sequence that fills it: what model FLOPs are taken from."""
    rows, length = config.train.batch_size, config.examples.max_seq_length
    share = config.examples.masked_lm_prob if config.examples.objective == "masked" else 1.0
    predictions = min(share * length, examples.max_predictions(config.examples))
    return {
        "tokens": float(rows * length),
        "squares": float(rows * length**2),
        "mlm": rows * predictions,
        "sequences": float(rows),
    }


def make_step(settings: Mapping[str, Any], devices: list[Any]) -> PlannedStep:
    """The step of a resolved configuration over these devices; runs in the process that compiles."""
    config = core.load(PretrainConfig, settings, "the resolved configuration")
    mesh = sharding.make_mesh(config.mesh, devices)
    return PlannedStep(make_engine(config, mesh), abstract_batch(config, mesh), full_counts(config))


def resolved(config: PretrainConfig) -> tuple[PretrainConfig, list[str]]:
    """The configuration with the size of its vocabulary, and notes on where that comes from.

    Raises:
      ConfigError: settings that cannot work.
    """
    if (storage.path(config.data.prepared) / MANIFEST).exists():
        return resolve(config, open_prepared(config, "train")), []
    size = config.model.vocab_size or config.tokenizer.vocab_size
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))
    examples.check(config.examples, config.model)
    return config, [f"{config.data.prepared} is not prepared: a vocabulary of {size:,} entries, as the run file says"]


def _slots(config: PretrainConfig) -> str:
    return str(config.examples.max_seq_length)


PROGRAM = Program(prog="bert-jax", make=make_step, resolved=resolved, slots=_slots)
