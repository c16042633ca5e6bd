"""Run files: strict TOML to frozen dataclasses, with overrides, and errors a person can act on.

Every default of the project stands in a dataclass; a run file names a preset and states differences. Nothing here
imports JAX, so that a command's `--help` starts at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


class UserError(Exception):
    """A mistake the user can mend: the message says what was found, what is allowed and what to change.

    Commands print it without a traceback and exit with 2.
    """


class ConfigError(UserError, ValueError):
    """A run file, recipe or override that cannot be used."""


Context = Literal["both", "left", "right"]
"""What a position may attend to: its whole sequence, or itself and what stands before it, or after it."""
UNROLLED = 24
"""Layers of the deepest model that `layers = "auto"` unrolls. A loop compiles in half the time, but a TPU then copies
what each layer keeps for the backward pass: BERT-large takes 1.6 times the cycles and twice the memory."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The Transformer encoder; the field names are those of Hugging Face's BERT configuration where it has them."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Literal["gelu", "gelu_new", "relu", "swish"] = "gelu"
    """gelu is the exact form with erf; gelu_new the tanh approximation; swish is x times its logistic function."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    """Standard deviation of the truncated normal."""
    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    """auto unrolls up to 24 layers (`UNROLLED`). The parameters and the numbers are the same either way."""
    remat: Literal["none", "full", "dots", "names"] = "none"
    """What the backward pass computes again: nothing, each layer, all but matrix products, all but named tensors."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of activations and matrix products; parameters, statistics and losses stay in float32 (float64 if set)."""
    dropout_generator: Literal["hash", "threefry"] = "hash"
    """hash is a counter hash, free of cost; both give the same masks on any mesh and for any accumulation."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} does not divide into num_attention_heads {self.num_attention_heads}; "
                "make hidden_size a multiple of the number of heads"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if not 0.0 < self.layer_norm_eps < math.inf:
            raise ConfigError(f"layer_norm_eps is {self.layer_norm_eps}; it must be a number above 0")
        if not 0.0 <= self.initializer_range < math.inf:
            raise ConfigError(f"initializer_range is {self.initializer_range}; it must be a number of at least 0")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def scanned(self) -> bool:
        return self.layers == "scanned" or (self.layers == "auto" and self.num_hidden_layers > UNROLLED)

    @property
    def context(self) -> Context:
        """What the encoder's self-attention sees."""
        return "both"

    @property
    def pre_norm(self) -> bool:
        """Whether the norm comes before each part of a layer; BERT's comes after each residual sum."""
        return False

    @property
    def glorot_kernels(self) -> bool:
        """Whether kernels are drawn by Glorot and Bengio (2010); BERT's are normal, with initializer_range."""
        return False


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are laid out. -1 means all devices that the other axes leave; only one axis may have it."""

    preset: Literal["data_parallel", "fsdp", "fsdp_tensor"] = "data_parallel"
    data: int = -1
    fsdp: int = 0
    """0 follows the preset: 1 for data_parallel, else as many devices as go, at most 16."""
    tensor: int = 1
    slices: int = 1
    """TPU slices joined over the data-centre network; the data axis spans them."""

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise ConfigError(f"mesh.slices is {self.slices}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its schedule and clipping. Biases and LayerNorm parameters are never decayed."""

    name: Literal["adamw", "adam", "bert_adam", "lamb"] = "adamw"
    """adamw corrects Adam's bias; adam is the same without weight decay; bert_adam is the 2018 code, which does not
    correct; lamb is arXiv 1904.00962."""
    learning_rate: float = 1e-4
    """The peak; with noam, a factor of the paper's rate."""
    schedule: Literal["linear", "polynomial", "constant", "noam", "inverse_sqrt"] = "linear"
    """After the warm-up: down to zero at the last step in a line, by `power`, or not at all; or with the inverse root
    of the step, at the scale of arXiv 1706.03762 (noam) or from learning_rate (inverse_sqrt)."""
    power: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 0
    """Steps over which the schedule runs; 0 means train.steps. Larger where a later phase goes on with it."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Global norm to which gradients are clipped; 0 switches clipping off."""

    def __post_init__(self) -> None:
        for name in ("weight_decay", "clip_norm", "power"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}; it must be a number of at least 0")
        if self.name == "adam" and self.weight_decay:
            raise ConfigError(
                f"optimizer.weight_decay is {self.weight_decay}, and adam has none; set it to 0, or use adamw"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One phase of training."""

    steps: int = 1000
    batch_size: int = 256
    """Rows of the global batch, over all hosts and devices."""
    accumulate: int = 1
    """Parts into which each batch is cut to save memory; the result does not depend on it."""
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_batch_size: int = 0
    """0 means batch_size."""
    max_nonfinite_steps: int = 10
    """Steps in a row with a non-finite gradient after which the run stops."""
    prefetch: int = 2
    """Batches made and put on the device ahead of the step."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """Passes of a float32 product on hardware that multiplies in less; default is the fastest."""
    compile_cache: str = "auto"
    """Where compiled programs are kept, so that a restart need not compile: a folder (with a slash), on (the user's
    cache folder, or RUN/programs for several hosts), off, or auto: on for 1,000 steps or more, or several hosts."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("log_every", 1), ("eval_every", 0), ("eval_batch_size", 0),
                            ("max_nonfinite_steps", 1), ("prefetch", 0), ("seed", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.compile_cache not in ("auto", "on", "off") and "/" not in self.compile_cache:
            raise ConfigError(
                f"train.compile_cache is {self.compile_cache!r}; it must be auto, on, off, or a folder, written with a "
                f"slash, as in ./{self.compile_cache or 'programs'}"
            )
        if self.steps >= 1 << 31:
            raise ConfigError(f"train.steps is {self.steps}; it must be below 2^31, which is {1 << 31}")
        if self.seed >= 1 << 32:
            raise ConfigError(f"train.seed is {self.seed}; it must be below 2^32, which is {1 << 32}")
        if self.batch_size < 1 or self.accumulate < 1 or self.batch_size % self.accumulate:
            raise ConfigError(
                f"train.batch_size {self.batch_size} does not divide into train.accumulate {self.accumulate} parts"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = 1000
    """Steps between checkpoints; the last step is always saved, and with 0 no other."""
    keep_last: int = 2
    """So many of the newest steps; those that a stop left between two regular ones are given up first."""
    keep_every: int = 0
    """Also keep each step that is a multiple of this; 0 keeps none for that."""
    keep_best: int = 0
    """Also keep this many steps with the best held-out figure."""
    best_metric: str = "loss"
    """The figure of an evaluation that decides which steps are best ..."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """... and whether it is better low, as a loss, or high, as an accuracy or BLEU."""
    best_of_equals: Literal["newer", "earlier"] = "newer"
    """Which of two steps with the same figure counts as the better one."""


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Several processes, as a rule one a host, that train together (docs/hosts.md)."""

    mode: Literal["environment", "auto", "single"] = "environment"
    """environment: as the keys below, or JAX_COORDINATOR_ADDRESS and the like, say, and one process where nothing is
    said; auto: as JAX finds them on Cloud TPU, Slurm, Kubernetes and with MPI; single: one process, whatever is set."""
    coordinator: str = ""
    """HOST:PORT at which process 0 can be reached; else JAX_COORDINATOR_ADDRESS."""
    processes: int = 0
    """How many there are; 0 takes JAX_NUM_PROCESSES."""
    process: int = -1
    """Which of them this is, counted from 0; -1 takes JAX_PROCESS_ID."""
    join_limit: float = 300.0
    """Seconds within which all of them must have joined."""
    heartbeat: int = 45
    """Seconds without a sign of life after which a process counts as lost, and all others end."""
    step_limit: float = 300.0
    """Seconds that a step may take before the process counts as stalled and ends ..."""
    step_factor: float = 20.0
    """... or so many times the median step, where that is longer."""
    phase_limit: float = 3600.0
    """The same for a batch of an evaluation, and for start, compilation and saving."""

    def __post_init__(self) -> None:
        for name, least in (("processes", 0), ("process", -1), ("join_limit", 1.0), ("heartbeat", 5),
                            ("step_limit", 1.0), ("step_factor", 2.0), ("phase_limit", 1.0)):  # fmt: skip
            if not getattr(self, name) >= least:
                raise ConfigError(f"hosts.{name} is {getattr(self, name)}; it must be at least {least}")


def load(cls: type[T], data: Mapping[str, Any], where: str, base: T | None = None) -> T:
    """Build the dataclass `cls` from nested `data`; fields not named keep the values of `base` (or the defaults).

    Args:
      where: the file (or "the command line") that messages name.
      base: an instance whose fields stand where data says nothing, such as a preset.

    Raises:
      ConfigError: an unknown key (with its dotted path and the nearest valid one) or a value of the wrong type.
    """
    _refuse_unknown(cls, data, where, "")
    merged = _merge(to_builtins(base) if base is not None else {}, data)
    try:
        return msgspec.convert(merged, cls)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None
    except msgspec.ValidationError as e:
        cause = e.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{where}: {cause}") from None
        text = str(e).replace("`$.", "`").replace("`$`", "the file")
        raise ConfigError(f"{where}: {text}{_choices(cls, str(e))}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries; a missing or broken file is a ConfigError that names it."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # some editors begin a file with U+FEFF
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not valid TOML: {e}") from None
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or a NUL in the path
        raise ConfigError(f"{str(path)!r}: cannot be read: {e}") from None


def dump_toml(config: Any) -> str:
    """The dataclass as TOML that `load` reads back to an equal one; None is written as an absent key."""
    return _toml(_without_none(to_builtins(config)), "")


def to_builtins(config: Any) -> Any:
    """The dataclass as nested dictionaries and lists, the same as after a way through JSON."""
    # msgspec encodes what an instance holds, and one that it made itself does not hold the fields left at a default.
    instance = dataclasses.is_dataclass(config) and not isinstance(config, type)
    plain = dataclasses.asdict(config) if instance else config
    return msgspec.json.decode(msgspec.json.encode(plain))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dictionaries, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = (
            _merge(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
        )
    return out


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _inner_dataclass(hint: Any) -> Any:
    """The dataclass inside a hint such as `X`, `X | None` or `tuple[X, ...]`, or None."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _choices(cls: Any, message: str) -> str:
    """The end of a message about a value that is none of a few: the nearest of them, or all."""
    found = re.fullmatch(r"Invalid enum value '?(.*?)'? - at `\$(.*)`", message, re.DOTALL)
    if found is None:
        return ""
    hint = cls
    for key in re.findall(r"\.(\w+)", found[2]):
        hint = _fields(_inner_dataclass(hint))[key]
    return nearest(found[1], typing.get_args(hint))


def _refuse_unknown(cls: Any, data: Mapping[str, Any], where: str, prefix: str) -> None:
    fields = _fields(cls)
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key `{prefix}{key}`{nearest(key, fields, prefix)}")
        inner = _inner_dataclass(fields[key])
        if inner is None:
            continue
        if isinstance(value, Mapping):
            if typing.get_origin(fields[key]) is tuple:
                raise ConfigError(
                    f"{where}: `{prefix}{key}` is one table, and it must be a list of tables: write [[{prefix}{key}]] "
                    f"in place of [{prefix}{key}]"
                )
            _refuse_unknown(inner, value, where, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for i, item in enumerate(value):
                if isinstance(item, Mapping):
                    _refuse_unknown(inner, item, where, f"{prefix}{key}[{i}].")


def nearest(name: str, known: Any, prefix: str = "") -> str:
    """The end of a message: the closest known name, or all of them."""
    close = difflib.get_close_matches(name, list(known), 1)
    if close:
        return f"; did you mean `{prefix}{close[0]}`?"
    return "; valid here: " + ", ".join(f"`{prefix}{k}`" for k in known)


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _without_none(v) for k, v in tree.items() if v is not None}
    if isinstance(tree, list):
        return [_without_none(v) for v in tree]
    return tree


def _toml(tree: dict[str, Any], prefix: str) -> str:
    lines = [f"{k} = {_toml_value(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.").rstrip("\n")]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return repr(value)
