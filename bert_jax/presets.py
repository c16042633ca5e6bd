"""Sizes of BERT. The vocabulary size comes from the prepared data."""

from __future__ import annotations

from bert_jax.config import BertConfig

PRESETS: dict[str, BertConfig] = {
    # Devlin et al. 2019, section 3.
    "bert-base": BertConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    "bert-large": BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    # Turc et al. 2019, arXiv 1908.08962: for laptops, and for tests.
    "bert-small": BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048),
    "bert-mini": BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
    "bert-tiny": BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512),
}


def nearest_preset(config: BertConfig) -> str:
    """The preset of the same sizes, or else the one with the fewest that differ; the smallest of several."""
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")

    def differing(name: str) -> int:
        return sum(getattr(PRESETS[name], size) != getattr(config, size) for size in sizes)

    return min(reversed(PRESETS), key=differing)
