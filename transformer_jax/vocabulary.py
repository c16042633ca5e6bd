"""Training a WordPiece vocabulary: the same one every time, for any number of workers and any order of sentences."""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers

from transformer_jax import scripts
from transformer_jax.config import UserError
from transformer_jax.tokenizer import CONTROL_TOKENS, PREFIX, UNIT, UNIT_HAN, WordPiece, any_of, chunks_of
from transformer_jax.tokenizer_config import WordPieceConfig

log = logging.getLogger(__name__)

BLOCK_CHARS = 1 << 20
"""Characters of text counted as one block. Blocks, not workers, decide what is pruned."""
MAX_WORDS = 2_000_000
"""Most distinct words (and white-space chunks of a block) kept while counting; about 300 MB."""


def train_wordpiece(texts: Iterable[str], config: WordPieceConfig, workers: int = 1) -> WordPiece:
    """Learn a vocabulary from `texts`, which are read once.

    Words are counted, then the pair of neighbouring pieces that occurs most often becomes a piece, again and again
    (byte-pair merges on BERT's words, as other open WordPiece trainers do; the 2018 trainer was never published). Ties
    go to the pair that comes first by code points, so the result depends on the texts alone: not on workers, versions
    of the library, or the order of any hash table.

    Ids: [PAD], [unused0] ... as many as `config.unused_tokens`, [UNK], [CLS], [SEP], [MASK] (with 99 unused ones these
    are the ids of BERT-base), `config.keep_tokens`, the alphabet, its ## forms, then pieces in the order learned.

    Memory is bounded by the table of words: above MAX_WORDS distinct ones, the rarest are forgotten, as many counts as
    it takes to halve the table. Words longer than max_input_chars_per_word are not learned from.

    Raises:
      UserError: no words at all, or a vocab_size too small for the control tokens and one character.
    """
    counts = count_words(texts, config, workers)
    if not counts:
        raise UserError("no words to learn a vocabulary from: the texts are empty")
    fixed = ["[PAD]", *(f"[unused{i}]" for i in range(config.unused_tokens)), *CONTROL_TOKENS[1:], *config.keep_tokens]
    room = config.vocab_size - len(fixed)
    if room < 2:
        raise UserError(
            f"vocab_size {config.vocab_size} is too small: {len(fixed)} control, unused and keep tokens leave no room"
        )
    taken = set(fixed)
    pieces = [p for p in learn_pieces(counts, config, room) if p not in taken]
    if len(pieces) < room:
        log.warning(
            "the texts give only %d pieces (each seen at least %d times): the vocabulary has %d entries, not the %d "
            "asked for; use more text, or lower tokenizer.vocab_size or tokenizer.min_frequency",
            len(pieces), config.min_frequency, len(fixed) + len(pieces), config.vocab_size,
        )  # fmt: skip
    return WordPiece(fixed + pieces, config)


def count_words(texts: Iterable[str], config: WordPieceConfig, workers: int = 1) -> dict[str, int]:
    """How often each of BERT's words occurs, at most MAX_WORDS of them; the same for any number of workers."""
    total: collections.Counter[str] = collections.Counter()
    for counts in _map_blocks(_Counting(config), _blocks(texts), workers):
        total.update(counts)
        if len(total) > MAX_WORDS:
            total = _prune(total, MAX_WORDS // 2)
    return total


def learn_pieces(counts: Mapping[str, int], config: WordPieceConfig, room: int) -> list[str]:
    """At most `room` pieces: the alphabet, its ## forms, and merges by count. Pure and free of hash order."""
    seen: collections.Counter[str] = collections.Counter()
    for word, n in counts.items():
        for char in word:
            seen[char] += n
    order = sorted((c for c in seen if seen[c] >= config.min_frequency), key=lambda c: (-seen[c], c))
    alone = _standing_alone(order, config)
    if config.limit_alphabet:
        order = order[: config.limit_alphabet]
    places = [1 if c in alone else 2 for c in order]
    most = room if config.limit_alphabet else max(room // 3, 2)
    while True:
        alphabet = [c for c, used in zip(order, itertools.accumulate(places), strict=True) if used <= most]
        found = _learn(counts, config, room, alphabet, alone)
        if len(found) >= room - 1 or len(alphabet) == len(order):
            return found
        most += room - len(found)  # what merges leave free, as in Chinese, goes to rarer characters


def _learn(
    counts: Mapping[str, int], config: WordPieceConfig, room: int, alphabet: list[str], alone: set[str]
) -> list[str]:
    pieces = sorted(alphabet) + sorted(PREFIX + c for c in alphabet if c not in alone)
    known = set(alphabet)
    spelled = sorted(w for w in counts if known.issuperset(w))
    return pieces + _merges(
        spelled, [counts[w] for w in spelled], set(pieces), room - len(pieces), config.min_frequency
    )


def _standing_alone(chars: Iterable[str], config: WordPieceConfig) -> set[str]:
    """Those of `chars` that BERT cuts off on both sides (punctuation, Han), so that they need no ## form."""
    cut = _Counting(config)
    return {c for c in chars if len(cut.words(f"a{c}a")) != 1}


def _merges(words: list[str], counts: list[int], known: set[str], room: int, min_frequency: int) -> list[str]:
    """Byte-pair merges over `words`; each word is a list of symbols, which are places in `names`."""
    names: list[str] = []
    number: dict[str, int] = {}

    def symbol(name: str) -> int:
        if name not in number:
            number[name] = len(names)
            names.append(name)
        return number[name]

    split = [[symbol(c if i == 0 else PREFIX + c) for i, c in enumerate(w)] for w in words]
    pairs: dict[tuple[int, int], int] = collections.defaultdict(int)
    where: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
    for w, symbols in enumerate(split):
        for pair in itertools.pairwise(symbols):
            pairs[pair] += counts[w]
            where[pair].add(w)

    def entry(pair: tuple[int, int], n: int) -> tuple[int, str, str, tuple[int, int]]:
        return -n, names[pair[0]], names[pair[1]], pair

    heap = [entry(pair, n) for pair, n in pairs.items() if n >= min_frequency]
    heapq.heapify(heap)
    found: list[str] = []
    while heap and len(found) < room:
        minus, _, _, pair = heapq.heappop(heap)
        n = pairs.get(pair, 0)
        if n != -minus:  # an old entry: its count has changed since
            if n >= min_frequency and n < -minus:
                heapq.heappush(heap, entry(pair, n))
            continue
        a, b = pair
        merged = names[a] + names[b].removeprefix(PREFIX)
        new = symbol(merged)
        if merged not in known:
            known.add(merged)
            found.append(merged)
        grown: set[tuple[int, int]] = set()
        for w in where.pop(pair):
            split[w] = _merge_in_word(split[w], a, b, new, w, counts[w], pairs, where, grown)
        del pairs[pair]
        for p in grown:
            if p in pairs and pairs[p] >= min_frequency:
                heapq.heappush(heap, entry(p, pairs[p]))
    return found


def _merge_in_word(
    symbols: list[int],
    a: int,
    b: int,
    new: int,
    word: int,
    count: int,
    pairs: dict[tuple[int, int], int],
    where: dict[tuple[int, int], set[int]],
    grown: set[tuple[int, int]],
) -> list[int]:
    """`symbols` with each a b replaced by new; `pairs`, `where` and `grown` are brought up to date."""
    out: list[int] = []
    i, last = 0, len(symbols) - 1
    while i <= last:
        if i < last and symbols[i] == a and symbols[i + 1] == b:
            if out:
                pairs[out[-1], a] -= count
                pair = (out[-1], new)
                pairs[pair] += count
                where[pair].add(word)
                grown.add(pair)
            if i + 1 < last:
                pairs[b, symbols[i + 2]] -= count
                pair = (new, symbols[i + 2])
                pairs[pair] += count
                where[pair].add(word)
                grown.add(pair)
            out.append(new)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def _prune(counts: collections.Counter[str], most: int) -> collections.Counter[str]:
    """Without its rarest words: the least threshold that leaves at most `most` of them."""
    by_count = collections.Counter(counts.values())
    left, threshold = len(counts), 0
    while left > most:
        threshold += 1
        left -= by_count[threshold]
    return collections.Counter({w: n for w, n in counts.items() if n > threshold})


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text) + 1
        if size >= BLOCK_CHARS:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Counting:
    """Counts BERT's words in a block of texts; picklable, so that it can run in a worker."""

    def __init__(self, config: WordPieceConfig) -> None:
        self.config = config
        self._cuts = scripts.pre_splitter(config.pre_splitter) if config.pre_splitter else None
        self._keep = any_of(config.keep_tokens)
        self._normalizer = tokenizers.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.tokenize_chinese_chars,
            strip_accents=config.strip_accents,
            lowercase=config.lowercase,
        )
        self._splitter = tokenizers.pre_tokenizers.BertPreTokenizer()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counting, (self.config,)

    def words(self, chunk: str) -> list[str]:
        """BERT's words in a piece of text."""
        if chunk.isascii() and chunk.isalnum():
            return [chunk.lower()] if self.config.lowercase else [chunk]
        return [word for word, _ in self._splitter.pre_tokenize_str(self._normalizer.normalize_str(chunk))]

    def __call__(self, block: list[str]) -> dict[str, int]:
        split = UNIT_HAN.findall if self.config.tokenize_chinese_chars else UNIT.findall
        chunks: collections.Counter[str] = collections.Counter()
        for text in block:
            if self._keep:
                text = self._keep.sub(" ", text)
            if self._cuts:
                text = scripts.insert_spaces(text, self._cuts(text))
            chunks.update(chunks_of(text) if text.isascii() else split(text))
        counts: dict[str, int] = collections.defaultdict(int)
        longest = self.config.max_input_chars_per_word
        for chunk, n in chunks.items():
            for word in self.words(chunk):
                if len(word) <= longest:
                    counts[word] += n
        return dict(counts)


def _map_blocks(function: _Counting, blocks: Iterator[list[str]], workers: int) -> Iterator[dict[str, int]]:
    """`function` of each block, in order; at most two blocks a worker wait in memory."""
    first = list(itertools.islice(blocks, 2))
    if workers <= 1 or len(first) < 2:
        for block in itertools.chain(first, blocks):
            yield function(block)
        return
    # A fresh process, not a copy of this one: a process that has started JAX must not be forked.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for block in itertools.chain(first, blocks):
            waiting.append(pool.apply_async(function, (block,)))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()
