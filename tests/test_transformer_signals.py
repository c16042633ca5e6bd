"""SIGTERM and Ctrl-C, in a process of their own."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from transformer_jax.signals import SAME_SECONDS, StopSignal
from transformer_jax.supervisor import PASSED_ON

PROGRAM = """
import signal, sys, time
from transformer_jax.signals import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    {wait}
print("saved after", stop.name, flush=True)
sys.exit(stop.exit_code)
"""
POLITE = "while not stop(): time.sleep(0.01)"
# As a compilation does, this runs no Python, and no signal cuts it short; a million rounds take about a second.
DEAF = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', {millions} * 10**6)"


def start(wait):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(wait=wait)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_asks_and_the_program_leaves_with_its_code(number, code):
    process = start(POLITE)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, f"saved after {number.name}\n")
    assert err == f"{number.name}: saving after this step, then leaving; once more leaves at once\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_leaves_at_once_even_during_a_compilation(second):
    process = start(DEAF.format(millions=200))
    process.send_signal(signal.SIGTERM)
    assert "once more leaves at once" in process.stderr.readline()
    time.sleep(SAME_SECONDS + 0.1 if second == signal.SIGTERM else 0.0)
    process.send_signal(second)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + second
    assert out == "" and "without saving" in err


def test_two_terminations_at_once_are_one():
    """A scheduler's and that of a script around the run; the run is saved all the same."""
    process = start("time.sleep(0.3)\n    " + POLITE + "\n    time.sleep(0.5)")
    process.send_signal(signal.SIGTERM)
    assert "once more leaves at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (143, "saved after SIGTERM\n", "")


def test_a_signal_during_a_compilation_is_honoured_after_it():
    process = start(DEAF.format(millions=2))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "saved after SIGINT\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("first", "late"), [("parent", "here"), ("here", "parent"), ("parent", "parent")])
def test_what_comes_late_after_leaving_is_no_second_signal(number, first, late):
    """Ctrl-C reaches parent and child; the later of the two may find the run saved and the context left."""
    (passed_on,) = (p for p, meant in PASSED_ON.items() if meant == number)
    by = {"parent": int(passed_on), "here": int(number)}
    program = PROGRAM.format(wait=f"signal.raise_signal({by[first]})\n    {POLITE}")
    program = program.replace('print("saved', f'signal.raise_signal({by[late]})\nprint("saved')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + number, f"ready\nsaved after {number.name}\n")
    assert done.stderr.count("once more leaves at once") == 1 and len(done.stderr.splitlines()) == 1


def test_handlers_are_put_back():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert not stop() and stop.name == ""
        assert signal.getsignal(signal.SIGTERM) not in before
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop():
            time.sleep(0.001)
        assert stop.name == "SIGTERM" and stop.exit_code == 143
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    for thread in threading.enumerate():
        if thread.name == "signals":
            thread.join(5)
            assert not thread.is_alive()
