"""The commands on a tiny run, as a user calls them: results on standard output, all else on standard error."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run

from bert_jax import main as program

COMMANDS = ("prepare", "pretrain", "evaluate", "fill-mask", "import", "export", "report", "verify")
WORDS = [w for w in tiny_run.VOCAB if w.startswith("w")]


@pytest.fixture(scope="module", autouse=True)
def one_device(tmp_path_factory):
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")), tiny_run.one_device():
        yield


@pytest.fixture
def bert(capfd):
    """Call a command; returns (exit code, standard output, standard error)."""

    def call(*arguments):
        capfd.readouterr()
        try:
            code = program.main([str(a) for a in arguments])
        except SystemExit as e:
            code = e.code
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a run file, prepared data and a run of 4 steps that was made with the command."""
    folder = tmp_path_factory.mktemp("main")
    tiny_run.prepare(folder / "prepared")
    tiny_run.write_run_file(
        folder / "launch" / "tiny.toml", tiny_run.config(folder, train_steps=4, train_log_every=2, checkpoint_every=2)
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context((folder / "out").open("w"))))
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context((folder / "err").open("w"))))
        assert program.main(["pretrain", str(folder / "launch" / "tiny.toml"), "--json"]) == 0
    return folder


def test_help_lists_the_commands_on_one_screen(bert):
    code, out, _ = bert("--help")
    assert code == 0 and [c for c in COMMANDS if f" {c} " not in out.replace("\n", " ")] == []
    assert len(out.splitlines()) <= 24


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_on_one_screen(bert, command):
    code, out, _ = bert(command, "--help")
    assert code == 0 and out.startswith(f"usage: bert-jax {command} ")
    assert len(out.splitlines()) <= 24


def test_help_loads_no_library_that_takes_long():
    text = (
        "import sys; from bert_jax.main import main\n"
        "try: main(['pretrain', '--help'])\n"
        "except SystemExit: print(sorted({'jax', 'flax', 'numpy', 'orbax', 'tyro'} & set(sys.modules)))"
    )
    began = time.process_time()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", time.process_time() - began


@pytest.mark.slow
def test_pretrain_prints_the_figures_alone_on_standard_output(work):
    (line,) = (work / "out").read_text().splitlines()
    assert json.loads(line)["n/nsp"] > 0
    err = (work / "err").read_text()
    assert "step 4/4" in err and err.splitlines()[-1] == f"page: {work / 'run' / 'report.html'}"
    assert (work / "run" / "report.html").exists()


def test_the_same_command_on_a_finished_run_gives_the_same_figures(work, bert):
    code, out, err = bert("pretrain", work / "launch" / "tiny.toml", "--json")
    assert code == 0 and out == (work / "out").read_text()
    assert "step 4 of 4 is done: nothing to train" in err


def test_pretrain_lists_its_keys(work, bert):
    code, out, _ = bert("pretrain", work / "launch" / "tiny.toml", "--keys")
    assert code == 0 and "--train.batch-size" in out.replace("_", "-") and "8" in out


def test_evaluate_gives_a_table_or_json(work, bert):
    code, out, _ = bert("evaluate", work / "run", "--json")
    scores = json.loads(out)
    assert code == 0 and scores["step"] == 4 and scores["n/mlm"] > 50
    assert scores["loss"] == pytest.approx(json.loads((work / "out").read_text())["loss"], rel=1e-6)
    code, out, _ = bert("evaluate", f"{work / 'run'}@2")
    assert code == 0 and out.startswith("held out, step 2") and "baseline" in out


def test_fill_mask_answers_for_each_mask(work, bert):
    text = f"{WORDS[0]} [MASK] {WORDS[1]} [MASK]"
    code, out, _ = bert("fill-mask", work / "run", text, f"[MASK] {WORDS[0]}", "--top-k", "2")
    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith("  ")] == [text, f"[MASK] {WORDS[0]}"]
    assert out.count("[MASK] 1:") == 2 and out.count("[MASK] 2:") == 1
    code, out, _ = bert("fill-mask", work / "run", text, "--top-k", "2", "--json")
    (found,) = json.loads(out)
    assert [len(m) for m in found] == [2, 2]


def test_json_has_no_word_for_what_is_not_finite(work, bert, monkeypatch):
    monkeypatch.setattr(
        "bert_jax.evaluate.evaluate", lambda *_: {"loss": math.nan, "baselines": {"a": [math.inf, 1.5]}}
    )
    code, out, _ = bert("evaluate", work / "run", "--json")
    assert code == 0 and json.loads(out, parse_constant=pytest.fail) == {"loss": None, "baselines": {"a": [None, 1.5]}}


def test_a_link_into_the_run_is_not_written_through(work, bert, tmp_path):
    """`--overwrite` is for the file that is named, not for one of the run's that a link leads to."""
    (tmp_path / "in").write_text("a\n")
    (tmp_path / "out.npy").symlink_to(work / "run" / "config.toml")
    before = (work / "run" / "config.toml").read_bytes()
    code, _, err = bert("embed", work / "run", tmp_path / "in", "--out", tmp_path / "out.npy", "--overwrite")
    assert code == 2 and "is there already, in the run's own folder" in err
    assert (work / "run" / "config.toml").read_bytes() == before


@pytest.mark.slow
def test_export_then_import_gives_a_run_with_the_same_figures(work, bert, tmp_path):
    code, out, _ = bert("export", work / "run", tmp_path / "hf")
    assert code == 0 and out == f"{tmp_path / 'hf'}\n"
    assert {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "hf").iterdir()
    }
    assert bert("export", work / "run", tmp_path / "hf")[0] == 2
    assert bert("export", work / "run", tmp_path / "hf", "--overwrite")[0] == 0
    code, out, _ = bert("import", tmp_path / "hf", tmp_path / "again")
    assert code == 0 and out == f"{tmp_path / 'again'}\n"
    answers = [bert("fill-mask", run, f"{WORDS[0]} [MASK]", "--json")[1] for run in (work / "run", tmp_path / "again")]
    assert answers[0] == answers[1]


def test_report_writes_the_page_and_prints_its_path(work, bert):
    (work / "run" / "report.html").unlink()
    code, out, _ = bert("report", work / "run")
    assert code == 0 and Path(out.strip()) == work / "run" / "report.html"
    assert "http" not in Path(out.strip()).read_text()


def test_verify_names_each_step_and_what_is_wrong(work, bert, tmp_path):
    code, out, _ = bert("verify", work / "run")
    assert (code, out) == (0, "step 2: verified\nstep 4: verified\n")
    assert bert("verify", f"{work / 'run'}@4")[:2] == (0, "step 4: verified\n")
    shutil.copytree(work / "run", tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "4" / "meta").rglob("metadata"))
    file.write_bytes(b"x" + file.read_bytes())
    code, out, _ = bert("verify", tmp_path / "run")
    assert code == 1 and out.startswith("step 2: verified\nstep 4: meta/metadata has ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain", "nowhere.toml"), "nowhere.toml: no such file"),
        (("evaluate", "nowhere"), "nowhere: no such folder"),
        (("fill-mask", "nowhere", "[MASK]"), "nowhere"),
        (("export", "nowhere", "out"), "nowhere"),
        (("import", "nowhere", "out"), "nowhere"),
        (("report", "nowhere"), "nowhere: not a run folder"),
        (("verify", "nowhere"), "nowhere: no such folder"),
        (("verify", "nowhere", "--fast"), "unrecognised arguments: --fast"),
        (("fill-mask", "run", "[MASK] \udcff"), "'[MASK] \\udcff' on the command line is not UTF-8"),
        (("pertrain",), "invalid choice: 'pertrain'"),
        ((), "COMMAND"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(bert, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = bert(*arguments)
    assert (code, out) == (2, "") and message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mistakes_with_a_run_at_hand(work, bert, tmp_path):
    run_file = work / "launch" / "tiny.toml"
    for arguments, message in (
        (("pretrain", run_file, "--train.stepz", "9"), "--train.steps"),
        (("pretrain", run_file, "--train.stepz", "9"), "run bert-jax pretrain RUN.toml --keys"),
        (("pretrain", run_file, "--model.hidden_size", "64"), "model.hidden_size: 32 in the checkpoint, 64 now"),
        (("pretrain", run_file, "--data.prepared", tmp_path / "none"), "run `bert-jax prepare"),
        (("fill-mask", work / "run", "no mask here"), "has no [MASK]"),
        (("fill-mask", work / "run", "[MASK]", "--top-k", "0"), "top_k is 0"),
        (("evaluate", f"{work / 'run'}@3"), "there is no step 3; complete steps: 2, 4"),
        (("prepare", run_file), "data.recipe is not set"),
    ):
        code, _, err = bert(*arguments)
        assert code == 2 and message in err, (arguments, err)


def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(work, bert, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = bert("pretrain", work / "launch" / "tiny.toml", "--run_dir", tmp_path / "file" / "run")
    assert code == 2 and err.startswith("error: ") and str(tmp_path / "file") in err


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_program_quietly(work):
    command = [sys.executable, "-m", "bert_jax.main", "verify", str(work / "run")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_prepare_then_pretrain_from_text(bert, tmp_path, monkeypatch):
    """From a text to a trained model, with paths taken from the run file and the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "launch").mkdir()
    line = "The quick brown fox jumps over the lazy dog .\nIt was not seen again .\nNo one knew why .\n\n"
    (tmp_path / "data" / "text.txt").write_text("".join(line.replace("fox", "fox " * (i + 1)) for i in range(30)))
    (tmp_path / "data" / "r.toml").write_text('name = "r"\nheldout = 0.3\n[[sources]]\nfiles = ["text.txt"]\n')
    (tmp_path / "launch" / "a.toml").write_text(
        'preset = "bert-tiny"\n[data]\nrecipe = "../data/r.toml"\n[tokenizer]\nvocab_size = 90\nmin_frequency = 1\n'
        "[model]\nhidden_size = 32\nnum_hidden_layers = 1\nnum_attention_heads = 2\nintermediate_size = 64\n"
        "[examples]\nmax_seq_length = 32\n[train]\nsteps = 2\nbatch_size = 8\n"
    )
    code, out, err = bert("prepare", "launch/a.toml", "--workers", "1", "--json")
    assert code == 0, err
    assert json.loads(out)
    # What was changed after preparation does not pass in silence.
    code, _, err = bert("pretrain", "launch/a.toml", "--tokenizer.lowercase", "False")
    assert code == 2 and "tokenizer.lowercase: true in the prepared data, false now" in err and "--force" in err
    recipe = (tmp_path / "data" / "r.toml").read_text()
    (tmp_path / "data" / "r.toml").write_text(recipe.replace("0.3", "0.2") + 'sentences = "split"\n')
    code, _, err = bert("pretrain", "launch/a.toml")
    assert code == 2 and "recipe.heldout: 0.3 in the prepared data, 0.2 now" in err
    assert 'recipe.inputs.text.txt.sentences: "lines" in the prepared data, "split" now' in err
    assert not (tmp_path / "runs").exists()
    (tmp_path / "data" / "r.toml").write_text(recipe)
    code, out, err = bert("pretrain", "launch/a.toml", "--train.log_every", "1")
    assert (code, out) == (0, "") and "page: runs/a/report.html" in err
    assert bert("evaluate", "runs/a")[0] == 0
    # The run's own settings, and a recipe of its own choice.
    code, out, _ = bert("evaluate", "runs/a", "--data", "data/r.toml", "--json")
    assert code == 0 and json.loads(out)["n/nsp"] > 20
    assert bert("pretrain", "runs/a/config.toml")[0] == 0
