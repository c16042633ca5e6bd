"""From a run file and the command line to one resolved PretrainConfig; and what may change when a run goes on."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.presets import PRESETS
from transformer_jax import config as core
from transformer_jax.config import ConfigError

# What another value of a key means for a run that goes on. The first matching prefix counts; other keys are free.
FIXED = ("model.hidden_size", "model.num_", "model.intermediate_size", "model.vocab_", "model.max_position_embeddings",
         "model.type_vocab_size", "model.hidden_act", "optimizer.name")  # fmt: skip
"""Another model or optimizer: the stored state does not fit, and no force makes it."""
UNSAFE = ("examples.", "train.seed", "optimizer.", "model.layer_norm_eps", "model.hidden_dropout_prob",
          "model.attention_probs_dropout_prob", "model.dropout_generator", "init.")  # fmt: skip
"""It would silently be another run: refused unless forced. (Text and vocabulary are compared by what is in the prepared
data, not by these settings.)"""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> PretrainConfig:
    """Read a run file: preset, then the file's differences, then `--key value` overrides.

    `--preset` takes the place of the file's preset, so the file's own differences count for it too.

    `data.recipe` and `tokenizer.vocab_file` are taken from the folder of the run file; what commands make (`run_dir`,
    `data.prepared`, and the run that `init.from` names) from the current folder.

    Raises:
      ConfigError: a missing file, an unknown key or preset, or a wrong value; the message names the file and the key.
    """
    path = Path(path)
    data = core.read_toml(path)
    init = data.get("init")
    if isinstance(init, dict) and "from" in init:  # `from` cannot be the name of a field
        data["init"] = {("checkpoint" if k == "from" else k): v for k, v in init.items()}
    chosen, overrides = _preset_of(overrides)
    where = str(path) if chosen is None else "--preset"
    preset = data.get("preset", PretrainConfig.preset) if chosen is None else chosen
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"{where}: unknown preset {preset!r}{core.nearest(str(preset), PRESETS)}")
    data["preset"] = preset
    base = PretrainConfig(preset=preset, model=PRESETS[preset], run_dir=str(Path("runs") / path.stem))
    config = core.load(PretrainConfig, data, str(path), base)
    if not config.data.prepared:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=f"prepared/{path.stem}"))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, recipe=_beside(path, config.data.recipe)),
        tokenizer=dataclasses.replace(config.tokenizer, vocab_file=_beside(path, config.tokenizer.vocab_file)),
    )
    config = override(config, overrides) if overrides else config
    for name, value in (("run_dir", config.run_dir), ("data.prepared", config.data.prepared)):
        if not value:
            raise ConfigError(f"{name} is empty; name a folder, or leave {name} out")
    return config


def _preset_of(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--preset`, if it is given, and all other arguments."""
    parser = argparse.ArgumentParser(prog="bert-jax pretrain RUN.toml", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    found, others = parser.parse_known_args(list(overrides))
    return found.preset, others


def override(config: PretrainConfig, arguments: Sequence[str]) -> PretrainConfig:
    """Apply `--section.key value` arguments; a mistyped one ends the program with the nearest valid names."""
    import tyro

    # Every key is given as `--key value`, a boolean too.
    plain = (tyro.conf.FlagConversionOff,)
    return tyro.cli(
        PretrainConfig, args=list(arguments), default=config, prog="bert-jax pretrain RUN.toml", config=plain
    )


def config_of(meta: dict[str, Any]) -> PretrainConfig:
    """The configuration stored with a checkpoint."""
    return core.load(PretrainConfig, meta["config"], "the checkpoint's configuration")


def check_resume(stored: dict[str, Any], config: PretrainConfig, force: bool) -> list[str]:
    """Compare the stored configuration with the present one.

    Returns:
      A line for each harmless difference.

    Raises:
      ConfigError: differences that do not fit the stored state, or that would silently make it another run.
    """
    changed = core.differences(stored, core.to_builtins(config))
    lines = {key: f"{key}: {old!r} in the checkpoint, {new!r} now" for key, (old, new) in changed.items()}
    fixed = [line for key, line in lines.items() if key.startswith(FIXED)]
    if fixed:
        raise ConfigError(
            "this run cannot go on with a different model or optimizer:\n  " + "\n  ".join(fixed)
            + "\nuse the old values, or another run_dir (with [init] from = this run, where that is meant)"
        )  # fmt: skip
    if "train.steps" in lines and "optimizer.total_steps" not in lines and not config.optimizer.total_steps:
        lines["train.steps"] += ", and the learning rate's schedule with it"
    unsafe = [line for key, line in lines.items() if key.startswith(UNSAFE)]
    if unsafe and not force:
        raise ConfigError(
            "going on with these differences would silently be another run:\n  " + "\n  ".join(unsafe)
            + "\nuse the old values, another run_dir, or --force to go on all the same"
        )  # fmt: skip
    return list(lines.values())


def _beside(path: Path, name: str) -> str:
    """`name` seen from the folder of `path`, written so that it can be read from the current folder."""
    if not name or Path(name).is_absolute():
        return name
    return os.path.relpath(path.parent / name)
