"""Sizes of the Transformer. The vocabulary sizes come from the prepared data."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformer_jax.translation.config import TransformerConfig

PRESETS: dict[str, TransformerConfig] = {
    # Vaswani et al. 2017, table 3. The big model's dropout is that of English-German; English-French takes 0.1.
    "transformer-base": TransformerConfig(),
    "transformer-big": TransformerConfig(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, hidden_dropout_prob=0.3
    ),
    # For laptops and small corpora, and for tests.
    "transformer-small": TransformerConfig(
        hidden_size=256, num_hidden_layers=3, num_decoder_layers=3, num_attention_heads=4, intermediate_size=1024
    ),
    "transformer-tiny": TransformerConfig(
        hidden_size=128, num_hidden_layers=2, num_decoder_layers=2, num_attention_heads=2, intermediate_size=512
    ),
    # For an encoder that starts from a BERT run: its embeddings, activation and epsilon (and, like it, no sinusoids
    # on the source side). The sizes are BERT-base's; another one's are set in the run file.
    "transformer-bert": TransformerConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu",
        layer_norm_eps=1e-12, embeddings="separate", encoder_embeddings="bert", max_position_embeddings=512,
    ),
}  # fmt: skip


def nearest_preset(config: TransformerConfig) -> str:
    """The preset of the same sizes, or else the one with the fewest that differ; the smallest of several."""
    sizes = ("encoder_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")

    def differing(name: str) -> tuple[int, int]:
        preset = PRESETS[name]
        return sum(getattr(preset, size) != getattr(config, size) for size in sizes), preset.hidden_size

    return min(PRESETS, key=differing)


class Row(NamedTuple):
    """One row of the paper's table 3."""

    changes: dict[str, Any]
    """What differs from transformer-base."""
    millions: float
    """Parameters as the paper prints them, in millions."""


def _layers(number: int) -> dict[str, Any]:
    return {"num_hidden_layers": number, "num_decoder_layers": number}


TABLE_3: dict[str, Row] = {
    "A: 1 head": Row({"num_attention_heads": 1}, 65),
    "A: 4 heads": Row({"num_attention_heads": 4}, 65),
    "A: 16 heads": Row({"num_attention_heads": 16}, 65),
    "A: 32 heads": Row({"num_attention_heads": 32}, 65),
    "C: 2 layers": Row(_layers(2), 36),
    "C: 4 layers": Row(_layers(4), 50),
    "C: 8 layers": Row(_layers(8), 80),
    "C: width 256": Row({"hidden_size": 256}, 28),
    "C: width 1024": Row({"hidden_size": 1024}, 168),
    "C: feed-forward 1024": Row({"intermediate_size": 1024}, 53),
    "C: feed-forward 4096": Row({"intermediate_size": 4096}, 90),
    "D: dropout 0": Row({"hidden_dropout_prob": 0.0}, 65),
    "D: dropout 0.2": Row({"hidden_dropout_prob": 0.2}, 65),
    "big": Row(
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "hidden_dropout_prob": 0.3}, 213
    ),
}
"""The rows that are sizes alone, as differences from transformer-base. Not here: smaller attention keys (B), label
smoothing (the rest of D, `objective.label_smoothing`) and learned positions (E)."""
