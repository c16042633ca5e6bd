"""The parent of a training process: exit codes, signals, output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transformer_jax import exit_codes, supervisor
from transformer_jax.signals import SAME_SECONDS

PROGRAM = """
import os, signal, sys, time
from transformer_jax.signals import StopSignal
from transformer_jax.supervisor import supervise
supervise()
with StopSignal() as stop:
    print("child", os.getpid(), flush=True)
    {then}
print("leaving after", stop.name, flush=True)
sys.exit(stop.exit_code if stop() else 0)
"""
WAIT = "while not stop(): time.sleep(0.01)"


def start(then):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline().split()[1])


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("pass", 0, ""),
        ("os._exit(2)", 2, ""),
        ("os._exit(75)", 75, ""),
        ("os.abort()", 75, "JAX's runtime has ended this process"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended by SIGKILL; a machine that runs out of memory does that"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "ended by SIGSEGV"),
    ],
)
def test_the_parent_ends_as_the_child_did(then, code, said):
    process, _ = start(then)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert said in err and (said or not err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", [("parent",), ("child",), ("parent", "child"), ("child", "parent")])
def test_a_signal_to_one_or_both_asks_once(number, to):
    process, child = start(WAIT.replace("0.01", "0.3"))
    for one in to:
        os.kill(process.pid if one == "parent" else child, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"leaving after {number.name}" in out
    assert err.count("once more leaves at once") == 1 and "without saving" not in err


def test_a_second_signal_through_the_parent_leaves_at_once():
    process, _ = start("time.sleep(1000)")
    process.send_signal(signal.SIGTERM)
    assert "once more leaves at once" in process.stderr.readline()
    time.sleep(SAME_SECONDS + 0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "without saving" in err


def test_a_child_does_not_outlive_its_parent():
    process, child = start("time.sleep(1000)")
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it is still there")


def test_a_signal_before_the_child_listens_ends_it():
    (passed,) = (p for p, meant in supervisor.PASSED_ON.items() if meant == signal.SIGTERM)
    assert supervisor.ending(-passed) == (143, "")
    assert supervisor.ending(exit_codes.MISTAKE) == (2, "")
