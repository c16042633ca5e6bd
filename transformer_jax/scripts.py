"""Writing systems: which one a word is in, where writing without spaces may be cut, and how much of each is unknown.

WordPiece turns a word it cannot spell, or that is too long, into one [UNK] without a word said. In Thai, Lao, Khmer or
Burmese a whole sentence is such a "word". `UnknownCounter` makes the loss visible while shards are written; a
pre-splitter (`PRE_SPLITTERS`) makes such text learnable.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from transformer_jax.config import ConfigError, UserError, nearest

if TYPE_CHECKING:
    from transformer_jax.pieces import SentencePiece
    from transformer_jax.tokenizer import WordPiece

    Tokenizer: TypeAlias = WordPiece | SentencePiece

COMMON = "Common"
"""Digits, punctuation, symbols, and marks that belong to no one script."""

# fmt: off
_NAMES = (
    "Latin", "Greek", "Cyrillic", "Armenian", "Hebrew", "Arabic", "Syriac", "Thaana", "Devanagari",
    "Bengali", "Gurmukhi", "Gujarati", "Oriya", "Tamil", "Telugu", "Kannada", "Malayalam", "Sinhala",
    "Thai", "Lao", "Tibetan", "Myanmar", "Georgian", "Hangul", "Ethiopic", "Cherokee", "Khmer",
    "Mongolian", "Hiragana", "Katakana", "Bopomofo", "Yi", "Javanese", "Balinese", "Coptic", "Gothic",
)
# fmt: on
_BY_FIRST_WORD = {name.upper(): name for name in _NAMES} | {"CJK": "Han", "HALFWIDTH": "Katakana", "MICRO": "Greek"}
_WITHOUT_SPACES = ("Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Javanese", "Balinese")
_STACKERS = "\u1039\u17d2\u0f84\ua9c0\u1b44"
"""Signs that join the next consonant to the one before (virama, coeng, ...): no cut after them."""


@functools.lru_cache(maxsize=1 << 16)
def script(char: str) -> str:
    """The script of one character, such as "Latin", "Han" or "Thai"; "Common" for what is no letter of a known one."""
    if unicodedata.category(char)[0] not in "LM":
        return COMMON
    words = unicodedata.name(char, "").split(" ")
    if words[0] == "FULLWIDTH" and len(words) > 1:
        words = words[1:]
    return _BY_FIRST_WORD.get(words[0], COMMON)


def script_of_word(word: str) -> str:
    """The script of the first character that has one."""
    for char in word:
        found = script(char)
        if found != COMMON:
            return found
    return COMMON


# --- pre-splitters: text -> positions (in code points) at which a space is put in


def _cut_characters(text: str) -> list[int]:
    """Before each letter of a script written without spaces, and after the last one of a run.

    Marks stay with their letter, and stacked consonants together.
    """
    cuts = []
    for i in range(1, len(text)):
        if not (_spaceless(text[i]) or _spaceless(text[i - 1])) or text[i].isspace() or text[i - 1].isspace():
            continue
        if unicodedata.category(text[i])[0] != "M" and text[i - 1] not in _STACKERS:
            cuts.append(i)
    return cuts


def _spaceless(char: str) -> bool:
    return char > "\u0dff" and script(char) in _WITHOUT_SPACES


def _cut_jieba(text: str) -> list[int]:
    """Between Chinese words, as jieba's default mode finds them."""
    cuts = []
    position = 0
    for word in _jieba().cut(text):
        if position and not word.isspace() and not text[position - 1].isspace():
            cuts.append(position)
        position += len(word)
    return cuts


@functools.lru_cache(maxsize=1)
def _jieba() -> Any:
    try:
        import jieba
    except ImportError:
        raise UserError(
            'the pre-splitter "jieba" needs the package jieba, which is not installed; install the extra `zh` '
            "(pip install 'bert-transformer-jax[zh]')"
        ) from None
    jieba.setLogLevel(60)
    return jieba


PRE_SPLITTERS: dict[str, Callable[[str], list[int]]] = {"characters": _cut_characters, "jieba": _cut_jieba}


def pre_splitter(name: str) -> Callable[[str], list[int]]:
    """The function that gives the positions at which `name` puts a space.

    Raises:
      ConfigError: no pre-splitter has this name.
    """
    if name not in PRE_SPLITTERS:
        raise ConfigError(f'pre_splitter "{name}" is not known{nearest(name, PRE_SPLITTERS)}')
    return PRE_SPLITTERS[name]


def insert_spaces(text: str, cuts: Sequence[int]) -> str:
    """`text` with a space before each position of `cuts` (ascending)."""
    if not cuts:
        return text
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return " ".join(parts)


# --- unknown rate


@dataclasses.dataclass
class ScriptCount:
    """Pieces of one script, those of them that are [UNK], and some of the words behind those."""

    pieces: int = 0
    unknown: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.unknown / self.pieces if self.pieces else 0.0


class UnknownCounter:
    """Counts pieces and unknown pieces by script; picklable, and the sum of parts does not depend on their order.

    Cheap: known pieces are counted by a table of each piece's script, and text is looked at again only where an [UNK]
    stands. A piece has the script of its letters; an [UNK] that of the word it stands for.
    """

    EXAMPLES = 5

    def __init__(self) -> None:
        self.counts: dict[str, ScriptCount] = {}

    def add(self, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        """Count `texts`, whose pieces as `tokenizer.encode_batch` gave them are `ids`."""
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64)
        self.add_flat(tokenizer, flat)
        for text, row in zip(texts, ids, strict=True):
            if tokenizer.unk_id in row:
                self.add_unknown(tokenizer, text)

    def add_flat(self, tokenizer: Tokenizer, ids: np.ndarray) -> None:
        """Count known pieces only; `add_unknown` is then called for each text that has an [UNK] in it."""
        names, script_V = tokenizer.piece_scripts
        per_piece = np.bincount(ids, minlength=tokenizer.vocab_size)
        per_piece[tokenizer.unk_id] = 0
        per_script = np.bincount(script_V, weights=per_piece, minlength=len(names))
        for name, n in zip(names, per_script, strict=True):
            if n:
                self._of(name).pieces += int(n)

    def add_unknown(self, tokenizer: Tokenizer, text: str) -> None:
        """Count the words of `text` that are [UNK]."""
        for word in tokenizer.unknown_words(text):
            count = self._of(script_of_word(word))
            count.pieces += 1
            count.unknown += 1
            self._example(count, word)

    def merge(self, other: UnknownCounter) -> None:
        """Add the counts of `other`."""
        for name, theirs in other.counts.items():
            ours = self._of(name)
            ours.pieces += theirs.pieces
            ours.unknown += theirs.unknown
            for word in theirs.examples:
                self._example(ours, word)

    def above(self, limit: float, min_share: float = 0.001) -> list[tuple[str, ScriptCount]]:
        """Scripts with an unknown rate above `limit`, worst first.

        A script that makes up less than `min_share` of all pieces is left out: a few quoted words of another language
        are no fault of a corpus (they stand in the report all the same).
        """
        total = sum(c.pieces for c in self.counts.values())
        found = [(n, c) for n, c in self.counts.items() if c.rate > limit and c.pieces >= min_share * total]
        return sorted(found, key=lambda item: (-item[1].rate, item[0]))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """For reports: script -> pieces, unknown, rate, examples; scripts with most pieces first."""
        order = sorted(self.counts.items(), key=lambda item: (-item[1].pieces, item[0]))
        return {n: {**dataclasses.asdict(c), "rate": c.rate} for n, c in order}

    @classmethod
    def from_dict(cls, counts: Mapping[str, Mapping[str, Any]]) -> UnknownCounter:
        """What `to_dict` gave, as a counter again."""
        counter = cls()
        for name, count in counts.items():
            counter.counts[name] = ScriptCount(count["pieces"], count["unknown"], list(count["examples"]))
        return counter

    def _of(self, name: str) -> ScriptCount:
        return self.counts.setdefault(name, ScriptCount())

    def _example(self, count: ScriptCount, word: str) -> None:
        # The smallest few by code points, so that examples do not depend on the order of parts.
        word = word if len(word) <= 40 else word[:39] + "…"
        if word not in count.examples:
            count.examples = sorted([*count.examples, word])[: self.EXAMPLES]


def message_above(found: Sequence[tuple[str, ScriptCount]], limit: float, advice: str) -> str:
    """What to tell the user about scripts above the limit: names, rates, examples, and `advice`."""
    lines = [f"too many unknown pieces (limit {limit:.2%}):"]
    for name, count in found:
        shown = ", ".join(repr(w) for w in count.examples)
        lines.append(
            f"  {name}: {count.unknown} of {count.pieces} pieces are [UNK] ({count.rate:.2%}), such as {shown}"
        )
    lines.append(advice)
    return "\n".join(lines)
