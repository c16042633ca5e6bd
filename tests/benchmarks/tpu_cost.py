"""What the TPU compiler says of our BERT training step on a pod slice. No TPU is needed; prints one line of JSON.

    python tests/benchmarks/tpu_cost.py --topology v5e:4x4 --preset data_parallel [--size base] [--seq 128] [--batch 64]

The engine's own step (bfloat16, AdamW, clipping, dropout, packed rows, the preset's shardings) is compiled ahead of
time by libtpu. Layers are unrolled and cost about the same, so by default programs of one and two layers are compiled
and the figures extended to all of them; --full compiles the whole.

    cycles_per_token   `estimated_cycles` of every scheduled instruction, loop bodies as often as they run, over the
                       real tokens of one chip. A model of the compiler's, never checked against a chip here: use it as
                       the ratio of two programs. It prices no collective, no kernel written by hand and no instruction
                       listed under `unpriced`, and overlaps nothing.
    peak_share         the model FLOPs of the real tokens, as a share of what the chip's peak rate does in those cycles
    peak_gib           the largest memory of a chip, by the compiler's buffer assignment; exact for this version
    collectives        by kind: how many, MiB of their (whole) arrays, and how many are started ahead and awaited later
    rematerializations arrays that the partitioner had to make whole on every device to lay them out anew ("involuntary
                       full rematerialization"), which is to be 0
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    # There is no TPU to guard, and several compiles may run at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

FLOPS_PER_CYCLE = {"v4": 275e12 / 1.05e9, "v5e": 197e12 / 1.5e9, "v5p": 459e12 / 1.75e9, "v6e": 918e12 / 1.75e9}
"""Published bfloat16 peak over the clock."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
WORK = ("fusion", "custom-call", "convolution", "dot", "rng-bit-generator", "sort", "gather", "scatter")
"""Instructions that take time, and are listed when they have no price."""
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
UNKNOWN = 2**64 - 1
"""The compiler's mark for a cost that it does not know."""

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPERATION = re.compile(r"(?:^|[\]\})] )([a-z][a-z0-9\-]*)\(")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")


def computations(text: str) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """The name of the entry, and the (name, rest of the line) of each instruction, by computation."""
    entry, name = "", ""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line == "}":
            name = ""
        elif not name and (head := COMPUTATION.match(line)):
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif name and (m := INSTRUCTION.match(line)):
            found[name].append((m.group(1), m.group(2)))
    return entry, found


def operation(rest: str) -> str:
    match = OPERATION.search(rest)
    return match.group(1) if match else ""


def sizes(shapes: str) -> list[int]:
    """Bytes of each array in an instruction's result."""
    return [
        BYTES.get(kind, 4) * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in SHAPE.findall(shapes)
    ]


def read(text: str) -> dict[str, Any]:
    """Cycles, collectives and unpriced instructions of a scheduled program, loops counted as often as they run."""
    entry, program = computations(text)
    cycles = 0
    by_name: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    collectives: dict[str, dict[str, float]] = {}
    channels: set[str] = set()

    def trips(rest: str) -> int:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", rest)
        assert condition is not None
        numbers = [
            n for _, line in program[condition.group(1)] for n in re.findall(r"^s32\[\]\S* constant\((\d+)\)", line)
        ]
        return max(map(int, numbers), default=1)

    def communicate(rest: str, op: str, times: int, parent: str) -> None:
        kind = op.removesuffix("-start")
        channel = re.search(r"channel_id=(\d+)", rest)
        if kind not in COLLECTIVES or op.endswith("-done") or (channel and channel.group(1) in channels):
            return
        if channel:
            channels.add(channel.group(1))
        if "all-reduce-scatter" in parent:
            kind = "reduce-scatter"
        ahead = op.endswith("-start") or "async_collective" in rest or "async" in parent
        of_kind = collectives.setdefault(kind, {"count": 0, "mib": 0.0, "async": 0})
        of_kind["count"] += times
        result = rest.split(f" {op}(")[0]
        # The result of a start is (operand, result, ...).
        of_kind["mib"] += times * (max if op.endswith("-start") else sum)(sizes(result)) / 2**20
        of_kind["async"] += times * ahead

    def visit(name: str, times: int, priced: bool, parent: str) -> None:
        """`priced` is False within fusions, whose price stands at the fusion; only collectives are looked for."""
        nonlocal cycles
        for _, rest in program[name]:
            op = operation(rest)
            called = re.findall(
                r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=\{?%?([\w.\-]+)", rest
            )
            communicate(rest, op, times, parent)
            if op == "while":
                for body in called:
                    visit(body, times * trips(rest), priced, parent)
                continue
            price = re.search(r'"estimated_cycles":"(\d+)"', rest)
            if priced and price and int(price.group(1)) != UNKNOWN:
                cycles += times * int(price.group(1))
                where = re.search(r'op_name="([^"]*)"', rest)
                by_name[where.group(1) if where else op] += times * int(price.group(1))
            elif priced and op in WORK:
                target = re.search(r'custom_call_target="([^"]+)"', rest)
                unpriced[f"{op}:{target.group(1)}" if target else op] += times
            if op in ("fusion", "call", "async-start", "conditional"):
                inside = priced and op != "fusion"
                for sub in called:
                    visit(sub, times, inside, sub if op == "fusion" else parent)

    visit(entry, 1, True, "")
    return {"cycles": cycles, "by_name": by_name, "unpriced": dict(unpriced), "collectives": collectives}


@contextlib.contextmanager
def standard_error() -> Iterator[list[str]]:
    """What is written to file descriptor 2 meanwhile, by the compiler's own code too."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def packed_fill(file: Path | None, seq: int) -> tuple[float, Any]:
    """Share of slots that hold tokens when the examples are packed, and the counts that model FLOPs need."""
    from bert_jax import examples as limits
    from bert_jax.config import ExamplesConfig
    from transformer_jax.inputs import derive_key, pack

    found = measure.load(file, seq, 1024)
    lengths, costs = np.array([len(e.ids) for e in found]), np.array([len(e.positions) for e in found])
    config = ExamplesConfig(max_seq_length=seq)
    packing = pack(
        lengths, costs, seq, limits.max_sequences(config), limits.max_predictions(config), derive_key(0, "benchmark")
    )
    counts = {
        "tokens": int(lengths.sum()),
        "squares": int((lengths**2).sum()),
        "mlm": int(costs.sum()),
        "sequences": len(lengths),
    }
    return lengths.sum() / (packing.num_rows * seq), counts


def compile_step(options: argparse.Namespace, devices: list[Any], layers: int) -> dict[str, Any]:
    """The figures of the step with this many layers."""
    import jax
    import jax.numpy as jnp

    from bert_jax import examples as limits
    from bert_jax.config import BertConfig, ExamplesConfig
    from bert_jax.task import PretrainingTask
    from transformer_jax import optim, sharding
    from transformer_jax.config import MeshConfig, OptimizerConfig, TrainConfig, load
    from transformer_jax.train import Engine

    _, hidden, heads, feed_forward = measure.SIZES[options.size]
    model = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        vocab_size=measure.VOCABULARY,
        dtype=options.dtype,
    )
    model = load(BertConfig, dict(pair.split("=", 1) for pair in options.set), "--set", model)
    task = PretrainingTask(model, options.seq)
    mesh_config = load(
        MeshConfig, {k: int(v) for k, v in (p.split("=") for p in options.mesh)}, "--mesh", MeshConfig(options.preset)
    )
    mesh = sharding.make_mesh(mesh_config, devices)
    rows = options.batch * len(devices)
    optimizer = optim.make(OptimizerConfig(), 1000)
    train = TrainConfig(batch_size=rows)
    engine = Engine(task, optimizer, train, mesh, options.preset, OptimizerConfig().clip_norm)

    examples = ExamplesConfig(max_seq_length=options.seq)
    predictions, sequences = limits.max_predictions(examples), limits.max_sequences(examples)
    split, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)

    def weights(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)

    batch = {
        "input_ids": integers(rows, options.seq),
        "token_type_ids": integers(rows, options.seq),
        "position_ids": integers(rows, options.seq),
        "sequence_ids": integers(rows, options.seq),
        "masked_lm_positions": integers(rows, predictions),
        "masked_lm_ids": integers(rows, predictions),
        "masked_lm_weights": weights(rows, predictions),
        "cls_positions": integers(rows, sequences),
        "next_sentence_labels": integers(rows, sequences),
        "next_sentence_weights": weights(rows, sequences),
        "row_ids": integers(rows),
    }
    key = jax.ShapeDtypeStruct((), engine.dropout_key.dtype, sharding=whole)

    began = time.process_time()
    with standard_error() as said, jax.set_mesh(mesh):
        # The lowest effort schedules badly, but partitions the program in the same way.
        effort: Any = {"exec_time_optimization_effort": -1.0} if options.quick else None
        compiled = engine.train_step.lower(engine.abstract_state, batch, key).compile(compiler_options=effort)
    seconds = time.process_time() - began
    text = compiled.as_text() or ""
    if options.hlo:
        options.hlo.with_suffix(f".{layers}.txt").write_text(text)
    memory: Any = compiled.memory_analysis()
    return read(text) | {
        "peak_gib": memory.peak_memory_in_bytes / 2**30,
        "arguments_gib": memory.argument_size_in_bytes / 2**30,
        "temporaries_gib": memory.temp_size_in_bytes / 2**30,
        "compile_cpu_s": seconds,
        "rematerializations": sum("nvoluntary full rematerialization" in line for line in said),
        "flops_of": task.flops,
    }


def extend(one: Any, two: Any, layers: int) -> Any:
    """Figures of `layers` layers from those of one and of two, whatever they are nested in."""
    if isinstance(one, dict):
        return {k: extend(one.get(k, _nothing(two[k])), two[k], layers) for k in two}
    return one + (layers - 1) * (two - one)


def _nothing(like: Any) -> Any:
    return dict.fromkeys(like, 0) if isinstance(like, dict) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--topology", default="v5e:2x2", help="as libtpu names it: v5e:4x4, v4:2x2x1, v5p:2x2x2, v6e:4x4"
    )
    parser.add_argument("--preset", choices=("data_parallel", "fsdp", "fsdp_tensor"), default="data_parallel")
    parser.add_argument("--mesh", nargs="*", default=[], metavar="AXIS=N", help="axes of the mesh, as in a run file")
    parser.add_argument("--size", choices=measure.SIZES, default="base")
    parser.add_argument("--seq", type=int, choices=sorted(measure.FULL_SHARE), default=128)
    parser.add_argument("--batch", type=int, default=64, help="rows of a chip")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other fields of the model")
    parser.add_argument("--data", type=Path, help="file of examples, whose packing gives the fill of the rows")
    parser.add_argument("--full", action="store_true", help="compile all layers")
    parser.add_argument("--layers", type=int, help="compile this many, and give their figures")
    parser.add_argument("--quick", action="store_true", help="a third of the time to compile; cycles mean nothing then")
    parser.add_argument("--top", type=int, default=0, help="also list the operations that cost most")
    parser.add_argument("--hlo", type=Path, help="write the compiled programs to files that begin with this")
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit('the TPU compiler is missing; install the extra "tpu": pip install ".[tpu]"')
    import jax
    from jax.experimental import topologies

    kind = options.topology.split(":")[0]
    megacore: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    with standard_error():
        devices = list(topologies.get_topology_desc(options.topology, platform="tpu", **megacore).devices)
    all_layers = measure.SIZES[options.size][0]
    layers = options.layers or all_layers
    if options.full or options.layers:
        found = compile_step(options, devices, layers)
        task_flops = found.pop("flops_of")
    else:
        one, two = compile_step(options, devices, 1), compile_step(options, devices, 2)
        seconds = one["compile_cpu_s"] + two["compile_cpu_s"]
        for each in (one, two):
            task_flops = each.pop("flops_of")
        found = extend(one, two, layers) | {"compile_cpu_s": seconds}
    fill, counts = packed_fill(options.data, options.seq)
    tokens = fill * options.batch * options.seq
    by_name = found.pop("by_name")
    compiled_layers = layers if options.full or options.layers else 2
    flops = task_flops(counts) + (layers - compiled_layers) * layer_flops(options.size, counts)
    flops *= tokens / counts["tokens"]
    measure.report(
        topology=options.topology,
        chips=len(devices),
        preset=options.preset,
        mesh=options.mesh,
        size=options.size,
        layers=layers,
        compiled="whole" if options.full or options.layers else "1 and 2 layers, extended",
        seq=options.seq,
        batch_per_chip=options.batch,
        dtype=options.dtype,
        set=options.set,
        fill=round(fill, 4),
        quick=options.quick,
        cycles_per_token=round(found["cycles"] / tokens),
        peak_share=round(flops / FLOPS_PER_CYCLE[kind] / found["cycles"], 3) if kind in FLOPS_PER_CYCLE else None,
        **{k: round(found[k], 2) for k in ("peak_gib", "arguments_gib", "temporaries_gib")},
        collectives={k: {n: round(x, 1) for n, x in v.items()} for k, v in found["collectives"].items()},
        unpriced=found["unpriced"],
        rematerializations=found["rematerializations"],
        compile_cpu_s=round(found["compile_cpu_s"]),
        jax=jax.__version__,
        libtpu=importlib.metadata.version("libtpu"),
    )
    for name, cycles in sorted(by_name.items(), key=lambda item: -item[1])[: options.top]:
        print(f"{cycles / tokens:9.1f}  {100 * cycles / found['cycles']:5.1f} %  {name}")


def layer_flops(size: str, counts: dict[str, float]) -> float:
    """Model FLOPs of one encoder layer in a training step."""
    from transformer_jax.config import EncoderConfig
    from transformer_jax.model import encoder_flops

    _, hidden, heads, feed_forward = measure.SIZES[size]
    config = EncoderConfig(
        hidden_size=hidden, num_hidden_layers=1, num_attention_heads=heads, intermediate_size=feed_forward
    )
    return 3.0 * encoder_flops(config, counts["tokens"], counts["squares"])


if __name__ == "__main__":
    main()
