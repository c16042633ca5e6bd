"""The translation task: loss, counts, filler rows, and the same numbers however a batch is split."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_translation import CONFIG, PAD, QUICK, padded, pairs, rows

from transformer_jax import losses, optim, sharding
from transformer_jax.config import MeshConfig, TrainConfig
from transformer_jax.engine import Engine
from transformer_jax.translation import model
from transformer_jax.translation.config import BatchesConfig, ObjectiveConfig, TranslationOptimizerConfig
from transformer_jax.translation.task import INPUTS, TranslationTask

EXAMPLES = BatchesConfig(max_source_length=12, max_target_length=12)
LENGTHS = [(5, 3), (4, 6), (6, 1), (12, 11), (3, 3), (2, 8), (7, 5), (4, 4)]
PACKED = rows([pairs([(5, 3), (4, 6)]), pairs([(6, 1)], 1), pairs([(2, 2), (2, 2), (2, 2)], 2)], 12, 12)


def make(smoothing: float = 0.1, **changes: Any) -> TranslationTask:
    return TranslationTask(dataclasses.replace(CONFIG, **changes), EXAMPLES, ObjectiveConfig(smoothing))


TASK = make()
PARAMS = sharding.unbox(jax.jit(TASK.init, compiler_options=QUICK)(jax.random.key(1)))


def loss_of(task: TranslationTask) -> Any:
    def value(params: Any, batch: Any, key: Any = None) -> Any:
        sums, counts = task.loss_fn(params, batch, key)
        return losses.sum_of_means(sums, counts, task.losses), (sums, counts)

    return jax.jit(jax.value_and_grad(value, has_aux=True), compiler_options=QUICK)


LOSS = loss_of(TASK)


def run(batch: dict[str, Any], params: Any = PARAMS) -> Any:
    (total, (sums, counts)), gradients = LOSS(params, batch)
    return float(total), *({k: float(v) for k, v in d.items()} for d in (sums, counts)), gradients


@pytest.mark.slow
def test_the_sums_are_those_of_the_logits_and_the_formula_of_label_smoothing() -> None:
    inputs = (jnp.asarray(PACKED[name]) for name in INPUTS)
    logits = np.asarray(model.Transformer(CONFIG).apply({"params": PARAMS}, *inputs), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total, sums, counts, _ = run(PACKED)
    smoothed = plain = right = 0.0
    for row, t in np.argwhere(PACKED["label_weights"] > 0):
        label = PACKED["labels"][row, t]
        q = np.full(PAD, 0.1 / PAD)
        q[label] += 0.9
        smoothed -= (q * log_p[row, t, :PAD]).sum()
        plain -= log_p[row, t, label]
        right += logits[row, t].argmax() == label
    found = [sums[k] for k in ("translation", "translation_nll", "translation_accuracy")]
    assert found == pytest.approx([smoothed, plain, right], rel=1e-5)
    assert total == pytest.approx(smoothed / counts["translation"], rel=1e-5)
    assert losses.means({f"sum/{k}": v for k, v in sums.items()} | {"count/translation": 1.0}, TASK.losses)[
        "translation_loss"
    ] == pytest.approx(smoothed, rel=1e-5)


def test_counts_are_those_of_the_pairs() -> None:
    sizes = [(5, 4), (4, 7), (6, 2), (2, 3), (2, 3), (2, 3)]
    assert {k: float(v) for k, v in TASK.counts(jax.tree.map(jnp.asarray, PACKED)).items()} == {
        "translation": sum(t for _, t in sizes),
        "tokens": sum(s + t for s, t in sizes),
        "slots": 3 * 24,
        "source_tokens": sum(s for s, _ in sizes),
        "source_pairs": sum(s * s for s, _ in sizes),
        "target_tokens": sum(t for _, t in sizes),
        "target_pairs": sum(t * (t + 1) / 2 for _, t in sizes),
        "cross_pairs": sum(s * t for s, t in sizes),
    }


def test_flops_come_from_the_counts() -> None:
    counts = {k: float(v) for k, v in TASK.counts(jax.tree.map(jnp.asarray, PACKED)).items()}
    names = ("source_tokens", "source_pairs", "target_tokens", "target_pairs", "cross_pairs")
    expected = model.model_flops(CONFIG, **{k: counts[k] for k in names}, predictions=counts["translation"])
    assert TASK.flops(counts) == expected > 0


@pytest.mark.slow
@pytest.mark.parametrize("longer", [10, 24])
def test_the_loss_does_not_depend_on_the_amount_of_padding(longer: int) -> None:
    """C061: neither the divisor nor the smoothing sees padding."""
    short = run(padded([(4, 3)]))
    long = run(padded([(4, 3)], source=longer, target=longer))
    assert long[0] == pytest.approx(short[0], rel=1e-6)
    assert long[2]["translation"] == short[2]["translation"] == 4


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_padding_of_the_table() -> None:
    """C061: 101 pieces padded to 128, or not at all."""
    task = make(vocab_multiple=1)
    table = PARAMS["embeddings"]["target"]["embedding"]
    assert table.shape == (128, 32)
    params = {**PARAMS, "embeddings": {"target": {"embedding": table[:101]}}}
    total = loss_of(task)(params, PACKED)[0][0]
    assert float(total) == pytest.approx(run(PACKED)[0], rel=1e-6)


def fillers(batch: dict[str, Any], count: int) -> dict[str, Any]:
    return {k: np.concatenate([v, np.zeros((count, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}


@pytest.mark.slow
def test_filler_rows_have_no_influence() -> None:
    """C027: rows that are all padding add nothing to loss, counts or gradients, and nothing becomes NaN."""
    total, sums, counts, gradients = run(PACKED)
    total_2, sums_2, counts_2, gradients_2 = run(fillers(PACKED, 2))
    assert total_2 == pytest.approx(total, rel=1e-6)
    assert sums_2 == pytest.approx(sums, rel=1e-6) and counts_2 == counts
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, gradients_2)
    nothing = run({**PACKED, "label_weights": 0 * PACKED["label_weights"]})
    assert nothing[0] == 0.0 and all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(nothing[3]))


@pytest.mark.slow
def test_a_packed_batch_has_the_sums_of_its_pairs_alone() -> None:
    alone = rows([[p] for p in (*pairs([(5, 3), (4, 6)]), *pairs([(6, 1)], 1), *pairs([(2, 2)] * 3, 2))], 12, 12)
    total, sums, _, gradients = run(PACKED)
    total_2, sums_2, _, gradients_2 = run(alone)
    assert total_2 == pytest.approx(total, rel=1e-6) and sums_2 == pytest.approx(sums, rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, gradients_2)


def test_an_echo_of_the_decoder_s_input_is_a_bad_answer() -> None:
    """C060: the label is the next piece, not the one put in."""
    batch = padded([(3, 2)])
    assert batch["decoder_input_ids"][0].tolist() == [PAD, *batch["labels"][0, :2]]
    assert batch["labels"][0, 2] == 0 and batch["label_weights"][0].tolist() == [1, 1, 1]


# However the batch is split: one step of the engine with dropout on.
BATCH = padded(LENGTHS, source=12, target=12)
DROPPED = make(attention_probs_dropout_prob=0.1, num_hidden_layers=1, num_decoder_layers=1, output_bias=True)


def one_step(mesh: MeshConfig, devices: int, accumulate: int = 1) -> tuple[Any, dict[str, float]]:
    # With an epsilon of 1 Adam's first step is about the gradient; with a small one it would be the gradient's sign,
    # which for the keys' biases (whose exact gradient is zero) is that of a rounding error.
    settings = TranslationOptimizerConfig(learning_rate=50.0, warmup_steps=4, epsilon=1.0)
    optimizer = optim.make(settings, 10, CONFIG.hidden_size)
    config = TrainConfig(batch_size=8, accumulate=accumulate, steps=10, matmul_precision="highest")
    grid = sharding.make_mesh(mesh, jax.devices()[:devices])
    engine = Engine(DROPPED, optimizer, config, grid, mesh.preset, 1.0)
    with jax.set_mesh(grid):
        arguments = (engine.init(), engine.put(BATCH), engine.dropout_key)
        state, metrics = engine.train_step.lower(*arguments).compile(QUICK)(*arguments)
    return jax.device_get(state.params), {k: float(v) for k, v in metrics.items()}


@pytest.fixture(scope="module")
def plain_step() -> tuple[Any, dict[str, float]]:
    return one_step(MeshConfig(), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "devices", "accumulate"),
    [
        (MeshConfig(), 1, 4),
        (MeshConfig(preset="fsdp", fsdp=4, data=2), 8, 1),
        (MeshConfig(preset="fsdp_tensor", fsdp=2, data=2, tensor=2), 8, 2),
    ],
    ids=["accumulated", "data and fsdp", "all three and accumulated"],
)
def test_a_step_is_the_same_on_any_mesh_and_in_any_number_of_parts(
    mesh: MeshConfig, devices: int, accumulate: int, plain_step: tuple[Any, dict[str, float]]
) -> None:
    """C004: dropout on, targets of 2 to 12 pieces."""
    params, metrics = one_step(mesh, devices, accumulate)
    for name in ("sum/translation", "sum/translation_nll", "count/translation", "gradient_norm"):
        assert metrics[name] == pytest.approx(plain_step[1][name], rel=1e-5), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), params, plain_step[0])
    for trained in (params["embeddings"]["target"]["embedding"], params["output"]["bias"]):
        assert trained[:PAD].any() and not trained[PAD:].any(), "the rows of <pad> and padding stay zero"
