"""Speed of our translation training step on CPU: real source and target tokens a second. Prints one line of JSON.

    python tests/benchmarks/translation_step.py --size base --threads 1 [--data FILE.npz]

It is the engine's own compiled step with the translation task: label smoothing, dropout 0.1 on the residuals and on
attention weights, AdamW, the check for non-finite gradients, state donated. The pairs are packed into rows as the data
pipeline packs them. Rows that do not fill a last batch are left out. `torch_marian.py` is the same work for the peer.
"""

from __future__ import annotations

import dataclasses
import os

import measure
import numpy as np
import pairs


def batch_of(rows: list[list[tuple[np.ndarray, np.ndarray]]], length: int) -> dict[str, np.ndarray]:
    """The batch contract's arrays for rows of packed pairs."""
    size = len(rows)
    sides = ("", "decoder_")
    batch = {f"{side}{name}": np.zeros((size, length), np.int32)
             for side in sides for name in ("input_ids", "position_ids", "sequence_ids")}  # fmt: skip
    for side in sides:
        batch[f"{side}input_ids"][:] = pairs.PAD
    batch["labels"] = np.zeros((size, length), np.int32)
    batch["label_weights"] = np.zeros((size, length), np.float32)
    batch["row_ids"] = np.arange(size, dtype=np.int32)
    for r, row in enumerate(rows):
        ends = [0, 0]
        for number, (source, target) in enumerate(row, 1):
            given = np.append(pairs.PAD, target)
            wanted = np.append(target, pairs.END)
            for i, (side, ids) in enumerate(zip(sides, (np.append(source, pairs.END), given), strict=True)):
                here = slice(ends[i], ends[i] + len(ids))
                batch[f"{side}input_ids"][r, here] = ids
                batch[f"{side}position_ids"][r, here] = np.arange(len(ids))
                batch[f"{side}sequence_ids"][r, here] = number
                ends[i] = here.stop
            batch["labels"][r, here], batch["label_weights"][r, here] = wanted, 1.0
    return batch


def main() -> None:
    parser = pairs.training_arguments(__doc__)
    parser.add_argument("--length", type=int, default=128, help="slots of a row, on each side")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.threads:
        os.environ["NPROC"] = str(options.threads)  # the size of XLA's thread pool, read once
        os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from transformer_jax import allocator

    allocator.keep_freed_memory()  # as the command does

    import jax

    from transformer_jax import optim, sharding
    from transformer_jax.config import MeshConfig, OptimizerConfig, TrainConfig
    from transformer_jax.engine import Engine
    from transformer_jax.inputs import derive_key, pack
    from transformer_jax.translation.config import BatchesConfig, ObjectiveConfig, TransformerConfig
    from transformer_jax.translation.task import TranslationTask

    found = [p for p in pairs.read(options.data, options.pairs) if max(map(len, p)) < options.length]
    lengths = np.array([[len(source) + 1, len(target) + 1] for source, target in found])
    packing = pack(
        lengths[:, 0], lengths[:, 1], options.length, options.length // 4, options.length, derive_key(0, "benchmark")
    )
    rows = [
        [found[i] for i in packing.members[a:b]]
        for a, b in zip(packing.row_offsets[:-1], packing.row_offsets[1:], strict=True)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    rows = [rows[i] for i in order]
    rows_a_batch = max(options.tokens // options.length, 1)
    groups = [rows[i : i + rows_a_batch] for i in range(0, len(rows), rows_a_batch)]
    batches = [batch_of(group, options.length) for group in groups if len(group) == rows_a_batch][: options.steps]
    tokens = [int(sum((b[f"{side}sequence_ids"] > 0).sum() for side in ("", "decoder_"))) for b in batches]

    layers, hidden, heads, inner = pairs.SIZES[options.size]
    model = TransformerConfig(
        num_hidden_layers=layers,
        num_decoder_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=inner,
        source_vocab_size=pairs.VOCABULARY,
        target_vocab_size=pairs.VOCABULARY,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    examples = BatchesConfig(max_source_length=options.length, max_target_length=options.length)
    task = TranslationTask(model, examples, ObjectiveConfig())
    total = len(batches) + options.warm
    settings = dataclasses.replace(OptimizerConfig(), clip_norm=0.0)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    train = TrainConfig(steps=total, batch_size=rows_a_batch)
    engine = Engine(task, optim.make(settings, total), train, mesh, "data_parallel", settings.clip_norm)
    state = engine.init()
    on_device = [engine.put(b) for b in batches]

    def step(i: int) -> float:
        nonlocal state
        with jax.set_mesh(mesh):
            state, metrics = engine.train_step(state, on_device[i], engine.dropout_key)
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        return values["sum/translation"] / values["count/translation"]

    slots = 2 * rows_a_batch * options.length * len(batches)
    measure.report(
        program="ours, translation",
        size=options.size,
        **measure.timed(step, tokens, options.warm),
        fill=round(sum(tokens) / slots, 4),
        dropout=options.dropout,
        threads=options.threads,
        jax=jax.__version__,
    )


if __name__ == "__main__":
    main()
