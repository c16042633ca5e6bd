"""The run files of `launch/runs/ablations`: each changes what it says and nothing else, small and at full size."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import bert_jax.run_file
from bert_jax import examples
from transformer_jax import config as core

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "launch" / "runs" / "ablations"
RUNS = sorted(FOLDER.glob("*.toml"))
VOCABULARY = ["--model.vocab_size", "8000"]


def note(path):
    """The comment that a run file opens with, continued lines joined."""
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").split("\npreset")[0].splitlines()]
    return "\n".join(lines).replace("\\\n", " ")


def said(path):
    """What the note says is changed, by key."""
    text = re.search(r"^Changes +(.*?)\n(?=[A-Z])", note(path), re.DOTALL | re.MULTILINE)[1].replace("\n", " ")
    if text.startswith("none"):
        return {}
    return {k: ast.literal_eval(v) for k, v in (part.split(" = ") for part in text.split(", "))}


def changed(config, base):
    found = core.differences(core.to_builtins(base), core.to_builtins(config))
    return {k: new for k, (_, new) in found.items() if k not in ("run_dir", "preset")}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_changes_what_its_note_says_and_nothing_else(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base, config = (bert_jax.run_file.load_run(p, VOCABULARY) for p in (FOLDER / "base.toml", path))
    examples.check(config.examples, config.model)
    assert Path(config.data.recipe).is_file()
    expected = said(path)
    if "data.recipe" in expected:  # a run file names it as seen from its own folder
        expected["data.recipe"] = str(Path("launch/runs/ablations") / expected["data.recipe"])
    assert changed(config, base).keys() <= expected.keys()  # a value may be base's own, as of two layers
    for key, value in expected.items():
        section, name = key.split(".")
        found = core.to_builtins(config)[section][name]
        assert found == value or Path(str(found)).resolve() == Path(str(value)).resolve(), key
    assert f"bert-jax pretrain launch/runs/ablations/{path.name}" in note(path)


@pytest.mark.parametrize("path", [p for p in RUNS if p.stem != "base"], ids=lambda path: path.stem)
def test_the_command_of_the_full_size_loads_and_changes_the_same_settings(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (line,) = re.findall(r"^bert-jax pretrain (launch/runs/bert_.*)$", note(path), re.MULTILINE)
    file, *arguments = shlex.split(line)
    base, config = (bert_jax.run_file.load_run(file, [*VOCABULARY, *more]) for more in ([], arguments))
    examples.check(config.examples, config.model)
    full, small = changed(config, base), {k: v for k, v in said(path).items() if not k.startswith("data.")}
    own = {k for k in small if k.startswith("examples.") or k == "model.context"} - {"examples.dupe_factor"}
    assert {k: full.get(k, core.to_builtins(config)["examples"].get(k.split(".")[1])) for k in own} == {
        k: small[k] for k in own
    }
    for key in small.keys() - own - {"examples.dupe_factor"}:
        ratio = {"model.num_hidden_layers": 3, "model.num_attention_heads": 1}.get(key, 8)
        section, name = key.split(".")
        assert core.to_builtins(config)[section][name] == small[key] * ratio
    assert config.run_dir == f"runs/{path.stem}"


def test_the_script_runs_every_file_and_names_no_other(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    try:
        import ablations

        assert set(ablations.ORDER) == {path.stem for path in RUNS}
    finally:
        sys.modules.pop("ablations", None)
