"""Batches: a packed row one can check by hand, resuming, evaluation, and the cache of plans."""

import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_jax import data, plans
from bert_jax.config import ExamplesConfig
from bert_jax.data import EvaluationData, Maker, PretrainingData
from bert_jax.examples import PairPlan, numbers_to_predict
from bert_jax.plans import Plan
from transformer_jax.config import ConfigError, UserError
from transformer_jax.inputs import Packing, derive_key
from transformer_jax.shards import Shards, write_prepared
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig

Documents = list[list[list[int]]]
CONTROL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(80)]
PIECES = [f"##x{i}" for i in range(15)]
NO_MASKS = ExamplesConfig(max_seq_length=16, masked_lm_prob=0.0, max_sequences_per_row=3)


def tokenizer(vocab: list[str] | None = None) -> WordPiece:
    return WordPiece(vocab or CONTROL + WORDS + PIECES, WordPieceConfig())


def documents(seed: int = 0, count: int = 25, longest_sentence: int = 12) -> Documents:
    rng = np.random.default_rng(seed)
    return [
        [[int(t) for t in rng.integers(5, 100, rng.integers(1, longest_sentence))] for _ in range(rng.integers(2, 15))]
        for _ in range(count)
    ]


def prepared(folder: Path, docs: Documents | None = None, split: str = "train", **kwargs: Any) -> Shards:
    made_with = kwargs.pop("tokenizer", None) or tokenizer()
    write_prepared(folder / "prepared", made_with, {split: docs or documents()}, **kwargs)
    return Shards.open(folder / "prepared", split)


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    return prepared(tmp_path, documents_per_shard=7)


def equal(one: data.Batch, two: data.Batch) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[k], two[k]) for k in one)


def joined(batches: list[data.Batch]) -> data.Batch:
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0] if k != "row_ids"}


def unmasked(batch: data.Batch) -> np.ndarray:
    """input_ids with every prediction's piece put back."""
    ids = batch["input_ids"].copy()
    rows, slots = np.nonzero(batch["masked_lm_weights"])
    ids[rows, batch["masked_lm_positions"][rows, slots]] = batch["masked_lm_ids"][rows, slots]
    return ids


def sequences(batch: data.Batch) -> list[tuple[tuple[int, ...], ...]]:
    """Each sequence of a batch as (ids, types, positions, predicted pieces), wherever it stands."""
    out = []
    for row in range(len(batch["input_ids"])):
        for number in range(1, batch["sequence_ids"][row].max() + 1):
            at = np.flatnonzero(batch["sequence_ids"][row] == number)
            live = batch["masked_lm_weights"][row] > 0
            here = live & np.isin(batch["masked_lm_positions"][row], at)
            picked = zip(
                batch["masked_lm_positions"][row][here] - at[0], batch["masked_lm_ids"][row][here], strict=True
            )
            columns = [batch[k][row][at] for k in ("input_ids", "token_type_ids", "position_ids")]
            out.append((*(tuple(c.tolist()) for c in columns), tuple((int(p), int(i)) for p, i in picked)))
    return out


def test_a_packed_row_as_one_would_write_it(tmp_path: Path) -> None:
    """Three pairs in two rows. Text: document 0 is 11 12 | 13 14 15, document 1 is 21 | 22 23; [CLS] 2, [SEP] 3."""
    shards = prepared(tmp_path, [[[11, 12], [13, 14, 15]], [[21], [22, 23]]])
    pairs = PairPlan(
        a_start=np.array([0, 5, 3]),
        a_length=np.array([2, 1, 2], np.uint16),
        b_start=np.array([2, 6, 0]),
        b_length=np.array([3, 2, 0], np.uint16),
        label=np.array([1, 0, 0], np.uint8),
    )
    plan = Plan(pairs, Packing(np.array([0, 2, 3]), np.array([0, 1, 2])))
    batch = Maker(shards, NO_MASKS).rows(plan, derive_key(0, "masks", 0), np.array([0, 1]))
    assert batch["input_ids"].tolist() == [
        [2, 11, 12, 3, 13, 14, 15, 3, 2, 21, 3, 22, 23, 3, 0, 0],
        [2, 14, 15, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["sequence_ids"].tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["cls_positions"].tolist() == [[0, 8, 0], [0, 0, 0]]
    assert batch["next_sentence_labels"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert batch["next_sentence_weights"].tolist() == [[1, 1, 0], [0, 0, 0]]  # a single side has no label
    assert not batch["masked_lm_weights"].any()
    swapped = Maker(shards, NO_MASKS).rows(plan, derive_key(0, "masks", 0), np.array([1, 0]))
    assert swapped["input_ids"].tolist() == batch["input_ids"].tolist()[::-1]


def test_shapes_and_dtypes_are_those_of_the_contract(shards: Shards) -> None:
    batch = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 0).batch(0, 6, offset=12)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "input_ids": ((6, 32), "int32"),
        "token_type_ids": ((6, 32), "int32"),
        "position_ids": ((6, 32), "int32"),
        "sequence_ids": ((6, 32), "int32"),
        "masked_lm_positions": ((6, 8), "int32"),
        "masked_lm_ids": ((6, 8), "int32"),
        "masked_lm_weights": ((6, 8), "float32"),
        "cls_positions": ((6, 2), "int32"),
        "next_sentence_labels": ((6, 2), "int32"),
        "next_sentence_weights": ((6, 2), "float32"),
        "row_ids": ((6,), "int32"),
    }
    assert batch["row_ids"].tolist() == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("unit", ["token", "whole_word", "span"])
@pytest.mark.parametrize("pack", [True, False])
def test_masks_fall_on_text_only_and_put_back_give_the_text(shards: Shards, unit: Any, pack: bool) -> None:
    """C050: no control token and no padding is ever picked, and no position twice."""
    config = ExamplesConfig(max_seq_length=32, masking_unit=unit, pack=pack)
    stream = PretrainingData(shards, config, 0)
    total = stream.num_rows(0)
    batch = stream.batch(0, total)
    plain = PretrainingData(shards, dataclasses.replace(config, masked_lm_prob=0.0, max_predictions_per_row=8), 0)
    if not pack:  # with packing, numbers of predictions decide who shares a row
        assert (unmasked(batch) == plain.batch(0, total)["input_ids"]).all()
    rows, slots = np.nonzero(batch["masked_lm_weights"])
    positions = batch["masked_lm_positions"][rows, slots]
    assert (batch["masked_lm_ids"][rows, slots] >= 5).all()
    assert (batch["sequence_ids"][rows, positions] > 0).all()
    assert len({(r, p) for r, p in zip(rows, positions, strict=True)}) == len(rows)
    text = unmasked(batch)
    for row in range(total):
        for number in range(1, batch["sequence_ids"][row].max() + 1):
            at = batch["sequence_ids"][row] == number
            ids, types = text[row][at], batch["token_type_ids"][row][at]
            assert ids[0] == 2 and ids[-1] == 3 and (ids == 2).sum() == 1
            if number <= 2 and batch["next_sentence_weights"][row, number - 1]:
                assert (ids == 3).sum() == 2 and ids[types == 0][-1] == 3 and ids[types == 1][-1] == 3
            assert batch["position_ids"][row][at].tolist() == list(range(at.sum()))


def test_no_chosen_mask_and_no_label_is_dropped_by_packing(shards: Shards) -> None:
    config = ExamplesConfig(max_seq_length=32, max_predictions_per_row=5, max_sequences_per_row=3, short_seq_prob=0.6)
    stream = PretrainingData(shards, config, 0)
    plan = plans.make_plan(shards, config, 0, 0)
    batch = stream.batch(0, stream.num_rows(0))
    assert batch["masked_lm_weights"].sum() == numbers_to_predict(plan.pairs, config).sum()
    assert batch["next_sentence_weights"].sum() == len(plan.pairs.label)
    assert (batch["next_sentence_labels"] * batch["next_sentence_weights"]).sum() == plan.pairs.label.sum()
    assert (batch["next_sentence_weights"].sum(1) == batch["sequence_ids"].max(1)).all()
    labelled = batch["next_sentence_weights"] > 0
    assert (np.take_along_axis(unmasked(batch), batch["cls_positions"], 1)[labelled] == 2).all()


def test_masks_belong_to_the_pair_and_not_to_its_row(shards: Shards) -> None:
    packed = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 5)
    alone = PretrainingData(shards, ExamplesConfig(max_seq_length=32, pack=False), 5)
    assert packed.num_rows(0) < alone.num_rows(0)
    assert sorted(sequences(packed.batch(0, packed.num_rows(0)))) == sorted(
        sequences(alone.batch(0, alone.num_rows(0)))
    )


def test_padding_is_told_by_lengths_and_not_by_an_id(tmp_path: Path) -> None:
    """C030: [PAD] has id 5 and id 0 is a word; the text is made of that word."""
    vocab = ["word", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "other", "##s"]
    shards = prepared(tmp_path, [[[0, 0, 0], [0, 0]], [[0, 6, 0]]], tokenizer=tokenizer(vocab))
    config = ExamplesConfig(max_seq_length=16, masked_lm_prob=0.0)
    stream = PretrainingData(shards, config, 0)
    plan = plans.make_plan(shards, config, 0, 0)
    batch = stream.batch(0, stream.num_rows(0))
    real = batch["sequence_ids"] > 0
    assert real.sum() == plan.pairs.lengths.sum()
    assert (batch["input_ids"][~real] == 5).all() and (batch["input_ids"][real] != 5).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [ExamplesConfig(max_seq_length=32), ExamplesConfig(max_seq_length=32, dupe_factor=2)]
)
def test_the_stream_is_the_same_however_it_is_cut(shards: Shards, config: ExamplesConfig) -> None:
    """C043, C026: batches of any size, over the ends of epochs, and hosts that read their shares of them."""
    stream = PretrainingData(shards, config, 3)
    total = stream.num_rows(0) + stream.num_rows(1) + 10
    whole = joined([stream.batch(0, total)])
    for size in (1, 7, 64):
        cuts = range(0, total, size)
        fresh = PretrainingData(shards, config, 3)
        assert equal(joined([fresh.batch(first, min(size, total - first)) for first in cuts]), whole)
    for hosts in (4, 7):
        parts = [
            PretrainingData(shards, config, 3).batch(28 // hosts * h, 28 // hosts, 28 // hosts * h)
            for h in range(hosts)
        ]
        together = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        assert equal(together, stream.batch(0, 28))


def test_any_step_can_be_made_first(shards: Shards) -> None:
    """C006: what comes after a resume is what would have come without a stop."""
    straight = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 1)
    batches = [straight.batch(step * 16, 16) for step in range(12)]
    ids = [straight.example_ids(step * 16, 16).tolist() for step in range(12)]
    for stop in (1, 5, 11):
        resumed = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 1)
        for step in range(stop, 12):
            assert equal(resumed.batch(step * 16, 16), batches[step])
            assert resumed.example_ids(step * 16, 16).tolist() == ids[step]


def test_a_resume_plans_no_epoch_that_is_over(shards: Shards, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ExamplesConfig(max_seq_length=32)
    straight = PretrainingData(shards, config, 1)
    row = sum(straight.num_rows(e) for e in range(3)) + 5
    place = straight.position(row)
    assert place == {"epoch": 3, "row_in_epoch": 5}
    planned = []
    make_plan = plans.make_plan

    def spy(shards: Shards, config: ExamplesConfig, seed: int, draw: int) -> Plan:
        planned.append(draw)
        return make_plan(shards, config, seed, draw)

    monkeypatch.setattr(plans, "make_plan", spy)
    resumed = PretrainingData(shards, config, 1)
    resumed.start_at(row, **place)
    assert equal(resumed.batch(row, 4), straight.batch(row, 4))
    assert planned == [3]
    assert resumed.position(2)["epoch"] == 0  # earlier rows can still be asked for


def test_each_pair_comes_once_an_epoch_in_a_new_order(shards: Shards) -> None:
    """C090."""
    stream = PretrainingData(shards, ExamplesConfig(max_seq_length=32, dupe_factor=1), 0)
    rows = stream.num_rows(0)
    first, second = stream.example_ids(0, rows), stream.example_ids(rows, rows) - (1 << 40)
    assert sorted(first) == sorted(second) == list(range(len(first)))
    assert first.tolist() != second.tolist()
    assert sequences(stream.batch(0, rows)) != sequences(stream.batch(rows, rows))
    assert sorted(sequences(stream.batch(0, rows))) == sorted(sequences(stream.batch(rows, rows)))  # frozen masks


def test_dynamic_data_draws_new_pairs_and_masks_in_each_epoch(shards: Shards) -> None:
    def epochs(dupe_factor: int) -> list[set[Any]]:
        stream = PretrainingData(shards, ExamplesConfig(max_seq_length=32, dupe_factor=dupe_factor), 0)
        first, out = 0, []
        for epoch in range(3):
            out.append(set(sequences(stream.batch(first, stream.num_rows(epoch)))))
            first += stream.num_rows(epoch)
        return out

    dynamic, static = epochs(0), epochs(2)
    assert len(dynamic[0] & dynamic[2]) < 0.2 * len(dynamic[0])
    assert static[0] == static[2] != static[1]
    assert static[:2] == dynamic[:2]  # static data is the same code frozen


def test_seed_settings_and_shards_go_into_the_fingerprint(shards: Shards, tmp_path: Path) -> None:
    config = ExamplesConfig(max_seq_length=32)
    other = prepared(tmp_path / "other", documents(seed=9))
    prints = {
        PretrainingData(shards, config, 0).fingerprint,
        PretrainingData(shards, config, 1).fingerprint,
        PretrainingData(shards, dataclasses.replace(config, masked_lm_prob=0.2), 0).fingerprint,
        PretrainingData(other, config, 0).fingerprint,
    }
    assert len(prints) == 4
    assert PretrainingData(shards, config, 0).fingerprint in prints


def test_a_second_start_reads_the_plan_from_the_cache(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExamplesConfig(max_seq_length=32)
    first = PretrainingData(shards, config, 0, tmp_path / "cache").batch(0, 16)
    monkeypatch.setattr(plans, "make_plan", None)  # would fail if called
    assert equal(PretrainingData(shards, config, 0, tmp_path / "cache").batch(0, 16), first)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "other", "nonsense"])
def test_a_damaged_or_wrong_cache_is_made_anew(shards: Shards, tmp_path: Path, damage: str) -> None:
    config = ExamplesConfig(max_seq_length=32)
    first = PretrainingData(shards, config, 0, tmp_path / "cache").batch(0, 16)
    (folder,) = (tmp_path / "cache").glob("plan-00000-*")
    file = folder / "a_start.npy"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "cut":
        file.write_bytes(content[:-8])
    elif damage == "missing":
        file.unlink()
    elif damage == "other":
        stated = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(stated | {"digest": "0" * 64}))
    else:
        (folder / "plan.json").write_text("[]")
    assert equal(PretrainingData(shards, config, 0, tmp_path / "cache").batch(0, 16), first)
    assert file.read_bytes() == content
    assert not list((tmp_path / "cache").glob(".*"))


def test_old_plans_leave_the_cache(shards: Shards, tmp_path: Path) -> None:
    stream = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 0, tmp_path / "cache")
    for age, name in ((10, ".plan-00001-x.1.2.tmp"), (7200, ".plan-00002-x.1.2.tmp")):
        (tmp_path / "cache" / name).mkdir(parents=True)
        os.utime(tmp_path / "cache" / name, (time.time() - age,) * 2)
    for epoch in range(6):
        stream.num_rows(epoch)
    (tmp_path / "cache" / ".plan-00001-x.1.2.tmp").rmdir()  # another process may still be writing this one
    left = sorted(p.name.split("-")[1] for p in (tmp_path / "cache").iterdir())
    assert left == ["00003", "00004", "00005"]


def test_a_cache_that_cannot_be_written_costs_a_warning_only(shards: Shards, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = PretrainingData(shards, ExamplesConfig(max_seq_length=32), 0, tmp_path / "file")
    with pytest.warns(UserWarning, match="could not be kept"):
        stream.batch(0, 4)


def test_the_next_plan_is_made_ahead_and_its_errors_reach_the_caller(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExamplesConfig(max_seq_length=32)
    made_in = {}
    make_plan = plans.make_plan

    def spy(shards: Shards, config: ExamplesConfig, seed: int, draw: int) -> Plan:
        made_in[draw] = threading.current_thread().name
        if draw == 2:
            raise UserError("no space left")
        return make_plan(shards, config, seed, draw)

    monkeypatch.setattr(plans, "make_plan", spy)
    stream = PretrainingData(shards, config, 0)
    rows = stream.num_rows(0)
    stream.batch(0, 4)
    assert list(made_in) == [0]
    stream.batch(rows - 4, 4)  # the end of the epoch is near
    stream.num_rows(1)
    assert made_in == {0: "MainThread", 1: "plan"}
    stream.prepare_epoch(2)
    with pytest.raises(UserError, match="no space left"):
        stream.num_rows(2)


@pytest.mark.parametrize("size", [1, 4, 8, 13, 16])
def test_evaluation_takes_every_example_once(tmp_path: Path, size: int) -> None:
    """C001: for any batch size; the rest of the last batch is fillers without weight."""
    shards = prepared(tmp_path, documents(3, 4), split="heldout")
    heldout = EvaluationData(shards, ExamplesConfig(max_seq_length=32, pack=False), 0)
    steps = -(-heldout.num_rows // size)
    batches = [heldout.batch(step * size, size) for step in range(steps + 2)]
    assert all(len(b["row_ids"]) == size for b in batches)
    got = [s for b in batches for s in sequences(b)]
    assert len(got) == heldout.num_rows == heldout.num_examples
    assert got == sequences(heldout.batch(0, heldout.num_rows))
    weights = sum(b["next_sentence_weights"].sum() for b in batches)
    assert weights == heldout.num_examples
    for name, array in batches[-1].items():  # past the end: nothing
        assert name == "row_ids" or not array.any()


def test_evaluation_is_fixed_and_packs_as_training_does(tmp_path: Path) -> None:
    shards = prepared(tmp_path, split="heldout")
    one, two = (EvaluationData(shards, ExamplesConfig(max_seq_length=32), 0) for _ in range(2))
    assert one.num_rows < one.num_examples
    assert equal(one.batch(3, 9), two.batch(3, 9))
    other = EvaluationData(shards, ExamplesConfig(max_seq_length=32), 1)
    assert not equal(one.batch(0, 9), other.batch(0, 9))


def test_an_evaluation_that_cannot_be_made_says_which_documents(tmp_path: Path) -> None:
    """C018."""
    shards = prepared(tmp_path, [[[11, 12]], [[13]], [[14]]], "heldout", sources={"heldout": [0, 1, 1]})
    with pytest.raises(ConfigError, match=r"held-out documents.*source source-0 has only one"):
        EvaluationData(shards, ExamplesConfig(random_next_from="source"))


def test_one_line_gives_one_padded_example(tmp_path: Path) -> None:
    """C089."""
    shards = prepared(tmp_path, [[[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]])
    stream = PretrainingData(shards, ExamplesConfig(sentence_task="none"), 0)
    assert stream.num_rows(0) == 1
    batch = stream.batch(0, 8)  # eight epochs of it, each with masks of its own
    assert (batch["sequence_ids"] > 0).sum(1).tolist() == [12] * 8
    assert (batch["masked_lm_weights"].sum(1) == 2).all()
    assert len({tuple(row) for row in batch["masked_lm_positions"].tolist()}) > 3


def test_words_are_masked_whole_with_pieces_and_with_given_boundaries(tmp_path: Path) -> None:
    """C083, C038: ## pieces follow their word; with boundaries given, both characters of a word go together."""
    joined_ids = [[[10, 90, 11, 91, 12, 92, 13, 93] for _ in range(3)] for _ in range(3)]
    for i, document in enumerate(joined_ids):
        document[0] = [20 + i, 90, 11, 91]
    config = ExamplesConfig(max_seq_length=32, masking_unit="whole_word", masked_lm_prob=0.3)
    by_pieces = prepared(tmp_path / "pieces", joined_ids)
    plain = [[[t if t < 90 else t - 60 for t in s] for s in d] for d in joined_ids]
    marks = [[[1, 0] * (len(s) // 2) for s in d] for d in plain]
    by_marks = prepared(tmp_path / "marks", plain, words={"train": marks})
    for shards, second in ((by_pieces, lambda t: t >= 90), (by_marks, lambda t: 30 <= t < 40)):
        batch = PretrainingData(shards, config, 0).batch(0, 40)
        text = unmasked(batch)
        picked = np.zeros_like(text, bool)
        rows, slots = np.nonzero(batch["masked_lm_weights"])
        picked[rows, batch["masked_lm_positions"][rows, slots]] = True
        follows = np.vectorize(second)(text[:, 1:]) & (text[:, :-1] >= 5)
        assert follows.sum() > 100 and picked.sum() > 40
        assert (picked[:, 1:][follows] == picked[:, :-1][follows]).all()


def test_whole_words_of_a_vocabulary_without_pieces_are_refused(tmp_path: Path) -> None:
    """C083."""
    shards = prepared(tmp_path, [[[5, 6], [7]], [[8]]], tokenizer=tokenizer(CONTROL + WORDS))
    with pytest.raises(ConfigError, match="no piece of the vocabulary starts with ##"):
        PretrainingData(shards, ExamplesConfig(masking_unit="whole_word"), 0)


def test_whole_words_of_chinese_without_boundaries_warn_once(tmp_path: Path) -> None:
    """C038."""
    chinese = [*CONTROL, *"天下大势分久必合", "##s"]
    shards = prepared(tmp_path, [[[5, 6], [7]], [[8, 9, 10]]], tokenizer=tokenizer(chinese))
    with pytest.warns(UserWarning, match="single Chinese characters") as caught:
        stream = PretrainingData(shards, ExamplesConfig(masking_unit="whole_word"), 0)
        stream.batch(0, 8)
    assert len(caught) == 1


def test_a_description_counts_what_batches_hold(shards: Shards) -> None:
    config = ExamplesConfig(max_seq_length=32)
    facts = data.describe(shards, config, 0)
    stream = PretrainingData(shards, config, 0)
    batch = stream.batch(0, stream.num_rows(0))
    real = (batch["sequence_ids"] > 0).sum()
    assert facts["tokens"] == real and facts["rows"] == stream.num_rows(0)
    assert facts["examples"] == batch["next_sentence_weights"].sum() == sum(facts["length_histogram"].values())
    assert facts["fill_packed"] == round(real / batch["input_ids"].size, 4) > facts["fill_padded"]
    assert facts["share_predicted"] == round(batch["masked_lm_weights"].sum() / real, 4)
    assert facts["share_mask"] + facts["share_random"] + facts["share_kept"] == pytest.approx(1, abs=2e-4)
    assert facts["most_predictions_per_row"] == batch["masked_lm_weights"].sum(1).max()
    assert facts["share_random_next"] == round(batch["next_sentence_labels"].sum() / facts["examples"], 4)
    json.dumps(facts)
