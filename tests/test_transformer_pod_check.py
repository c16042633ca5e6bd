"""`check`: a run is tried on the machines at hand, and what was measured is kept for plans."""

import argparse
import json
import re

import jax
import pytest
import tiny_hosts
import tiny_run

from transformer_jax import calibration, checkpoint, plan_report, pod_check, pod_check_part, topologies
from transformer_jax.calibration import Measurement
from transformer_jax.config import ConfigError, UserError
from transformer_jax.pod_check_part import Until
from transformer_jax.translation.config import TranslationConfig


def arguments(**changes):
    given = {"run": "a.toml", "out": "checks/a", "steps": 6, "limit": 600.0, "topology": "", "plan": "", "json": False}
    return argparse.Namespace(**{**given, "part": "whole", "answer": "", **changes})


def records(**changes):
    made = {
        step: {"step": step, "loss": 4.0 / step, "gradient_norm": 1.5, "learning_rate": 0.1 * step, "n/mlm": 30.0}
        for step in range(1, 7)
    }
    for name, (step, value) in changes.items():
        made[step][name.replace("__", "/")] = value
    return made


@pytest.mark.parametrize(
    ("changes", "tolerance", "good", "said"),
    [
        ({}, 0.0, True, "equal in all 6 steps, exactly"),
        ({"loss": (4, 1.0 + 1e-7)}, 1e-5, True, r"differ by 1.0e-07 at most \(loss of step 4\)"),
        ({"gradient_norm": (5, 1.51)}, 1e-3, False, r"differ by 6.7e-03 .*gradient_norm of step 5"),
        ({"n__mlm": (4, 31.0)}, 1.0, False, "n/mlm of step 4 is 31.0 after the kill, and 30.0 without it: other rows"),
        ({"learning_rate": (4, 0.1)}, 1.0, False, "learning_rate of step 4"),
        ({"loss": (6, None)}, 1.0, False, "loss of step 6 is not finite"),
    ],
)
def test_runs_are_compared_step_for_step(changes, tolerance, good, said):
    found = pod_check.differences(records(), records(**changes), 6, tolerance)
    assert found[0] is good
    assert re.search(said, found[1])


def test_a_step_without_a_record_fails():
    broken = records()
    del broken[4]
    assert pod_check.differences(records(), broken, 6, 1.0) == (False, "no record of step 4")


@pytest.mark.parametrize(
    ("kind", "devices", "name"),
    [
        ("TPU v5 lite", 16, "v5e-16"),
        ("TPU v4", 16, "v4-32"),
        ("TPU v3", 32, "v3-32"),
        ("TPU v5", 4, "v5p-8"),
        ("TPU7x", 8, "tpu7x-2x2x1"),
        ("NVIDIA H200", 1, "h200-1"),
        ("TPU v5 lite", 12, ""),
        ("cpu", 4, ""),
    ],
)
def test_devices_are_known_by_what_plans_call_them(kind, devices, name):
    assert topologies.of_devices(kind, devices) == name
    if name:
        assert topologies.pod(name).devices == devices


def test_what_cannot_be_a_check_is_refused(tmp_path):
    config = tiny_run.config(tmp_path)  # of 20 steps
    (tmp_path / "none.json").write_text("no JSON")
    (tmp_path / "other.json").write_text("{}")
    for args, words, message in (
        (arguments(steps=20), [], r"train.steps is 20, and a check makes 20 .* --steps 10"),
        (arguments(steps=3), [], "it must be at least 4"),
        (arguments(), ["--run_dir", "x"], "say --out FOLDER"),
        (arguments(limit=float("nan")), [], "--limit is nan"),
        (arguments(plan=str(tmp_path / "no.json")), [], r"no\.json cannot be read: .*No such file"),
        (arguments(plan=str(tmp_path / "none.json")), [], r"none\.json cannot be read"),
        (arguments(plan=str(tmp_path / "other.json")), [], r"other\.json is not what `plan --json` prints"),
    ):
        with pytest.raises(ConfigError, match=message):
            pod_check.check(args, "bert_jax.main", config, words)
    with pytest.raises(UserError, match="--topology v5e-17: no such pod"):
        pod_check.check(arguments(topology="v5e-17"), "bert_jax.main", config, [])


def test_a_part_leaves_the_run_as_it_is_but_for_saving_and_evaluating(tmp_path):
    config = tiny_run.config(tmp_path, train_eval_every=3, checkpoint_keep_best=2)
    made = pod_check_part.settings(config, "resumed", "there", 8)
    assert made.run_dir == "there/broken" and made.train.compile_cache == "./there/programs"
    assert (made.checkpoint.every, made.checkpoint.keep_best, made.train.eval_every) == (4, 0, 0)
    same = ("steps", "batch_size", "seed", "accumulate")
    assert [getattr(made.train, name) for name in same] == [getattr(config.train, name) for name in same]
    assert (made.model, made.optimizer, made.data, made.mesh) == (
        config.model, config.optimizer, config.data, config.mesh,
    )  # fmt: skip
    pairs = pod_check_part.settings(TranslationConfig(), "whole", "gs://b/there", 8)
    assert pairs.validation.lines == 0 and pairs.train.compile_cache == "gs://b/there/programs"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_part_ends_after_its_steps_though_processes_agree_a_step_late(processes):
    until = Until(tiny_run.Flag(), 5, processes)
    asked = [until() for _ in range(5)]
    assert asked.index(True) == 4 - (processes - 1)


def test_an_earlier_check_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [10])
    monkeypatch.setattr(pod_check_part.command, "training", lambda part, *_, **__: part(tiny_run.Flag(), None))
    args = arguments(out=str(tmp_path / "out"), answer=str(tmp_path / "answer"))
    with pytest.raises(UserError, match="holds an earlier check; name another folder, or delete it"):
        pod_check_part.run(args, tiny_run.config(tmp_path), lambda *_, **__: None, lambda folder: folder)


def test_where_no_plan_can_be_made_the_reason_stands_in_place_of_a_number(tmp_path):
    facts = {"device_kind": "cpu", "devices": 4, "slices": 1, "platform": "cpu", "local_devices": 2}
    job = pod_check.Check(arguments(), "bert_jax.main", [])
    assert pod_check._plan(job, facts) == (None, "no plan: none can be made for 4 devices of kind 'cpu'")


def measurement(**changes):
    given = {"pod": "v5e-16", "chip": "TPU v5e", "run": "a.toml", "when": "2026-11-30", "step_seconds": 0.3}
    given |= {"planned_seconds": (0.2, 0.3), "peak_bytes": 9.0, "planned_bytes": 10.0, "versions": {"jax": "0"}}
    return Measurement(**{**given, **changes})


def test_the_newest_measurement_of_the_pod_or_else_of_its_chip_counts(tmp_path):
    file = tmp_path / "new" / "calibration.json"
    for made in (measurement(), measurement(pod="v5e-4"), measurement(chip="TPU v4", pod="v4-8"), measurement(run="b")):
        calibration.add(file, made)
    calibration.add(file, measurement(step_seconds=0.5))  # in place of the first
    found = calibration.read(file)
    assert [m.step_seconds for m in found] == [0.3, 0.3, 0.3, 0.5]
    assert calibration.for_pod(found, topologies.pod("v5e-16")).step_seconds == 0.5
    assert calibration.for_pod(found, topologies.pod("v5e-4")).pod == "v5e-4"
    assert calibration.for_pod(found, topologies.pod("v5e-256")).step_seconds == 0.5
    assert calibration.for_pod(found, topologies.pod("v6e-4")) is None
    assert calibration.read(tmp_path / "none") == []
    file.write_text('[{"pod": 3}]')
    with pytest.raises(UserError, match="not a file of measurements"):
        calibration.read(file)


def test_a_plan_shows_what_measurements_make_of_it():
    times = {"products": 0.1, "state": 0.1, "links": 0.0, "links_waited": 0.0, "operations": 0.2, "least": 0.4}
    found = {"step_seconds": {**times, "most": 0.6}, "steps": 86400, "pod": {"chips": 16}}
    made = calibration.calibrated(found, measurement())
    assert made["step_seconds"] == pytest.approx(0.5 * 0.3 / 0.25)
    assert made["days"] == pytest.approx(0.6) and made["chip_hours"] == pytest.approx(0.6 * 24 * 16)
    (line,) = plan_report._calibrated({"calibrated": made})
    assert "600.0   1.20 x, memory 0.90 x, measured on v5e-16 with a.toml, 2026-11-30; the run: 14.40 hours" in line
    assert plan_report._calibrated({}) == []


@pytest.mark.slow
def test_two_hosts_are_checked_and_the_measurement_is_kept(tmp_path, monkeypatch):
    """Real processes: one is killed, the run goes on from its save, exactly, and is exported."""
    tiny_run.prepare(tmp_path / "prepared")
    run = tiny_run.write_run_file(tmp_path / "run.toml", tiny_run.config(tmp_path, train_seed=3))
    plan = {"pod": {"name": "v5e-4", "chip": "TPU v5e"}, "step_seconds": {"least": 1e-3, "most": 3e-3}}
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"memory": {"peak": 2**30}}))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    words = ["check", run, "--out", tmp_path / "out", "--steps", "6", "--plan", tmp_path / "plan.json", "--json"]
    program = ["-m", "bert_jax.main", *words]
    with tiny_hosts.Processes(tmp_path / "p", tiny_hosts.settings(tmp_path), 2, program=program) as processes:
        processes.succeed()
    found = json.loads(processes.out(0))
    lines = {line["what"]: line for line in found["lines"]}
    assert found["passed"] and processes.out(1) == ""
    tried = ("joined", "6 steps", "killed", "resumed", "losses", "export")
    assert [lines[name]["ok"] for name in tried] == [True] * 6
    assert lines["losses"]["found"] == "equal in all 6 steps, exactly"
    assert "process 1 of 2, after step 3 was saved; this process left with exit code 75" in lines["killed"]["found"]
    assert "the program kept from before" in lines["resumed"]["found"]
    assert "planned 1.0 to 3.0 ms" in lines["step time"]["found"] and "planned 1.00" in lines["memory"]["found"]
    assert "process 1 is done: exit codes 0, 137, 0" in processes.err(1)
    assert checkpoint.steps(tmp_path / "out" / "broken") == [3, 6]
    (kept,) = calibration.read(tmp_path / "data" / "transformer-jax" / "calibration.json")
    assert (kept.pod, kept.planned_seconds, kept.versions) == ("v5e-4", (1e-3, 3e-3), {"jax": jax.__version__})
    assert calibration.read(tmp_path / "out" / "calibration.json") == [kept]
