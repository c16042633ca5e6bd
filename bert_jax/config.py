"""What a BERT run is: the model, the examples, and one phase of pretraining."""

from __future__ import annotations

import dataclasses
from typing import Literal

from transformer_jax.config import (
    CheckpointConfig,
    ConfigError,
    Context,
    EncoderConfig,
    HostsConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from transformer_jax.tokenizer_config import WordPieceConfig


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The encoder with BERT's embeddings and heads."""

    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    """gelu is the exact form with erf; gelu_new the tanh approximation."""
    vocab_size: int = 0
    """Entries of the vocabulary; 0 takes the number from the prepared data."""
    vocab_multiple: int = 128
    """The embedding table is padded to a multiple of this; padding rows are never predicted or exported."""
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    context: Context = "both"
    """What a position sees: both sides, as in BERT; or only itself and what is left (right) of it, for comparisons."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"vocab_size": 0, "vocab_multiple": 1, "max_position_embeddings": 1, "type_vocab_size": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {value}")

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclasses.dataclass(frozen=True)
class ExamplesConfig:
    """How sentence pairs are drawn, masked and packed (Devlin et al. 2019, section 3.1 and appendix A.1-A.2)."""

    max_seq_length: int = 128
    pack: bool = True
    """Several pairs in a row, kept apart by attention; False is one padded pair a row, as in 2018."""
    max_sequences_per_row: int = 0
    """0: max_seq_length / 16, at least 1. The packing plan never puts more into a row."""
    max_predictions_per_row: int = 0
    """0: 15 % (masked_lm_prob) of max_seq_length, rounded up to a multiple of 4; all of it where nothing is masked."""
    objective: Literal["masked", "next", "previous"] = "masked"
    """What is predicted: masked pieces; or every piece, none of them masked, from the place before it (after it), by a
    model that sees that side alone (model.context "left" or "right")."""
    masked_lm_prob: float = 0.15
    mask_share: float = 0.8
    """Share of the chosen pieces that become [MASK] ..."""
    random_share: float = 0.1
    """... and that become a random ordinary piece; the rest is left as it is."""
    masking_unit: Literal["token", "whole_word", "span"] = "token"
    """What is chosen as one: a piece, all pieces of a word, or one to three words (n-grams)."""
    dupe_factor: int = 0
    """0 draws new pairs and masks in each epoch (dynamic); N freezes N draws and goes round them (static, 2018: 10)."""
    short_seq_prob: float = 0.1
    sentence_task: Literal["nsp", "sop", "none"] = "nsp"
    """Next-sentence prediction, sentence-order prediction, or one run of sentences without a second side."""
    random_next_prob: float = 0.5
    random_next_from: Literal["corpus", "source"] = "corpus"
    """Where the random second side comes from: any other document, or another document of the same source file."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, and where its prepared form lies."""

    recipe: str = ""
    """A recipe file of `data/`; a relative path is taken from the file that names it."""
    prepared: str = ""
    """Folder of the prepared shards; a relative path is taken from the current folder."""
    shard_mb: float = 8.0
    """Megabytes of text in one shard, the unit of work of `prepare`."""
    max_unknown_rate: float = 0.01
    """`prepare` stops when more than this share of the pieces of any script is unknown."""


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Where parameters start from, when not from random numbers."""

    checkpoint: str = dataclasses.field(default="")
    """A run folder, RUN@STEP, a Hugging Face folder, or one of google-research/bert."""
    optimizer: Literal["", "keep", "reset"] = ""
    schedule: Literal["", "continue", "restart"] = ""


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """One run of `bert-jax pretrain`."""

    preset: str = "bert-base"
    run_dir: str = ""
    """The run folder; a relative path is taken from the current folder."""
    model: BertConfig = dataclasses.field(default_factory=BertConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: WordPieceConfig = dataclasses.field(default_factory=WordPieceConfig)
    examples: ExamplesConfig = dataclasses.field(default_factory=ExamplesConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
