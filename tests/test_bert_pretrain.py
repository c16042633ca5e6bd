"""One run from its settings to its files; and phases that start from another checkpoint."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_run

from bert_jax import pretrain as pretraining
from bert_jax.config import DataConfig
from bert_jax.interop import exports, imports
from bert_jax.pretrain import pretrain
from bert_jax.run_file import check_resume, load_run
from bert_jax.run_page import write_run_page
from transformer_jax import checkpoint, sharding
from transformer_jax import config as core
from transformer_jax import prepare as preparing
from transformer_jax.config import CheckpointConfig, ConfigError, UserError
from transformer_jax.corpora import load_recipe
from transformer_jax.lock import locked
from transformer_jax.report import read_records
from transformer_jax.run import starting_point
from transformer_jax.shards import Shards, write_prepared
from transformer_jax.tokenizer_config import WordPieceConfig

MAKE_MESH = sharding.make_mesh


@pytest.fixture(scope="module", autouse=True)
def one_device(tmp_path_factory):
    """Runs use the first device only and keep compiled programs."""
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")), tiny_run.one_device():
        yield


@pytest.fixture(scope="module")
def phase_1(tmp_path_factory):
    """6 steps on rows of 16."""
    folder = tmp_path_factory.mktemp("pretrain")
    tiny_run.prepare(folder / "prepared")
    short = {"examples_max_seq_length": 16, "optimizer_total_steps": 10}
    config = tiny_run.config(folder, train_steps=6, train_log_every=1, **short)
    return folder, config, pretrain(config)


@pytest.mark.slow
def test_the_run_folder_holds_what_the_design_says(phase_1):
    folder, config, _ = phase_1
    run = folder / "run"
    assert {p.name for p in run.iterdir()} == {
        "config.toml",
        "tokenizer",
        "checkpoints",
        "metrics.jsonl",
        "times.jsonl",
        "tensorboard",
        "log.txt",
    }
    assert load_run(run / "config.toml") == dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=len(tiny_run.VOCAB))
    )
    assert (run / "tokenizer" / "vocab.txt").read_text().split() == tiny_run.VOCAB
    assert [r["step"] for r in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.slow
def test_licence_and_language_of_a_recipe_reach_checkpoint_and_model_card(tmp_path):
    text = "\n\n".join(" ".join(tiny_run.VOCAB[5 + i :]) for i in range(4))
    (tmp_path / "a.txt").write_text(text + "\n")
    recipe = 'name = "a"\nlicense = "CC0-1.0"\nlanguage = "en"\nheldout = 0.0\n[[sources]]\nfiles = ["a.txt"]\n'
    (tmp_path / "a.toml").write_text(recipe)
    say: list[str] = []

    def prepare_again():
        words = WordPieceConfig(vocab_size=40)
        preparing.prepare(load_recipe(tmp_path / "a.toml"), words, tmp_path / "p", workers=1, say=say.append)
        return Shards.open(tmp_path / "p", "train")

    shards = prepare_again()
    config = pretraining.resolve(dataclasses.replace(tiny_run.config(tmp_path), data=DataConfig()), shards)
    meta = pretraining.make_meta(config, shards)
    assert meta["data"]["license"] == "CC0-1.0" and meta["data"]["language"] == "en"
    task = pretraining.PretrainingTask(config.model, 16)
    params = sharding.unbox(task.init(jax.random.key(0)))
    with contextlib.closing(checkpoint.Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())) as saved:
        saved.save(1, {"params": params}, {}, meta)
    exports.export_checkpoint(tmp_path / "run", tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| licence of the text | CC0-1.0 |" in card and 'language: "en"' in card
    before = shards.fingerprint
    (tmp_path / "a.toml").write_text(recipe.replace("CC0-1.0", "CC-BY-4.0"))
    shards = prepare_again()
    assert pretraining.make_meta(config, shards)["data"]["license"] == "CC-BY-4.0" and shards.fingerprint == before


def test_a_checkpoint_holds_all_that_other_commands_need(phase_1):
    folder, config, _ = phase_1
    step, params, data, meta = checkpoint.read_params(folder / "run")
    assert (step, data["step"], data["rows"], data["batch_size"], data["seed"]) == (6, 6, 48, 8, 0)
    assert {"epoch", "row_in_epoch", "fingerprint"} <= set(data)
    assert meta["config"]["examples"] == core.to_builtins(config.examples)
    assert set(meta["tokenizer"]) == {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
    assert {"jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= set(meta["versions"]) and meta["naming"] == 1
    assert params["embeddings"]["word"]["embedding"].shape == (64, 32)


def test_the_opening_lines_say_what_is_about_to_run(phase_1):
    """C076, C091: rows per host and per device, and what is not decayed."""
    log = (phase_1[0] / "run" / "log.txt").read_text()
    assert "batch 8 rows of 16: 8 per host, 8 per device" in log
    assert "mesh data 1, fsdp 1, tensor 1" in log and "vocabulary 61" in log
    listed = next(line for line in log.splitlines() if "not decayed: " in line).split("not decayed: ")[1].split(", ")
    assert {"norm/scale", "norm/bias", "attention_norm/scale", "query/bias", "mlm/bias"} <= set(listed)
    assert all(name.endswith(("/bias", "/scale")) for name in listed)


def test_16_rows_on_8_devices_are_2_a_device(phase_1, tmp_path):
    """C091: and 10 rows are refused before anything is compiled or written."""
    changes = {"data": phase_1[1].data, "train_steps": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining.sharding, "make_mesh", MAKE_MESH)
        with pytest.raises(ConfigError, match=r"train\.batch_size is 10 rows .* multiple of 8 .* 8 and 16"):
            pretrain(tiny_run.config(tmp_path, train_batch_size=10, **changes))
    assert not (tmp_path / "run").exists()
    run = tiny_run.Run(tiny_run.config(tmp_path, train_batch_size=16, **changes), jax.devices()[:8])
    lines = pretraining.opening_lines(run.config, run.engine, run.data)
    assert "batch 16 rows of 32: 16 per host, 2 per device" in lines


def phase_2(phase_1, folder, **init):
    settings = {"examples_max_seq_length": 32, "train_steps": 10, "checkpoint_every": 100, "train_log_every": 1}
    config = tiny_run.config(folder, data=phase_1[1].data, **settings)
    init = {"checkpoint": str(phase_1[0] / "run"), **init}
    return dataclasses.replace(config, init=dataclasses.replace(config.init, **init))


def start(config):
    """The state that training would start from."""
    shards = pretraining.open_prepared(config, "train")
    config = pretraining.resolve(config, shards)
    engine = pretraining.make_engine(config, pretraining.sharding.make_mesh(config.mesh))
    data = pretraining.PretrainingData(shards, config.examples, config.train.seed)
    checkpoints = checkpoint.Checkpoints(pretraining.Path(config.run_dir) / "checkpoints", CheckpointConfig())
    digest, begin = shards.tokenizer.digest, pretraining.elsewhere(config, engine, shards)
    check = lambda stored: check_resume(stored, config, False)  # noqa: E731
    return starting_point(config, engine, data, checkpoints, digest, check, begin), engine


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.array(x), np.array(y)), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["keep", "reset"])
@pytest.mark.parametrize("schedule", ["continue", "restart"])
def test_a_phase_starts_from_a_run_as_it_says(phase_1, tmp_path, optimizer, schedule):
    """Rows of 16, then rows of 32: parameters always, moments and step as asked for, data from its beginning."""
    config = phase_2(phase_1, tmp_path, optimizer=optimizer, schedule=schedule)
    begun, engine = start(config)
    there = phase_1[2].state
    assert_same(begun.state.params, there.params)
    assert (begun.first_row, begun.resumed) == (0, False)
    assert int(begun.state.step) == (6 if schedule == "continue" else 0)
    assert begun.notes[-1].endswith(f"optimizer {optimizer}, schedule at step {int(begun.state.step)}")
    if optimizer == "keep":
        assert_same(begun.state.opt_state, there.opt_state)
    else:
        assert_same(begun.state.opt_state, engine.init().opt_state)
        assert int(begun.state.opt_state[0].updates) == 0
    rates = []
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=10))
    result = pretrain(config, on_step=lambda step, values: rates.append((step, values["learning_rate"])))
    first = int(begun.state.step)
    schedule_of_run = engine.optimizer.schedule
    assert rates == [(s, pytest.approx(float(schedule_of_run(s - 1)))) for s in range(first + 1, 11)]
    assert int(result.state.step) == 10
    assert checkpoint.read_meta(tmp_path / "run")[1]["rows"] == (10 - first) * 8


@pytest.mark.slow
def test_a_phase_that_was_stopped_goes_on_from_itself_and_not_from_its_init(phase_1, tmp_path, capsys):
    config = phase_2(phase_1, tmp_path, optimizer="keep", schedule="continue")
    straight = pretrain(dataclasses.replace(config, run_dir=str(tmp_path / "straight")))
    pretrain(config, **tiny_run.stop_at(8))
    result = pretrain(config)
    assert "going on from step 8, 16 rows seen" in capsys.readouterr().err
    assert_same(result.state, straight.state)


def test_a_step_of_a_run_can_be_named(phase_1, tmp_path):
    name = f"{phase_1[0] / 'run'}@5"
    begun, _ = start(phase_2(phase_1, tmp_path, checkpoint=name, optimizer="keep", schedule="continue"))
    assert int(begun.state.step) == 5


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({}, r"is a run, so say both optimizer \(keep or reset\) and schedule \(continue or restart\)"),
        ({"optimizer": "keep"}, "is a run, so say both"),
        ({"checkpoint": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_a_start_from_a_run_says_what_is_meant(phase_1, tmp_path, init, message):
    with pytest.raises(UserError, match=message):
        start(phase_2(phase_1, tmp_path, **init))


def test_a_phase_that_goes_on_past_its_last_step_is_refused(phase_1, tmp_path):
    config = phase_2(phase_1, tmp_path, optimizer="keep", schedule="continue")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=6))
    with pytest.raises(ConfigError, match=r"is at step 6, .* train\.steps is 6, which counts from the first phase"):
        start(config)


def test_moments_of_another_optimizer_are_not_kept(phase_1, tmp_path):
    config = phase_2(phase_1, tmp_path, optimizer="keep", schedule="continue")
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="bert_adam"))
    with pytest.raises(ConfigError, match=r'trained with adamw, .*set optimizer\.name = "adamw", or say .* "reset"'):
        start(other)


def test_a_start_from_another_model_or_vocabulary_is_refused(phase_1, tmp_path):
    config = phase_2(phase_1, tmp_path, optimizer="reset", schedule="restart")
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, intermediate_size=48))
    with pytest.raises(ConfigError, match=r"does not fit this model:\n  model\.intermediate_size: 64 there, 48 here"):
        start(other)
    tiny_run.prepare(tmp_path / "prepared", vocab=[*tiny_run.VOCAB[:-1], "other"])
    moved = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=str(tmp_path / "prepared")))
    with pytest.raises(ConfigError, match="has another vocabulary than"):
        start(moved)


def test_a_start_from_a_hugging_face_folder(phase_1, tmp_path):
    exports.export_checkpoint(phase_1[0] / "run", tmp_path / "hf")
    config = phase_2(phase_1, tmp_path, checkpoint=str(tmp_path / "hf"))
    begun, engine = start(config)
    assert_same(begun.state.params["encoder"], phase_1[2].state.params["encoder"])
    assert_same(begun.state.opt_state, engine.init().opt_state)
    assert int(begun.state.step) == 0
    # The folder has no padding rows: they are made as this run pads its vocabulary.
    word, bias = begun.state.params["embeddings"]["word"]["embedding"], begun.state.params["mlm"]["bias"]
    assert word.shape == (64, 32) and bias.shape == (64,)
    assert np.array_equal(word[:61], phase_1[2].state.params["embeddings"]["word"]["embedding"][:61])
    assert not np.any(word[61:]) and not np.any(bias[61:])
    for wrong in ({"optimizer": "keep"}, {"schedule": "continue"}):
        with pytest.raises(ConfigError, match="is a folder of another program: it has no optimizer to keep"):
            start(phase_2(phase_1, tmp_path, checkpoint=str(tmp_path / "hf"), **wrong))


def test_an_imported_run_has_no_training_to_go_on_with(phase_1, tmp_path):
    """It is where another run starts from; its optimizer cannot be kept."""
    exports.export_checkpoint(phase_1[0] / "run", tmp_path / "hf")
    run = str(imports.import_folder(tmp_path / "hf", tmp_path / "imported"))
    with pytest.raises(ConfigError, match=r"holds an imported model .* with \[init\] from = "):
        pretrain(dataclasses.replace(phase_1[1], run_dir=run), force=True)
    with pytest.raises(ConfigError, match=r'has no optimizer to keep, so say optimizer = "reset"'):
        start(phase_2(phase_1, tmp_path, checkpoint=run, optimizer="keep", schedule="restart"))
    begun, _ = start(phase_2(phase_1, tmp_path, checkpoint=run, optimizer="reset", schedule="restart"))
    assert_same(begun.state.params["encoder"], phase_1[2].state.params["encoder"])


def test_a_run_folder_takes_one_training_at_a_time(phase_1, tmp_path):
    config = dataclasses.replace(phase_1[1], run_dir=str(tmp_path / "run"))
    with locked(tmp_path / "run", "busy"), pytest.raises(UserError, match=r"another process is training in .*run;"):
        pretrain(config)
    assert not (tmp_path / "run").exists()
    assert not (phase_1[0] / "run" / ".lock").exists()


def test_missing_data_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(UserError, match="no prepared data here; run `bert-jax prepare"):
        pretrain(tiny_run.config(tmp_path))


def test_a_vocabulary_size_that_is_not_that_of_the_data_is_refused(phase_1, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 7, and the vocabulary of .* has 61 entries"):
        pretrain(tiny_run.config(tmp_path, data=phase_1[1].data, model_vocab_size=7))


def test_rows_past_the_position_table_are_refused(phase_1, tmp_path):
    with pytest.raises(ConfigError, match="32"):
        pretrain(tiny_run.config(tmp_path, data=phase_1[1].data, examples_max_seq_length=64))


@pytest.mark.slow
def test_a_run_without_held_out_text_trains_and_has_no_figures(tmp_path):
    docs = tiny_run.documents(20, 0)
    write_prepared(tmp_path / "prepared", tiny_run.tokenizer(), {"train": docs, "heldout": []})
    result = pretrain(tiny_run.config(tmp_path, train_steps=2, optimizer_warmup_steps=0))
    assert result.evaluation is None and not result.interrupted


def test_the_page_of_a_run_has_its_figures_and_settings(phase_1):
    folder = phase_1[0]
    (folder / "prepared" / "report.txt").write_text("the report of the data")
    page = write_run_page(folder / "run").read_text()
    assert "Held out, step 6" in page and "the report of the data" in page and "hidden_size = 32" in page
    assert "http" not in page and page.count("<polyline") > 5
    with pytest.raises(UserError, match="not a run folder"):
        write_run_page(folder)


def test_records_are_json(phase_1):
    for line in (phase_1[0] / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["split"] in ("train", "heldout") and record["loss"] > 0
        if record["split"] == "train":
            assert 0.5 < record["fill"] <= 1 and record["gradient_norm"] > 0 and record["n/nsp"] > 0


def test_a_flipped_bit_in_a_shard_is_found_before_training(tmp_path):
    """C121: data is held against its digests, not only its sizes, before a run trusts it."""
    tiny_run.prepare(tmp_path / "prepared")
    file = next((tmp_path / "prepared").glob("train-*/tokens.npy"))
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.npy"):
        pretrain(tiny_run.config(tmp_path))
    assert not (tmp_path / "run").exists()
