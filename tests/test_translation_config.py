"""Settings of translation runs: the paper's defaults, and what is refused by name."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from transformer_jax import config as core
from transformer_jax.config import ConfigError
from transformer_jax.translation.config import TransformerConfig, TranslationConfig
from transformer_jax.translation.presets import PRESETS, TABLE_3


def load(**sections: Any) -> TranslationConfig:
    return core.load(TranslationConfig, sections, "run.toml", TranslationConfig())


def test_defaults_are_the_paper_s_base_model() -> None:
    """Vaswani et al. 2017, table 3 and sections 5.3 and 5.4."""
    config = load()
    model, optimizer = config.model, config.optimizer
    assert (model.num_hidden_layers, model.num_decoder_layers, model.hidden_size) == (6, 6, 512)
    assert (model.intermediate_size, model.num_attention_heads, model.hidden_act) == (2048, 8, "relu")
    assert (model.hidden_dropout_prob, model.attention_probs_dropout_prob, model.layer_norm_eps) == (0.1, 0.0, 1e-5)
    assert (model.norm, model.embeddings, model.scale_embedding) == ("post", "shared", True)
    assert (optimizer.name, optimizer.schedule, optimizer.warmup_steps) == ("adam", "noam", 4000)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (optimizer.weight_decay, optimizer.learning_rate) == (0.0, 1.0)
    assert config.objective.label_smoothing == 0.1
    assert PRESETS["transformer-big"].hidden_dropout_prob == 0.3
    assert TABLE_3["big"].changes.items() <= core.to_builtins(PRESETS["transformer-big"]).items()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_configuration_reads_back(preset: str) -> None:
    config = TranslationConfig(preset=preset, model=PRESETS[preset])
    assert core.load(TranslationConfig, tomllib.loads(core.dump_toml(config)), "config.toml") == config


def test_a_section_keeps_the_defaults_of_translation_for_what_it_does_not_name() -> None:
    config = core.load(TranslationConfig, {"optimizer": {"warmup_steps": 10}}, "run.toml")
    assert (config.optimizer.warmup_steps, config.optimizer.beta2, config.optimizer.weight_decay) == (10, 0.98, 0.0)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"num_decoder_layers": 0}}, "num_decoder_layers is 0; it must be at least 1"),
        ({"model": {"hidden_size": 9, "num_attention_heads": 3}}, "hidden_size is 9; sinusoids need an even one"),
        ({"model": {"norm": "per"}}, "Invalid enum value 'per'.*did you mean `pre`"),
        ({"model": {"num_decoder_layer": 3}}, "unknown key `model.num_decoder_layer`; did you mean `model.num_decoder"),
        (
            {"model": {"source_vocab_size": 90, "target_vocab_size": 80}},
            'source_vocab_size 90 and target_vocab_size 80 differ, but embeddings is "shared"',
        ),
        ({"model": {"encoder_embeddings": "bert"}}, 'encoder_embeddings is "bert".*set embeddings to "separate"'),
        ({"tokenizer": {"joint": False}}, 'tokenizer.joint is false, but model.embeddings is "shared"'),
        ({"tokenizer": {"character_coverage": 0.0}}, "tokenizer.character_coverage is 0.0"),
        ({"tokenizer": {"user_symbols": ["<de>", "<de>"]}}, "tokenizer.user_symbols holds '<de>'"),
        ({"examples": {"max_source_length": 2000}}, "examples.max_source_length is 2000, but the model has 1024"),
        ({"examples": {"subword_sampling": 1.0}}, "examples.subword_sampling is 1.0; it must be at least 0 and below"),
        ({"objective": {"label_smoothing": -0.1}}, "objective.label_smoothing is -0.1"),
        ({"data": {"max_ratio": 0.5}}, "data.max_ratio is 0.5; it must be at least 1.0"),
        ({"data": {"min_words": 9, "max_words": 3}}, "data.min_words is 9; it must be at most data.max_words 3"),
        ({"validation": {"beam_size": 0}}, "validation.beam_size is 0; it must be at least 1"),
        ({"optimizer": {"weight_decay": 0.01}}, "optimizer.weight_decay is 0.01, and adam has none"),
        ({"init": {"checkpoint": "a", "encoder_from": "b"}}, "init names both a checkpoint and encoder_from"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)run.toml: .*{message}"):
        load(**sections)


def test_tables_are_padded_to_the_multiple() -> None:
    config = TransformerConfig(source_vocab_size=101, target_vocab_size=256, embeddings="separate")
    assert (config.padded_source_vocab_size, config.padded_target_vocab_size) == (128, 256)
