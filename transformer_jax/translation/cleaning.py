"""Which pairs are left out of training, and for which reason: pure functions of a pair and the limits.

What a pair says by itself is decided by `fault`. What needs the other pairs (duplicates, sentences that stand in a test
set) is decided from hashes by `survey.py`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence

from transformer_jax import scripts
from transformer_jax.config import ConfigError
from transformer_jax.translation.config import PairsConfig

EMPTY = "empty side"
IDENTICAL = "identical sides"
SHORT = "too few words"
LONG = "too many words"
RATIO = "length ratio"
SCRIPT = "wrong script"
DUPLICATE = "duplicate"
IN_TEST = "side in the test set"
IN_VALIDATION = "side in the validation set"
REASONS = (EMPTY, IDENTICAL, SHORT, LONG, RATIO, SCRIPT, DUPLICATE, IN_TEST, IN_VALIDATION)

# Scripts written without spaces: Han, Hiragana, Katakana, Thai, Lao, Burmese, Khmer.
_SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_NOT_LETTERS = re.compile(r"[\W_]+")
# Spaces and punctuation, but not the marks that belong to letters: in ASCII, and beyond.
_ASCII_MARKS = bytes(i for i in range(128) if not chr(i).isalnum())
_MARKS = re.compile(
    "[\u0080-\u00a9\u00ab-\u00b1\u00b4\u00b6-\u00b8\u00bb\u00bf\u2000-\u206f\u3000-\u3004\u3008-\u3020"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]+"
)

# fmt: off
_SCRIPTS = {
    "Latin": "en de fr es it pt nl sv da no nb nn fi is et lv lt pl cs sk sl hr hu ro sq tr az vi id ms tl sw eu ca gl "
             "ga",
    "Cyrillic": "ru uk be bg mk sr kk ky mn tg",
    "Han": "zh zh-cn zh-tw zh-hans zh-hant yue",
    "Han Hiragana Katakana": "ja",
    "Hangul Han": "ko",
    "Arabic": "ar fa ur ps ug",
    "Devanagari": "hi mr ne sa",
    "Greek": "el", "Hebrew": "he yi", "Armenian": "hy", "Georgian": "ka", "Thai": "th", "Lao": "lo", "Khmer": "km",
    "Myanmar": "my", "Bengali": "bn as", "Tamil": "ta", "Telugu": "te", "Kannada": "kn", "Malayalam": "ml",
    "Gujarati": "gu", "Gurmukhi": "pa", "Oriya": "or", "Sinhala": "si", "Ethiopic": "am ti", "Tibetan": "bo",
}
# fmt: on
_BY_LANGUAGE = {code: frozenset(names.split()) for names, codes in _SCRIPTS.items() for code in codes.split()}


def scripts_of(language: str) -> frozenset[str]:
    """The scripts a language is written in.

    Raises:
      ConfigError: a code that is not in the table.
    """
    code = language.lower().replace("_", "-")
    found = _BY_LANGUAGE.get(code) or _BY_LANGUAGE.get(code.partition("-")[0])
    if found is None:
        raise ConfigError(
            f"data.check_script is on, but the script of the language {language!r} is not known; set source_language "
            "and target_language in the recipe to codes such as en, de or zh, or set data.check_script to false"
        )
    return found


def fault(source: str, target: str, limits: PairsConfig, languages: tuple[str, str] = ("", "")) -> str:
    """Why a pair is left out, one of REASONS, or "" if it is kept.

    Args:
      languages: codes of the two sides, needed for limits.check_script only.
    """
    if not source or not target:
        return EMPTY
    if limits.drop_identical and source == target:
        return IDENTICAL
    counts = count_words(source), count_words(target)
    if min(counts) < limits.min_words:
        return SHORT
    if max(counts) > limits.max_words:
        return LONG
    if max(len(source), len(target)) > limits.max_ratio * min(len(source), len(target)):
        return RATIO
    if limits.check_script:
        for text, language in zip((source, target), languages, strict=True):
            if not _in_script(text, scripts_of(language)):
                return SCRIPT
    return ""


def count_words(text: str) -> int:
    """Words between spaces; in writing without spaces, characters."""
    if text.isascii():
        return len(text.split())
    apart, characters = _SPACELESS.subn(" ", text)
    return len(apart.split()) + characters


def _in_script(text: str, wanted: frozenset[str]) -> bool:
    """Whether at least half of the words that have a script have one of these."""
    found = [_script(word) for word in _words(text)]
    known = [name for name in found if name != scripts.COMMON]
    return 2 * sum(name in wanted for name in known) >= len(known)


def _words(text: str) -> list[str]:
    return _NOT_LETTERS.sub(" ", _SPACELESS.sub(lambda found: f" {found[0]} ", text)).split()


@functools.lru_cache(maxsize=1 << 16)
def _script(word: str) -> str:
    return scripts.script_of_word(word)


def pair_hash(source: str, target: str) -> int:
    """64 bits that equal pairs share."""
    return _hash(f"{source}\t{target}".encode())


def side_hash(text: str) -> int:
    """64 bits that sentences with the same letters and digits share, whatever their case, spaces and punctuation."""
    if text.isascii():
        data = text.lower().encode()
    else:
        data = _MARKS.sub("", text.casefold()).encode()
    return _hash(data.translate(None, _ASCII_MARKS) or text.encode())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def check(limits: PairsConfig, languages: Sequence[str]) -> None:
    """Refuse settings that cannot be followed.

    Raises:
      ConfigError: the script of a language is to be checked and not known.
    """
    if limits.check_script:
        for language in languages:
            scripts_of(language)
