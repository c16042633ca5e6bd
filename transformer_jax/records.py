"""Fields of records in JSON lines and in Parquet, by name; `a.b` is the field b of the field a."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transformer_jax.config import UserError, nearest
from transformer_jax.lines import lines
from transformer_jax.source_files import Input, stat

ROWS = 512
"""Rows of Parquet read at once."""


def from_jsonl(item: Input, keys: Sequence[str], setting: str = "key") -> Iterator[tuple[int, list[Any]]]:
    """The values of these keys of each line that is not blank, with its number from 1.

    Args:
      setting: what a message about a key that is not there tells the user to set.

    Raises:
      UserError: a line that is not a JSON object, or lacks a key.
    """
    for number, line in lines(item.path, item.source.encoding_errors):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as e:  # the latter for brackets in brackets, very deep
            raise UserError(f"{item.path}: line {number} is not valid JSON: {e}") from None
        if not isinstance(record, dict):
            raise UserError(
                f"{item.path}: line {number} is not a JSON object; each line must be one, with the key {keys[0]!r}"
            )
        yield number, [_field(record, key, item.path, number, setting) for key in keys]


def _field(record: dict[str, Any], key: str, path: Path, number: int, setting: str) -> Any:
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{path}: line {number} has no key {key!r}; set `{setting}`{nearest(key, record)}")
        value = value[part]
    return value


def from_parquet(
    item: Input, keys: Sequence[str], lists: bool, setting: str = "key"
) -> Iterator[tuple[int, list[Any]]]:
    """The values of these columns of each row, with its number from 1: texts, None, or (if so said) lists of texts.

    Args:
      setting: what a message about a column that is not there tells the user to set.

    Raises:
      UserError: a column that is not there or holds something else, or a file that cannot be read.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{item.path}: Parquet needs the package pyarrow, which is not installed: pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    stat(item.path)
    try:
        with pyarrow.parquet.ParquetFile(item.path) as table:
            for key in keys:
                _check_column(table.schema_arrow, key, item.path, lists, setting)
            number = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=list(keys)):
                for values in zip(*(_column(batch, key).to_pylist() for key in keys), strict=True):
                    number += 1
                    yield number, list(values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{item.path}: not a whole Parquet file: {e}") from None


def _check_column(schema: Any, key: str, path: Path, lists: bool, setting: str) -> None:
    from pyarrow import types

    fields = schema
    kind: Any = None
    for part in [key] if key in schema.names else key.split("."):
        names = [field.name for field in fields]
        if part not in names:
            raise UserError(f"{path}: no column {key!r}; set `{setting}`{nearest(key, schema.names)}")
        kind = fields.field(part).type
        fields = kind if types.is_struct(kind) else []
    inner = kind.value_type if lists and (types.is_list(kind) or types.is_large_list(kind)) else kind
    if not (types.is_string(inner) or types.is_large_string(inner)):
        what = "texts, or lists of texts" if lists else "texts"
        raise UserError(f"{path}: column {key!r} holds {kind}; it must hold {what}")


def _column(batch: Any, key: str) -> Any:
    if key in batch.schema.names:
        return batch.column(key)
    first, *parts = key.split(".")
    column = batch.column(first)
    for part in parts:
        column = column.field(part)
    return column
