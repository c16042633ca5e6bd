"""The same numbers as Hugging Face's PyTorch BertForPreTraining on the same weights, forward, backward and in training.

Each side runs in float32 (JAX at the highest matmul precision) and, where that says more, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import BertConfig
from bert_jax.interop.huggingface_names import entries
from bert_jax.model import BertForPreTraining
from transformer_jax import losses, masks, optim
from transformer_jax.config import OptimizerConfig

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = BertConfig(
    vocab_size=101,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
)
LARGER = dataclasses.replace(SMALL, hidden_size=48, num_hidden_layers=3, intermediate_size=160, hidden_act="gelu_new")
SIZES = {"2x32": SMALL, "3x48": LARGER}
LENGTHS = (12, 9, 5)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for programs that run once."""

Tensors = dict[str, np.ndarray]


class Result(NamedTuple):
    outputs: Tensors
    loss: float
    gradients: Tensors
    """Under Hugging Face's names."""


def weights(config: BertConfig) -> Tensors:
    """Random float32 tensors under Hugging Face's names, with biases and norms that are not 0 and 1."""
    rng = np.random.default_rng(7)
    out = {}
    for entry in entries(config):
        draws = rng.standard_normal(entry.shape) * (0.1 if len(entry.shape) == 2 else 0.05)
        out[entry.name] = (draws + (entry.path[-1] == "scale")).astype(np.float32)
    return out


def to_tree(tensors: Tensors, config: BertConfig, dtype: Any = np.float32) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for entry in entries(config):
        value = tensors[entry.name].astype(dtype)
        value = value.T if entry.is_kernel else value
        if entry.padded_rows:
            # What stands in the padding rows must have no influence.
            value = np.pad(
                value,
                [(0, config.padded_vocab_size - config.vocab_size), *[(0, 0)] * (value.ndim - 1)],
                constant_values=3.0,
            )
        node = tree
        for part in entry.path[:-1]:
            node = node.setdefault(part, {})
        node[entry.path[-1]] = value
    return tree


def from_tree(tree: Any, config: BertConfig) -> Tensors:
    out = {}
    for entry in entries(config):
        value = np.asarray(functools.reduce(lambda node, part: node[part], entry.path, tree))
        if entry.padded_rows:
            assert not value[config.vocab_size :].any(), "a padding row has a gradient"
            value = value[: config.vocab_size]
        out[entry.name] = value.T if entry.is_kernel else value
    return out


def batch(config: BertConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A padded batch of our contract; each row has three masked-LM slots, of which the last is sometimes unused."""
    rng = np.random.default_rng(seed)
    rows, length = len(LENGTHS), max(LENGTHS)
    sequence_ids = np.asarray(masks.from_lengths(jnp.asarray(LENGTHS), length))
    positions = np.asarray([np.sort(rng.choice(np.arange(1, n), 3, replace=False)) for n in LENGTHS])
    used = np.asarray([[1, 1, 1], [1, 1, 0], [1, 1, 0]])
    return {
        "input_ids": (rng.integers(1, config.vocab_size, (rows, length)) * sequence_ids).astype(np.int32),
        "token_type_ids": (np.arange(length)[None] >= length // 3).astype(np.int32) * sequence_ids,
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "sequence_ids": sequence_ids,
        "masked_lm_positions": (positions * used).astype(np.int32),
        "masked_lm_ids": (rng.integers(0, config.vocab_size, (rows, 3)) * used).astype(np.int32),
        "masked_lm_weights": used.astype(np.float32),
        "cls_positions": np.zeros((rows, 1), np.int32),
        "next_sentence_labels": rng.integers(0, 2, (rows, 1)).astype(np.int32),
        "next_sentence_weights": np.ones((rows, 1), np.float32),
    }


def jax_loss(config: BertConfig, params: Any, inputs: dict[str, Any]) -> tuple[jax.Array, Any]:
    names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "masked_lm_positions", "cls_positions")
    out = BertForPreTraining(config).apply({"params": params}, **{name: inputs[name] for name in names})
    mlm_sum, mlm_count = losses.weighted_cross_entropy(
        out["mlm_logits_BPV"], inputs["masked_lm_ids"], inputs["masked_lm_weights"]
    )
    nsp_sum, nsp_count = losses.weighted_cross_entropy(
        out["nsp_logits_BS2"], inputs["next_sentence_labels"], inputs["next_sentence_weights"]
    )
    return mlm_sum / mlm_count + nsp_sum / nsp_count, out


def run_jax(config: BertConfig, inputs: dict[str, np.ndarray]) -> Result:
    wide = config.dtype == "float64"
    with jax.enable_x64(wide), jax.default_matmul_precision("highest"):
        params = to_tree(weights(config), config, config.dtype)
        step = jax.jit(jax.value_and_grad(functools.partial(jax_loss, config), has_aux=True), compiler_options=QUICK)
        (loss, out), gradients = step(params, inputs)
        return Result({k: np.asarray(v) for k, v in out.items()}, float(loss), from_tree(gradients, config))


def torch_model(config: BertConfig) -> Any:
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
        "max_position_embeddings type_vocab_size layer_norm_eps"
    )
    settings = {name: getattr(config, name) for name in same.split()}
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            **settings, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager"
        )
    )
    missing, unexpected = model.load_state_dict(
        {k: torch.from_numpy(v.copy()) for k, v in weights(config).items()}, strict=False
    )
    assert not unexpected and all(name.startswith("cls.predictions.decoder.") for name in missing)
    return model.to(getattr(torch, config.dtype)).train()


def torch_loss(model: Any, inputs: dict[str, np.ndarray]) -> Any:
    labels = np.full(inputs["input_ids"].shape, -100)
    for row, slot in np.argwhere(inputs["masked_lm_weights"] > 0):
        labels[row, inputs["masked_lm_positions"][row, slot]] = inputs["masked_lm_ids"][row, slot]
    long = {k: torch.tensor(np.array(v)).long() for k, v in inputs.items() if v.dtype == np.int32}
    return model(
        input_ids=long["input_ids"],
        token_type_ids=long["token_type_ids"],
        attention_mask=long["sequence_ids"],
        labels=torch.from_numpy(labels),
        next_sentence_label=long["next_sentence_labels"][:, 0],
        output_hidden_states=True,
    )


@functools.cache
def run_torch(config: BertConfig) -> Result:
    model, inputs = torch_model(config), batch(config)
    pooled = []
    model.bert.pooler.register_forward_hook(lambda module, args, out: pooled.append(out))
    out = torch_loss(model, inputs)
    out.loss.backward()
    logits = np.take_along_axis(out.prediction_logits.detach().numpy(), inputs["masked_lm_positions"][:, :, None], 1)
    outputs = {
        "sequence_output_BLH": out.hidden_states[-1].detach().numpy(),
        "pooled_output_BSH": pooled[0].detach().numpy()[:, None],
        "mlm_logits_BPV": logits,
        "nsp_logits_BS2": out.seq_relationship_logits.detach().numpy()[:, None],
    }
    named = dict(model.named_parameters())
    return Result(outputs, out.loss.item(), {e.name: named[e.name].grad.numpy() for e in entries(config)})


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 norm of the difference."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_loss_and_gradients_are_those_of_pytorch(size: str, layers: Any, dtype: Any, bound: float) -> None:
    config = dataclasses.replace(SIZES[size], layers=layers, dtype=dtype)
    ours = run_jax(config, batch(config))
    theirs = run_torch(dataclasses.replace(SIZES[size], dtype=dtype))

    assert ours.loss == pytest.approx(theirs.loss, rel=bound)
    real = batch(config)["sequence_ids"] > 0
    for name, expected in theirs.outputs.items():
        got = ours.outputs[name]
        assert got.dtype == np.dtype(dtype), name
        if name == "sequence_output_BLH":
            got, expected = got[real], expected[real]
        if name == "mlm_logits_BPV":
            assert (got[..., config.vocab_size :] < -1e8).all()
            got = got[..., : config.vocab_size]
        assert difference(got, expected) < bound, name
        assert np.abs(got - expected).max() < bound * np.abs(expected).max(), name

    total = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in theirs.gradients.values()))
    assert sorted(ours.gradients) == sorted(theirs.gradients)
    for name, expected in theirs.gradients.items():
        if name.endswith("attention.self.key.bias"):
            # The softmax cannot see it: the exact gradient is zero.
            assert np.linalg.norm(ours.gradients[name]) < 1e-6 * total, name
        else:
            assert difference(ours.gradients[name], expected) < bound, name


STEPS = 50
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.01, clip_norm=0.0)


def train_jax(config: BertConfig, optimizer: OptimizerConfig, batches: list[dict[str, np.ndarray]]) -> list[float]:
    rule = optim.make(optimizer, STEPS)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=QUICK)
    def step(params: Any, state: Any, inputs: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        (loss, _), gradients = jax.value_and_grad(functools.partial(jax_loss, config), has_aux=True)(params, inputs)
        direction, state = rule.update(gradients, state, params)
        rate = rule.schedule(number)
        return jax.tree.map(lambda p, d: p - rate * d, params, direction), state, loss

    params = jax.tree.map(jnp.asarray, to_tree(weights(config), config))
    state, curve = rule.init(params), []
    with jax.default_matmul_precision("highest"):
        for i in range(STEPS):
            params, state, loss = step(params, state, batches[i % len(batches)], jnp.asarray(i, jnp.int32))
            curve.append(float(loss))
    return curve


class TorchBertAdam:
    """Adam as in the 2018 code (google-research/bert, optimization.py): no bias correction, decay on the update."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        self.groups, self.lr, self.betas, self.eps = groups, lr, betas, eps
        self.moments: dict[Any, Any] = {}

    def step(self) -> None:
        with torch.no_grad():
            for group in self.groups:
                for p in group["params"]:
                    zeros = torch.zeros_like(p)
                    m, v = self.moments.get(p, (zeros, zeros))
                    m = self.betas[0] * m + (1 - self.betas[0]) * p.grad
                    v = self.betas[1] * v + (1 - self.betas[1]) * p.grad**2
                    self.moments[p] = m, v
                    p -= self.lr * (m / (v.sqrt() + self.eps) + group["weight_decay"] * p)


def train_torch(config: BertConfig, make: Callable[..., Any], batches: list[dict[str, np.ndarray]]) -> list[float]:
    model = torch_model(config)
    decayed, rest = [], []
    for name, p in model.named_parameters():
        (rest if name.endswith("bias") or "LayerNorm" in name else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    rule = make(groups, lr=OPTIMIZER.learning_rate, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.epsilon)
    curve = []
    for i in range(STEPS):
        model.zero_grad()
        loss = torch_loss(model, batches[i % len(batches)]).loss
        loss.backward()
        rule.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("name", ["adamw", "bert_adam"])
def test_fifty_steps_follow_the_loss_curve_of_pytorch(name: Any) -> None:
    config = dataclasses.replace(SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batches = [batch(config, seed) for seed in range(5)]
    theirs = train_torch(config, torch.optim.AdamW if name == "adamw" else TorchBertAdam, batches)
    ours = train_jax(config, dataclasses.replace(OPTIMIZER, name=name), batches)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < 0.8 * theirs[0], "the run must learn, or the curves say nothing"


def test_the_fresh_tree_has_exactly_the_tensors_that_are_compared() -> None:
    ids = jnp.zeros((1, 1), jnp.int32)
    fresh = jax.eval_shape(BertForPreTraining(SMALL).init, jax.random.key(0), ids, ids, ids, ids, ids, ids)
    shapes = jax.tree.map(np.shape, nn.meta.unbox(fresh["params"]))
    assert shapes == jax.tree.map(np.shape, to_tree(weights(SMALL), SMALL))
