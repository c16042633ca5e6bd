"""WordPiece as BERT uses it: the `tokenizers` library behind a chunk cache, files that Hugging Face reads, training.

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
import heapq
import itertools
import json
import logging
import multiprocessing
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
_UNIT = re.compile(f"[{_PUNCTUATION}]|[^{_PUNCTUATION}{_SPACE}]+")
_UNIT_HAN = re.compile(f"[{_HAN}{_PUNCTUATION}]|[^{_HAN}{_PUNCTUATION}{_SPACE}]+")
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
        self._units = (_UNIT_HAN if config.tokenize_chinese_chars else _UNIT).findall
        self._keep = _any_of(config.keep_tokens)

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

    def save(self, folder: Path | str) -> None:
        """Write the three files into `folder`, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
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
        split = [_chunks(text) for text in self._pre_split(texts)]
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
        chunks = _chunks(sentence)
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
        # A cut at original position c became the space at c + (cuts before it).
        spaces = np.array(cuts, np.int64) + np.arange(len(cuts))
        offsets_2 = np.array(found.offsets, np.int64).reshape(-1, 2)
        offsets_2 -= np.stack(
            [np.searchsorted(spaces, offsets_2[:, 0]), np.searchsorted(spaces, offsets_2[:, 1])], axis=1
        )
        return list(found.ids), [(int(a), int(b)) for a, b in offsets_2]

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
        tokens = _any_of([*CONTROL_TOKENS, *self.config.keep_tokens])
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


def _chunks(text: str) -> list[str]:
    """The parts of `text` between what BERT takes for white space."""
    if text.isprintable():  # then its only white space is U+0020
        return text.split()
    return _CHUNK.findall(text)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
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

BLOCK_CHARS = 1 << 20
"""Characters of text counted as one block. Blocks, not workers, decide what is pruned."""
MAX_WORDS = 2_000_000
"""Most distinct words (and white-space chunks of a block) kept while counting; about 300 MB."""


def train_wordpiece(texts: Iterable[str], config: WordPieceConfig, workers: int = 1) -> WordPiece:
    """Learn a vocabulary from `texts`, which are read once.

    Words are counted, then the pair of neighbouring pieces that occurs most often becomes a piece, again and again
    (byte-pair merges on BERT's words, as other open WordPiece trainers do; the 2018 trainer was never published). Ties
    go to the pair that comes first by code points, so the result depends on the texts alone: not on workers, versions
    of the library, or the order of any hash table.

    Ids: [PAD], [unused0] ... as many as `config.unused_tokens`, [UNK], [CLS], [SEP], [MASK] (with 99 unused ones these
    are the ids of BERT-base), `config.keep_tokens`, the alphabet, its ## forms, then pieces in the order learned.

    Memory is bounded by the table of words: above MAX_WORDS distinct ones, the rarest are forgotten, as many counts as
    it takes to halve the table. Words longer than max_input_chars_per_word are not learned from.

    Raises:
      UserError: no words at all, or a vocab_size too small for the control tokens and one character.
    """
    counts = count_words(texts, config, workers)
    if not counts:
        raise UserError("no words to learn a vocabulary from: the texts are empty")
    fixed = ["[PAD]", *(f"[unused{i}]" for i in range(config.unused_tokens)), *CONTROL_TOKENS[1:], *config.keep_tokens]
    room = config.vocab_size - len(fixed)
    if room < 2:
        raise UserError(
            f"vocab_size {config.vocab_size} is too small: {len(fixed)} control, unused and keep tokens leave no room"
        )
    taken = set(fixed)
    pieces = [p for p in learn_pieces(counts, config, room) if p not in taken]
    if len(pieces) < room:
        log.warning(
            "the texts give only %d pieces (each seen at least %d times): the vocabulary has %d entries, not the %d "
            "asked for; use more text, or lower tokenizer.vocab_size or tokenizer.min_frequency",
            len(pieces), config.min_frequency, len(fixed) + len(pieces), config.vocab_size,
        )  # fmt: skip
    return WordPiece(fixed + pieces, config)


def count_words(texts: Iterable[str], config: WordPieceConfig, workers: int = 1) -> dict[str, int]:
    """How often each of BERT's words occurs, at most MAX_WORDS of them; the same for any number of workers."""
    total: collections.Counter[str] = collections.Counter()
    for counts in _map_blocks(_Counting(config), _blocks(texts), workers):
        total.update(counts)
        if len(total) > MAX_WORDS:
            total = _prune(total, MAX_WORDS // 2)
    return total


def learn_pieces(counts: Mapping[str, int], config: WordPieceConfig, room: int) -> list[str]:
    """At most `room` pieces: the alphabet, its ## forms, and merges by count. Pure and free of hash order."""
    seen: collections.Counter[str] = collections.Counter()
    for word, n in counts.items():
        for char in word:
            seen[char] += n
    order = sorted((c for c in seen if seen[c] >= config.min_frequency), key=lambda c: (-seen[c], c))
    alone = _standing_alone(order, config)
    if config.limit_alphabet:
        order = order[: config.limit_alphabet]
    places = [1 if c in alone else 2 for c in order]
    most = room if config.limit_alphabet else max(room // 3, 2)
    while True:
        alphabet = [c for c, used in zip(order, itertools.accumulate(places), strict=True) if used <= most]
        found = _learn(counts, config, room, alphabet, alone)
        if len(found) >= room - 1 or len(alphabet) == len(order):
            return found
        most += room - len(found)  # what merges leave free, as in Chinese, goes to rarer characters


def _learn(
    counts: Mapping[str, int], config: WordPieceConfig, room: int, alphabet: list[str], alone: set[str]
) -> list[str]:
    pieces = sorted(alphabet) + sorted(PREFIX + c for c in alphabet if c not in alone)
    known = set(alphabet)
    spelled = sorted(w for w in counts if known.issuperset(w))
    return pieces + _merges(
        spelled, [counts[w] for w in spelled], set(pieces), room - len(pieces), config.min_frequency
    )


def _standing_alone(chars: Iterable[str], config: WordPieceConfig) -> set[str]:
    """Those of `chars` that BERT cuts off on both sides (punctuation, Han), so that they need no ## form."""
    cut = _Counting(config)
    return {c for c in chars if len(cut.words(f"a{c}a")) != 1}


def _merges(words: list[str], counts: list[int], known: set[str], room: int, min_frequency: int) -> list[str]:
    """Byte-pair merges over `words`; each word is a list of symbols, which are places in `names`."""
    names: list[str] = []
    number: dict[str, int] = {}

    def symbol(name: str) -> int:
        if name not in number:
            number[name] = len(names)
            names.append(name)
        return number[name]

    split = [[symbol(c if i == 0 else PREFIX + c) for i, c in enumerate(w)] for w in words]
    pairs: dict[tuple[int, int], int] = collections.defaultdict(int)
    where: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
    for w, symbols in enumerate(split):
        for pair in itertools.pairwise(symbols):
            pairs[pair] += counts[w]
            where[pair].add(w)

    def entry(pair: tuple[int, int], n: int) -> tuple[int, str, str, tuple[int, int]]:
        return -n, names[pair[0]], names[pair[1]], pair

    heap = [entry(pair, n) for pair, n in pairs.items() if n >= min_frequency]
    heapq.heapify(heap)
    found: list[str] = []
    while heap and len(found) < room:
        minus, _, _, pair = heapq.heappop(heap)
        n = pairs.get(pair, 0)
        if n != -minus:  # an old entry: its count has changed since
            if n >= min_frequency and n < -minus:
                heapq.heappush(heap, entry(pair, n))
            continue
        a, b = pair
        merged = names[a] + names[b].removeprefix(PREFIX)
        new = symbol(merged)
        if merged not in known:
            known.add(merged)
            found.append(merged)
        grown: set[tuple[int, int]] = set()
        for w in where.pop(pair):
            split[w] = _merge_in_word(split[w], a, b, new, w, counts[w], pairs, where, grown)
        del pairs[pair]
        for p in grown:
            if p in pairs and pairs[p] >= min_frequency:
                heapq.heappush(heap, entry(p, pairs[p]))
    return found


def _merge_in_word(
    symbols: list[int],
    a: int,
    b: int,
    new: int,
    word: int,
    count: int,
    pairs: dict[tuple[int, int], int],
    where: dict[tuple[int, int], set[int]],
    grown: set[tuple[int, int]],
) -> list[int]:
    """`symbols` with each a b replaced by new; `pairs`, `where` and `grown` are brought up to date."""
    out: list[int] = []
    i, last = 0, len(symbols) - 1
    while i <= last:
        if i < last and symbols[i] == a and symbols[i + 1] == b:
            if out:
                pairs[out[-1], a] -= count
                pair = (out[-1], new)
                pairs[pair] += count
                where[pair].add(word)
                grown.add(pair)
            if i + 1 < last:
                pairs[b, symbols[i + 2]] -= count
                pair = (new, symbols[i + 2])
                pairs[pair] += count
                where[pair].add(word)
                grown.add(pair)
            out.append(new)
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def _prune(counts: collections.Counter[str], most: int) -> collections.Counter[str]:
    """Without its rarest words: the least threshold that leaves at most `most` of them."""
    by_count = collections.Counter(counts.values())
    left, threshold = len(counts), 0
    while left > most:
        threshold += 1
        left -= by_count[threshold]
    return collections.Counter({w: n for w, n in counts.items() if n > threshold})


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text) + 1
        if size >= BLOCK_CHARS:
            yield block
            block, size = [], 0
    if block:
        yield block


class _Counting:
    """Counts BERT's words in a block of texts; picklable, so that it can run in a worker."""

    def __init__(self, config: WordPieceConfig) -> None:
        self.config = config
        self._cuts = scripts.pre_splitter(config.pre_splitter) if config.pre_splitter else None
        self._keep = _any_of(config.keep_tokens)
        self._normalizer = tokenizers.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.tokenize_chinese_chars,
            strip_accents=config.strip_accents,
            lowercase=config.lowercase,
        )
        self._splitter = tokenizers.pre_tokenizers.BertPreTokenizer()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Counting, (self.config,)

    def words(self, chunk: str) -> list[str]:
        """BERT's words in a piece of text."""
        if chunk.isascii() and chunk.isalnum():
            return [chunk.lower()] if self.config.lowercase else [chunk]
        return [word for word, _ in self._splitter.pre_tokenize_str(self._normalizer.normalize_str(chunk))]

    def __call__(self, block: list[str]) -> dict[str, int]:
        split = _UNIT_HAN.findall if self.config.tokenize_chinese_chars else _UNIT.findall
        chunks: collections.Counter[str] = collections.Counter()
        for text in block:
            if self._keep:
                text = self._keep.sub(" ", text)
            if self._cuts:
                text = scripts.insert_spaces(text, self._cuts(text))
            chunks.update(_chunks(text) if text.isascii() else split(text))
        counts: dict[str, int] = collections.defaultdict(int)
        longest = self.config.max_input_chars_per_word
        for chunk, n in chunks.items():
            for word in self.words(chunk):
                if len(word) <= longest:
                    counts[word] += n
        return dict(counts)


def _map_blocks(function: _Counting, blocks: Iterator[list[str]], workers: int) -> Iterator[dict[str, int]]:
    """`function` of each block, in order; at most two blocks a worker wait in memory."""
    first = list(itertools.islice(blocks, 2))
    if workers <= 1 or len(first) < 2:
        for block in itertools.chain(first, blocks):
            yield function(block)
        return
    # A fresh process, not a copy of this one: a process that has started JAX must not be forked.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for block in itertools.chain(first, blocks):
            waiting.append(pool.apply_async(function, (block,)))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()
