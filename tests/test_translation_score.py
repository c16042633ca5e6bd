"""Scores: the figures of sacreBLEU, the compound-split figure of papers, and what is refused or noted."""

import gzip
import json

import pytest
import sacrebleu

from transformer_jax.config import UserError
from transformer_jax.translation.compound_split import compound_split_bleu, split_compounds, tokenise
from transformer_jax.translation.score import score, score_files, table

HYPOTHESES = ["Das ist ein Test .", "Der rich-text-Modus kostet 1,50 Euro.", "Wir gehen nach Hause."]
REFERENCES = ["Das ist ein Test.", "Der Rich-Text-Modus kostet 1,50 Euro.", "Wir gehen heute nach Hause."]


def test_the_figures_are_those_of_sacrebleu_with_their_signatures():
    found = score(HYPOTHESES, REFERENCES, language="de")
    assert found["bleu"]["score"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert found["chrf"]["score"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert found["bleu"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found["chrf"]["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert found["lines"] == 3 and len(found["bleu"]["precisions"]) == 4
    assert json.loads(json.dumps(found)) == found


def test_different_counts_are_refused_and_both_printed():
    """C022: nothing is cut off in silence."""
    with pytest.raises(UserError, match="2 hypotheses and 1 references"):
        score(["a b c d", "x"], ["a b c d"])


def test_files_of_different_length_are_refused_by_name(tmp_path):
    """C022."""
    (tmp_path / "hyp").write_text("a b c d\nx\n")
    (tmp_path / "ref").write_text("a b c d\n")
    with pytest.raises(UserError, match=r"hyp has 2 lines and .*ref 1:"):
        score_files(str(tmp_path / "hyp"), str(tmp_path / "ref"))


def test_no_lines_at_all_are_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match="nothing to score"):
        score_files(str(tmp_path / "empty"), str(tmp_path / "empty"))
    with pytest.raises(UserError, match="lists of lines"):
        score("a b", "a b")


def test_tokenised_output_and_entities_are_noted_and_the_signature_is_always_there():
    """C065."""
    found = score(["Tom &amp; Ann .", "Fine."], ["Tom & Ann.", "Fine."])
    assert [note.split(" (")[1] for note in found["notes"]] == ["line 1)", "line 1)"]
    assert "HTML entities" in found["notes"][0] and "look tokenised" in found["notes"][1]
    assert "|tok:13a|" in table(found) and "version:" in table(found)
    # chrF sees the text as it stands.
    assert found["chrf"]["score"] < score(["Tom & Ann.", "Fine."], ["Tom & Ann.", "Fine."])["chrf"]["score"] == 100
    assert score(["Tom & Ann.", "Fine."], ["Tom & Ann.", "Fine."])["notes"] == []


def test_an_empty_reference_is_scored_as_aligned_and_noted():
    """C107."""
    found = score(["a b c d e", "x", "f g h i"], ["a b c d e", "", "f g h i"])
    assert found["lines"] == 3 and 0 < found["bleu"]["score"] < 100
    assert found["notes"] == ["1 of 3 references are empty; they are scored as they stand (line 2)"]
    assert found["bleu"]["reference_length"] == 9 and found["bleu"]["hypothesis_length"] == 10
    empty = score(["", ""], ["a b", ""])
    assert empty["bleu"]["score"] == 0 and len(empty["notes"]) == 2


def test_chinese_is_cut_into_characters_and_not_split_at_hyphens():
    found = score(["深度学习很有用。"], ["深度学习非常有用。"], language="zh-CN")
    assert "|tok:zh|" in found["bleu"]["signature"] and found["bleu"]["score"] > 20
    assert found["compound_split_bleu"] is None and "compound" not in table(found)
    assert "|tok:intl|" in score(["a"], ["a"], tokenize="intl")["bleu"]["signature"]
    with pytest.raises(UserError, match="must be one of 13a, intl, zh"):
        score(["a"], ["a"], tokenize="moses")


@pytest.mark.parametrize(
    ("language", "text", "tokens"),
    [
        ("de", 'Der „rich-text"-Modus (z.B. A, B) kostet 1,50 Euro.',
         'Der " rich-text " -Modus ( z.B. A , B ) kostet 1,50 Euro .'),
        ("de", "Am 3. Mai kam Dr. Weiß, um 12.30 Uhr... so.", "Am 3. Mai kam Dr. Weiß , um 12.30 Uhr ... so ."),
        ("de", "Ich hab's usw. gesehen.", "Ich hab ' s usw. gesehen ."),
        ("en", "It's the users' 1990's \"U.S.\" plan.", "It 's the users ' 1990 's \" U.S. \" plan ."),
        ("en", "Mr. Smith paid 5% & left_over e.g. this.", "Mr. Smith paid 5 % & left _ over e.g. this ."),
        ("fr", "L'homme n'a qu'une idée : 1,5 !", "L' homme n' a qu' une idée : 1,5 !"),
    ],
)  # fmt: skip
def test_tokens_are_those_of_moses(language, text, tokens):
    assert " ".join(tokenise(text, language)) == tokens


def test_compounds_are_split_at_hyphens():
    assert split_compounds(["rich-text-Modus", "-", "-1"]) == "rich ##AT##-##AT## text ##AT##-##AT## Modus - -1"


def test_the_compound_split_figure_counts_the_parts_and_is_labelled():
    # "a b c x ##AT##-##AT## y" for "... z": 5 of 6 tokens, 4 of 5 pairs, 3 of 4 and 2 of 3 match.
    expected = 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert compound_split_bleu(["a b c x-y"], ["a b c x-z"]) == pytest.approx(expected)
    assert compound_split_bleu(["a b c x-y"], ["a b c d e"]) == 0  # No smoothing: no four tokens match.
    found = score(HYPOTHESES, REFERENCES, language="de")
    assert found["compound_split_bleu"]["how"] in table(found) and "Moses-like" in table(found)
    assert f"{found['compound_split_bleu']['score']:.2f}" in table(found)


def test_files_may_be_compressed_and_their_mistakes_are_named(tmp_path):
    with gzip.open(tmp_path / "ref.gz", "wt", encoding="utf-8") as f:
        f.write("ä b c d\n")
    (tmp_path / "hyp").write_text("\ufeffä b c d\r\n", encoding="utf-8")
    assert score_files(str(tmp_path / "hyp"), str(tmp_path / "ref.gz"))["bleu"]["score"] == pytest.approx(100)
    (tmp_path / "bad").write_bytes(b"good\nb\xff\n")
    with pytest.raises(UserError, match=r"bad: line 2 is not UTF-8"):
        score_files(str(tmp_path / "bad"), str(tmp_path / "ref.gz"))
    with pytest.raises(UserError, match="nowhere: no such file"):
        score_files(str(tmp_path / "nowhere"), str(tmp_path / "hyp"))
