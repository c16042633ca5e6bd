"""Scores of translations: sacreBLEU's BLEU and chrF2 with their signatures, and beside them the figure of papers.

All are computed on plain, detokenised text as it stands, the hypotheses and the references alike. A signature names all
that a figure depends on; two figures with different signatures cannot be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from transformer_jax.config import UserError
from transformer_jax.lines import lines
from transformer_jax.translation.compound_split import HOW, compound_split_bleu

Tokenize = Literal["13a", "intl", "zh", "char", "none"]
"""Tokenisers of sacreBLEU that need no further package."""
WITHOUT_SPACES = {"zh": "zh", "ja": "char", "ko": "13a", "th": "char"}
"""Tokenisers for languages that 13a was not made for; compound splitting says nothing of them."""

_ENTITY = re.compile(r"&(?:amp|quot|apos|lt|gt|nbsp|#\d+|#x[0-9a-fA-F]+|#91|#93);")
_LOOSE = re.compile(r"\S ['.,;:!?)](?: |$)|##AT##|@-@|@@ ")


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, language: str = "", tokenize: Tokenize | None = None
) -> dict[str, Any]:
    """Score translations against one reference each.

    Args:
      hypotheses, references: line i of one belongs to line i of the other.
      language: code of the target language, such as "de"; decides the tokenisers where they are not given.
      tokenize: sacreBLEU's tokeniser for BLEU; 13a without it, or what suits the language.

    Returns:
      `lines`; `bleu` and `chrf`, each with `score` and `signature` (BLEU also with `precisions`, `brevity_penalty` and
      both lengths); `compound_split_bleu` with `score` and `how`, or None for writing without spaces; `notes`.

    Raises:
      UserError: different counts of lines, none at all, or an unknown tokeniser.
    """
    from sacrebleu.metrics import BLEU, CHRF

    if isinstance(hypotheses, str) or isinstance(references, str):
        raise UserError("score takes lists of lines; put the one line into a list")
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} hypotheses and {len(references)} references: each line is scored against the line of "
            "the same number, so there must be as many of both"
        )
    if not references:
        raise UserError("there is nothing to score: both sides have no lines")
    short = language.lower().replace("_", "-").split("-")[0]
    tokenize = tokenize or WITHOUT_SPACES.get(short, "13a")  # type: ignore[assignment]
    if tokenize not in get_args(Tokenize):
        raise UserError(f"tokenize is {tokenize!r}; it must be one of {', '.join(get_args(Tokenize))}")
    # `force` keeps sacreBLEU from warning of tokenised lines: `notes` says which they are.
    counters = {"bleu": BLEU(tokenize=tokenize, force=True), "chrf": CHRF()}
    found: dict[str, Any] = {"lines": len(references)}
    for name, counter in counters.items():
        result: Any = counter.corpus_score(list(hypotheses), [list(references)])
        found[name] = {"score": float(result.score), "signature": str(counter.get_signature())}
        if name == "bleu":
            found[name] |= {
                "precisions": [float(x) for x in result.precisions],
                "brevity_penalty": float(result.bp),
                "hypothesis_length": int(result.sys_len),
                "reference_length": int(result.ref_len),
            }
    spaced = short not in WITHOUT_SPACES
    split = {"score": compound_split_bleu(hypotheses, references, short or "de"), "how": HOW} if spaced else None
    return found | {"compound_split_bleu": split, "notes": _notes(hypotheses, references)}


def score_files(hypothesis: str, reference: str, **options: Any) -> dict[str, Any]:
    """`score` of two files of UTF-8 lines (gzip if the name ends in .gz); errors name the file too."""
    texts = [[text for _, text in lines(Path(name))] for name in (hypothesis, reference)]
    if len(texts[0]) != len(texts[1]):
        raise UserError(
            f"{hypothesis} has {len(texts[0])} lines and {reference} {len(texts[1])}: each line is scored against the "
            "line of the same number, so both must have as many"
        )
    return score(*texts, **options)


def table(scores: dict[str, Any]) -> str:
    """The figures for people, each with what it depends on."""
    split = scores["compound_split_bleu"]
    rows = [
        f"{'BLEU':22}{scores['bleu']['score']:7.2f}  {scores['bleu']['signature']}",
        f"{'chrF2':22}{scores['chrf']['score']:7.2f}  {scores['chrf']['signature']}",
    ]
    if split is not None:
        rows.append(f"{'compound-split BLEU':22}{split['score']:7.2f}  {split['how']}")
    return "\n".join([*rows, f"{scores['lines']} lines"])


def _notes(hypotheses: Sequence[str], references: Sequence[str]) -> list[str]:
    """What makes figures other than they seem: each with the numbers of the lines, from 1."""

    def numbered(said: str, found: list[bool]) -> list[str]:
        numbers = [i for i, yes in enumerate(found, 1) if yes]
        if not numbers:
            return []
        shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        return [f"{len(numbers)} of {len(found)} {said} (line {shown})"]

    pairs = list(zip(hypotheses, references, strict=True))
    tokenised = [bool(_LOOSE.search(h)) and not _LOOSE.search(r) for h, r in pairs]
    return [
        *numbered("references are empty; they are scored as they stand", [not r.strip() for r in references]),
        *numbered("hypotheses are empty; they are scored as they stand", [not h.strip() for h in hypotheses]),
        *numbered(
            "hypotheses hold HTML entities that their references have not; the text is scored as it stands, so "
            "decode them first",
            [bool(_ENTITY.search(h)) and not _ENTITY.search(r) for h, r in pairs],
        ),
        *numbered("hypotheses look tokenised; the text is scored as it stands, so detokenise it first", tokenised),
    ]
