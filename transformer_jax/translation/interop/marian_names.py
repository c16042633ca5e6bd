"""Our parameters under the names of Hugging Face's `MarianMTModel`, and back.

Sinusoids have no tensor. A table with several uses is there once: as `model.shared` where all three share it, else
under the decoder, with `lm_head` apart only where the output is untied. `final_logits_bias` is always there: the bias
of the output, or 0 for a model without, and -1e9 for `<pad>`, which is what our model adds. (OPUS-MT's folders have 0
there, and forbid `<pad>` when they translate.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transformer_jax import masks, published_names
from transformer_jax.config import UserError
from transformer_jax.embeddings import sinusoids
from transformer_jax.published_names import Entry, dense, norm
from transformer_jax.translation.config import TransformerConfig

BIAS = "final_logits_bias"
MODEL = "a Marian model"
POSITIONS_TOLERANCE = 1e-3
"""Most that a written table of sinusoids may differ from ours; half precision rounds by half of it."""


def refuse_unfit(config: TransformerConfig) -> None:
    """Raise UserError, naming the settings, when Marian's architecture has no place for this model."""
    fit = {"norm": "post", "encoder_embeddings": "transformer"}
    wrong = [
        f'model.{name} is "{getattr(config, name)}" (Marian has "{value}" alone)'
        for name, value in fit.items()
        if getattr(config, name) != value
    ]
    if config.layer_norm_eps != 1e-5:
        wrong.append(f"model.layer_norm_eps is {config.layer_norm_eps} (Marian has 1e-05 alone)")
    if config.embeddings != "shared" and config.source_vocab_size != config.target_vocab_size:
        wrong.append(
            f"model.source_vocab_size is {config.source_vocab_size} and model.target_vocab_size "
            f"{config.target_vocab_size} (Marian has one id of <pad>, the last, for both sides)"
        )
    if wrong:
        raise UserError("this model does not fit Marian's format: " + "; ".join(wrong))


def entries(config: TransformerConfig) -> list[Entry]:
    """Every tensor of the model, in the order of the forward pass."""
    refuse_unfit(config)
    hidden, inner = config.hidden_size, config.intermediate_size

    def table(kind: str, name: str) -> Entry:
        source = kind == "source"
        rows = config.source_vocab_size if source else config.target_vocab_size
        padded = config.padded_source_vocab_size if source else config.padded_target_vocab_size
        return Entry(("embeddings", kind, "embedding"), f"{name}.weight", (rows, hidden), padded_rows=padded)

    def attention(ours: str, theirs: str) -> list[Entry]:
        found = []
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
            found += dense(f"{ours}/{part}", f"{theirs}.{name}", hidden, hidden)
        return found

    if config.embeddings == "shared":
        found = [table("target", "model.shared")]
    else:
        found = [table("source", "model.encoder.embed_tokens"), table("target", "model.decoder.embed_tokens")]
    if config.embeddings == "untied":
        found.append(table("output", "lm_head"))
    for side, layers in (("encoder", config.num_hidden_layers), ("decoder", config.num_decoder_layers)):
        for i in range(layers):
            ours, theirs = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            found += attention(f"{ours}/attention", f"{theirs}.self_attn")
            found += norm(f"{ours}/attention_norm", f"{theirs}.self_attn_layer_norm", hidden)
            if side == "decoder":
                found += attention(f"{ours}/cross_attention", f"{theirs}.encoder_attn")
                found += norm(f"{ours}/cross_attention_norm", f"{theirs}.encoder_attn_layer_norm", hidden)
            found += dense(f"{ours}/feed_forward/intermediate", f"{theirs}.fc1", hidden, inner)
            found += dense(f"{ours}/feed_forward/output", f"{theirs}.fc2", inner, hidden)
            found += norm(f"{ours}/feed_forward_norm", f"{theirs}.final_layer_norm", hidden)
    if config.output_bias:
        rows, padded = config.target_vocab_size, config.padded_target_vocab_size
        found.append(Entry(("output", "bias"), BIAS, (rows,), padded_rows=padded))
    return found


def has_output_bias(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether a piece other than `<pad>` has a bias."""
    return BIAS in tensors and bool(np.any(np.ravel(tensors[BIAS])[:-1] != 0))


def to_marian(params: Mapping[str, Any], config: TransformerConfig) -> dict[str, np.ndarray]:
    """The parameters under Marian's names, float32, padding rows cut off, with a bias [1, V] that forbids `<pad>`.

    Raises:
      UserError: the model does not fit, or the tree has other tensors or shapes than `config` says.
    """
    tensors = published_names.publish(params, entries(config), MODEL)
    bias_V = tensors.get(BIAS, np.zeros(config.target_vocab_size, np.float32))
    return tensors | {BIAS: np.append(bias_V[:-1], np.float32(masks.FORBIDDEN))[None]}


def from_marian(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> dict[str, Any]:
    """The parameter tree from tensors under Marian's names.

    Repeats of a shared table and sinusoids may be there, and `final_logits_bias` for a model without one: they must
    agree with what our model has in their place. What the bias holds for `<pad>` is left out.

    Raises:
      UserError: names are missing or unknown, a shape differs, a repeat differs, positions are not sinusoids, the bias
        is not 0 where `config` has none, or `<pad>` has a vector other than zero.
    """
    table, found = entries(config), dict(tensors)
    if BIAS in found and found[BIAS].shape not in ((config.target_vocab_size,), (1, config.target_vocab_size)):
        raise UserError(f"{BIAS} has shape {found[BIAS].shape}; it must be (1, {config.target_vocab_size})")
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        positions_PH = found.pop(name, None)
        if positions_PH is None:
            continue
        if positions_PH.ndim != 2 or positions_PH.shape[1] != config.hidden_size or not len(positions_PH):
            raise UserError(f"{name} has shape {positions_PH.shape}; it must be (positions, {config.hidden_size})")
        ours_PH = sinusoids(len(positions_PH), config.hidden_size)
        if not np.abs(positions_PH - ours_PH).max() <= POSITIONS_TOLERANCE:
            raise UserError(f"{name} does not hold sinusoids; this model has no positions that are learned")
    if config.output_bias and BIAS in found:
        found[BIAS] = np.array(found[BIAS]).ravel()
        found[BIAS][-1] = 0
    elif has_output_bias(found):
        raise UserError(f"{BIAS} is not 0 everywhere but at <pad>; such a model has output_bias = true")
    else:
        found.pop(BIAS, None)
    shared = config.embeddings == "shared"
    holder = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
    repeats = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"] if shared else []
    if config.embeddings != "untied":
        repeats.append("lm_head.weight")
    for name in repeats:
        repeat = found.pop(name, None)
        if repeat is not None and not np.array_equal(repeat, found.setdefault(holder, repeat)):
            raise UserError(f"{name} differs from {holder}, which the configuration says it shares")
    for entry in table:
        if (
            entry.path[0] == "embeddings"
            and entry.path[1] != "output"
            and entry.name in found
            and found[entry.name].shape == entry.shape
            and np.any(found[entry.name][-1])
        ):
            raise UserError(f"{entry.name}: the last row, that of <pad>, is not zero, so the decoder would not start "
                            "from a zero vector")  # fmt: skip
    return published_names.adopt(found, table, MODEL)
