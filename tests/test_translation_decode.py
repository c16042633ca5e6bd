"""The search for translations, on models whose scores are written out and on small random ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_translation import CONFIG, PAD, QUICK

from transformer_jax import sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.translation import batching, decode, model
from transformer_jax.translation.batching import Decoder, Hypothesis, Sentence
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.decode import NEVER, DecodeSettings, State

SMALL = dataclasses.replace(CONFIG, num_hidden_layers=1, num_decoder_layers=1, max_position_embeddings=128)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """Programs that are compiled fast and run slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "jit", functools.partial(jax.jit, compiler_options=QUICK))
        batching.programs.cache_clear()
        yield
    batching.programs.cache_clear()


# --- a model that is a table


TOY = TransformerConfig(hidden_size=2, num_attention_heads=1, intermediate_size=2, num_decoder_layers=1,
                        source_vocab_size=8, target_vocab_size=8, vocab_multiple=1)  # fmt: skip
"""Pieces 2 to 6, `</s>` 0, `<unk>` 1, `<pad>` 7."""

Table = Callable[[tuple[int, ...]], dict[int, float]]
"""(pieces so far) -> log-probabilities; of what is not named, very small ones."""


def toy_state(settings: DecodeSettings, limits: Sequence[int]) -> State:
    rows = len(limits)
    state = decode.empty_state(TOY, settings, rows, 4, 16)
    live_K = np.where(np.arange(settings.beams) < (settings.beams if settings.sample else 1), 0.0, NEVER)
    return state._replace(
        done_B=jnp.zeros(rows, bool),
        limit_B=jnp.asarray(limits, jnp.int32),
        least_B=jnp.full(rows, settings.min_length, jnp.int32),
        live_BK=jnp.asarray(np.tile(live_K, (rows, 1)), jnp.float32),
        number_B=jnp.arange(rows, dtype=jnp.uint32),
    )


@functools.lru_cache
def toy_step(settings: DecodeSettings, normaliser: Any) -> Any:
    """Compiled for these settings, and for what `decode._normaliser` is now."""
    advance = lambda state, scores: decode.advance(TOY, settings, state, scores)  # noqa: E731
    return jax.jit(advance, compiler_options=QUICK)


def as_they_stand(scores_VX: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(scores_VX.shape[1]), jnp.ones(scores_VX.shape[1])


def toy_steps(tables: Sequence[Table], settings: DecodeSettings, limits: Sequence[int], pad: float = NEVER):
    """The state after each step, until all rows are done."""
    state = toy_state(settings, limits)
    step = toy_step(settings, decode._normaliser)
    while not bool(state.done_B.all()):
        scores_VX = np.full((8, len(tables) * settings.beams), -40.0, np.float32)
        scores_VX[7] = pad
        tokens_BKT, made = np.asarray(state.tokens_BKT), int(state.slot)
        for x, (b, k) in enumerate(itertools.product(range(len(tables)), range(settings.beams))):
            for piece, log_prob in tables[b](tuple(tokens_BKT[b, k, :made].tolist())).items():
                scores_VX[piece, x] = log_prob
        state = step(state, jnp.asarray(scores_VX))
        yield state


def toy_search(table: Table, settings: DecodeSettings, limit: int = 12) -> list[Hypothesis]:
    *_, last = toy_steps([table], settings, [limit])
    row = {name: np.asarray(x)[0] for name, x in last._asdict().items() if name not in ("slot", "cache", "source")}
    return batching._hypotheses(settings, row, 0)


def spread(**named: float) -> dict[int, float]:
    """Log-probabilities of the named pieces (p0, p1, ...) and what is left evenly over the rest of pieces 2 to 6."""
    found = {int(name[1:]): value for name, value in named.items()}
    rest = [p for p in range(2, 7) if p not in found]
    left = max(1.0 - sum(math.exp(v) for v in found.values()), 1e-12)
    return found | {p: math.log(left / len(rest)) for p in rest}


def two_ends(prefix: tuple[int, ...]) -> dict[int, float]:
    """ "2 </s>" has -2.0; "3 3 3 3 </s>" has -2.3; all else next to nothing."""
    if prefix == ():
        return {2: -1.0, 3: -0.8}
    if prefix == (2,):
        return {0: -1.0, 4: -9.0}
    if prefix == (3, 3, 3, 3):
        return {0: -0.3}
    if prefix and set(prefix) == {3} and len(prefix) < 4:
        return {3: -0.4}
    return {5: -9.0}


@pytest.fixture
def unnormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables' numbers are taken as log-probabilities as they stand."""
    monkeypatch.setattr(decode, "_normaliser", as_they_stand)


@pytest.mark.slow
@pytest.mark.usefixtures("unnormalised")
def test_the_penalty_decides_between_a_short_and_a_long_end() -> None:
    """C016: with alpha 0.6 the longer of two finishes wins, with 0 the shorter."""
    longer = toy_search(two_ends, DecodeSettings(beam_size=4, alpha=0.6))[0]
    assert (longer.ids, longer.cut) == ([3, 3, 3, 3], False)
    np.testing.assert_allclose([longer.log_prob, longer.score], [-2.3, -1.693], atol=1e-3)
    shorter = toy_search(two_ends, DecodeSettings(beam_size=4, alpha=0.0))[0]
    assert shorter.ids == [2]
    np.testing.assert_allclose(shorter.score, -2.0, atol=1e-5)
    found = toy_search(two_ends, DecodeSettings(beam_size=4, n_best=2))
    np.testing.assert_allclose([h.score for h in found], [-1.693, -1.823], atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("unnormalised")
@pytest.mark.parametrize("penalty", ["gnmt", "power"])
def test_the_best_of_one_is_the_first_of_five(penalty: Any) -> None:
    """C016: how many are asked for does not change which is best."""
    settings = DecodeSettings(beam_size=5, length_penalty=penalty)
    one = toy_search(two_ends, settings)
    five = toy_search(two_ends, dataclasses.replace(settings, n_best=5))
    assert one[0].ids == five[0].ids and len(five) == 5
    assert [h.score for h in five] == sorted((h.score for h in five), reverse=True)


@pytest.mark.usefixtures("unnormalised")
def test_a_search_stops_as_soon_as_nothing_live_can_win() -> None:
    def table(prefix: tuple[int, ...]) -> dict[int, float]:
        return {0: -0.1, 2: -12.0, 3: -12.0} if prefix else {2: -0.1, 3: -9.0}

    *_, last = toy_steps([table], DecodeSettings(beam_size=2), [12])
    assert int(last.slot) == 2


@pytest.mark.usefixtures("unnormalised")
def test_other_programs_rules_stop_early() -> None:
    """The same search ends before the longer finish, where K ends decide."""

    def table(prefix: tuple[int, ...]) -> dict[int, float]:
        if prefix and set(prefix) == {3}:
            return {3: -0.01, 0: -0.5 if len(prefix) < 6 else -0.01}
        return {3: -0.1, 2: -1.0, 0: -0.9}

    ours = toy_search(table, DecodeSettings(beam_size=2, length_penalty="power", alpha=1.0))[0]
    theirs = toy_search(table, DecodeSettings(beam_size=2, length_penalty="power", alpha=1.0, stop="ctranslate2"))[0]
    assert len(ours.ids) >= 6 > len(theirs.ids)
    assert ours.score > theirs.score


def test_beams_start_from_one_and_differ() -> None:
    """C122: four different results from a beam of four."""

    def table(prefix: tuple[int, ...]) -> dict[int, float]:
        return spread(p0=-0.7) if len(prefix) >= 2 else spread(p2=-1.0, p3=-1.2)

    found = toy_search(table, DecodeSettings(beam_size=4, n_best=4))
    assert len({tuple(h.ids) for h in found}) == 4


def test_a_beam_of_one_takes_the_likeliest_piece_until_that_is_the_end() -> None:
    """C122: beam 1 equals greedy."""

    def table(prefix: tuple[int, ...]) -> dict[int, float]:
        rng = np.random.default_rng(abs(hash(prefix)) % 2**32)
        scores = dict(enumerate(rng.standard_normal(7).tolist()))
        return scores | ({0: 5.0} if len(prefix) == 6 else {0: -5.0})

    prefix: tuple[int, ...] = ()
    while True:
        scores = table(prefix)
        best = max(scores, key=scores.__getitem__)
        if best == 0:
            break
        prefix += (best,)
    (found,) = toy_search(table, DecodeSettings(beam_size=1))
    assert tuple(found.ids) == prefix and len(prefix) == 6 and not found.cut


@pytest.mark.slow
@pytest.mark.parametrize("settings", [DecodeSettings(), DecodeSettings(sample=True, n_best=4)])
def test_finished_rows_are_frozen(settings: DecodeSettings) -> None:
    """C109: two rows that end at 3 and 9; the first is not touched again."""

    def ends_at(length: int) -> Table:
        return lambda prefix: {0: 0.0} if len(prefix) >= length - 1 else {2 + len(prefix) % 4: 0.0}

    states = list(toy_steps([ends_at(3), ends_at(9)], settings, [12, 12]))
    assert len(states) >= 9
    first_done = next(s for s in states if bool(s.done_B[0]))
    for name in ("tokens_BKT", "finished_tokens_BPT", "finished_BP", "length_BP", "position_B", "live_BK", "count_B"):
        np.testing.assert_array_equal(getattr(first_done, name)[0], getattr(states[-1], name)[0], err_msg=name)
    assert states[-1].length_BP[:, 0].tolist() == [3, 9]
    assert states[-1].finished_tokens_BPT[0, 0, :5].tolist() == [2, 3, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["bound", "huggingface", "ctranslate2"])
def test_an_end_comes_at_the_least_length_and_the_limit(rule: Any) -> None:
    def table(prefix: tuple[int, ...]) -> dict[int, float]:
        return spread(p0=-0.01)

    found = toy_search(table, DecodeSettings(beam_size=2, min_length=3, stop=rule))
    assert len(found[0].ids) >= 3 and not found[0].cut
    cut = toy_search(table, DecodeSettings(beam_size=2, min_length=6, stop=rule), limit=6)[0]
    assert len(cut.ids) == 6 and cut.cut


# --- sampling


@pytest.mark.slow
def test_sampling_follows_the_model_and_its_filters() -> None:
    scores_VX = jnp.asarray(np.log([[0.5], [0.25], [0.15], [0.1]]), jnp.float32)

    def shares(**changes: Any) -> list[float]:
        found = np.asarray(decode._sampling_shares(DecodeSettings(sample=True, **changes), scores_VX))[:, 0]
        return (found / found.sum()).tolist()

    np.testing.assert_allclose(shares(), [0.5, 0.25, 0.15, 0.1], rtol=1e-5)
    np.testing.assert_allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(shares(top_p=0.8), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], rtol=1e-5)
    np.testing.assert_allclose(shares(top_p=0.5), [1, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(shares(temperature=0.5)[0] / shares(temperature=0.5)[1], 4.0, rtol=1e-5)

    *_, last = toy_steps(
        [lambda prefix: {2: math.log(0.7), 3: math.log(0.3)}], DecodeSettings(sample=True, n_best=2000), [1]
    )
    share = float((np.asarray(last.finished_tokens_BPT)[0, :, 0] == 2).mean())
    assert abs(share - 0.7) < 4 * math.sqrt(0.21 / 2000)
    drawn = np.asarray(last.finished_tokens_BPT)[0, :, 0]
    np.testing.assert_allclose(np.asarray(last.log_prob_BP)[0], np.log(np.where(drawn == 2, 0.7, 0.3)), rtol=1e-4)


# --- real models


def params_of(config: TransformerConfig, seed: int = 0) -> Any:
    """Random parameters with which sentences end now and then, and beams change places."""
    leaves, tree = jax.tree.flatten(model.abstract_params(config))
    rng = np.random.default_rng(seed)
    found = jax.tree.unflatten(tree, [rng.normal(0, 0.4, x.shape).astype(np.float32) for x in leaves])
    for name, table in found["embeddings"].items():
        size = config.source_vocab_size if name == "source" else config.target_vocab_size
        table["embedding"][size - 1 :] = 0
        table["embedding"][0] *= 0.7
    return found


def sentences(lengths: Sequence[int], seed: int = 0) -> list[Sentence]:
    """Of these numbers of pieces, `</s>` included."""
    rng = np.random.default_rng(seed)
    return [Sentence(i, [*rng.integers(2, PAD, n - 1).tolist(), 0]) for i, n in enumerate(lengths)]


def run(decoder: Decoder, given: Sequence[Sentence], at_once: int = 10**6) -> dict[int, list[Hypothesis]]:
    """All hypotheses by the sentences' numbers; `at_once` sentences are there at a time."""
    waiting = [list(given[i : i + at_once]) for i in range(0, len(given), at_once)]
    with jax.default_matmul_precision("highest"):
        finished = list(decoder.decode(lambda wait: waiting.pop(0) if waiting else None))
    found = dict(itertools.chain.from_iterable(finished))
    assert sorted(found) == sorted(s.number for s in given)
    return found


def assert_same(found: dict[int, list[Hypothesis]], expected: dict[int, list[Hypothesis]]) -> None:
    for number, hypotheses in expected.items():
        assert [h.ids for h in found[number]] == [h.ids for h in hypotheses], number
        np.testing.assert_allclose(
            [(h.score, h.log_prob) for h in found[number]],
            [(h.score, h.log_prob) for h in hypotheses],
            atol=1e-5,
            rtol=1e-6,  # of sums over 66 pieces
        )
        assert [h.cut for h in found[number]] == [h.cut for h in hypotheses]


def full_log_prob(config: TransformerConfig, params: Any, source: Sequence[int], pieces: Sequence[int]) -> float:
    """Of these pieces after this source, by one pass without a cache."""
    width = 64

    def padded(ids: Sequence[int]) -> list[jax.Array]:
        row = np.full((1, width), PAD, np.int32)
        row[0, : len(ids)] = ids
        own = (np.arange(width) < len(ids)).astype(np.int32)[None]
        return [jnp.asarray(row), jnp.arange(width, dtype=jnp.int32)[None], jnp.asarray(own)]

    logits = _forward(config, params, [*padded(source), *padded([PAD, *pieces[:-1]])])
    log_probs = jax.nn.log_softmax(logits[0], axis=-1)
    return float(sum(log_probs[t, piece] for t, piece in enumerate(pieces)))


_forward = jax.jit(
    lambda config, params, inputs: model.Transformer(config).apply({"params": params}, *inputs), static_argnums=0
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_decoder_layers": 2},
        {"norm": "pre", "embeddings": "untied", "hidden_act": "gelu", "scale_embedding": False},
    ],
)
def test_scores_are_those_of_a_pass_without_cache(changes: dict[str, Any]) -> None:
    """C007, C071: each hypothesis's log-probability, to the last step before the limit; no `<pad>`, nothing after the
    end. The beams of a sentence change places many times on the way."""
    config = dataclasses.replace(SMALL, **changes)
    params = params_of(config)
    given = sentences([9, 3, 14, 6])
    settings = DecodeSettings(beam_size=4, n_best=4, max_length=8)
    found = run(Decoder(config, params, settings, 4), given)
    lengths = set()
    for sentence in given:
        assert len(found[sentence.number]) == 4
        for h in found[sentence.number]:
            assert PAD not in h.ids and 0 not in h.ids
            assert len(h.ids) == 8 if h.cut else len(h.ids) < 8
            pieces = h.ids if h.cut else [*h.ids, 0]
            with jax.default_matmul_precision("highest"):
                expected = full_log_prob(config, params, sentence.ids, pieces)
            np.testing.assert_allclose(h.log_prob, expected, atol=1e-4, rtol=1e-5)
            lengths.add(len(h.ids))
    assert len(lengths) > 1


@pytest.mark.slow
def test_a_model_that_never_ends_is_cut_at_the_limit() -> None:
    """C007, C110: the source's length + 50 by default; marked; scored in full to the last step."""
    params = params_of(SMALL)
    params["embeddings"]["target"]["embedding"][0] = 0  # a score of 0, below the best of a hundred others
    given = sentences([10])
    (found,) = run(Decoder(SMALL, params, DecodeSettings(beam_size=1), 1), given)[0]
    assert len(found.ids) == 60 and found.cut
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(found.log_prob, full_log_prob(SMALL, params, given[0].ids, found.ids), rtol=1e-5)


@pytest.mark.slow
def test_pad_with_the_highest_score_is_never_given() -> None:
    """C071: the row of `<pad>` in the table has no say."""
    params = params_of(SMALL)
    plain = run(Decoder(SMALL, params, DecodeSettings(max_length=8), 2), sentences([5, 7]))
    params["embeddings"]["target"]["embedding"][PAD:] = 9.0
    assert_same(run(Decoder(SMALL, params, DecodeSettings(max_length=8), 2), sentences([5, 7])), plain)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [20, 60])
def test_a_sentence_does_not_depend_on_its_neighbours(longest: int) -> None:
    """C003: 40 lines of 1 to 60 pieces, alone, in batches of 7 and 40, shuffled, on eight devices, as they come."""
    params = params_of(SMALL)
    given = sentences(np.random.default_rng(4).integers(1, longest + 1, 40).tolist())
    settings = DecodeSettings(beam_size=3, max_extra=6, n_best=2)
    alone = run(Decoder(SMALL, params, settings, 1), given)
    assert len({h.cut for hs in alone.values() for h in hs}) == 2
    assert_same(run(Decoder(SMALL, params, settings, 7), given), alone)
    shuffled = [given[i] for i in np.random.default_rng(5).permutation(40)]
    assert_same(run(Decoder(SMALL, params, settings, 40), shuffled, at_once=25), alone)
    mesh = sharding.make_mesh(MeshConfig())
    assert_same(run(Decoder(SMALL, params, settings, 16, mesh), shuffled), alone)


@pytest.mark.slow
def test_a_sample_depends_on_the_seed_and_the_sentence_alone() -> None:
    params = params_of(SMALL)
    given = sentences([3, 9, 5, 12, 7, 4])
    settings = DecodeSettings(sample=True, n_best=2, top_k=20, temperature=0.8, max_length=10)
    alone = run(Decoder(SMALL, params, settings, 1), given)
    assert_same(run(Decoder(SMALL, params, settings, 5), given[::-1]), alone)
    other = run(Decoder(SMALL, params, dataclasses.replace(settings, seed=1), 1), given)
    assert sum(other[n][0].ids != alone[n][0].ids for n in alone) >= 5
    assert all(hs[0].ids != hs[1].ids for hs in alone.values())


@pytest.mark.slow
def test_bfloat16_is_as_good_as_alone_within_its_rounding() -> None:
    """C003: with bfloat16 scores of the same sentence differ by less than 0.03 a piece between batches."""
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    params = params_of(config)
    given = sentences(np.random.default_rng(6).integers(2, 30, 12).tolist())
    settings = DecodeSettings(beam_size=3, max_length=8)
    alone = run(Decoder(config, params, settings, 1), given)
    batch = run(Decoder(config, params, settings, 7), given)
    off = [abs(alone[n][0].score - batch[n][0].score) for n in alone]
    assert max(off) < 0.03 * 8


@pytest.mark.parametrize(("size", "count"), [(101, 5), (1280, 5), (1280, 12)])
def test_the_best_pieces_are_found_in_two_stages(size: int, count: int) -> None:
    scores_VX = np.random.default_rng(size).permutation(size * 3).reshape(size, 3).astype(np.float32)
    scores_VX[::7] = scores_VX[0]  # ties
    best_CX, index_CX = decode.top_pieces(jnp.asarray(scores_VX), count)
    expected = -np.sort(-scores_VX, axis=0)[:count]
    np.testing.assert_array_equal(best_CX, expected)
    np.testing.assert_array_equal(np.take_along_axis(scores_VX, np.asarray(index_CX), axis=0), expected)
    assert all(len(set(column)) == count for column in np.asarray(index_CX).T.tolist())


def test_a_diverged_model_is_a_message() -> None:
    params = jax.tree.map(lambda x: x * np.float32(np.nan), params_of(SMALL))
    with pytest.raises(UserError, match="not finite"):
        run(Decoder(SMALL, params, DecodeSettings(max_length=8), 2), sentences([5]))


def test_a_batch_for_which_there_is_no_memory_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(search: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 6602945846176 bytes.")

    monkeypatch.setattr(batching._Search, "advance", full)
    with pytest.raises(UserError, match="2 sentences of 4 hypotheses each; lower the beam size or the batch size"):
        run(Decoder(SMALL, params_of(SMALL), DecodeSettings(), 2), sentences([5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0"),
        ({"n_best": 5}, "n_best is 5, but a beam of 4"),
        ({"min_length": 9, "max_length": 8}, "min_length is 9"),
        ({"temperature": 0.0, "sample": True}, "temperature is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 5}, "top_k is 5, but nothing is sampled"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"max_extra": -1}, "max_extra is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecodeSettings(**changes)


def test_a_batch_that_does_not_divide_and_a_source_too_long_are_refused() -> None:
    mesh = sharding.make_mesh(MeshConfig())
    with pytest.raises(UserError, match="multiple of 8"):
        Decoder(SMALL, params_of(SMALL), DecodeSettings(), 12, mesh)
    with pytest.raises(UserError, match="128 positions"):
        run(Decoder(SMALL, params_of(SMALL), DecodeSettings(), 2), sentences([129]))
