"""From a run file and the command line to one resolved configuration; and what may change when a run goes on.

A run's configuration is a frozen dataclass with the sections of `transformer_jax.config` and those of its program; it
has at least `preset`, `run_dir`, `model` and `data.prepared`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.config import ConfigError

C = TypeVar("C")


def load_run(
    path: str | Path,
    overrides: Sequence[str],
    base: C,
    presets: Mapping[str, Any],
    *,
    prog: str,
    beside: Sequence[str] = (),
) -> C:
    """Read a run file: preset, then the file's differences, then `--key value` overrides.

    `--preset` takes the place of the file's preset, so the file's own differences count for it too.

    Args:
      base: the configuration with every default; its `preset` stands where neither the file nor `overrides` has one.
      presets: name -> the model section.
      prog: the command, for messages.
      beside: dotted keys that name files, taken from the folder of the run file; what commands make (`run_dir`,
        `data.prepared`, and the run that `init.from` names) is taken from the current folder.

    Raises:
      ConfigError: a missing file, an unknown key or preset, or a wrong value; the message names the file and the key.
    """
    path = storage.path(path)
    data = core.read_toml(path)
    init = data.get("init")
    if isinstance(init, dict) and "from" in init:  # `from` cannot be the name of a field
        data["init"] = {("checkpoint" if k == "from" else k): v for k, v in init.items()}
    chosen, overrides = _preset_of(overrides, prog)
    where = str(path) if chosen is None else "--preset"
    preset = data.get("preset", value_of(base, "preset")) if chosen is None else chosen
    if not isinstance(preset, str) or preset not in presets:
        raise ConfigError(f"{where}: unknown preset {preset!r}{core.nearest(str(preset), presets)}")
    data["preset"] = preset
    base = with_value(with_value(base, "preset", preset), "model", presets[preset])
    base = with_value(base, "run_dir", str(Path("runs") / path.stem))
    config = core.load(type(base), data, str(path), base)
    if not value_of(config, "data.prepared"):
        config = with_value(config, "data.prepared", f"prepared/{path.stem}")
    for key in beside:
        config = with_value(config, key, _beside(path, value_of(config, key)))
    config = override(config, overrides, prog) if overrides else config
    for key in ("run_dir", "data.prepared"):
        if not value_of(config, key):
            raise ConfigError(f"{key} is empty; name a folder, or leave {key} out")
        storage.path(value_of(config, key))  # which refuses what cannot be reached from here
    return config


def override(config: C, arguments: Sequence[str], prog: str) -> C:
    """Apply `--section.key value` arguments; a mistyped one ends the program with the nearest valid names."""
    import tyro

    # Every key is given as `--key value`, a boolean too.
    plain = (tyro.conf.FlagConversionOff,)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(type(config), args=_booleans(config, arguments), default=config, prog=prog, config=plain)
    finally:
        # A command's own --help is about the command; the list of keys has another name.
        sys.stderr.write(said.getvalue().replace(f"{prog} --help", f"{prog} --keys"))


def _booleans(config: Any, arguments: Sequence[str]) -> list[str]:
    """The arguments with `true` and `false`, as files have them, the way Python writes them."""
    found: list[str] = []
    for argument in arguments:
        key = found[-1].removeprefix("--") if found and found[-1].startswith("--") else ""
        with contextlib.suppress(AttributeError):
            if argument in ("true", "false") and isinstance(value_of(config, key.replace("-", "_")), bool):
                argument = argument.capitalize()
        found.append(argument)
    return found


def check_resume(
    stored: Mapping[str, Any], config: Any, force: bool, *, fixed: tuple[str, ...], unsafe: tuple[str, ...]
) -> list[str]:
    """Compare the stored configuration with the present one.

    Args:
      fixed: beginnings of the keys of another model or optimizer: the stored state does not fit, and no force makes it.
      unsafe: ... of keys that would silently make it another run: refused unless forced. Other keys are free.

    Returns:
      A line for each harmless difference.

    Raises:
      ConfigError: differences that do not fit the stored state, or that would silently make it another run.
    """
    now = core.to_builtins(config)
    changed = core.differences(_with_later_keys(stored, config, now), now)
    aside = ("hosts", "train.compile_cache")  # of where and how it runs, not of what it is
    changed = {key: values for key, values in changed.items() if not key.startswith(aside)}
    lines = {key: f"{key}: {old!r} in the checkpoint, {new!r} now" for key, (old, new) in changed.items()}
    wrong = [line for key, line in lines.items() if key.startswith(fixed)]
    if wrong:
        raise ConfigError(
            "this run cannot go on with a different model or optimizer:\n  " + "\n  ".join(wrong)
            + "\nuse the old values, or another run_dir (with [init] from = this run, where that is meant)"
        )  # fmt: skip
    if "train.steps" in lines and "optimizer.total_steps" not in lines and not config.optimizer.total_steps:
        lines["train.steps"] += ", and the learning rate's schedule with it"
    wrong = [line for key, line in lines.items() if key.startswith(unsafe)]
    if wrong and not force:
        raise ConfigError(
            "going on with these differences would silently be another run:\n  " + "\n  ".join(wrong)
            + "\nuse the old values, another run_dir, or --force to go on all the same"
        )  # fmt: skip
    return list(lines.values())


def _with_later_keys(stored: Mapping[str, Any], config: Any, now: Mapping[str, Any]) -> dict[str, Any]:
    """The stored configuration with the keys that came after it, at their defaults: what the program did before."""
    out = dict(stored)
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name
        if name not in out:
            if field.default is not dataclasses.MISSING and field.default == value:
                out[name] = now[name]
        elif dataclasses.is_dataclass(value) and isinstance(out[name], Mapping):
            out[name] = _with_later_keys(out[name], value, now[name])
    return out


def write_config(folder: Path, config: Any, beside: Sequence[str] = ()) -> None:
    """Write `config.toml`, which `load_run` reads back to the same: files it names are seen from its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Who the process was that wrote this is nothing that another run should take over.
    if hasattr(config, "hosts"):
        config = with_value(config, "hosts", dataclasses.replace(config.hosts, coordinator="", processes=0, process=-1))
    for key in beside:
        name = value_of(config, key)
        if name and not Path(name).is_absolute() and not storage.is_remote(name):
            apart = storage.is_remote(value_of(config, "run_dir"))  # where no way leads to what is on this machine
            config = with_value(config, key, str(Path(name).absolute()) if apart else os.path.relpath(name, folder))
    temporary = folder / ".config.toml.tmp"
    temporary.write_text(core.dump_toml(config), encoding="utf-8")
    temporary.replace(folder / "config.toml")


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def with_value(config: C, key: str, value: Any) -> C:
    """The configuration with another value of a dotted key."""
    section, _, rest = key.partition(".")
    inner: Any = with_value(getattr(config, section), rest, value) if rest else value
    return dataclasses.replace(config, **{section: inner})  # type: ignore[type-var]


def _preset_of(overrides: Sequence[str], prog: str) -> tuple[str | None, list[str]]:
    """The value of `--preset`, if it is given, and all other arguments."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    found, others = parser.parse_known_args(list(overrides))
    return found.preset, others


def _beside(path: Path, name: str) -> str:
    """`name` seen from the folder of `path`, written so that it can be read from the current folder."""
    if not name or Path(name).is_absolute() or storage.is_remote(name):
        return name
    if storage.is_remote(path):
        return str(path.parent / name)
    return os.path.relpath(path.parent / name)
