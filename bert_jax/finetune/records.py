"""Labelled examples from files: what the task's columns say, checked, with the line each comes from.

Labels are matched by name, never by place: a label that the model does not know stops the run. Reading for prediction
(`labelled=False`) looks at no label, so the columns of labels need not be there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.finetune import conll, squad_file, tables
from bert_jax.finetune.entities import Scheme, to_iob2
from bert_jax.finetune.task_file import FORMATS, TaskConfig, data_file
from transformer_jax import storage
from transformer_jax.config import ConfigError, UserError

ENDINGS = {"json": "squad", "txt": "tsv", "bio": "conll", "iob": "conll", "pq": "parquet"}
SHOWN = 5
_SCHEMES: dict[str, Scheme] = {"iob1": "", "bioes": ""}
"""Read leniently, as conlleval does; IOB2 is taken as it is, so that tags may also mark no entities."""


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One thing to predict about."""

    id: str
    line: int
    """Line of the file, or number of the record (SQuAD: of the question), from 1."""
    text_a: str = ""
    """The text, the first of two, what all choices begin with, or the question."""
    text_b: str | None = None
    """The second text, or the context of a question; in choices the beginning of each (as in SWAG)."""
    label: str | float | tuple[str, ...] | None = None
    """Class (choice: its number from 0, as text), number, or set of labels."""
    words: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    """In IOB2, one for each word."""
    choices: tuple[str, ...] | None = None
    answers: tuple[tuple[str, int], ...] = ()
    """Texts and where each starts in the context, in code points; -1 where the context does not have it."""
    is_impossible: bool = False


@dataclasses.dataclass(frozen=True)
class Records:
    """The examples of a file, in its order.

    Attributes:
      path: what messages call the file.
      problems: line, and what is wrong with it: rows that were left out, answers that are not where they should be.
      unit: what the numbers of examples count: lines, or the questions of a SQuAD file.
      word_a_line: whether each word of an example has a line of its own, from `Example.line` on.
    """

    path: str
    examples: tuple[Example, ...]
    problems: tuple[tuple[int, str], ...] = ()
    unit: str = "line"
    word_a_line: bool = False

    def report(self) -> str:
        """The problems as one line, or an empty text."""
        if not self.problems:
            return ""
        shown = "; ".join(f"{self.unit} {line}: {what}" for line, what in self.problems[:SHOWN])
        more = f"; and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
        return (
            f"{self.path}: {len(self.examples)} examples read, {len(self.problems)} problem"
            f"{'s' * (len(self.problems) != 1)} ({shown}{more})"
        )


def read(task: TaskConfig, name: str, labelled: bool = True) -> Records:
    """The examples of one file of the task, or of one split of its TFDS set.

    Args:
      name: as in `data.train`.
      labelled: whether labels are read. If not, a row that cannot be read is an error: there is to be a prediction for
        each.

    Raises:
      UserError: the file cannot be read, a column or a label is wrong (with its line), or no example is left.
    """
    data = task.data
    path = storage.local_file(data_file(data, name))
    kind = data.format or _format(path)
    where = str(path) if kind != "tfds" else f"{data.folder}:{name}"
    for only, wanted in (("conll", "tagging"), ("squad", "span")):
        if kind == only and task.kind != wanted:
            raise ConfigError(
                f"{where}: a file of the format {kind} is for the kind {wanted}; this task is {task.kind}"
            )
    if kind == "squad":
        rows: Iterable[Example] = _questions(path, data.encoding_errors, labelled)
        problems: list[tuple[int, str]] = []
    elif kind == "conll":
        rows, problems = _sentences(task, path, labelled), []
    else:
        columns = _columns(task, labelled)
        table = _table(task, kind, path, name, list(columns.values()))
        problems = list(table.problems)
        rows = (_example(task, columns, n, v, where, i, labelled) for i, (n, v) in enumerate(table.rows))
    examples = [*rows]
    unit = "question" if kind == "squad" else "line"
    if not labelled:
        if problems:
            line, what = problems[0]
            raise UserError(f"{where}: line {line} has {what}; each line is to have a prediction, so mend or remove it")
        _refuse_twice(examples, where, unit)
        return Records(where, tuple(examples), unit=unit)
    if task.kind == "span":
        examples, found = _checked_answers(examples, task.span.version_2, where)
        problems += found
    records = Records(where, tuple(examples), tuple(sorted(problems)), unit, kind == "conll")
    if not examples:
        raise UserError(records.report() or f"{where}: 0 examples; the file has none")
    _refuse_twice(examples, where, unit)
    return records


def labels_of(records: Records) -> tuple[str, ...]:
    """The labels or tags that are there, sorted; O comes first."""
    found: set[str] = set()
    for example in records.examples:
        found.update(_labels(example))
    return tuple(sorted(found, key=lambda name: (name != "O", name)))


def check_labels(records: Records, labels: Sequence[str]) -> None:
    """Refuse labels that the model does not know.

    Raises:
      UserError: the first such label with its line, and what is known.
    """
    known = set(labels)
    for example in records.examples:
        for place, name in enumerate(_labels(example)):
            if name not in known:
                line = example.line + (place if records.word_a_line else 0)
                raise UserError(
                    f"{records.path}: line {line} has the label {name!r}, which the model does not know; known "
                    f"labels: {', '.join(labels)}"
                )


def _labels(example: Example) -> Sequence[str]:
    if example.tags is not None:
        return example.tags
    if isinstance(example.label, str):
        return () if example.choices is not None else (example.label,)
    return example.label if isinstance(example.label, tuple) else ()


# --- rows of tables


def _format(path: Path) -> str:
    ending = Path(path.name.removesuffix(".gz")).suffix.removeprefix(".").lower()
    found = ENDINGS.get(ending, ending)
    if found not in FORMATS:
        raise ConfigError(f"{path}: the ending says no format; set data.format to one of {', '.join(FORMATS)}")
    return found


def _columns(task: TaskConfig, labelled: bool) -> dict[str, str]:
    """What is wanted of each row, and the column it is in."""
    columns = task.data.columns
    wanted = {"id": columns.id, "text_a": columns.text_a, "text_b": columns.text_b}
    if task.kind == "tagging":
        wanted = {"id": columns.id, "words": columns.words}
    if task.kind == "choice":
        wanted |= {f"choice{i}": column for i, column in enumerate(columns.choices)}
        if not columns.choices:
            raise ConfigError("a task of the kind choice needs data.columns.choices, a column for each choice")
    if labelled:
        wanted |= {"tags": columns.tags} if task.kind == "tagging" else {"label": columns.label}
    return {name: column for name, column in wanted.items() if column}


def _table(task: TaskConfig, kind: str, path: Path, name: str, columns: list[str]) -> tables.Table:
    data = task.data
    if kind == "jsonl":
        return tables.from_jsonl(path, columns, data.encoding_errors)
    if kind == "parquet":
        return tables.from_parquet(path, columns)
    if kind == "tfds":
        return tables.from_tfds(data.folder, name, columns, data.encoding_errors)
    quoted = data.quoting == "double" or (data.quoting == "auto" and kind == "csv")
    separator = "," if kind == "csv" else "\t"
    return tables.from_separated(path, columns, separator, quoted, data.header, data.encoding_errors)


def _example(
    task: TaskConfig, columns: Mapping[str, str], line: int, values: list[Any], where: str, index: int, labelled: bool
) -> Example:
    row = dict(zip(columns, values, strict=True))

    def text(name: str) -> str:
        value = row[name]
        if not isinstance(value, str):
            raise UserError(f"{where}: line {line}: column {columns[name]!r} holds {_short(value)}; it must be a text")
        return value

    found: dict[str, Any] = {"id": str(row["id"]) if "id" in row else str(index), "line": line}
    if task.kind == "tagging":
        found["words"] = _texts(row["words"], line, columns["words"], where)
        if labelled:
            tags = _texts(row["tags"], line, columns["tags"], where)
            found["tags"] = _iob2(task, tags, line, where)
            if len(tags) != len(found["words"]):
                raise UserError(f"{where}: line {line} has {len(found['words'])} words and {len(tags)} tags")
        return Example(**found)
    found |= {name: text(name) for name in ("text_a", "text_b") if name in row}
    if task.kind == "choice":
        found["choices"] = tuple(text(name) for name in row if name.startswith("choice"))
    if labelled and task.kind == "span":
        found["answers"] = _answers(row["label"], line, where)
        found["is_impossible"] = not found["answers"]
    elif labelled:
        found["label"] = _label(task, row["label"], line, where, columns["label"])
    return Example(**found)


def _label(task: TaskConfig, value: Any, line: int, where: str, column: str) -> str | float | tuple[str, ...]:
    if task.kind == "regression":
        try:
            number = math.nan if "_" in str(value) else float(value)  # Python would read 1_000
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{where}: line {line}: column {column!r} holds {_short(value)}; it must be a number")
        return number
    if task.kind == "multi_label":
        parts = value.split(task.data.label_separator) if isinstance(value, str) else value
        if parts is None:
            return ()
        if not isinstance(parts, list):
            raise UserError(f"{where}: line {line}: column {column!r} holds {_short(value)}; it must be labels")
        for part in parts:
            if task.data.label_separator in str(part):
                raise UserError(
                    f"{where}: line {line}: the label {part!r} has a {task.data.label_separator!r} in it, which stands "
                    "between labels in files of predictions; rename it, or set data.label_separator"
                )
        return tuple(dict.fromkeys(name for name in (str(p).strip() for p in parts) if name))
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value).strip()
    if not isinstance(value, str | int) or not name:
        raise UserError(f"{where}: line {line}: column {column!r} holds {_short(value)}; it must be a label")
    if task.kind == "choice":
        place = _choice_number(task, name)
        if place is None:
            raise UserError(
                f"{where}: line {line}: the label {name!r} is no choice; known are the numbers 0 to "
                f"{len(task.data.columns.choices) - 1} and the names in data.columns.choices"
            )
        return str(place)
    return name


def _choice_number(task: TaskConfig, name: str) -> int | None:
    columns = task.data.columns.choices
    if name in columns:
        return columns.index(name)
    return int(name) if name.isdecimal() and int(name) < len(columns) else None


def _texts(value: Any, line: int, column: str, where: str) -> tuple[str, ...]:
    parts = value.split() if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
        raise UserError(
            f"{where}: line {line}: column {column!r} holds {_short(value)}; it must be a list of texts, or one text "
            "with spaces between them"
        )
    return tuple(parts)


def _answers(value: Any, line: int, where: str) -> tuple[tuple[str, int], ...]:
    """Of a list of {text, answer_start}, or of {text: [...], answer_start: [...]} as `datasets` and TFDS have it."""
    try:
        if isinstance(value, dict):
            value = [{"text": t, "answer_start": s} for t, s in zip(value["text"], value["answer_start"], strict=True)]
        return tuple((str(a["text"]), int(a["answer_start"])) for a in value or ())
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{where}: line {line}: the answers are {_short(value)}; they must be a list of {{text, answer_start}}"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _iob2(task: TaskConfig, tags: Sequence[str], line: int, where: str) -> tuple[str, ...]:
    scheme = task.data.tag_scheme
    if scheme == "iob2":
        return tuple(tags)
    try:
        return tuple(to_iob2(tags, _SCHEMES[scheme]))
    except UserError as e:
        raise UserError(f"{where}: the sentence that starts in line {line}: {e}") from None


def _refuse_twice(examples: Sequence[Example], where: str, unit: str) -> None:
    first: dict[str, int] = {}
    for example in examples:
        if example.id in first:
            raise UserError(
                f"{where}: the id {example.id!r} is there twice, at {unit}s {first[example.id]} and {example.line}; "
                "each example needs an id of its own"
            )
        first[example.id] = example.line


# --- sentences and questions


def _sentences(task: TaskConfig, path: Path, labelled: bool) -> Iterator[Example]:
    columns = task.data.columns
    tags_in = columns.tags if labelled else None
    for i, (line, words, tags) in enumerate(conll.sentences(path, columns.words, tags_in, task.data.encoding_errors)):
        yield Example(str(i), line, words=words, tags=_iob2(task, tags, line, str(path)) if labelled else None)


def _questions(path: Path, errors: str, labelled: bool) -> Iterator[Example]:
    for number, (context, question) in enumerate(squad_file.questions(path, errors), 1):
        impossible = labelled and bool(question.get("is_impossible", False))
        answers = _answers(question.get("answers"), number, str(path)) if labelled else ()
        key = str(question.get("id", number - 1))
        yield Example(key, number, question["question"], context, answers=answers, is_impossible=impossible)


def _checked_answers(
    examples: Sequence[Example], version_2: bool, where: str
) -> tuple[list[Example], list[tuple[int, str]]]:
    """Answers that are not where they are said to be get -1 as their place, and are reported."""
    out, problems = [], []
    for example in examples:
        context, answers = example.text_b or "", []
        if (example.is_impossible or not example.answers) and not version_2:
            raise UserError(
                f"{where}: question {example.line} ({example.id}) has no answer; set span.version_2 = true for a set "
                "in which some have none"
            )
        if example.is_impossible and example.answers:
            # SQuAD's own scoring would take the answers; in its files none is so marked and has some.
            problems.append(
                (example.line, "it is marked as impossible, which counts, and has an answer, which does not")
            )
            example = dataclasses.replace(example, answers=())
        for text, start in example.answers:
            there = start >= 0 and text != "" and context[start : start + len(text)] == text
            answers.append((text, start if there else -1))
            if not there:
                found = context[start : start + len(text)] if start >= 0 else ""
                problems.append((example.line, f"the answer {_short(text)} is not at {start}: {_short(found)} is"))
        out.append(dataclasses.replace(example, answers=tuple(answers), is_impossible=not answers))
    return out, problems
