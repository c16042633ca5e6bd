"""The rows of a search's state, as whole arrays: sentences are put in, rows are packed anew, caches change their size.

All of it runs on the devices, jitted by `batching.programs`; which sentence takes which row is `batching`'s business.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.translation import step as steps
from transformer_jax.translation.decode import NEVER, State
from transformer_jax.translation.step import Source


def insert(
    parts: int,
    live_at_start: int,
    state: State,
    source: Source,
    target_E: jax.Array,
    number_E: jax.Array,
    least_E: jax.Array,
    limit_E: jax.Array,
) -> State:
    """Begin the search of new sentences.

    Rows lie on `parts` devices, each with its share of the batch and of the new sentences; none moves to another.

    Args:
      live_at_start: hypotheses of a new sentence.
      target_E: int32, the row within its device's share that each sentence takes; one past the last drops it.
      number_E, least_E, limit_E: as in `State`.
    """
    length = state.source.sequence_ids_BS.shape[1]

    def put(old: jax.Array, new: Any) -> jax.Array:
        new = jnp.broadcast_to(jnp.asarray(new, old.dtype), (target_E.shape[0], *old.shape[1:]))
        share = jax.vmap(lambda o, t, n: o.at[t].set(n, mode="drop"))
        old, targets, new = (x.reshape(parts, x.shape[0] // parts, *x.shape[1:]) for x in (old, target_E, new))
        return share(old, targets, new).reshape(-1, *old.shape[2:])

    def longer(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, length - x.shape[axis])
        return jnp.pad(x, widths)

    def put_source(old: Any, new: Any) -> Any:
        return type(old)(put(old.key, longer(new.key, 3)), put(old.value, longer(new.value, 2)))

    # Beams that begin alike would stay alike, so a search starts from one; samples go apart by themselves.
    beams_1K = jnp.where(jnp.arange(state.live_BK.shape[1]) < live_at_start, 0.0, NEVER)[None]
    return state._replace(
        done_B=put(state.done_B, False),
        broken_B=put(state.broken_B, False),
        number_B=put(state.number_B, number_E),
        position_B=put(state.position_B, 0),
        least_B=put(state.least_B, least_E),
        limit_B=put(state.limit_B, limit_E),
        live_BK=put(state.live_BK, beams_1K),
        lineage_BKT=put(state.lineage_BKT, -1),
        finished_BP=put(state.finished_BP, NEVER),
        log_prob_BP=put(state.log_prob_BP, NEVER),
        length_BP=put(state.length_BP, 0),
        cut_BP=put(state.cut_BP, False),
        count_B=put(state.count_B, 0),
        led_B=put(state.led_B, False),
        source=Source(
            tuple(map(put_source, state.source.keys_values, source.keys_values)),
            put(state.source.sequence_ids_BS, longer(source.sequence_ids_BS, 1)),
        ),
    )


def repack(parts: int, state: State, row_B: jax.Array, first_slot: jax.Array, slots: int, length: int) -> State:
    """The rows `row_B` of each device's share, with other sizes of cache and source.

    Args:
      row_B: int32, for each new row the row within its device's share that it was; one past the last makes a row
        without a sentence.
      first_slot: int32 [], the first slot that is needed: the new first one.
      slots, length: the new numbers of slots, and of pieces of the longest source.
    """

    def choose(x: jax.Array, fill: Any = 0) -> jax.Array:
        shared = x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
        share = jax.vmap(lambda o, i: o.at[i].get(mode="fill", fill_value=fill))
        return share(shared, row_B.reshape(parts, -1)).reshape(-1, *x.shape[1:])

    beams = state.live_BK.shape[1]

    def shifted(x: jax.Array, axis: int, fill: int = 0, each: int = 1) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, slots * each)
        x = jnp.pad(choose(x, fill), widths, constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(x, first_slot * each, slots * each, axis)

    def shifted_cache(kv: Any) -> Any:
        return type(kv)(shifted(kv.key, 3, each=beams), shifted(kv.value, 2, each=beams))

    def sized(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, max(0, length - x.shape[axis]))
        return jax.lax.slice_in_dim(jnp.pad(choose(x), widths), 0, length, axis=axis)

    moved = {"tokens_BKT": 0, "finished_tokens_BPT": 0, "lineage_BKT": -1}
    kept: dict[str, Any] = {
        name: shifted(x, 2, moved[name]) if name in moved else choose(x, True if name == "done_B" else 0)
        for name, x in state._asdict().items()
        if name not in ("slot", "cache", "source")
    }
    return State(
        **kept,
        slot=state.slot - first_slot,
        cache=tuple(map(shifted_cache, state.cache)),
        source=Source(
            tuple(steps.KeysValues(sized(kv.key, 3), sized(kv.value, 2)) for kv in state.source.keys_values),
            sized(state.source.sequence_ids_BS, 1),
        ),
    )


def power_slots(length: int) -> int:
    """The next power of two, at least 32."""
    return max(32, 1 << (length - 1).bit_length())


def source_slots(length: int) -> int:
    """The length to which sources are padded to be encoded: 32, 48, 64, 96, 128, 192, ..."""
    power = power_slots(length)
    return power * 3 // 4 if length <= power * 3 // 4 and power > 32 else power
