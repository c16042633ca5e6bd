"""BertForPreTraining: packing, padding, limits and heads."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import BertConfig
from bert_jax.model import BertForPreTraining, check_shapes, model_flops
from transformer_jax import losses, masks
from transformer_jax.config import ConfigError

CONFIG = BertConfig(
    vocab_size=101,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
)
MODEL = BertForPreTraining(CONFIG)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
IDS_11 = jnp.zeros((1, 1), jnp.int32)
PARAMS = nn.meta.unbox(jax.jit(MODEL.init, compiler_options=QUICK)(jax.random.key(0), *[IDS_11] * 6)["params"])
INPUTS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "masked_lm_positions", "cls_positions")
Batch = dict[str, Any]


def padded(lengths: list[int], length: int = 16, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    sequence_ids = np.array(masks.from_lengths(jnp.asarray(lengths), length))
    rows = len(lengths)
    return {
        "input_ids": (rng.integers(1, 101, (rows, length)) * sequence_ids).astype(np.int32),
        "token_type_ids": rng.integers(0, 2, (rows, length)).astype(np.int32) * sequence_ids,
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)) * sequence_ids,
        "sequence_ids": sequence_ids,
        "masked_lm_positions": np.tile(np.asarray([1, 2], np.int32), (rows, 1)),
        "masked_lm_ids": rng.integers(0, 101, (rows, 2)).astype(np.int32),
        "masked_lm_weights": np.ones((rows, 2), np.float32),
        "cls_positions": np.zeros((rows, 1), np.int32),
        "next_sentence_labels": rng.integers(0, 2, (rows, 1)).astype(np.int32),
        "next_sentence_weights": np.ones((rows, 1), np.float32),
        "row_ids": np.arange(rows, dtype=np.int32),
    }


@functools.cache
def compiled(config: BertConfig) -> Any:
    apply = BertForPreTraining(config).apply
    return jax.jit(lambda p, i: apply({"params": p}, **i), compiler_options=QUICK)


def run(batch: Batch, params: Any = PARAMS, config: BertConfig = CONFIG) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, compiled(config)(params, {name: batch[name] for name in INPUTS if name in batch}))


def loss(params: Any, batch: Batch, key: jax.Array | None, config: BertConfig = CONFIG) -> jax.Array:
    out = BertForPreTraining(config).apply(
        {"params": params}, **{name: batch[name] for name in INPUTS}, row_ids=batch["row_ids"], dropout_key=key
    )
    mlm, n = losses.weighted_cross_entropy(out["mlm_logits_BPV"], batch["masked_lm_ids"], batch["masked_lm_weights"])
    nsp, m = losses.weighted_cross_entropy(
        out["nsp_logits_BS2"], batch["next_sentence_labels"], batch["next_sentence_weights"]
    )
    return mlm / n + nsp / m


def packed(parts: Batch, lengths: list[int], order: list[int]) -> Batch:
    """One row made of the given rows of `parts`, one after another, with padding at the end."""
    row: Batch = {name: np.zeros((1, 16), np.int32) for name in INPUTS[:4]}
    row["masked_lm_positions"] = np.zeros((1, 2 * len(order)), np.int32)
    row["cls_positions"] = np.zeros((1, len(order)), np.int32)
    start = 0
    for s, part in enumerate(order):
        n = lengths[part]
        for name in INPUTS[:3]:
            row[name][0, start : start + n] = parts[name][part, :n]
        row["sequence_ids"][0, start : start + n] = s + 1
        row["masked_lm_positions"][0, 2 * s : 2 * s + 2] = parts["masked_lm_positions"][part] + start
        row["cls_positions"][0, s] = start
        start += n
    return row


@pytest.mark.slow
def test_a_packed_row_gives_each_sequence_what_it_gets_alone() -> None:
    lengths = [5, 4, 6]
    parts = padded(lengths)
    alone, order = run(parts), [2, 0, 1]
    out = run(packed(parts, lengths, order))
    start = 0
    for s, part in enumerate(order):
        n = lengths[part]
        np.testing.assert_allclose(
            out["sequence_output_BLH"][0, start : start + n], alone["sequence_output_BLH"][part, :n], atol=1e-5
        )
        np.testing.assert_allclose(out["pooled_output_BSH"][0, s], alone["pooled_output_BSH"][part, 0], atol=1e-5)
        np.testing.assert_allclose(out["nsp_logits_BS2"][0, s], alone["nsp_logits_BS2"][part, 0], atol=1e-5)
        np.testing.assert_allclose(
            out["mlm_logits_BPV"][0, 2 * s : 2 * s + 2], alone["mlm_logits_BPV"][part], rtol=1e-5, atol=1e-5
        )
        start += n


@pytest.mark.slow
def test_padding_length_and_padding_ids_change_nothing() -> None:
    """C030, C050: the mask comes from sequence ids; a padding slot may hold any token."""
    short = {k: v[:, :8] if v.shape[1:] == (16,) else v for k, v in padded([6, 8]).items()}
    long = padded([6, 8], 16)
    real = np.asarray([6, 8])[:, None] > np.arange(8)[None]
    for name in INPUTS[:4]:
        long[name][:, :8] = short[name]
    long["input_ids"][long["sequence_ids"] == 0] = 77
    a, b = run(short), run(long)
    np.testing.assert_allclose(a["sequence_output_BLH"][real], b["sequence_output_BLH"][:, :8][real], atol=1e-5)
    np.testing.assert_allclose(a["mlm_logits_BPV"], b["mlm_logits_BPV"], rtol=1e-5, atol=1e-5)


def test_a_word_with_id_zero_is_attended_to() -> None:
    """C030: id 0 may be a word."""
    batch = padded([6])
    batch["input_ids"][0, 3] = 0
    other = {k: v.copy() for k, v in batch.items()}
    other["input_ids"][0, 3] = 9
    assert np.abs(run(batch)["sequence_output_BLH"][0, 0] - run(other)["sequence_output_BLH"][0, 0]).max() > 1e-4


def with_filler_row() -> Batch:
    batch = padded([9, 5, 0])
    for name in ("masked_lm_weights", "next_sentence_weights"):
        batch[name][2] = 0
    return batch


@pytest.mark.slow
def test_a_filler_row_has_no_influence_on_loss_and_gradient() -> None:
    """C027"""
    batch = with_filler_row()
    without = {k: v[:2] for k, v in batch.items()}
    step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    key = jax.random.key(2)
    (a, gradient_a), (b, gradient_b) = step(PARAMS, batch, key), step(PARAMS, without, key)
    assert float(a) == pytest.approx(float(b), rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), gradient_a, gradient_b)


@pytest.mark.slow
def test_a_filler_row_stays_finite_in_float16() -> None:
    """C027, in the format with the smallest range."""
    step = jax.value_and_grad(functools.partial(loss, config=dataclasses.replace(CONFIG, dtype="float16")))
    value, gradient = jax.jit(step, compiler_options=QUICK)(PARAMS, with_filler_row(), jax.random.key(2))
    assert np.isfinite(float(value))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_padding_rows_of_the_vocabulary_are_never_predicted_and_get_no_gradient() -> None:
    """C008"""
    assert CONFIG.padded_vocab_size == 128
    params = jax.tree.map(np.array, PARAMS)
    params["embeddings"]["word"]["embedding"][101:] = 100.0
    params["mlm"]["bias"][101:] = 100.0
    batch = padded([16, 12])
    every = {k: v for k, v in batch.items() if k != "masked_lm_positions"}
    out = run(every, params)["mlm_logits_BPV"]
    assert out.shape == (2, 16, 128) and out.dtype == np.float32
    assert out.argmax(-1).max() < 101
    assert (jax.nn.softmax(out, -1)[..., 101:] == 0).all()
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(params, batch, None)
    assert not np.asarray(gradient["embeddings"]["word"]["embedding"])[101:].any()
    assert not np.asarray(gradient["mlm"]["bias"])[101:].any()


def test_the_head_at_chosen_positions_is_the_head_everywhere_picked_there() -> None:
    batch = padded([16, 10])
    batch["masked_lm_positions"] = np.asarray([[3, 15, 3], [0, 9, 1]], np.int32)
    everywhere = run({k: v for k, v in batch.items() if k not in ("masked_lm_positions", "cls_positions")})
    picked = run(batch)
    expected = np.take_along_axis(everywhere["mlm_logits_BPV"], batch["masked_lm_positions"][:, :, None], 1)
    np.testing.assert_allclose(picked["mlm_logits_BPV"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(picked["pooled_output_BSH"], everywhere["pooled_output_BSH"], atol=1e-6)


def test_rows_longer_than_the_position_table_are_refused_before_compiling() -> None:
    """C014"""
    batch = padded([17], 17)
    with pytest.raises(ConfigError, match=r"rows are 17 tokens long, but the model has 16 positions"):
        jax.eval_shape(lambda p, i: MODEL.apply({"params": p}, **i), PARAMS, {name: batch[name] for name in INPUTS})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input_ids", (16,), "input_ids has shape"),
        ("position_ids", (2, 8), "position_ids has shape"),
        ("cls_positions", (3, 1), "cls_positions has shape"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused_by_name(name: str, shape: tuple[int, ...], message: str) -> None:
    batch = {k: padded([16, 4])[k] for k in INPUTS} | {name: np.zeros(shape, np.int32)}
    with pytest.raises(ConfigError, match=message):
        check_shapes(CONFIG, **batch)


def test_a_model_without_a_vocabulary_says_where_the_size_comes_from() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 0; prepare the data first"):
        BertForPreTraining(dataclasses.replace(CONFIG, vocab_size=0)).init(jax.random.key(0), *[IDS_11] * 6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32_with_float32_parameters_and_logits(dtype: Any) -> None:
    batch = padded([16, 10])
    single, half = run(batch), run(batch, config=dataclasses.replace(CONFIG, dtype=dtype))
    assert half["sequence_output_BLH"].dtype == jnp.dtype(dtype)
    assert half["mlm_logits_BPV"].dtype == half["nsp_logits_BS2"].dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(PARAMS)} == {np.dtype("float32")}
    np.testing.assert_allclose(half["mlm_logits_BPV"][..., :101], single["mlm_logits_BPV"][..., :101], atol=0.02)


@pytest.mark.slow
def test_dropout_gives_the_same_loss_in_parts_of_the_batch_and_another_for_another_key() -> None:
    batch = padded([16, 10, 7, 4])
    step = jax.jit(loss, compiler_options=QUICK)
    whole = float(step(PARAMS, batch, jax.random.key(1)))
    halves = [float(step(PARAMS, {k: v[i : i + 2] for k, v in batch.items()}, jax.random.key(1))) for i in (0, 2)]
    assert np.mean(halves) == pytest.approx(whole, rel=1e-6)
    assert abs(float(step(PARAMS, batch, jax.random.key(2))) - whole) > 1e-4


def test_model_flops_are_those_of_the_published_workload() -> None:
    """BERT-base at 128, 106 real tokens a sequence, 15 % predicted: 0.544 GFLOP a token."""
    config = BertConfig(vocab_size=30_522)
    weights = 12 * (4 * 768**2 + 2 * 768 * 3072)
    heads = 16 * (768**2 + 768 * 30_522) + 768**2 + 768 * 2
    flops = model_flops(config, tokens=106, squares=106**2, predictions=16, sequences=1)
    assert flops == 6 * (106 * weights + heads + 12 * 2 * 106**2 * 768)
    assert flops / 106 == pytest.approx(0.544e9, rel=0.01)
