"""A checkpoint and labelled files small enough to be fine-tuned in a second or two."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_bert import tiny_config, tiny_tokenizer

from bert_jax.finetune import task_file
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.model import abstract_params
from transformer_jax import config as core
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig

LABELS = ("thing", "animal")


def checkpoint(folder: Path, **changes) -> Path:
    """A run of one step whose parameters are drawn large enough to be fine-tuned in a few steps."""
    tokenizer, rng = tiny_tokenizer(), np.random.default_rng(0)
    settings = {"vocab_size": tokenizer.vocab_size, "num_hidden_layers": 1, "hidden_size": 32, **changes}
    config = tiny_config(**settings)

    def draw(path, x):
        constant = {"bias": 0.0, "scale": 1.0}.get(path[-1].key)
        values = 0.2 * rng.standard_normal(x.shape) if constant is None else np.full(x.shape, constant)
        return jnp.asarray(values, jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, abstract_params(config))
    meta = {
        "config": {"model": core.to_builtins(config)},
        "tokenizer": tokenizer.files(),
        "data": {"fingerprint": "f00d", "sources": []},
        "naming": 1,
    }
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(1, {"params": params}, {}, meta)
    checkpoints.close()
    return folder


def rows(count: int) -> list[tuple[str, str, str]]:
    """(text, second text, label): the label says which of two words the first text has; nothing else is of use."""
    out = []
    for i in range(count):
        first = "hello" if i % 3 else "world"
        text = f"{first} " * (3 + i // 3 % 3) + "the"
        out.append((text, ("the", "going")[i // 2 % 2], LABELS[int(first == "hello")]))
    return out


def write_tsv(path: Path, count: int, label: bool = True) -> Path:
    lines = ["text\tsecond" + ("\tlabel" if label else "")]
    lines += [f"{a}\t{b}" + (f"\t{name}" if label else "") for a, b, name in rows(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


TASK = """
kind = "classification"
labels = ["thing", "animal"]

[data]
train = "train.tsv"
dev = "dev.tsv"
columns = { text_a = "text", text_b = "second", label = "label" }

[inputs]
max_seq_length = 24

[train]
epochs = 6
batch_size = 16
learning_rate = 5e-3
eval_every = 12
dropout = 0.05
"""


def task(folder: Path, text: str = TASK, *overrides: str, train: int = 64, dev: int = 13) -> TaskConfig:
    """The task of the file that is written into `folder` beside its data."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tsv(folder / "train.tsv", train)
    write_tsv(folder / "dev.tsv", dev)
    (folder / "task.toml").write_text(text, encoding="utf-8")
    return task_file.load_task(folder / "task.toml", ["--run_dir", str(folder / "run"), *overrides])
