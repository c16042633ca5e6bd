"""Lines of a stream for `translate`, as they come, and results as lines of text or JSON."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Literal, NamedTuple

from transformer_jax import sharding
from transformer_jax.command import json_line, say
from transformer_jax.config import MeshConfig
from transformer_jax.translation import attention_page
from transformer_jax.translation.loading import Loaded, load
from transformer_jax.translation.translate import Lines, TranslateSettings, Translation, Translator

MOST_BYTES = 1 << 20
"""What is beyond this of one line is dropped (and the line is noted), so that memory stays bounded."""
DROPPED = "\ufffd"
"""Ends a line that was too long to be read."""
AHEAD = 4096
"""Lines that are read before they are asked for."""
PAUSE_SECONDS = 0.05
"""A pause in the input as long as this is not waited for when there are lines to work on."""

PROGRESS_SECONDS = 10.0

Format = Literal["text", "scores", "n-best", "json"]


class Counts(NamedTuple):
    """What was done."""

    lines: int
    blank: int
    noted: int
    """Lines of which something was told."""
    seconds: float


def from_stream(stream: BinaryIO) -> Lines:
    """Lines of a binary stream, decoded as UTF-8; bytes that are not become U+FFFD.

    A thread reads, so that what is there is translated while the other end of a pipe still thinks. Only LF or CRLF ends
    a line; a lone CR is a space; a byte order mark at the start is dropped.

    Raises:
      OSError: what reading raised, from the function that gives the lines.
    """
    waiting: queue.Queue[str | BaseException | None] = queue.Queue(AHEAD)

    def read() -> None:
        try:
            first = True
            while data := stream.readline(MOST_BYTES):
                whole = data.endswith(b"\n") or len(data) < MOST_BYTES
                text = data.removeprefix(b"\xef\xbb\xbf" if first else b"").decode("utf-8", "replace")
                while not whole:
                    rest = stream.readline(MOST_BYTES)
                    whole = rest.endswith(b"\n") or len(rest) < MOST_BYTES
                    if rest.strip(b"\r\n") and not text.endswith(DROPPED):
                        text += DROPPED
                waiting.put(text.removesuffix("\n").removesuffix("\r").replace("\r", " "))
                first = False
            waiting.put(None)
        except BaseException as e:
            waiting.put(e)

    threading.Thread(target=read, daemon=True).start()
    over = False

    def next_lines(wait: bool, most: int) -> Sequence[str] | None:
        nonlocal over
        found: list[str] = []
        while not over and len(found) < most:
            try:
                item = waiting.get(block=wait, timeout=PAUSE_SECONDS if found and wait else None)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            if item is None:
                over = True
            else:
                found.append(item)
        return None if over and not found else found

    return next_lines


def written(translation: Translation, form: Format) -> str:
    """One translation as it stands in the output, with its line end.

    "text" is the best translation; "scores" its score, a tab and the translation; "n-best" a line for each hypothesis,
    `line ||| translation ||| score` with lines counted from 0, as other decoders write it; "json" one object.
    """
    if form == "text":
        return translation.text + "\n"
    if form == "scores":
        return f"{translation.hypotheses[0].score:.6f}\t{translation.text}\n"
    if form == "n-best":
        number = translation.line - 1
        return "".join(f"{number} ||| {h.text} ||| {h.score:.6f}\n" for h in translation.hypotheses)
    hypotheses = [
        {"text": h.text, "score": h.score, "log_prob": h.log_prob, "cut": h.cut} for h in translation.hypotheses
    ]
    record = {
        "line": translation.line,
        "source": translation.source,
        "translations": hypotheses,
        "notes": translation.notes,
    }
    return json_line(record) + "\n"


def open_translator(checkpoint: str, settings: TranslateSettings) -> tuple[Loaded, Translator]:
    """The model of a checkpoint, ready to translate with all devices.

    Args:
      checkpoint: what `translation.load` takes.
      settings: with `max_source_length` 0 that of training: positions beyond the longest row of training have never
        been seen, whatever the model has room for.

    Raises:
      UserError: a checkpoint or settings that cannot be used.
    """
    loaded = load(checkpoint)
    if not settings.max_source_length:
        settings = dataclasses.replace(settings, max_source_length=loaded.max_source_length)
    mesh = sharding.make_mesh(MeshConfig())
    return loaded, Translator(loaded.config, loaded.params, loaded.vocabularies, settings, mesh)


def translate_stream(
    loaded: Loaded,
    translator: Translator,
    source: BinaryIO,
    out: BinaryIO,
    form: Format = "text",
    attention: str = "",
    say: Callable[[str], None] = say,
) -> Counts:
    """Translate a stream of lines; what was out of the ordinary is told line by line.

    Args:
      loaded, translator: from `open_translator`.
      out: each translation is written as soon as those before it are, and at once.
      attention: a page to draw of the first line that is not blank, or "".
    """
    began = told = time.monotonic()
    lines = blank = noted = 0
    for translation in translator.stream(from_stream(source)):
        out.write(written(translation, form).encode("utf-8", "replace"))
        out.flush()
        lines, blank = translation.line, blank + (not translation.pieces)
        noted += bool(translation.notes)
        for note in translation.notes:
            say(f"line {translation.line}: {note}")
        if attention and translation.pieces:
            draw(attention, loaded, translation)
            say(f"page: {attention} (line {translation.line})")
            attention = ""
        now = time.monotonic()
        if now - told > PROGRESS_SECONDS:
            told = now
            say(f"{lines:,} lines, {lines / (now - began):.1f} lines/s")
    seconds = time.monotonic() - began
    if attention:
        say(f"{attention} was not written: no line has anything to translate")
    return Counts(lines, blank, noted, seconds)


def draw(page: str, loaded: Loaded, translation: Translation) -> None:
    """Write the page of the first part of a line and its translation."""
    source_ids = translation.pieces[0]
    best = translation.hypotheses[0]
    target_ids = best.ids if best.cut else [*best.ids, loaded.vocabularies.target.eos_id]
    attention_page.write_page(
        page,
        loaded.config,
        loaded.params,
        (source_ids, [loaded.vocabularies.source.vocab[i] for i in source_ids]),
        (target_ids, [loaded.vocabularies.target.vocab[i] for i in target_ids]),
        translation.source[:200],
    )
