"""The data of a task, read and encoded, and the figures of a model on its dev files, every example exactly once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.finetune import features, outputs, records, scorers
from bert_jax.finetune.encoded import Features
from bert_jax.finetune.entities import mark_entities
from bert_jax.finetune.forward import Forward
from bert_jax.finetune.outputs import Predictions
from bert_jax.finetune.records import Records
from bert_jax.finetune.rows import fingerprint
from bert_jax.finetune.task_file import TaskConfig, splits
from bert_jax.heads import HeadConfig
from transformer_jax.config import ConfigError, UserError, nearest
from transformer_jax.tokenizer import WordPiece

Say = Callable[[str], None]
LABELLED = ("classification", "multi_label", "tagging")
"""Kinds whose labels have names."""


@dataclasses.dataclass(frozen=True)
class LabelledSet:
    """One file, read and encoded."""

    name: str
    records: Records
    features: Features


@dataclasses.dataclass(frozen=True)
class Data:
    """All files of a task."""

    task: TaskConfig
    """With its labels filled in."""
    train: LabelledSet
    dev: tuple[LabelledSet, ...]
    test: tuple[LabelledSet, ...]
    """Without labels."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return self.train.features.arrays

    @property
    def num_rows(self) -> int:
        return len(self.arrays["input_ids"])

    def fingerprint(self) -> str:
        """A digest of all files as they were read: examples with their labels, and the rows made of them."""
        digest = hashlib.sha256()
        for part, sets in (("train", (self.train,)), ("dev", self.dev), ("test", self.test)):
            for one in sets:
                digest.update(f"{part} {one.name} {fingerprint(one.features.arrays)}\n".encode())
                for example in one.records.examples:
                    digest.update(repr(example).encode())
        return digest.hexdigest()

    @property
    def choices(self) -> int:
        """Choices of a row, 0 for other kinds."""
        return self.arrays["input_ids"].shape[1] if self.task.kind == "choice" else 0


def load_data(task: TaskConfig, tokenizer: WordPiece, say: Say) -> Data:
    """Read and encode every file of a task; what does not fit, or was left out, is said.

    Raises:
      UserError: a file that cannot be read, labels that do not fit together, or a metric that the labels do not allow.
    """
    if not task.data.train:
        raise ConfigError("data.train is empty; name the training file")
    train = records.read(task, task.data.train)
    task = with_labels(task, train)
    check_metric(task)
    dev = tuple(load_set(task, n, f, tokenizer, say) for n, f in splits("dev", task.data.dev).items())
    test = tuple(load_set(task, n, f, tokenizer, say, False) for n, f in splits("test", task.data.test).items())
    return Data(task, _encoded(task, "train", train, tokenizer, say, training=True), dev, test)


def load_set(
    task: TaskConfig, name: str, file: str, tokenizer: WordPiece, say: Say, labelled: bool = True
) -> LabelledSet:
    """Read and encode one file; its labels are matched by name."""
    return _encoded(task, name, records.read(task, file, labelled), tokenizer, say, labelled)


def _encoded(
    task: TaskConfig,
    name: str,
    found: Records,
    tokenizer: WordPiece,
    say: Say,
    labelled: bool = True,
    training: bool = False,
) -> LabelledSet:
    if labelled and task.kind in LABELLED:
        records.check_labels(found, task.labels)
    encoded = features.encode(task, found.examples, tokenizer, labelled, training, found.path)
    if training and not len(encoded.example_index_N):
        raise UserError(f"{found.path}: no example is left to learn from; {'; '.join(encoded.report(found.path))}")
    for line in (found.report(), *encoded.report(found.path)):
        if line:
            say(line)
    return LabelledSet(name, found, encoded)


def with_labels(task: TaskConfig, train: Records) -> TaskConfig:
    """The task with the labels that it names or, if it names none, those of the training file."""
    labels = task.labels
    if task.kind == "regression":
        labels = labels or (task.data.columns.label,)
        if len(labels) != 1:
            raise ConfigError(f"labels is {list(labels)}; a regression gives one number, so it has one name")
    elif task.kind not in LABELLED:
        if labels:
            raise ConfigError(f"labels is {list(labels)}; a task of the kind {task.kind} has none")
    else:
        labels = labels or records.labels_of(train)
        least = 1 if task.kind == "multi_label" else 2
        if task.labels and len(labels) < least:
            raise ConfigError(f"labels is {list(labels)}; name all of them, two or more, or leave it out")
        if len(labels) < least:
            raise UserError(
                f"{train.path}: the only label is {', '.join(labels)}; two or more are needed to learn from"
            )
    return dataclasses.replace(task, labels=labels)


def check_metric(task: TaskConfig) -> None:
    """Refuse a metric that has no meaning for the labels, before anything is trained."""
    if task.positive and task.positive not in task.labels:
        raise ConfigError(f"positive is {task.positive!r}{nearest(task.positive, task.labels)}")
    names = [name for name in figure_names(task) if name != "n"]
    if task.best_metric not in names:
        cure = "; name the class that it is about in `positive`" if task.best_metric == "f1" else ""
        raise ConfigError(
            f"metric is {task.best_metric!r}, which these labels do not allow{cure}{nearest(task.best_metric, names)}"
        )


def figure_names(task: TaskConfig) -> tuple[str, ...]:
    """The figures of one file."""
    if task.kind == "classification":
        with_f1 = ("f1",) if len(task.labels) == 2 or task.positive else ()
        return ("accuracy", *with_f1, "macro_f1", "matthews", "loss", "n")
    if task.kind == "tagging":
        of_entities = ("f1", "precision", "recall", "macro_f1", "strict_f1") if mark_entities(task.labels) else ()
        return (*of_entities, "accuracy", "loss", "n")
    if task.kind == "span":
        return ("f1", "exact", "loss", "n")
    return {
        "multi_label": ("micro_f1", "macro_f1", "exact", "loss", "n"),
        "regression": ("pearson_spearman", "pearson", "spearman", "mse", "loss", "n"),
        "choice": ("accuracy", "loss", "n"),
    }[task.kind]


def figures(
    task: TaskConfig, head: HeadConfig, found: Predictions, loss: float, threshold: float | None = None
) -> dict[str, float]:
    """The figures of one file: those of `figure_names`, and for span what else the scorer gives.

    Args:
      threshold: of a span without an answer; None: the best one for these very questions.
    """
    examples = found.examples
    out: dict[str, float]
    if head.kind == "classification":
        place = {name: i for i, name in enumerate(head.labels)}
        true_N, said_N = np.array([place[str(e.label)] for e in examples]), found.classes()
        positive = place[task.positive or head.labels[-1]]
        every = scorers.classification_scores(true_N, said_N, len(head.labels), positive)
        # Of many classes the F1 of one means nothing unless it is asked for.
        out = {name: every[name] for name in figure_names(task) if name in every}
    elif head.kind == "multi_label":
        sets = [set(e.label if isinstance(e.label, tuple) else ()) for e in examples]
        true_NC = np.array([[name in chosen for name in head.labels] for chosen in sets])
        out = scorers.multi_label_scores(true_NC, found.chosen())
    elif head.kind == "regression":
        assert found.numbers is not None
        out = scorers.regression_scores(np.array([e.label for e in examples], np.float64), found.numbers)
    elif head.kind == "tagging":
        out = scorers.tagging_scores([e.tags or () for e in examples], found.tags)
    elif head.kind == "choice":
        out = {"accuracy": scorers.accuracy(np.array([int(str(e.label)) for e in examples]), found.classes())}
    else:
        out = span_figures(task, found, threshold)
    out |= {"loss": loss, "n": float(len(examples))}
    names = figure_names(task)
    return {k: out[k] for k in (*names, *(k for k in out if k not in names))}


def span_figures(task: TaskConfig, found: Predictions, threshold: float | None) -> dict[str, float]:
    """Exact match and F1, for 2.0 with the null threshold."""
    golds = {e.id: [text for text, _ in e.answers] for e in found.examples}
    answers = {p.id: p.best_text for p in found.answers}
    characters = task.span.compare == "characters"
    if not task.span.version_2:
        return scorers.squad_scores(answers, golds, characters=characters)
    null_scores = {p.id: p.null_score for p in found.answers}
    return scorers.squad_scores(answers, golds, True, null_scores, threshold, characters)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model's last evaluation gave."""

    task: TaskConfig
    head: HeadConfig
    figures: dict[str, dict[str, float]]
    """By dev file."""
    confusion: dict[str, dict[str, Any]]
    """By dev file: labels, and counts by true class (rows) and predicted one."""
    settings: dict[str, float]
    """What was found on dev and is part of the model: the null threshold."""
    dev: dict[str, Predictions]
    test: dict[str, Predictions]

    def write(self, folder: Path) -> list[Path]:
        """Write `predictions_NAME.tsv` (tags `.txt`, answers `.json`) for each dev and test file, a line an example.

        Where a dev and a test file have one name, theirs are `predictions_dev_NAME` and `predictions_test_NAME`.
        """
        out: list[Path] = []
        threshold = self.settings.get("null_threshold")
        files = [("dev", *item) for item in self.dev.items()] + [("test", *item) for item in self.test.items()]
        for split, name, found in files:
            stem = f"predictions_{f'{split}_{name}' if name in self.dev and name in self.test else name}"
            labelled = split == "dev"
            if self.head.kind == "span":
                out += outputs.write_spans(folder / f"{stem}.json", found, threshold)[:1]
                continue
            path = folder / f"{stem}.{'txt' if self.head.kind == 'tagging' else 'tsv'}"
            first = outputs.header(self.task, self.head, labelled)
            body = list(outputs.lines(self.task, self.head, found, labelled))
            path.write_text("".join(f"{x}\n" for x in ([first] if first else []) + body), encoding="utf-8")
            out.append(path)
        return out


class Scorer:
    """Scores parameters on the dev files of a task.

    Attributes:
      names: of the figures that `figures` gives: those of the first dev file as they are, of the others as
        NAME/figure.
    """

    def __init__(self, data: Data, head: HeadConfig, forward: Forward):
        self.data, self.head, self.forward = data, head, forward
        names = figure_names(data.task)
        self.names = tuple(_key(i, s.name, n) for i, s in enumerate(data.dev) for n in names)

    def figures(self, params: Any, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """The figures of every dev file for parameters on the devices; None if `stop` asked to leave half-way."""
        out: dict[str, float] = {}
        threshold = self._fixed_threshold()
        for i, part in enumerate(self.data.dev):
            scored = self._scored(params, part, True, stop)
            if scored is None:
                return None
            found = figures(self.data.task, self.head, *scored, threshold)
            threshold = found.get("threshold", threshold)
            out |= {_key(i, part.name, name): value for name, value in found.items()}
        return out

    def full(self, params: Any) -> Scores:
        """Figures and predictions of every dev and test file for parameters in memory."""
        placed = self.forward.put(params)
        dev, each, confusion = {}, {}, {}
        threshold = self._fixed_threshold()
        for part in self.data.dev:
            scored = self._scored(placed, part, True)
            assert scored is not None
            dev[part.name] = scored[0]
            each[part.name] = figures(self.data.task, self.head, *scored, threshold)
            threshold = each[part.name].get("threshold", threshold)
            if self.head.kind == "classification":
                confusion[part.name] = _confusion(self.head.labels, scored[0])
        test = {}
        for part in self.data.test:
            scored = self._scored(placed, part, False)
            assert scored is not None
            test[part.name] = scored[0]
        settings = {} if threshold is None else {"null_threshold": threshold}
        return Scores(self.data.task, self.head, each, confusion, settings, dev, test)

    def _fixed_threshold(self) -> float | None:
        value = self.data.task.span.null_threshold
        return None if value == "tuned" or not self.data.task.span.version_2 else value

    def _scored(
        self, params: Any, part: LabelledSet, loss: bool, stop: Callable[[], bool] = lambda: False
    ) -> tuple[Predictions, float] | None:
        scored = self.forward(params, part.features.arrays, loss=loss, stop=stop)
        if scored is None:
            return None
        logits, mean = scored
        return outputs.predictions(self.data.task, self.head, part.records.examples, part.features, logits), mean


def _key(number: int, file: str, figure: str) -> str:
    return figure if number == 0 else f"{file}/{figure}"


def _confusion(labels: Sequence[str], found: Predictions) -> dict[str, Any]:
    place = {name: i for i, name in enumerate(labels)}
    true_N = np.array([place[str(e.label)] for e in found.examples])
    return {"labels": list(labels), "counts": scorers.confusion(true_N, found.classes(), len(labels)).tolist()}


def matrix_lines(matrix: dict[str, Any]) -> list[str]:
    """A confusion matrix for people; of more than 12 classes only the commonest mistakes."""
    labels, counts = matrix["labels"], matrix["counts"]
    if len(labels) > 12:
        pairs = [
            (counts[i][j], i, j) for i in range(len(labels)) for j in range(len(labels)) if i != j and counts[i][j]
        ]
        pairs.sort(key=lambda x: (-x[0], x[1], x[2]))
        shown = [f"  {n} of {labels[i]} taken for {labels[j]}" for n, i, j in pairs[:12]]
        return [
            *shown,
            f"  ({len(pairs)} kind{'s' * (len(pairs) != 1)} of mistake in all; the whole matrix is in result.json)",
        ]
    width = max(6, *(len(name) + 2 for name in labels))
    rows = [" " * width + "".join(f"{name:>{width}}" for name in labels)]
    rows += [
        f"{name:>{width}}" + "".join(f"{n:>{width}}" for n in row) for name, row in zip(labels, counts, strict=True)
    ]
    return rows
