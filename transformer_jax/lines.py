"""The lines of a UTF-8 file, plain or gzip, read by blocks.

Only LF or CRLF ends a line; a lone CR is a space; a byte order mark at the start of a file is dropped.
"""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from transformer_jax.config import UserError

BLOCK_BYTES = 1 << 20


def lines(path: Path, encoding_errors: str = "strict") -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file (gzip if the name ends in .gz), numbered from 1, read by blocks.

    Raises:
      UserError: a file that is missing, cut short or broken, or bytes that are not UTF-8 (file, line and byte named).
    """
    try:
        with opened(path) as f:
            yield from lines_of_stream(f, path, encoding_errors)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, through gzip if the name ends in .gz.

    Raises:
      OSError: it cannot be opened.
      UserError: a gzip file that is cut short or broken, wherever in the block that shows.
    """
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as f:
            yield f  # type: ignore[misc]
    except EOFError:
        raise UserError(f"{path}: the gzip file ends too early (a part of it is missing); get it again") from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise UserError(f"{path}: not a whole gzip file: {e}") from None


def lines_of_stream(f: BinaryIO, path: Path, encoding_errors: str = "strict") -> Iterator[tuple[int, str]]:
    """As `lines`, of what is open already, such as standard input; `path` is what messages call it."""
    number = 1
    rest: list[bytes] = []  # pieces of a line longer than a block
    head = f.read(3)
    block = b"" if head == b"\xef\xbb\xbf" else head
    while True:
        more = f.read(BLOCK_BYTES)
        block += more
        end = block.rfind(b"\n") + 1 if more else len(block)
        if end or not more:
            text = _decode(b"".join([*rest, block[:end]]), path, number, encoding_errors)
            rest = [block[end:]]
            found = one_line_end(text).split("\n")
            if found[-1] == "":
                found.pop()
            for line in found:
                yield number, line
                number += 1
        else:
            rest.append(block)
        if not more:
            return
        block = b""


def one_line_end(text: str) -> str:
    """CRLF becomes LF, a lone CR a space."""
    return text.replace("\r\n", "\n").replace("\r", " ") if "\r" in text else text


def _decode(data: bytes, path: Path, first_line: int, errors: str) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as e:
        raise undecodable(e, path, first_line) from None


def undecodable(e: UnicodeDecodeError, path: Path, first_line: int = 1) -> UserError:
    """The error to raise for bytes, from line `first_line` of a file on, that are not UTF-8."""
    data = e.object
    line = first_line + data.count(b"\n", 0, e.start)
    column = e.start - (data.rfind(b"\n", 0, e.start) + 1) + 1
    return UserError(
        f"{path}: line {line} is not UTF-8: byte 0x{data[e.start]:02x} at byte {column} of the line; convert the "
        'file to UTF-8, or set encoding_errors to "replace" where the file is named, if there is such a setting'
    )
