"""One translation run from its settings to its files; stops, other starts, averages, and figures of translations."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_bert
import tiny_run
import tiny_translation_run as tiny

from bert_jax.interop import huggingface, imports
from transformer_jax import checkpoint, optim, sharding
from transformer_jax import config as core
from transformer_jax.config import ConfigError, UserError
from transformer_jax.report import read_records
from transformer_jax.translation import data, train
from transformer_jax.translation.average import average
from transformer_jax.translation.config import InitConfig
from transformer_jax.translation.evaluate import evaluate, table
from transformer_jax.translation.interop import marian
from transformer_jax.translation.model import abstract_params
from transformer_jax.translation.run_file import load_run
from transformer_jax.translation.vocabularies import Vocabularies

EVERY_STEP = {"train_log_every": 1, "train_eval_every": 6}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Runs use the first device only and keep compiled programs."""
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")) as folder, tiny_run.one_device():
        yield folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory, cache):
    """12 steps without a stop, dropout on; the prepared pairs are shared by all runs."""
    folder = tmp_path_factory.mktemp("train")
    tiny.prepare(folder / "prepared")
    values = {}
    config = tiny.config(folder, **EVERY_STEP)
    result = train.train(config, on_step=values.__setitem__)
    return folder, config, result, values


def beside(straight, folder, **changes):
    """The same settings in another run folder."""
    return tiny.config(folder, **EVERY_STEP, data=straight[1].data, **changes)


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.array(x), np.array(y)), a, b)


@pytest.mark.slow
def test_the_run_folder_holds_what_other_commands_need(straight):
    folder, config, result, _ = straight
    run = folder / "run"
    names = {"config.toml", "tokenizer", "checkpoints", "metrics.jsonl", "times.jsonl", "tensorboard", "log.txt"}
    assert {p.name for p in run.iterdir()} == names and not result.interrupted
    sizes = {"source_vocab_size": tiny.vocabularies().source.vocab_size}
    sizes["target_vocab_size"] = tiny.vocabularies().target.vocab_size
    assert load_run(run / "config.toml") == dataclasses.replace(
        config, model=dataclasses.replace(config.model, **sizes)
    )
    assert Vocabularies.load(run / "tokenizer").digest == tiny.vocabularies().digest
    step, params, position, meta = checkpoint.read_params(run)
    assert (step, position["rows"], meta["naming"]) == (12, 48, 1) and set(params) == {
        "embeddings",
        "encoder",
        "decoder",
    }
    assert Vocabularies.from_files(meta["tokenizer"]).digest == meta["tokenizer_digest"]
    assert meta["data"]["languages"] == ["", ""] and "sentencepiece" in meta["versions"]
    losses = [r["loss"] for r in read_records(run / "metrics.jsonl") if r["split"] == "train"]
    assert len(losses) == 12 and losses[-1] < losses[0]


def test_the_opening_lines_say_what_is_about_to_run(straight):
    log = (straight[0] / "run" / "log.txt").read_text()
    size = tiny.vocabularies().source.vocab_size
    assert f"parameters, vocabulary {size}" in log and f"embeddings/target {size * 16:,}, encoder " in log
    assert "batch 4 rows of 32 + 32: 4 per host, 4 per device" in log


@pytest.mark.slow
def test_a_run_with_stops_is_the_run_without(straight, tmp_path):
    """C006, C013, C043: the same losses and bit-equal state, evaluations made up for."""
    values: dict[int, list] = {}
    config = beside(straight, tmp_path)
    for stop in (3, 6, 11):
        asked = tiny_run.stop_at(stop)
        note = asked["on_step"]
        asked["on_step"] = lambda step, v, note=note: (values.setdefault(step, []).append(v), note(step, v))
        result = train.train(config, **asked)
        assert result.interrupted and int(result.state.step) == stop
    result = train.train(config, on_step=lambda step, v: values.setdefault(step, []).append(v))
    assert values == {step: [v] for step, v in straight[3].items()}
    assert_same(result.state, straight[2].state)
    assert result.evaluation == straight[2].evaluation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_norm": "pre"}, r"different model or optimizer(.|\n)*model\.norm: 'post' in the checkpoint, 'pre' now"),
        ({"objective_label_smoothing": 0.2}, r"objective\.label_smoothing(.|\n)*--force"),
        ({"examples_subword_sampling": 0.1}, r"examples\.subword_sampling(.|\n)*--force"),
    ],
)
def test_settings_that_make_it_another_run_are_refused(straight, changes, message):
    """C094."""
    with pytest.raises(ConfigError, match=message):
        train.train(tiny.config(straight[0], **EVERY_STEP, **changes))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import jax
import tiny_run, tiny_translation_run as tiny
from transformer_jax.translation.train import train
folder, programs = Path(sys.argv[1]), sys.argv[2]
tiny_run.cache_programs(programs)
def on_step(step, values):
    if step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
train(tiny.config(folder, train_log_every=1, train_eval_every=6, data_prepared=str(folder.parent / "prepared")),
      on_step=on_step)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(straight, cache):
    """C006: SIGKILL after step 10, with the checkpoint of step 8 complete or still being written."""
    folder = straight[0] / "killed"
    folder.mkdir()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    # One device there too, and the same compiler: another one rounds otherwise.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", KILLED, str(folder), str(cache), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert checkpoint.steps(folder / "run") in ([4], [4, 8])
    result = train.train(beside(straight, folder))
    assert_same(result.state, straight[2].state)
    records = [r["step"] for r in read_records(folder / "run" / "metrics.jsonl") if r["split"] == "train"]
    assert records == list(range(1, 13))


# Starting elsewhere


def start(config):
    """The state that training would begin with, and the lines it would print."""
    vocabularies = data.load_vocabularies(train.open_prepared(config, "train"))
    config = train.resolve(config, vocabularies)
    engine = train.make_engine(config, sharding.make_mesh(config.mesh))
    begin = train.elsewhere(config, engine, vocabularies)
    return begin([]), engine


@pytest.mark.slow
def test_a_phase_starts_from_a_run(straight, tmp_path):
    init = InitConfig(checkpoint=str(straight[0] / "run"), optimizer="keep", schedule="continue")
    begun, _ = start(beside(straight, tmp_path, init=init, train_steps=20))
    assert_same(begun.state.params, straight[2].state.params)
    assert_same(begun.state.opt_state, straight[2].state.opt_state)
    assert int(begun.state.step) == 12 and begun.first_row == 0
    # With a padding of its own.
    init = InitConfig(checkpoint=str(straight[0] / "run@8"), optimizer="reset", schedule="restart")
    begun, _ = start(beside(straight, tmp_path, init=init, model_vocab_multiple=10))
    wide, here = straight[2].state.params["embeddings"]["target"], begun.state.params["embeddings"]["target"]
    assert wide["embedding"].shape == (48, 16) and here["embedding"].shape == (50, 16)
    assert not np.any(here["embedding"][44:]) and int(begun.state.step) == 0
    # From another program's folder, which has no optimizer.
    folder = marian.export_checkpoint(straight[0] / "run", tmp_path / "marian", say=lambda line: None)
    begun, _ = start(beside(straight, tmp_path, init=InitConfig(checkpoint=str(folder))))
    assert_same(begun.state.params, straight[2].state.params)
    imported = str(marian.import_folder(folder, tmp_path / "imported"))
    figures = evaluate(imported, "validation", straight[1].data.prepared, translate=None)
    assert figures["translation_nll"] == pytest.approx(straight[2].evaluation["translation_nll"], rel=1e-5)
    with pytest.raises(UserError, match="names no prepared data; name it with --prepared"):
        evaluate(imported)
    with pytest.raises(UserError, match="is a folder in Marian's format: it has no optimizer to keep"):
        start(beside(straight, tmp_path, init=InitConfig(checkpoint=str(folder), optimizer="keep")))


@pytest.mark.slow
def test_a_phase_starts_from_a_folder_with_an_output_bias_and_trains_it(straight, tmp_path):
    size = tiny.vocabularies().vocab_size
    sizes = {"source_vocab_size": size, "target_vocab_size": size, "hidden_act": "swish", "output_bias": True}
    model = dataclasses.replace(tiny.MODEL, **sizes)
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), abstract_params(model))
    for padded in (given["embeddings"]["target"]["embedding"], given["output"]["bias"]):
        padded[size - 1 :] = 0
    folder = marian.export(given, model, tiny.vocabularies(), tmp_path / "opus", say=lambda line: None)
    changes = {"init": InitConfig(checkpoint=str(folder)), "model_hidden_act": "swish", "train_steps": 4}
    with pytest.raises(ConfigError, match=r"model\.output_bias: True there, False here"):
        start(beside(straight, tmp_path, **changes))
    changes["model_output_bias"] = True
    begun, _ = start(beside(straight, tmp_path, model_vocab_multiple=10, **changes))
    assert begun.state.params["output"]["bias"].shape == (50,)
    assert_same(begun.state.params["output"]["bias"][:size], given["output"]["bias"][:size])
    assert not optim.decay_mask(begun.state.params)["output"]["bias"]
    bias = np.asarray(train.train(beside(straight, tmp_path, **changes)).state.params["output"]["bias"])
    assert (bias != given["output"]["bias"])[: size - 1].all() and not bias[size - 1 :].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": InitConfig(checkpoint="{run}")}, "is a run, so say both optimizer"),
        ({"init": InitConfig(checkpoint="{run}", optimizer="reset", schedule="restart"), "model_intermediate_size": 48},
         r"does not fit this model:\n  model\.intermediate_size: 32 there, 48 here"),
        ({"init": InitConfig(checkpoint="{run}", optimizer="keep", schedule="continue")},
         "is at step 12, where the schedule goes on, and train.steps is 12"),
        ({"init": InitConfig(checkpoint="nowhere")}, "nowhere: no such folder"),
        ({"model_embeddings": "untied", "init": InitConfig(encoder_from="{run}")}, "is not a BERT run"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_made_is_refused(straight, tmp_path, changes, message):
    run = str(straight[0] / "run")
    changes["init"] = dataclasses.replace(
        changes["init"], **{k: v.format(run=run) for k, v in dataclasses.asdict(changes["init"]).items()}
    )
    with pytest.raises(UserError, match=message):
        start(beside(straight, tmp_path, **changes))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT as a Hugging Face folder and as a run, with its settings and parameters."""
    folder, tokenizer = tmp_path_factory.mktemp("bert"), tiny_bert.tiny_tokenizer()
    config = tiny_bert.tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    params = tiny_bert.random_params(config)
    huggingface.export(params, config, tokenizer, folder / "hf")
    imports.import_folder(folder / "hf", folder / "run")
    return folder, config, tokenizer, params


def from_bert(bert, straight, folder, **changes):
    _, config, tokenizer, _ = bert
    own = Vocabularies(tokenizer, tiny.vocabularies().target)
    if not (folder / "prepared").exists():
        tiny.prepare(folder / "prepared", own=own)
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
             "max_position_embeddings")  # fmt: skip
    model = dataclasses.replace(
        tiny.MODEL, embeddings="separate", encoder_embeddings="bert", **{name: getattr(config, name) for name in names}
    )
    return tiny.config(
        folder, **{"model": model, "tokenizer_joint": False, "init_encoder_from": str(bert[0] / "hf"), **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "run"])
def test_an_encoder_starts_from_bert(bert, straight, tmp_path, kind):
    """From a Hugging Face folder and from a run: the same parameters, under the same names."""
    config = from_bert(bert, straight, tmp_path, init_encoder_from=str(bert[0] / kind))
    begun, engine = start(config)
    params, size = begun.state.params, bert[2].vocab_size
    assert_same(params["encoder"], bert[3]["encoder"])
    source, there = params["embeddings"]["source"], bert[3]["embeddings"]
    assert_same({k: v for k, v in source.items() if k != "word"}, {k: v for k, v in there.items() if k != "word"})
    np.testing.assert_array_equal(source["word"]["embedding"][:size], there["word"]["embedding"][:size])
    assert not np.any(source["word"]["embedding"][size:])
    assert_same(params["decoder"], engine.init().params["decoder"])
    assert begun.notes[-1] == f"encoder from {bert[0] / kind}"


def test_an_encoder_from_bert_that_does_not_fit_is_refused(bert, straight, tmp_path):
    with pytest.raises(
        ConfigError, match=r"does not fit this model:\n  model\.hidden_act is 'relu'; there it is 'gelu'"
    ):
        start(from_bert(bert, straight, tmp_path, model_hidden_act="relu"))
    with pytest.raises(ConfigError, match=r"set model\.encoder_embeddings to \"bert\""):
        start(from_bert(bert, straight, tmp_path, model_encoder_embeddings="transformer"))
    tiny.prepare(tmp_path / "pieces")
    with pytest.raises(ConfigError, match=r"another vocabulary than the source side of .*tokenizer\.source_wordpiece"):
        start(from_bert(bert, straight, tmp_path, data_prepared=str(tmp_path / "pieces")))


@pytest.mark.slow
def test_a_run_that_starts_from_bert_trains(bert, straight, tmp_path):
    result = train.train(from_bert(bert, straight, tmp_path, train_steps=4))
    assert int(result.state.step) == 4 and np.isfinite(result.evaluation["loss"])
    assert "encoder from" in (tmp_path / "run" / "log.txt").read_text()


# Figures of translations


def word_for_word(found):
    """A decoder that gives these translations."""
    return lambda config, vocabularies, params, lines, stop: found[: len(lines)]


@pytest.mark.slow
def test_translations_are_scored_during_training_and_the_best_checkpoint_is_kept_by_them(straight, tmp_path):
    references = [target for _, target in tiny.pairs(12, 2)]
    seen = []

    def translate(config, vocabularies, params, lines, stop):
        seen.append((list(lines), config.model.target_vocab_size, params["decoder"]["layer_0"] is not None))
        return references[:5] if len(seen) == 1 else ["ba"] * 5

    config = beside(straight, tmp_path, validation_lines=5, checkpoint_every=6, checkpoint_keep_best=1)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, keep_last=1))
    result = train.train(config, translate=translate)
    assert [lines for lines, _, _ in seen] == [[source for source, _ in tiny.pairs(12, 2)[:5]]] * 2
    records = {r["step"]: r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["split"] == "heldout"}
    assert records[6]["bleu"] == pytest.approx(100) and records[12]["bleu"] < 5 and "loss" in records[12]
    assert checkpoint.steps(tmp_path / "run") == [6, 12] and result.evaluation["chrf"] < 30
    assert "warning" not in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_the_best_step_is_warned_of_where_saved_steps_are_not_measured(straight, tmp_path):
    train.train(beside(straight, tmp_path, train_steps=4, checkpoint_keep_best=1))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "keep_best counts saved steps with a loss alone; it is measured every 6 steps" in log and "every 4" in log


@pytest.mark.slow
def test_validation_and_evaluate_translate_with_the_same_decoder(straight, tmp_path):
    config = beside(straight, tmp_path, train_steps=4, validation_lines=12, validation_beam_size=2)
    result = train.train(config)
    scores = evaluate(str(tmp_path / "run"), "validation")
    assert scores["chrf"]["score"] == pytest.approx(result.evaluation["chrf"])
    assert scores["bleu"]["score"] == pytest.approx(result.evaluation["bleu"]) and scores["lines"] == 12


def test_translations_that_cannot_be_made_are_refused_before_training(straight, tmp_path):
    with pytest.raises(ConfigError, match=r"validation\.lines is 13, and .* has 12 validation pairs"):
        train.train(beside(straight, tmp_path, validation_lines=13))
    assert not (tmp_path / "run").exists()


def test_evaluate_gives_the_figures_of_the_run_and_scores_with_a_decoder(straight):
    run = str(straight[0] / "run")
    figures = evaluate(run, "validation", translate=None)
    for name in ("loss", "translation_nll", "translation_accuracy", "n/translation"):
        assert figures[name] == pytest.approx(straight[2].evaluation[name], rel=1e-5), name
    assert figures["perplexity"] == pytest.approx(np.exp(figures["translation_nll"]))
    assert "perplexity" in table(figures) and "BLEU" not in table(figures)
    references = [target for _, target in tiny.pairs(12, 3)]
    scored = evaluate(run, translate=word_for_word(references))
    assert scored["pairs"] == 12 and scored["bleu"]["score"] == pytest.approx(100) and "BLEU" in table(scored)
    with pytest.raises(UserError, match="there is no step 5"):
        evaluate(f"{run}@5")


def test_evaluate_refuses_other_vocabularies_and_missing_pairs(straight, tmp_path):
    run = str(straight[0] / "run")
    tiny.prepare(tmp_path / "other", own=tiny.vocabularies(1))
    with pytest.raises(UserError, match="made with other vocabularies"):
        evaluate(run, prepared=str(tmp_path / "other"))
    tiny.prepare(tmp_path / "untested", test=0)
    with pytest.raises(UserError, match="has no test pairs"):
        evaluate(run, prepared=str(tmp_path / "untested"))
    with pytest.raises(UserError, match="run `transformer-jax prepare"):
        evaluate(run, prepared=str(tmp_path / "none"))


# Averages


@pytest.mark.slow
def test_the_mean_of_the_last_checkpoints_is_a_run_of_its_own(straight, tmp_path):
    run = straight[0] / "run"
    out = average([str(run)], tmp_path / "mean", last=3)
    step, params, _, meta = checkpoint.read_params(out)
    each = [checkpoint.read_params(f"{run}@{s}")[1] for s in (4, 8, 12)]
    jax.tree.map(
        lambda m, *x: np.testing.assert_array_equal(m, (sum(v.astype(np.float64) for v in x) / 3).astype(np.float32)),
        params, *each,
    )  # fmt: skip
    assert step == 12 and meta["averaged_from"] == ["run@4", "run@8", "run@12"]
    assert {p.name for p in out.iterdir()} == {"config.toml", "tokenizer", "checkpoints"}
    assert evaluate(str(out), translate=None)["n/translation"] > 20 and checkpoint.verify(out) == [(12, [])]
    assert load_run(out / "config.toml").run_dir == str(out)
    with pytest.raises(ConfigError, match=r"holds an averaged model .* with \[init\] from = "):
        train.train(beside(straight, tmp_path, run_dir=str(out)))
    init = InitConfig(checkpoint=str(out), optimizer="reset", schedule="restart")
    assert_same(start(beside(straight, tmp_path, init=init))[0].state.params, params)


@pytest.mark.slow
def test_a_stop_does_not_change_which_checkpoints_are_averaged(straight, monkeypatch, tmp_path):
    """With a checkpoint that a stop left at 6 and at 10, the mean is that of a run without stops, and says so."""
    run, said = straight[0] / "run", []
    monkeypatch.setattr(checkpoint, "steps", lambda root: [4, 6, 8, 10, 12])
    out = average([str(run)], tmp_path / "mean", last=3, say=said.append)
    monkeypatch.undo()
    assert checkpoint.read_params(out)[3]["averaged_from"] == ["run@4", "run@8", "run@12"]
    assert said == ["the mean of 3 checkpoints, of steps 4, 8, 12"]


@pytest.mark.slow
def test_the_mean_of_equal_checkpoints_is_that_checkpoint(straight, tmp_path):
    """C074: x, x, x gives x bit for bit; shared tables are one array, so none is counted twice; a repeat is equal."""
    run = straight[0] / "run"
    x = checkpoint.read_params(f"{run}@8")[1]
    assert_same(checkpoint.read_params(average([f"{run}@8"] * 3, tmp_path / "same"))[1], x)
    pair = [f"{run}@4", f"{run}@12"]
    twice = [checkpoint.read_params(average(pair, tmp_path / name))[1] for name in ("one", "two")]
    assert_same(*twice)
    assert jax.tree.structure(twice[0]) == jax.tree.structure(x)
    table = twice[0]["embeddings"]["target"]["embedding"]
    a, b = (checkpoint.read_params(name)[1]["embeddings"]["target"]["embedding"] for name in pair)
    np.testing.assert_array_equal(table, ((a.astype(np.float64) + b) / 2).astype(np.float32))


def test_an_average_of_different_models_is_refused(straight, tmp_path):
    step, params, _, meta = checkpoint.read_params(straight[0] / "run")
    del step
    config = meta["config"]
    before = {k: v for k, v in config["model"].items() if k != "output_bias"}  # which came later
    others = {
        "other_norm": meta | {"config": config | {"model": config["model"] | {"norm": "pre"}}},
        "other_words": meta | {"tokenizer_digest": "0"},
        "older": meta | {"config": config | {"model": before}},
    }
    for name, stored in others.items():
        checkpoints = checkpoint.Checkpoints(tmp_path / name / "checkpoints", core.CheckpointConfig())
        checkpoints.save(1, {"params": jax.tree.map(jax.numpy.asarray, params)}, {}, stored)
        checkpoints.close()
    for name, message in (("other_norm", r"model\.norm: 'post' and 'pre'"), ("other_words", "the vocabularies")):
        with pytest.raises(UserError, match=rf"different models, so their mean is none:\n  {message}"):
            average([str(straight[0] / "run"), str(tmp_path / name)], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    average([str(straight[0] / "run"), str(tmp_path / "older")], tmp_path / "mean")


@pytest.mark.parametrize(
    ("names", "last", "message"),
    [
        (["{run}"], 4, r"has 3 complete checkpoints \(4, 8, 12\), fewer than --last 4"),
        (["{run}", "{run}"], 2, "of one run, and 2 checkpoints are named"),
        (["{run}@8"], 2, "name the run alone"),
        (["{run}"], -1, "--last is -1"),
        (["{run}@8", "nowhere"], 0, "nowhere: no such folder"),
    ],
)
def test_averages_that_cannot_be_made_leave_nothing(straight, tmp_path, names, last, message):
    with pytest.raises(UserError, match=message):
        average([n.format(run=straight[0] / "run") for n in names], tmp_path / "mean", last)
    assert not list(tmp_path.iterdir())


def test_an_average_does_not_replace_anything(straight, tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UserError, match="is not empty"):
        average([str(straight[0] / "run")], tmp_path, last=2)


# The prepared data


def test_vocabularies_that_do_not_fit_the_model_are_refused(straight, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.target_vocab_size is 7, and the target vocabulary of .* has 44"):
        train.train(beside(straight, tmp_path, model_embeddings="separate", model_target_vocab_size=7))
    two = Vocabularies(tiny.vocabularies().source, tiny.vocabularies(1).target)
    tiny.prepare(tmp_path / "prepared", own=two)
    with pytest.raises(ConfigError, match=r'embeddings is "shared", but .* has a vocabulary for each side'):
        train.train(tiny.config(tmp_path))
    with pytest.raises(UserError, match="no prepared data here; run `transformer-jax prepare"):
        train.train(tiny.config(tmp_path, data_prepared=str(tmp_path / "none")))


@pytest.mark.slow
def test_a_run_without_validation_pairs_trains_and_has_no_figures(straight, tmp_path):
    tiny.prepare(tmp_path / "prepared", validation=0)
    result = train.train(tiny.config(tmp_path, train_steps=2, optimizer_warmup_steps=1))
    assert result.evaluation is None and not result.interrupted
