"""Each head gives the logits and the loss of Hugging Face's PyTorch class with the same weights, on padded pairs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.config import BertConfig
from bert_jax.finetune import train
from bert_jax.finetune.task import FinetuneTask
from bert_jax.finetune.task_file import InputsConfig, TaskConfig, TrainingConfig
from bert_jax.heads import HF_CLASSES, HeadConfig, abstract_params
from transformer_jax import bert_encoder, sharding

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = BertConfig(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
    vocab_multiple=8,
)
ROWS, LENGTH, CHOICES = 4, 12, 3
HEADS = {
    "classification": HeadConfig("classification", ("a", "b", "c")),
    "multi_label": HeadConfig("multi_label", ("a", "b", "c")),
    "regression": HeadConfig("regression", ("score",)),
    "tagging": HeadConfig("tagging", ("O", "B-X", "I-X", "B-Y", "I-Y")),
    "span": HeadConfig("span"),
    "choice": HeadConfig("choice"),
}


def tensors(head: HeadConfig) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(3)
    table = bert_encoder.entries(CONFIG, CONFIG.vocab_size, CONFIG.padded_vocab_size, 24, 2)
    found = {e.name: rng.standard_normal(e.shape) * 0.3 + (e.path[-1] == "scale") for e in table}
    hidden = CONFIG.hidden_size
    if head.has_pooler:
        found |= {"bert.pooler.dense.weight": rng.standard_normal((hidden, hidden)) * 0.3}
        found |= {"bert.pooler.dense.bias": rng.standard_normal(hidden) * 0.3}
    name = "qa_outputs" if head.kind == "span" else "classifier"
    found |= {f"{name}.weight": rng.standard_normal((head.num_outputs, hidden))}
    found |= {f"{name}.bias": rng.standard_normal(head.num_outputs)}
    return {name: value.astype(np.float32) for name, value in found.items()}


def params(found: dict[str, np.ndarray], head: HeadConfig):
    """The same weights as our tree."""
    table = bert_encoder.entries(CONFIG, CONFIG.vocab_size, CONFIG.padded_vocab_size, 24, 2)
    own = bert_encoder.adopt({e.name: found[e.name] for e in table}, table, "test")
    name = "qa_outputs" if head.kind == "span" else "classifier"
    own["head"] = {"kernel": found[f"{name}.weight"].T, "bias": found[f"{name}.bias"]}
    if head.has_pooler:
        own["pooler"] = {"kernel": found["bert.pooler.dense.weight"].T, "bias": found["bert.pooler.dense.bias"]}
    assert jax.tree.map(np.shape, own) == jax.tree.map(lambda x: x.shape, abstract_params(CONFIG, head))
    return own


def batch(head: HeadConfig) -> dict[str, np.ndarray]:
    """Pairs of different lengths, the last row unpadded; one row of the batch is a filler without weight."""
    rng = np.random.default_rng(5)
    shape = (ROWS, CHOICES, LENGTH) if head.kind == "choice" else (ROWS, LENGTH)
    rows = ROWS * CHOICES if head.kind == "choice" else ROWS
    lengths = rng.integers(5, LENGTH, rows)
    lengths[-1] = LENGTH
    places = np.arange(LENGTH)[None, :]
    real = (places < lengths[:, None]).astype(np.int32)
    out = {
        "input_ids": rng.integers(5, CONFIG.vocab_size, (rows, LENGTH)).astype(np.int32) * real,
        "token_type_ids": ((places >= lengths[:, None] // 2) * real).astype(np.int32),
        "position_ids": np.broadcast_to(places, (rows, LENGTH)).astype(np.int32),
        "sequence_ids": real,
    }
    out = {name: x.reshape(shape) for name, x in out.items()}
    if head.kind == "classification":
        out["labels"] = rng.integers(0, 3, ROWS).astype(np.int32)
    elif head.kind == "multi_label":
        out["labels"] = rng.integers(0, 2, (ROWS, 3)).astype(np.float32)
    elif head.kind == "regression":
        out["labels"] = rng.uniform(0, 5, ROWS).astype(np.float32)
    elif head.kind == "tagging":
        tags = rng.integers(0, 5, (ROWS, LENGTH)).astype(np.int32)
        out["labels"] = np.where((real > 0) & (rng.random((ROWS, LENGTH)) < 0.7), tags, -1).astype(np.int32)
    elif head.kind == "span":
        out["start"] = np.minimum(rng.integers(1, 4, ROWS), lengths - 1).astype(np.int32)
        out["end"] = np.minimum(out["start"] + 2, lengths - 1).astype(np.int32)
        out["start"][0] = out["end"][0] = 0  # no answer
    else:
        out["labels"] = rng.integers(0, CHOICES, ROWS).astype(np.int32)
    weights = np.ones(ROWS, np.float32)
    weights[1] = 0
    return out | {"weights": weights, "row_ids": np.arange(ROWS, dtype=np.int32)}


def torch_model(head: HeadConfig, found: dict[str, np.ndarray]):
    """Hugging Face's class of the kind with these weights and without dropout."""
    problem = {"classification": "single_label_classification", "multi_label": "multi_label_classification"}
    settings = transformers.BertConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        num_hidden_layers=CONFIG.num_hidden_layers,
        num_attention_heads=CONFIG.num_attention_heads,
        intermediate_size=CONFIG.intermediate_size,
        max_position_embeddings=CONFIG.max_position_embeddings,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=head.num_outputs,
        problem_type=problem.get(head.kind, "regression" if head.kind == "regression" else None),
        attn_implementation="eager",
    )
    model = getattr(transformers, HF_CLASSES[head.kind])(settings).eval()
    left = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in found.items()}, strict=False)
    assert not left.unexpected_keys
    assert all("position_ids" in name or "token_type_ids" in name for name in left.missing_keys)
    return model


def reference(head: HeadConfig, found: dict[str, np.ndarray], rows: dict[str, np.ndarray]):
    """Hugging Face's logits of all rows, and its loss of those with a weight."""
    model = torch_model(head, found)
    used = rows["weights"] > 0

    def inputs(chosen: np.ndarray) -> dict:
        return {
            "input_ids": torch.from_numpy(rows["input_ids"][chosen]).long(),
            "token_type_ids": torch.from_numpy(rows["token_type_ids"][chosen]).long(),
            "attention_mask": torch.from_numpy(rows["sequence_ids"][chosen]).long(),
        }

    if head.kind == "span":
        labels = {f"{name}_positions": torch.from_numpy(rows[name][used]).long() for name in ("start", "end")}
    else:
        values = rows["labels"][used]
        values = np.where(values < 0, -100, values) if head.kind == "tagging" else values
        floats = head.kind in ("multi_label", "regression")
        labels = {"labels": torch.from_numpy(values).float() if floats else torch.from_numpy(values).long()}
    with torch.no_grad():
        out = model(**inputs(np.ones(ROWS, bool)))
        if head.kind == "span":
            # One row at a time and without its padding, which would take part in the softmax there.
            each = []
            for row, number in enumerate(np.flatnonzero(used)):
                length = int(rows["sequence_ids"][number].sum())
                one = {name: x[row : row + 1, :length] for name, x in inputs(used).items()}
                each.append(model(**one, **{name: x[row : row + 1] for name, x in labels.items()}).loss.item())
            return np.stack([out.start_logits.numpy(), out.end_logits.numpy()], -1), float(np.mean(each))
        loss = model(**inputs(used), **labels).loss.item()
    return out.logits.numpy(), loss


@pytest.mark.parametrize("kind", HEADS)
def test_logits_and_loss_are_those_of_hugging_face(kind):
    """C105: and segments are passed by name: a swap of segments and mask would change every logit."""
    head = HEADS[kind]
    found, rows = tensors(head), batch(HEADS[kind])
    task = FinetuneTask(CONFIG, head, LENGTH, CHOICES)

    @jax.jit
    def ours(weights, rows):
        logits = task.logits(weights, rows)
        sums, counts = task.loss_fn(weights, rows, None)
        return logits, sums["head"] / counts["head"]

    with jax.default_matmul_precision("highest"):
        logits, loss = jax.device_get(ours(params(found, head), rows))
    expected, expected_loss = reference(head, found, rows)
    assert logits.dtype == np.float32
    if not head.has_pooler:  # what stands at padding means nothing, and is another thing on each side
        real = rows["sequence_ids"] > 0
        logits, expected = logits[real], expected[real]
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_training_follows_that_of_pytorch_step_by_step():
    """Warm-up, decay of all but biases and norms, clipping and AdamW, of encoder and head: the paths of both agree."""
    head, steps = HEADS["tagging"], 12
    found, rows = tensors(head), batch(head)
    training = TrainingConfig(epochs=float(steps), batch_size=ROWS, learning_rate=3e-3, warmup=0.25, dropout=0.0)
    task = TaskConfig(kind="tagging", labels=head.labels, inputs=InputsConfig(LENGTH), train=training)
    config = train.resolve(
        task, dataclasses.replace(head, dropout=0.0),
        dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), ROWS,
        start=train.StartConfig(), rate=3e-3, seed=0, run_dir="", measured=False,
    )  # fmt: skip
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    engine = train.make_engine(config, mesh)
    state = engine.init()._replace(params=jax.device_put(params(found, head), engine.shardings.params))
    model = torch_model(head, found).train()
    groups: dict[bool, list] = {True: [], False: []}
    for name, p in model.named_parameters():
        groups[name.endswith("bias") or "LayerNorm" in name].append(p)
    adam = torch.optim.AdamW(
        [{"params": groups[False], "weight_decay": 0.01}, {"params": groups[True], "weight_decay": 0.0}], eps=1e-6
    )
    inputs = {name: torch.from_numpy(rows[name]).long() for name in ("input_ids", "token_type_ids", "labels")}
    mask = torch.from_numpy(rows["sequence_ids"]).long()
    inputs["labels"][(inputs["labels"] < 0) | (torch.from_numpy(rows["weights"]) == 0)[:, None]] = -100
    ours, theirs = [], []
    with jax.set_mesh(mesh):
        for step in range(steps):
            # Up in 3 steps to the peak, then in a line that would reach 0 one step after the last.
            rate = 3e-3 * min((step + 1) / 3, (steps - step) / (steps - 2))
            state, metrics = engine.train_step(state, engine.put(dict(rows)), engine.dropout_key)
            ours.append((float(metrics["sum/head"] / metrics["count/head"]), float(metrics["gradient_norm"])))
            for group in adam.param_groups:
                group["lr"] = rate
            loss = model(attention_mask=mask, **inputs).loss
            adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            theirs.append((loss.item(), norm.item()))
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    losses, norms = np.array(theirs).T
    assert losses[-1] < 0.8 * losses[0] and norms.max() > 1.0, "or the paths say nothing of learning and clipping"
