"""The run files of transformer-jax: presets, files beside them, and what may change when a run goes on."""

import dataclasses

import pytest
import tiny_translation_run as tiny

from transformer_jax import config as core
from transformer_jax.config import ConfigError
from transformer_jax.translation import run_file
from transformer_jax.translation.presets import PRESETS


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
    config = run_file.load_run(write('preset = "transformer-big"\n[model]\nhidden_dropout_prob = 0.1\n'))
    assert config.model == dataclasses.replace(PRESETS["transformer-big"], hidden_dropout_prob=0.1)
    assert (config.run_dir, config.data.prepared) == ("runs/small", "prepared/small")
    assert run_file.load_run(write("")).model == PRESETS["transformer-base"]


def test_files_are_taken_from_the_run_file_and_what_commands_make_from_the_current_folder(write):
    config = run_file.load_run(
        write(
            '[data]\nrecipe = "../data/x.toml"\n[tokenizer]\nsource_model = "a.model"\n[init]\nfrom = "runs/other"\n'
            'optimizer = "reset"\nschedule = "restart"\n'
        )
    )
    assert (config.data.recipe, config.tokenizer.source_model) == ("data/x.toml", "runs/a.model")
    assert config.init.checkpoint == "runs/other"
    init = '[init]\nencoder_from = "runs/bert"\n[model]\nencoder_embeddings = "bert"\nembeddings = "separate"\n'
    assert run_file.load_run(write(init)).init.encoder_from == "runs/bert"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[objective]\nsmoothing = 0.1\n", [], r"unknown key `objective\.smoothing`; did you mean"),
        ('preset = "transformer-bse"\n', [], r"did you mean `transformer-base`"),
        ("", ["--preset", "bert-base"], r"--preset: unknown preset 'bert-base'"),
        ('[init]\nfrom = "a"\nencoder_from = "b"\n', [], "both a checkpoint and encoder_from"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_allowed(write, text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run_file.load_run(write(text), arguments)


def stored_and(tmp_path, **changes):
    return core.to_builtins(tiny.config(tmp_path)), tiny.config(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_hidden_size": 32},
        {"model_num_decoder_layers": 2},
        {"model_norm": "pre"},
        {"model_embeddings": "untied"},
        {"model_scale_embedding": False},
        {"optimizer_name": "adamw"},
    ],
)
def test_another_model_is_refused_even_when_forced(tmp_path, changes):
    """C094."""
    for force in (False, True):
        with pytest.raises(ConfigError, match="different model or optimizer"):
            run_file.check_resume(*stored_and(tmp_path, **changes), force)


@pytest.mark.parametrize(
    "changes",
    [
        {"train_seed": 1},
        {"objective_label_smoothing": 0.0},
        {"examples_pack": False},
        {"optimizer_warmup_steps": 3},
        {"model_hidden_dropout_prob": 0.0},
    ],
)
def test_what_would_silently_be_another_run_is_refused_unless_forced(tmp_path, changes):
    """C094."""
    stored, config = stored_and(tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"would silently be another run(.|\n)*--force"):
        run_file.check_resume(stored, config, force=False)
    assert len(run_file.check_resume(stored, config, force=True)) == 1


def test_what_is_harmless_is_listed(tmp_path):
    changes = {"train_batch_size": 8, "validation_lines": 3, "data_prepared": "/moved", "checkpoint_keep_best": 2}
    assert len(run_file.check_resume(*stored_and(tmp_path, **changes), force=False)) == 4
