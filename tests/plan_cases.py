"""The steps whose compiled figures are kept in golden/plan.json, and how they are compared.

Each is BERT's training step (bfloat16, AdamW, packed rows of 128, 64 rows a device, ZeRO-1) with one or two unrolled
layers, in the widths of base and large, on two pods. Figures of deeper models are about linear in the layers: FULL_SIZE
has base with its 12 and large with its 24, which take minutes to compile and are not in a usual run.

Compiling one takes about 100 CPU seconds, so a golden entry holds the digest of the program before compilation: where
that is still the same, so is what the same compiler makes of it, and nothing is compiled.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bert_jax.config import ExamplesConfig, PretrainConfig
from bert_jax.plan import make_step
from bert_jax.presets import PRESETS
from transformer_jax import compiled_step, topologies
from transformer_jax.compiled_step import StepFigures
from transformer_jax.config import TrainConfig

GOLDEN = Path(__file__).parent / "golden" / "plan.json"
GROWTH = 0.05
ROWS = 64
VOCABULARY = 30_522
PODS = ("v5e-16", "v5p-16")
CASES = [f"{size}-{layers}-{pod}" for pod in PODS for size in ("base", "large") for layers in (1, 2)]
FULL_SIZE = ["base-12-v5e-16", "large-24-v5e-16"]


def config(case: str) -> tuple[PretrainConfig, topologies.Pod]:
    size, layers, pod_name = case.split("-", 2)
    pod = topologies.pod(pod_name)
    model = dataclasses.replace(
        PRESETS[f"bert-{size}"], num_hidden_layers=int(layers), vocab_size=VOCABULARY, dtype="bfloat16"
    )
    train = TrainConfig(batch_size=ROWS * pod.devices)
    return PretrainConfig(model=model, examples=ExamplesConfig(max_seq_length=128), train=train), pod


def versions() -> str:
    """What a golden entry is for."""
    import importlib.metadata

    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def golden() -> dict[str, dict[str, dict[str, Any]]]:
    """Versions -> case -> figures."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def figures(case: str, known: str = "", cache: Path | None = None) -> StepFigures:
    settings, pod = config(case)
    return compiled_step.figures(make_step, settings, pod, known=known, cache=cache)


def entry(found: StepFigures) -> dict[str, Any]:
    """What is kept of a step."""
    assert found.schedule is not None
    return {
        "key": found.key,
        "peak_bytes": int(found.peak_bytes),
        "cycles": int(found.schedule.cycles),
        "collective_bytes": int(sum(c.bytes for c in found.schedule.collectives)),
        "rematerializations": len(found.rematerializations),
        "permutes": int(sum(c.count for c in found.schedule.collectives if c.kind == "collective-permute")),
        "compile_cpu_s": round(found.cpu_seconds),
    }


def grown(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """What is worse than it was, in words."""
    worse = []
    for name in ("peak_bytes", "cycles", "collective_bytes"):
        if new[name] > old[name] * (1 + GROWTH):
            worse.append(f"{name} {old[name]:,} -> {new[name]:,} (+{new[name] / old[name] - 1:.1%})")
    if new["rematerializations"]:
        worse.append(f"{new['rematerializations']} involuntary full rematerialisations")
    if new["permutes"]:
        worse.append(f"{new['permutes']} permutes, by which products are cut into loops (`sharding.gradient_rules`)")
    return worse
