"""A trace of some steps, and its table."""

import json
import types

import jax
import pytest
import tiny_hosts

from transformer_jax import profiles, sharding
from transformer_jax.config import ConfigError, UserError
from transformer_jax.goodput import Clock
from transformer_jax.profiles import Event, Steps
from transformer_jax.report import read_records
from transformer_jax.run_page import write_run_page


class Never:
    name, exit_code = "SIGTERM", 143

    def __call__(self):
        return False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5:3", r"step 3 comes before step 5; write --profile-steps 3:5"),
        ("0:3", "steps are counted from 1"),
        ("7", r"write the first and the last step, as in --profile-steps 11:15"),
        ("a:b", r"write the first and the last step"),
        ("-1:4", r"write the first and the last step"),
    ],
)
def test_steps_that_cannot_be_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        profiles.parse(text)


@pytest.mark.parametrize(
    ("steps", "done", "message"),
    [
        ((10, 12), 10, r"10:12: the run goes on from step 10: this start makes steps 11 to 20"),
        ((19, 21), 0, r"19:21: beyond the end of the run: this start makes steps 1 to 20"),
        ((3, 4), 20, r"3:4: step 20 of 20 is done, and nothing is left to trace"),
    ],
)
def test_steps_that_a_start_does_not_make_are_refused(steps, done, message):
    with pytest.raises(UserError, match=message):
        profiles.check(Steps(*steps), done, 20)


def test_steps_that_are_there_are_taken():
    assert profiles.parse("11:15") == (11, 15)
    profiles.check(Steps(11, 20), 10, 20)


def test_an_operation_does_not_count_what_runs_within_it():
    def event(name, start, end, line="a"):
        return Event("device", line, name, "", start, end)

    events = [event("loop", 0, 100), event("body", 10, 60), event("dot", 20, 50), event("body", 60, 90)]
    events += [event("later", 100, 130), event("copy", 0, 100, line="b")]
    own = [(e.name, ns) for e, ns in profiles.own_times(events)]
    assert own == [("loop", 20), ("body", 20), ("dot", 30), ("body", 30), ("later", 30), ("copy", 100)]
    assert profiles.covered([(0, 10), (5, 7), (8, 12), (20, 21)]) == 13


@pytest.mark.parametrize(
    ("operation", "event", "stats", "expected"),
    [
        ("dot.12", "dot.12", {}, ("dot.12", "product")),
        ("select_add_fusion", "select_add_fusion", {}, ("select_add_fusion", "fusion")),
        ("%fusion.3 = bf16[8,128]{1,0} fusion(%p), kind=kOutput, calls=%c", "x", {}, ("fusion.3", "output fusion")),
        ("%all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=1", "x", {}, ("all-reduce.1", "collective")),
        ("%while.1 = (s32[]) while(%t), condition=%c, body=%b", "x", {}, ("while.1", "loop")),
        ("gemm_fusion_dot.7", "nvjet_hsh_128x256", {}, ("gemm_fusion_dot.7", "product")),
        ("all-gather-start", "ncclDevKernel_AllGather", {}, ("all-gather-start", "collective")),
        ("copy.4", "copy.4", {}, ("copy.4", "data movement")),
        ("rng.1", "rng.1", {"hlo_category": "rng bit generator"}, ("rng.1", "rng bit generator")),
    ],
)
def test_operations_are_named_and_sorted_as_each_device_tells_of_them(operation, event, stats, expected):
    assert profiles.describe(operation, event, stats) == expected


def test_of_a_tpu_the_line_of_operations_counts_and_of_others_what_names_its_operation():
    def event(name, start, end, **stats):
        return types.SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=stats.items())

    def plane(name, **lines):
        made = [types.SimpleNamespace(name=k.replace("_", " "), events=v) for k, v in lines.items()]
        return types.SimpleNamespace(name=name, lines=made)

    tpu = [
        plane(
            f"/device:TPU:{i}",
            XLA_Ops=[event("%dot.1 = f32[2] dot(%a)", 0, 60), event("%add.2 = f32[2] add(%a)", 80, 100)],
            XLA_Modules=[event("jit_step", 0, 100)],
        )
        for i in range(2)
    ]
    summary = profiles.summarise(types.SimpleNamespace(planes=tpu), steps=2)
    assert (summary.devices, summary.busy) == (2, pytest.approx(0.8))
    assert summary.step_seconds == pytest.approx(50e-9)
    first, second = summary.operations
    assert (first.name, first.category, first.count, first.share) == ("dot.1", "product", 0.5, pytest.approx(0.75))
    assert first.seconds == pytest.approx(30e-9) and second.name == "add.2"

    gpu = [plane("/device:GPU:0", Stream_7=[event("kernel_x", 0, 10, hlo_op="fusion.1"), event("memcpy", 0, 5)])]
    (only,) = profiles.summarise(types.SimpleNamespace(planes=gpu), steps=1).operations
    assert (only.name, only.category) == ("fusion.1", "fusion")
    nothing = profiles.summarise(types.SimpleNamespace(planes=[]), steps=1)
    assert "names no operations" in profiles.table(nothing, Steps(1, 1))[0]


def test_a_run_traces_its_steps_and_says_where_its_start_went(tmp_path, monkeypatch):
    make_mesh = sharding.make_mesh
    monkeypatch.setattr(sharding, "make_mesh", lambda config: make_mesh(config, jax.devices()[:2]))
    tiny_hosts.train(tiny_hosts.settings(tmp_path), Never(), Clock(), profile=Steps(3, 4))
    folder = tmp_path / "run" / "profile" / "plugins" / "profile" / "steps-3-4"
    assert (folder / "process-0.xplane.pb").stat().st_size > 1000
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "steps 3 to 4: " in said and "2 devices of this process are at work" in said and "by category: " in said
    found = json.loads((folder / "operations.json").read_text())
    assert found["devices"] == 2 and 0 < found["busy"] <= 1
    assert sum(op["share"] for op in found["operations"]) == pytest.approx(1)
    assert any("all-reduce" in op["name"] and op["count"] >= 1 for op in found["operations"])
    assert "writing and reading a trace" in said

    first, *others = read_records(tmp_path / "run" / "metrics.jsonl")
    start = first["start_up_seconds"]
    assert start["compiling"] > 0 and start["step_program"] == "compiled" and start["in_all"] > start["compiling"]
    assert not any("start_up_seconds" in record for record in others)
    assert "the first step was done" in said and "programs are not kept" in said
    assert "The newest start" in write_run_page(tmp_path / "run", tiny_hosts.Settings).read_text()
