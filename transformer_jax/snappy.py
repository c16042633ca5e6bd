"""Snappy decompression, for the blocks of older tables; the format is a list of literals and of copies of what came."""

from __future__ import annotations


class SnappyError(ValueError):
    """The data is not Snappy's raw format, or is cut off."""


def decompress(data: bytes, most: int = 1 << 28) -> bytes:
    """The bytes that `data` (raw format, no framing) stands for.

    Args:
      most: data that says it is longer is refused before any memory is taken.

    Raises:
      SnappyError: an element reaches past either end, or the length is not the one stated.
    """
    length, at = _varint(data)
    if length > most:
        raise SnappyError(f"says it is {length} bytes long, more than {most}")
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:  # a literal; its length is in the tag, or in the one to four bytes after it
            size, extra = (tag >> 2) + 1, max(0, (tag >> 2) - 59)
            if extra:
                size = _little(data, at, extra) + 1
                at += extra
            if at + size > len(data):
                raise SnappyError("a literal reaches past the end")
            out += data[at : at + size]
            at += size
        else:
            if kind == 1:
                size, back = 4 + ((tag >> 2) & 7), ((tag >> 5) << 8) | _little(data, at, 1)
                at += 1
            else:
                width = 2 if kind == 2 else 4
                size, back = (tag >> 2) + 1, _little(data, at, width)
                at += width
            if not 0 < back <= len(out):
                raise SnappyError("a copy reaches before the start")
            # A copy may run into what it writes itself.
            piece = bytes(out[len(out) - back : len(out) - back + size])
            out += (piece * (-(-size // len(piece))))[:size]
        if len(out) > length:
            raise SnappyError("there is more than the stated length")
    if len(out) != length:
        raise SnappyError(f"{len(out)} bytes, and {length} are stated")
    return bytes(out)


def _varint(data: bytes) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, i + 1
    raise SnappyError("no length at the start")


def _little(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise SnappyError("an element reaches past the end")
    return int.from_bytes(data[at : at + width], "little")
