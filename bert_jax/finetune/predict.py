"""What a fine-tuned model says of new input: one result for each line, in order, with no look at any label."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bert_jax.finetune import features, outputs, records
from bert_jax.finetune.encoded import Features
from bert_jax.finetune.forward import Forward
from bert_jax.finetune.loading import LoadedHead, load_finetuned, unfinished
from bert_jax.finetune.outputs import Predictions
from bert_jax.finetune.records import Example
from bert_jax.finetune.task import FinetuneTask
from bert_jax.finetune.task_file import TaskConfig, override
from bert_jax.finetune.train import model_config
from transformer_jax import command, sharding
from transformer_jax.config import ConfigError, UserError
from transformer_jax.lines import lines as lines_of
from transformer_jax.lines import undecodable

CHUNK = 1024
"""Examples that are in memory as arrays at once."""
Say = Callable[[str], None]
STANDARD_INPUT = Path("standard input")


class Predictor:
    """A fine-tuned model compiled for all devices.

    Args:
      found: from `load_finetuned`.
      task: its task, perhaps with other settings of data and inputs; None takes the one it was trained on.
      batch_size: rows of a batch; the result does not depend on it.

    Raises:
      ConfigError: rows longer than the position table.
    """

    def __init__(self, found: LoadedHead, task: TaskConfig | None = None, batch_size: int = 32):
        self.found, self.task, self.head = found, task or found.task, found.head
        model_config(self.task, found.config)  # refuses rows that are too long, before anything is compiled
        choices = len(self.task.data.columns.choices) or 2
        model = FinetuneTask(found.config, self.head, self.task.inputs.max_seq_length, choices)
        mesh = sharding.make_mesh(
            dataclasses.replace(self.task.mesh, preset="data_parallel", data=-1, fsdp=0, tensor=1)
        )
        self.forward = Forward(model, mesh, batch_size, "data_parallel", self.task.train.matmul_precision)
        self.params = self.forward.put(found.params)
        self._seen = Features({}, np.zeros(0, np.int32), 0)

    def __call__(self, examples: Sequence[Example], where: str = "input") -> Predictions:
        """Predictions of examples, in their order; their labels, if they have any, are not looked at."""
        encoded = features.encode(self.task, examples, self.found.tokenizer, labelled=False, where=where)
        self._seen = dataclasses.replace(
            encoded, arrays={}, cut=self._seen.cut + encoded.cut, examples=self._seen.examples + len(examples)
        )
        scored = self.forward(self.params, encoded.arrays)
        assert scored is not None
        return outputs.predictions(self.task, self.head, examples, encoded, scored[0])

    @property
    def examples(self) -> int:
        """How many were predicted so far."""
        return self._seen.examples

    def report(self, where: str) -> list[str]:
        """Lines that say what the model did not see of all examples so far."""
        return dataclasses.replace(self._seen, example_index_N=np.zeros(0, np.int32)).report(where)


def predict(
    run: str,
    file: str | None = None,
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    as_json: bool = False,
    threshold: float | None = None,
    say: Say = command.say,
) -> int:
    """Predict a file, or standard input, and write one result for each example.

    A file is read as the task's own are, by the columns of the task, but no label is looked at. A `.txt` file and
    standard input have no header: a text a line, further texts after tabs; of a sentence to be tagged, words between
    spaces.

    Args:
      run: a fine-tuned run, or RUN@STEP.
      overrides: `--data.columns.text_a NAME` and others of the task's keys.
      out: the file to write; for span the answers as JSON, with n-best answers and null scores beside it. None prints.
      as_json: an object a line in place of columns.
      threshold: of span with unanswerable questions; None: what was found on dev.

    Returns:
      The number of examples.

    Raises:
      UserError: a model, a file or settings that cannot be used.
    """
    found = load_finetuned(run)
    task = override(found.task, overrides, "bert-jax predict RUN FILE") if overrides else found.task
    if (task.kind, task.labels) != (found.task.kind, found.task.labels):
        raise ConfigError("kind and labels are those that the model was trained with; they cannot be changed here")
    sizes = {name: getattr(task.train, name) for name in ("batch_size", "eval_batch_size")}
    if task.train != dataclasses.replace(found.task.train, **sizes):
        raise ConfigError(f"of [train] a prediction heeds {' and '.join(sizes)} alone; leave the other keys out")
    limit = _threshold(found, threshold)
    if half := unfinished(run, found.meta):
        say(half)
    where, examples = read(task, file)
    predictor = Predictor(found, task, task.train.eval_batch_size or task.train.batch_size)
    kept: list[Predictions] = []
    with contextlib.ExitStack() as files:
        sink = sys.stdout
        spans = found.head.kind == "span" and out is not None and not as_json
        if out is not None and not spans:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            sink = files.enter_context(Path(out).open("w", encoding="utf-8", newline="\n"))
        first = outputs.header(task, found.head)
        if first is not None and not as_json and not spans:
            print(first, file=sink)
        for some in _chunks(examples, CHUNK):
            part = predictor(some, where)
            if spans:
                kept.append(part)
            else:
                _write(task, found, part, limit, as_json, sink)
        if spans:
            assert out is not None
            answers = tuple(itertools.chain.from_iterable(p.answers for p in kept))
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            for path in outputs.write_spans(Path(out), Predictions((), answers=answers), limit):
                say(f"written: {path}")
    for line in predictor.report(where):
        say(line)
    say(f"{predictor.examples:,} examples predicted by {run}, step {found.step}")
    return predictor.examples


def _write(
    task: TaskConfig, found: LoadedHead, part: Predictions, limit: float | None, as_json: bool, sink: TextIO
) -> None:
    rows: Iterator[Any]
    if as_json:
        rows = map(command.json_line, outputs.records(task, found.head, part, limit))
    else:
        rows = outputs.lines(task, found.head, part, threshold=limit)
    for row in rows:
        print(row, file=sink)
    sink.flush()


def _threshold(found: LoadedHead, asked: float | None) -> float | None:
    """The null threshold: what is asked for, what the task fixes, or what was found on dev and stored with the run.

    None where each question has an answer.
    """
    if not found.task.span.version_2:
        if asked is not None:
            raise UserError("--threshold is for questions that may have no answer (span.version_2 = true)")
        return None
    if asked is not None:
        if math.isnan(asked):
            raise UserError("--threshold is nan; it must be a number, a difference of two scores")
        return asked
    fixed = found.task.span.null_threshold
    if isinstance(fixed, int | float):
        return float(fixed)
    return found.null_threshold


def read(task: TaskConfig, file: str | None) -> tuple[str, Iterable[Example]]:
    """What messages call the input, and its examples without labels.

    Args:
      file: None is standard input.
    """
    if file is None:
        return str(STANDARD_INPUT), plain_examples(task, _standard_input(), str(STANDARD_INPUT))
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file} is a folder; name a file" if path.is_dir() else f"{file}: no such file")
    if path.name.removesuffix(".gz").endswith(".txt") and task.data.format in ("", "tsv", "csv"):
        return file, plain_examples(task, lines_of(path, task.data.encoding_errors), file)
    return file, records.read(task, str(path.absolute()), labelled=False).examples


def plain_examples(task: TaskConfig, source: Iterable[tuple[int, str]], where: str) -> Iterator[Example]:
    """An example a line: its texts between tabs, or for tags its words between spaces.

    Raises:
      UserError: a line with too few or too many texts; it is named.
    """
    columns = task.data.columns
    names = ["the text"]
    if task.kind == "span":
        names = ["the question", "the context"]
    elif task.kind == "choice":
        names = ["the beginning", *(["its second part"] if columns.text_b else []), *columns.choices]
    elif columns.text_b:
        names = ["the first text", "the second text"]
    for index, (number, line) in enumerate(source):
        if task.kind == "tagging":
            yield Example(str(index), number, words=tuple(line.split()))
            continue
        fields = [line] if len(names) == 1 else line.split("\t")
        if len(fields) != len(names):
            raise UserError(
                f"{where}: line {number} has {len(fields)} text{'s' * (len(fields) != 1)} between tabs; it must have "
                f"{len(names)}: {', '.join(names)}"
            )
        start = 2 if len(names) > len(columns.choices) + 1 else 1
        if task.kind == "choice":
            second = fields[1] if start == 2 else None
            yield Example(str(index), number, text_a=fields[0], text_b=second, choices=tuple(fields[start:]))
        else:
            yield Example(str(index), number, text_a=fields[0], text_b=fields[1] if len(fields) == 2 else None)


def _standard_input() -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise undecodable(e, STANDARD_INPUT, number) from None
        yield number, text.removesuffix("\n").removesuffix("\r").removeprefix("\ufeff" if number == 1 else "")


def _chunks(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    source = iter(examples)
    while some := list(itertools.islice(source, size)):
        yield some


def evaluate(run: str, task_file: str | None = None, say: Say = command.say) -> dict[str, Any]:
    """The figures of a fine-tuned model on the dev files of a task.

    Args:
      run: a fine-tuned run, or RUN@STEP.
      task_file: another task file, whose dev files are evaluated; its labels may be listed in any order, since they are
        matched by name. None: the task that the model was trained on.

    Returns:
      task, checkpoint, step, dev (figures by file), and for classification `confusion`.

    Raises:
      UserError: no dev file, another kind of task, or a label that the model does not know.
    """
    from bert_jax.finetune import evaluation
    from bert_jax.finetune.task_file import load_task, splits

    found = load_finetuned(run)
    if half := unfinished(run, found.meta):
        say(half)
    task = found.task
    if task_file is not None:
        other = load_task(task_file)
        if other.kind != found.head.kind:
            raise UserError(f"{task_file} is a task of the kind {other.kind}, and {run} was trained for {task.kind}")
        unknown = [name for name in other.labels if name not in found.head.labels]
        if unknown and other.kind != "regression":
            known = ", ".join(found.head.labels)
            raise UserError(f"{task_file}: the model does not know the label {unknown[0]!r}; known labels: {known}")
        task = dataclasses.replace(other, labels=found.head.labels)
    dev = tuple(
        evaluation.load_set(task, name, file, found.tokenizer, say)
        for name, file in splits("dev", task.data.dev).items()
    )
    if not dev:
        raise UserError(f"{task_file or run}: the task names no dev file; set data.dev, or use `predict`")
    predictor = Predictor(found, task, task.train.eval_batch_size or task.train.batch_size)
    scores = evaluation.Scorer(evaluation.Data(task, dev[0], dev, ()), found.head, predictor.forward).full(found.params)
    out: dict[str, Any] = {"task": task.name, "checkpoint": run, "step": found.step, "dev": scores.figures}
    return out | ({"confusion": scores.confusion} if scores.confusion else {})
