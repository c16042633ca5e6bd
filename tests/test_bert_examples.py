"""Sentence pairs against a slow, plain account of the same rules; masking by its counts."""

import dataclasses
import math
import zlib
from typing import Any

import numpy as np
import pytest

from bert_jax import examples
from bert_jax.config import BertConfig, ExamplesConfig
from bert_jax.examples import PairPlan, check, plan_pairs, truncated_lengths
from transformer_jax.config import ConfigError, UserError
from transformer_jax.inputs import bits, derive_key, randint, uniform

Documents = list[list[list[int]]]


class Corpus:
    """Documents (lists of sentences of ids) laid out flat, as shards hold them."""

    def __init__(self, documents: Documents, sources: list[int] | None = None) -> None:
        self.documents = documents
        sentences = [s for d in documents for s in d]
        self.tokens = np.array([t for s in sentences for t in s], np.int32)
        self.sentence_offsets = np.cumsum([0] + [len(s) for s in sentences])
        self.document_offsets = np.cumsum([0] + [len(d) for d in documents])
        self.sources = np.array(sources or [0] * len(documents), np.uint16)
        self.hashes = np.array([zlib.crc32(str(d).encode()) for d in documents], np.uint64)

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.concatenate([self.tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)])

    def plan(self, config: ExamplesConfig, seed: int = 0, **kwargs: Any) -> PairPlan:
        return plan_pairs(
            derive_key(seed, "pairs", 0),
            self.document_offsets,
            self.sentence_offsets,
            self.sources,
            self.hashes,
            config,
            self.gather,
            [f"file{i}.txt" for i in range(9)],
            **kwargs,
        )

    def document_of(self, token: int) -> int:
        sentence = int(np.searchsorted(self.sentence_offsets, token, side="right")) - 1
        return int(np.searchsorted(self.document_offsets, sentence, side="right")) - 1


def random_corpus(seed: int, documents: int = 30, longest: int = 12, longest_sentence: int = 20) -> Corpus:
    rng = np.random.default_rng(seed)
    out: Documents = [
        [list(rng.integers(10, 60, rng.integers(1, longest_sentence))) for _ in range(rng.integers(1, longest + 1))]
        for _ in range(documents)
    ]
    out = [[[int(t) for t in s] for s in d] for d in out]
    out[3] = out[7]  # copies, and a document that is the beginning of another
    out[5] = out[7]
    out[9] = out[10][:1]
    return Corpus(out, [int(s) for s in rng.integers(0, 2, documents)])


def pairs_the_slow_way(corpus: Corpus, config: ExamplesConfig, seed: int) -> list[tuple[list[int], list[int], int]]:
    """The rules of `plan_pairs` a sentence and a token at a time, with the same draws: (side A, side B, label)."""
    key = derive_key(seed, "pairs", 0)
    documents, sentence_number, out = corpus.documents, 0, []
    room = config.max_seq_length - (2 if config.sentence_task == "none" else 3)

    def one(array: np.ndarray) -> Any:
        return array.item()

    def other_documents(own: int) -> list[int]:
        """All documents that may stand beside `own`, in order of source, text and number."""
        same_source = config.random_next_from == "source"
        order = sorted(
            range(len(documents)),
            key=lambda d: (int(corpus.sources[d]) if same_source else 0, int(corpus.hashes[d]), d),
        )
        return [
            d
            for d in order
            if corpus.hashes[d] != corpus.hashes[own] and (not same_source or corpus.sources[d] == corpus.sources[own])
        ]

    def truncate(a: list[int], b: list[int], limit: int, chunk_key: np.ndarray) -> None:
        cuts = {2: 0, 3: 0}
        while len(a) + len(b) > limit:
            side, longer = (2, a) if len(a) > len(b) else (3, b)
            word, bit = divmod(cuts[side], 64)
            from_front = (one(bits(chunk_key, side, word)) >> bit) & 1
            del longer[0 if from_front else -1]
            cuts[side] += 1

    for number, document in enumerate(documents):
        first_sentence = sentence_number
        sentence_number += len(document)
        target = room
        if one(uniform(key, number, 0)) < config.short_seq_prob:
            target = 2 + one(randint(room - 1, key, number, 1))
        start = i = 0
        length = 0
        while i < len(document):
            length += len(document[i])
            if i < len(document) - 1 and length < target:
                i += 1
                continue
            chunk = document[start : i + 1]
            chunk_key = bits(derive_key(int(key), "chunks"), first_sentence + start)
            a_end = 1 + one(randint(len(chunk) - 1, chunk_key, 0)) if len(chunk) > 1 else 1
            flag = one(uniform(chunk_key, 1))
            a = [t for s in chunk[:a_end] for t in s]
            b = [t for s in chunk[a_end:] for t in s]
            label, follow, good = 0, i + 1, True
            if config.sentence_task == "none":
                a, b = a + b, []
            elif config.sentence_task == "sop":
                if b and flag < 0.5:
                    a, b, label = b, a, 1
            elif len(chunk) == 1 or flag < config.random_next_prob:
                label, follow, good = 1, start + a_end, False
                others = other_documents(number)
                true_next = document[start + a_end] if start + a_end < len(document) else None
                for attempt in range(16):
                    other = documents[others[one(randint(len(others), chunk_key, 4, attempt))]]
                    begin = one(randint(len(other), chunk_key, 5, attempt))
                    if other[begin] != true_next:
                        good = True
                        break
                b = []
                for sentence in other[begin:]:
                    b = b + sentence
                    if len(b) >= target - len(a):
                        break
            truncate(a, b, config.max_seq_length - (3 if b else 2), chunk_key)
            if good:
                out.append((a, b, label))
            start = i = follow
            length = 0
    return out


def as_text(corpus: Corpus, plan: PairPlan) -> list[tuple[list[int], list[int], int]]:
    return [
        (list(corpus.tokens[a : a + n]), list(corpus.tokens[b : b + m]) if m else [], int(label))
        for a, n, b, m, label in zip(*(column.astype(int) for column in plan), strict=True)
    ]


CONFIGS = [
    ExamplesConfig(max_seq_length=32),
    ExamplesConfig(max_seq_length=9, short_seq_prob=0.5),
    ExamplesConfig(max_seq_length=128, random_next_prob=0.2),
    ExamplesConfig(max_seq_length=64, random_next_from="source", short_seq_prob=0.3),
    ExamplesConfig(max_seq_length=40, sentence_task="sop"),
    ExamplesConfig(max_seq_length=40, sentence_task="none", short_seq_prob=0.3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_those_of_the_rules_followed_step_by_step(config: ExamplesConfig, seed: int) -> None:
    corpus = random_corpus(seed)
    plan = corpus.plan(config, seed)
    assert as_text(corpus, plan) == pairs_the_slow_way(corpus, config, seed)


@pytest.mark.slow
@pytest.mark.parametrize("max_seq_length", [9, 40])
def test_sentences_longer_than_the_target_become_single_chunks_and_are_cut(max_seq_length: int) -> None:
    corpus = random_corpus(1, documents=12, longest=4, longest_sentence=400)
    config = ExamplesConfig(max_seq_length=max_seq_length)
    plan = corpus.plan(config)
    assert as_text(corpus, plan) == pairs_the_slow_way(corpus, config, 0)
    assert plan.lengths.max() == max_seq_length


def test_the_plan_does_not_depend_on_the_size_of_blocks() -> None:
    corpus = random_corpus(2)
    config = ExamplesConfig(max_seq_length=32)
    whole = corpus.plan(config)
    for size in (1, 7, 100):
        for a, b in zip(whole, corpus.plan(config, sentences_per_block=size), strict=True):
            assert (a == b).all() and a.dtype == b.dtype


def test_draws_differ_by_seed_and_repeat_for_the_same_seed() -> None:
    corpus = random_corpus(2)
    config = ExamplesConfig(max_seq_length=32)
    assert as_text(corpus, corpus.plan(config, 1)) == as_text(corpus, corpus.plan(config, 1))
    assert as_text(corpus, corpus.plan(config, 1)) != as_text(corpus, corpus.plan(config, 2))


def test_about_half_of_the_pairs_are_random_and_labels_say_which() -> None:
    """C073: 0 = is next, 1 = random."""
    rng = np.random.default_rng(0)
    corpus = Corpus([[[int(t) for t in rng.integers(10, 999, 6)] for _ in range(60)] for _ in range(40)])
    plan = corpus.plan(ExamplesConfig(max_seq_length=64, short_seq_prob=0.0))
    assert abs(plan.label.mean() - 0.5) < 0.06
    for a, n, b, _, label in zip(*(column.astype(int) for column in plan), strict=True):
        if label == 0:
            assert corpus.document_of(a) == corpus.document_of(b)
            assert b - (a + n) < 64  # only truncation stands between the sides
        else:
            assert corpus.document_of(a) != corpus.document_of(b)


def test_one_document_is_refused_and_never_hangs() -> None:
    """C018."""
    corpus = Corpus([[[11], [12, 13], [14, 15, 16]]])
    with pytest.raises(ConfigError, match="no other text in the 1 document"):
        corpus.plan(ExamplesConfig())
    copies = Corpus([[[11], [12]]] * 4)
    with pytest.raises(ConfigError, match="no other text in the 4 document"):
        copies.plan(ExamplesConfig())
    assert len(corpus.plan(ExamplesConfig(sentence_task="none")).label) == 1


def test_a_source_with_one_text_is_named_when_sides_come_from_the_source() -> None:
    """C018."""
    corpus = Corpus([[[11], [12]], [[13]], [[14]], [[14]]], [0, 0, 1, 1])
    with pytest.raises(ConfigError, match=r'source file1.txt has only one .*random_next_from = "corpus"'):
        corpus.plan(ExamplesConfig(random_next_from="source"))
    assert len(corpus.plan(ExamplesConfig())) > 0


@pytest.mark.slow
def test_no_true_next_sentence_is_ever_labelled_random() -> None:
    """C018: over 1,000 seeds, in a corpus where documents share their sentences."""
    hello, sawyer, how = [11, 12], [13, 14], [15, 16, 17]
    corpus = Corpus([[hello, sawyer, how], [hello, sawyer], [sawyer, how, how]])
    config = ExamplesConfig(max_seq_length=32)  # long enough that nothing is truncated
    document_ends = corpus.sentence_offsets[corpus.document_offsets[1:]]
    labels = set()
    for seed in range(1000):
        for start, a, other, b, label in zip(*(column.tolist() for column in corpus.plan(config, seed)), strict=True):
            labels.add(label)
            after = start + a
            if label == 1 and after < document_ends[corpus.document_of(start)]:
                end = corpus.sentence_offsets[np.searchsorted(corpus.sentence_offsets, after, side="right")]
                true_next = corpus.tokens[after:end]
                assert list(corpus.tokens[other : other + b][: len(true_next)]) != list(true_next)
    assert labels == {0, 1}


@pytest.mark.slow
def test_random_sides_come_from_every_other_document_alike() -> None:
    documents = [[[100 + d, 50]] for d in range(6)]
    documents[4] = documents[2]
    corpus = Corpus(documents, [0, 0, 0, 0, 0, 1])
    counts = np.zeros((6, 6), int)
    for seed in range(1500):
        plan = corpus.plan(ExamplesConfig(max_seq_length=8), seed)
        for a, b in zip(plan.a_start, plan.b_start, strict=True):
            counts[corpus.document_of(int(a)), corpus.document_of(int(b))] += 1
    assert (counts.sum(1) == 1500).all()
    for a in range(6):
        allowed = [b for b in range(6) if documents[b] != documents[a]]
        assert counts[a].sum() == counts[a, allowed].sum()
        expected = 1500 / len(allowed)
        assert abs(counts[a, allowed] - expected).max() < 5 * math.sqrt(expected)


def test_swapped_and_single_sentences_in_sentence_order_prediction() -> None:
    corpus = random_corpus(3, documents=60)
    plan = corpus.plan(ExamplesConfig(max_seq_length=64, sentence_task="sop"))
    two = plan.b_length > 0
    assert 0.3 < plan.label[two].mean() < 0.7
    assert ((plan.a_start > plan.b_start) == (plan.label == 1))[two].all()
    assert (plan.label[~two] == 0).all() and (~two).any()


def test_nothing_is_left_out_when_there_is_no_sentence_task() -> None:
    """C089: a document shorter than a sequence still gives an example."""
    corpus = random_corpus(4, longest_sentence=10)
    plan = corpus.plan(ExamplesConfig(max_seq_length=128, sentence_task="none", short_seq_prob=0.0))
    assert (plan.b_length == 0).all()
    assert plan.a_length.sum() >= 0.97 * len(corpus.tokens)
    one_line = Corpus([[[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]])
    assert list(one_line.plan(ExamplesConfig(sentence_task="none")).lengths) == [12]


def test_no_documents_is_an_error() -> None:
    """C089."""
    with pytest.raises(UserError, match="no documents"):
        Corpus([]).plan(ExamplesConfig(sentence_task="none"))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(60, 65, (60, 65)), (61, 65, (61, 64)), (1, 200, (1, 124)), (200, 1, (124, 1)), (125, 0, (125, 0))],
)
def test_nothing_is_cut_at_the_maximum_and_the_longer_side_above_it(a: int, b: int, expected: tuple[int, int]) -> None:
    """C054: 125 pieces and three control tokens make 128."""
    got = truncated_lengths(np.array([a]), np.array([b]), 125)
    assert (int(got[0][0]), int(got[1][0])) == expected


@pytest.mark.parametrize("limit", [5, 6, 13])
def test_truncation_is_that_of_one_token_at_a_time(limit: int) -> None:
    a, b = (x.ravel() for x in np.meshgrid(np.arange(1, 25), np.arange(1, 25)))
    got_a, got_b = truncated_lengths(a, b, limit)
    for i in range(len(a)):
        left_a, left_b = int(a[i]), int(b[i])
        while left_a + left_b > limit:
            if left_a > left_b:
                left_a -= 1
            else:
                left_b -= 1
        assert (got_a[i], got_b[i]) == (left_a, left_b)


def test_cuts_are_shared_between_front_and_back() -> None:
    keys = bits(derive_key(0, "cut"), np.arange(4000))
    front = examples._cut_from_front(np.full(4000, 150), keys, 2)
    assert abs(front.mean() - 75) < 1 and abs(front.var() - 37.5) < 4  # 150 coin flips


def test_number_of_predictions_is_that_of_the_2018_code() -> None:
    config = ExamplesConfig(max_seq_length=128)
    counts = examples.prediction_counts(config)
    assert (examples.max_predictions(config), examples.max_sequences(config)) == (20, 8)
    assert examples.max_predictions(ExamplesConfig(max_seq_length=512)) == 80
    assert [int(counts[n]) for n in (3, 10, 11, 23, 24, 128)] == [1, 2, 2, 3, 4, 19]
    assert not examples.prediction_counts(dataclasses.replace(config, masked_lm_prob=0.0)).any()
    assert examples.prediction_counts(dataclasses.replace(config, max_predictions_per_row=5)).max() == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_length": 129}, "129, but the model has 128 positions; lower"),
        ({"max_seq_length": 7}, "at least 8"),
        ({"masked_lm_prob": 1.5}, r"masked_lm_prob is 1\.5; it must be between 0 and 1"),
        ({"mask_share": 0.95}, "more than 1"),
        ({"dupe_factor": -1}, "dupe_factor is -1"),
        ({"pack": False, "max_sequences_per_row": 4}, "pack is false"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    """C014 for pretraining, before anything is read."""
    model = BertConfig(max_position_embeddings=128)
    check(ExamplesConfig(max_seq_length=128), model)
    with pytest.raises(ConfigError, match=message):
        check(dataclasses.replace(ExamplesConfig(), **change), model)


def test_pairs_need_two_token_types() -> None:
    with pytest.raises(ConfigError, match="type_vocab_size is 1"):
        check(ExamplesConfig(), BertConfig(type_vocab_size=1))
    check(ExamplesConfig(sentence_task="none"), BertConfig(type_vocab_size=1))
