"""Cleaning: each reason by itself, its borders, and what the survey of all pairs adds."""

import numpy as np
import pytest

from transformer_jax.config import ConfigError, UserError
from transformer_jax.translation import cleaning, pairs, survey
from transformer_jax.translation.cleaning import count_words, fault, side_hash
from transformer_jax.translation.config import PairsConfig
from transformer_jax.translation.survey import Splitter

LIMITS = PairsConfig(max_words=5, max_ratio=3.0, min_words=2)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("two words", "zwei Wörter", ""),
        ("", "zwei Wörter", cleaning.EMPTY),
        ("two words", "", cleaning.EMPTY),
        ("same text", "same text", cleaning.IDENTICAL),
        ("one", "ein Wort", cleaning.SHORT),
        ("a b c d e", "a b c d e f", cleaning.LONG),
        ("a b c d e", "f g h i j", ""),
        ("abc ef", "abcdefghi abcdefgh", ""),  # 6 and 18 characters
        ("abc ef", "abcdefghi abcdefghi", cleaning.RATIO),
        ("a word", "两词", ""),
        ("a word", "词", cleaning.SHORT),
        ("some words here", "六个汉字在这", cleaning.LONG),
    ],
)
def test_a_pair_is_left_out_for_the_reason_it_has(source, target, reason):
    assert fault(source, target, LIMITS) == reason


def test_identical_sides_stay_where_they_are_wanted():
    assert fault("same text", "same text", PairsConfig(drop_identical=False)) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [("", 0), ("a  b", 2), ("汉字", 2), ("JSON 文件。", 4), ("ไทย", 3), ("Größe\u00a0XL", 2)],
)
def test_words_are_counted_by_spaces_or_by_characters(text, words):
    """ "。" stands by itself once the characters around it are apart."""
    assert count_words(text) == words


@pytest.mark.parametrize(
    ("source", "target", "languages", "reason"),
    [
        ("the file is here", "файл здесь", ("en", "ru"), ""),
        ("the file is here", "the file was here", ("en", "ru"), cleaning.SCRIPT),
        ("файл здесь", "die Datei ist hier", ("en", "de"), cleaning.SCRIPT),
        ("open JSON file", "打开 JSON 文件", ("en", "zh-CN"), ""),
        ("open it", "open it now", ("en", "zh"), cleaning.SCRIPT),
        ("12 - 34", "12 : 34", ("en", "ru"), ""),
        ("これはペンです", "this is a pen", ("ja", "en_US"), ""),
    ],
)
def test_a_side_mostly_in_another_script_is_left_out(source, target, languages, reason):
    limits = PairsConfig(check_script=True)
    assert fault(source, target, limits, languages) == reason
    assert fault(source, target, PairsConfig(), languages) == ""


def test_a_language_whose_script_is_not_known_is_an_early_error():
    with pytest.raises(ConfigError, match="script of the language 'tlh' is not known"):
        cleaning.check(PairsConfig(check_script=True), ("en", "tlh"))
    with pytest.raises(ConfigError, match="script of the language '' is not known"):
        cleaning.check(PairsConfig(check_script=True), ("en", ""))
    cleaning.check(PairsConfig(), ("en", "tlh"))


def test_sides_are_the_same_if_letters_and_digits_are():
    assert side_hash("Hello, World!") == side_hash("hello world")
    assert side_hash("Größe") != side_hash("Grösse2") and side_hash("a") != side_hash("ä")
    assert side_hash("!!") != side_hash("??")
    assert side_hash("हिन्दी") != side_hash("हन्द"), "vowel signs are part of the letters"


def recipe_of(folder, uses, head=""):
    """A recipe of one TSV file for each (use, pairs)."""
    text = 'source_language = "en"\ntarget_language = "de"\n' + head
    for i, (use, rows) in enumerate(uses):
        (folder / f"{i}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
        text += f'[[sources]]\nformat = "tsv"\nfiles = ["{i}.tsv"]\n' + (f'use = "{use}"\n' if use else "")
    (folder / "r.toml").write_text(text)
    return pairs.load_recipe(folder / "r.toml")


def surveyed(recipe, limits=None):
    splitter = Splitter(tuple(pairs.input_uses(recipe)), recipe.validation, recipe.test)
    found = survey.make(recipe, limits or PairsConfig(), splitter)
    return found, splitter, list(survey.kept(recipe, found))


def test_what_stands_in_test_or_validation_is_left_out_of_training_and_counted(tmp_path):
    train = [
        ("new one", "neu"),
        ("Test this!", "anders"),
        ("other", "die Probe"),
        ("held, back", "noch eins"),
        ("last", "letztes"),
    ]
    recipe = recipe_of(
        tmp_path,
        [
            ("train", train),
            ("validation", [("held back", "zurück"), ("", "leer")]),
            ("test", [("test this", "dies"), ("trial", "Die Probe."), ("test this", "dies"), ("same", "same")]),
        ],
    )
    found, _, kept = surveyed(recipe)
    assert [p.source for p in kept if p.input == 0] == ["new one", "last"]
    assert [p.source for p in kept if p.input == 2] == ["test this", "trial", "test this", "same"], "test sets stay"
    assert found.counts["0.tsv"]["side in the test set"] == 2
    assert found.counts["0.tsv"]["side in the validation set"] == 1
    assert found.counts["1.tsv"] | {"read": 2, "validation": 1, "empty side": 1} == found.counts["1.tsv"]
    assert found.verdicts.dtype == np.uint8 and len(found.verdicts) == 11


def test_copies_of_a_pair_are_left_out_after_the_first(tmp_path):
    rows = [("one", "eins"), ("two", "zwei"), ("one", "eins"), ("one", "Eins"), ("one", "eins")]
    recipe = recipe_of(tmp_path, [("train", rows), ("train", [("two", "zwei"), ("three", "drei")])])
    found, _, kept = surveyed(recipe)
    assert [(p.input, p.line) for p in kept] == [(0, 1), (0, 2), (0, 4), (1, 2)]
    assert found.counts["0.tsv"]["duplicate"] == 2 and found.counts["1.tsv"]["duplicate"] == 1
    assert len(surveyed(recipe, PairsConfig(drop_duplicates=False))[2]) == 7


def test_every_pair_read_is_accounted_for(tmp_path):
    rows = [
        ("ok then", "gut so"),
        ("", "x"),
        ("same", "same"),
        ("a " * 300, "b " * 300),
        ("x", "y" * 50),
        ("only one",),
    ]
    recipe = recipe_of(tmp_path, [("train", rows)])
    found, _, kept = surveyed(recipe)
    row = found.counts["0.tsv"]
    assert row["read"] == 6 and row["train"] == len(kept) == 1
    assert row["train"] + sum(row[r] for r in (*cleaning.REASONS, survey.MALFORMED)) == 6
    assert [row[r] for r in (cleaning.EMPTY, cleaning.IDENTICAL, cleaning.LONG, cleaning.RATIO)] == [1, 1, 1, 1]


def test_shares_are_drawn_by_the_source_side_so_copies_of_it_stay_together(tmp_path):
    rows = [(f"sentence number {i % 400}", f"Satz {i}") for i in range(800)]
    recipe = recipe_of(tmp_path, [("", rows)], head="validation = 0.1\ntest = 0.2\n")
    _, splitter, kept = surveyed(recipe)
    by_split = {}
    for pair in kept:
        by_split.setdefault(splitter(pair.input, pair.source), []).append(pair.source)
    assert {k: len(v) % 2 for k, v in by_split.items()} == {"train": 0, "validation": 0, "test": 0}
    assert 100 < len(by_split["test"]) < 220 and 40 < len(by_split["validation"]) < 130
    assert not set(by_split["train"]) & (set(by_split["test"]) | set(by_split["validation"]))


def test_the_survey_is_the_same_for_any_number_of_processes(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = [(f"word {a}", f"Wort {b}") for a, b in rng.integers(0, 200, (300, 2))]
    recipe = recipe_of(tmp_path, [("", rows), ("test", [("word 5", "Wort 5")])], head="validation = 0.1\n")
    splitter = Splitter(tuple(pairs.input_uses(recipe)), recipe.validation, recipe.test)
    alone = survey.make(recipe, PairsConfig(), splitter)
    monkeypatch.setattr(survey, "BATCH", 7)
    shared = survey.make(recipe, PairsConfig(), splitter, workers=2)
    assert np.array_equal(alone.verdicts, shared.verdicts) and alone.counts == shared.counts


def test_files_that_change_between_two_readings_are_noticed(tmp_path):
    recipe = recipe_of(tmp_path, [("train", [("one", "eins"), ("two", "zwei")])])
    found, _, _ = surveyed(recipe)
    (tmp_path / "0.tsv").write_text("one\teins\n")
    with pytest.raises(UserError, match="have become shorter"):
        list(survey.kept(recipe, found))
    (tmp_path / "0.tsv").write_text("one\teins\n" * 3)
    with pytest.raises(UserError, match="have grown"):
        list(survey.kept(recipe, found))
