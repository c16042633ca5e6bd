"""Files of features: `.npy` for NumPy, `.parquet` for tables. Each appears when it is complete, and not before.

A text's row
    NAME.npy          [lines, F]: row n is line n + 1 of the input.
    NAME.parquet      line, pieces (with [CLS] and [SEP]), unseen (pieces that were cut), features

A piece's row
    NAME.npy          [pieces, F], all texts one after the other
    NAME.offsets.npy  int64 [lines + 1]: the pieces of line n + 1 are rows offsets[n] to offsets[n + 1]
    NAME.tokens.npy   int32 [pieces, 3]: the piece's id, and the code points [start, end) of the line that it stands
                      for; -1, -1 for [CLS] and [SEP]
    NAME.parquet      line, token (its place, from 0), piece, start, end (null for [CLS] and [SEP]), features
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from transformer_jax.config import UserError
from transformer_jax.new_file import new_file

ROW_GROUP_BYTES = 16 << 20
ENDINGS = (".npy", ".parquet")


@dataclasses.dataclass(frozen=True)
class TextFeatures:
    """What is written of one line.

    Attributes:
      line: its number, from 1.
      ids: int32 [T], with [CLS] and [SEP]; of a text in windows all of its pieces.
      places_T2: int32 [T, 2], the code points each piece stands for, -1 for control tokens; empty unless asked for.
      unseen: pieces that were cut.
      values: [F], or of pieces [T, F].
    """

    line: int
    ids: np.ndarray
    places_T2: np.ndarray
    unseen: int
    values: np.ndarray


class Writer(Protocol):
    """Takes texts in the order of the input."""

    def write(self, texts: Sequence[TextFeatures]) -> None: ...


def paths(out: Path, of_tokens: bool) -> list[Path]:
    """All files of an output; `out` itself is the last to appear."""
    if out.suffix == ".npy" and of_tokens:
        return [out.with_suffix(".offsets.npy"), out.with_suffix(".tokens.npy"), out]
    return [out]


@contextlib.contextmanager
def writer(
    out: Path, size: int, dtype: str, of_tokens: bool, vocab: Sequence[str], overwrite: bool = False
) -> Iterator[Writer]:
    """A writer for `out`, whose ending names the format.

    Args:
      size: numbers in a vector.
      vocab: the pieces by id.
      overwrite: replace files that are there.

    Raises:
      UserError: another ending, or a file that is there already.
    """
    if out.suffix not in ENDINGS:
        raise UserError(f"{out}: the ending says no format; name a file that ends in .npy or .parquet")
    targets = paths(out, of_tokens)
    for path in targets:
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already; name another file, or add --overwrite")
    with contextlib.ExitStack() as stack:
        # Left in the opposite order, so that `out` appears last.
        made = [stack.enter_context(new_file(path)) for path in reversed(targets)]
        if out.suffix == ".parquet":
            yield stack.enter_context(_parquet(made[0], size, dtype, of_tokens, vocab))
        else:
            yield stack.enter_context(_npy(made, size, dtype, of_tokens))


class _Array:
    """A .npy file that grows by rows; its header is written again when their number is known."""

    def __init__(self, file: BinaryIO, dtype: str, tail: tuple[int, ...]):
        self.file, self.dtype, self.tail, self.rows = file, np.dtype(dtype), tail, 0
        self.start = file.write(self._header())

    def write(self, rows: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.rows += len(rows)

    def finish(self) -> None:
        header = self._header()
        assert len(header) == self.start, "NumPy leaves room for the number of rows"
        self.file.seek(0)
        self.file.write(header)

    def _header(self) -> bytes:
        made = io.BytesIO()
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.tail)}
        np.lib.format.write_array_header_1_0(made, described)
        return made.getvalue()


class _NpyWriter:
    def __init__(self, arrays: list[_Array], of_tokens: bool):
        self.arrays, self.of_tokens = arrays, of_tokens
        if of_tokens:
            arrays[2].write(np.zeros(1, np.int64))

    def write(self, texts: Sequence[TextFeatures]) -> None:
        if not self.of_tokens:
            self.arrays[0].write(np.stack([t.values for t in texts]))
            return
        values, tokens, offsets = self.arrays
        for text in texts:
            values.write(text.values)
            tokens.write(np.concatenate([text.ids[:, None], text.places_T2], 1))
            offsets.write(np.array([values.rows]))


@contextlib.contextmanager
def _npy(made: Sequence[Path], size: int, dtype: str, of_tokens: bool) -> Iterator[Writer]:
    kinds: list[tuple[str, tuple[int, ...]]] = [(dtype, (size,)), ("int32", (3,)), ("int64", ())]
    with contextlib.ExitStack() as files:
        arrays = [
            _Array(files.enter_context(path.open("wb")), kind, tail)
            for path, (kind, tail) in zip(made, kinds, strict=False)
        ]
        yield _NpyWriter(arrays, of_tokens)
        for array in arrays:
            array.finish()


class _ParquetWriter:
    def __init__(self, sink: Any, schema: Any, size: int, of_tokens: bool, vocab: Sequence[str]):
        self.sink, self.schema, self.size, self.of_tokens, self.vocab = sink, schema, size, of_tokens, vocab

    def write(self, texts: Sequence[TextFeatures]) -> None:
        import pyarrow as pa

        lines = np.array([t.line for t in texts], np.int64)
        counts = np.array([len(t.ids) for t in texts], np.int32)
        columns: list[Any]
        if self.of_tokens:
            values = np.concatenate([t.values for t in texts])
            places = np.concatenate([t.places_T2 for t in texts])
            none = places[:, 0] < 0
            token = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
            pieces = [self.vocab[i] for t in texts for i in t.ids.tolist()]
            columns = [np.repeat(lines, counts), token, pieces]
            columns += [pa.array(places[:, side], mask=none) for side in (0, 1)]
        else:
            values = np.stack([t.values for t in texts])
            columns = [lines, counts, np.array([t.unseen for t in texts], np.int32)]
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), self.size)
        table = pa.table([*columns, vectors], schema=self.schema)
        rows = max(1, ROW_GROUP_BYTES // (self.size * values.itemsize))
        self.sink.write_table(table, row_group_size=rows)


@contextlib.contextmanager
def _parquet(made: Path, size: int, dtype: str, of_tokens: bool, vocab: Sequence[str]) -> Iterator[Writer]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = [("line", pa.int64())]
    if of_tokens:
        numbers += [("token", pa.int32()), ("piece", pa.string()), ("start", pa.int32()), ("end", pa.int32())]
    else:
        numbers += [("pieces", pa.int32()), ("unseen", pa.int32())]
    value = pa.float16() if dtype == "float16" else pa.float32()
    schema = pa.schema([*numbers, ("features", pa.list_(value, size))])
    # Features hardly repeat: a dictionary of them, and compressing them, would only cost time.
    packed = [name for name, _ in numbers]
    codecs = dict.fromkeys(packed, "snappy") | {"features.list.element": "none"}
    with pq.ParquetWriter(made, schema, use_dictionary=packed, compression=codecs) as sink:
        yield _ParquetWriter(sink, schema, size, of_tokens, vocab)
