"""A model and a tokenizer small enough to be made anew in each test."""

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop import huggingface
from bert_jax.interop.huggingface_names import entries
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig


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


def tiny_tokenizer(lowercase: bool = True) -> WordPiece:
    letters = "abcdefghijklmnopqrstuvwxyz" + ("" if lowercase else "ABCDEHWÉé")
    words = ["the", "hello", "world", "Hello", "World", "深", "度", ".", ",", "##orld", "##ello", "going"]
    pieces = [*words, *letters, *(f"##{c}" for c in letters)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    vocab += [f"[unused{i}]" for i in range(len(vocab) % 8 == 0)]
    return WordPiece(vocab, WordPieceConfig(lowercase=lowercase))


def random_tensors(config: BertConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every published tensor, at random, LayerNorm included; large enough for attention to be far from uniform."""
    rng = np.random.default_rng(seed)
    tensors = {e.name: rng.normal(size=e.shape) for e in entries(config)}
    for name in tensors:
        if name.endswith("LayerNorm.weight"):
            tensors[name] = 1 + 0.3 * tensors[name]
        elif ".self." in name:
            tensors[name] *= 0.7
        else:
            tensors[name] *= 0.3
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def random_params(config: BertConfig, seed: int = 0):
    return huggingface.from_hf(random_tensors(config, seed), config)


HEADS = {
    "classification": HeadConfig("classification", ("neg", "neutral", "pos"), 0.25),
    "multi_label": HeadConfig("multi_label", ("a", "b", "c", "d")),
    "regression": HeadConfig("regression", ("score",)),
    "tagging": HeadConfig("tagging", ("O", "B-PER", "I-PER")),
    "span": HeadConfig("span"),
    "choice": HeadConfig("choice"),
}


def tuned(head: HeadConfig):
    """(parameters, configuration, tokenizer) of a random fine-tuned model of one layer."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    params = {k: v for k, v in random_params(config).items() if k in ("embeddings", "encoder", "pooler")}
    if not head.has_pooler:
        del params["pooler"]
    rng = np.random.default_rng(1)
    params["head"] = {
        "kernel": rng.normal(size=(config.hidden_size, head.num_outputs)).astype(np.float32),
        "bias": rng.normal(size=head.num_outputs).astype(np.float32),
    }
    return params, config, tokenizer


def padded_rows(config, lengths, width, seed=0):
    """Padded rows of two segments."""
    rng = np.random.default_rng(seed)
    real = np.arange(width)[None] < np.array(lengths)[:, None]
    second = np.arange(width)[None] >= np.array(lengths)[:, None] // 2
    return {
        "input_ids": np.where(real, rng.integers(5, config.vocab_size, real.shape), 0),
        "attention_mask": real.astype(np.int64),
        "token_type_ids": (real & second).astype(np.int64),
    }
