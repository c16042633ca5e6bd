"""The run files of `launch/runs`: every one loads, opens like a lab note, and says what its settings give."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

import bert_jax.run_file
from transformer_jax.translation import run_file
from transformer_jax.translation.model import count_parameters

ROOT = Path(__file__).resolve().parent.parent
RUNS = sorted((ROOT / "launch" / "runs").glob("*.toml"))
TRANSLATION = [p for p in RUNS if tomllib.loads(p.read_text(encoding="utf-8"))["preset"].startswith("transformer")]
PAPER = [p for p in TRANSLATION if "wmt14" in p.name]
# Vaswani et al. 2017, table 2.
PUBLISHED = {"base_wmt14_en_de": "27.3", "big_wmt14_en_de": "28.4", "base_wmt14_en_fr": "38.1",
             "big_wmt14_en_fr": "41.8"}  # fmt: skip


def note(path):
    """The comment that a run file opens with."""
    return path.read_text(encoding="utf-8").split("\npreset")[0]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_file_loads_and_names_a_recipe_that_is_there(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    program = run_file if path in TRANSLATION else bert_jax.run_file
    config = program.load_run(path.relative_to(ROOT))
    assert Path(config.data.recipe).is_file()
    assert config.run_dir == f"runs/{path.stem}" and config.data.prepared.startswith("prepared/")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_file_opens_with_its_command_and_what_to_expect(path):
    text = note(path)
    assert f"launch/runs/{path.name}" in text
    for part in ("# Hardware ", "# Batch ", "# Steps ", "# Tokens ", "# Result "):
        assert part in text, part


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_arithmetic_of_the_papers_runs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, text = run_file.load_run(path), note(path)
    name = path.stem.removeprefix("transformer_")
    places = config.train.batch_size * config.examples.max_target_length
    assert config.examples.max_source_length == config.examples.max_target_length
    assert f"{places:,} + {places:,}" in re.sub(r"\s*\n#\s*", " ", text) and 0.93 < 25_000 / places < 0.95
    assert config.train.steps == (300_000 if name.startswith("big") else 100_000)
    tokens = config.train.steps * 25_000
    assert f"{config.train.steps:,} x 25,000 = {tokens / 1e9:.1f} G" in text
    assert f"BLEU {PUBLISHED[name]} on newstest2014" in text and "table 2" in text and "not yet run" in text
    pieces = config.tokenizer.vocab_size
    model = dataclasses.replace(config.model, source_vocab_size=pieces, target_vocab_size=pieces)
    assert f"{count_parameters(model)['total']:,} parameters with {pieces:,} joint pieces" in text
    kept = 12 * count_parameters(model)["total"] * config.checkpoint.keep_last / 1e9
    assert f"{kept:.{1 if kept < 10 else 0}f} GB" in text
    rate = config.model.hidden_size**-0.5 * config.optimizer.warmup_steps**-0.5
    assert f"a rate of {rate:.2g}" in text


def test_the_settings_of_the_papers_runs_are_the_papers(monkeypatch):
    """Vaswani et al. 2017, sections 5.3, 5.4 and 6.1."""
    monkeypatch.chdir(ROOT)
    assert len(PAPER) == 4
    for path in PAPER:
        config = run_file.load_run(path)
        big, german = "big" in path.name, path.name.endswith("en_de.toml")
        optimizer = config.optimizer
        assert (optimizer.name, optimizer.schedule, optimizer.warmup_steps) == ("adam", "noam", 4000)
        assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.learning_rate) == (0.9, 0.98, 1e-9, 1.0)
        assert (optimizer.weight_decay, optimizer.clip_norm, config.objective.label_smoothing) == (0.0, 0.0, 0.1)
        assert config.model.hidden_dropout_prob == (0.3 if big and german else 0.1)
        assert config.tokenizer.vocab_size == (37_000 if german else 32_000) and config.tokenizer.joint
        assert config.checkpoint.keep_last == (20 if big else 5)
        assert config.examples.pack and config.model.embeddings == "shared"
