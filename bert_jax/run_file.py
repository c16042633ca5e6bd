"""The run files of `bert-jax`: presets, the keys that name files, and what may change when a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.presets import PRESETS
from transformer_jax import config as core
from transformer_jax import run_file

PROG = "bert-jax pretrain RUN.toml"
BESIDE = ("data.recipe", "tokenizer.vocab_file")
"""Files that a run file names, taken from its own folder."""

# What another value of a key means for a run that goes on. The first matching prefix counts; other keys are free.
FIXED = ("model.hidden_size", "model.num_", "model.intermediate_size", "model.vocab_", "model.max_position_embeddings",
         "model.type_vocab_size", "model.hidden_act", "optimizer.name")  # fmt: skip
"""Another model or optimizer: the stored state does not fit, and no force makes it."""
UNSAFE = ("examples.", "train.seed", "optimizer.", "model.layer_norm_eps", "model.hidden_dropout_prob",
          "model.attention_probs_dropout_prob", "model.dropout_generator", "model.context", "init.")  # fmt: skip
"""It would silently be another run: refused unless forced. (Text and vocabulary are compared by what is in the prepared
data, not by these settings.)"""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> PretrainConfig:
    """Read a run file with `--key value` overrides; see `transformer_jax.run_file.load_run`."""
    return run_file.load_run(path, overrides, PretrainConfig(), PRESETS, prog=PROG, beside=BESIDE)


def override(config: PretrainConfig, arguments: Sequence[str]) -> PretrainConfig:
    """Apply `--section.key value` arguments; a mistyped one ends the program with the nearest valid names."""
    return run_file.override(config, arguments, PROG)


def config_of(meta: Mapping[str, Any]) -> PretrainConfig:
    """The configuration stored with a checkpoint."""
    return core.load(PretrainConfig, meta["config"], "the checkpoint's configuration")


def check_resume(stored: Mapping[str, Any], config: PretrainConfig, force: bool) -> list[str]:
    """Compare the stored configuration with the present one; see `transformer_jax.run_file.check_resume`."""
    return run_file.check_resume(stored, config, force, fixed=FIXED, unsafe=UNSAFE)
