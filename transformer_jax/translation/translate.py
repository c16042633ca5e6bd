"""Lines in, translations out, in order and as they come.

A line gives exactly one translation. Blank lines stay blank. A line with more pieces than a source may have is split,
after the end of a sentence where one is near, and what its parts give is put together again (or it is cut, if asked).
Nothing of that kind happens unseen: it is noted with the line's number.

Lines are read in windows, and sorted by length within a window so that sentences of like length share a batch. What is
read ahead, and what is finished but must wait for an earlier line, is limited; so a file of any length needs the same
memory, and its first lines come out while the rest has not been read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax

from transformer_jax import sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.pieces import SPACE
from transformer_jax.tokenizer import WordPiece
from transformer_jax.translation.batching import Decoder, Hypothesis, Sentence
from transformer_jax.translation.config import TransformerConfig, TranslationConfig
from transformer_jax.translation.decode import DecodeSettings
from transformer_jax.translation.vocabularies import Vocabularies

WINDOW_BATCHES = 32
"""Batches of lines that are sorted together."""
PARTS = 4096
"""More parts than a line can have: what is left of one is dropped, and noted."""
SENTENCE_ENDS = (".", "!", "?", "…", ";", "。", "！", "？", "；")

Lines = Callable[[bool, int], "Sequence[str] | None"]
"""(wait, most) -> the next lines, at most so many; None when there will be no more. Without `wait` it gives what is
there, with it at least one."""


@dataclasses.dataclass(frozen=True)
class TextHypothesis:
    """One translation of a line."""

    text: str
    score: float
    """Log-probability over the length penalty; for a line in parts the sum of theirs."""
    log_prob: float
    cut: bool
    """Ended by the limit of its length."""
    ids: tuple[int, ...]
    """Its pieces, without `</s>`; of the first part of a line in parts."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """What became of one line."""

    line: int
    """Counted from 1."""
    source: str
    pieces: list[list[int]]
    """Ids of the line's parts, with their end marks; one part for most lines, and none for a blank one."""
    hypotheses: list[TextHypothesis]
    """The n best, best first; for a blank line one that is empty."""
    notes: list[str]
    """What happened that the reader of the text alone would not see."""

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


@dataclasses.dataclass(frozen=True)
class TranslateSettings:
    """How lines become sentences and batches."""

    decode: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
    batch_size: int = 0
    """Sentences searched at once, over all devices; 0 is 16 for each device on CPU, else 128."""
    max_source_length: int = 0
    """The most pieces of a source, end mark included; 0 is what the model has positions for."""
    long_lines: Literal["split", "cut"] = "split"
    """What becomes of a line with more."""

    def __post_init__(self) -> None:
        if self.batch_size < 0:
            raise UserError(f"batch_size is {self.batch_size}; it must be at least 1, or 0 to leave it to the program")
        if self.max_source_length < 0:
            raise UserError(f"max_source_length is {self.max_source_length}; it must be at least 0")


def translate(
    config: TransformerConfig,
    params: Any,
    vocabularies: Vocabularies,
    lines: Sequence[str],
    settings: TranslateSettings | None = None,
    *,
    mesh: Any = None,
) -> list[Translation]:
    """Translate lines that are at hand.

    Args:
      config, params, vocabularies: as `translation.load` gives them.
      mesh: the devices that share the batch; None is one device.

    Raises:
      UserError: settings that cannot work, or a model that gives scores that are not finite.
    """
    if isinstance(lines, str):
        raise UserError("translate takes a list of lines; put the one line into a list")
    translator = Translator(config, params, vocabularies, settings or TranslateSettings(), mesh)
    return list(translator.stream(at_hand(lines)))


def at_hand(lines: Iterable[str]) -> Lines:
    """Lines that need no waiting for."""
    source = iter(lines)

    def next_lines(wait: bool, most: int) -> Sequence[str] | None:
        found = [line for _, line in zip(range(most), source, strict=False)]
        return found or None

    return next_lines


class Translator:
    """A model that is ready to translate; programs and parameters are kept between calls.

    Args: see `translate`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        vocabularies: Vocabularies,
        settings: TranslateSettings,
        mesh: Any = None,
    ) -> None:
        self.vocabularies, self.settings = vocabularies, settings
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
        devices = sharding.batch_devices(mesh)
        each = 16 if jax.default_backend() == "cpu" else 128
        batch_size = settings.batch_size or each * devices
        self.decoder = Decoder(config, params, settings.decode, -(-batch_size // devices) * devices, mesh)
        most = settings.max_source_length or config.max_position_embeddings
        if most > config.max_position_embeddings:
            raise UserError(
                f"max_source_length is {most}, but the model has {config.max_position_embeddings} positions"
            )
        self.room = most - len(vocabularies.source_start) - len(vocabularies.source_end)
        if self.room < 1:
            raise UserError(f"max_source_length is {most}; no piece of a line fits in beside the end mark")
        self.window = WINDOW_BATCHES * batch_size
        self.first_window = 2 * batch_size

    def stream(self, lines: Lines) -> Iterator[Translation]:
        """The translation of each line, in order."""
        return _Stream(self, lines).run()

    def sentences(self, line: str) -> tuple[list[list[int]], list[str]]:
        """The ids of a line's parts, end marks included, and notes; no parts for a blank line."""
        notes: list[str] = []
        source = self.vocabularies.source
        if "\ufffd" in line:
            notes.append("holds bytes that are not UTF-8 (or U+FFFD), which no vocabulary knows")
        if isinstance(source, WordPiece):
            ids = list(source.encode(line))
        else:
            ids = source.encode(line) if line.strip() else []
        unknown = sum(i == source.unk_id for i in ids)
        known = sum(i != source.unk_id and source.vocab[i] != SPACE for i in ids)
        if unknown > known:
            notes.append(f"{unknown} of its {len(ids)} pieces are not in the vocabulary")
        parts = [ids] if ids else []
        if len(ids) > self.room:
            if self.settings.long_lines == "cut":
                parts = [ids[: self.room]]
                notes.append(f"cut: it has {len(ids)} pieces, and a source at most {self.room}")
            else:
                parts = self._split(ids)
                notes.append(
                    f"split into {len(parts)} parts: it has {len(ids)} pieces, and a source at most {self.room}"
                )
                if len(parts) > PARTS:
                    parts = parts[:PARTS]
                    notes.append(f"cut after {PARTS} parts")
        start, end = self.vocabularies.source_start, self.vocabularies.source_end
        sources = [[*start, *part, *end] for part in parts]
        decode, positions = self.settings.decode, self.decoder.config.max_position_embeddings
        most = min((decode.limit(len(ids), positions) for ids in sources), default=decode.min_length)
        if most < decode.min_length:
            notes.append(
                f"min_length is {decode.min_length}, but its translation may have {most} pieces (max_extra, max_length)"
            )
        return sources, notes

    def _split(self, ids: Sequence[int]) -> list[list[int]]:
        """A line in parts. Tags at its start are about all of it (they may name a language), so each part has them."""
        source = self.vocabularies.source
        tags = frozenset() if isinstance(source, WordPiece) else source.tag_ids
        first = list(itertools.takewhile(tags.__contains__, ids))
        first = first if len(first) < self.room else []
        return [[*first, *part] for part in split(ids[len(first) :], self.room - len(first), source.vocab)]


def split(ids: Sequence[int], most: int, vocab: Sequence[str]) -> list[list[int]]:
    """Parts of at most `most` ids, each cut after the end of a sentence if there is one in its second half, else before
    the start of a word, else where it is full."""
    parts, at = [], 0
    while len(ids) - at > most:
        places = range(at + most, at + most // 2, -1)
        ends = (i for i in places if vocab[ids[i - 1]].endswith(SENTENCE_ENDS))
        words = (i for i in places if vocab[ids[i]].startswith(SPACE))
        cut = next(ends, None) or next(words, None) or at + most
        parts.append(list(ids[at:cut]))
        at = cut
    return [*parts, list(ids[at:])]


class _Stream:
    """Lines under way between reading and writing."""

    def __init__(self, translator: Translator, lines: Lines) -> None:
        self.t, self.lines = translator, lines
        self.window, self.windows = translator.first_window, 0
        self.read = self.written = 0
        self.open: collections.deque[_Line] = collections.deque()
        """From the first that is not written on, in order."""

    def run(self) -> Iterator[Translation]:
        for finished in self.t.decoder.decode(self._more):
            for number, hypotheses in finished:
                line, part = divmod(number, PARTS)
                self.open[line - self.written].found[part] = hypotheses
            yield from self._ready()
        yield from self._ready()

    def _ready(self) -> Iterator[Translation]:
        while self.open and all(p is not None for p in self.open[0].found):
            line = self.open.popleft()
            self.written += 1
            yield line.translation(self.written, self.t)

    def _more(self, wait: bool) -> Sequence[Sentence] | None:
        """A window of sentences for the decoder: longest first and shortest first in turns, so that like meets like."""
        if not wait and len(self.open) >= 2 * self.t.window:
            return []
        found = self.lines(wait, self.window)
        if found is None:
            return None
        self.window = min(2 * self.window, self.t.window)
        sentences = []
        for text in found:
            parts, notes = self.t.sentences(text)
            self.open.append(_Line(text, parts, [None] * len(parts), notes))
            sentences += [Sentence(self.read * PARTS + n, ids) for n, ids in enumerate(parts)]
            self.read += 1
        sentences.sort(key=lambda s: len(s.ids), reverse=self.windows % 2 == 0)
        self.windows += 1
        return sentences


@dataclasses.dataclass
class _Line:
    source: str
    parts: list[list[int]]
    found: list[list[Hypothesis] | None]
    """Of each part, once it is translated."""
    notes: list[str]

    def translation(self, number: int, t: Translator) -> Translation:
        if not self.parts:
            return Translation(number, self.source, [], [TextHypothesis("", 0.0, 0.0, False, ())], self.notes)
        parts = [part for part in self.found if part]
        if len(parts) < len(self.parts):  # sampling or a tiny vocabulary can leave none
            self.notes.append("no translation was found")
            parts = parts or [[Hypothesis([], 0.0, 0.0, False)]]
        found = []
        for n in range(max(map(len, parts))):
            each = [part[min(n, len(part) - 1)] for part in parts]
            text = " ".join(filter(None, (one_line(t.vocabularies.target.decode(h.ids)) for h in each)))
            sums = sum(h.score for h in each), sum(h.log_prob for h in each)
            found.append(TextHypothesis(text, *sums, any(h.cut for h in each), tuple(each[0].ids)))
        if found[0].cut:
            self.notes.append("its translation was cut at the limit of its length")
        return Translation(number, self.source, self.parts, found, self.notes)


def one_line(text: str) -> str:
    """A text with line ends in it as one line."""
    return text.replace("\r", " ").replace("\n", " ") if "\n" in text or "\r" in text else text


def validation_translate(
    config: TranslationConfig,
    vocabularies: Vocabularies,
    params: Any,
    lines: Sequence[str],
    stop: Callable[[], bool],
) -> list[str] | None:
    """Translations of held-out lines during training; None if `stop` asked to leave half-way.

    With several processes each translates all lines on devices of its own; one uses the devices that hold the
    parameters.

    Args:
      params: on the mesh of the training.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        devices = jax.local_devices()
        params = multihost_utils.process_allgather(params, tiled=True)
    else:
        devices = list(jax.tree.leaves(params)[0].sharding.mesh.devices.flat)
    settings = TranslateSettings(
        DecodeSettings(beam_size=config.validation.beam_size, min_length=1),
        max_source_length=config.examples.max_source_length,
    )
    mesh = sharding.make_mesh(MeshConfig(), devices)
    found = []
    for translation in Translator(config.model, params, vocabularies, settings, mesh).stream(at_hand(lines)):
        if stop():
            return None
        found.append(translation.text)
    return found
