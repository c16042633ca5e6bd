"""Entities in sequences of tags, and their precision, recall and F1 as seqeval counts them.

A tag is O, or B-, I-, E- or S- and a type. Without a scheme the reading is that of conlleval and of seqeval's default
mode, which takes IOB1, IOB2 and IOBES alike and is lenient: an entity begins wherever something must begin. With a
scheme it is seqeval's strict mode: what the scheme does not allow is no entity.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from transformer_jax.config import UserError

Scheme: TypeAlias = Literal["", "iob1", "iob2", "iobes"]
Entity: TypeAlias = tuple[str, int, int]
"""Type, number of the first word, number after the last one."""

_PREFIXES = {"": "BIES", "iob1": "BI", "iob2": "BI", "iobes": "BIES"}


def entities(tags: Sequence[str], scheme: Scheme = "") -> list[Entity]:
    """The entities of one sentence, in order.

    Raises:
      UserError: a tag that no entity can be read from.
    """
    split = [_split(tag, scheme) for tag in tags]
    return list(_lenient(split) if not scheme else _strict(split, scheme))


def mark_entities(tags: Iterable[str], scheme: Scheme = "") -> bool:
    """Whether each of `tags` is one that entities are marked with; those of parts of speech, for instance, are not."""
    return all(_is_tag(tag, scheme) for tag in tags)


def to_iob2(tags: Sequence[str], scheme: Scheme = "") -> list[str]:
    """The tags of one sentence in IOB2: B- on the first word of each entity, I- on the others."""
    out = ["O"] * len(tags)
    for kind, start, end in entities(tags, scheme):
        rest = f"-{kind}" if kind else ""
        out[start:end] = [f"B{rest}", *[f"I{rest}"] * (end - start - 1)]
    return out


def entity_scores(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: Scheme = ""
) -> dict[str, float]:
    """Scores over whole entities: one counts as found if its type, its first and its last word are right.

    Args:
      true, predicted: tags of each sentence, as many as it has words.

    Returns:
      precision, recall, f1 over all entities, and macro_f1: the mean of each type's F1, over the types that are in
      either; all of them 0 where there is no entity. `types` gives those per type.

    Raises:
      UserError: no sentence, or a tag that no entity can be read from.
    """
    hits, true_counts, predicted_counts = _counts(true, predicted, scheme)
    each = [_f1(hits[t], true_counts[t], predicted_counts[t])[2] for t in true_counts | predicted_counts]
    precision, recall, f1 = _f1(hits.total(), true_counts.total(), predicted_counts.total())
    return {"precision": precision, "recall": recall, "f1": f1, "macro_f1": sum(each) / len(each) if each else 0.0}


def scores_by_type(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: Scheme = ""
) -> dict[str, dict[str, float]]:
    """precision, recall, f1 and support (true entities) of each type, in order of name."""
    hits, true_counts, predicted_counts = _counts(true, predicted, scheme)
    found = {}
    for name in sorted(true_counts | predicted_counts):
        precision, recall, f1 = _f1(hits[name], true_counts[name], predicted_counts[name])
        found[name] = {"precision": precision, "recall": recall, "f1": f1, "support": float(true_counts[name])}
    return found


def _counts(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: Scheme
) -> tuple[collections.Counter[str], collections.Counter[str], collections.Counter[str]]:
    if not len(true):
        raise UserError("there are 0 sentences to score; a score needs at least one")
    counts: tuple[collections.Counter[str], ...] = tuple(collections.Counter() for _ in range(3))
    for a, b in zip(true, predicted, strict=True):
        assert len(a) == len(b), f"{len(a)} words and {len(b)} predicted tags"
        ours, theirs = entities(a, scheme), entities(b, scheme)
        for counter, found in zip(counts, (set(ours) & set(theirs), ours, theirs), strict=True):
            counter.update(kind for kind, _, _ in found)
    return counts[0], counts[1], counts[2]


def _f1(hits: int, true: int, predicted: int) -> tuple[float, float, float]:
    return hits / max(predicted, 1), hits / max(true, 1), 2 * hits / max(true + predicted, 1)


def _split(tag: str, scheme: Scheme) -> tuple[str, str]:
    if not _is_tag(tag, scheme):
        allowed = ", ".join(f"{p}-TYPE" for p in _PREFIXES[scheme])
        raise UserError(
            f"the tag {tag!r} is neither O nor {allowed}{f' (scheme {scheme})' if scheme else ''}; for tags that mark "
            "no entities, such as parts of speech, use the metric accuracy"
        )
    return tag[0], tag[2:]


def _is_tag(tag: str, scheme: Scheme) -> bool:
    return tag == "O" or (tag[:1] in set(_PREFIXES[scheme]) and tag[1:2] in ("-", ""))


def _lenient(tags: Sequence[tuple[str, str]]) -> Iterator[Entity]:
    start, (before, kind) = 0, ("O", "")
    for i, (prefix, own) in enumerate([*tags, ("O", "")]):
        begins = prefix in "BS" or before in "OES" or own != kind
        if before != "O" and (prefix == "O" or begins):
            yield kind, start, i
        if prefix != "O" and begins:
            start = i
        before, kind = prefix, own


def _strict(tags: Sequence[tuple[str, str]], scheme: Scheme) -> Iterator[Entity]:
    outside = ("O", "")
    start, before = 0, outside
    while start < len(tags):
        if not _may_start(before, tags[start], scheme):
            before, start = tags[start], start + 1
            continue
        end = start + 1
        while end < len(tags) and _goes_on(tags[end - 1], tags[end]):
            end += 1
        if _may_end(tags[end - 1], tags[end] if end < len(tags) else outside, scheme):
            yield tags[start][1], start, end
        before, start = tags[end - 1], end


def _may_start(before: tuple[str, str], tag: tuple[str, str], scheme: Scheme) -> bool:
    prefix, kind = tag
    if scheme != "iob1":
        return prefix in "BS"
    # B only parts two entities of a type that touch.
    if prefix == "B":
        return before[0] != "O" and before[1] == kind
    return prefix == "I" and (before[0] != "I" or before[1] != kind)


def _goes_on(before: tuple[str, str], tag: tuple[str, str]) -> bool:
    return before[0] in "BI" and tag[0] in "IE" and before[1] == tag[1]


def _may_end(last: tuple[str, str], after: tuple[str, str], scheme: Scheme) -> bool:
    if scheme == "iobes":
        return last[0] in "ES"
    return scheme == "iob2" or not (last[0] == after[0] == "B" and last[1] != after[1])
