"""Writing systems: what is unknown is counted by script, and text without spaces can be cut."""

import pickle

import numpy as np
import pytest

from transformer_jax import scripts
from transformer_jax.config import ConfigError, UserError
from transformer_jax.scripts import UnknownCounter, insert_spaces, pre_splitter, script, script_of_word
from transformer_jax.tokenizer import CONTROL_TOKENS, WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.vocabulary import train_wordpiece

THAI = ["ภาษาไทยเป็นภาษาราชการ", "ผมรักภาษาไทยมาก", "สวัสดีครับ"]


def tokenizer(*pieces: str) -> WordPiece:
    return WordPiece([*CONTROL_TOKENS, *pieces], WordPieceConfig())


@pytest.mark.parametrize(
    ("char", "name"),
    [("a", "Latin"), ("é", "Latin"), ("Ａ", "Latin"), ("汉", "Han"), ("豈", "Han"), ("ก", "Thai"),
     ("あ", "Hiragana"), ("한", "Hangul"),
     ("ж", "Cyrillic"), ("ς", "Greek"), ("µ", "Greek"), ("က", "Myanmar"), ("ខ", "Khmer"), ("ກ", "Lao"),
     ("1", "Common"), (".", "Common"),
     ("。", "Common"), ("🎉", "Common"), ("\u0301", "Common"), ("\ue000", "Common")],
)  # fmt: skip
def test_script_of_a_character(char: str, name: str) -> None:
    assert script(char) == name


def test_a_word_has_the_script_of_its_first_letter() -> None:
    assert script_of_word("1.ไทย") == "Thai" and script_of_word("123") == "Common" and script_of_word("") == "Common"


def test_pieces_and_unknown_words_are_counted_by_script() -> None:
    wp = tokenizer("the", "cat", "##s", ".", "汉", "字")
    texts = ["the cats. zebra ภาษาไทย", "汉字漢 the", ""]
    counter = UnknownCounter()
    counter.add(wp, texts, wp.encode_batch(texts))
    found = {name: (c.pieces, c.unknown, c.examples) for name, c in counter.counts.items()}
    assert found == {
        "Latin": (5, 1, ["zebra"]),
        "Common": (1, 0, []),
        "Thai": (1, 1, ["ภาษาไทย"]),
        "Han": (3, 1, ["漢"]),
    }
    assert counter.to_dict()["Han"]["rate"] == pytest.approx(1 / 3)


def test_the_sum_of_counters_does_not_depend_on_their_order() -> None:
    wp = tokenizer("a")
    parts = []
    for word in ("x", "q", "zz", "b", "y", "w", "c", "a"):
        part = UnknownCounter()
        part.add(wp, [word, "a"], wp.encode_batch([word, "a"]))
        parts.append(pickle.loads(pickle.dumps(part)))
    forward, backward = UnknownCounter(), UnknownCounter()
    for part in parts:
        forward.merge(part)
    for part in reversed(parts):
        backward.merge(part)
    assert forward.to_dict() == backward.to_dict()
    assert forward.counts["Latin"].examples == ["b", "c", "q", "w", "x"]


def test_scripts_above_the_limit_are_named_with_examples_but_traces_are_not() -> None:
    wp = tokenizer("a")
    counter = UnknownCounter()
    counter.add_flat(wp, np.full(5000, 5))
    counter.add_unknown(wp, "ไทย")
    assert counter.above(0.01) == []
    for _ in range(9):
        counter.add_unknown(wp, "ภาษาไทย 漢")
    found = counter.above(0.01)
    assert [name for name, _ in found] == ["Han", "Thai"]
    message = scripts.message_above(found, 0.01, "what to do")
    assert "Thai: 10 of 10 pieces are [UNK] (100.00%), such as 'ภาษาไทย', 'ไทย'" in message
    assert message.endswith("\nwhat to do")


def test_characters_of_thai_are_cut_with_their_marks_and_stacks_whole() -> None:
    cut = pre_splitter("characters")
    assert insert_spaces("เป็น", cut("เป็น")) == "เ ป็ น"
    assert insert_spaces("abcไทย, ok 汉字", cut("abcไทย, ok 汉字")) == "abc ไ ท ย , ok 汉字"
    assert insert_spaces("မြန်မာ", cut("မြန်မာ")).split() == ["မြ", "န်", "မာ"]
    assert insert_spaces("ខ្មែរ", cut("ខ្មែរ")).split() == ["ខ្មែ", "រ"]
    assert cut("plain English, 汉字") == [] and cut("") == []


def test_thai_is_unknown_without_and_known_with_the_pre_splitter() -> None:
    """Silent loss: a sentence without spaces is one word that no vocabulary holds."""
    config = WordPieceConfig(vocab_size=200, min_frequency=1, strip_accents=False)
    new = "ไทยรักภาษา"
    plain = train_wordpiece(THAI, config)
    split = train_wordpiece(THAI, WordPieceConfig(**{**vars(config), "pre_splitter": "characters"}))
    assert split.unk_id not in split.encode(new) and len(split.encode(new)) == len(new) - 1  # รั is one
    assert len(plain.encode(new)) != len(split.encode(new))
    again = WordPiece.from_files(split.files())
    assert again.config.pre_splitter == "characters" and again.encode(new) == split.encode(new)
    assert '"pre_splitter": "characters"' in split.files()["tokenizer_config.json"]
    ids, offsets = again.encode_query("ไทย[MASK]รัก x")
    assert ids.count(again.mask_id) == 1 and ids[:3] == split.encode("ไทย")
    assert offsets == [(0, 1), (1, 2), (2, 3), (3, 9), (9, 11), (11, 12), (13, 14)]


def test_an_unknown_pre_splitter_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'"caracters" is not known; did you mean `characters`\?'):
        pre_splitter("caracters")
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    scripts._jieba.cache_clear()
    with pytest.raises(UserError, match="extra `zh`"):
        pre_splitter("jieba")("汉字")
    scripts._jieba.cache_clear()


def test_jieba_s_words_become_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        def cut(self, text: str) -> list[str]:
            assert text == "我们 爱北京ok"
            return ["我们", " ", "爱", "北京", "ok"]

    monkeypatch.setattr(scripts, "_jieba", Words)
    cuts = pre_splitter("jieba")("我们 爱北京ok")
    assert insert_spaces("我们 爱北京ok", cuts) == "我们 爱 北京 ok"
