"""SentencePiece: fixed ids, the same pieces every time, tags by id, what normalisation loses, sampling by key."""

import functools
import itertools
import pickle
import random
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax import pieces
from transformer_jax.config import ConfigError, UserError
from transformer_jax.pieces import SentencePiece, train


def corpus(count=400, seed=0):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmno", k=rng.randint(2, 8))) for _ in range(150)]
    return ["hello world", "to be <or> not", *(" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(count))]


TEXTS = corpus()
TAGS = ("<2de>", "<2fr>")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tagged(request):
    return train(TEXTS, model=request.param, vocab_size=150, user_symbols=TAGS)


@pytest.fixture(scope="module")
def plain():
    return train(TEXTS, vocab_size=200)


def pieces_of(tokenizer, text):
    return [tokenizer.vocab[i] for i in tokenizer.encode(text)]


def test_ids_are_in_marians_layout(tagged):
    assert tagged.vocab_size == len(tagged.vocab) == 150
    assert tagged.vocab[0] == "</s>" and tagged.vocab[1] == "<unk>" and tagged.vocab[-1] == "<pad>"
    assert (tagged.eos_id, tagged.unk_id, tagged.pad_id) == (0, 1, 149)
    assert tagged.vocab[2:4] == list(TAGS)
    assert tagged.decode([*tagged.encode("hello world"), tagged.eos_id, tagged.pad_id]) == "hello world"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_the_pieces_are_the_same_every_time_and_in_every_process(model):
    code = (
        "import test_transformer_pieces as t, sys; "
        f"sys.stdout.write(t.train(t.TEXTS, model='{model}', vocab_size=180).digest)"
    )
    digests = {train(TEXTS, model=model, vocab_size=180).digest for _ in range(2)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="tests")
    assert digests == {other.stdout}


@pytest.mark.parametrize(
    "text",
    ["<2de>hello", "hello <2de>", "<2de><2de>", "<2de> hello", "<2de> <2fr> hello", "hello<2de>world <2fr> to be"],
)
def test_tags_are_one_id_each_and_come_back_as_they_were(tagged, text):
    """C062: no word-start piece comes before a tag unless a space does, which is a piece of its own then."""
    found = pieces_of(tagged, text)
    assert [p for p in found if p in TAGS] == re.findall("<2..>", text)
    assert tagged.decode(tagged.encode(text)) == text
    stray = sum(a == "▁" and b in TAGS for a, b in itertools.pairwise(found))
    assert stray == text.count(" <2")
    if text == "<2de><2de>":
        assert tagged.encode(text) == [2, 2]
    if text == "<2de> hello":
        assert found[1:] == pieces_of(tagged, "hello")


def test_text_cannot_become_a_control_id(tagged, plain):
    """C024 for pairs: what spells a control piece is ordinary text, even where it was learned from."""
    spelt = "</s> <unk> <pad> <s> <0x41>"
    for tokenizer in (tagged, plain, train([spelt, "\uff1c/s\uff1e", "ab"] * 50, vocab_size=60, byte_fallback=False)):
        found = tokenizer.encode(spelt)
        assert not {tokenizer.eos_id, tokenizer.pad_id} & set(found)
        assert len(set(tokenizer.vocab)) == len(tokenizer.vocab)
        assert not any(piece.strip("▁") in ("<s>", "<0x41>") for piece in tokenizer.vocab)
    whole = train([*TEXTS, spelt] * 3, vocab_size=560, byte_fallback=True)
    assert whole.decode(whole.encode(spelt)) == spelt and whole.unk_id not in whole.encode(spelt)


def test_byte_fallback_spells_what_has_no_piece():
    tokenizer = train(TEXTS, vocab_size=500, byte_fallback=True)
    for text in ("汉字 hello", "😀", "né"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.unk_id not in tokenizer.encode(text) and tokenizer.unknown_words(text) == []


def test_unknown_characters_are_one_id_and_are_told(plain):
    assert plain.encode("abc 汉字").count(plain.unk_id) == 1
    assert plain.unknown_words("abc 汉字 é") == ["汉字", "é"]


SINHALA, TELUGU, FAMILY = "ශ්\u200dරී ලංකා", "ఫ్రెంచ్\u200cలో", "\U0001f468\u200d\U0001f469\u200d\U0001f467 ok"


def test_joiners_are_kept_by_the_identity_rule_and_the_default_loses_what_is_documented():
    """C070: U+200D is kept by both; the default rule makes U+200C and U+200B a space."""
    texts = [*TEXTS, SINHALA, TELUGU, FAMILY, "a\u200bb"] * 3
    identity = train(texts, vocab_size=600, normalization="identity", byte_fallback=True)
    for text in (SINHALA, TELUGU, FAMILY, "a\u200bb", "two  spaces ", " x", "ﬁ Ⅷ"):
        assert identity.decode(identity.encode(text)) == text
    default = train(texts, vocab_size=600, byte_fallback=True)
    assert default.decode(default.encode(SINHALA)) == SINHALA
    assert default.decode(default.encode(FAMILY)) == FAMILY
    assert default.decode(default.encode(TELUGU)) == TELUGU.replace("\u200c", " ")
    assert default.decode(default.encode("a\u200bb")) == "a b"
    assert default.decode(default.encode("two  spaces ﬁ Ⅷ")) == "two spaces fi VIII"


def test_long_lines_are_split_and_counted():
    """C111: a corpus of nothing but long lines trains; the same vocabulary comes from the lines in short."""
    said = []
    tokenizer = train([" ".join(TEXTS)], vocab_size=200, say=said.append)
    assert said == ["1 lines longer than 4,000 bytes were split for learning the pieces"]
    assert tokenizer.vocab_size == 200 and tokenizer.unk_id not in tokenizer.encode(TEXTS[5])
    endless = train(["漢字仮名" * 3000], vocab_size=40)
    assert endless.unk_id not in endless.encode("漢字仮名")


@pytest.mark.parametrize("texts", [[], ["", "  "], ["\0"], ["<2de>"]])
def test_nothing_to_learn_from_is_a_clear_error(texts):
    """C111: not an internal error of the trainer."""
    with pytest.raises(UserError, match="no text to learn pieces from"):
        train(texts, vocab_size=100, user_symbols=TAGS)


def test_a_vocabulary_too_small_or_too_large_is_said():
    with pytest.raises(UserError, match=r"vocab_size 12 is too small: the characters of the text alone need \d+;"):
        train(TEXTS, vocab_size=12)
    with pytest.raises(ConfigError, match="bytes alone need 260"):
        train(TEXTS, vocab_size=200, byte_fallback=True)
    said = []
    small = train(["ab abc"], vocab_size=100, say=said.append)
    assert small.vocab_size < 100 and said == [
        f"the text gives {small.vocab_size} pieces and not the 100 of tokenizer.vocab_size"
    ]


def test_many_lines_are_thinned_out_evenly_and_always_alike():
    said = []
    kept = pieces._thinned((str(i) for i in range(10_000)), 1000, said.append)
    assert kept == pieces._thinned((str(i) for i in range(10_000)), 1000, said.append)
    numbers = np.array(kept, int)
    assert 450 < len(kept) <= 1000 and (np.diff(numbers) > 0).all() and 4000 < numbers.mean() < 6000
    assert said[0] == f"the pieces are learned from {len(kept):,} of 10,000 lines, taken evenly"


def test_the_same_key_cuts_alike_in_any_thread_and_order(tagged):
    texts = TEXTS[:30]
    keys = np.arange(30, dtype=np.uint64) << np.uint64(40)
    whole = tagged.sample_batch(texts, keys, 0.2)
    parts = [tagged.sample_batch([text], keys[i : i + 1], 0.2)[0] for i, text in enumerate(texts)]
    found = []
    thread = threading.Thread(target=lambda: found.extend(tagged.sample_batch(texts[::-1], keys[::-1], 0.2)))
    thread.start()
    thread.join()
    assert whole == parts == found[::-1]
    assert whole != tagged.encode_batch(texts) and whole != tagged.sample_batch(texts, keys + (1 << 32), 0.2)
    assert [tagged.decode(row) for row in whole] == texts
    tag = tagged.sample_batch(["<2de> hello world"], keys[1:2], 0.5)[0]
    assert tag[0] == 2 and tagged.decode(tag) == "<2de> hello world"


CHARACTERS = [*"abch \u00e9\u0301\u200b\u2581\u3000\t\uff21\u6f22<2de>\x07"]


@given(st.lists(st.text(st.sampled_from(CHARACTERS), max_size=60), max_size=4))
def test_words_that_are_kept_change_nothing(texts):
    """Text is cut word by word from a table; the ids are those of SentencePiece for the whole text."""
    tokenizer = kept_words()
    assert tokenizer._by_words
    assert tokenizer.encode_batch(texts) == tokenizer._encode_whole(texts)


@functools.cache
def kept_words():
    return train([*TEXTS, "\u6f22\u5b57", "caf\u00e9 A"], vocab_size=200)


def test_words_are_kept_only_where_that_is_exact(monkeypatch):
    assert not train(TEXTS, vocab_size=150, model="unigram")._by_words
    assert not train(TEXTS, vocab_size=150, normalization="identity")._by_words
    monkeypatch.setattr(pieces, "CACHE_WORDS", 20)
    tokenizer = train(TEXTS, vocab_size=150)
    assert tokenizer.encode_batch(TEXTS) == tokenizer._encode_whole(TEXTS)
    assert len(tokenizer._cache) == 1


def test_files_and_pickles_give_the_same_tokenizer(tagged, tmp_path):
    tagged.save(tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == tagged.files()
    for other in (SentencePiece.load(tmp_path), pickle.loads(pickle.dumps(tagged))):
        assert other.digest == tagged.digest and other.vocab == tagged.vocab
        assert other.encode("<2de> hello <or>") == tagged.encode("<2de> hello <or>")
    (tmp_path / pieces.FILE).write_text("{}")
    with pytest.raises(UserError, match=r"sentencepiece\.json is missing or is not what was written"):
        SentencePiece.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        SentencePiece.load(tmp_path / "nowhere")


def test_a_vocabulary_that_is_given_decides_the_ids(plain):
    """As Marian's vocab.json does, which may hold the pieces of two models."""
    body = plain.vocab[2:-1]
    given = SentencePiece(plain.model, ["</s>", "<unk>", "▁andere", *reversed(body), "<pad>"])
    assert given.encode("hello world") == [given.vocab.index(p) for p in pieces_of(plain, "hello world")]
    assert given.decode(given.encode("hello world")) == "hello world"
    lacking = SentencePiece(plain.model, ["</s>", "<unk>", *(p for p in body if p != "▁"), "<pad>"])
    assert lacking.encode("\u2603").count(1) >= 1
    # Text that this model has no piece for may be a piece of the other; never a control piece.
    both = SentencePiece(plain.model, ["</s>", "<unk>", *body, "\u2603", ">>de<<", "<pad>"], [">>de<<"])
    snow = both.vocab.index("\u2603")
    for text in ("hello \u2603", ">>de<< hello \u2603"):
        assert both.encode(text)[-1] == snow and 1 not in both.encode(text)
        assert both.decode(both.encode(text)) == text
        assert both.sample_batch([text], np.zeros(1, np.uint64), 0.0)[0] == both.encode(text)
    assert both.encode("\u2603\u2604")[-1] == 1 and both.unknown_words("\u2603 \u2604") == ["\u2604"]
    for wrong in (["<unk>", "</s>", *body, "<pad>"], ["</s>", "<unk>", "<pad>", *body]):
        with pytest.raises(UserError, match="must have </s> as id 0"):
            SentencePiece(plain.model, wrong)
    with pytest.raises(UserError, match="has 'x' twice"):
        SentencePiece(plain.model, ["</s>", "<unk>", "x", "x", "<pad>"])
    with pytest.raises(UserError, match="not a SentencePiece model"):
        SentencePiece(b"nothing of the kind")


def test_piece_scripts_are_those_of_the_letters(plain):
    names, script_V = plain.piece_scripts
    assert len(script_V) == plain.vocab_size
    assert names[script_V[plain.encode("hello")[0]]] == "Latin" and names[script_V[plain.vocab.index("▁")]] == "Common"
