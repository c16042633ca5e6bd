"""Task files: one TOML file names the data, the kind of task, its labels, its metric and the settings of training."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bert_jax.heads import Kind
from transformer_jax import config as core
from transformer_jax import run_file, storage
from transformer_jax.config import ConfigError, MeshConfig

PROG = "bert-jax finetune TASK.toml"
FORMATS = ("tsv", "csv", "jsonl", "conll", "squad", "parquet", "tfds")
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "macro_f1", "matthews", "loss"),
    "multi_label": ("micro_f1", "macro_f1", "exact", "loss"),
    "regression": ("pearson_spearman", "pearson", "spearman", "mse", "loss"),
    "tagging": ("f1", "strict_f1", "macro_f1", "accuracy", "loss"),
    "span": ("f1", "exact", "loss"),
    "choice": ("accuracy", "loss"),
}
"""What can choose the best checkpoint, by kind; the first is the default. `f1` of a classification is that of the class
`positive`; `f1` of tags counts entities; `pearson_spearman` is the mean of both, as GLUE reports STS-B."""
LOWER_IS_BETTER = ("loss", "mse")


@dataclasses.dataclass(frozen=True)
class ColumnsConfig:
    """Where in a row, or in a record, each part of an example is: a name of the header or key of the record, or, in a
    file without header, the column's number from 0 (-1 is the last)."""

    id: str = ""
    """Empty: examples are numbered."""
    text_a: str = "text"
    """The text, the first of two, the question, or what all choices begin with."""
    text_b: str = ""
    """The second text; empty: there is none. With choices: a beginning that each of them has (SWAG: sent2)."""
    label: str = "label"
    choices: tuple[str, ...] = ()
    """One column for each choice."""
    words: str = "0"
    tags: str = "-1"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which files, and how they are to be read."""

    folder: str = ""
    """Where the files lie. A relative path is taken from the folder of the task file (given as an override: from the
    current folder). For TFDS: the folder of the prepared set."""
    train: str = ""
    dev: str | dict[str, str] = ""
    """One file, or names with a file each: every one is evaluated apart, and the first chooses the best checkpoint."""
    test: str | dict[str, str] = ""
    """Predicted with the best checkpoint at the end; labels are not read."""
    format: Literal["", "tsv", "csv", "jsonl", "conll", "squad", "parquet", "tfds"] = ""
    """Empty: by the ending, before `.gz`. For TFDS the names above are splits."""
    header: bool = True
    """Whether the first line of a TSV or CSV file names the columns."""
    quoting: Literal["auto", "none", "double"] = "auto"
    """Whether double quotes enclose a field: auto is none for TSV, as GLUE's files need, and double for CSV."""
    columns: ColumnsConfig = dataclasses.field(default_factory=ColumnsConfig)
    encoding_errors: Literal["strict", "replace"] = "strict"
    """replace puts U+FFFD for bytes that are not UTF-8, which BERT's tokenizer then drops."""
    label_separator: str = ","
    """Between the labels of one example of a multi-label task."""
    tag_scheme: Literal["iob2", "iob1", "bioes"] = "iob2"
    """Of the files; tags are turned into IOB2 when they are read."""

    def __post_init__(self) -> None:
        for split in ("dev", "test"):
            for name in splits(split, getattr(self, split)):
                if not re.fullmatch(r"[\w.-]+", name):  # it becomes a part of the names of files
                    raise ConfigError(
                        f"data.{split} has a file called {name!r}; a name has letters, digits and . _ - alone"
                    )


@dataclasses.dataclass(frozen=True)
class InputsConfig:
    """How text becomes rows of the model."""

    max_seq_length: int = 128
    """Pieces of a row, [CLS] and [SEP] included."""
    stride: int = 0
    """Pieces from the start of one window to the start of the next; 0: no windows, and what does not fit is cut and
    counted. (For span questions 0 stands for half of the room.)"""
    long_text: Literal["truncate_head", "truncate_tail", "head_tail", "windows"] = "truncate_tail"
    """What a text that does not fit loses: its head, its tail, or its middle; or nothing, in windows of `stride`."""
    pooling: Literal["max", "mean"] = "mean"
    """How the scores of a text's windows become one."""
    max_query_length: int = 64
    """Pieces of a question; what is longer is cut and counted."""

    def __post_init__(self) -> None:
        for name, least in (("max_seq_length", 4), ("stride", 0), ("max_query_length", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"inputs.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.long_text == "windows" and not self.stride:
            raise ConfigError('inputs.long_text is "windows" and inputs.stride 0; set the stride, such as 64')


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of training; the defaults are those of Devlin et al. 2019, appendix A.3."""

    epochs: float = 3.0
    batch_size: int = 32
    eval_batch_size: int = 0
    """0 means batch_size."""
    accumulate: int = 1
    """Parts into which each batch is cut to save memory; the result does not depend on it."""
    learning_rate: float | tuple[float, ...] = 2e-5
    """One rate, or a list: each is tried with every seed, and the best by the mean over seeds is marked."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises; from there it falls in a line to 0."""
    weight_decay: float = 0.01
    epsilon: float = 1e-6
    """Of AdamW, which corrects Adam's bias here."""
    clip_norm: float = 1.0
    seeds: tuple[int, ...] = (0,)
    """Each is a training of its own: it draws the head, the order of the examples and dropout."""
    eval_every: int = 0
    """Steps between evaluations; 0: once an epoch. The last step is always evaluated."""
    dropout: float = -1.0
    """Of encoder and head; negative: as the checkpoint says."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Of activations; empty: as the checkpoint says."""
    log_every: int = 10
    max_nonfinite_steps: int = 10
    matmul_precision: Literal["default", "high", "highest"] = "default"

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs is {self.epochs}; it must be above 0")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"train.warmup is {self.warmup}; it is a share of the steps, from 0 to 1")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"train.seeds is {list(self.seeds)}; name at least one, and each once")
        if not self.learning_rates or any(not 0 < rate < math.inf for rate in self.learning_rates):
            raise ConfigError(f"train.learning_rate is {self.learning_rate}; it must be a number above 0, or several")
        if len(set(self.learning_rates)) != len(self.learning_rates):
            raise ConfigError(f"train.learning_rate is {list(self.learning_rates)}; name each rate once")
        for name, least in (("batch_size", 1), ("eval_batch_size", 0), ("accumulate", 1), ("eval_every", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.dropout < 1:
            raise ConfigError(f"train.dropout is {self.dropout}; it must be below 1")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The rates to try."""
        rates = self.learning_rate
        return (rates,) if isinstance(rates, float) else tuple(rates)


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """Settings of question answering alone."""

    version_2: bool = False
    """Questions may have no answer, as in SQuAD 2.0."""
    compare: Literal["words", "characters"] = "words"
    """What exact match and F1 count: words, as SQuAD, or for Chinese characters, as CMRC 2018."""
    n_best: int = 20
    """Answers kept for each question ..."""
    max_answer_length: int = 30
    """... of at most so many pieces."""
    null_threshold: float | Literal["tuned"] = "tuned"
    """No answer is given where its score is above the best answer's by more than this; tuned: by the first dev file."""

    def __post_init__(self) -> None:
        for name in ("n_best", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"span.{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One task: what `bert-jax finetune TASK.toml` reads."""

    name: str = ""
    """Empty: the name of the task file."""
    kind: Kind = "classification"
    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of their ids; empty: those of the training file, sorted."""
    metric: str = ""
    """What chooses the best checkpoint; empty: the first of the kind (see METRICS)."""
    positive: str = ""
    """The class that `f1` of a classification is about; empty: the last one."""
    about: str = ""
    """A note: what the set is, where it comes from, what to expect."""
    run_dir: str = ""
    """The run folder; empty: runs/NAME."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    inputs: InputsConfig = dataclasses.field(default_factory=InputsConfig)
    train: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    span: SpanConfig = dataclasses.field(default_factory=SpanConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        if self.metric and self.metric not in METRICS[self.kind]:
            raise ConfigError(f"metric is {self.metric!r}{core.nearest(self.metric, METRICS[self.kind])}")
        if len(set(self.labels)) != len(self.labels):
            raise ConfigError(f"labels is {list(self.labels)}; name each once")
        if self.positive and self.labels and self.positive not in self.labels:
            raise ConfigError(f"positive is {self.positive!r}{core.nearest(self.positive, self.labels)}")
        if self.kind == "choice" and len(self.data.columns.choices) == 1:
            raise ConfigError("data.columns.choices names one column; a choice needs two or more")

    @property
    def best_metric(self) -> str:
        """The figure that chooses the best checkpoint."""
        return self.metric or METRICS[self.kind][0]

    @property
    def lower_is_better(self) -> bool:
        return self.best_metric in LOWER_IS_BETTER


def load_task(path: str | Path, overrides: Sequence[str] = ()) -> TaskConfig:
    """Read a task file with `--key value` overrides.

    Files and folders that the task file names are taken from its own folder, those of the overrides from the current
    one.

    Raises:
      ConfigError: a missing file, an unknown key (with the nearest valid one) or a wrong value.
    """
    path = Path(path)
    task = core.load(TaskConfig, core.read_toml(path), str(path))
    name = task.name or path.stem
    data = _seen_from_here(task.data, path.parent)
    task = dataclasses.replace(task, name=name, run_dir=task.run_dir or str(Path("runs") / name), data=data)
    return override(task, overrides) if overrides else task


def override(task: TaskConfig, arguments: Sequence[str], prog: str = PROG) -> TaskConfig:
    """Apply `--section.key value` arguments; a mistyped one ends the program with the nearest valid names."""
    new = run_file.override(task, arguments, prog)
    data = new.data
    if data.format == "tfds" or data.folder != task.data.folder:
        return new

    def here(now: Any, before: Any) -> Any:
        if isinstance(now, str):
            changed = now and now != before and not storage.is_remote(now)
            return str(Path(now).expanduser().absolute()) if changed else now
        old = before if isinstance(before, dict) else {}
        return {name: here(file, old.get(name)) for name, file in now.items()}

    # A file named on the command line is seen from the current folder, not from data.folder.
    files = {name: here(getattr(data, name), getattr(task.data, name)) for name in ("train", "dev", "test")}
    return dataclasses.replace(new, data=dataclasses.replace(data, **files))


def of_meta(meta: Mapping[str, Any], where: str) -> TaskConfig:
    """The task that was stored with a fine-tuned checkpoint."""
    return core.load(TaskConfig, meta["task"], where)


def splits(name: str, files: str | Mapping[str, str]) -> dict[str, str]:
    """The files of `data.dev` or `data.test` by name; a single one has the name `name`, an empty one is none."""
    if isinstance(files, str):
        return {name: files} if files else {}
    return dict(files)


def data_file(data: DataConfig, name: str) -> str:
    """Where a file of the task lies; of TFDS, the name of the split as it is."""
    if data.format == "tfds" or not data.folder or storage.is_remote(name) or Path(name).is_absolute():
        return name
    if storage.is_remote(data.folder):
        return f"{data.folder.rstrip('/')}/{name}"
    return str(Path(data.folder).expanduser() / name)


def _seen_from_here(data: DataConfig, folder: Path) -> DataConfig:
    """The data section with its folder as seen from the current one."""
    if storage.is_remote(data.folder):
        return data
    inner = Path(data.folder).expanduser()
    return dataclasses.replace(data, folder=str(inner) if inner.is_absolute() else os.path.relpath(folder / inner))
