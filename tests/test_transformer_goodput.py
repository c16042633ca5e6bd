"""Every second of a run is put down to something, over all the processes that worked on it."""

import json
import time

import jax
import pytest
import tiny_hosts

from transformer_jax import goodput, sharding
from transformer_jax.goodput import PHASES, Clock, account, read_times, table


class Stop:
    """Raised at a step."""

    name, exit_code = "SIGTERM", 143

    def __init__(self, after=10**9):
        self.left = after

    def __call__(self):
        self.left -= 1
        return self.left < 0


def lines(began, first_step, *states):
    """The lines of one process: (step, seconds of start, of step)."""
    return [
        {
            "process": str(began),
            "began": began,
            "first_step": first_step,
            "step": step,
            "seconds": dict.fromkeys(PHASES, 0.0) | {"start": float(start), "step": float(steps)},
        }
        for step, start, steps in states
    ]


def test_phases_add_up_and_compilation_is_taken_out_of_the_others():
    clock = Clock(age=5.0)
    with clock.within("evaluation"):
        time.sleep(0.02)
        clock.compiled(0.01)
    clock.enter("step")
    began = time.perf_counter()
    jax.jit(lambda x: x * 3 + len(str(began)))(1.0)
    totals = clock.totals()
    assert totals["start"] >= 5.0 and totals["evaluation"] >= 0.01 and totals["compile"] > 0.01
    assert sum(totals.values()) == pytest.approx(5.0 + time.perf_counter() - began + 0.02, abs=0.5)
    assert min(totals.values()) >= 0.0


def test_the_median_of_steps_leaves_out_what_is_no_step():
    clock = Clock()
    clock.enter("step")
    for _ in range(6):
        with clock.within("saving"):
            time.sleep(0.02)
        clock.stepped()
    assert 0 < clock.median_step() < 0.02


def test_a_run_without_stops_loses_nothing():
    found = account(lines(100.0, 0, (0, 3, 0), (5, 3, 10), (10, 3, 20)))
    assert found["stops"] == found["lost_steps"] == found["lost_seconds"] == found["stopped_seconds"] == 0
    assert found["total_seconds"] == 23.0 and found["goodput"] == pytest.approx(20 / 23)


def test_work_after_the_step_gone_on_from_is_lost():
    first = lines(100.0, 0, (0, 3, 0), (5, 3, 10), (8, 3, 16))  # ends at 119
    second = lines(125.0, 5, (5, 2, 0), (10, 2, 10))
    found = account(first + second)
    assert (found["stops"], found["lost_steps"], found["lost_seconds"], found["stopped_seconds"]) == (1, 3, 6.0, 6.0)
    assert found["seconds"]["step"] == 20.0 and found["seconds"]["start"] == 5.0
    assert found["total_seconds"] == 125.0 + 12.0 - 100.0


def test_a_fall_back_to_an_older_checkpoint_loses_what_several_processes_did():
    runs = [
        *lines(0.0, 0, (0, 1, 0), (4, 1, 4), (6, 1, 6)),
        *lines(7.0, 4, (4, 1, 0), (9, 1, 5)),
        *lines(13.0, 2, (2, 1, 0), (10, 1, 8)),
    ]
    found = account(runs)
    assert found["lost_steps"] == 4 + 5  # steps 3 to 6 of the first, 5 to 9 of the second
    assert found["total_seconds"] == 22.0
    parts = sum(found["seconds"].values()) + found["lost_seconds"] + found["stopped_seconds"]
    assert parts == pytest.approx(22.0)


@pytest.mark.slow
def test_the_table_of_a_run_with_a_stop_adds_up_to_the_time_that_passed(tmp_path, monkeypatch, capsys):
    make_mesh = sharding.make_mesh
    monkeypatch.setattr(sharding, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
    made = tiny_hosts.settings(tmp_path)
    began = time.perf_counter()
    assert tiny_hosts.train(made, Stop(7), Clock()).interrupted
    time.sleep(0.5)
    tiny_hosts.train(made, Stop(), Clock())
    wall = time.perf_counter() - began
    found = account(read_times(tmp_path / "run"))
    assert found["total_seconds"] == pytest.approx(wall, rel=0.01, abs=0.05)
    parts = sum(found["seconds"].values()) + found["lost_seconds"] + found["stopped_seconds"]
    assert parts == pytest.approx(found["total_seconds"], rel=1e-6)
    assert found["stops"] == 1 and found["stopped_seconds"] >= 0.5
    assert all(found["seconds"][name] > 0 for name in PHASES if name != "profile")
    err = capsys.readouterr().err
    assert err.count("where the time went") == 2 and "not running" in err
    assert "waiting for batches" in "\n".join(table(tmp_path / "run"))


def test_lines_that_a_kill_has_cut_are_left_out(tmp_path):
    good = json.dumps(lines(1.0, 0, (0, 1, 0))[0])
    (tmp_path / goodput.FILE).write_text(good + "\n" + good[:20])
    assert len(read_times(tmp_path)) == 1
    assert table(tmp_path / "nothing") == []


def test_the_age_of_a_process_is_known():
    assert 0.5 < goodput.process_age() < 1e6
