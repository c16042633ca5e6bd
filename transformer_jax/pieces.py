"""SentencePiece (Kudo and Richardson 2018) with ids that we fix: `</s>` 0, `<unk>` 1, the pieces, `<pad>` last.

This is the layout of Marian's vocabularies, so exports need no translation of ids. The SentencePiece model itself has
neither `</s>` nor `<pad>`: text can spell them, but never becomes them. Tags of one's own are put in by id and are
unknown to the model too: the text between two tags is encoded by itself, and `decode` puts it together again. A space
before a tag is the piece "▁" of its own, and text that touches the tag before it starts without one, so that the way
there and back is exact (for text that the normalisation rule leaves as it is).

What each rule changes is listed in docs/tokenizer.md.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import json
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer_jax import scripts
from transformer_jax.config import ConfigError, UserError
from transformer_jax.inputs import bits, derive_key

EOS, UNK, PAD = "</s>", "<unk>", "<pad>"
SPACE = "\u2581"
"""How SentencePiece writes a space."""
FILE = "sentencepiece.json"
THREADS = 8
"""Of training, whatever the machine: the pieces of a unigram model depend on the number."""
MAX_TRAINING_BYTES = 4000
"""Longer lines are split for training; SentencePiece itself would leave out those above 4,192 bytes."""
CACHE_WORDS = 1 << 17
"""Most words whose ids are kept, about 40 MB; a full table is emptied."""
MAX_TRAINING_SENTENCES = 2_000_000
"""More are thinned out evenly; the trainer holds them in memory."""

Model = Literal["bpe", "unigram"]
Normalization = Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"]

_RESERVED = re.compile(r"<(?:/?s|unk|pad|0x[0-9a-f]{2})>", re.IGNORECASE)
_SAMPLING = threading.Lock()


class SentencePiece:
    """A model and the ids of its pieces.

    Attributes:
      model: the SentencePiece model, as in a `.spm` file.
      vocab: the pieces in order of id.
      user_symbols: tags, each one id wherever it stands in a text.
      tag_ids: the ids of those.
      eos_id, unk_id, pad_id: 0, 1 and the last id.
    """

    eos_id = 0
    unk_id = 1

    def __init__(self, model: bytes, vocab: Sequence[str] | None = None, user_symbols: Sequence[str] = ()) -> None:
        """
        Args:
          vocab: pieces in order of id, where they are given (Marian's vocab.json, which may hold pieces of another
            model too: text that is no piece of this one, but of the other, has its id); otherwise `</s>`, `<unk>`, the
            tags, the pieces of the model in its order, `<pad>`.

        Raises:
          UserError: not a SentencePiece model, or a vocabulary that is not in this layout.
        """
        import sentencepiece

        self.model, self.user_symbols = model, tuple(user_symbols)
        try:
            if not model:
                raise UserError("not a SentencePiece model: the file is empty")
            self._whole = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as e:
            raise UserError(f"not a SentencePiece model: {e}") from None
        size = self._whole.vocab_size()
        names = [self._whole.id_to_piece(i) for i in range(size)]
        own = [
            not (self._whole.is_control(i) or self._whole.is_unknown(i) or self._whole.is_unused(i))
            and name not in (EOS, UNK, PAD)
            for i, name in enumerate(names)
        ]
        pieces = list(itertools.compress(names, own))
        if vocab is None:
            known = set(pieces)
            vocab = [EOS, UNK, *(tag for tag in self.user_symbols if tag not in known), *pieces, PAD]
        self.vocab = _checked(vocab)
        self.pad_id = len(self.vocab) - 1
        ids = {piece: i for i, piece in enumerate(self.vocab)}
        self._ids = [ids.get(name, self.unk_id) if ours else self.unk_id for name, ours in zip(names, own, strict=True)]
        # What the model has no piece for it gives back as it stands, and Marian looks that up in the list as well.
        apart = {*names, EOS, UNK, PAD, *self.user_symbols}
        others = {piece: i for piece, i in ids.items() if piece not in apart}
        self._by_text = others and others | dict(zip(names, self._ids, strict=True))
        for tag in self.user_symbols:
            if tag not in ids or tag in (EOS, UNK, PAD):
                raise UserError(f"the tag {tag!r} is not in the vocabulary, or is one of {EOS}, {UNK} and {PAD}")
        self._tags = {tag: ids[tag] for tag in self.user_symbols}
        self.tag_ids = frozenset(self._tags.values())
        self._cut = _any_of(self.user_symbols)
        self._space_id = ids.get(SPACE, self.unk_id)
        self._cache: dict[str, tuple[int, ...]] = {"": ()}

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePiece, (self.model, self.vocab, self.user_symbols)

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    # --- from and to files

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> SentencePiece:
        """From what `files` gave."""
        try:
            stored = json.loads(files[FILE])
            return cls(base64.b64decode(stored["model"]), stored["vocab"], stored["user_symbols"])
        except (KeyError, ValueError, TypeError) as e:
            raise UserError(f"{FILE} is missing or is not what was written: {e}") from None

    def files(self) -> dict[str, str]:
        """The one file that holds model and vocabulary, the same bytes every time."""
        stored = {
            "user_symbols": list(self.user_symbols),
            "vocab": self.vocab,
            "model": base64.b64encode(self.model).decode(),
        }
        return {FILE: json.dumps(stored, ensure_ascii=False, indent=0) + "\n"}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over `files()`, in hexadecimal."""
        return hashlib.sha256(self.files()[FILE].encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the file into `folder`, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
            (folder / name).write_bytes(text.encode())

    @classmethod
    def load(cls, folder: Path | str) -> SentencePiece:
        """From the file that `save` wrote into `folder`."""
        try:
            return cls.from_files({FILE: (Path(folder) / FILE).read_text(encoding="utf-8")})
        except OSError as e:
            raise ConfigError(f"{Path(folder) / FILE}: cannot be read: {e.strerror}") from None
        except UserError as e:
            raise type(e)(f"{folder}: {e}") from None

    # --- text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text, tags included, without `</s>`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one thread."""
        if self._cut is not None:
            return [self._with_tags(text, self._ids_of) for text in texts]
        if not self._by_words:
            return self._encode_whole(texts)
        # Long runs without spaces (Chinese, addresses) hardly come again, so they are not worth keeping.
        words = [
            text.split(" ") if len(text) <= 24 * (text.count(" ") + 1) and SPACE not in text else None for text in texts
        ]
        rest = iter(self._encode_whole([text for text, own in zip(texts, words, strict=True) if own is None]))
        look_up = self._known(set().union(*(own for own in words if own is not None))).__getitem__
        chain = itertools.chain.from_iterable
        return [next(rest) if own is None else list(chain(map(look_up, own))) for own in words]

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        if self._by_text:
            return [self._ids_of(self._whole, text) for text in texts]
        ids = self._ids
        return [[ids[i] for i in row] for row in self._whole.encode(list(texts), num_threads=1)]

    def _ids_of(self, processor: Any, text: str, **options: Any) -> list[int]:
        """Ids of the pieces that a processor cuts a text without tags into."""
        if self._by_text:
            return [self._by_text.get(piece, self.unk_id) for piece in processor.encode(text, out_type=str, **options)]
        return [self._ids[i] for i in processor.encode(text, **options)]

    def _known(self, words: set[str]) -> Mapping[str, tuple[int, ...]]:
        """A table that has the ids of each of `words`. It only grows, so that threads may share it."""
        table = self._cache
        missing = [word for word in words if word not in table]
        if missing:
            table.update(zip(missing, map(tuple, self._encode_whole(missing)), strict=True))
            if len(table) > CACHE_WORDS:
                self._cache = {"": ()}
        return table

    @functools.cached_property
    def _by_words(self) -> bool:
        """Whether a text is cut as its words are, each by itself: no piece goes over a space, and spaces are tidied.

        Of BPE only: the best cut of a unigram model may be one of several with the same score, and which of them it is
        depends on how the scores before it were rounded.
        """
        proto = _proto(self.model)
        rules, made = proto.normalizer_spec, proto.trainer_spec
        return (
            made.model_type == made.BPE
            and rules.add_dummy_prefix
            and rules.remove_extra_whitespaces
            and rules.escape_whitespaces
            and made.split_by_whitespace
            and not made.treat_whitespace_as_suffix
            and not any(SPACE in piece[1:] for piece in self.vocab)
        )

    def sample_batch(self, texts: Sequence[str], keys: np.ndarray, amount: float) -> list[list[int]]:
        """As `encode_batch`, each text cut in a random way that its key alone decides.

        Args:
          keys: uint64 [texts].
          amount: the share of merges left out (BPE-dropout, Provilkov et al. 2020), or for a unigram model the
            smoothing of the draw over all ways to cut (Kudo 2018).
        """
        import sentencepiece

        def draw(processor: Any, part: str) -> list[int]:
            return self._ids_of(processor, part, enable_sampling=True, alpha=amount, nbest_size=-1)

        found = []
        seeds = (np.asarray(keys, np.uint64) >> np.uint64(32)).tolist()
        with _SAMPLING:  # the seed belongs to the process
            for text, seed in zip(texts, seeds, strict=True):
                sentencepiece.set_random_generator_seed(seed)
                if self._cut is None:
                    found.append(draw(self._whole, text))
                else:
                    found.append(self._with_tags(text, draw))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; `</s>` and `<pad>` are left out, and `<unk>` is " ⁇ "."""
        parts: list[str] = []
        run: list[str] = []
        first = True

        def flush() -> None:
            if run:
                text = (self._whole if first else self._inner).decode(run)
                if SPACE in text:  # a piece that only the other model has comes back as it is
                    text = (text.removeprefix(SPACE) if first else text).replace(SPACE, " ")
                parts.append(text)
                run.clear()

        for i in map(int, ids):
            if i in self.tag_ids:
                flush()
                parts.append(self.vocab[i])
                first = False
            elif i not in (self.eos_id, self.pad_id):
                run.append(self.vocab[i])
        flush()
        return "".join(parts)

    def unknown_words(self, text: str) -> list[str]:
        """The parts of a text that are `<unk>`, as they stand in it after normalisation."""
        found = []
        for part in self._cut.split(text) if self._cut else [text]:
            pieces, ids = self._whole.encode(part, out_type=str), self._ids_of(self._whole, part)
            found += [p.strip(SPACE) for p, i in zip(pieces, ids, strict=True) if i == self.unk_id]
        return found

    @functools.cached_property
    def piece_scripts(self) -> tuple[list[str], np.ndarray]:
        """Names of the scripts in the vocabulary, and int64 [V] which of them each piece belongs to."""
        each = [scripts.script_of_word(p.strip(SPACE)) if p not in self._tags else scripts.COMMON for p in self.vocab]
        names = sorted(set(each))
        return names, np.array([names.index(s) for s in each], np.int64)

    @functools.cached_property
    def _inner(self) -> Any:
        """The model for text that goes on after a tag: no space is put before it, and none is taken away."""
        import sentencepiece

        proto = _proto(self.model)
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    @functools.cached_property
    def _keeps_spaces(self) -> bool:
        return not _proto(self.model).normalizer_spec.remove_extra_whitespaces

    def _with_tags(self, text: str, cut: Callable[[Any, str], list[int]]) -> list[int]:
        """Ids of a text in which tags may stand."""
        assert self._cut is not None
        parts = self._cut.split(text)
        tags = self._cut.findall(text)
        found: list[int] = []
        for number, part in enumerate(parts):
            core = part if self._keeps_spaces else part.strip()
            if core and (number == 0 or (not self._keeps_spaces and part[0].isspace())):
                found += cut(self._whole, core)
            elif core:
                core = core if self._keeps_spaces else " ".join(core.split())
                found += cut(self._inner, core)
            # A space before the next tag; spaces at the ends of the whole text go, as they do without tags.
            between = not self._keeps_spaces and number < len(tags)
            if between and part and part[-1].isspace() and (core or number):
                found.append(self._space_id)
            if number < len(tags):
                found.append(self._tags[tags[number]])
        return found


def train(
    texts: Iterable[str],
    *,
    model: Model = "bpe",
    vocab_size: int = 8000,
    byte_fallback: bool = False,
    character_coverage: float = 1.0,
    normalization: Normalization = "nmt_nfkc",
    user_symbols: Sequence[str] = (),
    max_sentences: int = MAX_TRAINING_SENTENCES,
    say: Callable[[str], None] = lambda message: None,
) -> SentencePiece:
    """Learn pieces from texts; the same texts and settings give the same pieces, whatever the machine.

    Args:
      vocab_size: `</s>`, `<unk>`, `<pad>` and the tags included. Where the text has fewer pieces in it, there are
        fewer.
      normalization: "identity" keeps runs of spaces too.
      max_sentences: with more, an even share of them is taken, chosen by their number.

    Raises:
      UserError: no text, or a vocabulary too small for the characters of the text.
    """
    import sentencepiece

    fixed = 2 + len(user_symbols)
    least = fixed + 2 + (256 if byte_fallback else 0)
    if vocab_size < least:
        raise ConfigError(
            f"tokenizer.vocab_size is {vocab_size}; control pieces, tags and bytes alone need {least}, raise it"
        )
    split = [0]
    sentences = _thinned(_training_parts(texts, user_symbols, split), max_sentences, say)
    if split[0]:
        say(f"{split[0]:,} lines longer than {MAX_TRAINING_BYTES:,} bytes were split for learning the pieces")
    if not sentences:
        raise UserError("no text to learn pieces from: the training data has no line with any character in it")
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=written, model_type=model, vocab_size=vocab_size - fixed,
            hard_vocab_limit=False, byte_fallback=byte_fallback, character_coverage=character_coverage,
            normalization_rule_name=normalization, remove_extra_whitespaces=normalization != "identity",
            unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, num_threads=THREADS, input_sentence_size=0,
            shuffle_input_sentence=False, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as e:
        raise UserError(_why(str(e), vocab_size, fixed)) from None
    found = SentencePiece(written.getvalue(), user_symbols=user_symbols)
    if found.vocab_size < vocab_size:
        say(f"the text gives {found.vocab_size:,} pieces and not the {vocab_size:,} of tokenizer.vocab_size")
    return found


def _training_parts(texts: Iterable[str], tags: Sequence[str], split: list[int]) -> Iterator[str]:
    """The texts as they are learned from: without tags, in parts that are not too long.

    A text that spells a control piece is cut behind each "<", so that none can be learned. U+2585 becomes a space:
    the trainer leaves out lines with it.
    """
    cut = _any_of(tags)
    for text in texts:
        text = text.replace("\u2585", " ").replace("\0", " ")
        for part in cut.split(text) if cut else [text]:
            pieces = [part]
            if any(mark in part for mark in "<\uff1c\ufe64") and _RESERVED.search(unicodedata.normalize("NFKC", part)):
                pieces = re.split("(?<=[<\uff1c\ufe64])", part)
            for piece in pieces:
                if len(piece) * 4 > MAX_TRAINING_BYTES and len(piece.encode()) > MAX_TRAINING_BYTES:
                    split[0] += 1
                    yield from _shorter(piece)
                elif piece and not piece.isspace():
                    yield piece


def _shorter(text: str) -> Iterator[str]:
    """A long text in parts of at most MAX_TRAINING_BYTES, cut at a space where there is one."""
    most = MAX_TRAINING_BYTES // 4  # characters have at most four bytes
    while text:
        end = len(text)
        if end > most:
            end = text.rfind(" ", 1, most) + 1 or most
        part, text = text[:end], text[end:]
        if not part.isspace():
            yield part


def _thinned(sentences: Iterable[str], most: int, say: Callable[[str], None]) -> list[str]:
    """At most `most` sentences, chosen by a hash of their number; never more than that are held."""
    key = derive_key(0, "training sentences")
    held: list[str] = []
    drawn: list[int] = []
    limit = 1 << 64
    count = 0
    buffer = np.zeros(0, np.uint64)
    for count, sentence in enumerate(sentences, 1):
        place = (count - 1) % 4096
        if place == 0:
            buffer = bits(key, np.arange(count - 1, count + 4095))
        number = int(buffer[place])
        if number < limit:
            held.append(sentence)
            drawn.append(number)
            if len(held) > most:
                limit //= 2
                kept = [i for i, n in enumerate(drawn) if n < limit]
                held, drawn = [held[i] for i in kept], [drawn[i] for i in kept]
    if len(held) < count:
        say(f"the pieces are learned from {len(held):,} of {count:,} lines, taken evenly")
    return held


def _why(message: str, vocab_size: int, fixed: int) -> str:
    """What to tell the user about an error of the trainer."""
    small = re.search(r"required_chars\. (\d+) vs (\d+)", message)
    if small:
        return (
            f"tokenizer.vocab_size {vocab_size} is too small: the characters of the text alone need "
            f"{int(small[2]) + fixed}; raise it, or lower tokenizer.character_coverage (with tokenizer.byte_fallback "
            "the rest is spelt in bytes)"
        )
    if "sentences_.empty()" in message:
        return "no text to learn pieces from: the training data has no line with any character in it"
    return f"SentencePiece could not learn pieces from this text: {message}"


def _proto(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    form: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    return form.ModelProto.FromString(model)


def _checked(vocab: Sequence[str]) -> list[str]:
    vocab = list(vocab)
    if len(vocab) < 3 or vocab[0] != EOS or vocab[1] != UNK or vocab[-1] != PAD:
        raise UserError(
            f"a vocabulary must have {EOS} as id 0, {UNK} as id 1 and {PAD} as its last id, as Marian's has"
        )
    if len(set(vocab)) < len(vocab):
        twice = next(p for i, p in enumerate(vocab) if p in vocab[:i])
        raise UserError(f"the vocabulary has {twice!r} twice")
    return vocab


def _any_of(tags: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of the tags, the longest where several fit; None if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True)))) if tags else None
