"""Settings of a tokenizer, apart from its code so that reading a run file loads no library."""

from __future__ import annotations

import dataclasses

from transformer_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class WordPieceConfig:
    """BERT's WordPiece: how text is cut, and how a vocabulary is trained."""

    vocab_size: int = 30522
    vocab_file: str = ""
    """A vocabulary of one's own (id = line number) instead of a trained one; relative to the file that names it."""
    lowercase: bool = True
    strip_accents: bool | None = None
    """None follows lowercase, as in the 2018 code."""
    tokenize_chinese_chars: bool = True
    max_input_chars_per_word: int = 200
    """A longer word is one [UNK]; 200 as in the 2018 code (Hugging Face's default is 100)."""
    min_frequency: int = 2
    limit_alphabet: int = 0
    """The commonest characters that get pieces of their own; 0 takes all that are seen min_frequency times and fit into
    a third of the vocabulary, or into what learned pieces leave free. A word with any other character is one [UNK]."""
    unused_tokens: int = 0
    """[unusedN] entries kept free for later use."""
    keep_tokens: tuple[str, ...] = ()
    """Tokens of one's own that are never split and keep their case; the five control tokens are always known."""
    pre_splitter: str = ""
    """Puts spaces into text before anything else, for writing without spaces: "characters" or "jieba". A recipe's
    `pre_splitter` is written here by `prepare`, and from here into the export."""

    def __post_init__(self) -> None:
        least = {"min_frequency": 1, "limit_alphabet": 0, "unused_tokens": 0, "max_input_chars_per_word": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"tokenizer.{name} is {getattr(self, name)}; it must be at least {value}")
