"""The loop that starts a run again: by which exit codes, after which pause, and when it gives up."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from stand_ins import ROOT, call, stand_in

from transformer_jax import exit_codes, step_folders

LAUNCH = ROOT / "launch"


def load_restart():
    spec = importlib.util.spec_from_file_location("restart", LAUNCH / "restart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["restart"] = module  # where `dataclasses` looks up annotations
    spec.loader.exec_module(module)
    return module


restart = load_restart()


LIMITS = restart.Limits()


def test_the_loop_knows_the_programs_exit_codes():
    assert (restart.DONE, restart.FAULT) == (exit_codes.DONE, exit_codes.FAULT)
    assert (restart.MISTAKE, restart.RESTART) == (exit_codes.MISTAKE, exit_codes.RESTART)


@pytest.mark.parametrize("code", [0, 2, 130, 143, 3, 74, 76, 126, 127, 128, 200])
def test_a_stopped_or_hopeless_run_is_not_started_again(code):
    _, pause, why = restart.after(code, restart.Tally(), 7, LIMITS)
    assert pause < 0
    assert restart.gave_up(code, why) == code


@pytest.mark.parametrize("code", [1, 75, 129, 131, 134, 137, 139])
def test_a_run_that_failed_is_started_again(code):
    assert restart.after(code, restart.Tally(), 0, LIMITS)[1] == LIMITS.pause


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_checkpoint():
    tally, limits, pauses = restart.Tally(), restart.Limits(no_progress=9), []
    for step in (0, 0, 0, 0, 0, 0, 10, 10):
        tally, pause, _ = restart.after(75, tally, step, limits)
        pauses.append(pause)
    assert pauses == [5, 10, 20, 40, 80, 120, 5, 10]


def test_pauses_are_shorter_than_hosts_wait_for_one_another():
    from transformer_jax.config import HostsConfig

    assert LIMITS.longest < HostsConfig().join_limit


def test_a_complete_step_is_what_the_programs_take_for_one(tmp_path):
    for name in ("9", "10", "11", "x", "010"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert restart.newest_step(str(tmp_path), []) == 0 == len(step_folders.steps(tmp_path))
    for name in ("9", "10"):
        (tmp_path / "checkpoints" / name / "digests.json").write_text("{}")
    assert restart.newest_step(str(tmp_path), []) == 10 == step_folders.steps(tmp_path)[-1]


def loop(tmp_path, codes, *options):
    """Run the loop over a command that ends with one code after the other: `9!` is by signal 9, `75+20` after step 20.

    Returns:
      The loop's exit code, how often the command was started, and what the loop said.
    """
    todo = tmp_path / "todo"
    todo.write_text("".join(f"{code}\n" for code in codes))
    command = stand_in(
        tmp_path / "bin",
        "command",
        f"""cd {shlex.quote(str(tmp_path))}
code=$(head -n 1 todo) && sed -i 1d todo && echo started >>starts
case $code in *+*) mkdir -p "run/checkpoints/${{code#*+}}" && : >"run/checkpoints/${{code#*+}}/digests.json" ;; esac
case $code in *!) kill -"${{code%!}}" $$ ;; esac
exit "${{code%+*}}" """,
    )
    words = [sys.executable, "-S", LAUNCH / "restart.py", "--run-dir", tmp_path / "run", "--pause", "0.01", *options]
    done = call(*words, "--", command)
    return done.returncode, len((tmp_path / "starts").read_text().splitlines()), done.stderr


@pytest.mark.parametrize(
    ("codes", "code", "starts", "said"),
    [
        (["75", "137", "9!", "0"], 0, 4, "signal 9; goes on from step 0"),
        (["75", "2", "0"], 2, 2, "something to mend"),
        (["130", "0"], 130, 1, "stopped by SIGINT"),
        (["15!", "0"], 143, 1, "stopped by SIGTERM"),
        (["1", "1", "1", "0"], 1, 3, "gives up: a fault of the program 3 times"),
        (["1", "1+10", "1", "1+20", "0"], 0, 5, "goes on from step 20"),
        (["75", "134", "75", "137", "75", "0"], 1, 5, "gives up: 5 starts without a new checkpoint since step 0"),
        (["75", "75", "75", "75+10", "75", "75", "75", "75", "0"], 1, 8, "since step 10"),
        (["3", "0"], 3, 1, "exit code 3 is none of the programs'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_the_loop_goes_on_or_stops_by_exit_code_and_progress(tmp_path, codes, code, starts, said):
    found = loop(tmp_path, codes, "--longest", "0.01")
    assert found[:2] == (code, starts), found[2]
    assert said in found[2]


def test_a_command_that_is_not_there_is_not_tried_again(tmp_path):
    done = call(sys.executable, "-S", LAUNCH / "restart.py", "--run-dir", tmp_path, "--", tmp_path / "nothing")
    assert done.returncode == 127
    assert done.stderr.count("starts") == 1 and "No such file" in done.stderr


def begun(tmp_path, text, *options):
    """The loop in the background, over a script that says when it is ready."""
    command = stand_in(tmp_path / "bin", "command", text)
    words = [sys.executable, "-S", LAUNCH / "restart.py", "--run-dir", tmp_path, *options, "--", command]
    process = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_progress_in_a_bucket_is_asked_of_the_python_beside_the_command(tmp_path, capsys):
    command = stand_in(tmp_path / "bin", "command", "exit 1")
    assert restart.newest_step("gs://bucket/run", [str(command)], known=7) == 7
    assert "progress is not noticed" in capsys.readouterr().err
    stand_in(tmp_path / "bin", "python", 'echo "$3" >asked; [ "$3" = gs://bucket/run ] && echo 12')
    assert restart.newest_step("gs://bucket/run", [str(command)]) == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("code", [143, 75])
def test_a_signal_reaches_the_command_once_and_ends_the_loop(tmp_path, number, code):
    """A scheduler that signals twice at once does not make the command leave without its save."""
    name = {signal.SIGINT: "INT"}.get(number, "TERM")  # a terminal that closes is a wish to stop too
    wait = 'while [ ! "$came" ]; do sleep 0.02; done; sleep 0.3'
    process = begun(tmp_path, f"trap 'echo got; came=1' {name}\necho ready\n{wait}\nexit {code}")
    process.send_signal(number)
    time.sleep(0.1)  # else the kernel takes the two for one
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "got\n"), err
    assert err.count("starts") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_loop_that_is_killed_takes_the_command_along_by_a_save(tmp_path):
    process = begun(tmp_path, "trap 'echo saved; exit 143' TERM\necho ready\nwhile :; do sleep 0.02; done")
    process.kill()
    assert process.communicate(timeout=20)[0] == "saved\n"


def test_a_signal_in_the_pause_ends_the_loop(tmp_path):
    process = begun(tmp_path, "echo ready; exit 75", "--pause", "60", "--longest", "60")
    while "in 60 s" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run-dir", "x"], "no command is given"),
        (["--run-dir", "x", "--"], "no command is given"),
        (["--", "true"], "--run-dir"),
        (["--run-dir", "x", "--pause", "9", "--longest", "1", "--", "true"], "--pause is 9 and --longest 1"),
        (["--run-dir", "x", "--pause", "nan", "--", "true"], "--pause is nan"),
        (["--run-dir", "x", "--faults", "0", "--", "true"], "must be 1 or more"),
        (["--run-dir", "x", "--often", "--", "true"], "--often"),
    ],
)
def test_the_loops_own_mistakes_are_said_in_a_line(words, said):
    done = call(sys.executable, "-S", LAUNCH / "restart.py", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_ctrl_c_of_a_terminal_reaches_the_command_through_the_loop_alone(tmp_path):
    """A terminal signals a whole process group: a command in the loop's own group would get it twice."""
    process = begun(tmp_path, 'echo ready; echo $$; trap "exit 143" TERM; while :; do sleep 0.02; done')
    child = int(process.stdout.readline())
    assert os.getpgid(child) == child != os.getpgid(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    process.communicate()
