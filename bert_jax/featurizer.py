"""Features of rows from a frozen encoder (Devlin et al. 2019, section 5.3): one vector a row, or one a piece.

A row's features do not depend on what it is computed beside: its own length alone chooses the padded length, rows of
one batch do not see each other, and padding weighs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import activations
from bert_jax.activations import INPUTS
from bert_jax.finetune.loading import Encoder
from bert_jax.finetune.rows import Arrays, ladder, lengths
from transformer_jax import sharding
from transformer_jax.config import MeshConfig, UserError

Which = Literal["mean", "cls", "pooled", "tokens"]


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """Which features."""

    features: Which = "mean"
    """The mean over all pieces of the row, [CLS] and [SEP] included; the vector of [CLS]; the pooled output (the
    pooler's, of the last layer); or the vector of every piece."""
    layers: tuple[int, ...] = (-1,)
    """0 is the embeddings, 1 the first layer, -1 the last."""
    join: Literal["concat", "sum"] = "concat"
    """What becomes of several layers."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the result; the encoder always runs in float32."""
    batch_tokens: int = 8192
    """Pieces of a batch on each device, padding included. The result does not depend on it."""
    precision: Literal["highest", "high", "default"] = "highest"
    """Of the matrix products on GPU and TPU: `default` is faster, and rounds them to bfloat16 or TF32."""

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise UserError(f"batch_tokens is {self.batch_tokens}; it must be at least 1")
        if self.features == "pooled" and self.layers != (-1,):
            raise UserError("the pooled output is of the last layer alone; leave the layers out, or take cls or mean")


class Batch(NamedTuple):
    """Features of some rows.

    Attributes:
      rows: int64 [B], their numbers.
      values: [B, F], or for tokens [B, L, F] with L the padded length of the batch.
    """

    rows: np.ndarray
    values: np.ndarray


class Featurizer:
    """An encoder on all devices, which share the rows.

    Args:
      encoder: from `bert_jax.finetune.loading.load_encoder`.

    Attributes:
      size: numbers in a vector, F.

    Raises:
      UserError: a layer that is not there, no pooler for pooled output, or [CLS] of a model in which it sees nothing.
    """

    def __init__(self, encoder: Encoder, settings: FeatureConfig):
        config = encoder.config
        self.settings, self.config, self.tokenizer = settings, config, encoder.tokenizer
        self.layers = activations.layer_numbers(config, settings.layers)
        self.size = config.hidden_size * (len(self.layers) if settings.join == "concat" else 1)
        if settings.features == "pooled" and "pooler" not in encoder.params:
            raise UserError("this checkpoint has no pooler, so there is no pooled output; take cls or mean")
        if settings.features in ("cls", "pooled") and config.context == "left":
            raise UserError("[CLS] of this model sees nothing but itself (model.context is left); take mean or tokens")
        self.mesh = sharding.make_mesh(MeshConfig(preset="data_parallel"))
        self.devices = sharding.batch_devices(self.mesh)
        rows, whole = sharding.batch_sharding(self.mesh), sharding.replicated(self.mesh)
        used = ("embeddings", "encoder", *(["pooler"] if settings.features == "pooled" else []))
        self._params = jax.device_put({name: encoder.params[name] for name in used}, whole)
        self._run = jax.jit(functools.partial(_features, self), in_shardings=(whole, rows), out_shardings=whole)

    def batches(self, arrays: Arrays) -> Iterator[Batch]:
        """Features of rows, the shortest rows first.

        Args:
          arrays: INPUTS, int32 [n, L].

        Raises:
          UserError: a vector that is not finite.
        """
        length_N = lengths(arrays)
        order = np.argsort(length_N, kind="stable")
        longest = int(length_N.max(initial=1))
        steps = [n for n in ladder(self.config.max_position_embeddings) if n < longest]
        steps.append(next(n for n in ladder(self.config.max_position_embeddings) if n >= longest))
        pending: tuple[np.ndarray, jax.Array] | None = None
        with jax.set_mesh(self.mesh):
            for shortest, length in zip([0, *steps], steps, strict=False):
                rows = order[(length_N[order] > shortest) & (length_N[order] <= length)]
                full = self.devices * max(1, self.settings.batch_tokens // length)
                for start in range(0, len(rows), full):
                    some = rows[start : start + full]
                    found = self._run(self._params, self._batch(arrays, some, length, full))
                    # The last batch is read only now that this one runs.
                    if pending is not None:
                        yield self._read(*pending)
                    pending = some, found
        if pending is not None:
            yield self._read(*pending)

    def vectors(self, arrays: Arrays) -> np.ndarray:
        """One vector a row, [n, F]; not for tokens."""
        assert self.settings.features != "tokens", "tokens have a vector a piece"
        out = np.zeros((len(arrays["input_ids"]), self.size), self.settings.dtype)
        for rows, values in self.batches(arrays):
            out[rows] = values
        return out

    def _batch(self, arrays: Arrays, rows: np.ndarray, length: int, full: int) -> dict[str, jax.Array]:
        # Two sizes for each length: a few rows are not padded to a whole batch, and few programs are compiled.
        small = self.devices * max(1, full // self.devices // 8)
        missing = (small if len(rows) <= small else full) - len(rows)
        batch = {}
        for name in INPUTS:
            some = arrays[name][rows, :length]
            batch[name] = np.pad(some, [(0, missing), (0, length - some.shape[1])])
        return sharding.put_batch(batch, self.mesh)

    def _read(self, rows: np.ndarray, found: jax.Array) -> Batch:
        values = np.asarray(found)[: len(rows)]
        if not np.isfinite(values).all():
            raise UserError(
                f"features are not finite in {self.settings.dtype}: the model's training has diverged (take an earlier "
                "step, RUN@STEP)" + ("" if self.settings.dtype == "float32" else ", or float16 is too narrow for them")
            )
        return Batch(rows, values)


def _features(featurizer: Featurizer, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    settings = featurizer.settings
    with jax.default_matmul_precision(settings.precision):
        states = activations.hidden_states(featurizer.config, params, batch)
        if settings.features == "pooled":
            return activations.pooled(featurizer.config, params, states[-1]).astype(settings.dtype)
        chosen = [states[n] for n in featurizer.layers]
    x_BLF = jnp.concatenate(chosen, -1) if settings.join == "concat" else sum(chosen[1:], chosen[0])
    real_BL = batch["sequence_ids"] > 0
    if settings.features == "cls":
        return x_BLF[:, 0].astype(settings.dtype)
    # Padding may hold anything, and is not to count.
    x_BLF = jnp.where(real_BL[:, :, None], x_BLF, 0)
    if settings.features == "mean":
        # A row of the batch's own padding has no piece.
        count_B = jnp.maximum(real_BL.sum(-1), 1)
        x_BLF = x_BLF.sum(1) / count_B[:, None].astype(x_BLF.dtype)
    return x_BLF.astype(settings.dtype)
