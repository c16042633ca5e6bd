"""Several real processes on one machine: the same run as one process makes, and none that waits for ever."""

import json
import shutil
import signal
import time

import jax
import pytest
import tiny_hosts
from tiny_hosts import Processes, settings

from transformer_jax import checkpoint, exit_codes, goodput, host_check, hosts, sharding
from transformer_jax.config import ConfigError, HostsConfig, UserError
from transformer_jax.goodput import Clock
from transformer_jax.host_links import JoinError
from transformer_jax.report import read_records

STEPS, BATCH = 12, 12
QUICK = {"hosts_heartbeat": 12, "hosts_join_limit": 200.0}


def one_process(made, monkeypatch):
    """The run of these settings in this process, on one device."""
    make_mesh = sharding.make_mesh
    monkeypatch.setattr(sharding, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
    return tiny_hosts.train(made, Never(), Clock())


class Never:
    name, exit_code = "SIGTERM", 143

    def __call__(self):
        return False


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, without a stop."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        one_process(settings(folder), patch)
    return folder / "run"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes, without a stop, and with a trace of two steps, which changes no loss."""
    folder = tmp_path_factory.mktemp("two")
    with Processes(folder, settings(folder), 2, what=("--profile-steps", "3:4")) as processes:
        processes.succeed()
    return processes, folder / "run"


def losses(run_dir, split="train"):
    return {r["step"]: r["loss"] for r in read_records(run_dir / "metrics.jsonl") if r["split"] == split}


def assert_same_losses(run_dir, other, relative=1e-5):
    for split, steps in (("train", range(1, STEPS + 1)), ("heldout", (6, 12))):
        here, there = losses(run_dir, split), losses(other, split)
        assert sorted(here) == sorted(there) == list(steps)
        assert here == pytest.approx(there, rel=relative)


def assert_each_row_once(run_dir, first_step=1):
    """Of the parts that all processes made: each batch whole and without overlap, each example once an epoch."""
    made = [
        (first_row + i, number)
        for parts in tiny_hosts.rows_seen(run_dir).values()
        for first_row, ids in parts
        for i, number in enumerate(ids)
    ]
    assert len({row for row, _ in made}) == len(made)
    assert sorted(row for row, _ in made) == list(range((first_step - 1) * BATCH, STEPS * BATCH))
    epoch = [number for row, number in made if row < tiny_hosts.ROWS]
    if first_step == 1:
        assert sorted(epoch) == list(range(tiny_hosts.ROWS))


@pytest.mark.slow
def test_two_processes_train_as_one(alone, two):
    """C026, C032, C091: losses to 1e-5, each row once though there is one source, all 7 held-out rows, one page."""
    processes, run_dir = two
    assert_same_losses(run_dir, alone)
    assert_each_row_once(run_dir)
    assert [r["n/mse"] for r in read_records(run_dir / "metrics.jsonl") if r["split"] == "heldout"] == [7, 7]
    assert json.loads(processes.out(0).splitlines()[-1])["n/mse"] == 7
    assert '"loss"' not in processes.out(1)
    said = processes.err(0)
    assert "2 processes joined" in said
    assert "batch 12 rows of 1: 6 per host, 6 per device" in said
    assert "2 processes alike" in said
    assert said.count("page: ") == 1 and "page: " not in processes.err(1)
    assert [p for _, p in checkpoint.verify(run_dir)] == [[], [], []]
    # Who the process was is not kept for those who copy the file.
    assert 'coordinator = ""' in (run_dir / "config.toml").read_text()
    traces = run_dir / "profile" / "plugins" / "profile" / "steps-3-4"
    assert {p.name for p in traces.iterdir()} == {"process-0.xplane.pb", "process-1.xplane.pb", "operations.json"}
    assert "trace: " in said and "trace: " not in processes.err(1)
    table = goodput.account(goodput.read_times(run_dir))
    assert table["stops"] == 0 and table["seconds"]["compile"] > 0 and table["seconds"]["start"] > 0


def test_settings_come_from_the_run_file_before_the_environment():
    environment = {"JAX_COORDINATOR_ADDRESS": "there:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    assert hosts.place(HostsConfig(), {}) is None
    assert hosts.place(HostsConfig(mode="single"), environment) is None
    assert hosts.place(HostsConfig(), environment) == ("there:1", 3, 2, None)
    assert hosts.place(HostsConfig(coordinator="here:2", process=0), environment) == ("here:2", 3, 0, None)
    assert hosts.place(HostsConfig(coordinator="here:2", processes=1, process=0), {}) is None
    assert hosts.several_asked_for(HostsConfig(mode="auto"))


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (HostsConfig(processes=2), {}, r"missing is hosts\.coordinator \(or JAX_COORDINATOR_ADDRESS\) and hosts\.proc"),
        (HostsConfig(coordinator="a:1", processes=2, process=2), {}, r"hosts\.process is 2 of 2 .* from 0 to 1"),
        (HostsConfig(coordinator="a:1", processes=2), {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID is 'one'"),
    ],
)
def test_settings_that_cannot_be_are_named(config, environment, message):
    with pytest.raises(ConfigError, match=message):
        hosts.place(config, environment)


def test_nothing_to_detect_is_a_message(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r'hosts\.mode is "auto"'):
        hosts.find(HostsConfig(mode="auto"))


def test_errors_of_other_processes_are_told_from_own():
    remote = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    assert hosts.is_remote(remote)
    try:
        try:
            raise remote
        except ValueError as e:
            raise UserError("saving step 4 failed") from e
    except UserError as e:
        assert hosts.is_remote(e)
    assert not hosts.is_remote(UserError("hosts.heartbeat is 1; it must be at least 5"))
    assert not hosts.is_remote(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))


def test_a_difference_between_processes_names_the_process_and_both_values():
    same = {"code": "a", "train.seed": 0, "data": "x"}
    lines = host_check.differences([same, same, {**same, "train.seed": 5}], ["h0", "h1", "h2"])
    assert lines == ["train.seed: 5 on process 2 (h2), 0 on process 0 (h0)"]
    assert host_check.differences([same] * 3, ["h0"] * 3) == []


def test_rows_that_two_processes_make_or_none_are_found():
    host_check.check_rows([[(0, 6)], [(6, 6)]], 12)
    host_check.check_rows([[(0, 6)], [(0, 6)], [(6, 6)], [(6, 6)]], 12)  # a tensor axis over two hosts
    host_check.check_rows([[(0, 3), (9, 3)], [(3, 6)]], 12)
    with pytest.raises(UserError, match="row 5 of the 12 rows of a batch is made 2 times"):
        host_check.check_rows([[(0, 6)], [(5, 7)]], 12)
    with pytest.raises(UserError, match=r"row 11 .* is made 0 times"):
        host_check.check_rows([[(0, 6)], [(6, 5)]], 12)


def test_the_code_has_one_digest(tmp_path, monkeypatch):
    before = host_check.code_digest()
    assert before == host_check.code_digest()
    monkeypatch.setattr(host_check, "PACKAGES", ("transformer_jax",))
    assert host_check.code_digest() != before


def test_of_one_process_there_is_nothing_to_join():
    assert hosts.join(HostsConfig(mode="single")) is None
    with hosts.joined(HostsConfig(mode="single")) as links, pytest.raises(KeyError):
        assert links is None
        raise KeyError


# What takes longer


@pytest.mark.slow
def test_process_zero_alone_gives_up_in_time_and_names_who_is_missing(tmp_path):
    """C077: in the limit that is set, with the exit code that asks for a restart."""
    began = time.monotonic()
    with Processes(tmp_path, settings(tmp_path, hosts_join_limit=5.0), 2, only=[0]) as processes:
        assert processes.codes(120) == {0: exit_codes.RESTART}
    assert time.monotonic() - began < 60
    assert "1 of 2 processes have joined within 5 s; missing: process 1" in processes.err(0)
    assert "Traceback" not in processes.err(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_with_other_settings_or_data_do_not_start(tmp_path):
    with Processes(tmp_path, settings(tmp_path), 2, changes={1: {"train.seed": 5}}) as processes:
        assert processes.codes() == {0: exit_codes.MISTAKE, 1: exit_codes.MISTAKE}
    for i in range(2):
        assert "train.seed: 5 on process 1" in processes.err(i) and ", 0 on process 0" in processes.err(i)
        assert "Traceback" not in processes.err(i)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_fault_of_one_process_ends_the_other_with_its_reason(tmp_path):
    with Processes(tmp_path, settings(tmp_path), 2, what=("error", 1, 3)) as processes:
        assert processes.codes() == {0: exit_codes.FAULT, 1: exit_codes.FAULT}
    assert "Traceback" in processes.err(1) and "something is broken here" in processes.err(1)
    assert "process 1 (" in processes.err(0) and "RuntimeError: something is broken here" in processes.err(0)


@pytest.mark.slow
def test_saved_by_four_processes_a_run_goes_on_with_one_two_or_three(alone, tmp_path, monkeypatch):
    """C026, C031, C032, C037: the signal comes to one process of four, during the evaluation; all save the same step.
    The others make the same global batches, and every evaluation counts 7 rows."""
    with Processes(tmp_path / "four", settings(tmp_path / "four"), 4, what=("evaluation", 2, 6)) as processes:
        assert set(processes.codes().values()) == {128 + signal.SIGTERM}, processes.err(0)
    step = checkpoint.steps(tmp_path / "four" / "run")[-1]
    assert 6 <= step <= 8  # the processes' agreement is a batch, or a step, late
    assert f"a signal to another process: step {step} is saved" in processes.err(0)
    assert processes.err(2).count("saving after this step") == 1
    before = json.loads((alone / "metrics.jsonl").read_text().splitlines()[0])
    assert before["loss"] == pytest.approx(losses(tmp_path / "four" / "run")[1], rel=1e-5)

    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "four" / "run", folder / "run")
        if count == 1:
            one_process(settings(folder), monkeypatch)
        else:
            with Processes(folder, settings(folder), count) as processes:
                processes.succeed()
            assert f"going on from step {step}, {step * BATCH} rows seen" in processes.err(0)
            assert_each_row_once(folder / "run", first_step=step + 1)
        assert_same_losses(folder / "run", alone)
        found = [r["n/mse"] for r in read_records(folder / "run" / "metrics.jsonl") if r["split"] == "heldout"]
        assert found == [7, 7]


@pytest.mark.slow
def test_whatever_becomes_of_a_process_the_other_leaves_in_time_and_the_run_goes_on(two, tmp_path):
    """C006, C015: killed in a step, in a save, process 0 killed, stopped by SIGSTOP, stalled; the losses are equal."""
    moments = [
        ("kill", 1, 3),
        ("save", 1, 4),
        ("kill", 0, 6),
        ("freeze", 1, 7),
        ("hang", 0, 10),
    ]
    for what, who, number in moments:
        # A stalled process is found by its watchdog; the others are to be found without it.
        limits = {"hosts_step_limit": 4.0} if what == "hang" else {}
        made = settings(tmp_path, **QUICK, **limits)
        with Processes(tmp_path, made, 2, what=(what, who, number)) as processes:
            while processes.processes[1 - who].poll() is None and f"step {number - 1}\n" not in processes.out(1 - who):
                time.sleep(0.1)
            began = time.monotonic()
            codes = processes.codes(but=(who,) if what == "freeze" else ())
        said = processes.err(1 - who)
        context = (what, codes, said[-3000:], processes.err(who)[-3000:])
        assert codes[1 - who] == exit_codes.RESTART, context
        assert time.monotonic() - began < 60, context
        if what == "freeze":
            assert f"process {who} (" in said and "no sign of life" in said, context
            assert "JAX's runtime has ended this process" in said, context
        elif what == "kill" or what == "save":
            assert f"process {who} (" in said and "is lost" in said, context
            assert codes[who] == 128 + signal.SIGKILL, context
        if what == "hang":
            # The other waits for it, so that its own watchdog may be the first to see that nothing moves.
            assert (f"process {who} (" in said and "is lost" in said) or "stalled: no progress" in said, context
            assert codes[who] == exit_codes.RESTART, context
            assert "stalled: no progress" in processes.err(who) and "time.sleep" not in said, context
            assert "tiny_hosts.py" in (tmp_path / "run" / "log.txt").read_text(), context
    with Processes(tmp_path, settings(tmp_path), 2) as processes:
        processes.succeed()
    assert losses(tmp_path / "run") == losses(two[1])
    assert losses(tmp_path / "run", "heldout") == losses(two[1], "heldout")
    assert [p for _, p in checkpoint.verify(tmp_path / "run")] == [[], [], []]
    found = goodput.account(goodput.read_times(tmp_path / "run"))
    assert found["stops"] == len(moments) and found["lost_steps"] > 0 and found["lost_seconds"] > 0
    assert "work lost between 6 starts" in (tmp_path / "run" / "report.html").read_text()


def test_a_join_that_fails_is_a_users_error():
    assert issubclass(JoinError, UserError)
