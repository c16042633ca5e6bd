"""Questions about a context: windows, where the answer is in them, and the best answers of all windows together.

Devlin et al. 2019, sections 4.2 and 4.3. Places are code points of the context as it was given, and an answer is a
slice of it, so case, accents and spaces are the context's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.finetune.encoded import Cut, Features, Row, lay_out
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import InputsConfig, SpanConfig
from bert_jax.finetune.windows import most_context, window_starts
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

NO_CANDIDATE = 1e6
"""The null score of a question whose context has no piece, so that there is nothing to answer with."""
NOT_THERE = "no answer is where the file says"
NO_PIECE = "the answer leaves no piece"


def encode(
    examples: Sequence[Example],
    tokenizer: WordPiece,
    inputs: InputsConfig,
    labelled: bool = True,
    training: bool = False,
) -> Features:
    """Rows of a question and a window of its context.

    A context is always read in windows; `inputs.stride` 0 is half of what fits. A question longer than max_query_length
    is cut and counted. With labels, `start` and `end` are the places of the first and last piece of the first answer
    that is where the file says; both 0 in windows that do not hold all of it, and for questions without an answer.

    Args:
      training: leave out examples that have an answer, but none that can be found in the context; and what `decode`
        needs.

    Raises:
      UserError: the question leaves no room for the context.
    """
    questions = tokenizer.encode_batch([e.text_a for e in examples])
    contexts = _contexts(examples, tokenizer)
    length = inputs.max_seq_length
    rows: list[Row] = []
    layouts: list[tuple[int, np.ndarray, np.ndarray, tuple[int, int]]] = []
    cut: list[Cut] = []
    left_out: list[tuple[int, str]] = []
    for n, (example, question) in enumerate(zip(examples, questions, strict=True)):
        ids, offsets_P2 = contexts[example.text_b or ""]
        answer = (-1, -1)
        if labelled and not example.is_impossible:
            answer, missing = _pieces(example, offsets_P2)
            if missing and training:
                left_out.append((example.line, missing))
                continue
        asked = question[: inputs.max_query_length]
        if len(asked) < len(question):
            cut.append(Cut(example.line, len(question) - len(asked), "pieces of the question"))
        room = length - len(asked) - 3
        if room < 1:
            raise UserError(
                f"the question of line {example.line} has {len(asked)} pieces; with 3 control tokens, "
                f"inputs.max_seq_length {length} leaves {room} for the context (which has {len(ids)}); set it higher, "
                f"or inputs.max_query_length (now {inputs.max_query_length}) lower"
            )
        starts = window_starts(len(ids), room, inputs.stride)
        spans = [(s, min(s + room, len(ids))) for s in starts]
        for (a, b), owner in zip(spans, most_context(spans), strict=True):
            rows.append(Row(n, asked, ids[a:b]))
            inside = a <= answer[0] and answer[1] < b
            place = tuple(p - a + len(asked) + 2 for p in answer) if inside and answer[0] >= 0 else (0, 0)
            layouts.append((len(asked) + 2, offsets_P2[a:b], owner, (place[0], place[1])))
    index_N = np.array([row.example for row in rows], np.int32)
    arrays = lay_out(rows, tokenizer, length)
    if labelled:
        places_N2 = np.array([place for *_, place in layouts], np.int32).reshape(-1, 2)
        arrays |= {"start": places_N2[:, 0].copy(), "end": places_N2[:, 1].copy()}
    found = Features(arrays, index_N, len(examples), tuple(cut), tuple(left_out))
    if training:
        return found  # nothing is decoded, and places take half as much memory again
    offsets_NL2 = np.full((len(rows), length, 2), -1, np.int32)
    owner_NL = np.zeros((len(rows), length), bool)
    for n, (first, offsets, owner, _) in enumerate(layouts):
        offsets_NL2[n, first : first + len(offsets)] = offsets
        owner_NL[n, first : first + len(owner)] = owner
    return dataclasses.replace(found, offsets_NL2=offsets_NL2, owner_NL=owner_NL)


def _contexts(examples: Sequence[Example], tokenizer: WordPiece) -> dict[str, tuple[list[int], np.ndarray]]:
    """Each context once: many questions share one."""
    texts = list(dict.fromkeys(e.text_b or "" for e in examples))
    return dict(zip(texts, tokenizer.encode_with_offsets(texts), strict=True))


def _pieces(example: Example, offsets_P2: np.ndarray) -> tuple[tuple[int, int], str]:
    """First and last piece of the answer, or why there are none."""
    why = NOT_THERE
    for text, start in example.answers:
        if start >= 0:
            touched = np.flatnonzero((offsets_P2[:, 1] > start) & (offsets_P2[:, 0] < start + len(text)))
            if len(touched):
                return (int(touched[0]), int(touched[-1])), ""
            why = NO_PIECE
    return (-1, -1), why


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible answer.

    Attributes:
      text: a slice of the context, or empty for none.
      start, end: the half-open range of code points in the context; -1 for none.
      score: logit of its start plus logit of its end.
      probability: among the candidates kept for the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What was found for a question.

    Attributes:
      best: the best candidate that is not empty, if there is one; else the empty one.
      null_score: score of "no answer" minus that of `best`; NO_CANDIDATE if there is nothing to answer with.
      candidates: the n best that are not empty, best first, and with version_2 the empty one among them. There is at
        least one.
    """

    id: str
    best: Candidate
    null_score: float
    candidates: tuple[Candidate, ...]

    @property
    def best_text(self) -> str:
        """The best answer that is not empty, if there is one."""
        return self.best.text

    def text(self, threshold: float | None) -> str:
        """The answer given: the empty one where null_score is above the threshold; None never gives the empty one for
        that."""
        return "" if threshold is not None and self.null_score > threshold else self.best.text

    def n_best_json(self) -> list[dict[str, Any]]:
        """The candidates as builtins: text, start, end, score and probability of each."""
        return [dataclasses.asdict(c) for c in self.candidates]


def decode(
    logits_NL2: np.ndarray, features: Features, examples: Sequence[Example], config: SpanConfig
) -> list[Prediction]:
    """The best answers of each example over all its windows.

    A candidate lies in one window, ends where it starts or after, has at most max_answer_length pieces, and starts at a
    piece that has most context in this window. Of candidates with the same text the best stays. The score of no answer
    is the least that [CLS] has in any window, as in google-research/bert.

    Args:
      logits_NL2: float [n, L, 2], scores as start and as end.
    """
    assert features.offsets_NL2 is not None and features.owner_NL is not None
    rows_of: list[list[int]] = [[] for _ in examples]
    for row, example_index in enumerate(features.example_index_N.tolist()):
        rows_of[example_index].append(row)
    out = []
    for example, rows in zip(examples, rows_of, strict=True):
        found: list[Candidate] = []
        null = np.inf
        for row in rows:
            scores_L2 = np.asarray(logits_NL2[row], np.float64)
            null = min(null, float(scores_L2[0].sum()))
            found += _best(scores_L2, features.offsets_NL2[row], features.owner_NL[row], example.text_b or "", config)
        out.append(_answer(example.id, found, float(null) if rows else 0.0, config))
    return out


def _best(
    scores_L2: np.ndarray, offsets_L2: np.ndarray, owner_L: np.ndarray, context: str, config: SpanConfig
) -> list[Candidate]:
    """The best candidates of one window."""
    inside = np.flatnonzero(offsets_L2[:, 0] >= 0)
    if not len(inside):
        return []
    first, last = int(inside[0]), int(inside[-1]) + 1
    width = min(config.max_answer_length, last - first)
    end_S = np.append(scores_L2[first:last, 1], np.full(width, -np.inf))
    # scores_SA[s, a]: from piece s, over a further pieces.
    scores_SA = scores_L2[first:last, :1] + np.lib.stride_tricks.sliding_window_view(end_S, width)[: last - first]
    scores_SA = np.where(owner_L[first:last, None], scores_SA, -np.inf)
    flat = scores_SA.ravel()
    keep = min(len(flat), 2 * config.n_best)  # a text may be there twice
    best = np.argpartition(-flat, keep - 1)[:keep]
    out = []
    for place in best[np.argsort(-flat[best], kind="stable")].tolist():
        if flat[place] > -np.inf:
            start, more = divmod(place, width)
            a, b = int(offsets_L2[first + start, 0]), int(offsets_L2[first + start + more, 1])
            out.append(Candidate(context[a:b], a, b, float(flat[place])))
    return out


def _answer(key: str, found: list[Candidate], null: float, config: SpanConfig) -> Prediction:
    unlike: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda c: (-c.score, c.start, c.end)):
        unlike.setdefault(candidate.text, candidate)
    kept = list(unlike.values())[: config.n_best]
    empty = Candidate("", -1, -1, null)
    best = kept[0] if kept else empty
    if config.version_2 or not kept:
        kept = sorted([*kept, empty], key=lambda c: -c.score)
    scores = np.array([c.score for c in kept])
    weights = np.exp(scores - scores.max())
    probabilities = (weights / weights.sum()).tolist()
    return Prediction(
        key,
        best,
        null - best.score if best is not empty else NO_CANDIDATE,
        tuple(dataclasses.replace(c, probability=p) for c, p in zip(kept, probabilities, strict=True)),
    )
