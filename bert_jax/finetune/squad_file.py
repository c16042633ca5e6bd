"""Questions of files in the form of SQuAD 1.1 and 2.0.

A context is taken as it stands, code point for code point, since answers are places in it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from transformer_jax.config import UserError, nearest
from transformer_jax.lines import undecodable

FORM = '{"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def questions(path: Path, errors: str = "strict") -> Iterator[tuple[str, dict[str, Any]]]:
    """The context of each question, and the question's object, whose key `question` is there and a text.

    Raises:
      UserError: a file that cannot be read, is not UTF-8 (line and byte named), is not JSON, or has another form.
    """
    try:
        whole = msgspec.json.decode(_text(path, errors))
    except (msgspec.DecodeError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON: {e}") from None
    number = 0
    try:
        for article in whole["data"]:
            for paragraph in article["paragraphs"]:
                context = _string(paragraph["context"])
                for question in paragraph["qas"]:
                    _string(question["question"])
                    yield context, question
                    number += 1
    except (KeyError, TypeError) as e:
        what = f"there is no key {e}" if isinstance(e, KeyError) else str(e)
        raise UserError(f"{path}: after question {number}: {what}; a file of the format squad is {FORM}") from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _text(path: Path, errors: str) -> str:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.name.endswith(".gz") else data
        return data.decode("utf-8", errors).removeprefix("\ufeff")
    except FileNotFoundError:
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{nearest(path.name, names) if names else ''}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise UserError(f"{path}: not a whole gzip file: {e}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise undecodable(e, path) from None
