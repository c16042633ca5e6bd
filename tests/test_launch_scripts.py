"""The scripts of `launch/`: shellcheck, their dry runs as the READMEs show them, and Cloud TPU VMs with a stand-in."""

import json
import platform
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest
from stand_ins import ROOT, call, stand_in

LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
READMES = sorted(LAUNCH.glob("README*.md"))
TPU = ("--name", "bert-1", "--zone", "us-west4-a")
RUN = (*TPU, "--run-file", "launch/runs/demo_en.toml")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if platform.machine() == "aarch64" and not shellcheck.exists():
        pytest.skip("the development set has no ShellCheck for Linux on ARM")
    done = call(shellcheck, "--norc", script)
    assert done.returncode == 0, done.stdout


def documented():
    """Each command of the READMEs' consoles with what is printed after it."""
    found = []
    for readme in READMES:
        for block in re.findall(r"```console\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                found.append(pytest.param(command, printed, id=f"{readme.name}: {command[:60]}"))
    return found


@pytest.mark.parametrize(("command", "printed"), documented())
def test_dry_runs_print_what_the_readmes_say(command, printed):
    assert "--dry-run" in command
    done = call("sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_both_readmes_document_the_same_dry_runs():
    found = {}
    for case in documented():
        found.setdefault(case.id.partition(":")[0], []).append(case.values)
    assert len(found) == len(READMES) == 2
    english, chinese = found.values()
    assert english == chinese and len(english) >= 8


# Cloud TPU VMs

# Notes its words; `describe` prints the state, which is ACTIVE once a request was made; `ssh` runs the command here.
GCLOUD = """
{python} -S -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>{folder}/calls
case "$3 $4" in
  "queued-resources describe") [ -f {folder}/made ] && echo ACTIVE || echo "$STATE" ;;
  "queued-resources create") : >{folder}/made ;;
  "tpu-vm ssh")
    [ "$STATE" = ACTIVE ] || exit 0
    for word in "$@"; do
      case $word in --command=*) cd {folder} && HOME={folder} sh -c "${{word#--command=}}" ;; esac
    done ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    """A folder with a `gcloud` in `bin`, which is also the home of a worker in which the project is installed."""
    stand_in(tmp_path / "bin", "gcloud", GCLOUD.format(python=sys.executable, folder=tmp_path))
    stand_in(tmp_path / "bin", "sudo", "exit 1")  # no test may get that far
    home = tmp_path / "bert-transformer-jax"
    (home / "launch").mkdir(parents=True)
    (home / ".venv").mkdir()
    shutil.copy(LAUNCH / "restart.py", home / "launch")
    program = "trap 'echo saved; exit 143' TERM; echo \"$@\"; while :; do sleep 0.05; done"
    stand_in(home / ".venv" / "bin", "bert-jax", program)
    return tmp_path


def tpu_vm(cloud, *words, state="ACTIVE"):
    return call("sh", LAUNCH / "tpu_vm.sh", *words, path=cloud / "bin", STATE=state)


def calls(cloud):
    return [["gcloud", *json.loads(line)] for line in (cloud / "calls").read_text().splitlines()]


@pytest.mark.parametrize("command", ["create", "status", "prepare", "check", "run", "logs", "stop", "delete"])
def test_a_dry_run_prints_the_very_words_that_are_run(cloud, command):
    words = [*RUN, "--project", "p-1", "--spot"]
    words += ["--", "--data.recipe", 'it\'s "here" $HOME;'] if command in ("prepare", "check", "run") else []
    printed = tpu_vm(cloud, command, "--dry-run", *words)
    assert printed.returncode == 0 and not (cloud / "calls").exists()
    assert tpu_vm(cloud, command, *words, state="NONE").returncode == 0
    assert [shlex.split(line) for line in printed.stdout.splitlines()] == calls(cloud)


def test_a_run_on_a_worker_starts_once_outlives_the_shell_and_saves_when_stopped(cloud):
    words = [*RUN, "--run-dir", cloud / "a run"]
    log = cloud / "run.log"
    expected = (
        f"\npretrain launch/runs/demo_en.toml --run_dir {cloud}/a run --data.prepared /mnt/runs/prepared/demo_en "
        "--hosts.mode auto --data.recipe it's here\n"
    )
    try:
        started = tpu_vm(cloud, "run", *words, "--", "--data.recipe", "it's here")
        assert started.returncode == 0, started.stderr
        end = time.monotonic() + 10
        while expected not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        again = tpu_vm(cloud, "run", *words)
        assert "a run is there already" in again.stderr
        assert "a run is there; stop it first" in tpu_vm(cloud, "install", *words).stderr
    finally:
        stopped = tpu_vm(cloud, "stop", *TPU)
    assert stopped.returncode == 0, stopped.stderr
    assert "saved\n" in log.read_text() and "exit code 143: stopped by SIGTERM" in log.read_text()
    assert log.read_text().count("restart: starts ") == 1
    assert "no run is there" in tpu_vm(cloud, "stop", *TPU).stderr


def test_after_a_preemption_the_machines_are_made_anew_and_the_run_goes_on(cloud):
    words = ["restart", *RUN, "--spot", "--if-lost"]
    stand_in(cloud / "bin", "git", "exit 0")
    assert tpu_vm(cloud, *words, state="SUSPENDED").returncode == 0
    found = calls(cloud)
    assert [" ".join(call[3:5]) for call in found] == [
        "queued-resources describe",
        "queued-resources delete",
        "queued-resources create",
        "queued-resources describe",
        "tpu-vm scp",
        "tpu-vm ssh",
        "tpu-vm ssh",
    ]
    assert "--spot" in found[2]
    (cloud / "calls").unlink()
    assert tpu_vm(cloud, *words).returncode == 0
    assert len(calls(cloud)) == 1  # the machines are there: it only asks
    (cloud / "made").unlink()
    waiting = tpu_vm(cloud, *words, state="WAITING_FOR_RESOURCES")
    assert waiting.returncode == 2 and "bert-1 is WAITING_FOR_RESOURCES" in waiting.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command; create, wait, status"),
        (["begin"], "there is no command begin"),
        (["create", "--zone", "us-west4-a"], "no name; give --name NAME or set TPU_VM_NAME"),
        (["create", "--name", "bert-1"], "no zone; give --zone ZONE or set TPU_VM_ZONE"),
        (["create", *TPU, "--name"], "--name needs a value"),
        (["create", *TPU, "--name", "Bert 1"], "--name is 'Bert 1'; it must look like bert-1"),
        (["create", *TPU, "--zone", "us-west4"], "--zone is 'us-west4'; it must look like us-west4-a"),
        (["create", *TPU, "--type", "v9-8"], "no runtime version is known for v9-8; give --runtime"),
        (["create", *TPU, "--size", "8"], "there is no option --size"),
        (["install", *TPU, "--nfs", "10.0.0.2:/a b"], "--nfs is '10.0.0.2:/a b'; it must look like 10.0.0.2:/share"),
        (["run", *TPU], "no run file; give --run-file"),
        (["run", *TPU, "--run-file", "none.toml"], "none.toml is not a file of this repository"),
        (["run", *TPU, "--run-file", "../none.toml"], "../none.toml is not in this repository"),
        (["run", *RUN, "--run-dir", "gs://a"], "it must look like gs://BUCKET/bert-1"),
        (["run", *RUN, "--run-dir", "a"], "'a' must be gs://BUCKET/... or an absolute path"),
        (["create", *TPU, "--type", "v5e-16"], "Google's own name for it is v5litepod-16"),
        (["create", *TPU, "--", "--train.steps", "3"], "create takes nothing after --"),
        (["install", *TPU, "--nfs", "10.0.0.2:/a\n$(b)"], "--nfs has more than one line"),
        (["create", *TPU, "--name", "a\nb"], "--name has more than one line"),
        (["run", *RUN, "--program", "x"], "--program is 'x'; bert-jax or transformer-jax"),
    ],
)
def test_mistakes_are_said_before_anything_runs(cloud, words, said):
    done = tpu_vm(cloud, *words)
    assert done.returncode == 2 and done.stderr.startswith("tpu_vm.sh: ") and len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not (cloud / "calls").exists()


def test_options_come_before_the_environment_and_the_image_follows_the_type():
    script = ("sh", LAUNCH / "tpu_vm.sh", "create", "--dry-run")
    environment = {"TPU_VM_NAME": "a", "TPU_VM_ZONE": "us-east5-b", "TPU_VM_TYPE": "v6e-16", "TPU_VM_SPOT": "1"}
    done = call(*script, "--name", "b", **environment).stdout
    assert done.startswith("gcloud compute tpus queued-resources create b --node-id=b --accelerator-type=v6e-16 ")
    assert done.endswith("--runtime-version=v2-alpha-tpuv6e --spot --zone=us-east5-b\n")
    for no in ("0", "no", "false"):
        assert "--spot" not in call(*script, **environment | {"TPU_VM_SPOT": no}).stdout


def test_run_folder_and_data_may_be_in_a_bucket():
    words = ("--run-dir", "gs://bucket/runs/one", "--prepared", "gs://bucket/prepared/one")
    done = call("sh", LAUNCH / "tpu_vm.sh", "run", "--dry-run", *RUN, *words).stdout
    assert "launch/restart.py --run-dir gs://bucket/runs/one -- " in done
    assert "--run_dir gs://bucket/runs/one --data.prepared gs://bucket/prepared/one" in done
