"""Batches of pairs: a packed row one can check by hand, resuming, hosts, evaluation, sampling, long pairs."""

import numpy as np
import pytest

from transformer_jax import pieces
from transformer_jax.config import ConfigError, UserError
from transformer_jax.shards import Shards
from transformer_jax.translation import data
from transformer_jax.translation.config import BatchesConfig
from transformer_jax.translation.data import EvaluationData, TrainingData
from transformer_jax.translation.prepare import write_pairs
from transformer_jax.translation.vocabularies import Vocabularies

LETTERS = "abcdefghijklmnop"
NAMES = {
    "input_ids", "position_ids", "sequence_ids", "decoder_input_ids", "decoder_position_ids", "decoder_sequence_ids",
    "labels", "label_weights", "row_ids",
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabularies():
    """Every letter is a piece with its space: "a b" has two pieces. Source and target have other ids."""
    source = pieces.train([" ".join(LETTERS)] * 3, vocab_size=3 + 1 + 2 * len(LETTERS))
    target = pieces.train([" ".join(LETTERS.upper())] * 3, vocab_size=3 + 1 + 2 * len(LETTERS))
    return Vocabularies(source, target)


def random_pairs(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)

    def sentence(letters, length):
        return " ".join(rng.choice(list(letters), length))

    return [
        (sentence(LETTERS, n), sentence(LETTERS.upper(), max(1, n + rng.integers(-2, 3))))
        for n in rng.integers(1, longest + 1, count)
    ]


TRAIN = random_pairs(150)
SMALL = BatchesConfig(max_source_length=20, max_target_length=24)


@pytest.fixture(scope="module")
def folder(vocabularies, tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    write_pairs(path, vocabularies, {"train": TRAIN, "validation": random_pairs(13, seed=1)}, pairs_per_shard=40)
    return path


@pytest.fixture(scope="module")
def train(folder):
    return Shards.open(folder, "train")


def pairs_in(batch, vocabularies):
    """The pairs of a batch, read from its arrays."""
    found = []
    for ids, numbers, target_ids, target_numbers in zip(
        batch["input_ids"], batch["sequence_ids"], batch["labels"], batch["decoder_sequence_ids"], strict=True
    ):
        assert numbers.max() == target_numbers.max()
        for k in range(1, numbers.max() + 1):
            source, target = ids[numbers == k], target_ids[target_numbers == k]
            assert source[-1] == vocabularies.source.eos_id and target[-1] == vocabularies.target.eos_id
            found.append((vocabularies.source.decode(source), vocabularies.target.decode(target)))
    return found


def equal(one, other, but=("row_ids",)):
    return set(one) == set(other) and all(np.array_equal(one[k], other[k]) for k in one if k not in but)


def test_a_row_of_two_pairs_by_hand(vocabularies, tmp_path):
    """C060: the input is <pad> and the pieces, the labels are the pieces and </s>; padding has no weight."""
    write_pairs(
        tmp_path, vocabularies, {"train": [("a b c", "X"), ("d", "E F")]} | {"train": [("a b c", "D"), ("d", "E F")]}
    )
    shards = Shards.open(tmp_path)
    batch = TrainingData(shards, BatchesConfig(max_source_length=8, max_target_length=7), seed=0).batch(0, 1, offset=5)
    s = {p: i for i, p in enumerate(vocabularies.source.vocab)}
    t = {p: i for i, p in enumerate(vocabularies.target.vocab)}
    ps, pt = vocabularies.source.pad_id, vocabularies.target.pad_id
    assert ps == len(s) - 1 and pt == len(t) - 1
    first_is_long = batch["input_ids"][0, 0] == s["▁a"]
    source = [[s["▁a"], s["▁b"], s["▁c"], 0], [s["▁d"], 0]]
    target = [[t["▁D"]], [t["▁E"], t["▁F"]]]
    order = (0, 1) if first_is_long else (1, 0)
    expected = {
        "input_ids": [*source[order[0]], *source[order[1]], ps, ps],
        "position_ids": [*range(len(source[order[0]])), *range(len(source[order[1]])), 0, 0],
        "sequence_ids": [1] * len(source[order[0]]) + [2] * len(source[order[1]]) + [0, 0],
        "decoder_input_ids": [pt, *target[order[0]], pt, *target[order[1]], pt, pt],
        "labels": [*target[order[0]], 0, *target[order[1]], 0, pt, pt],
        "decoder_position_ids": [*range(1 + len(target[order[0]])), *range(1 + len(target[order[1]])), 0, 0],
        "decoder_sequence_ids": [1] * (1 + len(target[order[0]])) + [2] * (1 + len(target[order[1]])) + [0, 0],
        "label_weights": [1] * 5 + [0, 0],
        "row_ids": [5],
    }
    assert set(batch) == NAMES == set(expected)
    for name, row in expected.items():
        assert batch[name].dtype == (np.float32 if name == "label_weights" else np.int32)
        assert np.array_equal(batch[name].ravel(), row), name


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_holds_every_pair_once_and_each_with_its_own_side(train, vocabularies, pack):
    config = BatchesConfig(20, 24, pack=pack)
    stream = TrainingData(train, config, seed=3)
    batch = stream.batch(0, stream.num_rows(0))
    assert sorted(pairs_in(batch, vocabularies)) == sorted(TRAIN)
    assert batch["sequence_ids"].max() == (1 if not pack else batch["sequence_ids"].max()) <= data.max_pairs(config)
    assert (stream.num_rows(0) == len(TRAIN)) == (not pack)
    # The decoder's input is the labels moved by one place, with <pad> in front.
    inside = batch["decoder_position_ids"] > 0
    assert np.array_equal(batch["decoder_input_ids"][:, 1:][inside[:, 1:]], batch["labels"][:, :-1][inside[:, 1:]])
    starts = (batch["decoder_position_ids"] == 0) | (batch["decoder_sequence_ids"] == 0)
    assert (batch["decoder_input_ids"][starts] == vocabularies.target.pad_id).all()
    assert np.array_equal(batch["label_weights"] > 0, batch["decoder_sequence_ids"] > 0)


def test_the_mask_comes_from_lengths_and_not_from_ids(train, vocabularies):
    """C030: id 0 is </s>, which is real; padding has the last id, and sequence_ids alone say where it is."""
    batch = TrainingData(train, SMALL, seed=3).batch(0, 10)
    real = batch["sequence_ids"] > 0
    assert (batch["input_ids"][real] == 0).sum() == batch["sequence_ids"].max(1).sum()
    assert (batch["input_ids"][~real] == vocabularies.source.pad_id).all()


def test_a_batch_is_a_function_of_its_place_alone(train, folder):
    """C006, C026: a fresh stream that starts in the middle, and two hosts with their own rows, see the same."""
    stream = TrainingData(train, SMALL, seed=3)
    rows = stream.num_rows(0)
    whole = [stream.batch(row, 4, offset=0) for row in range(0, rows + 12, 4)]
    fresh = TrainingData(Shards.open(folder), SMALL, seed=3)
    assert equal(
        fresh.batch(rows - 2, 6), {k: np.concatenate([w[k] for w in whole])[rows - 2 : rows + 4] for k in NAMES}
    )
    halves = [fresh.batch(row, 2, offset=row) for row in (8, 10)]
    assert equal({k: np.concatenate([h[k] for h in halves]) for k in NAMES}, whole[2])
    assert halves[1]["row_ids"].tolist() == [10, 11]
    assert fresh.position(rows + 1) == {"epoch": 1, "row_in_epoch": 1}
    assert not equal(TrainingData(train, SMALL, seed=4).batch(0, 4), whole[0])


def test_two_epochs_differ_and_hold_the_same_pairs(train):
    stream = TrainingData(train, SMALL, seed=0)
    first, rows = stream.num_rows(0), stream.num_rows(1)
    one, two = stream.example_ids(0, first), stream.example_ids(first, rows)
    assert (two >> 40 == 1).all() and sorted(one) == sorted(two - (1 << 40)) == list(range(len(TRAIN)))
    assert one.tolist() != (two - (1 << 40)).tolist()


def test_a_resume_plans_no_epoch_that_is_over(train, monkeypatch):
    stream = TrainingData(train, SMALL, seed=0)
    row = stream.num_rows(0) + stream.num_rows(1) + 3
    expected, place = stream.batch(row, 3), stream.position(row)
    planned = []
    original = data.Maker.plan
    monkeypatch.setattr(data.Maker, "plan", lambda self, key: planned.append(key) or original(self, key))
    resumed = TrainingData(train, SMALL, seed=0)
    resumed.start_at(row, **place)
    assert equal(resumed.batch(row, 3), expected) and len(planned) == 1


def test_a_plan_is_kept_and_a_damaged_one_is_made_again(train, tmp_path, monkeypatch):
    expected = TrainingData(train, SMALL, seed=0, cache_dir=tmp_path).batch(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(data.Maker, "plan", None)  # would fail if called
        assert equal(TrainingData(train, SMALL, seed=0, cache_dir=tmp_path).batch(0, 5), expected)
    (file,) = tmp_path.glob("plan-*/members.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    assert equal(TrainingData(train, SMALL, seed=0, cache_dir=tmp_path).batch(0, 5), expected)


def test_fingerprints_tell_data_settings_and_seed_apart(train, folder):
    other = BatchesConfig(max_source_length=21, max_target_length=24)
    prints = [
        TrainingData(train, SMALL, 0).fingerprint,
        TrainingData(train, SMALL, 1).fingerprint,
        TrainingData(train, other, 0).fingerprint,
        EvaluationData(Shards.open(folder, "validation"), SMALL).fingerprint,
    ]
    assert len(set(prints)) == 4 and TrainingData(Shards.open(folder), SMALL, 0).fingerprint == prints[0]


@pytest.mark.parametrize("rows", [1, 4, 13, 16])
def test_every_evaluation_pair_is_scored_once_whatever_the_batch(folder, vocabularies, rows):
    """C001, C032: fillers make up the last batch and count nothing."""
    found = EvaluationData(Shards.open(folder, "validation"), BatchesConfig(20, 24, pack=False))
    assert (found.num_rows, found.num_examples, found.too_long) == (13, 13, 0)
    batches = [found.batch(row, rows) for row in range(0, 13, rows)]
    assert sorted(p for b in batches for p in pairs_in(b, vocabularies)) == sorted(random_pairs(13, seed=1))
    filler = {k: v[13 - 13 // rows * rows :] for k, v in batches[-1].items()} if 13 % rows else None
    if filler is not None:
        assert not filler["sequence_ids"].any() and not filler["label_weights"].any()
        assert (filler["input_ids"] == vocabularies.source.pad_id).all()
        assert (filler["labels"] == vocabularies.target.pad_id).all()
    packed = EvaluationData(Shards.open(folder, "validation"), SMALL)
    assert packed.num_rows < 13 == packed.num_examples == len(pairs_in(packed.batch(0, packed.num_rows), vocabularies))


def test_pairs_that_fit_no_row_are_left_out_and_counted(train, vocabularies):
    """C110 for training: nothing is cut in silence, and nothing is dropped without a count."""
    config = BatchesConfig(max_source_length=6, max_target_length=7)
    stream = TrainingData(train, config, seed=0)
    fitting = [p for p in TRAIN if len(p[0].split()) < 6 and len(p[1].split()) < 7]
    assert stream.too_long == len(TRAIN) - len(fitting) > 0
    assert sorted(pairs_in(stream.batch(0, stream.num_rows(0)), vocabularies)) == sorted(fitting)
    report = data.describe(train, config, seed=0)
    assert report["too long for a row, left out"] == stream.too_long and report["pairs"] == len(fitting)


def test_a_split_of_which_nothing_fits_is_an_error(vocabularies, tmp_path):
    """C089: an empty result is an error."""
    write_pairs(tmp_path, vocabularies, {"train": [("a b c d", "A B")] * 3, "test": [("a b c d", "A B")]})
    config = BatchesConfig(max_source_length=4, max_target_length=9)
    with pytest.raises(UserError, match=r"0 examples: none of 3 pairs fits into rows of 4 source and 9 target"):
        TrainingData(Shards.open(tmp_path), config, seed=0).batch(0, 1)
    with pytest.raises(UserError, match=r"the test pairs: 0 examples: none of 1 pairs"):
        EvaluationData(Shards.open(tmp_path, "test"), config)


def test_no_row_goes_over_either_side_or_the_number_of_pairs(train):
    config = BatchesConfig(max_source_length=30, max_target_length=24, max_pairs_per_row=3)
    stream = TrainingData(train, config, seed=0)
    batch = stream.batch(0, stream.num_rows(0))
    assert batch["sequence_ids"].shape[1] == 30 and batch["labels"].shape[1] == 24
    assert batch["sequence_ids"].max() == 3
    with pytest.raises(ConfigError, match="max_pairs_per_row is 25; a row of 24 pieces holds at most 24"):
        TrainingData(train, BatchesConfig(30, 24, max_pairs_per_row=25), seed=0)


def test_packing_fills_both_sides_and_the_report_says_how_full(train):
    report = data.describe(train, SMALL, seed=0)
    batch = TrainingData(train, SMALL, seed=0).batch(0, report["rows an epoch"])
    assert report["source fill"] == round(float((batch["sequence_ids"] > 0).mean()), 4) > 0.75
    assert report["target fill"] == round(float(batch["label_weights"].mean()), 4)
    assert report["source fill, one pair a row"] < 0.5 * report["source fill"]


@pytest.mark.parametrize(("source", "target", "side"), [(60, 24, "source"), (24, 60, "target"), (24, 24, "")])
def test_the_report_says_by_which_length_a_side_would_be_filled_better(train, source, target, side):
    report = data.describe(train, BatchesConfig(source, target), seed=0)
    assert (f"examples.max_{side}_length = " in report.get("fuller rows", "")) == bool(side)
    if side:
        better = int(report["fuller rows"].rpartition(" ")[2])
        lengths = (better, target) if side == "source" else (source, better)
        fuller = data.describe(train, BatchesConfig(*lengths), seed=0)
        assert better % 8 == 0 and fuller[f"{side} fill"] > report[f"{side} fill"]


@pytest.mark.parametrize(("extra", "fits"), [(0, True), (1, False)])
@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_of_exactly_the_longest_length_is_whole(vocabularies, tmp_path, side, extra, fits):
    """C054: nothing is lost at the maximum; one piece more does not fit, and is counted."""
    words = [LETTERS[:3], LETTERS[:3].upper()]
    words[side] = (LETTERS, LETTERS.upper())[side][: 7 + extra]
    pair = tuple(" ".join(word) for word in words)
    write_pairs(tmp_path, vocabularies, {"train": [("a", "A"), pair]})
    stream = TrainingData(Shards.open(tmp_path), BatchesConfig(8, 8), seed=0)
    assert stream.too_long == 1 - fits
    assert (pair in pairs_in(stream.batch(0, stream.num_rows(0)), vocabularies)) == fits


# --- subword sampling


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def words(request, tmp_path_factory):
    """Pairs of words that can be cut in many ways."""
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(30)]
    pairs = [(" ".join(rng.choice(vocabulary, 5)), " ".join(rng.choice(vocabulary, 5))) for _ in range(60)]
    model = pieces.train([side for pair in pairs for side in pair], model=request.param, vocab_size=120)
    path = tmp_path_factory.mktemp("words")
    write_pairs(path, Vocabularies(model, model), {"train": pairs})
    return Shards.open(path), pairs


def test_sampling_cuts_anew_in_each_epoch_and_is_a_function_of_the_place(words):
    shards, pairs = words
    config = BatchesConfig(60, 60, subword_sampling=0.2)
    stream = TrainingData(shards, config, seed=1)
    rows = stream.num_rows(0)
    batch = stream.batch(0, rows)
    assert sorted(pairs_in(batch, stream.vocabularies)) == sorted(pairs), "another cut, the same text"
    assert equal(TrainingData(shards, config, seed=1).batch(3, 4), {k: v[3:7] for k, v in batch.items()})
    following = stream.batch(rows, stream.num_rows(1))
    plain = TrainingData(shards, BatchesConfig(60, 60), seed=1)
    counts = [int((b["label_weights"] > 0).sum()) for b in (batch, following, plain.batch(0, plain.num_rows(0)))]
    assert counts[0] > counts[2] and counts[0] != counts[1]
    assert (batch["sequence_ids"] > 0).sum(1).max() <= 60
    report = data.describe(shards, config, seed=1)
    assert report["source fill, sampled"] > report["source fill"] and report["growth by sampling (source)"] > 1


def test_a_pair_without_room_for_more_pieces_takes_its_best_cut(words):
    shards, pairs = words
    longest = np.diff(shards.sentence_offsets).max() + 1
    config = BatchesConfig(int(longest), int(longest), pack=False, subword_sampling=0.5)
    stream = TrainingData(shards, config, seed=1)
    assert stream.too_long == 0
    assert sorted(pairs_in(stream.batch(0, 60), stream.vocabularies)) == sorted(pairs)


def test_evaluation_always_takes_the_best_cut(words):
    shards, _ = words
    sampled = EvaluationData(shards, BatchesConfig(60, 60, subword_sampling=0.5))
    assert equal(sampled.batch(0, 5), EvaluationData(shards, BatchesConfig(60, 60)).batch(0, 5))
