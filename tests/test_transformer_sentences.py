"""The sentence splitter: what it cuts, what it keeps, and that it loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.sentences import split_sentences

CASES = [
    ["It rains.", "We stay in!", "Do we?", "Yes."],
    ["Mr. Smith met Dr. J. R. Brown in St. Louis.", "They talked."],
    ["It costs $3.50, i.e. 2.5 times as much (e.g. Fig. 3 and No. 7).", "No.", "Really."],
    ['"Stop!" he cried.', "“Why?”", "(It was late.)", "He left."],
    ["Wait… what?", "No...", "Yes."],
    ["It was 1954.", "Then 12 came.", "The state of the art.", "He said no.", "She agreed."],
    ["1. The first item is long.", "It goes on."],
    ["Am 3. Oktober kam z. B. Hr. Meier.", "„Gut.“", "Das ist u.a. Unsinn."],
    ["« Non. »", "M. Dupont est parti.", "Élise aussi."],
    ["他说：“你好。”", "然后走了！", "真的吗？？", "是的"],
    ["「行きます。」", "彼は言った。", "Ja."],
    ["Version 2.0.1 of foo.bar is out.", "See www.example.org for it."],
]


@pytest.mark.parametrize("expected", CASES, ids=lambda c: c[0])
def test_sentences_come_apart(expected: list[str]) -> None:
    spaced = "".join(s if s[-1] in "。！？”」" and s[0] > "\u2e7f" else s + " " for s in expected)
    assert split_sentences(spaced) == expected


@pytest.mark.parametrize("empty", ["", " ", "\u00a0\t"])
def test_nothing_gives_nothing(empty: str) -> None:
    assert split_sentences(empty) == []


@given(st.lists(st.sampled_from(list("aB1 .!?…。！？\"”)(«»'-\n\u00a0汉")), max_size=60).map("".join))
def test_only_white_space_is_lost_and_no_sentence_is_blank(text: str) -> None:
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(s and s == s.strip() for s in found)
