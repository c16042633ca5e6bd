"""The presets are the published sizes."""

import dataclasses

import pytest

from bert_jax.config import BertConfig
from bert_jax.model import count_parameters
from bert_jax.presets import PRESETS, nearest_preset


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # Devlin et al. 2019 print 110 M and 340 M; the exact numbers are those of the released uncased checkpoints.
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        # Turc et al. 2019, table 1, print 28.8 M, 11.2 M and 4.4 M.
        ("bert-small", 28_763_648),
        ("bert-mini", 11_170_560),
        ("bert-tiny", 4_385_920),
    ],
)
def test_parameter_counts_are_the_published_ones_without_padding_rows(name: str, published: int) -> None:
    config = dataclasses.replace(PRESETS[name], vocab_size=30_522)
    counts = count_parameters(config)
    assert counts["bert_model"] == published
    assert counts["embeddings"] + counts["encoder"] + counts["pooler"] == published
    assert counts["total"] == published + counts["mlm"] + counts["nsp"]
    assert counts["mlm"] == config.hidden_size**2 + 3 * config.hidden_size + 30_522
    assert counts["nsp"] == 2 * config.hidden_size + 2


def test_heads_are_64_wide_and_the_vocabulary_is_left_to_the_data() -> None:
    assert {c.head_dim for c in PRESETS.values()} == {64}
    assert {c.vocab_size for c in PRESETS.values()} == {0}
    assert {c.intermediate_size // c.hidden_size for c in PRESETS.values()} == {4}


def test_a_model_is_given_the_preset_of_its_sizes_or_the_nearest() -> None:
    for name, preset in PRESETS.items():
        assert nearest_preset(dataclasses.replace(preset, vocab_size=99, hidden_act="relu")) == name
    six_layers = BertConfig(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072)
    assert nearest_preset(six_layers) == "bert-base"
