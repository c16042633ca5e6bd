"""TensorFlow's checkpoint files (tensor bundles), read without TensorFlow and without running anything in them.

    PREFIX.index                  a sorted table from names to entries: dtype, shape, shard, place, checksum
    PREFIX.data-00000-of-00002    the bytes of the tensors, in one or more shards

The table has LevelDB's form: blocks of prefix-compressed keys, each with a checksum and perhaps compressed with Snappy,
an index block of them, and a footer. Its values are protocol buffers, of which the few fields needed are parsed here.
Formats: github.com/google/leveldb doc/table_format.md; tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from transformer_jax.config import UserError
from transformer_jax.crc32c import crc32c, unmasked
from transformer_jax.snappy import SnappyError, decompress

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER = 5
"""Bytes after a block: how it is compressed, and the masked checksum of both."""
_MOST_SHARDS = 99_999
_DTYPES: dict[int, np.dtype] = {
    number: np.dtype(dtype)
    for number, dtype in (
        (1, np.float32), (2, np.float64), (3, np.int32), (4, np.uint8), (5, np.int16), (6, np.int8), (9, np.int64),
        (10, np.bool_), (14, ml_dtypes.bfloat16), (17, np.uint16), (19, np.float16), (22, np.uint32), (23, np.uint64),
    )
}  # fmt: skip
"""Numbers of tensorflow/core/framework/types.proto; others (strings, quantised numbers) are listed but not read."""


class _BadError(ValueError):
    """Something in the file is not as the format says."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and what it is."""

    dtype: np.dtype | None
    """None for a kind that holds no numbers, such as strings."""
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    """CRC-32C of its bytes, unmasked."""
    in_slices: bool


@dataclasses.dataclass(frozen=True)
class Bundle:
    """An opened checkpoint."""

    prefix: Path
    shards: int
    entries: dict[str, Entry]

    def read(self, name: str) -> np.ndarray:
        """The tensor of that name, after its checksum has been compared.

        Raises:
          UserError: it has no numbers, its bytes are not there, or they are not those that were written.
        """
        entry, where = self.entries[name], f"{self.prefix}: tensor {name}"
        if entry.in_slices:
            raise UserError(f"{where} was saved in slices (a partitioned variable), which cannot be read")
        if entry.dtype is None:
            raise UserError(f"{where} does not hold numbers")
        if entry.size != math.prod(entry.shape) * entry.dtype.itemsize:
            raise UserError(f"{where} has {entry.size} bytes, which is not what {list(entry.shape)} needs")
        path = _shard_path(self.prefix, entry.shard, self.shards)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None
        if len(data) != entry.size:
            raise UserError(f"{where} reaches past the end of {path.name}; the file is cut off")
        if crc32c(data) != entry.checksum:
            raise UserError(f"{where} is damaged: its checksum is not the one that was stored; copy {path.name} again")
        little = entry.dtype if entry.dtype == ml_dtypes.bfloat16 else entry.dtype.newbyteorder("<")
        return np.frombuffer(data, little).reshape(entry.shape)


def open_bundle(prefix: str | Path) -> Bundle:
    """Read the index of a checkpoint; tensors are read one by one from the result.

    Args:
      prefix: path of the files without `.index`.

    Raises:
      UserError: a file is missing, or the index is damaged or of another format.
    """
    prefix = Path(prefix)
    path = prefix.with_name(prefix.name + ".index")
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    try:
        table = _table(data)
        shards = _header(table.pop(b"", b""))
        entries = {key.decode("utf-8"): _entry(value, shards) for key, value in table.items() if key[:1] != b"\0"}
    except (_BadError, SnappyError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not the index of a TensorFlow checkpoint, or damaged: {e}") from None
    for shard in sorted({entry.shard for entry in entries.values()}):
        if not _shard_path(prefix, shard, shards).is_file():
            raise UserError(f"{_shard_path(prefix, shard, shards)}: no such file; the index needs all {shards} shards")
    return Bundle(prefix, shards, entries)


def _shard_path(prefix: Path, shard: int, shards: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")


def _table(data: bytes) -> dict[bytes, bytes]:
    """All keys and values of a table."""
    if len(data) < _FOOTER:
        raise _BadError("the file is cut off")
    footer = data[-_FOOTER:]
    if int.from_bytes(footer[40:], "little") != _MAGIC:
        raise _BadError("no table's mark at its end")
    _, at = _handle(footer[:40], 0)
    index, _ = _handle(footer[:40], at)
    table: dict[bytes, bytes] = {}
    last = None
    for _, value in _block(data, *index):
        for key, entry in _block(data, *_handle(value, 0)[0]):
            if last is not None and key <= last:
                raise _BadError("its keys are out of order")
            table[key] = entry
            last = key
    return table


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where in `data` the next thing begins."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block, after its checksum has been compared."""
    end = offset + size
    if end + _TRAILER > len(data) - _FOOTER:
        raise _BadError("a block reaches past the end")
    stored = unmasked(int.from_bytes(data[end + 1 : end + _TRAILER], "little"))
    if crc32c(data[offset : end + 1]) != stored:
        raise _BadError("the checksum of a block is not the one that was stored")
    content = data[offset:end]
    if data[end] == 1:
        content = decompress(content)
    elif data[end] != 0:
        raise _BadError(f"a block is compressed in a way that is not known ({data[end]})")
    if len(content) < 4:
        raise _BadError("a block is cut off")
    restarts = int.from_bytes(content[-4:], "little")
    stop = len(content) - 4 - 4 * restarts
    if stop < 0:
        raise _BadError("a block is cut off")
    content, at, key = content[:stop], 0, b""
    while at < stop:
        shared, at = _varint(content, at)
        own, at = _varint(content, at)
        length, at = _varint(content, at)
        if shared > len(key) or at + own + length > stop:
            raise _BadError("an entry reaches past its block")
        key = key[:shared] + content[at : at + own]
        at += own
        yield key, content[at : at + length]
        at += length


def _header(data: bytes) -> int:
    """Number of shards, from a BundleHeaderProto: num_shards = 1, endianness = 2."""
    fields = dict(_fields(data))
    shards, endianness = fields.get(1, 0), fields.get(2, 0)
    if not isinstance(shards, int) or not 0 < shards <= _MOST_SHARDS:
        raise _BadError("no usable number of shards")
    if endianness != 0:
        raise _BadError("its numbers are big-endian, which is not read")
    return shards


def _entry(data: bytes, shards: int) -> Entry:
    """A BundleEntryProto: dtype = 1, shape = 2, shard_id = 3, offset = 4, size = 5, crc32c = 6, slices = 7."""
    numbers = {1: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    shape: tuple[int, ...] = ()
    in_slices = False
    for field, value in _fields(data):
        if field == 2 and isinstance(value, bytes):
            shape = _shape(value)
        elif field == 7:
            in_slices = True
        elif field in numbers and isinstance(value, int):
            numbers[field] = value
    if not numbers[3] < shards or numbers[4] >= 1 << 62 or numbers[5] >= 1 << 62:
        raise _BadError("an entry points outside the shards")
    dtype = _DTYPES.get(numbers[1])
    return Entry(dtype, shape, numbers[3], numbers[4], numbers[5], unmasked(numbers[6]), in_slices)


def _shape(data: bytes) -> tuple[int, ...]:
    """A TensorShapeProto: dim = 2, each with size = 1."""
    sizes = []
    for field, value in _fields(data):
        if field == 2 and isinstance(value, bytes):
            size = dict(_fields(value)).get(1, 0)
            if not isinstance(size, int) or size >= 1 << 62:
                raise _BadError("a tensor has a size that is not known")
            sizes.append(size)
    return tuple(sizes)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protocol buffer: a number for varints and fixed widths, bytes for what has a length."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise _BadError(f"a field has the unknown kind {kind}")
        if at + size > len(data):
            raise _BadError("a field reaches past its end")
        piece = data[at : at + size]
        at += size
        yield field, piece if kind == 2 else int.from_bytes(piece, "little")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, seven to a byte, and where the next thing begins."""
    value = 0
    for i in range(10):
        if at >= len(data):
            raise _BadError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at
    raise _BadError("a number is too long")
