"""WordPiece: ids as Hugging Face gives them, a cache that changes nothing, vocabularies that come out the same."""

import collections
import dataclasses
import functools
import gzip
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax import vocabulary as vocabulary_module
from transformer_jax.config import ConfigError, UserError
from transformer_jax.tokenizer import CONTROL_TOKENS, FILES, WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.vocabulary import count_words, learn_pieces, train_wordpiece

REPOSITORY = Path(__file__).parents[1]
TEXTS = {
    "english": ["data/docs/en/austen.txt.gz", "data/docs/en/jargon.txt.gz", "data/docs/en/python_docs.txt.gz"],
    "chinese": ["data/docs/zh/sanguo.txt.gz", "data/docs/zh/bible_cuv.txt.gz"],
}
ODD = [
    "", " ", "[MASK] [UNK] [SEP]x [PAD]", "don't (stop) -- 3.14, e.g. naïve café Ångström",
    "foo\u200bbar co\u00adop a\x85b",
    "a\u00a0b\u202fc\u3000d\u2028e\tf\rg", "\ufeffbom", "ΣΊΣΥΦΟΣ Σ", "Straße ﬁn ①② ½",
    "汉字abc漢，。！ひらがな한국어", "x" * 150,
    "e\u0301 \u0301e <\u0338 汉\u0301", "İstanbul Işık Şanlıurfa", "👨‍👩‍👧 🎉",
    "ไทยภาษา", "\x00\x0b\x1c\x7f", "a##b ##c",
]  # fmt: skip


def text(kind: str, lines: int) -> list[str]:
    """The first lines of each bundled file of a kind."""
    found = []
    for name in TEXTS[kind]:
        with gzip.open(REPOSITORY / name, "rt", encoding="utf-8", newline="\n") as f:
            found += [line.rstrip("\n") for line in itertools.islice(f, lines)]
    return found


def small(pieces: str, **settings: object) -> WordPiece:
    """A tokenizer of the control tokens and the given pieces."""
    return WordPiece([*CONTROL_TOKENS, *pieces.split()], WordPieceConfig(**settings))  # type: ignore[arg-type]


def pieces(tokenizer: WordPiece, ids: list[int]) -> list[str]:
    return [tokenizer.vocab[i] for i in ids]


def library(tokenizer: WordPiece) -> tokenizers.Tokenizer:
    """The library itself on our file, with control tokens in text as text."""
    made = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"])
    made.encode_special_tokens = True
    return made


@pytest.fixture(scope="module")
def english() -> WordPiece:
    return train_wordpiece(text("english", 400), WordPieceConfig(vocab_size=3000))


@pytest.fixture(scope="module")
def cased() -> WordPiece:
    return train_wordpiece(text("english", 400), WordPieceConfig(vocab_size=3000, lowercase=False))


@pytest.fixture(scope="module")
def chinese() -> WordPiece:
    return train_wordpiece(text("chinese", 400), WordPieceConfig(vocab_size=4000))


# --- the cache against the library


def wide_vocabulary() -> list[str]:
    """Control tokens and a piece, and its ## form, for each character below U+3100 and some above."""
    chars = [chr(c) for c in range(0x21, 0x3100) if not chr(c).isspace()] + list("汉字漢𠀀，ｱ가")
    return [*CONTROL_TOKENS, *chars, *("##" + c for c in chars), "ab", "a##b"]


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_every_code_point_in_three_contexts_has_the_library_s_ids(lowercase: bool) -> None:
    """C033: alone, after a space, and within a word; all assigned planes, the others by samples."""
    points = [*range(0xD800), *range(0xE000, 0x32000), *range(0x32000, 0x110000, 251), *range(0xE0000, 0xE0200)]
    if not lowercase:
        points = points[::7]
    tokenizer = WordPiece(wide_vocabulary(), WordPieceConfig(lowercase=lowercase))
    reference = library(tokenizer)
    for start in range(0, len(points), 64):
        line = " ".join(f"a{chr(c)}b a {chr(c)} {chr(c)}" for c in points[start : start + 64])
        if tokenizer.encode(line) == reference.encode(line, add_special_tokens=False).ids:
            continue
        for c in points[start : start + 64]:
            each = f"a{chr(c)}b a {chr(c)} {chr(c)}"
            assert tokenizer.encode(each) == reference.encode(each, add_special_tokens=False).ids, hex(c)


ALPHABET = st.one_of(
    st.sampled_from(
        [*list("aAbé ,.[]()#\n\r\t\x0b\x85\xa0\u2028\u3000\u0301\u0338汉字，。ΣİßŞกﬁ"), "[MASK]", "[out]", "##"]
    ),
    st.characters(exclude_categories=["Cs"]),
)
MIXED = st.lists(ALPHABET, max_size=40).map("".join)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(MIXED, max_size=4), st.booleans(), st.booleans(), st.sampled_from([(), ("[out]",), ("a,", "字")]))
def test_any_text_has_the_library_s_ids(
    texts: list[str], lowercase: bool, chinese: bool, keep: tuple[str, ...]
) -> None:
    config = WordPieceConfig(lowercase=lowercase, tokenize_chinese_chars=chinese, keep_tokens=keep)
    tokenizer, reference = wide(config)
    expected = [reference.encode(t, add_special_tokens=False).ids for t in texts]
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode(t) for t in texts] == expected


@functools.cache
def wide(config: WordPieceConfig) -> tuple[WordPiece, tokenizers.Tokenizer]:
    tokenizer = WordPiece(wide_vocabulary(), config)
    return tokenizer, library(tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 3, 50, 1 << 17])
def test_ids_do_not_depend_on_the_size_of_the_cache(
    english: WordPiece, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    tokenizer = WordPiece(english.vocab, english.config)
    monkeypatch.setattr(tokenizer, "CACHE_ENTRIES", entries)
    reference = library(tokenizer)
    lines = text("english", 60) + ODD
    expected = [reference.encode(t, add_special_tokens=False).ids for t in lines]
    for _ in range(2):
        assert [i for n in range(0, len(lines), 7) for i in tokenizer.encode_batch(lines[n : n + 7])] == expected
        assert len(tokenizer._cache) <= entries


def test_the_cache_does_not_keep_long_chunks_or_chinese_sentences(chinese: WordPiece) -> None:
    tokenizer = WordPiece(chinese.vocab, chinese.config)
    tokenizer.encode_batch(["x" * 1000, "滚滚长江东逝水浪花淘尽英雄", "话说天下"])
    assert "x" * 1000 not in tokenizer._cache
    assert "滚滚长江东逝水浪花淘尽英雄" not in tokenizer._cache
    assert "话说天下" in tokenizer._cache and "江" in tokenizer._cache


# --- Hugging Face's tokenizer on our files


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("which", ["english", "cased", "chinese"])
def test_ids_equal_those_of_transformers_on_the_exported_files(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """C068: case, accents, length of a word and control tokens travel with the files."""
    from transformers import AutoTokenizer, BertTokenizer

    tokenizer: WordPiece = request.getfixturevalue(which)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    lines = [*text("chinese" if which == "chinese" else "english", 150), *ODD, "Hello World É"]
    corpus = theirs(lines, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.encode_batch(lines) == corpus
    queries = theirs(lines, add_special_tokens=False, return_offsets_mapping=True)
    ours = [tokenizer.encode_query(line) for line in lines]
    assert [ids for ids, _ in ours] == queries["input_ids"]
    assert [offsets for _, offsets in ours] == queries["offset_mapping"]
    for name in CONTROL_TOKENS:
        key = f"{name[1:-1].lower()}_token"
        assert getattr(theirs, key) == name and getattr(theirs, key + "_id") == tokenizer.vocab.index(name)
    assert theirs("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
    # The class that builds itself anew knows only 100 characters a word; all else is the same.
    short = [line for line in lines if "x" * 101 not in line]
    rebuilt = BertTokenizer.from_pretrained(tmp_path)
    assert rebuilt(short, add_special_tokens=False)["input_ids"] == [tokenizer.encode_query(line)[0] for line in short]


@pytest.mark.torch
def test_a_vocabulary_alone_loads_in_transformers_with_the_same_ids(english: WordPiece, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    (tmp_path / "vocab.txt").write_text(english.files()["vocab.txt"], encoding="utf-8")
    theirs = BertTokenizer.from_pretrained(tmp_path)
    lines = text("english", 50)
    assert theirs(lines, add_special_tokens=False)["input_ids"] == english.encode_batch(lines)


# --- the 2018 algorithm, written here from its description, against ours


def words_2018(line: str, lowercase: bool) -> list[str]:
    """BERT's words as the 2018 tokenizer makes them, with this Python's Unicode tables."""
    han = [
        (0x4E00, 0x9FFF),
        (0x3400, 0x4DBF),
        (0x20000, 0x2A6DF),
        (0x2A700, 0x2CEAF),
        (0xF900, 0xFAFF),
        (0x2F800, 0x2FA1F),
    ]
    clean = ""
    for char in line:
        kind = unicodedata.category(char)
        if char in "\t\n\r" or kind == "Zs":
            clean += " "
        elif char in "\0\ufffd" or kind in ("Cc", "Cf"):
            continue
        elif any(low <= ord(char) <= high for low, high in han):
            clean += f" {char} "
        else:
            clean += char
    words = []
    for part in clean.split():
        if lowercase:
            part = "".join(c for c in unicodedata.normalize("NFD", part.lower()) if unicodedata.category(c) != "Mn")
        word = ""
        for char in part:
            if (char.isascii() and not char.isalnum()) or unicodedata.category(char)[0] == "P":
                words += [word, char] if word else [char]
                word = ""
            else:
                word += char
        words += [word] if word else []
    return words


def ids_2018(line: str, vocab: dict[str, int], lowercase: bool) -> list[int]:
    ids: list[int] = []
    for word in words_2018(line, lowercase):
        found: list[int] = []
        start = 0
        while start < len(word) <= 200:
            mark = "##" if start else ""
            end = next((e for e in range(len(word), start, -1) if mark + word[start:e] in vocab), None)
            if end is None:
                break
            found.append(vocab[mark + word[start:end]])
            start = end
        ids += found if start == len(word) else [vocab["[UNK]"]]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("which", ["english", "cased", "chinese"])
def test_real_text_has_the_ids_of_the_2018_algorithm(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer: WordPiece = request.getfixturevalue(which)
    vocab = {p: i for i, p in enumerate(tokenizer.vocab)}
    lines = text("chinese" if which == "chinese" else "english", 500)
    assert sum(map(len, lines)) > 20_000
    assert tokenizer.encode_batch(lines) == [ids_2018(t, vocab, tokenizer.config.lowercase) for t in lines]


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_the_differences_from_the_2018_algorithm_are_the_documented_ones(lowercase: bool) -> None:
    """Every code point within a word: docs/tokenizer.md lists the kinds, and there are no others."""
    config = WordPieceConfig(lowercase=lowercase)
    counting = vocabulary_module._Counting(config)
    private, block, by_version = 0, 0, []
    points = [*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE0200), 0xF0000, 0x100000]
    groups = [points[i : i + 32] for i in range(0, len(points), 32)]
    lines = [" ".join(f"a{chr(c)}b" for c in group) for group in groups]
    differ = [g for g, line in zip(groups, lines, strict=True) if counting.words(line) != words_2018(line, lowercase)]
    for c in itertools.chain.from_iterable(differ):
        here = counting.words(f"a{chr(c)}b")
        if here == words_2018(f"a{chr(c)}b", lowercase):
            continue
        if unicodedata.category(chr(c)) == "Co":
            private += 1
            assert here == ["ab"]
        elif 0x2B820 <= c <= 0x2B91F:
            block += 1
            assert len(here) == 1
        else:
            by_version.append(c)
    assert private == 6402 and block == 256
    # What is left are characters whose class differs between the two Unicode versions: none of an everyday script.
    assert len(by_version) < 1000 and min(by_version) > 0x0600
    kinds = {unicodedata.category(chr(c)) for c in by_version}
    assert kinds <= {"Po", "Ps", "Pe", "Pd", "Mn", "Mc", "Cf", "So", "Cn", "Lu", "Lo"}
    everyday = [
        (0x0000, 0x05FF),
        (0x0620, 0x06FF),
        (0x0E00, 0x0E7F),
        (0x2000, 0x206F),
        (0x3000, 0x9FFF),
        (0xAC00, 0xD7A3),
    ]
    assert not [hex(c) for c in by_version if any(a <= c <= b for a, b in everyday)]


def test_greek_final_sigma_is_lowered_by_character() -> None:
    """Documented difference: the 2018 code lowers whole words, where a last sigma becomes U+03C2."""
    tokenizer = small("ο ##σ ##ς σ ς ##ο")
    assert words_2018("ΟΣ", True) == ["ος"]
    assert pieces(tokenizer, tokenizer.encode("ΟΣ")) == ["ο", "##σ"]


# --- cases of TOK


def test_a_word_over_the_limit_is_one_unknown_with_its_whole_span() -> None:
    """C019: the limit is 200 characters, not bytes."""
    tokenizer = small("a ##a ก ##ก")
    assert tokenizer.encode("a" * 200) == [5] + [6] * 199
    assert tokenizer.encode_query("a" * 201) == ([tokenizer.unk_id], [(0, 201)])
    assert tokenizer.encode("a" * 201) == [tokenizer.unk_id]
    ((ids, offsets),) = tokenizer.encode_with_offsets(["a" * 201])
    assert ids == [tokenizer.unk_id] and offsets.tolist() == [[0, 201]]
    thai = small("ก ##ก", max_input_chars_per_word=50)
    assert thai.encode("ก" * 40) == [5] + [6] * 39
    shorter = small("a ##a", max_input_chars_per_word=100)
    assert shorter.encode("a" * 100) == [5] + [6] * 99 and shorter.encode("a" * 101) == [shorter.unk_id]


def test_control_tokens_are_ids_in_queries_and_plain_text_in_corpora(english: WordPiece) -> None:
    """C024."""
    ids, offsets = english.encode_query("I am going to [MASK] to study")
    assert ids.count(english.mask_id) == 1 and offsets[ids.index(english.mask_id)] == (14, 20)
    control = {english.vocab.index(t) for t in CONTROL_TOKENS if t != "[UNK]"}
    for line in ("[SEP] [CLS] </s>", "x[MASK]y", "[PAD]", "\u200b[MASK]", "[ MASK ]"):
        assert not control & set(english.encode(line)), line


def test_kept_tokens_stay_whole_beside_any_character_with_their_case() -> None:
    """C025."""
    tokenizer = small("。 x [ ] outline y", keep_tokens=("[outline]", "[Up]"))
    ids, offsets = tokenizer.encode_query("。[outline]x [MASK]")
    assert pieces(tokenizer, ids) == ["。", "[outline]", "x", "[MASK]"]
    assert offsets == [(0, 1), (1, 10), (10, 11), (12, 18)]
    assert pieces(tokenizer, tokenizer.encode("x[Up]y [up]。[outline]x[MASK]")) == [
        "x", "[Up]", "y", "[", "[UNK]", "]", "。", "[outline]", "x", "[", "[UNK]", "]",
    ]  # fmt: skip
    again = WordPiece.from_files(tokenizer.files())
    assert again.config.keep_tokens == ("[outline]", "[Up]") and again.encode("x[Up]y") == tokenizer.encode("x[Up]y")


@pytest.mark.torch
def test_kept_tokens_stay_whole_in_transformers_too(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = small("。 x [ ] outline y", keep_tokens=("[outline]", "[Up]"))
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for line in ("。[outline]x [MASK]", "x[Up]y [up]"):
        assert theirs(line, add_special_tokens=False)["input_ids"] == tokenizer.encode_query(line)[0]


def test_a_kept_token_takes_a_free_place_of_the_vocabulary_or_the_end() -> None:
    with_room = small("[unused0] x [unused1]", keep_tokens=("[new]",))
    assert with_room.vocab[5:] == ["[new]", "x", "[unused1]"]
    assert small("x", keep_tokens=("[new]",)).vocab[5:] == ["x", "[new]"]
    assert small("x", keep_tokens=("x",)).vocab[5:] == ["x"]


@pytest.mark.parametrize("bad", ["", "two words", "x\u200by", "[MASK]"])
def test_a_kept_token_that_cannot_be_one_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="keep_tokens"):
        small("x", keep_tokens=(bad,))


@pytest.mark.parametrize(
    ("line", "words", "offsets"),
    [
        ("foo\u200bbar", ["foobar"], [(0, 7)]),
        ("co\u00adop", ["coop"], [(0, 5)]),
        ("a\u0085b", ["ab"], [(0, 3)]),
        ("a\x0bb\x00", ["ab"], [(0, 3)]),
        ("\ufeffab", ["ab"], [(1, 3)]),
        ("a\u00a0b", ["a", "b"], [(0, 1), (2, 3)]),
        ("a\u202fb", ["a", "b"], [(0, 1), (2, 3)]),
        ("a\u3000b", ["a", "b"], [(0, 1), (2, 3)]),
        ("a\u2028b", ["a", "b"], [(0, 1), (2, 3)]),
        ("👨\u200d👩 a", ["👨👩", "a"], [(0, 3), (4, 5)]),
    ],
)
def test_invisible_characters_vanish_or_split_and_offsets_are_of_the_original(
    line: str, words: list[str], offsets: list[tuple[int, int]]
) -> None:
    """C033."""
    tokenizer = small("foobar coop ab a b 👨👩")
    ids, found = tokenizer.encode_query(line)
    assert pieces(tokenizer, ids) == words and found == offsets
    assert tokenizer.encode(line) == ids
    ((same, places),) = tokenizer.encode_with_offsets([line])
    assert same == ids and list(map(tuple, places.tolist())) == offsets


@pytest.mark.parametrize("lowercase", [True, False])
def test_pieces_with_offsets_are_those_of_corpus_text_and_ascend_within_it(lowercase: bool) -> None:
    """C033, C024: control tokens are plain text; of a piece without ## and accents the slice is the piece."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789[].,()汉字"
    tokenizer = small(" ".join([*letters, *("##" + c for c in letters)]), lowercase=lowercase)
    lines = [*ODD, *text("english", 30), *text("chinese", 5)]
    for line, (ids, places) in zip(lines, tokenizer.encode_with_offsets(lines), strict=True):
        assert ids == tokenizer.encode(line)
        assert places.shape == (len(ids), 2) and (places[:, 0] < places[:, 1]).all()
        assert (np.diff(places[:, 0]) >= 0).all() and (not ids or places.max() <= len(line))
        for piece, (a, b) in zip(pieces(tokenizer, ids), places.tolist(), strict=True):
            if piece != "[UNK]" and line[a:b].isascii():
                assert piece.removeprefix("##") == (line[a:b].lower() if lowercase else line[a:b])


def test_offsets_do_not_count_the_spaces_of_a_pre_splitter() -> None:
    tokenizer = small("ก ข ค x", pre_splitter="characters")
    ((ids, places),) = tokenizer.encode_with_offsets(["xกข ค"])
    assert pieces(tokenizer, ids) == ["x", "ก", "ข", "ค"] and ids == tokenizer.encode("xกข ค")
    assert places.tolist() == [[0, 1], [1, 2], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("lowercase", "strip", "expected"),
    [(True, False, "hacía café"), (True, True, "hacia cafe"), (False, False, "hacía CAFÉ"), (True, None, "hacia cafe"),
     (False, None, "hacía CAFÉ"), (False, True, "hacia CAFE")],
)  # fmt: skip
def test_case_and_accents_are_two_options(lowercase: bool, strip: bool | None, expected: str) -> None:
    """C057: and an accent option that is not set follows the case option."""
    tokenizer = small("hacía café hacia cafe CAFÉ CAFE", lowercase=lowercase, strip_accents=strip)
    assert tokenizer.decode(tokenizer.encode("hacía CAFÉ")) == expected
    assert WordPiece.from_files(tokenizer.files()).config.strip_accents == strip


@pytest.mark.parametrize(
    ("lowercase", "strip", "expected"),
    [
        (True, None, "istanbul isık sanlıurfa"),
        (True, False, "i\u0307stanbul işık şanlıurfa"),
        (False, None, "İstanbul Işık Şanlıurfa"),
    ],
)
def test_turkish_is_lowered_as_the_reference_does(lowercase: bool, strip: bool | None, expected: str) -> None:
    """C085: no cedilla of its own; I becomes i, dotless i stays; composed letters stay composed."""
    line = "İstanbul Işık Şanlıurfa"
    tokenizer = small(expected, lowercase=lowercase, strip_accents=strip)
    assert tokenizer.encode(line) == [5, 6, 7]
    assert strip is not None or words_2018(line, lowercase) == expected.split()


def test_a_word_with_an_unknown_end_is_one_unknown() -> None:
    """C086."""
    tokenizer = small("po ##k", strip_accents=False)
    assert tokenizer.encode("poké pok") == [tokenizer.unk_id, 5, 6]


# --- cases of VOCAB, and files


def test_ids_are_line_numbers_with_blank_lines_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    """C063, C036."""
    path = tmp_path / "vocab.txt"
    path.write_bytes("\ufeff[PAD]\r\n[UNK]\r\n[CLS]\r\n\r\n[SEP]\r\n[MASK]\r\na\u2028b\r\nhello\r\n".encode())
    tokenizer = WordPiece.from_vocab_file(path, WordPieceConfig())
    assert tokenizer.pad_id == 0 and tokenizer.sep_id == 4 and tokenizer.vocab_size == 8
    assert tokenizer.vocab[6] == "a\u2028b" and tokenizer.encode("Hello") == [7]
    assert not any(p.endswith("\r") for p in tokenizer.vocab)
    assert 3 not in tokenizer.ordinary_ids and 3 not in tokenizer.encode("[blank4] blank4")
    again = WordPiece.from_files(tokenizer.files())
    assert again.vocab == tokenizer.vocab and again.files() == tokenizer.files()
    no_newline = tmp_path / "other.txt"
    no_newline.write_bytes("\n".join([*CONTROL_TOKENS, "x"]).encode())
    assert WordPiece.from_vocab_file(no_newline, WordPieceConfig()).vocab[-1] == "x"


def test_two_equal_entries_are_refused_with_their_lines() -> None:
    """C063."""
    with pytest.raises(UserError, match=r"'b' twice, at lines 7 and 9"):
        small("a b c b")


@pytest.mark.parametrize("missing", CONTROL_TOKENS)
def test_each_control_token_is_required_by_name(missing: str) -> None:
    """C120."""
    with pytest.raises(UserError) as e:
        WordPiece([*(t for t in CONTROL_TOKENS if t != missing), "a"], WordPieceConfig())
    assert f"no {missing};" in str(e.value)


def test_control_tokens_may_stand_anywhere() -> None:
    """C030: ids are taken by name, not from fixed places."""
    tokenizer = WordPiece(["a", "[MASK]", "b", "[SEP]", "[CLS]", "[PAD]", "[UNK]"], WordPieceConfig())
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id) == (5, 6, 1)
    assert tokenizer.encode("a b c") == [0, 2, 6]


def test_a_file_that_is_missing_or_not_utf_8_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.txt: no such file"):
        WordPiece.from_vocab_file(tmp_path / "nothing.txt", WordPieceConfig())
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"[PAD]\n[UNK]\n\xff\n")
    with pytest.raises(ConfigError, match=r"vocab.txt: line 3 is not UTF-8 \(byte 0xff\)"):
        WordPiece.from_vocab_file(path, WordPieceConfig())


def test_the_files_are_the_same_bytes_and_give_the_same_tokenizer(english: WordPiece, tmp_path: Path) -> None:
    english.save(tmp_path / "a")
    again = WordPiece.load(tmp_path / "a")
    again.save(tmp_path / "b")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert again.digest == english.digest
    assert again.digest != WordPiece(english.vocab, dataclasses.replace(english.config, lowercase=False)).digest
    copy = pickle.loads(pickle.dumps(english))
    assert copy.files() == english.files() and copy.encode("a copy") == english.encode("a copy")
    assert json.loads(english.files(512)["tokenizer_config.json"])["model_max_length"] == 512


def test_files_of_hugging_face_without_vocab_txt_or_settings_are_read(english: WordPiece) -> None:
    files = english.files()
    only = WordPiece.from_files({"tokenizer.json": files["tokenizer.json"]})
    assert only.vocab == english.vocab and only.config.max_input_chars_per_word == 200
    old = WordPiece.from_files({"vocab.txt": files["vocab.txt"], "tokenizer_config.json": '{"do_lower_case": false}'})
    assert not old.config.lowercase and old.config.max_input_chars_per_word == 200
    with pytest.raises(UserError, match="no vocabulary"):
        WordPiece.from_files({"tokenizer_config.json": "{}"})
    with pytest.raises(UserError, match="BPE"):
        WordPiece.from_files({"tokenizer.json": '{"model": {"type": "BPE"}}'})


def test_ordinary_ids_are_all_but_control_and_unused_tokens() -> None:
    tokenizer = small("[unused0] a ##b ## #")
    assert [tokenizer.vocab[i] for i in tokenizer.ordinary_ids] == ["a", "##b", "##", "#"]
    assert tokenizer.ordinary_ids.dtype == np.int32
    assert tokenizer.is_continuation_V.tolist() == [False] * 7 + [True, False, False]


def test_given_words_keep_the_ids_of_the_plain_sentence_and_mark_their_first_pieces(chinese: WordPiece) -> None:
    """C038."""
    ids, starts = chinese.encode_words("滚滚 长江 东 逝水 ， \u200b hello world")
    assert ids == chinese.encode("滚滚长江东逝水，hello world")
    marked = [i for i, s in enumerate(starts) if s]
    assert marked[:5] == [0, 2, 4, 5, 7] and len(marked) == 7


# --- training


def test_the_vocabulary_is_laid_out_as_documented() -> None:
    config = WordPieceConfig(vocab_size=60, unused_tokens=2, keep_tokens=("[x]",), min_frequency=1)
    tokenizer = train_wordpiece(["low lower lowest newer newest, wider. 汉"], config)
    assert tokenizer.vocab[:8] == ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[x]"]
    alphabet = sorted(set("lowernstid,.汉"))
    assert tokenizer.vocab[8 : 8 + len(alphabet)] == alphabet
    joined = ["##" + c for c in alphabet if c not in ",.汉"]
    assert tokenizer.vocab[8 + len(alphabet) :][: len(joined)] == joined
    assert "low" in tokenizer.vocab and tokenizer.unk_id not in tokenizer.encode("slow lower 汉, wins")
    bert_like = train_wordpiece(["a b"], WordPieceConfig(unused_tokens=99, min_frequency=1))
    assert (bert_like.unk_id, bert_like.cls_id, bert_like.sep_id, bert_like.mask_id) == (100, 101, 102, 103)


@pytest.mark.slow
def test_merges_are_those_of_the_plain_algorithm() -> None:
    """The fast bookkeeping against counting all pairs anew at every step."""
    words = count_words(text("english", 8), WordPieceConfig())
    room = 300
    fast = learn_pieces(words, WordPieceConfig(min_frequency=2), room)
    alphabet = [p for p in fast if len(p.removeprefix("##")) == 1]
    split = {w: [w[0], *("##" + c for c in w[1:])] for w in words if set(w) <= set(alphabet)}
    plain = list(alphabet)
    while len(plain) < room:
        pairs: dict[tuple[str, str], int] = {}
        for w, symbols in split.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] = pairs.get(pair, 0) + words[w]
        best = min((p for p in pairs if pairs[p] >= 2), key=lambda p: (-pairs[p], p), default=None)
        if best is None:
            break
        merged = best[0] + best[1].removeprefix("##")
        if merged not in plain:
            plain.append(merged)
        for w, symbols in split.items():
            out: list[str] = []
            for s in symbols:
                if out and (out[-1], s) == best:
                    out[-1] = merged
                else:
                    out.append(s)
            split[w] = out
    assert fast == plain and len(fast) == room


@pytest.mark.slow
def test_the_vocabulary_does_not_depend_on_workers_order_or_hash_seed(
    english: WordPiece, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = text("english", 400)
    config = WordPieceConfig(vocab_size=3000)
    random.Random(1).shuffle(lines)
    assert train_wordpiece(lines, config).digest == english.digest
    monkeypatch.setattr(vocabulary_module, "BLOCK_CHARS", 20_000)
    assert train_wordpiece(iter(lines), config, workers=2).digest == english.digest
    script = (
        "from tests.test_transformer_tokenizer import *\n"
        "print(train_wordpiece(text('english', 400), WordPieceConfig(vocab_size=3000)).digest)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == english.digest


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_counting_forgets_the_rarest_words_in_the_same_way(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """C035: the table of words is bounded, whatever the corpus."""
    monkeypatch.setattr(vocabulary_module, "BLOCK_CHARS", 5_000)
    monkeypatch.setattr(vocabulary_module, "MAX_WORDS", 800)
    lines = text("english", 100)
    counts = count_words(lines, WordPieceConfig(), workers=workers)
    assert len(counts) <= 800 and {"the", "of", "and"} <= set(counts)
    assert counts == count_words(lines, WordPieceConfig())


def test_too_little_text_gives_fewer_pieces_and_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_wordpiece(["one two two"], WordPieceConfig(vocab_size=5000))
    assert tokenizer.vocab_size == tokenizer.config.vocab_size < 20
    assert f"the vocabulary has {tokenizer.vocab_size} entries, not the 5000 asked for" in caplog.text


def test_no_text_or_no_room_is_an_error() -> None:
    with pytest.raises(UserError, match="no words"):
        train_wordpiece(["", " \u200b"], WordPieceConfig())
    with pytest.raises(UserError, match="vocab_size 6 is too small"):
        train_wordpiece(["a"], WordPieceConfig(vocab_size=6))


def test_the_alphabet_is_bounded_by_frequency_by_number_and_by_room(chinese: WordPiece) -> None:
    lines = ["aaa bbb ccc d"] * 3 + ["z"]
    few = train_wordpiece(lines, WordPieceConfig(vocab_size=50, limit_alphabet=2))
    assert few.encode("a b") != [] and few.unk_id in few.encode("c") and few.unk_id not in few.encode("ab")
    assert "z" not in train_wordpiece(lines, WordPieceConfig(vocab_size=50)).vocab
    sanguo = text("chinese", 400)
    small_one = train_wordpiece(sanguo, WordPieceConfig(vocab_size=300))
    assert small_one.vocab_size == 300
    # The rest of the vocabulary that merges leave free goes to characters: only those seen once are unknown.
    seen = collections.Counter("".join(sanguo))
    unknown = sum(ids.count(chinese.unk_id) for ids in chinese.encode_batch(sanguo))
    assert unknown == sum(1 for n in seen.values() if n == 1)
