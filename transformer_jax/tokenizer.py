"""WordPiece as BERT uses it: the `tokenizers` library behind a chunk cache, and files that Hugging Face reads.

Text comes in two kinds. Corpus text (`encode`, `encode_batch`, `encode_words`) never yields a control token: a literal
"[MASK]" in a web page is five characters' worth of ordinary pieces. A query (`encode_query`) is typed by a person who
means the mask. Where results differ from the 2018 code is listed in docs/tokenizer.md.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from transformer_jax import scripts
from transformer_jax.config import ConfigError, UserError
from transformer_jax.tokenizer_config import WordPieceConfig

log = logging.getLogger(__name__)

CONTROL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"
FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")

# What BERT's normaliser takes for white space: not VT, FF, FS to US or NEL, which `str.split` knows but BERT deletes.
_SPACE = "\t\n\r \\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
# Characters it puts spaces about (in the blocks that both the library and the 2018 code name).
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df"
_CHUNK = re.compile(f"[^{_SPACE}]+")
# The characters that stand alone wherever they are: ASCII punctuation as BERT defines it, and Han if so set.
_PUNCTUATION = "!-/:-@\\[-`{-~"
UNIT = re.compile(f"[{_PUNCTUATION}]|[^{_PUNCTUATION}{_SPACE}]+")
UNIT_HAN = re.compile(f"[{_HAN}{_PUNCTUATION}]|[^{_HAN}{_PUNCTUATION}{_SPACE}]+")
_UNUSED = re.compile(r"\[unused\d+\]")
_BLANK = re.compile(r"\[blank\d+\]")


class WordPiece:
    """A vocabulary and the rules by which text becomes its ids.

    Attributes:
      vocab: the pieces; the id of a piece is its place.
      config: the settings (its vocab_size is that of `vocab`).
      pad_id, unk_id, cls_id, sep_id, mask_id: ids of the control tokens.
      is_continuation_V: bool [V], True for pieces that start with ##.
      ordinary_ids: int32, ascending: what a random replacement may be. No control token, no [unusedN], no blank line.
    """

    CACHE_ENTRIES = 1 << 17
    """Most chunks kept; about 40 MB when full. A full cache is emptied."""
    CACHE_CHARS = 48
    """Longer chunks are not kept ..."""
    CACHE_UNITS = 8
    """... nor those of more units, such as sentences of Chinese, which hardly come again."""

    def __init__(self, vocab: Sequence[str], config: WordPieceConfig) -> None:
        """`vocab` in id order. Blank entries get names of their own, which no text can spell.

        A token of `config.keep_tokens` that is not in the vocabulary takes the place of the first free [unusedN], or
        is put at the end.

        Raises:
          UserError: a control token is missing or an entry stands twice.
          ConfigError: a keep token that cannot be one, or an unknown pre-splitter.
        """
        self.vocab = _with_keep_tokens(_checked(vocab), config.keep_tokens)
        self.config = dataclasses.replace(config, vocab_size=len(self.vocab), vocab_file="")
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = map(self.vocab.index, CONTROL_TOKENS)
        self.is_continuation_V = np.array([p.startswith(PREFIX) and len(p) > 2 for p in self.vocab])
        never = {
            i for i, p in enumerate(self.vocab) if p in CONTROL_TOKENS or _UNUSED.fullmatch(p) or _BLANK.fullmatch(p)
        }
        self.ordinary_ids = np.array([i for i in range(len(self.vocab)) if i not in never], np.int32)
        self._cuts = scripts.pre_splitter(config.pre_splitter) if config.pre_splitter else None
        self._corpus = tokenizers.Tokenizer.from_str(self.files()["tokenizer.json"])
        self._corpus.encode_special_tokens = True
        self._cache: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._ints = tuple(range(len(self.vocab)))  # one int object an id, for all cache entries
        self._units = (UNIT_HAN if config.tokenize_chinese_chars else UNIT).findall
        self._keep = any_of(config.keep_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return WordPiece, (self.vocab, self.config)

    # --- from and to files

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> WordPiece:
        """From the texts of vocab.txt, tokenizer.json and tokenizer_config.json, ours or another tool's.

        The vocabulary is that of vocab.txt, or of tokenizer.json where there is none. Settings come from
        tokenizer.json, then tokenizer_config.json, then BERT's defaults.

        Raises:
          UserError: no vocabulary, a tokenizer that is not BERT's WordPiece, or a vocabulary that cannot be used.
        """
        whole = _json(files, "tokenizer.json")
        settings = _json(files, "tokenizer_config.json")
        model = whole.get("model", {})
        if whole and model.get("type", "WordPiece") != "WordPiece":
            raise UserError(f"tokenizer.json holds a {model['type']} model; BERT needs WordPiece")
        if "vocab.txt" in files:
            vocab = _lines(files["vocab.txt"])
        elif "vocab" in model:
            vocab = _by_id(model["vocab"])
        else:
            raise UserError("no vocabulary: neither vocab.txt nor tokenizer.json is there")
        added = sorted(whole.get("added_tokens", []), key=lambda t: t["id"])
        for token in added:
            if token["id"] == len(vocab):
                vocab.append(token["content"])
        keep = tuple(t["content"] for t in added if t["content"] not in CONTROL_TOKENS)
        rules = whole.get("normalizer") or {}
        if rules and rules.get("type") != "BertNormalizer":
            raise UserError(f"tokenizer.json normalises with {rules.get('type')}; only BertNormalizer is supported")
        lowercase = rules.get("lowercase", settings.get("do_lower_case", True))
        config = WordPieceConfig(
            lowercase=lowercase,
            strip_accents=rules.get("strip_accents", settings.get("strip_accents")),
            tokenize_chinese_chars=rules.get("handle_chinese_chars", settings.get("tokenize_chinese_chars", True)),
            max_input_chars_per_word=model.get(
                "max_input_chars_per_word", settings.get("max_input_chars_per_word", 100 if whole else 200)
            ),
            unused_tokens=sum(1 for p in vocab if _UNUSED.fullmatch(p)),
            keep_tokens=keep,
            pre_splitter=settings.get("pre_splitter", ""),
        )
        return cls(vocab, config)

    @classmethod
    def from_vocab_file(cls, path: Path, config: WordPieceConfig) -> WordPiece:
        """From a vocabulary of one's own: the id of a piece is its line number, blank lines included."""
        return cls(_lines(_read(path)), config)

    @classmethod
    def load(cls, folder: Path | str) -> WordPiece:
        """From the files that `save` wrote into `folder`, or those of a Hugging Face folder."""
        folder = Path(folder)
        files = {name: _read(folder / name) for name in FILES if (folder / name).exists()}
        try:
            return cls.from_files(files)
        except UserError as e:
            raise type(e)(f"{folder}: {e}") from None

    def save(self, folder: Path | str, model_max_length: int | None = None) -> None:
        """Write the three files into `folder`, which is made if need be; see `files`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files(model_max_length).items():
            (folder / name).write_bytes(text.encode())

    def files(self, model_max_length: int | None = None) -> dict[str, str]:
        """The files a Hugging Face folder needs, the same bytes every time.

        Args:
          model_max_length: longest sequence of the model, which only the export knows.
        """
        settings: dict[str, Any] = {
            # The class that takes tokenizer.json as it stands; BertTokenizer would go back to 100 characters a word.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "do_lower_case": self.config.lowercase,
            "strip_accents": self.config.strip_accents,
            "tokenize_chinese_chars": self.config.tokenize_chinese_chars,
            "max_input_chars_per_word": self.config.max_input_chars_per_word,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
        settings |= {f"{t[1:-1].lower()}_token": t for t in CONTROL_TOKENS}
        if self.config.pre_splitter:
            settings["pre_splitter"] = self.config.pre_splitter
        if model_max_length is not None:
            settings["model_max_length"] = model_max_length
        return {
            "vocab.txt": "".join(p + "\n" for p in self.vocab),
            "tokenizer.json": json.dumps(self._library_form(), ensure_ascii=False, indent=1) + "\n",
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1, sort_keys=True) + "\n",
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over `files()`, in hexadecimal."""
        whole = hashlib.sha256()
        for name, text in sorted(self.files().items()):
            data = text.encode()
            whole.update(f"{name} {len(data)}\n".encode() + data)
        return whole.hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    # --- text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of corpus text, without [CLS] and [SEP]; control tokens written in it are plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; what is new to the cache goes to the library in one call."""
        split = [chunks_of(text) for text in self._pre_split(texts)]
        chain = itertools.chain.from_iterable
        with self._known(set().union(*split)) as table:
            look_up = table.__getitem__
            return [list(chain(map(look_up, chunks))) for chunks in split]

    def encode_words(self, sentence: str) -> tuple[list[int], list[bool]]:
        """Ids of a sentence whose spaces mark words, and for each whether it starts a word.

        The spaces stay while pieces are made. Since Chinese characters and punctuation stand alone anyway (with
        `tokenize_chinese_chars`), a segmented Chinese sentence has the ids of the unsegmented one; Latin words keep
        the space they need. A word that leaves no piece (only control characters) starts nothing.
        """
        chunks = chunks_of(sentence)
        ids: list[int] = []
        starts: list[bool] = []
        with self._known(set(chunks)) as table:
            for pieces in map(table.__getitem__, chunks):
                ids += pieces
                starts += [i == 0 for i in range(len(pieces))]
        return ids, starts

    def encode_query(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of text typed by a person: [MASK] and the other control tokens are one id each; no [CLS] or [SEP] added.

        Returns:
          ids and, for each, the half-open range of code points of `text` it stands for.
        """
        cuts = self._query_cuts(text)
        found = self._query.encode(scripts.insert_spaces(text, cuts), add_special_tokens=False)
        return list(found.ids), [(int(a), int(b)) for a, b in _without_cuts(found.offsets, cuts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """`encode` of each text, and where in it each piece comes from.

        Returns:
          ids, and int64 [n, 2]: the half-open range of code points of the text that the piece stands for. What BERT
          drops (format characters) belongs to the piece around it or to none. Where one character becomes several
          pieces, they share its range.
        """
        cuts = [self._cuts(text) if self._cuts else [] for text in texts]
        spaced = [scripts.insert_spaces(text, c) for text, c in zip(texts, cuts, strict=True)]
        found = self._corpus.encode_batch(spaced, add_special_tokens=False)
        return [(list(e.ids), _without_cuts(e.offsets, c)) for e, c in zip(found, cuts, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens included; pieces are joined, but spaces and case that were lost stay lost."""
        return self._corpus.decode([int(i) for i in ids], skip_special_tokens=False)

    def unknown_words(self, text: str) -> list[str]:
        """The words of corpus text that are [UNK], as they stand in the text."""
        (text,) = self._pre_split([text])
        found = self._corpus.encode(text, add_special_tokens=False)
        return [text[a:b] for i, (a, b) in zip(found.ids, found.offsets, strict=True) if i == self.unk_id]

    @functools.cached_property
    def piece_scripts(self) -> tuple[list[str], np.ndarray]:
        """Names of the scripts in the vocabulary, and int64 [V] which of them each piece belongs to."""
        each = [scripts.script_of_word(p.removeprefix(PREFIX)) for p in self.vocab]
        names = sorted(set(each))
        return names, np.array([names.index(s) for s in each], np.int64)

    # --- inside

    def _pre_split(self, texts: Sequence[str]) -> Sequence[str]:
        if self._cuts is None:
            return texts
        return [scripts.insert_spaces(t, self._cuts(t)) for t in texts]

    def _query_cuts(self, text: str) -> list[int]:
        if self._cuts is None:
            return []
        tokens = any_of([*CONTROL_TOKENS, *self.config.keep_tokens])
        whole = [m.span() for m in tokens.finditer(text)] if tokens else []
        return [c for c in self._cuts(text) if not any(a < c < b for a, b in whole)]

    @functools.cached_property
    def _query(self) -> Any:
        return tokenizers.Tokenizer.from_str(self.files()["tokenizer.json"])

    @contextlib.contextmanager
    def _known(self, chunks: set[str]) -> Iterator[Mapping[str, Sequence[int]]]:
        """The cache, with the ids of each of `chunks` in it; what is not worth keeping goes again on leaving."""
        with self._lock:
            missing = chunks.difference(self._cache)
            if len(self._cache) + len(missing) > self.CACHE_ENTRIES:
                self._cache.clear()
                missing = chunks
            passing = self._fill(missing) if missing else []
            yield self._cache
            for key in passing:
                self._cache.pop(key, None)
            if len(self._cache) > self.CACHE_ENTRIES:
                self._cache.clear()

    def _fill(self, missing: set[str]) -> list[str]:
        """Put `missing` and the units they are made of into the cache; returns the keys that should not stay."""
        cache, keep = self._cache, self._keep
        split = {c: [c] if keep and keep.search(c) else self._units(c) for c in missing}
        units = list(set().union(*split.values()).difference(cache))
        # Plain units are one word each, so they go through as one text, and come apart where no ## piece follows.
        plain = [u for u in units if u.isascii() and u.isalnum()] if keep is None else []
        others = list(set(units).difference(plain)) if plain else units
        *found, joined = self._corpus.encode_batch_fast([*others, " ".join(plain)], add_special_tokens=False)
        ints = self._ints.__getitem__
        for unit, encoding in zip(others, found, strict=True):
            cache[unit] = tuple(map(ints, encoding.ids))
        ids = list(map(ints, joined.ids))
        starts = np.flatnonzero(~self.is_continuation_V[ids]).tolist() if ids else []
        for unit, a, b in zip(plain, starts, [*starts[1:], len(ids)] if ids else [], strict=True):
            cache[unit] = tuple(ids[a:b])
        passing = [u for u in units if len(u) > self.CACHE_CHARS]
        chain, look_up = itertools.chain.from_iterable, cache.__getitem__
        for chunk, parts in split.items():
            if len(parts) != 1:
                cache[chunk] = tuple(chain(map(look_up, parts)))
                if len(parts) > self.CACHE_UNITS or len(chunk) > self.CACHE_CHARS:
                    passing.append(chunk)
        return passing

    def _library_form(self) -> dict[str, Any]:
        """tokenizer.json, written by hand so that its bytes do not depend on the library's version."""
        keep = set(self.config.keep_tokens)
        added = [
            {
                "id": i,
                "content": p,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": p in CONTROL_TOKENS,
            }
            for i, p in enumerate(self.vocab)
            if p in CONTROL_TOKENS or p in keep
        ]
        cls, sep = ({"SpecialToken": {"id": t, "type_id": 0}} for t in ("[CLS]", "[SEP]"))
        last = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
        a, b = ({"Sequence": {"id": s, "type_id": t}} for s, t in (("A", 0), ("B", 1)))
        marks = {t: {"id": t, "ids": [self.vocab.index(t)], "tokens": [t]} for t in ("[CLS]", "[SEP]")}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": self.config.tokenize_chinese_chars,
                "strip_accents": self.config.strip_accents,
                "lowercase": self.config.lowercase,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [cls, a, sep],
                "pair": [cls, a, sep, b, last],
                "special_tokens": marks,
            },
            "decoder": {"type": "WordPiece", "prefix": PREFIX, "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": PREFIX,
                "max_input_chars_per_word": self.config.max_input_chars_per_word,
                "vocab": {p: i for i, p in enumerate(self.vocab)},
            },
        }


def _without_cuts(offsets: Sequence[tuple[int, int]], cuts: Sequence[int]) -> np.ndarray:
    """Ranges in a text to which a space was added at each cut, as ranges in the text without: int64 [n, 2]."""
    found_N2 = np.array(offsets, np.int64).reshape(-1, 2)
    # A cut at original position c became the space at c + (cuts before it).
    spaces = np.array(cuts, np.int64) + np.arange(len(cuts))
    return found_N2 - np.searchsorted(spaces, found_N2)


def chunks_of(text: str) -> list[str]:
    """The parts of `text` between what BERT takes for white space."""
    if text.isprintable():  # then its only white space is U+0020
        return text.split()
    return _CHUNK.findall(text)


def any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of `tokens`, the longest where several fit; None if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _json(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        return json.loads(files[name]) if name in files else {}
    except ValueError as e:
        raise UserError(f"{name} is not valid JSON: {e}") from None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from None
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line} is not UTF-8 (byte 0x{e.object[e.start]:02x})") from None


def _lines(text: str) -> list[str]:
    """Lines of a vocabulary: LF or CRLF ends one, a BOM is dropped."""
    lines = text.removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _by_id(vocab: Mapping[str, int]) -> list[str]:
    pieces = sorted(vocab, key=vocab.__getitem__)
    if [vocab[p] for p in pieces] != list(range(len(pieces))):
        raise UserError("the ids of tokenizer.json's vocabulary are not 0, 1, 2, ... without gaps")
    return pieces


def _checked(vocab: Sequence[str]) -> list[str]:
    """The vocabulary with names for blank entries; control tokens must be there and nothing may stand twice."""
    named = [p or f"[blank{i + 1}]" for i, p in enumerate(vocab)]
    first: dict[str, int] = {}
    for i, piece in enumerate(named):
        if piece in first:
            raise UserError(
                f"the vocabulary has {piece!r} twice, at lines {first[piece] + 1} and {i + 1}; an id is a line number, "
                "so replace one of them, for instance by a free [unusedN]"
            )
        first[piece] = i
    missing = [t for t in CONTROL_TOKENS if t not in first]
    if missing:
        raise UserError(
            f"the vocabulary has no {' and no '.join(missing)}; all of {', '.join(CONTROL_TOKENS)} must be in it, "
            "written exactly so, one a line"
        )
    return named


def _with_keep_tokens(vocab: list[str], keep: Sequence[str]) -> list[str]:
    for token in keep:
        if not token or _CHUNK.fullmatch(token) is None or any(unicodedata.category(c)[0] == "C" for c in token):
            raise ConfigError(
                f"keep_tokens has {token!r}; a token must have at least one character, and no white space"
            )
    doubled = [t for t, n in collections.Counter(keep).items() if n > 1 or t in CONTROL_TOKENS]
    if doubled:
        raise ConfigError(f"keep_tokens has {doubled[0]!r} twice, or it is a control token, which is kept anyway")
    known = set(vocab)
    free = (i for i, p in enumerate(vocab) if _UNUSED.fullmatch(p) and p not in keep)
    for token in keep:
        if token not in known:
            place = next(free, None)
            if place is None:
                vocab.append(token)
            else:
                vocab[place] = token
    return vocab


# --- training
