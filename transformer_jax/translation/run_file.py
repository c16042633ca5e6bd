"""The run files of `transformer-jax`: presets, the keys that name files, and what may change when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax import config as core
from transformer_jax import run_file
from transformer_jax.translation.config import TranslationConfig
from transformer_jax.translation.presets import PRESETS

PROG = "transformer-jax train RUN.toml"
BESIDE = ("data.recipe", "tokenizer.source_model", "tokenizer.target_model")
"""Files that a run file names, taken from its own folder."""

# What another value of a key means for a run that goes on. The first matching prefix counts; other keys are free.
FIXED = ("model.hidden_size", "model.num_", "model.intermediate_size", "model.source_vocab_", "model.target_vocab_",
         "model.vocab_", "model.hidden_act", "model.norm", "model.embeddings", "model.output_bias",
         "model.encoder_embeddings", "model.scale_embedding", "model.type_vocab_size", "optimizer.name")  # fmt: skip
"""Another model or optimizer: the stored state does not fit, or would mean something else, and no force makes it."""
UNSAFE = ("examples.", "objective.", "train.seed", "optimizer.", "model.layer_norm_eps", "model.hidden_dropout_prob",
          "model.attention_probs_dropout_prob", "model.dropout_generator", "init.")  # fmt: skip
"""It would silently be another run: refused unless forced. (Pairs and vocabularies are compared by what is in the
prepared data, not by these settings.)"""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> TranslationConfig:
    """Read a run file with `--key value` overrides; see `transformer_jax.run_file.load_run`."""
    return run_file.load_run(path, overrides, TranslationConfig(), PRESETS, prog=PROG, beside=BESIDE)


def override(config: TranslationConfig, arguments: Sequence[str]) -> TranslationConfig:
    """Apply `--section.key value` arguments; a mistyped one ends the program with the nearest valid names."""
    return run_file.override(config, arguments, PROG)


def config_of(meta: Mapping[str, Any]) -> TranslationConfig:
    """The configuration stored with a checkpoint."""
    return core.load(TranslationConfig, meta["config"], "the checkpoint's configuration")


def check_resume(stored: Mapping[str, Any], config: TranslationConfig, force: bool) -> list[str]:
    """Compare the stored configuration with the present one; see `transformer_jax.run_file.check_resume`."""
    return run_file.check_resume(stored, config, force, fixed=FIXED, unsafe=UNSAFE)
