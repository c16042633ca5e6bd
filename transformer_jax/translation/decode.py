"""The search for translations: beam search, greedy search and sampling, as one compiled loop over steps.

Each sentence is searched by itself: what becomes of it does not depend on the other rows of a batch, which may begin
and end at any step. `batching.py` fills the rows, and takes finished ones out.

Beam search (Wu et al. 2016, section 7) keeps K live hypotheses. At each step every live one offers its K best pieces
and its end; the K best continuations live on, and ends among the 2K best of all are finished, with their score divided
by the length penalty. The search goes on until no live hypothesis can still win: its log-probability only falls, so
at best it ends with the penalty of the length limit. Lengths count `</s>`.

The rules of two other programs can be chosen in place of these, to compare results with theirs: `stop`.

Suffixes: P finished hypotheses, C pieces that one beam offers, X = B K.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.config import UserError
from transformer_jax.translation import step as steps
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.step import Cache, Source, Weights

NEVER = -1e9
"""Score of what cannot be chosen. Finite, so that no difference of scores is NaN."""
_POSSIBLE = NEVER / 2


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How sentences are translated; lengths are in pieces."""

    beam_size: int = 4
    """1 is greedy search: the likeliest piece at each step, until that is the end."""
    alpha: float = 0.6
    """Strength of the length penalty; 0 compares plain log-probabilities."""
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    """((5 + length) / 6)^alpha (Wu et al. 2016, equation 14), or length^alpha."""
    n_best: int = 1
    """Translations of each sentence; with `sample`, drawn independently."""
    min_length: int = 0
    """Pieces before the end is allowed."""
    max_extra: int = 50
    """How many more pieces than its source a translation may have."""
    max_length: int = 0
    """The most pieces of any translation, `</s>` included; 0 leaves it to max_extra."""
    stop: Literal["bound", "huggingface", "ctranslate2"] = "bound"
    """When a search is over. "bound": no live hypothesis can still be among the n-best. "huggingface": K are finished,
    and the best live one would be worse than all of them if it ended now. "ctranslate2": K are finished. The last two
    count an end only among the K best of a step, and hypotheses cut at the limit beside finished ones."""
    sample: bool = False
    """Draw each piece from the model in place of searching."""
    temperature: float = 1.0
    """Of sampling: scores are divided by it."""
    top_k: int = 0
    """Sampling draws from this many of the likeliest pieces; 0 from all."""
    top_p: float = 1.0
    """Sampling draws from the likeliest pieces that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("beam_size", 1), ("n_best", 1), ("min_length", 0), ("max_length", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("alpha", "temperature", "top_p"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}; it must be a number")
        if abs(self.alpha) > 10:  # the penalty of some thousand pieces must stay a float32
            raise UserError(f"alpha is {self.alpha}; it must be between -10 and 10")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must be at least 0 and below 2^32")
        if self.max_extra < 0 and not self.max_length:
            raise UserError(f"max_extra is {self.max_extra}; it must be at least 0")
        if self.max_length and self.min_length > self.max_length:
            raise UserError(f"min_length is {self.min_length}; it must be at most max_length {self.max_length}")
        if not self.sample and self.n_best > self.beam_size:
            raise UserError(
                f"n_best is {self.n_best}, but a beam of {self.beam_size} finds only as many; raise beam_size (--beam)"
            )
        if not 1e-3 <= self.temperature <= 1e3:  # scores are divided by it, and must stay float32
            raise UserError(
                f"temperature is {self.temperature}; it must be from 0.001 to 1000 (greedy search is a beam of 1)"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not self.sample:
            for name, none in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("seed", 0)):
                if getattr(self, name) != none:
                    raise UserError(
                        f"{name} is {getattr(self, name)}, but nothing is sampled; add sample (--sample), or leave it"
                    )

    @property
    def beams(self) -> int:
        """Live hypotheses of a sentence."""
        return self.n_best if self.sample else self.beam_size

    def compiled(self) -> DecodeSettings:
        """The settings that a compiled program depends on: lengths go into it with each sentence."""
        return dataclasses.replace(self, min_length=0, max_extra=0, max_length=0)

    def limit(self, source_length: int, positions: int) -> int:
        """The most pieces, `</s>` included, of the translation of a source with as many pieces, `</s>` included."""
        asked = min(source_length + self.max_extra, self.max_length or positions)
        return max(1, min(asked, positions))


class State(NamedTuple):
    """A search under way: B rows, each with a sentence at a step of its own, or done.

    Slots of the cache are steps of the whole batch: a row that has made n steps has its past in the n slots before
    `slot`, whatever row it shares the batch with.
    """

    slot: jax.Array
    """int32 []: where the next step is written."""
    done_B: jax.Array
    """bool: the search of this row is over, or has none; nothing of the row changes any more."""
    broken_B: jax.Array
    """bool: the model gave scores that are not finite."""
    number_B: jax.Array
    """uint32: the sentence's number, from which its random numbers come."""
    position_B: jax.Array
    """int32: pieces that the live hypotheses have."""
    least_B: jax.Array
    """int32: pieces before the end is allowed ..."""
    limit_B: jax.Array
    """... and the most there can be, `</s>` included."""
    live_BK: jax.Array
    """float32: log-probability of each live hypothesis, best first; NEVER where there is none."""
    tokens_BKT: jax.Array
    """int32: its pieces, each in the slot of its step."""
    lineage_BKT: jax.Array
    """int32: see `step.decode_step`."""
    finished_BP: jax.Array
    """float32: score of each finished hypothesis, best first; NEVER where there is none."""
    log_prob_BP: jax.Array
    finished_tokens_BPT: jax.Array
    length_BP: jax.Array
    cut_BP: jax.Array
    """bool: ended by the limit."""
    count_B: jax.Array
    """int32: how many hypotheses have ended."""
    led_B: jax.Array
    """bool: at some step the best candidate of all was an end."""
    cache: Cache
    source: Source


def empty_state(config: TransformerConfig, settings: DecodeSettings, rows: int, length: int, slots: int) -> State:
    """Rows without sentences, all done."""
    k = settings.beams

    def full(value: Any, dtype: Any, *shape: int) -> jax.Array:
        return jnp.full((rows, *shape), value, dtype)

    return State(
        slot=jnp.zeros((), jnp.int32),
        done_B=full(True, bool),
        broken_B=full(False, bool),
        number_B=full(0, jnp.uint32),
        position_B=full(0, jnp.int32),
        least_B=full(0, jnp.int32),
        limit_B=full(1, jnp.int32),
        live_BK=full(NEVER, jnp.float32, k),
        tokens_BKT=full(0, jnp.int32, k, slots),
        lineage_BKT=full(-1, jnp.int32, k, slots),
        finished_BP=full(NEVER, jnp.float32, k),
        log_prob_BP=full(NEVER, jnp.float32, k),
        finished_tokens_BPT=full(0, jnp.int32, k, slots),
        length_BP=full(0, jnp.int32, k),
        cut_BP=full(False, bool, k),
        count_B=full(0, jnp.int32),
        led_B=full(False, bool),
        cache=steps.empty_cache(config, rows, k, slots),
        source=steps.empty_source(config, rows, length),
    )


def penalty(settings: DecodeSettings, length: Any) -> jax.Array:
    """What a log-probability is divided by; float32, in the shape of `length`."""
    length = jnp.asarray(length, jnp.float32)
    base = (5.0 + length) / 6.0 if settings.length_penalty == "gnmt" else length
    return jnp.power(base, settings.alpha)


def run_steps(
    config: TransformerConfig,
    settings: DecodeSettings,
    weights: Weights,
    state: State,
    most_steps: jax.Array,
    until_done: jax.Array,
) -> State:
    """Steps until so many rows are done, or so many steps are made; the cache must have slots for them.

    Args:
      most_steps, until_done: int32 [].
    """

    def unfinished(carry: tuple[jax.Array, State]) -> jax.Array:
        made, state = carry
        return (made < most_steps) & (jnp.sum(state.done_B) < until_done)

    def advance(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        made, state = carry
        return made + 1, search_step(config, settings, weights, state)

    return jax.lax.while_loop(unfinished, advance, (jnp.zeros((), jnp.int32), state))[1]


def search_step(config: TransformerConfig, settings: DecodeSettings, weights: Weights, state: State) -> State:
    """One more piece for each live hypothesis of each row that is not done."""
    batch, beams, _ = state.tokens_BKT.shape
    before = jnp.maximum(state.slot - 1, 0)
    last_BK = jax.lax.dynamic_index_in_dim(state.tokens_BKT, before, axis=2, keepdims=False)
    start = jnp.asarray(config.target_vocab_size - 1, jnp.int32)
    last_BK = jnp.where(state.position_B[:, None] == 0, start, last_BK)
    own_BK1 = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32)[None, :, None], (batch, beams, 1))
    lineage_BKT = jax.lax.dynamic_update_slice_in_dim(state.lineage_BKT, own_BK1, state.slot, axis=2)
    scores_VX, cache = steps.decode_step(
        config, weights, last_BK, state.position_B, state.slot, state.cache, lineage_BKT, state.source
    )
    return advance(config, settings, state._replace(cache=cache, lineage_BKT=lineage_BKT), scores_VX)


def advance(config: TransformerConfig, settings: DecodeSettings, state: State, scores_VX: jax.Array) -> State:
    """The state after a step in which the model scored every piece after each live hypothesis."""
    choose = _sample if settings.sample else _search
    changed = choose(config, settings, state, scores_VX.astype(jnp.float32))
    kept: dict[str, Any] = {
        name: jnp.where(state.done_B.reshape(state.done_B.shape + (1,) * (new.ndim - 1)), getattr(state, name), new)
        for name, new in changed.items()
    }
    return state._replace(slot=state.slot + 1, **kept)


def _search(
    config: TransformerConfig, settings: DecodeSettings, state: State, scores_VX: jax.Array
) -> dict[str, jax.Array]:
    """The fields of the state that a step of beam search changes."""
    batch, beams, _ = state.tokens_BKT.shape
    length_B = state.position_B + 1
    at_limit_B = length_B >= state.limit_B
    top_X, total_X = _normaliser(scores_VX)
    offered = min(beams + 1, scores_VX.shape[0])  # K that go on, and perhaps the end
    best_CX, piece_CX = top_pieces(scores_VX, offered)
    log_probs_CX = jnp.where(piece_CX == 0, NEVER, best_CX - top_X[None] - jnp.log(total_X)[None])
    end_X = scores_VX[0] - top_X - jnp.log(total_X)

    # Candidates: what goes on (of one beam C of them), and the end of each beam.
    def by_sentence(x_CX: jax.Array) -> jax.Array:
        return x_CX.T.reshape(batch, beams, -1)

    on_BM = (state.live_BK[..., None] + by_sentence(log_probs_CX)).reshape(batch, -1)
    end_BK = state.live_BK + end_X.reshape(batch, beams)
    end_BK = jnp.where((state.position_B < state.least_B)[:, None], NEVER, end_BK)
    live_BK, chosen_BK = jax.lax.top_k(on_BM, beams)
    parent_BK = chosen_BK // offered
    token_BK = jnp.take_along_axis(by_sentence(piece_CX).reshape(batch, -1), chosen_BK, axis=1)
    live_BK = jnp.maximum(live_BK, NEVER)

    ranks = beams if settings.stop != "bound" or beams == 1 else 2 * beams
    all_B1M = jnp.concatenate([on_BM, end_BK], axis=1)[:, None]

    def counts(score_BK: jax.Array) -> jax.Array:
        """Whether a candidate is possible, and among the best of its sentence."""
        better_BK = jnp.sum(all_B1M > score_BK[..., None], axis=-1)
        return (better_BK < ranks) & (score_BK > _POSSIBLE)

    penalty_B1 = penalty(settings, length_B)[:, None]
    ended_BK = counts(end_BK)
    # Where the limit counts as an end, what is still live is finished with it.
    cut_BK = counts(live_BK) & at_limit_B[:, None] & (settings.stop != "bound")
    tokens_BKT = _set_slot(_by_parent(state.tokens_BKT, parent_BK), token_BK, state.slot)
    ended_tokens_BKT = _set_slot(state.tokens_BKT, jnp.zeros_like(token_BK), state.slot)

    def pooled(pool: jax.Array, ended: jax.Array, cut: jax.Array) -> jax.Array:
        return jnp.concatenate([pool, ended, cut], axis=1)

    score_BM = pooled(
        state.finished_BP,
        jnp.where(ended_BK, end_BK / penalty_B1, NEVER),
        jnp.where(cut_BK, live_BK / penalty_B1, NEVER),
    )
    finished_BP, from_BP = jax.lax.top_k(score_BM, beams)
    lengths_BK = jnp.broadcast_to(length_B[:, None], (batch, beams))

    def kept(pool: jax.Array, ended: jax.Array, cut: jax.Array) -> jax.Array:
        return _by_parent(pooled(pool, ended, cut), from_BP)

    count_B = state.count_B + jnp.sum(ended_BK, axis=1) + jnp.sum(cut_BK, axis=1)
    led_B = state.led_B | (end_BK.max(1) >= on_BM.max(1))
    over_B = at_limit_B | (live_BK[:, 0] <= _POSSIBLE)
    if beams == 1:
        over_B |= count_B >= 1
    elif settings.stop == "bound":
        # Log-probabilities are at most 0, so the largest penalty that can still come gives the best score.
        largest_B = jnp.maximum(penalty(settings, length_B + 1), penalty(settings, state.limit_B))
        over_B |= live_BK[:, 0] / largest_B <= finished_BP[:, settings.n_best - 1]
    elif settings.stop == "huggingface":
        over_B |= (finished_BP[:, -1] > _POSSIBLE) & (live_BK[:, 0] / penalty_B1[:, 0] <= finished_BP[:, -1])
    elif settings.alpha != 0:
        over_B |= count_B >= beams
    else:  # CTranslate2 without a penalty: once the best candidate of a step has been an end.
        over_B |= (count_B >= settings.n_best) & led_B
    broken_B = ~jnp.isfinite((top_X + total_X).reshape(batch, beams)).all(axis=1)
    return {
        "position_B": length_B,
        "live_BK": live_BK,
        "tokens_BKT": tokens_BKT,
        "lineage_BKT": _by_parent(state.lineage_BKT, parent_BK),
        "finished_BP": finished_BP,
        "log_prob_BP": kept(state.log_prob_BP, end_BK, live_BK),
        "finished_tokens_BPT": kept(state.finished_tokens_BPT, ended_tokens_BKT, tokens_BKT),
        "length_BP": kept(state.length_BP, lengths_BK, lengths_BK),
        "cut_BP": kept(state.cut_BP, jnp.zeros_like(cut_BK), jnp.ones_like(cut_BK)),
        "count_B": count_B,
        "led_B": led_B,
        "broken_B": broken_B,
        "done_B": over_B | broken_B,
    }


def _sample(
    config: TransformerConfig, settings: DecodeSettings, state: State, scores_VX: jax.Array
) -> dict[str, jax.Array]:
    """The fields of the state that a step of sampling changes; each beam is one sample, P its place when finished.

    The random number of a piece comes from the seed, the sentence's number, the sample's and the position alone.
    """
    batch, beams, _ = state.tokens_BKT.shape
    length_B = state.position_B + 1
    top_X, total_X = _normaliser(scores_VX)
    too_short_X = jnp.repeat(state.position_B < state.least_B, beams)
    allowed_VX = scores_VX.at[0].set(jnp.where(too_short_X, NEVER, scores_VX[0]))
    shares_VX = _sampling_shares(settings, allowed_VX)
    cumulative_VX = jnp.cumsum(shares_VX, axis=0)

    def uniform(number: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(settings.seed), number), position)
        return jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(key, k)))(jnp.arange(beams))

    drawn_X = jax.vmap(uniform)(state.number_B, state.position_B).reshape(-1)
    # The first piece whose cumulative share is above the draw; it has a share of its own.
    token_X = jnp.sum(cumulative_VX <= (drawn_X * cumulative_VX[-1])[None], axis=0).astype(jnp.int32)
    token_X = jnp.minimum(token_X, config.target_vocab_size - 2)
    log_prob_X = jnp.take_along_axis(scores_VX, token_X[None], axis=0)[0] - top_X - jnp.log(total_X)
    token_BK, log_prob_BK = token_X.reshape(batch, beams), log_prob_X.reshape(batch, beams)

    is_live_BK = state.live_BK > _POSSIBLE
    live_BK = jnp.where(is_live_BK, state.live_BK + log_prob_BK, NEVER)
    tokens_BKT = _set_slot(state.tokens_BKT, token_BK, state.slot)
    at_limit_B1 = (length_B >= state.limit_B)[:, None]
    ended_BK = is_live_BK & ((token_BK == 0) | at_limit_B1)
    over_B = ~jnp.any(is_live_BK & ~ended_BK, axis=1)
    broken_B = ~jnp.isfinite((top_X + total_X).reshape(batch, beams)).all(axis=1)
    return {
        "position_B": length_B,
        "live_BK": jnp.where(ended_BK, NEVER, live_BK),
        "tokens_BKT": tokens_BKT,
        "finished_BP": jnp.where(ended_BK, live_BK / penalty(settings, length_B)[:, None], state.finished_BP),
        "log_prob_BP": jnp.where(ended_BK, live_BK, state.log_prob_BP),
        "finished_tokens_BPT": jnp.where(ended_BK[..., None], tokens_BKT, state.finished_tokens_BPT),
        "length_BP": jnp.where(ended_BK, length_B[:, None], state.length_BP),
        "cut_BP": jnp.where(ended_BK, token_BK != 0, state.cut_BP),
        "count_B": state.count_B + jnp.sum(ended_BK, axis=1),
        "broken_B": broken_B,
        "done_B": over_B | broken_B,
    }


def _sampling_shares(settings: DecodeSettings, scores_VX: jax.Array) -> jax.Array:
    """Unnormalised probabilities after temperature, top-k and then top-p (Holtzman et al. 2020)."""
    scores_VX = scores_VX / settings.temperature
    shares_VX = jnp.exp(scores_VX - scores_VX.max(0, keepdims=True))
    if settings.top_k and settings.top_k < scores_VX.shape[0]:
        least_X = top_pieces(scores_VX, settings.top_k)[0][-1]
        shares_VX = jnp.where(scores_VX >= least_X[None], shares_VX, 0.0)
    if settings.top_p < 1:
        sorted_VX = -jnp.sort(-shares_VX, axis=0)
        above_VX = jnp.cumsum(sorted_VX, axis=0) - sorted_VX  # the share of those before
        inside_VX = above_VX < settings.top_p * sorted_VX.sum(0, keepdims=True)
        least_X = jnp.where(inside_VX, sorted_VX, jnp.inf).min(0)
        shares_VX = jnp.where(shares_VX >= least_X[None], shares_VX, 0.0)
    return shares_VX


def _normaliser(scores_VX: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest score [X], and the sum of the exponentials of the scores less that [X]."""
    top_X = scores_VX.max(0)
    return top_X, jnp.exp(scores_VX - top_X[None]).sum(0)


def top_pieces(scores_VX: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` highest of V scores, exactly, and their indices: [count, X] each, best first.

    In two stages: the scores are cut into groups, and only the groups with the `count` highest maxima, which hold all
    of the answer, are looked at. Selecting from all of V at once costs several times as much on CPU.
    """
    size, columns = scores_VX.shape
    width = 128
    groups = size // width
    if size % width or groups <= count:
        best_XC, index_XC = jax.lax.top_k(scores_VX.T, count)
        return best_XC.T, index_XC.T
    grouped_GWX = scores_VX.reshape(groups, width, columns)
    group_XC = jnp.sort(jax.lax.top_k(grouped_GWX.max(1).T, count)[1], axis=-1)
    rows_CWX = group_XC.T[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None, :, None]
    rows_MX = rows_CWX.reshape(-1, columns)
    best_XC, place_XC = jax.lax.top_k(jnp.take_along_axis(scores_VX, rows_MX, axis=0).T, count)
    return best_XC.T, jnp.take_along_axis(rows_MX, place_XC.T, axis=0)


def _by_parent(x_BK: jax.Array, parent_BK: jax.Array) -> jax.Array:
    """x [B, K, ...] with its beams chosen by index."""
    return jnp.take_along_axis(x_BK, parent_BK.reshape(parent_BK.shape + (1,) * (x_BK.ndim - 2)), axis=1)


def _set_slot(tokens_BKT: jax.Array, token_BK: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(tokens_BKT, token_BK[..., None], slot, axis=2)
