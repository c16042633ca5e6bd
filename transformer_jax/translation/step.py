"""One position of the decoder for every beam at once, from keys and values that are kept: the inner loop of `decode`.

The same numbers as `Transformer.__call__` gives at that position, laid out for speed:

- Activations are [H, X], with the beams of all sentences (X = B K) innermost, and kernels [out, in]. On CPU a product
  of this form is up to a third faster than X rows times [in, out], and what follows reduces over the outer axis.
- The keys and values of past positions stay where they were written. Which of the K beams wrote the past of which beam
  is held in a table, `lineage`, and attention runs over all slots of a sentence under the mask that it gives. Putting
  a cache of [B, K, T, N, D] in the order of the surviving beams would move all of it at each step.
- The keys and values of the source are computed once for a sentence; its beams are the queries of one attention.

Suffixes: J the beam that wrote a slot, T slots, M = T J, X = B K.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax import masks
from transformer_jax.config import ConfigError
from transformer_jax.embeddings import sinusoids
from transformer_jax.layers import ACTIVATIONS, KeysValues, compute_dtype, wide_dtype
from transformer_jax.translation.config import TransformerConfig

Weights = dict[str, Any]
Cache = tuple[KeysValues, ...]
"""For each layer keys [B, N, D, M] and values [B, N, M, D]; slot and beam are one axis, M = T J."""


class Source(NamedTuple):
    """What decoding needs of the sentences to be translated."""

    keys_values: tuple[KeysValues, ...]
    """For each layer keys [B, N, D, S] and values [B, N, S, D] of the encoder's output."""
    sequence_ids_BS: jax.Array
    """int32, 1 where the sentence has pieces, 0 for padding."""


def decoder_weights(config: TransformerConfig, params: Any) -> Weights:
    """The decoder's parameters, cast and transposed as `decode_step` takes them; once for a model."""
    dtype = compute_dtype(config)
    wide = wide_dtype(dtype)

    def dense(*parts: Any) -> dict[str, jax.Array]:
        kernel_OI = jnp.concatenate([jnp.asarray(p["kernel"]).astype(dtype).T for p in parts])
        bias_O = jnp.concatenate([jnp.asarray(p["bias"]).astype(dtype) for p in parts])
        return {"kernel_OI": kernel_OI, "bias_O1": bias_O[:, None]}

    def norm(part: Any) -> dict[str, jax.Array]:
        return {name: jnp.asarray(part[name]).astype(wide)[:, None] for name in ("scale", "bias")}

    layers = []
    for i in range(config.num_decoder_layers):
        p = params["decoder"][f"layer_{i}"]
        own, cross, forward = p["attention"], p["cross_attention"], p["feed_forward"]
        layers.append(
            {
                "query_key_value": dense(own["query"], own["key"], own["value"]),
                "output": dense(own["output"]),
                "attention_norm": norm(p["attention_norm"]),
                "cross_query": dense(cross["query"]),
                "cross_output": dense(cross["output"]),
                "cross_attention_norm": norm(p["cross_attention_norm"]),
                "intermediate": dense(forward["intermediate"]),
                "feed_forward": dense(forward["output"]),
                "feed_forward_norm": norm(p["feed_forward_norm"]),
            }
        )
    tables = params["embeddings"]
    pieces = config.target_vocab_size - 1
    table_VH = jnp.asarray(tables["target"]["embedding"])
    table_VH = jnp.where((jnp.arange(table_VH.shape[0]) < pieces)[:, None], table_VH, 0)
    weights: Weights = {
        "layers": layers,
        "table_VH": table_VH.astype(dtype),
        "positions_PH": jnp.asarray(sinusoids(config.max_position_embeddings, config.hidden_size)).astype(wide),
    }
    if config.embeddings == "untied":
        weights["output_VH"] = jnp.asarray(tables["output"]["embedding"]).astype(dtype)
    if config.output_bias:
        weights["output_bias_V1"] = jnp.asarray(params["output"]["bias"]).astype(wide)[:, None]
    if config.pre_norm:
        weights["final_norm"] = norm(params["decoder"]["final_norm"])
    return weights


def source_of(keys_values: dict[str, KeysValues], sequence_ids_BS: jax.Array) -> Source:
    """From what `Transformer.memory_keys_values` gives, [B, S, N, D] for each layer."""
    each = [keys_values[f"layer_{i}"] for i in range(len(keys_values))]
    turned = tuple(KeysValues(kv.key.transpose(0, 2, 3, 1), kv.value.transpose(0, 2, 1, 3)) for kv in each)
    return Source(turned, sequence_ids_BS)


def empty_source(config: TransformerConfig, rows: int, length: int) -> Source:
    """Of rows without a sentence."""
    n, d = config.num_attention_heads, config.head_dim
    dtype = compute_dtype(config)

    def layer() -> KeysValues:
        return KeysValues(jnp.zeros((rows, n, d, length), dtype), jnp.zeros((rows, n, length, d), dtype))

    return Source(tuple(layer() for _ in range(config.num_decoder_layers)), jnp.zeros((rows, length), jnp.int32))


def empty_cache(config: TransformerConfig, rows: int, beams: int, slots: int) -> Cache:
    """With nothing written."""
    n, d = config.num_attention_heads, config.head_dim
    dtype = compute_dtype(config)

    def layer() -> KeysValues:
        size = slots * beams
        return KeysValues(jnp.zeros((rows, n, d, size), dtype), jnp.zeros((rows, n, size, d), dtype))

    return tuple(layer() for _ in range(config.num_decoder_layers))


def decode_step(
    config: TransformerConfig,
    weights: Weights,
    token_ids_BK: jax.Array,
    positions_B: jax.Array,
    slot: jax.Array,
    cache: Cache,
    lineage_BKT: jax.Array,
    source: Source,
) -> tuple[jax.Array, Cache]:
    """Scores of the piece after `token_ids`, for K beams of each of B sentences.

    Args:
      token_ids_BK: int32, the pieces at `positions`; at position 0 that is `<pad>`, the decoder's start.
      positions_B: int32, below `max_position_embeddings`; each sentence is at its own.
      slot: int32 [], where in the cache this step's keys and values are written, for all sentences.
      lineage_BKT: int32, for each beam and slot the beam that wrote what this one has seen there, or -1 where it has
        seen nothing. At `slot` each beam names itself.

    Returns:
      float32 [Vpadded, X]; -1e9 for `<pad>` and the padding of the table. The cache with this slot written.
    """
    c = config
    wide = wide_dtype(compute_dtype(c))
    batch, beams = token_ids_BK.shape
    scale = math.sqrt(c.hidden_size) if c.scale_embedding else 1.0
    x_BKH = jnp.take(weights["table_VH"], token_ids_BK, axis=0, mode="clip").astype(wide) * scale
    x_BKH = x_BKH + jnp.take(weights["positions_PH"], positions_B, axis=0, mode="clip")[:, None]
    x_HX = x_BKH.astype(weights["table_VH"].dtype).reshape(batch * beams, -1).T
    # bool [B, 1, K, M]: the slots that belong to the past of each beam.
    seen_B1KM = (lineage_BKT[..., None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None]).reshape(
        batch, 1, beams, -1
    )
    is_source_B11S = source.sequence_ids_BS[:, None, None, :] > 0
    written = []
    for w, own, cross in zip(weights["layers"], cache, source.keys_values, strict=True):

        def attend(x_HX: jax.Array, w: Any = w, own: KeysValues = own) -> jax.Array:
            query_BNKD, kept = _keep(_dense(w["query_key_value"], x_HX), own, slot)
            written.append(kept)
            return _dense(w["output"], _attention(query_BNKD, kept, seen_B1KM))

        def attend_source(x_HX: jax.Array, w: Any = w, cross: KeysValues = cross) -> jax.Array:
            query_BNKD = _heads(_dense(w["cross_query"], x_HX), cross.key.shape[:3])
            return _dense(w["cross_output"], _attention(query_BNKD, cross, is_source_B11S))

        def feed_forward(x_HX: jax.Array, w: Any = w) -> jax.Array:
            return _dense(w["feed_forward"], ACTIVATIONS[c.hidden_act](_dense(w["intermediate"], x_HX)))

        x_HX = _residual(c, attend, w["attention_norm"], x_HX)
        x_HX = _residual(c, attend_source, w["cross_attention_norm"], x_HX)
        x_HX = _residual(c, feed_forward, w["feed_forward_norm"], x_HX)
    if c.pre_norm:
        x_HX = _norm(c, weights["final_norm"], x_HX)
    table_VH = weights["output_VH"] if "output_VH" in weights else weights["table_VH"]
    scores_VX = jnp.matmul(table_VH, x_HX, preferred_element_type=wide)
    if c.output_bias:
        scores_VX = scores_VX + weights["output_bias_V1"]
    is_piece_V1 = (jnp.arange(table_VH.shape[0]) < c.target_vocab_size - 1)[:, None]
    return jnp.where(is_piece_V1, scores_VX, masks.FORBIDDEN), tuple(written)


def _dense(w: dict[str, jax.Array], x_IX: jax.Array) -> jax.Array:
    return w["kernel_OI"] @ x_IX + w["bias_O1"]


def _heads(x_HX: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[H, X] as [B, N, K, D]; `shape` is (B, N, D)."""
    rows, heads, size = shape
    return x_HX.reshape(heads, size, rows, -1).transpose(2, 0, 3, 1)


def _keep(qkv_CX: jax.Array, cache: KeysValues, slot: jax.Array) -> tuple[jax.Array, KeysValues]:
    """The queries [B, N, K, D] of the joint product [3 H, X], and the cache with its keys and values at `slot`."""
    query_HX, key_HX, value_HX = jnp.split(qkv_CX, 3)
    rows, heads, size = cache.key.shape[:3]
    key_BNDK = key_HX.reshape(heads, size, rows, -1).transpose(2, 0, 1, 3)
    value_BNKD = _heads(value_HX, (rows, heads, size))
    beams = value_BNKD.shape[2]
    # No reshape stands between the write and its uses: XLA on CPU would write twice, and copy the cache for that.
    return _heads(query_HX, (rows, heads, size)), KeysValues(
        jax.lax.dynamic_update_slice_in_dim(cache.key, key_BNDK, slot * beams, axis=3),
        jax.lax.dynamic_update_slice_in_dim(cache.value, value_BNKD, slot * beams, axis=2),
    )


def _attention(query_BNKD: jax.Array, memory: KeysValues, allowed: jax.Array) -> jax.Array:
    """Scaled dot-product attention to keys [B, N, D, M] and values [B, N, M, D]; the context as [H, X]."""
    wide = wide_dtype(query_BNKD.dtype)
    rows, heads, beams, size = query_BNKD.shape
    query_BNKD = query_BNKD * (1.0 / math.sqrt(size))
    scores_BNKM = jnp.einsum("BNKD,BNDM->BNKM", query_BNKD, memory.key, preferred_element_type=wide)
    scores_BNKM = jnp.where(allowed, scores_BNKM, masks.FORBIDDEN)
    exp_BNKM = jnp.exp(scores_BNKM - scores_BNKM.max(-1, keepdims=True))
    weights_BNKM = (exp_BNKM / exp_BNKM.sum(-1, keepdims=True)).astype(query_BNKD.dtype)
    context_BNKD = jnp.einsum("BNKM,BNMD->BNKD", weights_BNKM, memory.value)
    return context_BNKD.transpose(1, 3, 0, 2).reshape(heads * size, rows * beams)


def _norm(config: TransformerConfig, w: dict[str, jax.Array], x_HX: jax.Array) -> jax.Array:
    y_HX = x_HX.astype(wide_dtype(x_HX.dtype))
    centred_HX = y_HX - y_HX.mean(0, keepdims=True)
    variance_1X = (centred_HX * centred_HX).mean(0, keepdims=True)
    normed_HX = centred_HX * jax.lax.rsqrt(variance_1X + config.layer_norm_eps)
    return (normed_HX * w["scale"] + w["bias"]).astype(x_HX.dtype)


def _residual(config: TransformerConfig, part: Any, norm: dict[str, jax.Array], x_HX: jax.Array) -> jax.Array:
    if config.pre_norm:
        return x_HX + part(_norm(config, norm, x_HX))
    return _norm(config, norm, x_HX + part(x_HX))


def check_length(config: TransformerConfig, length: int, what: str) -> None:
    """Refuse what has more positions than the model."""
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"{what} has {length} pieces, but the model has {config.max_position_embeddings} positions "
            "(max_position_embeddings)"
        )
