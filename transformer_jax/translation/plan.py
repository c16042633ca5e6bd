"""The plan of a translation run for a pod: its step on abstract arrays (see `transformer_jax.plan`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from transformer_jax import config as core
from transformer_jax import sharding, storage
from transformer_jax.compiled_step import PlannedStep
from transformer_jax.manifest import MANIFEST
from transformer_jax.plan import Program
from transformer_jax.translation import data
from transformer_jax.translation.config import TranslationConfig
from transformer_jax.translation.task import INPUTS
from transformer_jax.translation.train import make_engine, open_prepared, resolve


def abstract_batch(config: TranslationConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch as `TrainingData.batch` makes it, without numbers, split over the mesh by rows."""
    rows, split = config.train.batch_size, sharding.batch_sharding(mesh)
    source, target = (rows, config.examples.max_source_length), (rows, config.examples.max_target_length)
    shapes: dict[str, tuple[int, ...]] = {
        **{name: target if name.startswith("decoder_") else source for name in INPUTS},
        "labels": target,
        "label_weights": target,
        "row_ids": (rows,),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name == "label_weights" else jnp.int32, sharding=split)
        for name, shape in shapes.items()
    }


def full_counts(config: TranslationConfig) -> dict[str, float]:
    """The counts of a batch in which each row is one pair that fills it: what model FLOPs are taken from."""
    rows = float(config.train.batch_size)
    source, target = config.examples.max_source_length, config.examples.max_target_length
    return {
        "translation": rows * target,
        "tokens": rows * (source + target),
        "source_tokens": rows * source,
        "source_pairs": rows * source**2,
        "target_tokens": rows * target,
        "target_pairs": rows * target * (target + 1) / 2,
        "cross_pairs": rows * source * target,
    }


def make_step(settings: Mapping[str, Any], devices: list[Any]) -> PlannedStep:
    """The step of a resolved configuration over these devices; runs in the process that compiles."""
    config = core.load(TranslationConfig, settings, "the resolved configuration")
    mesh = sharding.make_mesh(config.mesh, devices)
    return PlannedStep(make_engine(config, mesh), abstract_batch(config, mesh), full_counts(config))


def resolved(config: TranslationConfig) -> tuple[TranslationConfig, list[str]]:
    """The configuration with the sizes of its vocabularies, and notes on where those come from."""
    if (storage.path(config.data.prepared) / MANIFEST).exists():
        return resolve(config, data.load_vocabularies(open_prepared(config, "train"))), []
    size = config.tokenizer.vocab_size
    model = dataclasses.replace(
        config.model,
        source_vocab_size=config.model.source_vocab_size or size,
        target_vocab_size=config.model.target_vocab_size or size,
    )
    note = f"{config.data.prepared} is not prepared: vocabularies of {model.source_vocab_size:,} and "
    note += f"{model.target_vocab_size:,} entries, as the run file says"
    return dataclasses.replace(config, model=model), [note]


def _slots(config: TranslationConfig) -> str:
    return f"{config.examples.max_source_length} + {config.examples.max_target_length}"


PROGRAM = Program(prog="transformer-jax", make=make_step, resolved=resolved, slots=_slots)
