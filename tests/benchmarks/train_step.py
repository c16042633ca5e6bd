"""Speed of our training step on CPU: real tokens a second, by CPU seconds and by wall clock. Prints one line of JSON.

    python tests/benchmarks/train_step.py --size base --seq 128 --batch 16 --examples 96 --threads 1 [--data FILE.npz]

It is the engine's own compiled step with the pretraining task: AdamW, clipping, the check for non-finite gradients,
dropout 0.1, masked-LM head at the masked positions, state donated. The given examples are packed into rows as the data
pipeline packs them. Rows that do not fill a last batch are left out.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import measure
import numpy as np


def batch_of(rows: list[list[measure.Example]], seq: int, predictions: int, sequences: int) -> dict[str, np.ndarray]:
    """The batch contract's arrays for rows of packed examples."""
    size = len(rows)
    length_names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    batch: dict[str, np.ndarray] = {name: np.zeros((size, seq), np.int32) for name in length_names}
    batch |= {name: np.zeros((size, predictions), np.int32) for name in ("masked_lm_positions", "masked_lm_ids")}
    batch["masked_lm_weights"] = np.zeros((size, predictions), np.float32)
    batch |= {name: np.zeros((size, sequences), np.int32) for name in ("cls_positions", "next_sentence_labels")}
    batch["next_sentence_weights"] = np.zeros((size, sequences), np.float32)
    batch["row_ids"] = np.arange(size, dtype=np.int32)
    for r, row in enumerate(rows):
        at = slot = 0
        for s, example in enumerate(row):
            here = slice(at, at + len(example.ids))
            batch["input_ids"][r, here], batch["token_type_ids"][r, here] = example.ids, example.types
            batch["position_ids"][r, here], batch["sequence_ids"][r, here] = np.arange(len(example.ids)), s + 1
            chosen = slice(slot, slot + len(example.positions))
            batch["masked_lm_positions"][r, chosen] = example.positions + at
            batch["masked_lm_ids"][r, chosen], batch["masked_lm_weights"][r, chosen] = example.labels, 1.0
            batch["cls_positions"][r, s], batch["next_sentence_labels"][r, s] = at, example.nsp
            batch["next_sentence_weights"][r, s] = 1.0
            at, slot = here.stop, chosen.stop
    return batch


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--no-pack", action="store_true", help="one padded example a row")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other fields of the model")
    parser.add_argument("--hlo", type=Path, help="file to which the compiled program is written")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.threads:
        os.environ["NPROC"] = str(options.threads)  # the size of XLA's thread pool, read once
        os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from transformer_jax import allocator

    allocator.keep_freed_memory()  # as the command does

    import jax

    from bert_jax import examples as limits
    from bert_jax.config import BertConfig, ExamplesConfig
    from bert_jax.task import PretrainingTask
    from transformer_jax import optim, sharding
    from transformer_jax.config import MeshConfig, OptimizerConfig, TrainConfig, load
    from transformer_jax.engine import Engine
    from transformer_jax.inputs import derive_key, one_a_row, pack

    found = measure.load(options.data, options.seq, options.examples)
    lengths = np.array([len(e.ids) for e in found])
    costs = np.array([len(e.positions) for e in found])
    config = ExamplesConfig(max_seq_length=options.seq, pack=not options.no_pack)
    capacity = limits.max_predictions(config), limits.max_sequences(config)
    key = derive_key(0, "benchmark")
    packing = (
        one_a_row(len(found)) if options.no_pack else pack(lengths, costs, options.seq, capacity[1], capacity[0], key)
    )
    rows = [
        [found[i] for i in packing.members[a:b]]
        for a, b in zip(packing.row_offsets[:-1], packing.row_offsets[1:], strict=True)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    rows = [rows[i] for i in order]
    steps = len(rows) // options.batch
    batches = [
        batch_of(rows[i * options.batch : (i + 1) * options.batch], options.seq, *capacity) for i in range(steps)
    ]
    tokens = [int((b["sequence_ids"] > 0).sum()) for b in batches]

    layers, hidden, heads, feed_forward = measure.SIZES[options.size]
    model = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        vocab_size=measure.VOCABULARY,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    model = load(BertConfig, dict(pair.split("=", 1) for pair in options.set), "--set", model)
    task = PretrainingTask(model, options.seq)
    total = steps + options.warm
    train = TrainConfig(steps=total, batch_size=options.batch)
    optimizer = optim.make(OptimizerConfig(), total)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    engine = Engine(task, optimizer, train, mesh, "data_parallel", OptimizerConfig().clip_norm)
    state = engine.init()
    on_device = [engine.put(b) for b in batches]
    if options.hlo:
        with jax.set_mesh(mesh):
            compiled = engine.train_step.lower(state, on_device[0], engine.dropout_key).compile()
        options.hlo.write_text(compiled.as_text() or "")

    def step(i: int) -> float:
        nonlocal state
        metrics: dict[str, Any]
        with jax.set_mesh(mesh):
            state, metrics = engine.train_step(state, on_device[i], engine.dropout_key)
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        return sum(values[f"sum/{name}"] / values[f"count/{name}"] for name in task.losses)

    measure.report(
        program="ours",
        size=options.size,
        seq=options.seq,
        batch=options.batch,
        packed=not options.no_pack,
        **measure.timed(step, tokens, options.warm),
        fill=round(sum(tokens) / (steps * options.batch * options.seq), 4),
        model={f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name in ("dtype", "hidden_act")},
        dropout=options.dropout,
        threads=options.threads,
        jax=jax.__version__,
    )


if __name__ == "__main__":
    main()
