"""The commands of `transformer-jax` as a user calls them: results on standard output, all else on standard error."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run
import tiny_translation_run as tiny

from transformer_jax.translation import main as program

COMMANDS = ("prepare", "train", "evaluate", "score", "average", "report", "verify")


@pytest.fixture(scope="module", autouse=True)
def one_device(tmp_path_factory):
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")), tiny_run.one_device():
        yield


@pytest.fixture
def call(capfd):
    """Call a command; returns (exit code, standard output, standard error)."""

    def run(*arguments):
        capfd.readouterr()
        try:
            code = program.main([str(a) for a in arguments])
        except SystemExit as e:
            code = e.code
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder in which two files of sentences became a run of 4 steps, with the commands."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "data").mkdir()
    for use, count, seed in (("train", 60, 1), ("validation", 12, 2), ("test", 12, 3)):
        for side, texts in zip(("en", "de"), zip(*tiny.pairs(count, seed), strict=True), strict=True):
            (folder / "data" / f"{use}.{side}").write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    recipe = 'name = "tiny"\nlicense = "CC0-1.0"\nsource_language = "en"\ntarget_language = "de"\n'
    for use in ("train", "validation", "test"):
        recipe += f'[[sources]]\nformat = "lines"\nsource = ["{use}.en"]\ntarget = ["{use}.de"]\nuse = "{use}"\n'
    (folder / "data" / "tiny.toml").write_text(recipe)
    settings = tiny.config(
        folder, data_recipe="../data/tiny.toml", train_steps=4, train_log_every=2, checkpoint_every=2
    )
    tiny.write_run_file(folder / "launch" / "tiny.toml", settings)
    with contextlib.ExitStack() as stack:
        for name, redirect in (("out", contextlib.redirect_stdout), ("err", contextlib.redirect_stderr)):
            stack.enter_context(redirect(stack.enter_context((folder / name).open("w"))))
        run_file = str(folder / "launch" / "tiny.toml")
        assert program.main(["prepare", run_file, "--workers", "1"]) == 0
        assert program.main(["train", run_file, "--json"]) == 0
    return folder


def test_help_lists_the_commands_on_one_screen(call):
    code, out, _ = call("--help")
    assert code == 0 and [c for c in COMMANDS if f" {c} " not in out.replace("\n", " ")] == []
    assert len(out.splitlines()) <= 24


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_on_one_screen(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0 and out.startswith(f"usage: transformer-jax {command} ")
    assert len(out.splitlines()) <= 24


def test_help_loads_no_library_that_takes_long():
    text = (
        "import sys; from transformer_jax.translation.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: print(sorted({'jax', 'flax', 'numpy', 'orbax', 'tyro', 'sacrebleu'} & set(sys.modules)))"
    )
    began = time.process_time()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", time.process_time() - began


@pytest.mark.slow
def test_prepare_and_train_print_results_alone_on_standard_output(work):
    *report, line = (work / "out").read_text().splitlines()
    assert json.loads(line)["n/translation"] > 20
    assert any(re.search(r"train +60$", row) for row in report)
    err = (work / "err").read_text()
    assert "step 4/4" in err and err.splitlines()[-1] == f"page: {work / 'run' / 'report.html'}"
    page = (work / "run" / "report.html").read_text()
    assert "hidden_size = 16" in page and "Held out, step 4" in page and "http" not in page


def test_the_same_command_on_a_finished_run_gives_the_same_figures(work, call):
    code, out, err = call("train", work / "launch" / "tiny.toml", "--json")
    assert code == 0 and out.strip() == (work / "out").read_text().splitlines()[-1]
    assert "step 4 of 4 is done: nothing to train" in err


def test_train_lists_its_keys(work, call):
    code, out, _ = call("train", work / "launch" / "tiny.toml", "--keys")
    assert code == 0 and "--objective.label-smoothing" in out.replace("_", "-")


@pytest.mark.slow
def test_evaluate_gives_a_table_or_json(work, call):
    code, out, _ = call("evaluate", work / "run", "--split", "validation", "--loss-only", "--json")
    figures = json.loads(out)
    assert code == 0 and figures["step"] == 4 and figures["pairs"] == 12
    trained = json.loads((work / "out").read_text().splitlines()[-1])
    assert figures["translation_nll"] == pytest.approx(trained["translation_nll"], rel=1e-6)
    assert "bleu" not in figures
    code, out, _ = call("evaluate", f"{work / 'run'}@2", "--beam", "1")
    assert code == 0 and out.startswith("test pairs, step 2: ") and "perplexity" in out
    assert re.search(r"^BLEU +\d+\.\d\d  nrefs:1\|", out, re.MULTILINE) and "12 lines" in out


@pytest.mark.slow
def test_average_makes_a_run_that_the_other_commands_take(work, call, tmp_path):
    code, out, _ = call("average", work / "run", "--last", "2", "--out", tmp_path / "mean")
    assert (code, out) == (0, f"{tmp_path / 'mean'}\n")
    assert call("verify", tmp_path / "mean")[:2] == (0, "step 4: verified\n")
    assert call("evaluate", tmp_path / "mean", "--loss-only")[0] == 0
    code, out, _ = call("report", tmp_path / "mean")
    assert code == 0 and Path(out.strip()).exists()
    named = [f"{work / 'run'}@2", f"{work / 'run'}@4"]
    assert call("average", *named, "--out", tmp_path / "named")[0] == 0
    first, second = (json.loads(call("evaluate", tmp_path / n, "--loss-only", "--json")[1]) for n in ("mean", "named"))
    assert first["loss"] == second["loss"]


def test_score_prints_figures_with_signatures_and_notes(call, tmp_path):
    """C065, C107: the signature is always there; notes go to standard error."""
    (tmp_path / "hyp").write_text("Tom &amp; Ann went home .\nyes\n")
    (tmp_path / "ref").write_text("Tom & Ann went home.\n\n")
    code, out, err = call("score", tmp_path / "hyp", tmp_path / "ref", "--language", "de")
    assert code == 0 and re.search(r"^BLEU +\d+\.\d\d  nrefs:1\|case:mixed", out) and "chrF2" in out
    assert "compound-split BLEU" in out and "2 lines" in out
    assert err.count("note: ") == 3 and "references are empty" in err
    code, out, _ = call("score", tmp_path / "hyp", tmp_path / "ref", "--json")
    assert code == 0 and json.loads(out)["lines"] == 2


def test_the_card_of_an_export_names_the_licence_of_the_text(work, call, tmp_path):
    assert call("export", work / "run", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| licence of the text | CC0-1.0 |" in card and "| languages | en to de |" in card


def test_a_file_of_the_run_is_not_written_over(work, call, tmp_path):
    (tmp_path / "in").write_text("a\n")
    before = (work / "run" / "config.toml").read_bytes()
    for run in (work / "run", f"{work / 'run'}@2", work / "run" / "checkpoints", work / "run" / "checkpoints" / "2"):
        code, _, err = call("translate", run, "--input", tmp_path / "in", "--output", work / "run" / "config.toml")
        assert code == 2 and "config.toml is there already, in the run's own folder" in err
    for new in (work / "run" / "checkpoints" / "new", work / "run" / "checkpoints" / "2" / "new"):
        code, _, err = call("translate", work / "run", "--input", tmp_path / "in", "--output", new)
        assert code == 2 and "new lies among the run's checkpoints" in err
    (tmp_path / "loop").symlink_to("loop")
    code, _, err = call("translate", work / "run", "--input", tmp_path / "in", "--attention", tmp_path / "loop")
    assert code == 2 and "leads back to itself" in err
    assert (work / "run" / "config.toml").read_bytes() == before


def test_a_line_that_is_waited_for_does_not_abort_the_end():
    """Python ends the process with SIGABRT if a thread waits in `sys.stdin` as it shuts down."""
    code = """
import time
from transformer_jax.translation.main import _standard_input
from transformer_jax.translation.stream import from_stream

print(from_stream(_standard_input())(True, 1), flush=True)
time.sleep(0.2)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"['one']\n"
        assert process.wait(60) == 0 and process.stderr.read() == b""


def test_verify_names_what_is_wrong(work, call, tmp_path):
    assert call("verify", work / "run")[:2] == (0, "step 2: verified\nstep 4: verified\n")
    shutil.copytree(work / "run", tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "4" / "meta").rglob("metadata"))
    file.write_bytes(b"x" + file.read_bytes())
    code, out, _ = call("verify", tmp_path / "run")
    assert code == 1 and out.startswith("step 2: verified\nstep 4: meta/metadata has ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.toml"), "nowhere.toml: no such file"),
        (("prepare", "nowhere.toml"), "nowhere.toml: no such file"),
        (("evaluate", "nowhere"), "nowhere: no such folder"),
        (("score", "nowhere", "nowhere"), "nowhere: no such file"),
        (("average", "nowhere", "--out", "x"), "one checkpoint has no mean"),
        (("average", "nowhere", "elsewhere", "--out", "x"), "nowhere: no such folder"),
        (("report", "nowhere"), "nowhere: not a run folder"),
        (("verify", "nowhere"), "nowhere: no such folder"),
        (("verify", "nowhere", "--fast"), "unrecognised arguments: --fast"),
        (("translate", "nowhere", "--nbest", "2"), "unrecognised arguments: --nbest 2; did you mean --n-best?"),
        (("translate", "nowhere", "--beam-size", "2"), "unrecognised arguments: --beam-size 2; did you mean --beam?"),
        (("translate", "nowhere", "--sample", "--beam", "3"), "--beam is of searching"),
        (("translate", "nowhere", "--alpha", "1e300"), "alpha is 1e+300; it must be between -10 and 10"),
        (
            ("translate", "nowhere", "--sample", "--temperature", "1e-40"),
            "temperature is 1e-40; it must be from 0.001 to 1000 (greedy search is a beam of 1)",
        ),
        (("translate", "nowhere", "--attention", "/proc/page.html"), "/proc: no file can be made there"),
        (("trian",), "invalid choice: 'trian'"),
        ((), "COMMAND"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mistakes_with_a_run_at_hand(work, call, tmp_path):
    run_file = work / "launch" / "tiny.toml"
    (tmp_path / "two").write_text("a\nb\n")
    (tmp_path / "one").write_text("a\n")
    for arguments, message in (
        (("train", run_file, "--train.stepz", "9"), "--train.steps"),
        (("train", run_file, "--model.norm", "pre"), "model.norm: 'post' in the checkpoint, 'pre' now"),
        (("train", run_file, "--preset", "transformer-bas"), "did you mean `transformer-base`"),
        (("train", run_file, "--data.prepared", tmp_path / "none"), "run `transformer-jax prepare"),
        (
            ("train", run_file, "--model.source_vocab_size", "60", "--tokenizer.vocab_size", "60"),
            "tokenizer.vocab_size: 44 in the prepared data, 60 now",
        ),
        (("train", run_file, "--tokenizer.vocab_size", "60"), "tokenizer.vocab_size: 44 in the prepared data, 60 now"),
        (("train", run_file, "--validation.lines", "30"), "validation.lines is 30, and"),
        (("evaluate", f"{work / 'run'}@3"), "there is no step 3; complete steps: 2, 4"),
        (("average", work / "run", "--last", "3", "--out", tmp_path / "x"), "fewer than --last 3"),
        (("score", tmp_path / "two", tmp_path / "one"), "has 2 lines and"),
        (("score", tmp_path / "one", tmp_path / "one", "--tokenize", "moses"), "must be one of 13a"),
        (("train", run_file, "--train.steps", str(10**19)), f"train.steps is {10**19}"),
        (("train", "a\0b.toml"), "cannot be read: "),
        (("translate", work / "run", "--n-best", "6"), "raise beam_size (--beam)"),
        (("translate", work / "run", "--top-k", "6"), "add sample (--sample)"),
        (("translate", work / "run", "--input", tmp_path / "one", "--attention", tmp_path / "one"), "written over"),
        (
            ("translate", work / "run", "--output", tmp_path / "o", "--attention", f"{tmp_path}/../{tmp_path.name}/o"),
            "is named for two things to write",
        ),
    ):
        code, _, err = call(*arguments)
        assert code == 2 and message in err, (arguments, err)
    assert (tmp_path / "one").read_text() == "a\n" and not (tmp_path / "o").exists()


@pytest.mark.slow
def test_streams_that_are_closed_are_empty_ones(work: Path) -> None:
    program_of = [sys.executable, "-m", "transformer_jax.translation.main", "translate", str(work / "run")]
    for closing, said in (("<&-", "0 lines in"), (">&-", "1 lines in")):
        command = ["sh", "-c", f'echo bal | "$0" "$@" {closing}', *program_of]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and said in done.stderr and not done.stdout, done.stderr


def test_no_line_is_translated_to_nothing_unless_that_is_asked_for() -> None:
    """With a search that is not cut short, the empty translation can be the likeliest of a long line."""
    parse = program._parser().parse_args
    assert parse(["translate", "run"]).min_length == 1
    assert parse(["translate", "run", "--min-length", "0"]).min_length == 0
