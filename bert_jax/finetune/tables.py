"""Rows of labelled files: TSV, CSV, JSON lines, Parquet and TFDS sets, by columns that the task names.

A TSV file has no quoting (GLUE's have none, and a quotation mark at the start of a field swallows rows where a reader
believes otherwise); CSV is quoted as RFC 4180 says. A row with the wrong number of columns is reported with its line
and left out; what is cut by it is never taken for another row.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax import records, tfds_source
from transformer_jax.config import ConfigError, UserError, nearest
from transformer_jax.lines import lines
from transformer_jax.source_files import Input, stat


class Table(NamedTuple):
    """The wanted columns of a file.

    Attributes:
      rows: line (or number of the record) from 1, and the values of the wanted columns, in their order.
      problems: rows left out: their line and what is wrong.
    """

    rows: list[tuple[int, list[Any]]]
    problems: list[tuple[int, str]]


def from_separated(
    path: Path, columns: Sequence[str], separator: str, quoted: bool, header: bool, errors: str = "strict"
) -> Table:
    """A TSV or CSV file, plain or gzip.

    Args:
      columns: names of the header, or numbers from 0 (-1 is the last).
      quoted: whether double quotes enclose fields, which then may hold separators and line ends.

    Raises:
      UserError: a file that cannot be read, a column that is not there, quotes that do not close.
    """
    rows = list(_quoted(path, separator, errors) if quoted else _plain(path, separator, errors))
    if not rows:
        return Table([], [])
    if header:
        names, rows = rows[0][1], rows[1:]
        width, why = len(names), "the header has"
    else:
        # Not the width of the first row, which may be the bad one.
        names = []
        width = collections.Counter(len(fields) for _, fields in rows).most_common(1)[0][0]
        why = "most rows have"
    places = [_place(column, names, width, path, header) for column in columns]
    good = [(number, [fields[i] for i in places]) for number, fields in rows if len(fields) == width]
    problems = [
        (number, f"{len(fields)} column{'s' * (len(fields) != 1)}, where {why} {width}")
        for number, fields in rows
        if len(fields) != width
    ]
    return Table(good, problems)


def _plain(path: Path, separator: str, errors: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines(path, errors):
        yield number, line.split(separator)


def _quoted(path: Path, separator: str, errors: str) -> Iterator[tuple[int, list[str]]]:
    source = (line + "\n" for _, line in lines(path, errors))
    reader = csv.reader(source, delimiter=separator, strict=True)
    first = 1
    with _any_length():
        try:
            for fields in reader:
                yield first, fields or [""]
                first = reader.line_num + 1
        except csv.Error as e:
            raise UserError(
                f"{path}: the row that starts in line {first} is not valid CSV: {e}; a field with a quotation mark in "
                'it must stand in quotation marks, with its own doubled, or set data.quoting = "none"'
            ) from None


@contextlib.contextmanager
def _any_length() -> Iterator[None]:
    """The csv module refuses fields of more than 131,072 characters; documents have more."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _place(column: str, names: Sequence[str], width: int, path: Path, header: bool) -> int:
    if names.count(column) > 1:
        raise UserError(
            f"{path}: {names.count(column)} columns are called {column!r}; rename all but one, or give "
            "the number of the column, from 0, in data.columns"
        )
    if column in names:
        return names.index(column)
    try:
        place = int(column)
    except ValueError:
        if header:
            raise UserError(
                f"{path}: no column {column!r}; set data.columns, or data.header = false for a file without names in "
                f"its first line{nearest(column, names)}"
            ) from None
        raise ConfigError(
            f"{path}: the column {column!r} is given by name, and data.header is false; give its number, from 0"
        ) from None
    if not -width <= place < width:
        raise UserError(f"{path}: no column {place}; the file has {width}, numbered from 0")
    return place


def from_jsonl(path: Path, columns: Sequence[str], errors: str = "strict") -> Table:
    """JSON lines; a column is a key, or `a.b` for the key b of the object at a. A blank line not at the end is a
    problem."""
    item = Input(types.SimpleNamespace(encoding_errors=errors), path.name, path)
    rows = list(records.from_jsonl(item, columns, "data.columns"))
    there = {number for number, _ in rows}
    return Table(rows, [(n, "nothing on it") for n in range(1, max(there, default=0)) if n not in there])


def from_parquet(path: Path, columns: Sequence[str]) -> Table:
    """Parquet; numbers for which the file carries names (as `datasets` writes it) become those names.

    Raises:
      UserError: a column that is not there, or a file that cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    stat(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            for column in columns:
                if column not in schema.names:
                    raise UserError(f"{path}: no column {column!r}; set data.columns{nearest(column, schema.names)}")
            found = file.read(columns=list(dict.fromkeys(columns)))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a whole Parquet file: {e}") from None
    names = _names_of_classes(schema.metadata or {})
    values = [[_named(v, names.get(c)) for v in found.column(c).to_pylist()] for c in columns]
    return Table([(i, list(row)) for i, row in enumerate(zip(*values, strict=True), 1)], [])


def _names_of_classes(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        inner = {name: feature.get("feature", feature) for name, feature in features.items()}
        return {name: feature["names"] for name, feature in inner.items() if "names" in feature}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _named(value: Any, names: list[str] | None) -> Any:
    if isinstance(value, list):
        return [_named(v, names) for v in value]
    if names is None or not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else None


def from_tfds(folder: str, split: str, columns: Sequence[str], errors: str = "strict") -> Table:
    """A split of a TFDS set in array_record; class numbers become their names, and -1 (no label) None.

    Args:
      folder: the prepared set, or the folder of its versions.

    Raises:
      UserError: no set there, a feature that it does not have, a split that cannot be read.
    """
    name = Path(folder).name
    source = types.SimpleNamespace(dataset=name, split=split, encoding_errors=errors)
    item = Input(source, f"{name}:{split}", tfds_source.find("", folder or ".", Path.cwd()))
    data, features = tfds_source.opened(item)
    for column in columns:
        if column not in features:
            raise UserError(f"{folder}: no feature {column!r}; set data.columns{nearest(column, features)}")
    rows = [
        (number, [_value(record[c], features[c], item, number) for c in columns])
        for number, record in tfds_source.numbered(data, item)
    ]
    return Table(rows, [])


def _value(value: Any, feature: Any, item: Input, number: int) -> Any:
    import numpy as np
    from tensorflow_datasets import features

    if isinstance(feature, features.Text):
        return tfds_source.text(value, item, number)
    if isinstance(feature, features.ClassLabel):
        return feature.int2str(int(value)) if int(value) >= 0 else None
    if isinstance(feature, features.FeaturesDict):
        return {name: _value(value[name], inner, item, number) for name, inner in feature.items()}
    if isinstance(feature, features.Sequence):
        inner = feature.feature
        if isinstance(inner, features.FeaturesDict):  # a list of objects is stored as an object of lists
            return {n: [_value(v, f, item, number) for v in value[n]] for n, f in inner.items()}
        return [_value(v, inner, item, number) for v in value]
    return np.asarray(value).tolist()
