"""A process that no longer moves on is ended; one that is slow, or was stopped, is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from transformer_jax.config import HostsConfig
from transformer_jax.goodput import Clock
from transformer_jax.watchdog import Watchdog

LIMITS = HostsConfig(step_limit=1.0, step_factor=2.0, phase_limit=1000.0)


def watch(clock, seconds, moving=lambda: None, log=None):
    said = []
    with Watchdog(clock, LIMITS, log, said.append):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not said:
            moving()
            time.sleep(0.05)
    return said


def test_a_stalled_step_is_found_and_the_log_says_where(tmp_path, capfd):
    clock = Clock()
    clock.enter("step")
    (why,) = watch(clock, 20, log=tmp_path / "log.txt")
    assert why.startswith("stalled: no progress for") and "phase `step` (hosts.step_limit)" in why
    assert "in watch" in (tmp_path / "log.txt").read_text()
    assert "in watch" in capfd.readouterr().err


@pytest.mark.slow
def test_what_beats_or_has_no_rhythm_is_left_alone():
    clock = Clock()
    clock.enter("step")
    assert watch(clock, 1.5, clock.beat) == []
    clock.enter("compile")
    assert watch(clock, 1.5) == []


def test_long_steps_have_their_own_limit():
    clock = Clock()
    clock.enter("step")
    dog = Watchdog(clock, LIMITS, None)
    assert dog.limit() == 1.0
    clock._steps.extend([30.0] * 5)
    assert dog.limit() == 60.0
    clock.enter("saving")
    assert dog.limit() == 1000.0


PROGRAM = """
import time
from transformer_jax.config import HostsConfig
from transformer_jax.goodput import Clock
from transformer_jax.watchdog import Watchdog
clock = Clock()
clock.enter("step")
with Watchdog(clock, HostsConfig(step_limit=2.0, step_factor=2.0), None):
    print("ready", flush=True)
    for i in range(10):
        time.sleep(0.1)
        clock.beat()
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_may_go_on():
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
