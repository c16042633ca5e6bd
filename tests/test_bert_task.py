"""The pretraining task: losses, what counts, filler rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from bert_jax import model
from bert_jax.data import EvaluationData
from bert_jax.task import PretrainingTask
from transformer_jax import losses, sharding
from transformer_jax.shards import Shards

MODEL = dataclasses.replace(tiny_run.MODEL, vocab_size=len(tiny_run.VOCAB))


@pytest.fixture(scope="module")
def task():
    return PretrainingTask(MODEL, 32)


@pytest.fixture(scope="module")
def params(task):
    return sharding.unbox(task.init(jax.random.key(1)))


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tiny_run.prepare(folder / "prepared")
    evaluation = EvaluationData(Shards.open(folder / "prepared", "heldout"), tiny_run.config(folder).examples)
    return evaluation.batch(evaluation.num_rows - 6, 6)  # the rows with most pairs come last


@pytest.fixture(scope="module")
def loss(task):
    """(loss, sums, counts, gradients) of a batch without dropout."""

    def value(params, batch):
        sums, counts = task.loss_fn(params, batch, None)
        return losses.sum_of_means(sums, counts, task.losses), (sums, counts)

    compiled = jax.jit(jax.value_and_grad(value, has_aux=True))

    def run(params, batch):
        (total, (sums, counts)), gradients = compiled(params, batch)
        return float(total), *({k: float(v) for k, v in d.items()} for d in (sums, counts)), gradients

    return run


@pytest.mark.slow
def test_the_losses_are_those_of_the_logits(task, params, batch, loss):
    names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "masked_lm_positions", "cls_positions")
    out = jax.jit(task.model.apply)({"params": params}, *(batch[k] for k in names))
    total, sums, counts, _ = loss(params, batch)

    def by_hand(logits, labels, weights):
        logits = np.asarray(logits, np.float64)
        log_p = logits - logits.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
        return float(-(picked * weights).sum()), float(((logits.argmax(-1) == labels) * weights).sum())

    mlm = by_hand(out["mlm_logits_BPV"], batch["masked_lm_ids"], batch["masked_lm_weights"])
    nsp = by_hand(out["nsp_logits_BS2"], batch["next_sentence_labels"], batch["next_sentence_weights"])
    found = [sums[k] for k in ("mlm", "mlm_accuracy", "nsp", "nsp_accuracy")]
    assert found == pytest.approx([*mlm, *nsp], rel=1e-5)
    assert total == pytest.approx(mlm[0] / counts["mlm"] + nsp[0] / counts["nsp"], rel=1e-5)


def test_counts_are_those_of_the_batch(task, batch):
    found = {k: float(v) for k, v in task.counts(jax.tree.map(jnp.asarray, batch)).items()}
    lengths = [(row == s).sum() for row in batch["sequence_ids"] for s in range(1, row.max() + 1)]
    assert found == {
        "mlm": batch["masked_lm_weights"].sum(),
        "nsp": batch["next_sentence_weights"].sum(),
        "tokens": sum(lengths),
        "slots": 6 * 32,
        "squares": sum(n**2 for n in lengths),
        "sequences": len(lengths),
    }
    assert found["sequences"] > 6, "several pairs in a row"


def test_flops_come_from_the_counts(task):
    counts = {"tokens": 100.0, "squares": 2000.0, "mlm": 15.0, "sequences": 4.0}
    expected = model.model_flops(MODEL, tokens=100.0, squares=2000.0, predictions=15.0, sequences=4.0)
    assert task.flops(counts | {"nsp": 3.0, "slots": 128.0}) == expected


def fillers(batch, count):
    return {k: np.concatenate([v, np.zeros((count, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}


def test_filler_rows_have_no_influence(params, batch, loss):
    """C027: rows that are all padding add nothing to loss, counts or gradients, and nothing becomes NaN."""
    total, sums, counts, gradients = loss(params, batch)
    total_2, sums_2, counts_2, gradients_2 = loss(params, fillers(batch, 2))
    assert total_2 == pytest.approx(total, rel=1e-6)
    assert sums_2 == pytest.approx(sums, rel=1e-6) and counts_2 == counts
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradients, gradients_2)


def test_a_batch_in_which_nothing_counts_has_loss_zero(params, batch, loss):
    """C051: no weight anywhere gives 0 and gradients of 0, never NaN."""
    nothing = batch | {k: 0 * batch[k] for k in ("masked_lm_weights", "next_sentence_weights")}
    total, sums, _, gradients = loss(params, nothing)
    assert total == 0.0 and set(sums.values()) == {0.0}
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(gradients))


def test_without_a_sentence_task_there_is_one_loss_and_the_head_stays(params, batch):
    task = PretrainingTask(MODEL, 32, next_sentence=False)
    sums, _ = jax.eval_shape(lambda p, b: task.loss_fn(p, b, None), params, batch)
    assert task.losses == ("mlm",) and set(sums) == {"mlm", "mlm_accuracy"}
    drawn = sharding.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    assert jax.tree.structure(drawn) == jax.tree.structure(params)


def test_parameters_are_float32_and_carry_their_axes(task):
    boxed = jax.eval_shape(task.init, jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(sharding.unbox(boxed))} == {jnp.dtype("float32")}
    assert boxed["embeddings"]["word"]["embedding"].names == ("vocab", "embed")
