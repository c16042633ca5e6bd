"""Launching on Kubernetes, under Slurm and on one GPU node: the manifest, and what the scripts do with stand-ins."""

import re

import pytest
import yaml
from stand_ins import ROOT, call, stand_in

LAUNCH = ROOT / "launch"
NO_CLAIM = ("--name", "bert-1", "--image", "r/p/bert:1", "--run-file", "launch/runs/demo_en.toml")
GKE = (*NO_CLAIM, "--claim", "runs")
BUCKET = ("--run-dir", "gs://runs/bert-1", "--prepared", "gs://runs/prepared/demo_en")

# Kubernetes

TEXT, NUMBER, FLAG = str, int, bool
LABELS = {"*": TEXT}
# What the schemas of JobSet (v1alpha2), Job and Pod have of the fields that are used: another field is a mistake. A
# leading "!" marks what those schemas, or this project, cannot do without.
POD = {
    "!restartPolicy": TEXT,
    "terminationGracePeriodSeconds": NUMBER,
    "serviceAccountName": TEXT,
    "!nodeSelector": LABELS,
    "tolerations": [{"!key": TEXT, "!operator": TEXT, "!value": TEXT, "!effect": TEXT}],
    "!containers": [
        {
            "!name": TEXT,
            "!image": TEXT,
            "!command": [TEXT],
            "!resources": {"!requests": {"*": NUMBER}, "!limits": {"*": NUMBER}},
            "volumeMounts": [{"!name": TEXT, "!mountPath": TEXT}],
        }
    ],
    "volumes": [{"!name": TEXT, "!persistentVolumeClaim": {"!claimName": TEXT}}],
}
EXITS = {"!containerName": TEXT, "!operator": TEXT, "!values": [NUMBER]}
JOB = {
    "!completionMode": TEXT,
    "!parallelism": NUMBER,
    "!completions": NUMBER,
    "!backoffLimit": NUMBER,
    "!podFailurePolicy": {"!rules": [{"!action": TEXT, "!onExitCodes": EXITS}]},
    "!template": {"!spec": POD},
}
JOBSET = {
    "!apiVersion": TEXT,
    "!kind": TEXT,
    "!metadata": {"!name": TEXT, "annotations": LABELS},
    "!spec": {
        "!network": {"enableDNSHostnames": FLAG, "subdomain": TEXT},
        "!failurePolicy": {
            "!maxRestarts": NUMBER,
            "rules": [{"!name": TEXT, "!action": TEXT, "onJobFailureReasons": [TEXT]}],
        },
        "!replicatedJobs": [{"!name": TEXT, "!replicas": NUMBER, "!template": {"!spec": JOB}}],
    },
}


def faults(value, schema, at=""):
    """Where a value does not fit a schema."""
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{at}: {value!r} is no {schema.__name__}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{at}: {value!r} is no list"]
        return [fault for i, item in enumerate(value) for fault in faults(item, schema[0], f"{at}[{i}]")]
    if not isinstance(value, dict):
        return [f"{at}: {value!r} is no mapping"]
    known = {key.lstrip("!"): inner for key, inner in schema.items()}
    found = [f"{at}: no {key[1:]}" for key in schema if key.startswith("!") and key[1:] not in value]
    for key, inner in value.items():
        if key in known or "*" in known:
            found += faults(inner, known.get(key, known.get("*")), f"{at}.{key}")
        else:
            found.append(f"{at}: unknown {key}")
    return found


def manifest(*options):
    done = call("sh", LAUNCH / "gke.sh", "render", *GKE, *options)
    assert done.returncode == 0, done.stderr
    assert "FILL_IN" not in done.stdout
    return yaml.safe_load(done.stdout)


def pod(found):
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job, job["template"]["spec"]


@pytest.mark.parametrize("spot", [[], ["--spot"]], ids=["kept", "spot"])
def test_the_manifest_fits_the_schemas(spot):
    found = manifest(*spot)
    assert not faults(found, JOBSET)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, spec = pod(found)
    assert (job["completionMode"], job["backoffLimit"], spec["restartPolicy"]) == ("Indexed", 0, "Never")
    assert {rule["action"] for rule in found["spec"]["failurePolicy"]["rules"]} == {"FailJobSet", "RestartJobSet"}
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    assert spec["containers"][0]["name"] == job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
    assert {m["name"] for m in spec["containers"][0]["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


def test_the_schema_sees_what_is_wrong():
    found = manifest()
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "4"
    found["spec"]["replicas"] = 1
    del found["metadata"]["name"]
    assert len(faults(found, JOBSET)) == 3


def test_hosts_follow_from_topology_and_chips_and_spot_nodes_are_taken_when_asked_for():
    job, spec = pod(manifest())
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert spec["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert "spot" not in str(spec)
    job, spec = pod(manifest("--topology", "2x2x4", "--accelerator", "tpu-v5p-slice", "--spot"))
    assert job["parallelism"] == 4
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["google.com/tpu", "cloud.google.com/gke-spot"]


def test_the_pods_run_the_loop_over_the_program():
    command = pod(manifest("--program", "transformer-jax"))[1]["containers"][0]["command"]
    assert " ".join(command) == (
        "python3 launch/restart.py --run-dir /mnt/runs/bert-1 -- transformer-jax train launch/runs/demo_en.toml "
        "--run_dir /mnt/runs/bert-1 --data.prepared /mnt/runs/prepared/demo_en --hosts.mode auto"
    )


def test_in_a_bucket_no_claim_is_needed():
    done = call("sh", LAUNCH / "gke.sh", "render", *NO_CLAIM, *BUCKET, "--account", "trainer")
    assert done.returncode == 0 and "FILL_IN" not in done.stdout, done.stderr
    found = yaml.safe_load(done.stdout)
    assert not faults(found, JOBSET)
    spec = pod(found)[1]
    assert "volumes" not in spec and "volumeMounts" not in spec["containers"][0]
    assert spec["serviceAccountName"] == "trainer"
    command = " ".join(spec["containers"][0]["command"])
    assert "--run-dir gs://runs/bert-1 -- " in command
    assert "--run_dir gs://runs/bert-1 --data.prepared gs://runs/prepared" in command
    # One of the two in a bucket: the claim stays for the other.
    assert "volumes" in pod(manifest("--run-dir", "gs://runs/bert-1"))[1]
    assert "serviceAccountName" not in pod(manifest())[1]


def test_what_stands_after_two_dashes_goes_to_the_program_word_by_word():
    words = ("--", "--train.steps", "3", "--data.recipe", "data/demo_en.toml")
    found = manifest("--name", "true", "--claim", "1", *words)
    assert not faults(found, JOBSET)
    assert (found["metadata"]["name"], pod(found)[1]["volumes"][0]["persistentVolumeClaim"]["claimName"]) == (
        "true",
        "1",
    )
    assert pod(found)[1]["containers"][0]["command"][-5:] == ["auto", *words[1:]]


def test_a_check_is_made_once_and_not_by_the_loop():
    found = manifest("--check")
    assert not faults(found, JOBSET) and found["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert " ".join(pod(found)[1]["containers"][0]["command"]) == (
        "bert-jax check launch/runs/demo_en.toml --out /mnt/runs/bert-1 --data.prepared /mnt/runs/prepared/demo_en "
        "--hosts.mode auto"
    )


def test_every_word_to_fill_in_is_explained_by_an_option():
    text = (LAUNCH / "gke_jobset.yaml").read_text(encoding="utf-8")
    words = set(re.findall(r"FILL_IN_([A-Z_]+\b)", text))
    said = call("sh", LAUNCH / "gke.sh", "--help").stdout
    derived = {
        "VERB",
        "HOSTS",
        "OPTION",
        "TRAINING",
        "KEYS",
        "MOUNT",
    }  # from other options, and from what stands after --
    assert len(words) > 10
    assert not [word for word in words - derived if f"--{word.lower().replace('_', '-')} " not in said]


def test_apply_hands_over_the_manifest_that_its_dry_run_prints(tmp_path):
    stand_in(tmp_path / "bin", "kubectl", f'echo "$@" >{tmp_path}/words; cat >{tmp_path}/manifest')
    words = ("sh", LAUNCH / "gke.sh", "apply", *GKE, "--spot", "--namespace", "training")
    printed = call(*words, "--dry-run").stdout
    assert call(*words, path=tmp_path / "bin").returncode == 0
    said = (tmp_path / "words").read_text()
    assert said == "apply --filename=- --namespace=training\n"
    assert printed == f"{(tmp_path / 'manifest').read_text()}kubectl {said}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["render"], "no name; give --name NAME"),
        (["render", "--name", "a"], "no --image"),
        (["render", *GKE, "--image", "a|b"], "--image is 'a|b'"),
        (["render", *GKE, "--topology", "4x"], "--topology is '4x'; it must look like 4x4"),
        (["render", *GKE, "--topology", "3x3"], "3x3 is 9 chips, which hosts of --chips 4 do not make up"),
        (["render", *NO_CLAIM], "no --claim, and /mnt/runs/bert-1 and /mnt/runs/prepared/demo_en are not both gs://"),
        (
            ["render", *NO_CLAIM, "--run-dir", "gs://runs/a"],
            "no --claim, and gs://runs/a and /mnt/runs/prepared/demo_en",
        ),
        (["render", *GKE, "--run-dir", "gs://A"], "it must look like gs://BUCKET/NAME"),
        (
            ["render", *GKE, "--run-dir", "/data/b"],
            "it must look like /mnt/runs/NAME, in the claim, or gs://BUCKET/NAME",
        ),
        (["render", *GKE, "--account", "A"], "--account is 'A'"),
        (["render", *GKE, "--name", "A"], "--name is 'A'"),
        (["render", *GKE, "--name", "a\nb"], "--name has more than one line"),
        (["render", *GKE, "--prepared", "/data/x"], "it must look like /mnt/runs/prepared/NAME"),
        (["render", *GKE, "--", "--data.recipe", "it's"], "'it's': of keys and values only"),
        (["status", *GKE[:2], "--", "x"], "status takes nothing after --"),
        (["apply", "--dry-run", *GKE, "--image", "a|b"], "--image is 'a|b'"),
        (["begin"], "there is no command begin"),
    ],
)
def test_what_cannot_be_filled_in_is_said(words, said):
    done = call("sh", LAUNCH / "gke.sh", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gke.sh: ") and said in done.stderr


# Slurm and one GPU node

WAIT = "while :; do sleep 0.05; done"


@pytest.fixture
def slurm(tmp_path):
    """A folder whose `bin` has an `scontrol`, which notes what is queued again."""
    text = f'if [ "$1" = requeue ]; then echo "$2" >{tmp_path}/requeued; else echo n1; echo n2; fi'
    stand_in(tmp_path / "bin", "scontrol", text)
    return tmp_path


def sbatch(slurm, srun):
    """The batch script in a job of two nodes, with a stand-in for `srun`."""
    stand_in(slurm / "bin", "srun", srun)
    job = {"SLURM_JOB_ID": "31234", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    words = ["sh", LAUNCH / "slurm.sbatch", "launch/runs/demo_en.toml", "/shared/a run", "--data.recipe", "it's"]
    return call(*words, path=slurm / "bin", **job)


def test_each_task_of_a_job_gets_its_number_and_the_first_nodes_address(slurm):
    stand_in(slurm / "bin", "python3", 'echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $*"')
    done = sbatch(slurm, 'shift 2; for i in 0 1; do SLURM_PROCID=$i "$@"; done; exit 3')
    words = (
        "launch/restart.py --run-dir /shared/a run -- .venv/bin/bert-jax pretrain launch/runs/demo_en.toml "
        "--run_dir /shared/a run --data.recipe it's"
    )
    assert done.stdout.splitlines() == [f"n1:21234 2 {i} {words}" for i in (0, 1)]
    assert done.returncode == 3 and not (slurm / "requeued").exists()


@pytest.mark.parametrize(("name", "queued"), [("USR1", True), ("TERM", False)])
def test_only_the_time_limit_queues_a_job_again_after_its_save(slurm, name, queued):
    """Slurm sends USR1 to the batch script before the limit; a cancelled job is not to come back."""
    done = sbatch(slurm, f"trap 'echo saving; sleep 0.2; echo saved; exit 143' TERM; kill -{name} $PPID; {WAIT}")
    assert (done.returncode, done.stdout) == (143, "saving\nsaved\n"), done.stderr
    assert (slurm / "requeued").exists() == queued


def test_slurm_directives_stand_before_the_first_command():
    lines = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    given = {line.removeprefix("#SBATCH --").partition("=")[0] for line in lines[:first] if line.startswith("#SBATCH")}
    assert {"ntasks-per-node", "requeue", "signal", "open-mode"} <= given
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm.sbatch", "a.toml"], "a run file and a run folder are needed"),
        (["slurm.sbatch", "a.toml", "runs/a"], "there is no run file a.toml"),
        (["slurm.sbatch", "launch/runs/demo_en.toml", "runs/a"], "this is not a Slurm job"),
        (["gpu_node.sh"], "no command; install, check or run"),
        (["gpu_node.sh", "--dry-run", "run", "a.toml"], "a run file and a run folder are needed"),
        (["gpu_node.sh", "--dry-run", "run", "a.toml", "runs/a"], "there is no run file a.toml"),
    ],
)
def test_a_node_and_a_job_say_what_is_missing(words, said):
    done = call("sh", LAUNCH / words[0], *words[1:])
    assert done.returncode == 2 and said in done.stderr
