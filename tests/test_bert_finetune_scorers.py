"""Scores equal those of scikit-learn, scipy, seqeval and the SQuAD scripts' definitions, on random and edge inputs."""

import collections
import importlib
import itertools
import re
import string

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from bert_jax.finetune import answers, entities, scorers
from transformer_jax.config import UserError

RNG = np.random.default_rng(0)


# --- classes


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_class_scores_are_those_of_scikit_learn(classes: int) -> None:
    for n in (1, 2, 5, 40):
        for _ in range(10):
            true, predicted = RNG.integers(0, classes, (2, n))
            where = {"y_true": true, "y_pred": predicted}
            assert scorers.accuracy(true, predicted) == pytest.approx(sklearn.metrics.accuracy_score(**where))
            for average in ("macro", "micro"):
                expected = sklearn.metrics.f1_score(**where, average=average, zero_division=0)
                assert scorers.f1(true, predicted, classes, average) == pytest.approx(expected)
            assert scorers.matthews(true, predicted, classes) == pytest.approx(_sklearn_mcc(true, predicted))
            labels = list(range(classes))
            expected = sklearn.metrics.confusion_matrix(**where, labels=labels)
            assert (scorers.confusion(true, predicted, classes) == expected).all()
            if classes == 2:
                expected = sklearn.metrics.f1_score(**where, average="binary", zero_division=0)
                assert scorers.f1(true, predicted, 2, "binary") == pytest.approx(expected)


def _sklearn_mcc(true: np.ndarray, predicted: np.ndarray) -> float:
    if len(set(true)) == 1 or len(set(predicted)) == 1:
        return 0.0  # its value too, but behind a warning when there is one class in all
    return sklearn.metrics.matthews_corrcoef(true, predicted)


def test_class_scores_of_one_class_and_of_constant_predictions_are_defined() -> None:
    ones, mixed = np.ones(4, int), np.array([0, 1, 1, 0])
    assert scorers.classification_scores(ones, ones, 2) == {
        "accuracy": 1, "f1": 1, "macro_f1": 1, "micro_f1": 1, "matthews": 0,
    }  # fmt: skip
    assert scorers.classification_scores(mixed, 0 * ones, 2)["f1"] == 0
    assert scorers.matthews(mixed, ones, 2) == scorers.matthews(ones, mixed, 2) == 0
    assert scorers.f1(0 * ones, 0 * ones, 2, "binary") == 0
    assert sklearn.metrics.f1_score(0 * ones, 0 * ones, zero_division=0) == 0
    assert scorers.classification_scores(mixed, mixed * 2, 3, positive=0)["f1"] == 1


def test_a_score_of_nothing_is_refused() -> None:
    none = np.zeros(0, int)
    for call in (
        lambda: scorers.accuracy(none, none),
        lambda: scorers.classification_scores(none, none, 2),
        lambda: scorers.regression_scores(none, none),
        lambda: scorers.multi_label_scores(np.zeros((0, 3)), np.zeros((0, 3))),
        lambda: scorers.entity_scores([], []),
        lambda: scorers.squad_scores({}, {}),
    ):
        with pytest.raises(UserError, match="there are 0 "):
            call()


@pytest.mark.parametrize("n", [1, 2, 30])
def test_multi_label_scores_are_those_of_scikit_learn(n: int) -> None:
    for density in (0.0, 0.1, 0.6, 1.0):
        true, predicted = RNG.random((2, n, 5)) < density
        predicted &= RNG.random((n, 5)) < 0.8
        found = scorers.multi_label_scores(true, predicted.astype(np.float32))
        for average in ("micro", "macro"):
            expected = sklearn.metrics.f1_score(true, predicted, average=average, zero_division=0)
            assert found[f"{average}_f1"] == pytest.approx(expected)
        assert found["exact"] == pytest.approx(sklearn.metrics.accuracy_score(true, predicted))


# --- numbers


def test_correlations_are_those_of_scipy_with_ties_and_at_any_scale() -> None:
    for n in (2, 3, 50):
        for scale in (1e-200, 1.0, 1e200):
            true, predicted = RNG.normal(size=(2, n))
            with_ties = np.round(predicted * 2) + 0.01 * np.arange(n) // 0.02
            for other in (predicted, with_ties + np.linspace(0, 1, n)):
                assert scorers.pearson(true, other * scale) == pytest.approx(scipy.stats.pearsonr(true, other)[0])
            ties = np.array([*np.round(predicted[2:]), 0.0, 3.0])
            assert scorers.spearman(true, ties * scale) == pytest.approx(scipy.stats.spearmanr(true, ties)[0])


def test_correlations_with_a_constant_or_of_one_example_are_zero() -> None:
    ramp = np.arange(5.0)
    for a, b in ((ramp, np.full(5, 0.1)), (np.full(5, 2.0), ramp), (np.zeros(5), np.zeros(5)), (ramp[:1], ramp[:1])):
        assert scorers.pearson(a, b) == scorers.spearman(a, b) == 0.0
    assert scorers.pearson(ramp, ramp) == 1.0 and scorers.spearman(ramp, -(ramp**3)) == -1.0


def test_sts_b_like_scores_keep_decimals() -> None:
    """C123: float labels of shape [N] only, and the plain mean square."""
    true = np.array([0.0, 0.4, 1.0, 2.2, 2.8, 3.8, 4.4, 5.0])
    predicted = true + np.array([0.1, -0.1, 0.3, 0.0, -0.2, 0.2, 0.1, -0.4])
    found = scorers.regression_scores(true, predicted)
    assert found["mse"] == pytest.approx((0.01 + 0.01 + 0.09 + 0 + 0.04 + 0.04 + 0.01 + 0.16) / 8)
    assert found["pearson_spearman"] == (found["pearson"] + found["spearman"]) / 2
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(true, predicted)[0])
    with pytest.raises(AssertionError, match=r"float \[N\]"):
        scorers.regression_scores(true, predicted[:, None])


def test_a_prediction_that_is_not_finite_is_named() -> None:
    with pytest.raises(UserError, match="prediction of example 3 is nan"):
        scorers.pearson(np.arange(4.0), np.array([0.0, 1.0, np.nan, 2.0]))


# --- entities

SCHEMES = {"iob1": "IOB1", "iob2": "IOB2", "iobes": "IOBES"}


@pytest.fixture
def seqeval():
    """It comes as source alone, whose version a pinned build does not find, so it is not in the development set."""
    seqeval = pytest.importorskip("seqeval", reason="seqeval is not installed; `pip install seqeval` adds it")
    importlib.import_module("seqeval.metrics")
    importlib.import_module("seqeval.scheme")
    return seqeval


def _random_tags(prefixes: str, sentences: int) -> list[list[str]]:
    tags = ["O", "O", *(f"{p}-{t}" for p in prefixes for t in ("PER", "LOC"))]
    return [[tags[i] for i in RNG.integers(0, len(tags), RNG.integers(1, 9))] for _ in range(sentences)]


def _changed(tags: list[list[str]], prefixes: str) -> list[list[str]]:
    other = [[*itertools.chain(*_random_tags(prefixes, 9))][: len(row)] for row in tags]
    return [
        [a if keep else b for a, b, keep in zip(row, more, RNG.random(len(row)) < 0.8, strict=True)]
        for row, more in zip(tags, other, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "iob1", "iob2", "iobes"])
def test_entity_scores_are_those_of_seqeval(scheme: str, seqeval) -> None:
    """Both readings, on tags that mostly break the scheme."""
    prefixes = {"": "BIES", "iob1": "BI", "iob2": "BI", "iobes": "BIES"}[scheme]
    options = {"zero_division": 0} | (
        {"mode": "strict", "scheme": getattr(seqeval.scheme, SCHEMES[scheme])} if scheme else {}
    )
    for _ in range(40):
        true = _random_tags(prefixes, 12)
        predicted = _changed(true, prefixes)
        found = scorers.entity_scores(true, predicted, scheme)
        assert found["f1"] > 0
        for name in ("precision", "recall", "f1"):
            score = getattr(seqeval.metrics, f"{name}_score")
            assert found[name] == pytest.approx(score(true, predicted, **options)), (true, predicted)
        assert found["macro_f1"] == pytest.approx(seqeval.metrics.f1_score(true, predicted, average="macro", **options))
        report = seqeval.metrics.classification_report(true, predicted, output_dict=True, **options)
        for kind, each in entities.scores_by_type(true, predicted, scheme).items():
            assert each["f1"] == pytest.approx(report[kind]["f1-score"])
            assert each["support"] == report[kind]["support"]


@pytest.mark.parametrize("scheme", ["", "iob1", "iob2", "iobes"])
def test_entities_of_every_short_sentence_are_those_of_seqeval(scheme: str, seqeval) -> None:
    prefixes = "BI" if scheme.startswith("iob") and scheme != "iobes" else "BIES"
    tags = ["O", *(f"{p}-{t}" for p in prefixes for t in "XY")]
    for row in itertools.product(tags, repeat=3):
        if scheme:
            found = [
                (e.tag, e.start, e.end)
                for e in seqeval.scheme.Tokens(list(row), getattr(seqeval.scheme, SCHEMES[scheme])).entities
            ]
        else:
            found = [(t, a, b + 1) for t, a, b in seqeval.metrics.sequence_labeling.get_entities(list(row))]
        assert entities.entities(row, scheme) == found, row


def test_entity_scores_of_sentences_without_entities_are_zero() -> None:
    assert scorers.entity_scores([["O", "O"]], [["O", "O"]]) == {"precision": 0, "recall": 0, "f1": 0, "macro_f1": 0}


def test_bare_prefixes_and_types_with_hyphens_are_read() -> None:
    assert entities.entities(["B", "I", "O", "B-work-of-art", "I-work-of-art"]) == [("", 0, 2), ("work-of-art", 3, 5)]


def test_tags_that_mark_no_entities_are_scored_by_the_word() -> None:
    found = scorers.tagging_scores([["O", "B-X", "I-X"], ["B-X"]], [["O", "B-X", "O"], ["I-X"]])
    assert found == {"accuracy": 0.5, "precision": 0.5, "recall": 0.5, "f1": 0.5, "macro_f1": 0.5, "strict_f1": 0}
    assert scorers.tagging_scores([["NN", "VB"]], [["NN", "NN"]]) == {"accuracy": 0.5}


@pytest.mark.parametrize(("tag", "scheme"), [("NNP", ""), ("IN", ""), ("X-PER", ""), ("S-PER", "iob2")])
def test_a_tag_that_marks_no_entity_is_named(tag: str, scheme: str) -> None:
    with pytest.raises(UserError, match=f"'{tag}' is neither O nor B-TYPE"):
        scorers.entity_scores([["O", tag]], [["O", "O"]], scheme)


# --- answers: the definitions of the official scripts, written out


def _official_normalized(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _official_f1(answer: str, gold: str, version_2: bool) -> float:
    a, g = _official_normalized(answer).split(), _official_normalized(gold).split()
    same = sum((collections.Counter(a) & collections.Counter(g)).values())
    if version_2 and (len(a) == 0 or len(g) == 0):
        return int(a == g)
    if same == 0:
        return 0
    precision, recall = same / len(a), same / len(g)
    return 2 * precision * recall / (precision + recall)


def _official(predicted: dict, golds: dict, version_2: bool) -> tuple[dict, dict]:
    exact, f1 = {}, {}
    for key in golds:
        allowed = [g for g in golds[key] if _official_normalized(g)] or [""] if version_2 else golds[key]
        exact[key] = max(int(_official_normalized(predicted[key]) == _official_normalized(g)) for g in allowed)
        f1[key] = max(_official_f1(predicted[key], g, version_2) for g in allowed)
    return exact, f1


WORDS = ["the", "The", "a", "cat", "cat,", "sat", "St.", "an", "U.S.", "—", "Zürich", "\u00a0mat", "...", "theatre"]


def _random_text(least: int = 0) -> str:
    return " ".join(WORDS[i] for i in RNG.integers(0, len(WORDS), RNG.integers(least, 5)))


@pytest.mark.parametrize("version_2", [False, True])
def test_exact_match_and_f1_of_answers_are_the_official_ones(version_2: bool) -> None:
    for _ in range(40):
        golds = {str(i): [_random_text(1) for _ in range(RNG.integers(0 if version_2 else 1, 4))] for i in range(30)}
        predicted = {i: golds[i][0] if golds[i] and RNG.random() < 0.3 else _random_text() for i in golds}
        exact, f1 = _official(predicted, golds, version_2)
        found = scorers.squad_scores(predicted, golds, version_2)
        assert found["exact"] == pytest.approx(np.mean(list(exact.values())))
        assert found["f1"] == pytest.approx(np.mean(list(f1.values())))
        if version_2:
            for name, keys in (
                ("has_answer", [k for k in golds if golds[k]]),
                ("no_answer", [k for k in golds if not golds[k]]),
            ):
                assert found[f"{name}_exact"] == pytest.approx(np.mean([exact[k] for k in keys]))
                assert found[f"{name}_f1"] == pytest.approx(np.mean([f1[k] for k in keys]))


def test_answers_without_a_word_agree_in_2_0_only() -> None:
    assert scorers.exact_match("The", "an.") == 1.0
    assert scorers.token_f1("The", "an.") == 0.0 and scorers.token_f1("The", "an.", version_2=True) == 1.0
    assert scorers.token_f1("the", "cat", version_2=True) == 0.0


def _official_best(null: dict, scores: dict, predicted: dict, golds: dict) -> tuple[float, float]:
    current = best = sum(not golds[k] for k in golds)
    threshold = 0.0
    for key in sorted(null, key=lambda k: null[k]):
        current += scores[key] if golds[key] else (-1 if predicted[key] else 0)
        if current > best:
            best, threshold = current, null[key]
    return best / len(golds), threshold


def test_the_best_threshold_is_the_official_one_and_the_scores_at_it_are_as_said() -> None:
    for _ in range(30):
        golds = {str(i): [_random_text(1)] if RNG.random() < 0.6 else [] for i in range(25)}
        predicted = {i: golds[i][0] if golds[i] and RNG.random() < 0.7 else "mat " + _random_text() for i in golds}
        null = {i: float(RNG.random()) - (0.3 if golds[i] else 0) + 0.3 for i in golds}
        found = scorers.squad_scores(predicted, golds, True, null)
        for name, scores in zip(("exact", "f1"), _official(predicted, golds, True), strict=True):
            best, threshold = _official_best(null, scores, predicted, golds)
            assert found[f"best_{name}"] == pytest.approx(best)
            assert threshold == 0.0 or found[f"best_{name}_threshold"] == threshold
        assert found["f1"] == pytest.approx(found["best_f1"]) and found["threshold"] == found["best_f1_threshold"]
        at_half = scorers.squad_scores(predicted, golds, True, null, threshold=0.5)
        for name, scores in zip(("exact", "f1"), _official(predicted, golds, True), strict=True):
            applied = [float(not golds[i]) if null[i] > 0.5 else scores[i] for i in golds]
            assert at_half[name] == pytest.approx(np.mean(applied))


def test_equal_null_scores_are_never_parted_by_the_threshold() -> None:
    golds: dict[str, list[str]] = {"1": ["x"], "2": [], "3": []}
    found = scorers.squad_scores(dict.fromkeys(golds, "x"), golds, True, dict.fromkeys(golds, 0.25))
    assert found["best_f1"] == found["f1"] == pytest.approx(2 / 3) and found["threshold"] < 0.25
    golds["3"] = ["x"]
    golds["4"] = ["x"]
    found = scorers.squad_scores(dict.fromkeys(golds, "x"), golds, True, dict.fromkeys(golds, 0.25))
    assert found["best_f1"] == found["f1"] == 0.75 and found["threshold"] == 0.25


def test_a_set_of_unanswerable_questions_is_best_left_unanswered() -> None:
    golds: dict[str, list[str]] = {"1": [], "2": []}
    found = scorers.squad_scores({"1": "x", "2": "y"}, golds, True, {"1": -3.0, "2": 4.0})
    assert found["exact"] == found["no_answer_f1"] == 1.0 and found["threshold"] < -3.0
    assert "has_answer_f1" not in found


def test_a_question_that_was_not_answered_scores_as_the_empty_answer() -> None:
    found = scorers.squad_scores({"1": "cat"}, {"1": ["the cat"], "2": ["dog"]})
    assert found == {"exact": 0.5, "f1": 0.5}
    assert answers.normalized("The U.S.  theatre — an  “Cat”") == "us theatre — “cat”"


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("刘备、关羽", "刘备，关羽，张飞", 0.0, 2 * 4 / (4 + 6)),
        ("《三国演义》。", "三国演义", 1.0, 1.0),
        ("张飞刘备", "刘备张飞", 0.0, 2 * 2 / (4 + 4)),  # the longest run in common, not all that is in common
        ("1998年", "1998 年", 0.0, 1.0),
        ("NBA球员", "nba球员", 1.0, 1.0),
        ("曹操", "孙权", 0.0, 0.0),
        ("", "孙权", 0.0, 0.0),
        ("他在1998年去了 New York", "1998年", 0.0, 2 * 2 / (8 + 2)),
    ],
)
def test_chinese_answers_are_compared_by_characters(answer: str, gold: str, exact: float, f1: float) -> None:
    """By hand, after the definition of CMRC 2018 (Cui et al. 2019)."""
    found = scorers.squad_scores({"1": answer}, {"1": [gold]}, characters=True)
    assert found == pytest.approx({"exact": exact, "f1": f1})


def test_of_several_right_answers_by_characters_the_best_counts_and_2_0_may_have_none() -> None:
    found = scorers.squad_scores({"1": "刘备"}, {"1": ["玄德", "刘备玄德"]}, characters=True)
    assert found == pytest.approx({"exact": 0.0, "f1": 2 * 2 / (2 + 4)})
    golds: dict[str, list[str]] = {"1": ["。"], "2": []}
    found = scorers.squad_scores({"1": "", "2": "刘备"}, golds, True, characters=True)
    assert found["exact"] == found["f1"] == 0.5
