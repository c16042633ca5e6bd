"""Sentences of CoNLL files: one word a line with its columns, a blank line after each sentence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformer_jax.config import UserError
from transformer_jax.lines import lines

DOCUMENT = "-DOCSTART-"


def sentences(
    path: Path, word_column: str, tag_column: str | None, errors: str = "strict"
) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """First line, words and tags of each sentence.

    Columns are parted by tabs if the line has one, else by spaces. Lines that start with -DOCSTART- are passed over.
    Any blank line (of white space only, too), such a mark, and the end of the file end a sentence.

    Args:
      word_column, tag_column: numbers from 0, or -1 for the last, as text. Without tag_column there are no tags.

    Raises:
      UserError: a line with another number of columns than those before it, or without the wanted column.
    """
    first, width = 0, 0
    words: list[str] = []
    tags: list[str] = []
    for number, line in itertools.chain(lines(path, errors), [(0, "")]):
        if not line.strip(" \t") or line.startswith(DOCUMENT):
            if words:
                yield first, tuple(words), tuple(tags)
                words, tags = [], []
            continue
        fields = line.split("\t") if "\t" in line else [f for f in line.split(" ") if f]
        width = width or len(fields)
        if len(fields) != width:
            columns = f"{len(fields)} column{'s' * (len(fields) != 1)}"
            raise UserError(f"{path}: line {number} has {columns}, and the lines before have {width}")
        if tag_column is not None and width < 2:
            raise UserError(f"{path}: line {number} has 1 column; a word and its tag are needed")
        if not words:
            first = number
        words.append(_field(fields, word_column, path, "words"))
        if tag_column is not None:
            tags.append(_field(fields, tag_column, path, "tags"))


def _field(fields: Sequence[str], column: str, path: Path, what: str) -> str:
    try:
        return fields[int(column)]
    except (ValueError, IndexError):
        raise UserError(
            f"{path}: data.columns.{what} is {column!r}; for the format conll it is a column's number, and the file "
            f"has {len(fields)}, numbered from 0"
        ) from None
