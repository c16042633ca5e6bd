"""Exact match and F1 of answers, as the evaluation scripts of SQuAD 1.1 and 2.0 define them.

Rajpurkar et al., arXiv 1606.05250 and 1806.03822. Scores are between 0 and 1; the official scripts print percent.
Chinese has no spaces between words: its answers are compared by characters, as CMRC 2018 does (Cui et al. 2019).
"""

from __future__ import annotations

import collections
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transformer_jax.config import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Each ideograph (unified, extension A, compatibility) is a unit, and each run of other letters and digits.
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNITS = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


def normalized(answer: str) -> str:
    """Lower case, without ASCII punctuation, English articles and repeated spaces, in the official order."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """1 if both are the same once normalised."""
    return float(normalized(answer) == normalized(gold))


def token_f1(answer: str, gold: str, version_2: bool = False) -> float:
    """F1 over the words of both, each as often as it is there.

    Args:
      version_2: two answers without a word agree, as in SQuAD 2.0. (In 1.1 their F1 is 0, though they match exactly.)
    """
    ours, theirs = normalized(answer).split(), normalized(gold).split()
    if version_2 and not (ours and theirs):
        return float(ours == theirs)
    common = (collections.Counter(ours) & collections.Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def without_punctuation(answer: str) -> str:
    """Lower case, without any punctuation or symbol, Chinese ones included, and without spaces at the ends."""
    return "".join(c for c in answer.lower() if unicodedata.category(c)[0] not in "PS").strip()


def character_exact_match(answer: str, gold: str) -> float:
    """1 if both are the same but for case and punctuation."""
    return float(without_punctuation(answer) == without_punctuation(gold))


def character_f1(answer: str, gold: str, version_2: bool = False) -> float:
    """F1 by the longest run of characters that both have, as CMRC 2018 counts.

    A unit is a Chinese character, or a run of other letters and digits; punctuation counts nowhere. (The authors'
    script splits such runs by NLTK's rules for English, which differ for words such as "don't".)

    Args:
      version_2: two answers without a unit agree.
    """
    ours, theirs = (_UNITS.findall(without_punctuation(text)) for text in (answer, gold))
    if version_2 and not (ours and theirs):
        return float(ours == theirs)
    common = _longest_common_run(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _longest_common_run(ours: Sequence[str], theirs: Sequence[str]) -> int:
    longest, ending_here = 0, [0] * (len(theirs) + 1)
    for unit in ours:
        ending_here = [0, *(n + 1 if unit == other else 0 for n, other in zip(ending_here, theirs, strict=False))]
        longest = max(longest, *ending_here)
    return longest


def squad_scores(
    answers: Mapping[str, str],
    golds: Mapping[str, Sequence[str]],
    version_2: bool = False,
    null_scores: Mapping[str, float] | None = None,
    threshold: float | None = None,
    characters: bool = False,
) -> dict[str, float]:
    """Scores over all questions of `golds`; one without an answer in `answers` scores as the empty answer would.

    Args:
      answers: the text answered for each question's id. With `null_scores`, the best answer that is not empty.
      golds: the right texts of each question; none where it has no answer (2.0).
      null_scores: 2.0: how much better "no answer" is than that answer; the answer is taken as empty where this is
        above the threshold.
      threshold: None takes the one with the best F1 on these questions.
      characters: compare by characters, for Chinese, in place of words.

    Returns:
      exact, f1; for 2.0 also has_answer_exact, has_answer_f1, no_answer_exact, no_answer_f1 (each only if there is such
      a question); with null_scores also threshold, and, of the best thresholds found on these very questions,
      best_exact, best_exact_threshold, best_f1, best_f1_threshold.

    Raises:
      UserError: no question.
    """
    if not golds:
        raise UserError("there are 0 questions to score; a score needs at least one")
    ids = list(golds)
    has_answer_N = np.array([bool(golds[i]) or not version_2 for i in ids])
    f1 = character_f1 if characters else token_f1
    measures: dict[str, Callable[[str, str], float]] = {
        "exact": character_exact_match if characters else exact_match,
        "f1": lambda a, b: f1(a, b, version_2),
    }
    normal = without_punctuation if characters else normalized
    # 2.0 leaves out golds that normalise to nothing; a question with none left has the empty answer.
    real = {i: [g for g in golds[i] if normal(g)] or [""] for i in ids} if version_2 else golds
    each_N = {name: _best_of(measure, answers, real, ids) for name, measure in measures.items()}
    found: dict[str, float] = {}
    if null_scores is not None:
        null_N = np.array([null_scores[i] for i in ids], np.float64)
        for name in measures:
            best = best_threshold(each_N[name], null_N, has_answer_N)
            found[f"best_{name}"], found[f"best_{name}_threshold"] = best
        found["threshold"] = found["best_f1_threshold"] if threshold is None else threshold
        none_N = null_N > found["threshold"]
        each_N = {name: np.where(none_N, ~has_answer_N, scores_N) for name, scores_N in each_N.items()}
    out = {name: float(scores_N.mean()) for name, scores_N in each_N.items()}
    if version_2:
        for side, chosen_N in (("has_answer", has_answer_N), ("no_answer", ~has_answer_N)):
            if chosen_N.any():
                out |= {f"{side}_{name}": float(scores_N[chosen_N].mean()) for name, scores_N in each_N.items()}
    return out | found


def best_threshold(scores_N: np.ndarray, null_N: np.ndarray, has_answer_N: np.ndarray) -> tuple[float, float]:
    """The best mean score that a threshold on the null score gives, and the threshold.

    A question counts as unanswered where its null score is above the threshold. Of equally good thresholds it is the
    lowest; the one below all null scores, by 1, answers nothing. Unlike the official script, questions of equal null
    score stay together, and an answer such as "the", which normalises to nothing, counts as none.

    Args:
      scores_N: float [N], of the answers if given.
      has_answer_N: bool [N]; where it is False, leaving the question unanswered scores 1.
    """
    change_N = scores_N - ~has_answer_N  # by answering one question more
    order_N = np.argsort(null_N, kind="stable")
    sorted_N = null_N[order_N]
    sums_N = float((~has_answer_N).sum()) + np.cumsum(change_N[order_N])
    # Equal null scores fall on one side together.
    last = np.flatnonzero(np.append(sorted_N[1:] != sorted_N[:-1], True))
    candidates = np.concatenate([[float((~has_answer_N).sum())], sums_N[last]])
    thresholds = np.concatenate([[sorted_N[0] - 1.0], sorted_N[last]])
    best = int(np.argmax(candidates))
    return float(candidates[best] / len(scores_N)), float(thresholds[best])


def _best_of(
    measure: Callable[[str, str], float],
    answers: Mapping[str, str],
    golds: Mapping[str, Sequence[str]],
    ids: Sequence[str],
) -> np.ndarray:
    return np.array([max((measure(answers.get(key, ""), g) for g in golds[key]), default=0.0) for key in ids])
