"""Run files and overrides: what they mean, what is refused and how, and what may change when a run goes on."""

import dataclasses
from pathlib import Path

import pytest
import tiny_run

from bert_jax import pretrain, run_file
from bert_jax.presets import PRESETS
from bert_jax.run_file import load_run
from transformer_jax import config as core
from transformer_jax.config import ConfigError
from transformer_jax.shards import Shards


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text, name="runs/small.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path.relative_to(tmp_path)

    return run


def test_a_run_file_states_differences_from_its_preset(write):
    config = load_run(write('preset = "bert-small"\n[model]\nhidden_dropout_prob = 0.0\n[train]\nsteps = 7\n'))
    assert config.model == dataclasses.replace(PRESETS["bert-small"], hidden_dropout_prob=0.0)
    assert config.train == core.TrainConfig(steps=7)
    assert (config.run_dir, config.data.prepared) == ("runs/small", "prepared/small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 7\n", r"runs/small\.toml: unknown key `train\.step`; did you mean `train\.steps`\?"),
        ("[trian]\nsteps = 7\n", r"unknown key `trian`; did you mean `train`\?"),
        ('preset = "bert-bse"\n', r"runs/small\.toml: unknown preset 'bert-bse'; did you mean `bert-base`\?"),
        ('preset = ["bert-base"]\n', "unknown preset"),
        ('[train]\nsteps = "7"\n', r"small\.toml: .*int.*train\.steps"),
        ("init = 3\n", r"small\.toml: .*init"),
        ('[mesh]\npreset = "zero"\n', r"zero.*mesh\.preset"),
        ("[train]\nbatch_size = 10\naccumulate = 3\n", r"batch_size 10 does not divide into train\.accumulate 3 parts"),
        ("[train]\nsteps = 0\n", r"train\.steps is 0; it must be at least 1"),
        ("[model]\nhidden_size = 100\nnum_attention_heads = 3\n", "hidden_size 100 does not divide"),
        ("[train\n", "not valid TOML"),
        ("[model]\nnum_attention_heads = 0\n", r"small\.toml: num_attention_heads is 0; it must be at least 1"),
        ("[model]\nvocab_multiple = 0\n", "vocab_multiple is 0; it must be at least 1"),
        ("[model]\ntype_vocab_size = 0\n", "type_vocab_size is 0; it must be at least 1"),
        ("[tokenizer]\nmax_input_chars_per_word = 0\n", r"tokenizer\.max_input_chars_per_word is 0"),
        ("[tokenizer]\nunused_tokens = -5\n", r"tokenizer\.unused_tokens is -5; it must be at least 0"),
    ],
)
def test_a_mistake_names_the_file_the_key_and_what_is_allowed(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_run(write(text))


def test_a_missing_file_names_the_nearest(write):
    write("", "runs/demo.toml")
    with pytest.raises(ConfigError, match=r"runs/dem\.toml: no such file; did you mean runs/demo\.toml\?"):
        load_run("runs/dem.toml")


def test_paths_are_taken_from_the_run_file_and_outputs_from_the_current_folder(write, tmp_path):
    text = '[data]\nrecipe = "../../data/x.toml"\nprepared = "out/x"\n[tokenizer]\nvocab_file = "vocab.txt"\n'
    config = load_run(write(text, "launch/runs/a.toml"))
    assert config.data.recipe == "data/x.toml" and config.tokenizer.vocab_file == "launch/runs/vocab.txt"
    assert config.data.prepared == "out/x" and config.run_dir == "runs/a"
    absolute = load_run(write(f'[data]\nrecipe = "{tmp_path}/x.toml"\n'))
    assert absolute.data.recipe == f"{tmp_path}/x.toml"


def test_init_from_is_said_as_in_the_design(write):
    config = load_run(write('[init]\nfrom = "runs/phase1"\noptimizer = "keep"\nschedule = "continue"\n'))
    assert config.init == dataclasses.replace(config.init, checkpoint="runs/phase1", optimizer="keep")


def test_the_command_line_has_the_last_word(write):
    path = write("[train]\nsteps = 7\nbatch_size = 16\n")
    config = load_run(path, ["--train.steps", "9", "--mesh.preset", "fsdp", "--examples.pack", "False"])
    assert (config.train.steps, config.train.batch_size) == (9, 16)
    assert config.mesh.preset == "fsdp" and config.examples.pack is False


@pytest.mark.parametrize(("said", "meant"), [("false", False), ("False", False), ("true", True)])
def test_booleans_are_said_as_in_a_file_too(write, said, meant):
    assert load_run(write(""), ["--examples.pack", said]).examples.pack is meant
    assert load_run(write(""), ["--data.recipe", "true"]).data.recipe == "true"


def test_a_preset_on_the_command_line_is_the_model_and_not_just_its_name(write):
    path = write('preset = "bert-tiny"\n[model]\nhidden_dropout_prob = 0.0\n')
    for arguments in (["--preset", "bert-small"], ["--train.seed", "3", "--preset=bert-small", "--train.steps", "9"]):
        config = load_run(path, arguments)
        assert config.preset == "bert-small"
        assert config.model == dataclasses.replace(PRESETS["bert-small"], hidden_dropout_prob=0.0)
    assert (config.train.seed, config.train.steps) == (3, 9)
    with pytest.raises(ConfigError, match="--preset: unknown preset 'bert-smal'; did you mean `bert-small`"):
        load_run(path, ["--preset", "bert-smal"])


@pytest.mark.parametrize("name", ["run_dir", "data.prepared"])
def test_a_folder_without_a_name_is_not_the_current_one(write, name):
    with pytest.raises(ConfigError, match=f"{name} is empty; name a folder"):
        load_run(write(""), [f"--{name}", ""])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--train.setps", "9"], "train.steps"), (["--train.steps", "many"], "many"), (["--mesh.preset", "x"], "fsdp")],
)
def test_a_mistyped_override_ends_with_2_and_a_hint(write, capsys, arguments, message):
    with pytest.raises(SystemExit) as e:
        load_run(write(""), arguments)
    assert e.value.code == 2
    assert message in capsys.readouterr().err


def test_an_override_out_of_range_is_refused_as_in_a_file(write):
    with pytest.raises((ConfigError, SystemExit)):
        load_run(write(""), ["--train.steps", "0"])


def test_the_config_of_the_run_folder_gives_the_same_run_again(tmp_path, monkeypatch):
    """Also seen from another folder than the run file's, and with files named beside it."""
    monkeypatch.chdir(tmp_path)
    tiny_run.prepare(tmp_path / "prepared" / "a")
    path = tmp_path / "launch" / "a.toml"
    path.parent.mkdir()
    path.write_text('preset = "bert-tiny"\n[data]\nrecipe = "../data/r.toml"\n[tokenizer]\nvocab_file = "v.txt"\n')
    shards = Shards.open(tmp_path / "prepared" / "a", "train")
    config = pretrain.resolve(dataclasses.replace(load_run("launch/a.toml"), run_dir="runs/deep/a"), shards)
    pretrain.write_run_files(tmp_path / "runs" / "deep" / "a", config, shards)
    again = load_run("runs/deep/a/config.toml")
    assert again == config
    assert again.model.vocab_size == len(tiny_run.VOCAB) and again.data.recipe == "data/r.toml"


def test_defaults_are_written_out_also_by_a_config_that_was_loaded():
    loaded = core.load(type(tiny_run.MODEL), {"vocab_size": 5}, "x")
    assert core.to_builtins(loaded) == core.to_builtins(type(tiny_run.MODEL)(vocab_size=5))


def stored_and(tmp_path, **changes):
    config = tiny_run.config(tmp_path)
    return core.to_builtins(config), tiny_run.config(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"model_hidden_size": 64}, {"model_num_hidden_layers": 2}, {"optimizer_name": "lamb"}, {"model_vocab_size": 9}],
)
def test_another_model_is_refused_even_when_forced(tmp_path, changes):
    """C094."""
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"different model or optimizer:\n  \w+\.\w+: .* in the checkpoint, "):
            run_file.check_resume(*stored_and(tmp_path, **changes), force)


@pytest.mark.parametrize(
    "changes",
    [
        {"train_seed": 1},
        {"examples_masked_lm_prob": 0.2},
        {"examples_max_seq_length": 16},
        {"optimizer_learning_rate": 1.0},
        {"model_hidden_dropout_prob": 0.0},
        {"init_checkpoint": "elsewhere"},
    ],
)
def test_what_would_silently_be_another_run_is_refused_unless_forced(tmp_path, changes):
    """C094."""
    stored, config = stored_and(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"would silently be another run(.|\n)*--force"):
        run_file.check_resume(stored, config, force=False)
    assert len(run_file.check_resume(stored, config, force=True)) == 1


def test_what_is_harmless_is_listed(tmp_path):
    """C094: a changed batch size is a warning."""
    changes = {"train_batch_size": 16, "mesh_preset": "fsdp", "train_log_every": 1, "model_remat": "full"}
    lines = run_file.check_resume(*stored_and(tmp_path, **changes), force=False)
    assert "train.batch_size: 8 in the checkpoint, 16 now" in lines and len(lines) == 4
    assert run_file.check_resume(*stored_and(tmp_path), force=False) == []
    (line,) = run_file.check_resume(*stored_and(tmp_path, train_steps=30), force=False)
    assert line.endswith("30 now, and the learning rate's schedule with it")


def test_where_text_and_vocabulary_lie_may_change(tmp_path):
    """What they hold is compared; a run may be gone on with from another folder."""
    changes = {"data_recipe": "../data/x.toml", "data_prepared": "/moved", "tokenizer_vocab_file": "../v.txt"}
    assert len(run_file.check_resume(*stored_and(tmp_path, **changes), force=False)) == 3


def test_a_key_that_is_newer_than_the_checkpoint_counts_as_its_default():
    """A run goes on under a later version of the program, which did the same before it had the key."""
    config = tiny_run.config(Path.cwd())
    stored = core.to_builtins(config)
    del stored["model"]["context"], stored["examples"]["objective"]
    assert run_file.check_resume(stored, config, False) == []
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, context="left"))
    with pytest.raises(ConfigError, match=r"model\.context: None in the checkpoint, 'left' now"):
        run_file.check_resume(stored, other, False)
