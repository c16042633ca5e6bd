"""The vocabularies of both sides: one SentencePiece model for both or one for each, or the source cut by WordPiece."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from transformer_jax.config import ConfigError, UserError
from transformer_jax.pieces import FILE, SentencePiece
from transformer_jax.tokenizer import WordPiece

JOINT = "joint.json"
SOURCE = "source.json"
TARGET = "target.json"


class Vocabularies:
    """What cuts the two sides into pieces.

    Attributes:
      source, target: the same object if `joint`.
      source_start, source_end: ids before and after the pieces of a source: none and `</s>`, or WordPiece's [CLS] and
        [SEP], which an encoder that comes from BERT knows.
    """

    def __init__(self, source: SentencePiece | WordPiece, target: SentencePiece) -> None:
        self.source, self.target = source, target
        if isinstance(source, WordPiece):
            self.source_start: tuple[int, ...] = (source.cls_id,)
            self.source_end: tuple[int, ...] = (source.sep_id,)
        else:
            self.source_start, self.source_end = (), (source.eos_id,)

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @property
    def shared_ids(self) -> bool:
        """Whether an id is the same piece on both sides, as shared embeddings need: one model for both, or two models
        whose pieces stand in one list, as Marian's own vocabularies have them."""
        return self.joint or self.source.vocab == self.target.vocab

    @property
    def vocab_size(self) -> int:
        """All ids of both sides are below this."""
        return max(self.source.vocab_size, self.target.vocab_size)

    def files(self) -> dict[str, str]:
        """The files that hold them, the same bytes every time."""
        if self.joint:
            return {JOINT: self.target.files()[FILE]}
        source = self.source
        whole = (
            json.dumps(source.files(), ensure_ascii=False) if isinstance(source, WordPiece) else source.files()[FILE]
        )
        return {SOURCE: whole, TARGET: self.target.files()[FILE]}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over `files()`, in hexadecimal."""
        whole = hashlib.sha256()
        for name, text in sorted(self.files().items()):
            data = text.encode()
            whole.update(f"{name} {len(data)}\n".encode() + data)
        return whole.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the files into `folder`, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
            (folder / name).write_bytes(text.encode())

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Vocabularies:
        """From what `files` gave.

        Raises:
          UserError: files are missing or are not what was written.
        """
        if JOINT in files:
            both = SentencePiece.from_files({FILE: files[JOINT]})
            return cls(both, both)
        if SOURCE not in files or TARGET not in files:
            raise UserError(f"no vocabularies here: neither {JOINT} nor both {SOURCE} and {TARGET} are there")
        try:
            stored = json.loads(files[SOURCE])
        except ValueError as e:
            raise UserError(f"{SOURCE} is not valid JSON: {e}") from None
        source: SentencePiece | WordPiece
        if "model" in stored:
            source = SentencePiece.from_files({FILE: files[SOURCE]})
        else:
            source = WordPiece.from_files(stored)
        return cls(source, SentencePiece.from_files({FILE: files[TARGET]}))

    @classmethod
    def load(cls, folder: Path | str) -> Vocabularies:
        """From the files that `save` wrote into `folder`."""
        folder = Path(folder)
        try:
            files = {
                n: (folder / n).read_text(encoding="utf-8") for n in (JOINT, SOURCE, TARGET) if (folder / n).exists()
            }
        except OSError as e:
            raise ConfigError(f"{folder}: the vocabularies cannot be read: {e}") from None
        try:
            return cls.from_files(files)
        except UserError as e:
            raise type(e)(f"{folder}: {e}") from None
