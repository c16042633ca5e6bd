"""A translation run small enough to be trained in a second: prepared pairs, settings, and a run file."""

import functools
from pathlib import Path

import numpy as np

from transformer_jax import config as core
from transformer_jax import pieces, run_file
from transformer_jax.config import CheckpointConfig, TrainConfig
from transformer_jax.translation.config import (
    BatchesConfig,
    PairsConfig,
    SentencePieceConfig,
    TransformerConfig,
    TranslationConfig,
    TranslationOptimizerConfig,
)
from transformer_jax.translation.prepare import write_pairs
from transformer_jax.translation.vocabularies import Vocabularies

WORDS = [f"{a}{b}{c}" for a in "bdfg" for b in "aeo" for c in "lmn"]
MODEL = TransformerConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_decoder_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_multiple=16,
    max_position_embeddings=64,
)


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Made-up sentences, and the same words in the other order."""
    rng = np.random.default_rng(seed)
    sources = [[WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(2, 7))] for _ in range(count)]
    return [(" ".join(words), " ".join(reversed(words))) for words in sources]


@functools.cache
def vocabularies(seed: int = 0) -> Vocabularies:
    """Joint pieces; another seed gives other ones."""
    one = pieces.train([text for pair in pairs(60, seed) for text in pair], vocab_size=44 + seed)
    return Vocabularies(one, one)


def prepare(
    folder: Path, train: int = 60, validation: int = 12, test: int = 12, own: Vocabularies | None = None
) -> Path:
    splits = {"train": pairs(train, 1), "validation": pairs(validation, 2), "test": pairs(test, 3)}
    write_pairs(folder, own or vocabularies(), splits)
    return folder


def config(folder: Path, **changes) -> TranslationConfig:
    """Settings of a run in `folder`, which also holds `prepared`; `train_steps=5` changes train.steps, and so on."""
    made = TranslationConfig(
        preset="transformer-tiny",
        run_dir=str(folder / "run"),
        model=MODEL,
        data=PairsConfig(prepared=str(folder / "prepared")),
        tokenizer=SentencePieceConfig(vocab_size=44),
        examples=BatchesConfig(max_source_length=32, max_target_length=32),
        optimizer=TranslationOptimizerConfig(learning_rate=0.5, warmup_steps=4),
        train=TrainConfig(steps=12, batch_size=4, log_every=4),
        checkpoint=CheckpointConfig(every=4, keep_last=3),
    )
    for key, value in changes.items():
        made = run_file.with_value(made, key if key == "run_dir" else key.replace("_", ".", 1), value)
    return made


def write_run_file(path: Path, settings: TranslationConfig) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(core.dump_toml(settings), encoding="utf-8")
    return path
