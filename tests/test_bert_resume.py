"""Stopped or killed at any moment and gone on with, a run is the run that was never stopped."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run

from bert_jax.data import PretrainingData
from bert_jax.pretrain import pretrain
from transformer_jax import checkpoint
from transformer_jax.config import UserError
from transformer_jax.report import read_records


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(scope="module")
def one_device(cache):
    """Runs of this file use the first device only, which compiles faster."""
    with tiny_run.one_device():
        yield


def settings(folder, **changes):
    return tiny_run.config(folder, **{"train_log_every": 1, "train_eval_every": 8, **changes})


class Recorded:
    """A run in `folder`, in as many processes as calls of `go`, with what every step saw."""

    def __init__(self, folder, patch, **changes):
        self.config, self.ids, self.values, self.folder = settings(folder, **changes), {}, {}, folder
        self.patch = patch

    def go(self, stop=None):
        batch, size = PretrainingData.batch, self.config.train.batch_size

        def recorded(data, first_row, count, offset=0):
            self.ids.setdefault(first_row // size + 1, []).append(data.example_ids(first_row, count).tolist())
            return batch(data, first_row, count, offset)

        asked = tiny_run.stop_at(stop) if stop else {"on_step": lambda step, values: None}
        on_step = asked.pop("on_step")

        def note(step, values):
            self.values.setdefault(step, []).append(values)
            on_step(step, values)

        with self.patch.context() as patch:
            patch.setattr(PretrainingData, "batch", recorded)
            return pretrain(self.config, on_step=note, **asked)


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.array(x), np.array(y)), a, b)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, one_device):
    """20 steps without a stop, dropout on; the data is shared by all runs."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_run.prepare(folder / "prepared")
    run = Recorded(folder, pytest.MonkeyPatch)
    run.result = run.go()
    assert not run.result.interrupted
    return run


def stopped_copy(straight, folder, patch=pytest.MonkeyPatch, **changes):
    return Recorded(folder, patch, data=straight.config.data, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(3, 13, 20), (5,), (2, 7, 10, 14), (16, 19)])
def test_a_run_with_stops_is_the_run_without(straight, tmp_path, stops):
    """C006, C013, C043: same examples in the same order, same rates and losses, bit-equal state; 16 steps an epoch."""
    run = stopped_copy(straight, tmp_path)
    for stop in stops:
        result = run.go(stop)
        # A stop after the last step comes before the last evaluation, which the next process makes up for.
        assert int(result.state.step) == stop and result.interrupted
    result = run.go()
    assert not result.interrupted
    assert sorted(run.ids) == list(range(1, 21))
    for step in range(1, 21):
        # The prefetch thread may have made a batch that the stop then left unused: it is made again, and the same.
        assert all(ids == straight.ids[step][0] for ids in run.ids[step]), step
        (values,) = run.values[step]
        assert values == straight.values[step][0], step
    assert len({tuple(run.ids[s][0]) for s in run.ids}) == 20
    assert_same(result.state, straight.result.state)
    assert result.evaluation == straight.result.evaluation

    timeless = ("seconds", "per_second", "mfu")
    records = [
        [{k: v for k, v in r.items() if not k.endswith(timeless)} for r in read_records(f / "run" / "metrics.jsonl")]
        for f in (tmp_path, straight.folder)
    ]
    assert records[0] == records[1]
    assert checkpoint.steps(tmp_path / "run")[-1] == 20


def damage(step_folder):
    file = max((step_folder / "state").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(straight, tmp_path, capsys):
    run = stopped_copy(straight, tmp_path)
    run.go(13)
    damage(tmp_path / "run" / "checkpoints" / "13")
    capsys.readouterr()
    result = run.go()
    err = capsys.readouterr().err
    assert "step 13 passed over" in err and "has changed since it was written" in err
    assert "going on from step 10, 80 rows seen" in err
    assert_same(result.state, straight.result.state)
    assert [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["split"] == "train"] == [
        *range(1, 21)
    ]


@pytest.mark.slow
def test_when_no_checkpoint_can_be_used_the_run_does_not_start_afresh(straight, tmp_path):
    run = stopped_copy(straight, tmp_path)
    run.go(3)
    damage(tmp_path / "run" / "checkpoints" / "3")
    with pytest.raises(UserError, match=r"none of the checkpoints can be used(.|\n)*step 3"):
        run.go()


@pytest.mark.slow
def test_a_save_cut_off_before_any_was_complete_starts_afresh_and_says_so(straight, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints" / "5" / "state").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"split": "train", "step": 5, "loss": 1.0}\n')
    result = stopped_copy(straight, tmp_path).go()
    err = capsys.readouterr().err
    assert "step 5 passed over: no digests.json" in err
    assert "the records here reach step 5, and there is no checkpoint to go on from: training begins again" in err
    assert_same(result.state, straight.result.state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_hidden_size": 64}, r"model\.hidden_size: 32 in the checkpoint, 64 now"),
        ({"optimizer_name": "lamb"}, r"optimizer\.name: 'adamw' in the checkpoint, 'lamb' now"),
        ({"train_seed": 5}, r"train\.seed: 0 in the checkpoint, 5 now(.|\n)*--force"),
        ({"examples_masked_lm_prob": 0.3}, r"examples\.masked_lm_prob(.|\n)*--force"),
    ],
)
def test_settings_that_make_it_another_run_are_refused(straight, changes, message):
    """C094: before anything is compiled or written."""
    before = (straight.folder / "run" / "config.toml").read_text()
    with pytest.raises(UserError, match=message):
        pretrain(settings(straight.folder, **changes))
    assert (straight.folder / "run" / "config.toml").read_text() == before


def test_another_vocabulary_is_refused(straight, tmp_path):
    """C094: of another size, and of the same size with other words."""
    shutil.copytree(straight.folder / "run", tmp_path / "run")
    for vocab, message in (
        ([*tiny_run.VOCAB, "more"], r"model\.vocab_size: 61 in the checkpoint, 62 now"),
        ([*tiny_run.VOCAB[:-1], "other"], "made with another vocabulary than this run's checkpoint"),
    ):
        tiny_run.prepare(tmp_path / "prepared", vocab=vocab)
        with pytest.raises(UserError, match=message):
            pretrain(settings(tmp_path))


@pytest.mark.slow
def test_other_text_is_refused_unless_forced(straight, tmp_path, capsys):
    shutil.copytree(straight.folder / "run", tmp_path / "run")
    tiny_run.prepare(tmp_path / "prepared", train=50)
    longer = settings(tmp_path, train_steps=21)
    with pytest.raises(UserError, match=r"not the data this run was trained on(.|\n)*--force"):
        pretrain(longer)
    assert int(pretrain(longer, force=True).state.step) == 21
    assert "going on from row 160 of the new stream" in capsys.readouterr().err


@pytest.mark.slow
def test_a_changed_batch_size_is_told_and_goes_on_from_the_count_of_rows(straight, tmp_path, capsys):
    """C094."""
    stopped_copy(straight, tmp_path).go(3)
    run = stopped_copy(straight, tmp_path, train_batch_size=4, train_steps=6)
    run.ids.clear()
    seen, batch = [], PretrainingData.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainingData, "batch", lambda *a: (seen.append(a[1:3]), batch(*a))[1])
        result = pretrain(run.config)
    err = capsys.readouterr().err
    assert "warning: changed since the checkpoint: train.batch_size: 8 in the checkpoint, 4 now" in err
    assert seen == [(24, 4), (28, 4), (32, 4)] and int(result.state.step) == 6
    assert checkpoint.read_meta(tmp_path / "run")[1]["rows"] == 36


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(straight, tmp_path, capsys):
    shutil.copytree(straight.folder / "run", tmp_path / "run")
    config = settings(tmp_path, data=straight.config.data, train_steps=22)
    assert int(pretrain(config).state.step) == 22
    assert (
        "train.steps: 20 in the checkpoint, 22 now, and the learning rate's schedule with it" in capsys.readouterr().err
    )


# Processes that are killed

DRIVER = f"""
import hashlib, os, signal, sys, threading, time
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
folder, programs, moment, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
import jax
import numpy as np
import tiny_run
from bert_jax.data import EvaluationData
from bert_jax.pretrain import pretrain
from transformer_jax import checkpoint, hosts, step_folders
from transformer_jax.config import HostsConfig
from transformer_jax.signals import StopSignal

def kill(*ignored):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at(path_or_step):
    return int(Path(str(path_or_step)).name) == number

def before(owner, name, due):
    function = getattr(owner, name)
    def patched(*arguments, **named):
        if due(*arguments):
            kill()
        return function(*arguments, **named)
    setattr(owner, name, patched)

def on_step(step, values):
    print("step", step, flush=True)
    if moment == "step" and step == number:
        kill()
    if moment == "hosts":
        time.sleep(0.1)  # so that there are steps left when the signal comes
    if moment == "time":
        threading.Timer(number, kill).start()

if moment == "saving":  # the arrays are being written behind the training
    before(checkpoint.Checkpoints, "_complete", lambda self, step, metric: killed_at(step))
if moment == "committed":  # written and renamed by Orbax, without digests
    before(step_folders, "write_digests", lambda path, *rest: killed_at(path))
if moment == "deleting":  # an old step half gone
    before(step_folders.shutil, "rmtree", lambda path, *ignored: "deleting" in str(path))
if moment == "evaluation":
    before(EvaluationData, "batch", lambda *ignored: True)
processes = 2 if moment == "hosts" else 1
place = HostsConfig(coordinator=f"127.0.0.1:{{sys.argv[5]}}", processes=processes, process=int(number) % processes)
tiny_run.cache_programs(programs)
changes = {{"train_" + k: int(v) for k, v in (a.split("=") for a in sys.argv[6:])}}
config = tiny_run.config(folder, data=tiny_run.DataConfig(prepared=str(folder.parent / "prepared")),
                         train_log_every=1, train_eval_every=8, checkpoint_keep_last=1, **changes)
with hosts.joined(place), StopSignal() as stop:
    result = pretrain(config, stop=stop, on_step=on_step)
if moment != "hosts":
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(result.state):
        digest.update(np.array(leaf).tobytes())
    print("state", digest.hexdigest(), flush=True)
sys.exit(stop.exit_code if result.interrupted else 0)
"""


def start(folder, cache, moment="none", number=0.0, port=0, *changes):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # one device, quick to compile for
    command = [sys.executable, "-c", DRIVER, folder, cache, moment, number, port, *changes]
    return subprocess.Popen(
        [str(a) for a in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def killed_runs(straight, cache, tmp_path_factory):
    """A folder with prepared data, and the digest of the final state of a run in it that was left alone."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_run.prepare(folder / "prepared")
    code, out, err = finish(start(folder / "straight", cache))
    assert code == 0, err
    return folder, out.splitlines()[-1]


@pytest.mark.slow
def test_killed_at_arbitrary_moments_and_gone_on_with_the_end_is_bit_equal(killed_runs, cache):
    """C006, C015: before any save, while saving, between commit and digest, while evaluating, while deleting, and at
    three times drawn anew in each test run."""
    folder, expected = killed_runs
    seconds = [round(random.uniform(0.0, 0.3), 3) for _ in range(3)]
    moments = [
        ("step", 2),
        ("saving", 5),
        ("committed", 5),
        ("evaluation", 0),
        ("deleting", 0),
        *(("time", s) for s in seconds),
    ]
    for moment, number in moments:
        code, out, err = finish(start(folder / "killed", cache, moment, number))
        if moment == "time" and code == 0:
            break  # it was done before
        assert code == -signal.SIGKILL, (moments, moment, err)
    code, out, err = finish(start(folder / "killed", cache))
    assert code == 0, (moments, err)
    assert out.splitlines()[-1] == expected, moments
    assert [p for _, p in checkpoint.verify(folder / "killed" / "run")] == [[]]
    records = read_records(folder / "killed" / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r["split"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["split"] == "heldout"] == [8, 16, 20]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_once_says_how_to_go_on_and_leaves(killed_runs, cache, number, code):
    folder = killed_runs[0] / number.name
    process = start(folder, cache, "none", 0, 0, "steps=100000")
    while process.stdout.readline() != "step 3\n":
        pass
    process.send_signal(number)
    returned, out, err = finish(process)
    assert returned == code, err
    (step,) = checkpoint.steps(folder / "run")
    assert f"{number.name}: step {step} is saved; the same command goes on from there" in err
    assert step <= int(out.splitlines()[-2].split()[1]) + 1 or step >= 3
    assert "Traceback" not in err


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_and_a_signal_to_one_stops_both(killed_runs, cache):
    """C026, C037: dropout on; the second process alone gets the signal, and both leave with the same step saved."""
    folder = killed_runs[0] / "hosts"

    def both():
        port = free_port()
        return [start(folder, cache, "hosts", i, port) for i in range(2)]

    processes = both()
    while processes[1].stdout.readline() != "step 3\n":
        pass
    processes[1].send_signal(signal.SIGTERM)
    stopped = [finish(p) for p in processes]
    assert [code for code, _, _ in stopped] == [143, 143], stopped
    (step,) = checkpoint.steps(folder / "run")
    assert 3 < step < 20
    assert f"a signal to another process: step {step} is saved" in stopped[0][2]

    for code, _, err in [finish(p) for p in both()]:
        assert code == 0, err
    alone = read_records(killed_runs[0] / "straight" / "run" / "metrics.jsonl")
    together = read_records(folder / "run" / "metrics.jsonl")
    assert [(r["step"], r["split"]) for r in together] == [(r["step"], r["split"]) for r in alone]
    for here, there in zip(together, alone, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)
        assert here["n/mlm"] == there["n/mlm"]
    for here, there in zip(together[:4], alone[:4], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
