"""What a translation run is: the model, the pairs, their pieces, the batches, and one phase of training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from transformer_jax.config import (
    UNROLLED,
    CheckpointConfig,
    ConfigError,
    EncoderConfig,
    HostsConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)


def at_least(config: Any, section: str, least: Mapping[str, float]) -> None:
    """Refuse the first field of `config` that is below its least value, by the name it has in a run file."""
    for name, value in least.items():
        found = getattr(config, name)
        if not value <= found < math.inf:
            raise ConfigError(f"{section}{name} is {found}; it must be at least {value}")


def share(config: Any, section: str, *names: str) -> None:
    """Refuse the first of these fields that is not at least 0 and below 1."""
    for name in names:
        found = getattr(config, name)
        if not 0.0 <= found < 1.0:
            raise ConfigError(f"{section}{name} is {found}; it must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(EncoderConfig):
    """Encoder and decoder; the defaults are the paper's base model in Marian's layout (what exports depend on)."""

    hidden_size: int = 512
    num_hidden_layers: int = 6
    """Layers of the encoder."""
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    hidden_act: Literal["gelu", "gelu_new", "relu", "swish"] = "relu"
    attention_probs_dropout_prob: float = 0.0
    layer_norm_eps: float = 1e-5
    num_decoder_layers: int = 6
    source_vocab_size: int = 0
    """Pieces of the source side, `<pad>` (the last) included; 0 takes the number from the prepared data."""
    target_vocab_size: int = 0
    vocab_multiple: int = 128
    """Embedding tables are padded to a multiple of this; padding rows are never predicted or exported."""
    norm: Literal["post", "pre"] = "post"
    """Layer norm after each residual sum, as in the paper, or before each part with one more after the last layer."""
    embeddings: Literal["shared", "separate", "untied"] = "shared"
    """One table for source, target and output (section 3.4); the source's apart, target and output one; or three."""
    output_bias: bool = False
    """Add a trained number to the score of each piece, as the models of OPUS-MT do."""
    encoder_embeddings: Literal["transformer", "bert"] = "transformer"
    """Scaled pieces with sinusoids, or BERT's tables of pieces, positions and segments with their norm."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(hidden_size) (section 3.4)."""
    initializer: Literal["glorot", "normal"] = "glorot"
    """Kernels uniform by Glorot and Bengio (2010) with embeddings of standard deviation hidden_size^-0.5, as in the
    authors' code; or all normal with initializer_range, as in BERT."""
    max_position_embeddings: int = 1024
    """Longest row; with BERT's embeddings also the length of its table of positions."""
    type_vocab_size: int = 2
    """Segments of BERT's embeddings; no others have any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"num_decoder_layers": 1, "source_vocab_size": 0, "target_vocab_size": 0, "vocab_multiple": 1}
        at_least(self, "", {**least, "max_position_embeddings": 2, "type_vocab_size": 1})
        if self.hidden_size % 2:
            raise ConfigError(f"hidden_size is {self.hidden_size}; sinusoids need an even one")
        sizes = {self.source_vocab_size, self.target_vocab_size} - {0}
        if self.embeddings == "shared" and len(sizes) > 1:
            raise ConfigError(
                f"source_vocab_size {self.source_vocab_size} and target_vocab_size {self.target_vocab_size} differ, "
                'but embeddings is "shared"; use a joint vocabulary (tokenizer.joint), or embeddings "separate"'
            )
        if self.embeddings == "shared" and self.encoder_embeddings == "bert":
            raise ConfigError(
                'encoder_embeddings is "bert", whose pieces are its own, but embeddings is "shared"; '
                'set embeddings to "separate" or "untied"'
            )

    @property
    def padded_source_vocab_size(self) -> int:
        return -(-self.source_vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def padded_target_vocab_size(self) -> int:
        return -(-self.target_vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def pre_norm(self) -> bool:
        return self.norm == "pre"

    @property
    def glorot_kernels(self) -> bool:
        return self.initializer == "glorot"

    @property
    def decoder_scanned(self) -> bool:
        return self.layers == "scanned" or (self.layers == "auto" and self.num_decoder_layers > UNROLLED)


@dataclasses.dataclass(frozen=True)
class SentencePieceConfig:
    """How text is cut into pieces: SentencePiece with `</s>` 0, `<unk>` 1 and `<pad>` last on each side."""

    model: Literal["bpe", "unigram"] = "bpe"
    vocab_size: int = 8000
    """Pieces of the joint model, or of each side's own; control pieces included."""
    joint: bool = True
    """One list of pieces for both sides, as shared embeddings need."""
    byte_fallback: bool = False
    """Spell characters that have no piece as bytes, in place of `<unk>`."""
    character_coverage: float = 1.0
    """Share of all characters that get pieces; 0.9995 for scripts with very many."""
    normalization: Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"] = "nmt_nfkc"
    """SentencePiece's rule; what it changes cannot be had back, identity changes nothing."""
    user_symbols: tuple[str, ...] = ()
    """Tags of one's own, each one piece: never split, put in and read back by id."""
    source_model: str = ""
    """A SentencePiece model of one's own for both sides, or for the source; relative to the file that names it."""
    target_model: str = ""
    source_wordpiece: str = ""
    """A run, a Hugging Face folder or a vocabulary of BERT's, whose WordPiece cuts the source side."""
    vocabularies: str = ""
    """A run, or a folder in Marian's format, whose vocabularies both sides have: to go on training its model."""
    training_sentences: int = 2_000_000
    """With more training sentences the pieces are learned from an even share of them, which the trainer keeps in
    memory."""

    def __post_init__(self) -> None:
        at_least(self, "tokenizer.", {"vocab_size": 4, "training_sentences": 1})
        if not 0.0 < self.character_coverage <= 1.0:
            raise ConfigError(
                f"tokenizer.character_coverage is {self.character_coverage}; it must be above 0 and at most 1"
            )
        for number, symbol in enumerate(self.user_symbols):
            if not symbol or symbol != symbol.strip() or symbol in self.user_symbols[:number]:
                raise ConfigError(
                    f"tokenizer.user_symbols holds {symbol!r}; each must be there once, not empty, and without spaces "
                    "around it"
                )


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Which pairs, where their prepared form lies, and which of them are kept."""

    recipe: str = ""
    """A recipe file of `data/`; a relative path is taken from the file that names it."""
    prepared: str = ""
    """Folder of the prepared shards; a relative path is taken from the current folder."""
    shard_mb: float = 8.0
    """Megabytes of text in one shard, the unit of work of `prepare`."""
    min_words: int = 1
    """Pairs with fewer words (or, in writing without spaces, characters) on a side are left out ..."""
    max_words: int = 250
    """... and those with more, ..."""
    max_ratio: float = 9.0
    """... or with this many times as many characters on one side as on the other."""
    drop_duplicates: bool = True
    drop_identical: bool = True
    """Leave out pairs whose sides are the same."""
    check_script: bool = False
    """Leave out pairs with a side that is mostly not in its language's script."""
    max_unknown_rate: float = 0.01
    """`prepare` stops when more than this share of the pieces of any script is unknown."""

    def __post_init__(self) -> None:
        at_least(self, "data.", {"min_words": 1, "max_words": 1, "max_ratio": 1.0})
        if not 0.0 <= self.max_unknown_rate <= 1.0:
            raise ConfigError(f"data.max_unknown_rate is {self.max_unknown_rate}; it must be between 0 and 1")
        if not 0.0 < self.shard_mb < math.inf:
            raise ConfigError(f"data.shard_mb is {self.shard_mb}; it must be a number above 0")
        if self.min_words > self.max_words:
            raise ConfigError(f"data.min_words is {self.min_words}; it must be at most data.max_words {self.max_words}")


@dataclasses.dataclass(frozen=True)
class BatchesConfig:
    """How pairs become rows."""

    max_source_length: int = 128
    """Pieces of a row's source side, `</s>` included."""
    max_target_length: int = 128
    pack: bool = True
    """Several pairs in a row, kept apart by attention; False is one padded pair a row."""
    max_pairs_per_row: int = 0
    """0: a quarter of the longer side, at least 1. The packing plan never puts more into a row."""
    subword_sampling: float = 0.0
    """New cuts of each word in each epoch: the share of merges left out (BPE-dropout, Provilkov et al. 2020), or the
    smoothing of the draw of a unigram model (Kudo 2018); 0 always takes the best cut."""

    def __post_init__(self) -> None:
        at_least(self, "examples.", {"max_source_length": 2, "max_target_length": 2, "max_pairs_per_row": 0})
        share(self, "examples.", "subword_sampling")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised."""

    label_smoothing: float = 0.1
    """Share of each target that is spread evenly over the pieces that can be predicted (section 5.4)."""

    def __post_init__(self) -> None:
        share(self, "objective.", "label_smoothing")


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
    """Translations of held-out lines during training."""

    lines: int = 0
    """How many lines are translated and scored; 0 translates none."""
    beam_size: int = 4
    every: int = 0
    """Steps between translations; 0 translates whenever the loss is evaluated."""
    metric: Literal["bleu", "chrf"] = "bleu"
    """By what the best checkpoints are known where lines are translated."""

    def __post_init__(self) -> None:
        at_least(self, "validation.", {"lines": 0, "beam_size": 1, "every": 0})


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Where parameters start from, when not from random numbers."""

    checkpoint: str = ""
    """A run folder, RUN@STEP, or a folder in Marian's format."""
    optimizer: Literal["", "keep", "reset"] = ""
    schedule: Literal["", "continue", "restart"] = ""
    encoder_from: str = ""
    """A BERT run, RUN@STEP or Hugging Face folder whose embeddings and layers the encoder starts from."""

    def __post_init__(self) -> None:
        if self.checkpoint and self.encoder_from:
            raise ConfigError("init names both a checkpoint and encoder_from; the checkpoint holds an encoder already")


@dataclasses.dataclass(frozen=True)
class TranslationOptimizerConfig(OptimizerConfig):
    """The optimizer with the paper's defaults (section 5.3)."""

    name: Literal["adamw", "adam", "bert_adam", "lamb"] = "adam"
    learning_rate: float = 1.0
    """The paper's schedule takes it as a factor; the others as the peak."""
    schedule: Literal["linear", "polynomial", "constant", "noam", "inverse_sqrt"] = "noam"
    warmup_steps: int = 4000
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    clip_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """One run of `transformer-jax train`."""

    preset: str = "transformer-base"
    run_dir: str = ""
    """The run folder; a relative path is taken from the current folder."""
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: PairsConfig = dataclasses.field(default_factory=PairsConfig)
    tokenizer: SentencePieceConfig = dataclasses.field(default_factory=SentencePieceConfig)
    examples: BatchesConfig = dataclasses.field(default_factory=BatchesConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    validation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optimizer: TranslationOptimizerConfig = dataclasses.field(default_factory=TranslationOptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        for name in ("max_source_length", "max_target_length"):
            if getattr(self.examples, name) > self.model.max_position_embeddings:
                raise ConfigError(
                    f"examples.{name} is {getattr(self.examples, name)}, but the model has "
                    f"{self.model.max_position_embeddings} positions (model.max_position_embeddings); shorten the rows "
                    "or raise the number of positions"
                )
        if self.model.embeddings == "shared" and not self.tokenizer.joint:
            raise ConfigError(
                'tokenizer.joint is false, but model.embeddings is "shared"; set it to "separate" or "untied", or '
                "use a joint vocabulary"
            )
