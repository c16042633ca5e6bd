"""A linear probe: what a linear model reads from a frozen encoder's features (Devlin et al. 2019, section 5.3).

It reads the same task files as `finetune`, and its predictions are scored by the same scorers. For tags, the features
are those of each word's first piece, with a linear model in place of the paper's two-layer BiLSTM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from bert_jax import linear
from bert_jax.featurizer import FeatureConfig, Featurizer
from bert_jax.finetune import evaluation, outputs
from bert_jax.finetune.evaluation import LabelledSet
from bert_jax.finetune.loading import load_encoder
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.finetune.train import model_config
from bert_jax.heads import HeadConfig
from transformer_jax import command
from transformer_jax.config import ConfigError, UserError

PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)
"""The L2 penalties that are tried, from the strongest on."""
KINDS = (*get_args(linear.Kind), "tagging")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The features of one file that are learned from or scored.

    Attributes:
      x_NF: features of rows, or for tags of the first pieces of words.
      targets: see `linear.fit`.
      places: for tags, where each stands: (int [N] rows, int [N] places in the row).
    """

    x_NF: np.ndarray
    targets: np.ndarray
    places: tuple[np.ndarray, np.ndarray] | None = None


def probe(
    task: TaskConfig,
    checkpoint: str | Sequence[str],
    settings: FeatureConfig | None = None,
    say: Say = command.say,
) -> dict[str, Any]:
    """Fit linear models to the features of the training file; the dev file chooses the penalty.

    Args:
      checkpoint: anything that `bert_jax.load` takes, or a fine-tuned run, whose head is left out. Of several with one
        vocabulary the features stand beside each other, as ELMo's two directions do (Peters et al. 2018).
      settings: which features; of a task of tags they are those of pieces.

    Returns:
      task, checkpoint, features, examples, l2, metric, tried (the metric by penalty), and by dev file the figures of
      the probe (`dev`) and of what looks at no feature (`majority`: the commonest class, or the mean). The figures of
      the first dev file are a little too good, since that file has chosen the penalty.

    Raises:
      UserError: a kind that has no probe, no dev file, a file or checkpoint that cannot be used, or several with
        different vocabularies.
    """
    if task.kind not in KINDS:
        raise UserError(f"{task.name} is of the kind {task.kind}, and linear probes are for {', '.join(KINDS)}")
    settings = settings or FeatureConfig()
    tags = task.kind == "tagging"
    if tags:
        settings = dataclasses.replace(settings, features="tokens")
    elif settings.features == "tokens":
        raise UserError("features of every piece are for tags; take mean, cls or pooled")
    names = [checkpoint] if isinstance(checkpoint, str) else list(checkpoint)
    encoders = [load_encoder(name, say=say) for name in names]
    for name, encoder in zip(names, encoders, strict=True):
        model_config(task, encoder.config)  # refuses rows that are too long, before anything is computed
        if encoder.tokenizer.digest != encoders[0].tokenizer.digest:
            raise UserError(f"{name} has another vocabulary than {names[0]}; features of one text go together")
    featurizers = [Featurizer(encoder, settings) for encoder in encoders]
    data = evaluation.load_data(task, encoders[0].tokenizer, say)
    task = data.task
    if not data.dev:
        raise ConfigError("data.dev is empty; the probe needs a dev file, which chooses its penalty")
    head = HeadConfig(task.kind, task.labels)
    kind: linear.Kind = "classification" if tags else task.kind  # type: ignore[assignment]
    train = _rows(featurizers, data.train, say)
    if not len(train.x_NF):
        raise UserError(f"{data.train.records.path}: there is no word to learn from")
    dev = [_rows(featurizers, part, say) for part in data.dev]
    models = linear.fit(train.x_NF, train.targets, kind, head.num_outputs, PENALTIES, say)

    def figures(part: LabelledSet, rows: Rows, scores_NC: np.ndarray) -> dict[str, float]:
        predicted = _laid_out(part, rows, scores_NC)
        found = outputs.predictions(task, head, part.records.examples, part.features, predicted)
        mean = linear.loss(scores_NC, rows.targets, kind) if len(scores_NC) else float("nan")
        return evaluation.figures(task, head, found, mean)

    tried = {p: figures(data.dev[0], dev[0], model(dev[0].x_NF)) for p, model in zip(PENALTIES, models, strict=True)}
    sign = -1.0 if task.lower_is_better else 1.0
    # The strongest penalty wins a tie.
    best = max(PENALTIES, key=lambda p: (sign * tried[p][task.best_metric], p))
    chosen = models[PENALTIES.index(best)]
    flat_C = linear.constant(train.targets, kind, head.num_outputs)
    pairs = list(zip(data.dev, dev, strict=True))
    return {
        "task": task.name,
        "checkpoint": " + ".join(names),
        "features": {name: getattr(settings, name) for name in ("features", "layers", "join")},
        "examples": len(data.train.records.examples),
        "metric": task.best_metric,
        "l2": best,
        "tried": {str(p): found[task.best_metric] for p, found in tried.items()},
        "dev": {part.name: figures(part, rows, chosen(rows.x_NF)) for part, rows in pairs},
        "majority": {part.name: figures(part, rows, np.tile(flat_C, (len(rows.x_NF), 1))) for part, rows in pairs},
    }


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    features = found["features"]
    layers = " ".join(map(str, features["layers"]))
    joined = f" ({features['join']})" if len(features["layers"]) > 1 else ""
    out = [
        f"{found['task']}: a linear probe on {features['features']}, layers {layers}{joined}, of "
        f"{found['checkpoint']}; {found['examples']:,} examples"
    ]
    for name, figures in found["dev"].items():
        shown = [k for k in figures if k != "n" and np.isfinite(figures[k])]
        width = max(len(k) for k in shown) + 2
        out.append(f"{name} (n {figures['n']:,.0f})".ljust(20) + "".join(f"{k:>{max(width, 10)}}" for k in shown))
        for label, row in (("probe", figures), ("majority", found["majority"][name])):
            out.append(f"  {label}".ljust(20) + "".join(f"{row[k]:>{max(width, 10)}.4f}" for k in shown))
    first = next(iter(found["dev"]))
    out.append(
        f"L2 {found['l2']:g}, of {', '.join(f'{p:g}' for p in PENALTIES)} the best by {found['metric']} on {first}"
    )
    return "\n".join(out)


def _rows(featurizers: Sequence[Featurizer], part: LabelledSet, say: Say) -> Rows:
    """The features of one file, of several encoders side by side."""
    say(f"features of {len(part.features.arrays['input_ids']):,} rows of {part.records.path}")
    each = [_rows_of(featurizer, part) for featurizer in featurizers]
    return dataclasses.replace(each[0], x_NF=np.concatenate([rows.x_NF for rows in each], -1))


def _rows_of(featurizer: Featurizer, part: LabelledSet) -> Rows:
    arrays = part.features.arrays
    labels = arrays["labels"]
    if featurizer.settings.features != "tokens":
        return Rows(featurizer.vectors(arrays), labels)
    row_N, at_N = np.nonzero(labels >= 0)
    start_R = np.searchsorted(row_N, np.arange(len(labels) + 1))
    x_NF = np.zeros((len(row_N), featurizer.size), np.float32)
    for batch in featurizer.batches(arrays):
        for row, values_LF in zip(batch.rows, batch.values, strict=True):
            own = slice(start_R[row], start_R[row + 1])
            x_NF[own] = values_LF[at_N[own]]
    return Rows(x_NF, labels[row_N, at_N], (row_N, at_N))


def _laid_out(part: LabelledSet, rows: Rows, scores_NC: np.ndarray) -> np.ndarray:
    """Scores as a head gives them: [n, C], or of tags the chosen ids at their places, int [n, L]."""
    if rows.places is None:
        return scores_NC
    tags_NL = np.zeros(part.features.arrays["labels"].shape, np.int64)
    tags_NL[rows.places] = scores_NC.argmax(-1)
    return tags_NL
