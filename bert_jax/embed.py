"""Features of the lines of a text: read as they come, computed in order of length, written in the order of the input.

Memory does not grow with the file: lines are gathered until their rows or their features fill a chunk. A line may be
empty: its row is that of [CLS] [SEP].
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax import feature_files
from bert_jax.config import BertConfig
from bert_jax.feature_files import TextFeatures
from bert_jax.featurizer import FeatureConfig, Featurizer
from bert_jax.finetune.encoded import Row, lay_out
from bert_jax.finetune.loading import Encoder, load_encoder
from bert_jax.finetune.windows import LongText, kept, most_context
from transformer_jax import command
from transformer_jax.config import UserError
from transformer_jax.lines import lines, lines_of_stream
from transformer_jax.tokenizer import WordPiece

Say = Callable[[str], None]
GROUP_LINES, GROUP_CHARACTERS = 256, 1 << 20
"""Lines that are tokenised in one call."""
CHUNK_ROWS = 8192
CHUNK_BYTES = 256 << 20
"""Rows, and bytes of features, after which a chunk is written."""
PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class EmbedConfig(FeatureConfig):
    """Which features, and what becomes of a line that is too long."""

    max_seq_length: int = 0
    """Pieces of a row, [CLS] and [SEP] included; 0: as many as the model has positions."""
    long_text: Literal["cut", "windows"] = "cut"
    """The end of a long line is cut, and the line is named; or it is read in windows, whose features are averaged (of a
    piece: the window in which it has most context is taken)."""
    stride: int = 0
    """Pieces from the start of one window to the next; 0: half of the room."""


class Text(NamedTuple):
    """One line as rows.

    Attributes:
      windows: for each row the numbers of its pieces; `ids` and `places_T2` are those of the whole line.
    """

    line: int
    ids: list[int]
    places_T2: np.ndarray
    windows: list[np.ndarray]

    @property
    def unseen(self) -> int:
        return len(self.ids) - len(self.windows[0]) if len(self.windows) == 1 else 0


class Counts(NamedTuple):
    """What was done."""

    lines: int
    cut: int
    """Lines whose end was not seen."""
    seconds: float


def embed(encoder: Encoder, texts: Sequence[str], settings: EmbedConfig | None = None) -> np.ndarray | list[np.ndarray]:
    """Features of texts in memory.

        from bert_jax.embed import EmbedConfig, embed, load_encoder
        encoder = load_encoder("runs/demo")
        vectors = embed(encoder, ["A text.", "Another one."], EmbedConfig(layers=(-2,)))

    Returns:
      [n, F]; for tokens a list of [T, F], of [CLS], the pieces and [SEP] of each text.

    Raises:
      UserError: settings that the checkpoint does not allow.
    """
    if isinstance(texts, str):
        raise UserError("embed takes a list of texts; put the one text into a list")
    settings = settings or EmbedConfig()
    featurizer = Featurizer(encoder, settings)
    found = [t.values for chunk in features_of(featurizer, enumerate(texts, 1), settings) for t in chunk]
    if settings.features == "tokens":
        return found
    return np.stack(found) if found else np.zeros((0, featurizer.size), settings.dtype)


def features_of(
    featurizer: Featurizer,
    source: Iterable[tuple[int, str]],
    settings: EmbedConfig,
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> Iterator[list[TextFeatures]]:
    """Features of numbered lines, in their order, chunk by chunk.

    Args:
      on_rows: told how many rows of a chunk are done, and how many it has.
    """
    length = row_length(featurizer.config, settings)
    for chunk in _chunks(featurizer, source, settings, length):
        yield _chunk_features(featurizer, chunk, on_rows)


def row_length(config: BertConfig, settings: EmbedConfig) -> int:
    """The longest row; refuses one that the model has no positions for."""
    limit = config.max_position_embeddings
    length = settings.max_seq_length or limit
    if not 3 <= length <= limit:
        raise UserError(
            f"max_seq_length is {settings.max_seq_length}; it must be between 3 and the model's {limit} positions"
        )
    if settings.stride < 0:
        raise UserError(f"stride is {settings.stride}; it must be at least 0 (0: half of the room)")
    if settings.stride and settings.long_text == "cut":
        raise UserError(f"stride is {settings.stride}, and long texts are cut; it is of --long-text windows")
    return length


def embed_file(
    checkpoint: str,
    file: str | None,
    out: str | Path,
    settings: EmbedConfig | None = None,
    *,
    overwrite: bool = False,
    encoding_errors: str = "strict",
    say: Say = command.say,
) -> Counts:
    """Write features of the lines of a file, or of standard input.

    Args:
      checkpoint: anything that `bert_jax.load` takes, or a fine-tuned run, whose head is left out.
      file: UTF-8 text, gzip if it ends in .gz; None is standard input.
      out: .npy or .parquet; `bert_jax.feature_files` lists what is in them.
      overwrite: replace files that are there.
      encoding_errors: "replace" puts U+FFFD for bytes that are not UTF-8, which BERT's tokenizer then drops.
      say: told of lines that were cut, by number, and of progress.

    Raises:
      UserError: a file or settings that cannot be used. No output is then there.
    """
    settings, out = settings or EmbedConfig(), Path(out)
    if out.suffix not in feature_files.ENDINGS:
        raise UserError(f"{out}: the ending says no format; name a file that ends in .npy or .parquet")
    if file is not None and not Path(file).is_file():
        raise UserError(f"{file}: no such file")
    encoder = load_encoder(checkpoint, say=say)
    row_length(encoder.config, settings)
    featurizer = Featurizer(encoder, settings)
    size, of_tokens = featurizer.size, settings.features == "tokens"
    progress = _Progress(_bytes(file), say)
    source = progress.counted(_lines(file, encoding_errors))
    cut = 0
    with feature_files.writer(out, size, settings.dtype, of_tokens, encoder.tokenizer.vocab, overwrite) as sink:
        for chunk in features_of(featurizer, source, settings, progress.rows):
            sink.write(chunk)
            progress.lines += len(chunk)
            unseen = [text for text in chunk if text.unseen]
            cut += len(unseen)
            if unseen:
                pieces = sum(text.unseen for text in unseen)
                say(f"cut: {pieces:,} pieces at the end of line{_ranges([text.line for text in unseen])}")
    counts = Counts(progress.lines, cut, time.monotonic() - progress.began)
    if cut:
        say(f"{cut:,} of {counts.lines:,} lines were cut; --long-text windows reads all of them")
    files = ", ".join(map(str, feature_files.paths(out, of_tokens)))
    say(f"written: {files} ({counts.lines:,} lines, {size:,} numbers a vector, {counts.seconds:.1f} s)")
    return counts


def _lines(file: str | None, encoding_errors: str) -> Iterator[tuple[int, str]]:
    if file is None:
        return lines_of_stream(sys.stdin.buffer, Path("standard input"), encoding_errors)
    return lines(Path(file), encoding_errors)


def _bytes(file: str | None) -> int | None:
    """The size of the text where it is known before it is read."""
    return None if file is None or file.endswith(".gz") else Path(file).stat().st_size


# --- from lines to rows


def _chunks(
    featurizer: Featurizer, source: Iterable[tuple[int, str]], settings: EmbedConfig, length: int
) -> Iterator[list[Text]]:
    chunk: list[Text] = []
    rows = numbers = 0
    size = featurizer.size
    item = np.dtype(settings.dtype).itemsize
    for group in _groups(source):
        for text in _texts(featurizer.tokenizer, group, settings, length):
            chunk.append(text)
            rows += len(text.windows)
            numbers += size * (len(text.ids) + 2 if settings.features == "tokens" else 1)
            if rows >= CHUNK_ROWS or numbers * item >= CHUNK_BYTES:
                yield chunk
                chunk, rows, numbers = [], 0, 0
    if chunk:
        yield chunk


def _groups(source: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    characters = 0
    for line in source:
        group.append(line)
        characters += len(line[1])
        if len(group) == GROUP_LINES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _texts(
    tokenizer: WordPiece, group: Sequence[tuple[int, str]], settings: EmbedConfig, length: int
) -> Iterator[Text]:
    texts = [text for _, text in group]
    none = np.zeros((0, 2), np.int32)
    if settings.features == "tokens":
        encoded = [(ids, np.asarray(places, np.int32)) for ids, places in tokenizer.encode_with_offsets(texts)]
    else:
        encoded = [(ids, none) for ids in tokenizer.encode_batch(texts)]
    how: LongText = "windows" if settings.long_text == "windows" else "truncate_tail"
    for (line, _), (ids, places_T2) in zip(group, encoded, strict=True):
        yield Text(line, ids, places_T2, kept(len(ids), length - 2, how, settings.stride))


# --- from rows to features


def _chunk_features(
    featurizer: Featurizer, chunk: Sequence[Text], on_rows: Callable[[int, int], None]
) -> list[TextFeatures]:
    tokenizer, of_tokens = featurizer.tokenizer, featurizer.settings.features == "tokens"
    rows = [Row(n, [text.ids[i] for i in window.tolist()]) for n, text in enumerate(chunk) for window in text.windows]
    arrays = lay_out(rows, tokenizer, max(len(row.a) for row in rows) + 2)
    of_row: list[Any] = [None] * len(rows)
    done = 0
    for batch in featurizer.batches(arrays):
        for n, values in zip(batch.rows.tolist(), batch.values, strict=True):
            # Without the padding of its batch.
            of_row[n] = values[: len(rows[n].a) + 2].copy() if of_tokens else values
        done += len(batch.rows)
        on_rows(done, len(rows))
    out, first = [], 0
    for text in chunk:
        own = of_row[first : first + len(text.windows)]
        first += len(text.windows)
        seen = text.ids if len(text.windows) > 1 else [text.ids[i] for i in text.windows[0].tolist()]
        ids = np.array([tokenizer.cls_id, *seen, tokenizer.sep_id], np.int32)
        if of_tokens:
            places = np.concatenate([[[-1, -1]], text.places_T2[: len(seen)], [[-1, -1]]]).astype(np.int32)
            out.append(TextFeatures(text.line, ids, places, text.unseen, _of_pieces(text, own)))
        else:
            mean = own[0] if len(own) == 1 else np.mean(own, 0, np.float32).astype(own[0].dtype)
            out.append(TextFeatures(text.line, ids, text.places_T2, text.unseen, mean))
    return out


def _of_pieces(text: Text, rows: Sequence[np.ndarray]) -> np.ndarray:
    """[CLS] of the first window, each piece from the window in which it has most context, [SEP] of the last."""
    if len(rows) == 1:
        return rows[0]
    owners = most_context([(int(window[0]), int(window[-1]) + 1) for window in text.windows])
    out = np.zeros((len(text.ids) + 2, rows[0].shape[1]), rows[0].dtype)
    out[0], out[-1] = rows[0][0], rows[-1][-1]
    for window, owner, values in zip(text.windows, owners, rows, strict=True):
        out[1 + window[owner]] = values[1:-1][owner]
    return out


# --- what is said


class _Progress:
    """Lines done, and how long it will still take if the size of the input is known."""

    def __init__(self, total_bytes: int | None, say: Say):
        self.total, self.say = total_bytes, say
        self.began = self.told = time.monotonic()
        self.lines = 0
        """Written."""
        self._read = self._bytes = self._bytes_before = 0

    def counted(self, source: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        for number, line in source:
            self._read = number
            self._bytes += len(line.encode("utf-8", "replace")) + 1
            yield number, line

    def rows(self, done: int, of: int) -> None:
        """So many rows are done of those that the lines read since the last chunk make."""
        now, share = time.monotonic(), done / of
        if now - self.told >= PROGRESS_SECONDS:
            self.told, seconds = now, now - self.began
            lines = self.lines + share * (self._read - self.lines)
            size = self._bytes_before + share * (self._bytes - self._bytes_before)
            left = f", {seconds * max(0, self.total - size) / size:,.0f} s left" if self.total and size else ""
            self.say(f"{lines:,.0f} lines, {lines / seconds:,.1f} lines/s{left}")
        if done == of:
            self._bytes_before = self._bytes


def _ranges(numbers: Sequence[int]) -> str:
    """ " 3", or "s 3, 7-9": ascending numbers, those that follow each other as one."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'s' * (len(numbers) > 1)} {shown}"
