"""The tokenised, compound-split BLEU that English-German papers quote.

tensor2tensor's script for it (get_ende_bleu.sh, after the figures of the GNMT and "Attention Is All You Need" papers)
normalises Unicode punctuation, tokenises with Moses, splits every word at its hyphens ("rich-text" becomes "rich
##AT##-##AT## text", which adds easy matches), and counts n-grams without smoothing. Its figures are higher than
sacreBLEU's and comparable only with figures made in the same way.

The tokeniser here follows the rules of Moses' tokenizer.perl (see `tokenise`), with a short list of abbreviations in
place of its long ones, and takes both sides as raw text; so figures can differ from the script's by some hundredths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HOW = "Moses-like tokens, words split at hyphens on both sides, no smoothing (as tensor2tensor's get_ende_bleu)"
"""What to write beside the figure."""

_PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("„“”«»《》「」", '"'), **dict.fromkeys("‘’‚‛´", "'"), "–": "-", "—": " - ", "…": "...",
        "，": ",", "、": ",", "。": ". ", "：": ":", "；": ";", "？": "?", "！": "!", "（": "(", "）": ")", "％": "%",
        "【": "[", "】": "]", "～": "~", "．": ". ", "\u00a0": " ",
    }
)  # fmt: skip
_ABBREVIATIONS = {
    language: frozenset(words.split())
    for language, words in {
        "": "Dr Prof St Nr No vs etc",
        "de": "Dr Prof St Nr Bd Abs Art bzw ca evtl ggf inkl Hr Fr Str usw vgl Mio Mrd Jan Feb Aug Sept",
        "en": "Mr Mrs Ms Dr Prof St Jr Sr Gen Gov Sen Rep Rev Hon vs etc No Nos Art Inc Ltd Co Corp",
        "fr": "M MM Mme Mlle Dr Prof St art etc av",
    }.items()
}
"""Words that keep their full stop although a capital follows; single letters do in any language."""


def tokenise(text: str, language: str = "") -> list[str]:
    """Tokens of a text by the rules of Moses' tokenizer.perl.

    Every character that is no letter, digit, space, full stop, apostrophe, backtick, comma or hyphen stands alone. A
    comma stays between digits. A full stop stays in numbers, after abbreviations, after words with another full stop
    in them, and before a small letter. An apostrophe goes with what follows in English, with what comes before it in
    French and Italian, and stands alone otherwise.

    Args:
      language: a code such as "de".
    """
    text = " ".join(text.translate(_PUNCTUATION).replace("\0", " ").split())
    text = re.sub(r"([^\w\s.'`,\-]|_)", r" \1 ", text)
    text = re.sub(r"\.{2,}", lambda dots: f" {dots[0]} ", text)
    text = re.sub(r"(?<!\d),|,(?!\d)", " , ", text)
    if language == "en":
        text = re.sub(r"(?<=[^\W\d_])'(?=[^\W\d_])|(?<=\d)'(?=s)", " \0", text)
    elif language in ("fr", "it"):
        text = re.sub(r"(?<=[^\W\d_])'(?=[^\W\d_])", "\0 ", text)
    text = text.replace("'", " ' ").replace("\0", "'")
    words = text.split()
    tokens: list[str] = []
    for i, word in enumerate(words):
        stem, following = word[:-1], words[i + 1] if i + 1 < len(words) else ""
        if word.endswith(".") and stem and set(word) != {"."} and not _keeps_stop(stem, following, language):
            tokens += [stem, "."]
        else:
            tokens.append(word)
    return tokens


def _keeps_stop(stem: str, following: str, language: str) -> bool:
    has_letter = any(c.isalpha() for c in stem)
    ordinal = language == "de" and stem.isdecimal() and 0 < int(stem) < 100
    return (
        ("." in stem and has_letter)
        or (len(stem) == 1 and stem.isupper())
        or stem in _ABBREVIATIONS.get(language, _ABBREVIATIONS[""])
        or (bool(following) and following[0].islower())
        or ordinal
    )


def split_compounds(tokens: Sequence[str]) -> str:
    """The tokens in one line, each hyphen between two characters a token of its own."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", " ".join(tokens))


def compound_split_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "de") -> float:
    """BLEU, 0 to 100, of raw texts (as many references as hypotheses), tokenised and split as this module says."""
    from sacrebleu.metrics import BLEU

    def prepared(texts: Sequence[str]) -> list[str]:
        return [split_compounds(tokenise(text, language)) for text in texts]

    counter = BLEU(tokenize="none", smooth_method="none", force=True)
    return float(counter.corpus_score(prepared(hypotheses), [prepared(references)]).score)
