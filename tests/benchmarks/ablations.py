"""The ablations of the papers, run for real in their small form: pretrain, fine-tune on two tasks, and one table.

    python tests/benchmarks/ablations.py OUT [NAME ...]        NAME: a file of launch/runs/ablations; default: all

Each run file is trained as it stands (the same steps and slots for all), and then fine-tuned, three seeds each, on
entities (`home_slots_en`, entity F1) and on pairs (`bible_pairs`, accuracy), both with all of their training rows. A
linear probe on the mean of the last layer shows what the features hold without fine-tuning; of `left_to_right` and
`right_to_left`, also side by side, as ELMo has them. The step of the best dev score is kept, and that score is shown.
Prepared text lies in OUT too. One thread. OUT keeps what is done: the same command goes on after a stop, also with
more names. A line of JSON for each run, then the table of all that are done. CPU seconds are those of pretraining, of a
run that was stopped only those since.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "launch" / "runs" / "ablations"
ORDER = (
    "base", "no_nsp", "sop", "left_to_right", "right_to_left", "mask_rate_30", "mask_rate_40", "mask_100_0_0",
    "mask_80_0_20", "mask_80_20_0", "mask_0_0_100", "dynamic_jargon", "static_jargon", "size_l3_h768_a12",
    "size_l6_h768_a3", "size_l6_h768_a12", "size_l12_h768_a12", "size_l12_h1024_a16", "size_l24_h1024_a16",
)  # fmt: skip
BOTH = "left_to_right + right_to_left"
SEEDS = (0, 1, 2)
TASKS = {"home_slots_en": ("f1", "32"), "bible_pairs": ("accuracy", "64")}
"""Task file -> the score shown, and the length of rows."""
TRAINING = ("--train.epochs", "2", "--train.learning_rate", "5e-4", "--train.seeds", *map(str, SEEDS))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for text, runs and results")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ORDER)}")
    options = parser.parse_args()
    unknown = set(options.names) - set(ORDER)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return options


def bert_jax(folder: Path, *arguments: str) -> tuple[str, float]:
    """What a command prints, and the CPU seconds that it took, starting and compiling included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "bert_jax.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def task_file(task: str) -> str:
    return str(ROOT / "launch" / "tasks" / f"{task}.toml")


def probed(folder: Path, task: str, runs: list[str]) -> float:
    """The score of a linear probe on the features of these runs."""
    metric, length = TASKS[task]
    sources = [x for run in runs for x in ("--from", f"runs/{run}")]
    text, _ = bert_jax(folder, "probe", task_file(task), *sources, "--json", "--inputs.max_seq_length", length)
    return float(json.loads(text)["dev"]["dev"][metric])


def run(folder: Path, name: str) -> dict[str, Any]:
    """Pretrain, fine-tune and probe one run file."""
    file = str(RUNS / f"{name}.toml")
    bert_jax(folder, "prepare", file, "--workers", "1")
    text, cpu = bert_jax(folder, "pretrain", file, "--json")
    line: dict[str, Any] = {"run": name, "cpu_s": round(cpu, 1), "held_out": json.loads(text.splitlines()[-1])}
    for task, (metric, length) in TASKS.items():
        text, _ = bert_jax(
            folder, "finetune", task_file(task), "--from", f"runs/{name}", "--out", f"runs/{name}-{task}", "--json",
            "--inputs.max_seq_length", length, *TRAINING,
        )  # fmt: skip
        figures = json.loads(text)["summary"][0]["dev"]["dev"][metric]
        line[task] = {"mean": round(figures["mean"], 4), "std": round(figures["std"], 4)}
        line[task]["probe"] = round(probed(folder, task, [name]), 4)
    return line


def side_by_side(folder: Path) -> dict[str, Any]:
    """A probe on the features of both one-way models."""
    runs = BOTH.split(" + ")
    return {"run": BOTH} | {task: {"probe": round(probed(folder, task, runs), 4)} for task in TASKS}


def table(found: dict[str, dict[str, Any]]) -> str:
    """A line for each run that is done."""
    heads = [f"{task} {metric}" for task, (metric, _) in TASKS.items()]
    lines = [
        "| run | CPU s | held-out loss | " + " | ".join(f"{head} | probe" for head in heads) + " |",
        "|---|---|---|" + "---|---|" * len(heads),
    ]
    for name in (*ORDER, BOTH):
        if name not in found:
            continue
        one = found[name]
        loss = one.get("held_out", {}).get("mlm_loss")
        cells = [name, f"{one['cpu_s']:.0f}" if "cpu_s" in one else "", "" if loss is None else f"{loss:.3f}"]
        for task in TASKS:
            figures = one[task]
            cells += [f"{figures['mean']:.4f} ± {figures['std']:.4f}" if "mean" in figures else ""]
            cells += [f"{figures['probe']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "results.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    found = {line["run"]: line for line in map(json.loads, lines)}
    names = list(options.names or ORDER)
    if set(BOTH.split(" + ")) <= {*names, *found}:
        names.append(BOTH)
    for name in names:
        if name in found:
            continue
        found[name] = side_by_side(options.out) if name == BOTH else run(options.out, name)
        line = json.dumps(found[name])
        with log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
