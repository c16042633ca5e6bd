"""Checkpoints: what is complete, what is found damaged, what is kept, and what a kill or a full disk leaves."""

import errno
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax import checkpoint as ck
from transformer_jax import step_folders
from transformer_jax.checkpoint import CheckpointError, Checkpoints, NoCheckpointError
from transformer_jax.config import CheckpointConfig, ConfigError, UserError

KEEP_ALL = CheckpointConfig(keep_last=1000)
META = {"config": {"model": {"hidden_size": 8}}, "naming": 1, "tokenizer": {"vocab.txt": "[PAD]\n你好\n"}}


def sharding(devices=8, *axes):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(step, devices=8):
    rng = np.random.default_rng(step)
    kernel = rng.standard_normal((16, 8), np.float32)
    params = {
        "dense": {
            "kernel": jax.device_put(kernel, sharding(devices, "data")),
            "bias": jnp.full((3,), step, jnp.float32),
        },
        "half": jnp.asarray(rng.standard_normal(5), jnp.bfloat16),
    }
    moments = optax.ScaleByAdamState(count=jnp.int32(step), mu=params, nu=jax.tree.map(lambda x: x * x, params))
    opt_state = (optax.EmptyState(), (moments, optax.EmptyState()))
    return {"step": jnp.int32(step), "params": params, "opt_state": opt_state}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


def save_steps(folder, *numbers, config=KEEP_ALL, metrics=None):
    checkpoints = Checkpoints(folder, config)
    for number in numbers:
        checkpoints.save(number, make_state(number), {"row": number}, META, (metrics or {}).get(number))
    checkpoints.close()


def files_of(step_folder):
    return sorted(p.relative_to(step_folder) for p in step_folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    save_steps(folder, 20, 40)
    return folder


@pytest.fixture
def copy_of_two(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


@pytest.mark.slow
def test_what_is_saved_comes_back_bit_for_bit(two_steps):
    checkpoints = Checkpoints(two_steps, KEEP_ALL)
    expected = make_state(40)
    got = checkpoints.restore(abstract(expected))
    checkpoints.close()
    assert (got.step, got.data, got.meta, got.skipped) == (40, {"row": 40}, META, [])
    assert_same(got.state, expected)
    assert jax.tree.map(lambda x: x.sharding, got.state) == jax.tree.map(lambda x: x.sharding, expected)
    assert ck.steps(two_steps) == ck.steps(two_steps.parent) == [20, 40]
    assert ck.verify(two_steps) == [(20, []), (40, [])]


def test_an_asked_for_step_is_restored_and_a_missing_one_named(two_steps):
    checkpoints = Checkpoints(two_steps, KEEP_ALL)
    assert_same(checkpoints.restore(abstract(make_state(20)), step=20).state, make_state(20))
    with pytest.raises(CheckpointError, match="no step 30; complete steps: 20, 40"):
        checkpoints.restore(abstract(make_state(20)), step=30)
    checkpoints.close()


@pytest.mark.slow
def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
    """Saves are asynchronous, yet what is stored are the numbers at the time of the call."""
    minus_seven = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    value = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)

    def fresh():
        ways = {"rows": sharding(8, "data"), "whole": sharding(8), "single": sharding(1)}
        return {"params": {name: jnp.copy(jax.device_put(value, way)) for name, way in ways.items()}}

    def overwrite(state):
        jax.block_until_ready([minus_seven(x) for x in state["params"].values()])

    overwrite(fresh())
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    for step in range(4):
        state = fresh()
        data = {"row": step}
        checkpoints.save(step, state, data, META)
        data["row"] = -1
        overwrite(state)
        assert state["params"]["whole"].is_deleted()
    checkpoints.close()
    for step in range(4):
        _, params, stored, _ = ck.read_params(f"{tmp_path}@{step}")
        assert stored == {"row": step}
        assert set(params) == {"rows", "whole", "single"}
        for name, got in params.items():
            np.testing.assert_array_equal(got, value, err_msg=name)


def test_the_training_thread_does_not_wait_for_the_digests(tmp_path, monkeypatch):
    release, threads = threading.Event(), []
    write = step_folders.write_digests

    def slow(*arguments):
        threads.append(threading.current_thread())
        assert release.wait(60)
        write(*arguments)

    monkeypatch.setattr(step_folders, "write_digests", slow)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    assert checkpoints.save(1, make_state(1), {}, {})
    checkpoints.check()  # Returns though the save is not complete.
    assert ck.steps(tmp_path) == []
    release.set()
    checkpoints.wait()
    assert ck.steps(tmp_path) == [1]
    assert threads != [threading.current_thread()]
    checkpoints.close()


# Damage


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_damage_to_any_file_is_found_and_the_step_before_is_used(copy_of_two, damage):
    """C015: every file of the newest step in turn is emptied, has one bit flipped, or is gone."""
    step = copy_of_two / "40"
    names = files_of(step)
    assert {"digests.json", "_CHECKPOINT_METADATA", "state/_METADATA", "meta/metadata"} <= {str(n) for n in names}
    expected = make_state(20)
    for name in names:
        original = (step / name).read_bytes()
        if damage == "cut":
            (step / name).write_bytes(b"")
        elif damage == "flip":
            changed = bytearray(original)
            changed[len(changed) // 2] ^= 0x10
            (step / name).write_bytes(changed)
        else:
            (step / name).unlink()
        (good, nothing), (bad, problems) = ck.verify(copy_of_two)
        assert (good, nothing, bad, len(problems)) == (20, [], 40, 1), name
        assert str(name) in problems[0]
        checkpoints = Checkpoints(copy_of_two, KEEP_ALL)
        got = checkpoints.restore(abstract(expected))
        assert (got.step, got.data, got.skipped) == (20, {"row": 20}, [(40, problems[0])]), name
        with pytest.raises(CheckpointError, match="40 cannot be used"):
            checkpoints.restore(abstract(expected), step=40)
        checkpoints.close()
        (step / name).write_bytes(original)
    assert_same(got.state, expected)
    assert ck.verify(copy_of_two) == [(20, []), (40, [])]


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_the_digest_file_is_found(copy_of_two):
    file = copy_of_two / "40" / "digests.json"
    original = file.read_bytes()
    for position in range(0, len(original), 5):
        changed = bytearray(original)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        with pytest.raises(step_folders.DamagedError):
            step_folders.read_digests(file.parent)
    file.write_bytes(original)
    assert ck.verify(f"{copy_of_two}@40") == [(40, [])]


def test_a_step_under_another_number_is_refused(copy_of_two):
    (copy_of_two / "40").rename(copy_of_two / "60")
    assert ck.verify(copy_of_two)[1] == (60, ["this folder was written as step 40"])


def test_when_no_step_verifies_every_one_is_named_and_training_does_not_start_afresh(copy_of_two):
    for step in ("20", "40"):
        (copy_of_two / step / "state" / "_METADATA").write_bytes(b"")
    checkpoints = Checkpoints(copy_of_two, KEEP_ALL)
    with pytest.raises(
        CheckpointError, match=r"(?s)none .* can be used.*step 40: state/_METADATA has 0 .*step 20:"
    ) as e:
        checkpoints.restore(abstract(make_state(20)))
    assert not isinstance(e.value, NoCheckpointError)
    checkpoints.close()


@pytest.mark.slow
def test_a_damaged_step_is_replaced_when_training_comes_to_it_again(copy_of_two):
    (copy_of_two / "40" / "data" / "metadata").write_bytes(b"")
    checkpoints = Checkpoints(copy_of_two, CheckpointConfig(keep_last=2))
    state = checkpoints.restore(abstract(make_state(20))).state
    checkpoints.save(30, state, {"row": 30}, META)
    checkpoints.wait()
    assert ck.steps(copy_of_two) == [20, 30, 40]  # The damaged step is not counted among the last two.
    assert checkpoints.save(40, make_state(41), {"row": 41}, META)
    checkpoints.close()
    assert ck.verify(copy_of_two) == [(30, []), (40, [])]
    assert ck.read_meta(copy_of_two)[1] == {"row": 41}


def test_orbax_is_not_heard_when_reading_fails(copy_of_two, monkeypatch, capfd, caplog):
    """Even when damage passes the digests, one error says what is wrong; no tracebacks of remaining reads."""
    monkeypatch.setattr(step_folders, "problems_of", lambda path: [])
    for file in (copy_of_two / "40" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    checkpoints = Checkpoints(copy_of_two, KEEP_ALL)
    with pytest.raises(CheckpointError, match="40 cannot be read") as e:
        checkpoints.restore(abstract(make_state(40)))
    checkpoints.close()
    assert len(str(e.value).splitlines()) == 1
    time.sleep(0.5)  # For the other reads of the call to end; the test run makes errors of what they say.
    assert capfd.readouterr().err == ""
    assert not [r for r in caplog.records if "orbax" in r.pathname]


def test_another_model_is_refused_with_the_names_and_both_shapes(two_steps):
    """C094: hidden size, dtype or optimizer of the run file is not that of the checkpoint."""
    checkpoints = Checkpoints(two_steps, KEEP_ALL)
    wanted = abstract(make_state(40))
    wanted["params"]["dense"]["kernel"] = jax.ShapeDtypeStruct((16, 12), jnp.float32)
    wanted["params"]["half"] = jax.ShapeDtypeStruct((5,), jnp.float32)
    wanted["params"]["extra"] = jax.ShapeDtypeStruct((), jnp.float32)
    del wanted["params"]["dense"]["bias"]
    with pytest.raises(UserError) as e:
        checkpoints.restore(wanted)
    checkpoints.close()
    for line in (
        "params/dense/kernel: stored float32[16, 8], the run needs float32[16, 12]",
        "params/half: stored bfloat16[5], the run needs float32[5]",
        "params/extra: stored nothing, the run needs float32[]",
        "params/dense/bias: stored float32[3], the run needs nothing",
    ):
        assert line in str(e.value)


# Devices


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_restores_on_any_number_of_devices(two_steps, devices):
    """C031: saved from 8 devices."""
    state = make_state(40, devices)
    checkpoints = Checkpoints(two_steps, KEEP_ALL)
    got = checkpoints.restore(abstract(state)).state
    checkpoints.close()
    assert_same(got, make_state(40))
    assert len(got["params"]["dense"]["kernel"].sharding.device_set) == devices


ONE_DEVICE = """
import sys, warnings
warnings.simplefilter("error")
import jax, numpy as np
from transformer_jax import checkpoint as ck
from transformer_jax import step_folders
from transformer_jax.config import CheckpointConfig
assert jax.device_count() == 1
for name, x in ck.contents(sys.argv[1]).items():
    print(name, x.shape, x.dtype)
step, params, data, meta = ck.read_params(sys.argv[1])
wanted = {}
for name, x in ck.contents(sys.argv[1]).items():
    node = wanted
    *parents, last = name.split("/")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = x
got = ck.Checkpoints(sys.argv[1], CheckpointConfig()).restore(wanted)
np.testing.assert_array_equal(got.state["params"]["dense"]["kernel"], params["dense"]["kernel"])
np.savez(sys.argv[2], kernel=params["dense"]["kernel"])
print(step, data)
"""


def start(program, *arguments, **environment):
    """A Python process with one device."""
    env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_machine_with_one_device_lists_reads_and_restores(two_steps, tmp_path):
    """C031: in a process of its own, without the devices that saved, and without a word on standard error."""
    process = start(ONE_DEVICE, two_steps, tmp_path / "got.npz")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == "40 {'row': 40}"
    assert "params/half (5,) bfloat16" in lines
    assert "opt_state/1/0/mu/dense/kernel (16, 8) float32" in lines
    with np.load(tmp_path / "got.npz") as got:
        np.testing.assert_array_equal(got["kernel"], np.asarray(make_state(40)["params"]["dense"]["kernel"]))


def test_parameters_are_read_as_numpy_by_run_by_step_and_by_folder(two_steps):
    """C116: any step can be read for export, and its numbers are those in memory."""
    for name, expected in ((two_steps.parent, 40), (f"{two_steps.parent}@20", 20), (two_steps / "20", 20)):
        step, params, data, meta = ck.read_params(name)
        assert (step, data, meta) == (expected, {"row": expected}, META)
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(params))
        assert_same(params, make_state(expected)["params"])
        assert ck.read_meta(name) == (expected, data, meta)


def test_a_wrong_checkpoint_name_says_what_is_there(two_steps, tmp_path):
    for name, message in (
        (tmp_path / "none", "none: no such folder"),
        (f"{two_steps}@30", "no step 30; complete steps: 20, 40"),
        (f"{two_steps}@last", "'last'; it must be the number of a step"),
        (tmp_path, "no complete checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            ck.read_params(name)


def test_reading_falls_back_and_says_so(copy_of_two, caplog):
    (copy_of_two / "40" / "digests.json").unlink()
    assert ck.read_params(copy_of_two)[0] == 20
    assert "passed over step 40: no digests.json" in caplog.text


# What is kept


@pytest.mark.parametrize(
    ("last", "every", "best", "stay"),
    [
        (1, 0, 0, {60}),
        (2, 0, 0, {50, 60}),
        (9, 0, 0, {10, 20, 30, 40, 50, 60}),
        (1, 20, 0, {20, 40, 60}),
        (1, 0, 1, {30, 60}),
        (1, 0, 2, {20, 30, 60}),
        (1, 0, 9, {10, 20, 30, 60}),
        (2, 40, 1, {30, 40, 50, 60}),
    ],
)
def test_keep_policy(last, every, best, stay):
    """The last, every K-th and the lowest metric; of equal ones the newer; None is no metric."""
    metrics = {10: 0.5, 20: 0.2, 30: 0.2, 40: None, 50: None, 60: 0.9 if best > 2 else None}
    assert ck.kept(metrics, CheckpointConfig(keep_last=last, keep_every=every, keep_best=best)) == stay


def test_what_a_stop_left_gives_way_first():
    """Interrupted at 21 and at 47, a run keeps what it would have kept without; until then it keeps as many."""
    config = CheckpointConfig(every=10, keep_last=3)

    def kept(*steps):
        return ck.kept(dict.fromkeys(steps), config)

    assert kept(20, 21) == {20, 21} and kept(10, 20, 21) == {10, 20, 21} and kept(10, 20, 21, 30) == {10, 20, 30}
    assert kept(20, 30, 40, 47) == {30, 40, 47} and kept(30, 40, 47, 50) == {30, 40, 50}
    assert kept(3, 5, 7, 8) == {5, 7, 8}, "a run that has come to no regular step yet"
    assert step_folders.by_worth([20, 21, 30, 37], 10) == [21, 20, 30, 37]


def test_the_best_may_be_the_highest():
    metrics = {10: 20.5, 20: 27.3, 30: 27.3, 40: None, 50: 1.0}
    policy = CheckpointConfig(keep_last=1, keep_best=1, best_metric="bleu", best_is="highest")
    assert ck.kept(metrics, policy) == {30, 50}


def test_of_equally_good_steps_the_earlier_can_be_kept(tmp_path):
    metrics = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.6}
    policy = CheckpointConfig(keep_last=1, keep_best=1, best_is="highest", best_of_equals="earlier")
    assert ck.kept(metrics, policy) == {20, 40}
    save_steps(tmp_path / "run" / "checkpoints", *metrics, config=policy, metrics=metrics)
    assert ck.locate(f"{tmp_path / 'run'}@best")[1] == 20


@pytest.mark.slow
def test_a_metric_of_another_name_does_not_count(tmp_path):
    """A run that goes on with another best_metric does not weigh BLEU against losses."""
    save_steps(tmp_path, 1, config=CheckpointConfig(keep_last=2, keep_best=1), metrics={1: 0.5})
    policy = CheckpointConfig(keep_last=1, keep_best=1, best_metric="bleu", best_is="highest")
    save_steps(tmp_path, 2, 3, config=policy, metrics={2: 0.4, 3: 0.3})
    assert ck.steps(tmp_path) == [2, 3]
    assert step_folders.metric_of(tmp_path / "2", "bleu") == 0.4 and step_folders.metric_of(tmp_path / "2", "x") is None


@pytest.mark.slow
def test_the_best_step_can_be_named(tmp_path):
    policy = CheckpointConfig(keep_last=9, best_metric="bleu", best_is="highest")
    save_steps(tmp_path, 1, 2, 3, 4, config=policy, metrics={1: 20.0, 2: 25.5, 3: 25.5})
    assert ck.read_meta(f"{tmp_path}@best")[0] == 3
    # Steps from before another figure was chosen do not count.
    save_steps(tmp_path, 5, 6, config=CheckpointConfig(keep_last=9), metrics={5: 0.5, 6: 0.6})
    assert ck.locate(f"{tmp_path}@best")[1] == 5
    save_steps(tmp_path / "none", 1)
    with pytest.raises(CheckpointError, match="no complete step has a held-out figure"):
        ck.read_params(f"{tmp_path / 'none'}@best")


def test_a_policy_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep_last is 0"):
        Checkpoints(tmp_path, CheckpointConfig(keep_last=0))
    with pytest.raises(ConfigError, match="every is -1; it must be 0 or more"):
        Checkpoints(tmp_path, CheckpointConfig(every=-1))


@pytest.mark.slow
def test_the_best_step_is_kept_over_a_restart_and_metrics_may_come_later(tmp_path):
    config = CheckpointConfig(keep_last=1, keep_best=1)
    save_steps(tmp_path, 1, 2, 3, config=config, metrics={1: 2.0, 2: 1.0, 3: float("nan")})
    assert ck.steps(tmp_path) == [2, 3]
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.restore(abstract(make_state(3)))
    checkpoints.save(4, make_state(4), {}, META)
    checkpoints.set_metric(4, 1.5)
    checkpoints.wait()
    assert ck.steps(tmp_path) == [2, 4]
    checkpoints.save(5, make_state(5), {}, META)
    checkpoints.set_metric(5, 0.5)
    checkpoints.set_metric(99, 0.1)  # No such step: nothing happens.
    checkpoints.close()
    assert ck.verify(tmp_path) == [(5, [])]


def test_no_step_is_deleted_before_the_newer_one_has_its_digests(tmp_path, monkeypatch):
    seen = []
    write = step_folders.write_digests

    def look(path, *rest):
        seen.append((int(path.name), ck.steps(tmp_path)))
        write(path, *rest)

    monkeypatch.setattr(step_folders, "write_digests", look)
    save_steps(tmp_path, 1, 2, 3, config=CheckpointConfig(keep_last=1))
    assert seen == [(1, []), (2, [1]), (3, [2])]
    assert ck.steps(tmp_path) == [3]
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_a_step_saved_twice_is_written_once(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    assert checkpoints.save(1, make_state(1), {"row": 1}, META)
    assert not checkpoints.save(1, make_state(2), {"row": 2}, META, metric=0.5)
    checkpoints.close()
    assert ck.read_meta(tmp_path)[1] == {"row": 1}
    again = Checkpoints(tmp_path, KEEP_ALL)
    again.restore(abstract(make_state(1)))
    assert not again.save(1, make_state(1), {"row": 3}, META)  # Resumed at the last step: it is there already.
    again.close()
    assert ck.verify(tmp_path) == [(1, [])]
    assert step_folders.read_digests(tmp_path / "1")["metric"] == 0.5


# Kills

KILLED = """
import os, shutil, signal, sys
import jax.numpy as jnp, numpy as np
from pathlib import Path
from transformer_jax import checkpoint as ck
from transformer_jax import step_folders
from transformer_jax.config import CheckpointConfig

def kill(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

def run(folder, moment):
    checkpoints = ck.Checkpoints(folder, CheckpointConfig(keep_last=1))
    size = 8_000_000 if moment == "writing" else 8
    noise = np.random.default_rng(0).standard_normal(size, np.float32)
    if moment != "first":
        checkpoints.save(10, {"params": {"x": jnp.asarray(noise)}}, {"row": 10}, {})
        checkpoints.wait()
    write = step_folders.write_whole
    if moment in ("committed", "first"):
        step_folders.write_digests = kill
    elif moment == "digests written in part":
        def part(path, text):
            path.with_name(f".{path.name}.tmp").write_text(text[:100])
            kill()
        step_folders.write_whole = part
    elif moment == "digests written":
        def whole(path, text):
            write(path, text)
            kill()
        step_folders.write_whole = whole
    elif moment == "deleting":
        def some(path):
            (Path(path) / "_CHECKPOINT_METADATA").unlink()
            kill()
        step_folders.shutil.rmtree = some
    checkpoints.save(20, {"params": {"x": jnp.asarray(noise + 1)}}, {"row": 20}, {})
    if moment == "writing":
        kill()
    checkpoints.wait()

# Nothing has started a device yet, so a fork is a fresh process that need not import anything again.
for folder, moment in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        try:
            run(Path(folder), moment)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
"""
# What is complete, and what is passed over, after a kill in the save of step 20 (or of the first step).
MOMENTS = {
    "writing": ([10], []),
    "committed": ([10], [20]),
    "digests written in part": ([10], [20]),
    "digests written": ([10, 20], []),
    "deleting": ([20], []),
    "first": ([], [20]),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folders = {moment: tmp_path_factory.mktemp("killed") for moment in MOMENTS}
    process = start(KILLED, *(x for moment, folder in folders.items() for x in (folder, moment)))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_of_a_save_leaves_a_step_to_go_on_from(killed, moment, tmp_path):
    """C015, C097: and training then saves the step it was killed in, whatever stands in its place."""
    folder = Path(shutil.copytree(killed[moment], tmp_path / "checkpoints"))
    complete, passed_over = MOMENTS[moment]
    names = {p.name for p in folder.iterdir()}
    assert ("20.orbax-checkpoint-tmp" in names) == (moment == "writing")
    assert (".10.deleting" in names) == (moment == "deleting")
    assert ck.steps(folder) == complete
    assert [s for s, _ in ck.unfinished(folder)] == passed_over

    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=1))
    state = {"params": {"x": jnp.zeros(8_000_000 if moment == "writing" else 8)}}
    reasons = [(s, "no digests.json: the save was stopped before its end") for s in passed_over]
    if complete:
        got = checkpoints.restore(abstract(state))
        assert (got.step, got.data, got.skipped) == (complete[-1], {"row": complete[-1]}, reasons)
    else:
        with pytest.raises(NoCheckpointError) as e:
            checkpoints.restore(abstract(state))
        assert e.value.skipped == reasons
    checkpoints.save(20, state, {"row": 21}, {})
    checkpoints.save(30, state, {"row": 31}, {})
    checkpoints.close()
    assert ck.verify(folder) == [(30, [])]
    assert {p.name for p in folder.iterdir()} == {"30"}


def test_a_left_over_temporary_folder_does_not_block_its_step(tmp_path):
    """C097: made by hand, with a file in it; what is not ours stays."""
    (tmp_path / "10.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "10.orbax-checkpoint-tmp" / "state" / "x").write_text("x")
    (tmp_path / "notes.orbax-checkpoint-tmp").mkdir()
    Checkpoints(tmp_path, KEEP_ALL).close()
    assert (tmp_path / "10.orbax-checkpoint-tmp").exists()  # Looking changes nothing.
    save_steps(tmp_path, 10)
    assert ck.verify(tmp_path) == [(10, [])]
    assert {p.name for p in tmp_path.iterdir()} == {"10", "notes.orbax-checkpoint-tmp"}


# A full disk


def no_space(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["starting", "committing", "digesting"])
def test_a_full_disk_is_one_clear_error_and_the_earlier_step_stays(tmp_path, monkeypatch, where):
    """C072: the error comes once, from `save`, `check`, `wait` or `close`; the caller may stop, or try again."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    checkpoints.save(1, make_state(1), {"row": 1}, META)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        if where == "starting":
            patch.setattr(ocp.CheckpointManager, "save", no_space)
        elif where == "committing":
            patch.setattr(ocp.CheckpointManager, "wait_until_finished", no_space)
        else:
            patch.setattr(step_folders, "write_whole", no_space)
        with pytest.raises(CheckpointError, match=r"step 2 failed: the disk is full .*step 1 is the newest complete"):
            checkpoints.save(2, make_state(2), {"row": 2}, META)
            checkpoints.wait()
    checkpoints.check()
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert_same(checkpoints.restore(abstract(make_state(1))).state, make_state(1))
    assert checkpoints.save(2, make_state(2), {"row": 2}, META)
    checkpoints.close()
    assert ck.verify(tmp_path) == [(2, [])]


def test_what_else_orbax_says_of_a_failed_save_is_not_heard(tmp_path, caplog):
    """C072: one message for a full disk, not a traceback for each array."""
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, make_state(1), {}, META)
    checkpoints.close()
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.unraisablehook, "previous", heard.append)
        for text in ("Event loop is closed", "another"):
            sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(event.exc_value) for event in heard] == ["another"]
    loop = logging.getLogger("asyncio")
    for where in ("/lib/orbax/checkpoint/serialization.py:9", "/run/5.orbax-checkpoint-tmp/state", "/lib/mine.py:9"):
        try:
            raise ValueError("no space")
        except ValueError:
            loop.exception("Task exception was never retrieved\nfuture: <Task at %s>", where)
    assert ["mine.py" in record.getMessage() for record in caplog.records if record.name == "asyncio"] == [True]


def test_a_folder_that_cannot_be_written_is_told_before_anything_waits_for_it(tmp_path):
    """C072: Orbax's threads would wait twenty minutes for their folder, and keep the process that long."""
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints = Checkpoints(tmp_path / "checkpoints", KEEP_ALL)
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint can be saved here: .*Not a directory"):
        checkpoints.try_to_write()
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="saving step 1 failed"):
        checkpoints.save(1, make_state(1), {}, META)
    checkpoints.close()
    assert threading.active_count() <= before
    (tmp_path / "checkpoints").unlink()
    checkpoints.try_to_write()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_earlier_failure_is_raised_by_the_next_save_which_may_be_repeated(tmp_path, monkeypatch):
    """C072"""
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    with monkeypatch.context() as patch:
        patch.setattr(step_folders, "write_whole", no_space)
        checkpoints.save(1, make_state(1), {}, META)
        with pytest.raises(CheckpointError, match=r"saving step 1 failed.*there is no complete checkpoint"):
            checkpoints.save(2, make_state(2), {}, META)
    assert checkpoints.save(2, make_state(2), {}, META)
    checkpoints.close()
    assert ck.steps(tmp_path) == [2]


def test_writes_that_the_system_cuts_short_fail_the_save_and_not_the_earlier_step(tmp_path, capfd):
    """C072: the system itself refuses the writes of the array files (a limit on file size)."""
    big = {"params": {"x": jnp.asarray(np.random.default_rng(0).standard_normal(1_000_000, np.float32))}}
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, make_state(1), {}, META)
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 failed: .* large; step 1 is the newest complete") as e:
            checkpoints.save(2, big, {}, META)
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(e.value).splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert checkpoints.save(2, big, {}, META)
    checkpoints.close()
    assert ck.verify(tmp_path) == [(1, []), (2, [])]
    assert "Traceback" not in capfd.readouterr().err


def test_a_file_system_of_five_megabytes(tmp_path):
    """C072: the third of three saves of 2 MB each finds no room."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here; the other tests of a full disk cover this one")
    try:
        states = [
            {"params": {"x": jnp.asarray(np.random.default_rng(i).standard_normal(500_000, np.float32))}}
            for i in range(3)
        ]
        checkpoints = Checkpoints(tmp_path, KEEP_ALL)
        checkpoints.save(0, states[0], {}, META)
        checkpoints.save(1, states[1], {}, META)
        with pytest.raises(CheckpointError, match=r"step 2 failed: the disk is full .*step 1 is the newest complete"):
            checkpoints.save(2, states[2], {}, META)
            checkpoints.wait()
        got = checkpoints.restore(abstract(states[1]))
        assert (got.step, got.skipped) == (1, [])
        assert_same(got.state, states[1])
        checkpoints.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# Several processes

TWO_PROCESSES = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 2, int(sys.argv[2]))
from pathlib import Path
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformer_jax import checkpoint as ck
from transformer_jax import step_folders
from transformer_jax.config import CheckpointConfig

folder = Path(sys.argv[1])
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("data"))
value = np.arange(24, dtype=np.float32).reshape(8, 3)
x = jax.make_array_from_callback((8, 3), rows, lambda index: value[index])
step = jax.jit(lambda: jnp.int32(3), out_shardings=NamedSharding(mesh, PartitionSpec()))()
state = {"step": step, "params": {"x": x}}
abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
checkpoints = ck.Checkpoints(folder, CheckpointConfig(keep_last=2))
try:
    checkpoints.restore(abstract)
    raise SystemExit("restored from nothing")
except ck.NoCheckpointError:
    pass
for step in (1, 2, 3):
    checkpoints.save(step, state, {"row": step}, {})
checkpoints.wait()
assert ck.steps(folder) == [2, 3]
got = checkpoints.restore(abstract, step=2)
for a, b in zip(got.state["params"]["x"].addressable_shards, x.addressable_shards):
    np.testing.assert_array_equal(a.data, b.data)
checkpoints.save(3, state, {"row": 33}, {})
checkpoints.wait()
if jax.process_index() == 0:
    write, step_folders.write_digests = step_folders.write_digests, lambda *a: 1 / 0
checkpoints.save(4, state, {}, {})
try:
    checkpoints.wait()
    raise SystemExit("a failure on process 0 went unnoticed")
except ck.CheckpointError:
    pass
if jax.process_index() == 0:
    step_folders.write_digests = write
checkpoints.save(5, state, {"row": 5}, {})
checkpoints.close()
"""


@pytest.mark.slow
def test_two_processes_save_together_and_one_process_reads_it(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = tmp_path / "checkpoints"
    processes = [start(TWO_PROCESSES, folder, i, port) for i in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
    assert ck.verify(folder) == [(3, []), (5, [])]
    assert ck.read_meta(folder, 3)[1] == {"row": 33}
    step, params, data, _ = ck.read_params(folder)
    assert (step, data) == (5, {"row": 5})
    np.testing.assert_array_equal(params["x"], np.arange(24, dtype=np.float32).reshape(8, 3))
