"""Keeps the rows of a batch busy: sentences enter as others finish, and the batch shrinks when none are left.

Between chunks of steps the host takes finished rows out and puts new sentences in. A new sentence costs the copy of
its source's keys and values alone: its past begins at the present slot of the cache, and what other sentences wrote
before is hidden from it. When the slots are used up the cache is packed anew: slots that no live row needs go, and it
grows or shrinks to the next of a few sizes, so that few programs are compiled.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit
from jax.sharding import Mesh

from transformer_jax import sharding
from transformer_jax.config import MeshConfig, UserError
from transformer_jax.translation import decode, state_rows
from transformer_jax.translation import step as steps
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.decode import NEVER, DecodeSettings, State
from transformer_jax.translation.model import Transformer
from transformer_jax.translation.step import Source

ROOM = 16
"""Steps for which a newly packed cache has slots, or as many as its rows can still need."""
SHRINK = 4
"""Batches are as large as asked for, or smaller by powers of this; a few rows cost little more than one."""
POLL = 8
"""Steps between looks for new sentences while none are waiting but more may come."""


class Sentence(NamedTuple):
    """One source: its number, which sampling depends on, and its ids with `</s>`."""

    number: int
    ids: Sequence[int]


class Hypothesis(NamedTuple):
    """One translation."""

    ids: list[int]
    """Pieces, without `</s>`."""
    score: float
    """Log-probability over the length penalty."""
    log_prob: float
    cut: bool
    """It was ended by the limit of its length, not by `</s>`."""


More = Callable[[bool], Sequence[Sentence] | None]
"""Gives the next sentences; none if there are none for now, None when there will be no more. It may wait for some only
where it is called with True: nothing is being searched."""


class Programs(NamedTuple):
    """The compiled functions for a model, settings and a mesh."""

    weights: Any
    encode: Any
    empty: Any
    run: Any
    insert: Any
    repack: Any


@functools.lru_cache(maxsize=8)
def programs(config: TransformerConfig, settings: DecodeSettings, mesh: Mesh) -> Programs:
    """Everything that is jitted; each compiles once for each combination of sizes that is met."""
    rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    parts = sharding.batch_devices(mesh)
    fields: dict[str, Any] = dict.fromkeys(State._fields, rows) | {"slot": whole}
    of_state = State(**fields)
    model = Transformer(config)

    def encode(params: Any, ids_BS: jax.Array, sequence_ids_BS: jax.Array) -> Source:
        places_BS = jnp.broadcast_to(jnp.arange(ids_BS.shape[1], dtype=jnp.int32)[None], ids_BS.shape)
        memory: Any = model.apply({"params": params}, ids_BS, places_BS, sequence_ids_BS, method="encode")
        keys_values: Any = model.apply({"params": params}, memory, method="memory_keys_values")
        return steps.source_of(keys_values, sequence_ids_BS)

    def run(weights: Any, state: State, most_steps: jax.Array, until_done: jax.Array) -> State:
        return decode.run_steps(config, settings, weights, state, most_steps, until_done)

    return Programs(
        weights=jit(functools.partial(steps.decoder_weights, config), out_shardings=whole),
        encode=jit(encode, out_shardings=rows),
        empty=jit(
            functools.partial(decode.empty_state, config, settings), static_argnums=(0, 1, 2), out_shardings=of_state
        ),
        run=jit(run, donate_argnums=1, out_shardings=of_state),
        insert=jit(
            functools.partial(state_rows.insert, parts, settings.beams if settings.sample else 1),
            donate_argnums=0,
            out_shardings=of_state,
        ),
        repack=jit(functools.partial(state_rows.repack, parts), static_argnums=(3, 4), out_shardings=of_state),
    )


@dataclasses.dataclass
class _Group:
    """Encoded sentences, some of which may be in the batch already."""

    source: Source
    sentences: list[Sentence | None]
    """In the order of the rows; None is a row without a sentence, or one that was taken."""
    limits: np.ndarray
    length: int


class Decoder:
    """Translates a stream of ids with a fixed number of rows.

    Args:
      params: the model's parameters; arrays or numpy.
      batch_size: sentences that are searched at once, over all devices.
      mesh: the devices; None is one.

    Raises:
      UserError: a batch that does not divide over the devices.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        settings: DecodeSettings,
        batch_size: int = 16,
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.settings = config, settings
        self.mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1]) if mesh is None else mesh
        self.parts = sharding.batch_devices(self.mesh)
        if batch_size < 1 or batch_size % self.parts:
            raise UserError(
                f"batch_size is {batch_size}; it must be a multiple of {self.parts}, the devices that share it"
            )
        self.sizes = [batch_size // self.parts]
        while self.sizes[-1] >= 2 * SHRINK:
            self.sizes.append(self.sizes[-1] // SHRINK)
        self.programs = programs(config, settings.compiled(), self.mesh)
        params = sharding.unbox(params)
        self.params = jax.device_put(_for_encoding(params), sharding.replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            self.weights = self.programs.weights(params)

    def with_settings(self, settings: DecodeSettings) -> Decoder:
        """The same model and batch with other settings."""
        other = copy.copy(self)
        other.settings, other.programs = settings, programs(self.config, settings.compiled(), self.mesh)
        return other

    def decode(self, more: More) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
        """Each sentence's number and its hypotheses, best first: those that finished since the last time, if any.

        Raises:
          UserError: scores that are not finite, or a device without room for so many hypotheses.
        """
        search = _Search(self, more)
        while True:
            try:
                with jax.set_mesh(self.mesh):
                    found = search.advance()
            except jax.errors.JaxRuntimeError as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                raise UserError(
                    f"memory ran out with {self.sizes[0] * self.parts} sentences of {self.settings.beams} hypotheses "
                    "each; lower the beam size or the batch size"
                ) from None
            if found is None:
                return
            yield found


def _for_encoding(params: Any) -> Any:
    """The parameters that `encode` reads; of the decoder's layers what makes the source's keys and values."""
    layers = {name: layer for name, layer in params["decoder"].items() if "cross_attention" in layer}
    read = {n: {"cross_attention": {k: x["cross_attention"][k] for k in ("key", "value")}} for n, x in layers.items()}
    return {"embeddings": params["embeddings"], "encoder": params["encoder"], "decoder": read}


class _Search:
    """What the host knows of a batch under way. Rows are counted within each device's share: [device][row]."""

    def __init__(self, decoder: Decoder, more: More) -> None:
        self.decoder, self.more, self.over = decoder, more, False
        self.pending: collections.deque[Sentence] = collections.deque()
        self.groups: collections.deque[_Group] = collections.deque()
        self.state: State | None = None
        self.size = self.slots = self.length = self.slot = 0
        self.rows: list[list[Sentence | None]] = [[] for _ in range(decoder.parts)]
        self.began = np.zeros((decoder.parts, 0), np.int64)
        """The slot of each row's first step."""
        self.limits = np.zeros((decoder.parts, 0), np.int64)

    def advance(self) -> list[tuple[int, list[Hypothesis]]] | None:
        """Fill the batch and run a chunk of steps; None when all is done."""
        self._fetch()
        if not (self.live or self.pending or self.groups):
            return None if self.over else []
        self._encode()
        self._fit()
        self._insert()
        return self._run()

    @property
    def live(self) -> int:
        return sum(row is not None for rows in self.rows for row in rows)

    @property
    def waiting(self) -> int:
        return sum(s is not None for g in self.groups for s in g.sentences)

    def _fetch(self) -> None:
        """Have enough sentences at hand to fill the batch."""
        want = self.decoder.sizes[0] * self.decoder.parts
        while not self.over and len(self.pending) + self.waiting < want:
            found = self.more(not (self.live or self.pending or self.groups))
            if found is None:
                self.over = True
            elif not found:
                break
            else:
                self.pending.extend(found)

    def _encode(self) -> None:
        """Encode what the free rows can take, in groups of a quarter of the batch."""
        d = self.decoder
        while self.pending and self.waiting + self.live < d.sizes[0] * d.parts:
            most = d.sizes[min(1, len(d.sizes) - 1)]
            size = min((s for s in d.sizes if s * d.parts >= len(self.pending)), default=most)
            size = min(size, most)
            taken = [self.pending.popleft() for _ in range(min(size * d.parts, len(self.pending)))]
            placed: list[Sentence | None] = [None] * (size * d.parts)
            for i, sentence in enumerate(taken):
                placed[i % d.parts * size + i // d.parts] = sentence
            longest = max(len(s.ids) for s in taken)
            steps.check_length(d.config, longest, "a source sentence")
            length = min(state_rows.source_slots(longest), d.config.max_position_embeddings)
            ids_ES = np.full((len(placed), length), d.config.source_vocab_size - 1, np.int32)
            sequence_ids_ES = np.zeros((len(placed), length), np.int32)
            limits_E = np.ones(len(placed), np.int32)
            for i, s in enumerate(placed):
                if s is not None:
                    ids_ES[i, : len(s.ids)], sequence_ids_ES[i, : len(s.ids)] = s.ids, 1
                    limits_E[i] = d.settings.limit(len(s.ids), d.config.max_position_embeddings)
            batch = sharding.put_batch({"ids": ids_ES, "sequence_ids": sequence_ids_ES}, d.mesh)
            source = d.programs.encode(d.params, batch["ids"], batch["sequence_ids"])
            self.groups.append(_Group(source, placed, limits_E, length))

    def _fit(self) -> None:
        """Make the batch as large as its sentences need, with slots for the next steps."""
        d = self.decoder
        live = [[r for r, s in enumerate(rows) if s is not None] for rows in self.rows]
        entering = np.zeros(d.parts, np.int64)
        for group in self.groups:
            each = np.array([s is not None for s in group.sentences]).reshape(d.parts, -1)
            entering += each.sum(1)
        needed = max(len(rows) + int(n) for rows, n in zip(live, entering, strict=True))
        size = min((s for s in d.sizes if s >= needed), default=d.sizes[0])
        if size < self.size and not (self.over and not self.pending):
            size = self.size  # more is to come
        lengths = [len(s.ids) for rows in self.rows for s in rows if s is not None]
        longest = max([*lengths, *(g.length for g in self.groups)], default=1)
        if self.state is not None and size == self.size and self.slot < self.slots and longest <= self.length:
            return
        first = min((int(self.began[p][r]) for p, rows in enumerate(live) for r in rows), default=self.slot)
        age = self.slot - first
        ends = [int(self.began[p][r] + self.limits[p][r]) - self.slot for p, rows in enumerate(live) for r in rows]
        ends += [int(x) for g in self.groups for x, s in zip(g.limits, g.sentences, strict=True) if s is not None]
        slots = state_rows.power_slots(age + min(ROOM, max(ends, default=1)))
        length = min(state_rows.power_slots(longest), d.config.max_position_embeddings)
        if self.state is None:
            self.state = d.programs.empty(size * d.parts, length, slots)
            self.began, self.limits = (np.zeros((d.parts, size), np.int64) for _ in range(2))
            self.rows = [[None] * size for _ in range(d.parts)]
        else:
            # Rows that are not live come after, whichever they are: all of them are done.
            chosen = np.full((d.parts, size), self.size)
            for p, rows in enumerate(live):
                chosen[p, : len(rows)] = rows
            index = self._put(chosen.reshape(-1).astype(np.int32))
            self.state = d.programs.repack(self.state, index, np.int32(first), slots, length)
            self.rows = [[[*rows, None][r] for r in chosen[p]] for p, rows in enumerate(self.rows)]
            padded = (np.pad(x, ((0, 0), (0, 1))) for x in (self.began - first, self.limits))
            self.began, self.limits = (np.take_along_axis(x, chosen, axis=1) for x in padded)
            self.slot -= first
        self.size, self.slots, self.length = size, slots, length

    def _insert(self) -> None:
        """Put encoded sentences into free rows of their device."""
        d = self.decoder
        assert self.state is not None
        for group in self.groups:
            share = len(group.sentences) // d.parts
            target_E = np.full(len(group.sentences), self.size, np.int32)
            numbers_E = np.zeros(len(group.sentences), np.uint32)
            for p, rows in enumerate(self.rows):
                free = iter([r for r, s in enumerate(rows) if s is None])
                for e in range(p * share, (p + 1) * share):
                    sentence = group.sentences[e]
                    row = None if sentence is None else next(free, None)
                    if sentence is None or row is None:
                        continue
                    rows[row], group.sentences[e] = sentence, None
                    self.began[p, row], self.limits[p, row] = self.slot, group.limits[e]
                    target_E[e], numbers_E[e] = row, sentence.number % 2**32
            if (target_E < self.size).any():
                least_E = np.minimum(group.limits, d.settings.min_length).astype(np.int32)
                arrays = {"target": target_E, "number": numbers_E, "least": least_E, "limit": group.limits}
                put = sharding.put_batch(arrays, d.mesh)
                self.state = d.programs.insert(self.state, group.source, *(put[name] for name in arrays))
        self.groups = collections.deque(g for g in self.groups if any(s is not None for s in g.sentences))

    def _run(self) -> list[tuple[int, list[Hypothesis]]]:
        """Steps until rows are worth exchanging, or slots are used up; what was found for those that are done."""
        d = self.decoder
        assert self.state is not None
        total, live = self.size * d.parts, self.live
        more_to_come = bool(self.pending or self.groups or not self.over)
        smaller = max((s for s in d.sizes if s < self.size), default=0)
        # With nothing to come, the batch is worth packing when the rest fits the next smaller size.
        rest = max(0, live - max(1, total // 8)) if more_to_come else (smaller * d.parts if live > smaller else 0)
        most = self.slots - self.slot
        if not (self.over or self.pending or self.groups):
            most = min(most, POLL)
        self.state = d.programs.run(d.weights, self.state, np.int32(most), np.int32(total - rest))
        slot, done_B = jax.device_get((self.state.slot, self.state.done_B))
        self.slot = int(slot)
        done = [
            (p, r)
            for p, rows in enumerate(self.rows)
            for r, sentence in enumerate(rows)
            if sentence is not None and done_B[p * self.size + r]
        ]
        if not done:
            return []
        fields = self.state._asdict()
        found = jax.device_get({name: x for name, x in fields.items() if name not in ("slot", "cache", "source")})
        results = []
        for p, r in done:
            sentence = self.rows[p][r]
            assert sentence is not None
            row = {name: x[p * self.size + r] for name, x in found.items()}
            if row["broken_B"]:
                raise UserError(
                    "the scores that the model gives are not finite: its training has diverged; take an earlier step, "
                    "RUN@STEP"
                )
            results.append((sentence.number, _hypotheses(d.settings, row, int(self.began[p, r]))))
            self.rows[p][r] = None
        return results

    def _put(self, rows: np.ndarray) -> jax.Array:
        return sharding.put_batch({"rows": rows}, self.decoder.mesh)["rows"]


def _hypotheses(settings: DecodeSettings, row: dict[str, Any], began: int) -> list[Hypothesis]:
    """What the search of one row found, best first; live hypotheses only where too few have ended by the limit."""
    found = []
    for p in np.argsort(-row["finished_BP"], kind="stable"):
        if row["finished_BP"][p] > NEVER / 2:
            length = int(row["length_BP"][p])
            cut = bool(row["cut_BP"][p])
            ids = row["finished_tokens_BPT"][p, began : began + length - (not cut)].tolist()
            found.append(Hypothesis(ids, float(row["finished_BP"][p]), float(row["log_prob_BP"][p]), cut))
    length = int(row["position_B"])
    over = decode.penalty(settings, length)
    for k, log_prob in enumerate(row["live_BK"].tolist()):
        if len(found) < settings.n_best and log_prob > NEVER / 2:
            ids = row["tokens_BKT"][k, began : began + length].tolist()
            found.append(Hypothesis(ids, log_prob / float(over), log_prob, True))
    return found[: settings.n_best]
