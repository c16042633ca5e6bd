"""BERT's examples: sentence pairs and limits. Pure functions of (offsets, key, settings); `masking.py` picks pieces.

Pairs follow Devlin et al. 2019 (appendix A.2) and the code published with it in 2018: a document is cut into chunks of
whole sentences up to a target length, a chunk is split at a random sentence, and half of the second sides are replaced
by text from another document, whose place in the document is then used again. What differs from that code is said
where it differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from bert_jax.config import BertConfig, ExamplesConfig
from transformer_jax.config import ConfigError, UserError
from transformer_jax.inputs import bits, derive_key, randint, uniform

Gather = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(starts, lengths) of token ranges -> their ids, one range after another."""

IS_NEXT, RANDOM = 0, 1
"""Labels of the next-sentence head, as in the 2018 code. For sentence order: 0 in order, 1 swapped."""
MIN_SEQ_LENGTH = 8
REDRAWS = 16
"""How often a random second side is drawn again when it begins with the true next sentence."""
SENTENCES_PER_BLOCK = 1 << 19
"""Planning works through the documents in blocks of about this many sentences, which bounds its memory."""


def check(config: ExamplesConfig, model: BertConfig | None = None) -> None:
    """Refuse settings that cannot work, before anything is read or compiled.

    Raises:
      ConfigError: with the value found, what is allowed and what to change.
    """
    length = config.max_seq_length
    if length < MIN_SEQ_LENGTH:
        raise ConfigError(f"examples.max_seq_length is {length}; it must be at least {MIN_SEQ_LENGTH}")
    if length > 1 << 15:
        raise ConfigError(f"examples.max_seq_length is {length}; it can be at most {1 << 15}")
    if model is not None and length > model.max_position_embeddings:
        raise ConfigError(
            f"examples.max_seq_length is {length}, but the model has {model.max_position_embeddings} positions; lower "
            f"examples.max_seq_length or raise model.max_position_embeddings"
        )
    if model is not None and config.sentence_task != "none" and model.type_vocab_size < 2:
        raise ConfigError(
            f'model.type_vocab_size is {model.type_vocab_size}; sentence pairs need 2 (or sentence_task = "none")'
        )
    for name in ("masked_lm_prob", "mask_share", "random_share", "short_seq_prob", "random_next_prob"):
        value = getattr(config, name)
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"examples.{name} is {value}; it must be between 0 and 1")
    if config.mask_share + config.random_share > 1.0 + 1e-9:
        raise ConfigError(
            f"examples.mask_share {config.mask_share} and examples.random_share {config.random_share} add up to more "
            "than 1; lower one of them"
        )
    for name in ("max_sequences_per_row", "max_predictions_per_row", "dupe_factor"):
        if getattr(config, name) < 0:
            raise ConfigError(f"examples.{name} is {getattr(config, name)}; it must be at least 0")
    if model is not None:
        check_context(config, model)
    if config.objective != "masked" and 0 < config.max_predictions_per_row < length:
        raise ConfigError(
            f"examples.max_predictions_per_row is {config.max_predictions_per_row}, and every piece is predicted where "
            f'examples.objective is "{config.objective}"; leave it at 0'
        )
    if not config.pack and config.max_sequences_per_row > 1:
        raise ConfigError(
            f"examples.max_sequences_per_row is {config.max_sequences_per_row} but examples.pack is false, which is "
            "one pair a row; set one of the two"
        )


def check_context(config: ExamplesConfig, model: BertConfig) -> None:
    """Refuse what a model that sees one side cannot learn, and what one that sees both could copy.

    Raises:
      ConfigError: with what to change.
    """
    needed = {"next": "left", "previous": "right"}.get(config.objective, model.context)
    if model.context != needed:
        raise ConfigError(
            f'examples.objective is "{config.objective}" and model.context "{model.context}", so that a position would '
            f'see the piece that it predicts; set model.context = "{needed}"'
        )
    if model.context == "left" and config.sentence_task != "none":
        raise ConfigError(
            f'model.context is "left", so that [CLS] sees nothing but itself, and examples.sentence_task '
            f'"{config.sentence_task}" is told by it; set examples.sentence_task = "none"'
        )


def max_sequences(config: ExamplesConfig) -> int:
    """Sequences that a row has room for (S)."""
    if not config.pack:
        return 1
    return config.max_sequences_per_row or max(1, config.max_seq_length // 16)


def max_predictions(config: ExamplesConfig) -> int:
    """Predictions that a row has room for (P)."""
    if config.max_predictions_per_row:
        return config.max_predictions_per_row
    if config.objective != "masked":
        return config.max_seq_length
    return max(4, 4 * math.ceil(round(config.masked_lm_prob * config.max_seq_length / 4, 6)))


class PairPlan(NamedTuple):
    """Token ranges of pairs after truncation; all arrays have one entry a pair. Side B may be empty (length 0)."""

    a_start: np.ndarray
    """int64, the first token of side A in the split's line of tokens."""
    a_length: np.ndarray
    """uint16."""
    b_start: np.ndarray
    """int64."""
    b_length: np.ndarray
    """uint16; 0 is one side only, without a label for the sentence task."""
    label: np.ndarray
    """uint8: 0 is next (or in order), 1 random (or swapped)."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens with [CLS] and [SEP]: int64."""
        return self.a_length.astype(np.int64) + self.b_length + 2 + (self.b_length > 0)

    def take(self, index: np.ndarray) -> PairPlan:
        """The pairs with these numbers."""
        return PairPlan(*(column[index] for column in self))


def plan_pairs(
    key: np.uint64,
    document_offsets: np.ndarray,
    sentence_offsets: np.ndarray,
    sources: np.ndarray,
    hashes: np.ndarray,
    config: ExamplesConfig,
    gather: Gather,
    source_names: list[str] | None = None,
    sentences_per_block: int = SENTENCES_PER_BLOCK,
) -> PairPlan:
    """One draw of pairs from every document, in the order of the documents.

    The draws of a chunk are keyed by the sentence it starts with, so that the chunk at every sentence is computed at
    once, and a document's chunks are those met on the way from its first sentence. Differences from the 2018 code:

    - a random second side never comes from the document itself or from one with the same text, and never begins with
      the sentence that really follows (drawn again up to 16 times, then the pair is left out);
    - the number of tokens cut from the front and from the back of a side is drawn as that code draws it, but each side
      has its own coin flips.

    With `sentence_task` "sop" (Lan et al. 2020) both sides come from the chunk, swapped with probability 0.5; with
    "none" a chunk is one side. In both a chunk that is not a pair has no label.

    Args:
      document_offsets: int64 [documents + 1], into the sentences.
      sentence_offsets: int64 [sentences + 1], into the tokens; no sentence is empty.
      sources, hashes: of each document: its input file, and the hash of its text.
      gather: reads the first sentences of candidates for the random side.

    Raises:
      ConfigError: a random second side is needed and there is no other text to draw it from.
    """
    others = None
    if config.sentence_task == "nsp":
        others = _OtherDocuments(sources, hashes, config.random_next_from, source_names)
    num_documents = len(document_offsets) - 1
    blocks = []
    first = 0
    while first < num_documents:
        until = int(document_offsets[first]) + sentences_per_block
        last = int(np.searchsorted(document_offsets, until, side="right")) - 1
        last = min(max(last, first + 1), num_documents)
        blocks.append(
            _plan_documents(key, np.arange(first, last), document_offsets, sentence_offsets, others, config, gather)
        )
        first = last
    if not blocks:
        raise UserError("there are no documents to make examples from; check the recipe and the data report")
    return PairPlan(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))


def _plan_documents(
    key: np.uint64,
    documents: np.ndarray,
    document_offsets: np.ndarray,
    sentence_offsets: np.ndarray,
    others: _OtherDocuments | None,
    config: ExamplesConfig,
    gather: Gather,
) -> PairPlan:
    """The pairs of documents that follow one another."""
    two_sides = config.sentence_task != "none"
    max_tokens = config.max_seq_length - (3 if two_sides else 2)
    document_ends = document_offsets[documents + 1]
    base, stop = int(document_offsets[documents[0]]), int(document_ends[-1])
    sizes = document_ends - document_offsets[documents]

    # Most chunks fill a sequence; some documents get a shorter target, so that short sequences are seen too.
    short = uniform(key, documents, 0) < config.short_seq_prob
    targets = np.where(short, 2 + randint(max_tokens - 1, key, documents, 1), max_tokens)
    target, document_end = np.repeat(targets, sizes), np.repeat(document_ends, sizes)

    # The chunk that would start at each sentence: as many sentences as reach the target.
    sentence = np.arange(base, stop)
    starts = sentence_offsets[base:stop]
    chunk_end = base + 1 + np.searchsorted(sentence_offsets[base + 1 : stop + 1], starts + target)
    chunk_end = np.minimum(chunk_end, document_end)
    count = chunk_end - sentence
    chunk_key = bits(derive_key(int(key), "chunks"), sentence)
    a_count = np.where(count > 1, 1 + randint(np.maximum(count - 1, 1), chunk_key, 0), 1)
    flag = uniform(chunk_key, 1)
    if config.sentence_task == "nsp":
        random = (count == 1) | (flag < config.random_next_prob)
        following = np.where(random, sentence + a_count, chunk_end)  # sentences that were not used are put back
    else:
        random = np.zeros(len(sentence), bool)
        following = chunk_end

    at = _walk(following - base)
    del following, document_end
    first, a_end, end, random, chunk_key = (
        sentence[at], (sentence + a_count)[at], chunk_end[at], random[at], chunk_key[at]
    )  # fmt: skip
    if not two_sides:
        a_end = end
    label = random.astype(np.uint8)
    a_start, a_size = sentence_offsets[first], sentence_offsets[a_end] - sentence_offsets[first]
    b_start, b_size = sentence_offsets[a_end].copy(), sentence_offsets[end] - sentence_offsets[a_end]
    keep = np.ones(len(at), bool)
    if others is not None:
        which = np.flatnonzero(random)
        own = np.searchsorted(document_offsets, first[which], side="right") - 1
        wanted = np.maximum(target[at][which] - a_size[which], 1)
        begin, found = _random_sides(
            chunk_key[which], own, a_end[which], document_offsets, sentence_offsets, others, gather
        )
        reach = np.searchsorted(sentence_offsets, sentence_offsets[begin] + wanted)
        reach = np.minimum(reach, document_offsets[np.searchsorted(document_offsets, begin, side="right")])
        b_start[which] = sentence_offsets[begin]
        b_size[which] = sentence_offsets[reach] - b_start[which]
        keep[which] = found
    elif config.sentence_task == "sop":
        swap = (flag[at] < 0.5) & (b_size > 0)
        label = swap.astype(np.uint8)
        a_start, b_start = np.where(swap, b_start, a_start), np.where(swap, a_start, b_start)
        a_size, b_size = np.where(swap, b_size, a_size), np.where(swap, a_size, b_size)

    limit = np.where(b_size > 0, config.max_seq_length - 3, config.max_seq_length - 2)
    a_length, b_length = truncated_lengths(a_size, b_size, limit)
    a_start = a_start + _cut_from_front(a_size - a_length, chunk_key, 2)
    b_start = b_start + _cut_from_front(b_size - b_length, chunk_key, 3)
    return PairPlan(
        a_start[keep], a_length.astype(np.uint16)[keep], b_start[keep], b_length.astype(np.uint16)[keep], label[keep]
    )  # fmt: skip


def _walk(following: np.ndarray) -> np.ndarray:
    """The positions met from 0 on when each position leads to following[position], a later one."""
    steps, met, at = following.tolist(), [], 0
    end = len(steps)
    while at < end:
        met.append(at)
        at = steps[at]
    return np.array(met, np.int64)


class _OtherDocuments:
    """Draws, for a document, another one with a different text, each with the same chance.

    Documents are held in order of (source, text), so that those a document may not be paired with stand together and
    are stepped over: no drawing again, whatever the number of copies.
    """

    def __init__(
        self,
        sources: np.ndarray,
        hashes: np.ndarray,
        draw_from: Literal["corpus", "source"],
        source_names: list[str] | None,
    ) -> None:
        groups = np.asarray(sources, np.int64) if draw_from == "source" else np.zeros(len(hashes), np.int64)
        self.order = np.lexsort((np.arange(len(hashes)), hashes, groups))
        group, text = groups[self.order], np.asarray(hashes)[self.order]
        new_group = np.append(True, group[1:] != group[:-1])
        new_text = new_group | np.append(True, text[1:] != text[:-1])
        self.group_start, self.group_size = self._runs(new_group)
        self.copies_start, self.copies_size = self._runs(new_text)
        alone = np.flatnonzero(self.copies_size == self.group_size)
        if len(alone):
            if draw_from == "corpus":
                raise ConfigError(
                    f"next-sentence prediction draws second sides from another document, but there is no other text in "
                    f"the {len(hashes)} document(s) here; use more documents, or examples.sentence_task "
                    '"none" or "sop"'
                )
            number = int(sources[alone[0]])
            name = source_names[number] if source_names is not None else f"number {number}"
            raise ConfigError(
                f"next-sentence prediction draws second sides from another document of the same source, but the source "
                f'{name} has only one distinct document here; use examples.random_next_from = "corpus", or give that '
                "source more documents (or set examples.sentence_task)"
            )

    def _runs(self, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each document: where its run in the order starts, and how long the run is."""
        first = np.flatnonzero(new)
        size = np.diff(np.append(first, len(new)))
        run = np.cumsum(new) - 1
        start_of, size_of = np.empty(len(new), np.int64), np.empty(len(new), np.int64)
        start_of[self.order], size_of[self.order] = first[run], size[run]
        return start_of, size_of

    def draw(self, documents: np.ndarray, key: np.ndarray, attempt: int) -> np.ndarray:
        """For each document another one: int64."""
        at = self.group_start[documents] + randint(
            self.group_size[documents] - self.copies_size[documents], key, 4, attempt
        )
        return self.order[at + np.where(at >= self.copies_start[documents], self.copies_size[documents], 0)]


def _random_sides(
    key: np.ndarray,
    own: np.ndarray,
    true_next: np.ndarray,
    document_offsets: np.ndarray,
    sentence_offsets: np.ndarray,
    others: _OtherDocuments,
    gather: Gather,
) -> tuple[np.ndarray, np.ndarray]:
    """The sentence at which each random second side begins, and whether one was found.

    Args:
      own: the document of side A; true_next: the sentence after side A, which may be the next document's.
    """
    begin = np.zeros(len(own), np.int64)
    todo = np.arange(len(own))
    for attempt in range(REDRAWS):
        if not len(todo):
            break
        document = others.draw(own[todo], key[todo], attempt)
        first = document_offsets[document]
        begin[todo] = first + randint(document_offsets[document + 1] - first, key[todo], 5, attempt)
        has_next = true_next[todo] < document_offsets[own[todo] + 1]
        same = has_next & _same_sentence(begin[todo], np.where(has_next, true_next[todo], 0), sentence_offsets, gather)
        todo = todo[same]
    found = np.ones(len(own), bool)
    found[todo] = False
    return begin, found


def _same_sentence(one: np.ndarray, two: np.ndarray, sentence_offsets: np.ndarray, gather: Gather) -> np.ndarray:
    """Whether two sentences have the same ids; only those of equal length are read."""
    size = sentence_offsets[one + 1] - sentence_offsets[one]
    same = size == sentence_offsets[two + 1] - sentence_offsets[two]
    which = np.flatnonzero(same)
    if len(which):
        lengths = size[which]
        differ = gather(sentence_offsets[one[which]], lengths) != gather(sentence_offsets[two[which]], lengths)
        same[which] = np.add.reduceat(differ, np.cumsum(lengths) - lengths, dtype=np.int64) == 0
    return same


def truncated_lengths(a: np.ndarray, b: np.ndarray, limit: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths after one token at a time is taken from the longer side (from B when equal) until a + b <= limit."""
    too_long = a + b > limit
    a_cut = np.where(a <= b, np.minimum(a, (np.asarray(limit) + 1) // 2), limit - np.minimum(b, np.asarray(limit) // 2))
    return np.where(too_long, a_cut, a), np.where(too_long, limit - a_cut, b)


def _cut_from_front(cut: np.ndarray, key: np.ndarray, side: int) -> np.ndarray:
    """How many of `cut` tokens go from the front: one coin flip a token, bit j of the side's random bits for cut j."""
    front = np.zeros(len(cut), np.int64)
    todo, word = np.flatnonzero(cut > 0), 0
    while len(todo):
        left = np.minimum(cut[todo] - 64 * word, 64).astype(np.uint64)
        flips = bits(key[todo], side, word) & (np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - left))
        front[todo] += np.bitwise_count(flips)
        word += 1
        todo = todo[cut[todo] > 64 * word]
    return front


@functools.cache
def prediction_counts(config: ExamplesConfig) -> np.ndarray:
    """How many pieces of a sequence are predicted, by its length with [CLS] and [SEP]: int64 [max_seq_length + 1].

    As in the 2018 code: masked_lm_prob of all tokens, rounded, at least 1, at most the limit. A probability of 0 gives
    none. Sequences too short for that many give all their pieces (see `numbers_to_predict`). Where nothing is masked,
    every piece is predicted.
    """
    if config.objective != "masked":
        return np.arange(config.max_seq_length + 1)
    if config.masked_lm_prob == 0:
        return np.zeros(config.max_seq_length + 1, np.int64)
    limit = max_predictions(config)
    return np.array([min(limit, max(1, round(n * config.masked_lm_prob))) for n in range(config.max_seq_length + 1)])


def numbers_to_predict(plan: PairPlan, config: ExamplesConfig) -> np.ndarray:
    """How many pieces of each pair are predicted (at most, for whole words and spans): int64 [pairs]."""
    content = plan.a_length.astype(np.int64) + plan.b_length
    return np.minimum(prediction_counts(config)[plan.lengths], content)
