"""Hugging Face folders: names, layouts, the export's own check, and reading back."""

import numpy as np
import pytest

from bert_jax.config import BertConfig
from bert_jax.interop import huggingface
from bert_jax.interop.huggingface_names import entries
from transformer_jax.config import UserError


def tiny_config(**changes) -> BertConfig:
    settings = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 101,
        "max_position_embeddings": 32,
    }
    return BertConfig(**{**settings, **changes})


def random_tensors(config: BertConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every published tensor, at random, LayerNorm included."""
    rng = np.random.default_rng(seed)
    return {e.name: rng.normal(size=e.shape).astype(np.float32) * 0.3 for e in entries(config)}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("vocab_size", [101, 128, 13])
def test_import_then_export_gives_the_same_tensors(vocab_size):
    """C118."""
    config = tiny_config(vocab_size=vocab_size)
    tensors = random_tensors(config)
    params = huggingface.from_hf(tensors, config)
    assert params["embeddings"]["word"]["embedding"].shape == (config.padded_vocab_size, 8)
    assert not params["mlm"]["bias"][vocab_size:].any()
    assert_same_tensors(huggingface.to_hf(params, config), tensors)


def test_padding_rows_are_not_exported():
    """C008."""
    config = tiny_config()
    params = huggingface.from_hf(random_tensors(config), config)
    params["embeddings"]["word"]["embedding"][101:] = 100.0
    params["mlm"]["bias"][101:] = 100.0
    tensors = huggingface.to_hf(params, config)
    assert tensors["bert.embeddings.word_embeddings.weight"].shape == (101, 8)
    assert tensors["cls.predictions.bias"].shape == (101,)
    assert max(v.max() for v in tensors.values()) < 100


def test_old_and_bare_names_are_read():
    config = tiny_config()
    tensors = random_tensors(config)
    old = {}
    for name, value in tensors.items():
        name = name.removeprefix("bert.")
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        old[name] = value
    old["embeddings.position_ids"] = np.arange(32)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    said: list[str] = []
    assert_same_tensors(huggingface.to_hf(huggingface.from_hf(old, config, say=said.append), config), tensors)
    assert said == ["left out, no weights: embeddings.position_ids"]


def test_missing_unknown_doubled_and_misshapen_tensors_are_named():
    config = tiny_config()
    tensors = random_tensors(config)
    bad = dict(tensors)
    bad["classifier.weight"] = bad.pop("bert.encoder.layer.1.output.dense.bias")
    with pytest.raises(UserError, match=r"1 missing: bert.encoder.layer.1.output.dense.bias; 1 unknown: classifier.w"):
        huggingface.from_hf(bad, config)
    with pytest.raises(UserError, match=r"pooler.dense.bias twice, once as pooler.dense.bias"):
        huggingface.from_hf({**tensors, "pooler.dense.bias": np.zeros(8, np.float32)}, config)
    with pytest.raises(UserError, match=r"seq_relationship.bias has shape \(3,\); the configuration says \(2,\)"):
        huggingface.from_hf({**tensors, "cls.seq_relationship.bias": np.zeros(3, np.float32)}, config)


def test_an_untied_decoder_is_refused():
    config = tiny_config()
    tensors = random_tensors(config)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        alias = "cls.predictions.decoder." + name.rsplit(".", 1)[1]
        with pytest.raises(UserError, match="differs from"):
            huggingface.from_hf({**tensors, alias: tensors[name] + 1}, config)


def test_missing_heads_are_drawn_only_with_a_seed_and_that_is_said():
    config = tiny_config()
    bare = {n: v for n, v in random_tensors(config).items() if n.startswith("bert.") and "pooler" not in n}
    with pytest.raises(UserError, match=r"9 missing: bert.pooler.dense.bias"):
        huggingface.from_hf(bare, config)
    said: list[str] = []
    params = huggingface.from_hf(bare, config, seed=3, say=said.append)
    assert said == ["drawn at random with seed 3, since the source has none: pooler, mlm, nsp"]
    kernel = params["pooler"]["kernel"]
    assert 0.01 < kernel.std() < 0.03 and abs(kernel).max() <= 0.04
    assert not params["nsp"]["bias"].any() and (params["mlm"]["norm"]["scale"] == 1).all()
    again = huggingface.from_hf(bare, config, seed=3)
    np.testing.assert_array_equal(again["nsp"]["kernel"], params["nsp"]["kernel"])
    assert not np.array_equal(huggingface.from_hf(bare, config, seed=4)["nsp"]["kernel"], params["nsp"]["kernel"])


def test_half_a_head_is_an_error_even_with_a_seed():
    config = tiny_config()
    tensors = random_tensors(config)
    del tensors["cls.predictions.transform.dense.weight"]
    with pytest.raises(UserError, match=r"1 missing: cls.predictions.transform.dense.weight"):
        huggingface.from_hf(tensors, config, seed=0)
