"""The Transformer: sizes, causality, packing, padding, limits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_translation import CONFIG, PAD, QUICK, VOCAB, padded, pairs, rows

from transformer_jax import dropout
from transformer_jax.config import ConfigError
from transformer_jax.embeddings import sinusoids
from transformer_jax.translation import model, step
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.presets import PRESETS, TABLE_3
from transformer_jax.translation.task import INPUTS


@functools.cache
def initial(config: TransformerConfig) -> Any:
    ids = jnp.zeros((1, 1), jnp.int32)
    init = jax.jit(model.Transformer(config).init, compiler_options=QUICK)
    return nn.meta.unbox(init(jax.random.key(0), *[ids] * 6)["params"])


@functools.cache
def compiled(config: TransformerConfig) -> Any:
    apply = model.Transformer(config).apply
    return jax.jit(lambda params, *inputs: apply({"params": params}, *inputs), compiler_options=QUICK)


def run(batch: dict[str, Any], params: Any = None, config: TransformerConfig = CONFIG) -> np.ndarray:
    params = initial(config) if params is None else params
    return np.asarray(compiled(config)(params, *(batch[name] for name in INPUTS)))


def encoded(config: TransformerConfig, source: dict[str, Any]) -> tuple[jax.Array, Any]:
    """The encoder's output and what the decoder's layers need of it."""
    module, params = model.Transformer(config), {"params": initial(config)}

    def both(*inputs: jax.Array) -> Any:
        memory: Any = module.apply(params, *inputs, method="encode")
        return memory, module.apply(params, memory, method="memory_keys_values")

    return jax.jit(both, compiler_options=QUICK)(*(source[k] for k in INPUTS[:3]))


@pytest.mark.slow
def test_parameter_counts_are_exact_with_37000_shared_pieces() -> None:
    """The paper prints 65 and 213 million."""

    def counts(preset: str) -> dict[str, int]:
        return model.count_parameters(
            dataclasses.replace(PRESETS[preset], source_vocab_size=37_000, target_vocab_size=37_000)
        )

    base, big = counts("transformer-base"), counts("transformer-big")
    assert base["total"] == 63_082_496 and big["total"] == 214_245_376
    h, f = 512, 2048
    attention, feed_forward, norm = 4 * (h * h + h), 2 * h * f + h + f, 2 * h
    assert base == {
        "embeddings/target": 37_000 * h,
        "encoder": 6 * (attention + feed_forward + 2 * norm),
        "decoder": 6 * (2 * attention + feed_forward + 3 * norm),
        "total": 63_082_496,
    }


def test_tables_are_counted_apart_where_they_are_apart() -> None:
    sizes: dict[str, Any] = {"source_vocab_size": 1000, "target_vocab_size": 1200}
    untied = model.count_parameters(dataclasses.replace(CONFIG, embeddings="untied", **sizes))
    tables = {name: n for name, n in untied.items() if name.startswith("embeddings/")}
    assert tables == {
        "embeddings/source": 1000 * 32,
        "embeddings/target": 1200 * 32,
        "embeddings/output": 1200 * 32,
    }
    separate = model.count_parameters(dataclasses.replace(CONFIG, embeddings="separate", **sizes))
    assert untied["total"] - separate["total"] == 1200 * 32
    pre = model.count_parameters(dataclasses.replace(CONFIG, norm="pre"))
    assert pre["total"] - model.count_parameters(CONFIG)["total"] == 2 * 2 * 32, "a last norm for each stack"
    biased = model.count_parameters(dataclasses.replace(CONFIG, output_bias=True))
    assert biased["output"] == biased["total"] - model.count_parameters(CONFIG)["total"] == VOCAB


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE_3)
def test_rows_of_table_3_that_are_sizes_have_about_the_paper_s_parameters(name: str) -> None:
    """Its figures are 1.1 to 4.2 million above the exact ones of base's kind, and 1 below for big."""
    row = TABLE_3[name]
    config = dataclasses.replace(PRESETS["transformer-base"], **row.changes)
    found = model.count_parameters(dataclasses.replace(config, source_vocab_size=37_000, target_vocab_size=37_000))
    assert -1.3 < row.millions - found["total"] / 1e6 < 4.2


def test_sinusoids_are_a_half_of_sines_and_a_half_of_cosines() -> None:
    table = sinusoids(9, 6)
    for p in range(9):
        angles = [p / 10000 ** (2 * i / 6) for i in range(3)]
        np.testing.assert_allclose(table[p], np.concatenate([np.sin(angles), np.cos(angles)]), rtol=1e-6, atol=1e-7)
    assert table.dtype == np.float32


def test_encoder_parameters_have_berts_names_and_shapes() -> None:
    from bert_jax.config import BertConfig
    from bert_jax.model import abstract_params

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    bert = abstract_params(BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes))
    ours = model.abstract_params(dataclasses.replace(CONFIG, embeddings="separate", encoder_embeddings="bert"))
    assert ours["encoder"] == bert["encoder"] == model.abstract_params(CONFIG)["encoder"]
    assert ours["embeddings"]["source"] == bert["embeddings"]
    assert sorted(ours["decoder"]["layer_1"]) == [
        "attention", "attention_norm", "cross_attention", "cross_attention_norm", "feed_forward", "feed_forward_norm",
    ]  # fmt: skip


@pytest.mark.slow
def test_with_berts_embeddings_the_encoder_computes_what_bert_does() -> None:
    from bert_jax.config import BertConfig
    from bert_jax.model import BertForPreTraining

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    bert = BertForPreTraining(BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes))
    batch = padded([(7, 3), (4, 4)])
    ids = [jnp.asarray(batch[k]) for k in ("input_ids", "position_ids", "sequence_ids")]
    init, apply = (jax.jit(f, compiler_options=QUICK) for f in (bert.init, bert.apply))
    params = nn.meta.unbox(init(jax.random.key(3), ids[0], ids[2] * 0, ids[1], ids[2])["params"])
    expected: Any = apply({"params": params}, ids[0], ids[2] * 0, ids[1], ids[2])
    config = dataclasses.replace(
        CONFIG, embeddings="separate", encoder_embeddings="bert", hidden_act="gelu", layer_norm_eps=1e-12
    )
    started = {**initial(config), "encoder": params["encoder"]}
    started["embeddings"] = {**started["embeddings"], "source": params["embeddings"]}
    encode = jax.jit(functools.partial(model.Transformer(config).apply, method="encode"), compiler_options=QUICK)
    memory = encode({"params": started}, *ids)
    np.testing.assert_allclose(memory, expected["sequence_output_BLH"], rtol=1e-6, atol=1e-6)
    assert np.isfinite(run(batch, started, config)).all()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_target_position_depends_on_what_came_before_in_its_pair_and_on_its_source_alone(norm: Any) -> None:
    """Causality by gradients, in a row of two pairs."""
    config = dataclasses.replace(CONFIG, norm=norm)
    batch = rows([pairs([(4, 2), (3, 4)])], 9, 10)
    module = model.Decoder(config, config.num_decoder_layers)
    x_BTH, memory_BSH = (jax.random.normal(jax.random.key(i), (1, n, 32)) for i, n in enumerate((10, 9)))
    target, source = jnp.asarray(batch["decoder_sequence_ids"]), jnp.asarray(batch["sequence_ids"])
    params = {"params": initial(config)["decoder"]}

    def output(x_BTH: jax.Array, memory_BSH: jax.Array, t: jax.Array) -> jax.Array:
        y: Any = module.apply(params, x_BTH, target, memory_BSH, source)
        return (y[0, t] * jnp.arange(32.0)).sum()

    gradient = jax.jit(jax.grad(output, argnums=(0, 1)), compiler_options=QUICK)
    for t in range(8):
        by_x, by_memory = (np.abs(np.asarray(g[0])).max(-1) for g in gradient(x_BTH, memory_BSH, jnp.asarray(t)))
        own = np.asarray(target[0]) == target[0, t]
        seen = own & (np.arange(10) <= t)
        assert (by_x[seen] > 1e-4).all() and (by_x[~seen] == 0).all()
        own_source = np.asarray(source[0]) == target[0, t]
        assert (by_memory[own_source] > 1e-5).all() and (by_memory[~own_source] == 0).all()


@pytest.mark.slow
def test_a_packed_row_gives_each_pair_what_it_gets_alone() -> None:
    three = pairs([(5, 3), (4, 6), (6, 1)])
    alone = run(rows([[pair] for pair in three], 16, 16))
    order = [2, 0, 1]
    together = run(rows([[three[i] for i in order]], 16, 16))
    start = 0
    for i in order:
        n = len(three[i][1]) + 1
        np.testing.assert_allclose(together[0, start : start + n], alone[i, :n], rtol=1e-5, atol=1e-5)
        start += n


@pytest.mark.slow
def test_padding_length_and_padding_ids_change_nothing() -> None:
    """C030: the masks come from sequence ids; a padding slot may hold any piece."""
    short, long = padded([(6, 3), (9, 5)]), padded([(6, 3), (9, 5)], source=14, target=13)
    long["input_ids"][long["sequence_ids"] == 0] = 7
    long["decoder_input_ids"][long["decoder_sequence_ids"] == 0] = 7
    real = short["label_weights"] > 0
    np.testing.assert_allclose(run(short)[real], run(long)[:, :6][real], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("output_bias", [False, True])
def test_pad_and_padding_rows_are_never_predicted_get_no_gradient_and_start_the_decoder_with_zero(
    output_bias: bool,
) -> None:
    """C008: whatever those rows hold."""
    config = dataclasses.replace(CONFIG, output_bias=output_bias)
    assert config.padded_target_vocab_size == 128
    params = jax.tree.map(np.array, initial(config))
    table = params["embeddings"]["target"]["embedding"]
    assert not table[PAD:].any() and table[:PAD].all(), "born zero"
    batch = padded([(6, 3), (9, 5)])
    before = run(batch, params, config)
    table[PAD:] = 5.0
    if output_bias:
        params["output"]["bias"][PAD:] = 5.0
    after = run(batch, params, config)
    assert after.argmax(-1).max() < PAD
    assert (jax.nn.softmax(after, -1)[..., PAD:] == 0).all()
    np.testing.assert_array_equal(after[..., :PAD], before[..., :PAD])

    def loss(params: Any) -> jax.Array:
        logits: Any = model.Transformer(config).apply({"params": params}, *(batch[name] for name in INPUTS))
        return (jax.nn.log_softmax(logits)[..., :PAD] ** 2).mean()

    gradients = jax.jit(jax.grad(loss), compiler_options=QUICK)(params)
    trained = [gradients["embeddings"]["target"]["embedding"]]
    trained += [gradients["output"]["bias"]] if output_bias else []
    for gradient in map(np.asarray, trained):
        assert not gradient[PAD:].any() and gradient[:PAD].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "pre"}, {"embeddings": "untied"}, {"output_bias": True, "hidden_act": "swish"}],
    ids=["post", "pre", "untied", "bias"],
)
def test_a_decoding_step_gives_what_the_whole_pass_gives_at_each_position(changes: Any) -> None:
    """C007: two sentences of different lengths, two beams each, up to the last slot of the cache."""
    config = dataclasses.replace(CONFIG, **changes)
    params = initial(config)
    if config.output_bias:  # zero at first
        params = {**params, "output": {"bias": jnp.linspace(-1.0, 1.0, config.padded_target_vocab_size)}}
    slots, source = 7, padded([(8, 6), (5, 6)])
    beams = [padded([(8, 6), (5, 6)], seed)["decoder_input_ids"] for seed in (1, 2)]
    expected = np.stack([run({**source, "decoder_input_ids": ids}, params, config) for ids in beams], axis=1)

    _, crossed = encoded(config, source)
    assert crossed["layer_1"].key.shape == (2, 8, 4, 8), "shared by the beams"
    weights = step.decoder_weights(config, params)
    decode_step = jax.jit(functools.partial(step.decode_step, config), compiler_options=QUICK)
    # What a slot holds before it is written has no influence.
    cache: Any = jax.tree.map(lambda x: x + 50.0, step.empty_cache(config, 2, 2, slots))
    tokens_BKT = np.stack(beams, axis=1)
    lineage_BKT = np.full((2, 2, slots), -1, np.int32)
    for t in range(slots):
        lineage_BKT[:, :, t] = [0, 1]  # each beam goes on from itself
        logits_VX, cache = decode_step(
            weights,
            tokens_BKT[:, :, t],
            jnp.full((2,), t, jnp.int32),
            jnp.asarray(t, jnp.int32),
            cache,
            jnp.asarray(lineage_BKT),
            step.source_of(crossed, source["sequence_ids"]),
        )
        logits_BKV = np.asarray(logits_VX).T.reshape(2, 2, -1)
        np.testing.assert_allclose(logits_BKV[..., :PAD], expected[:, :, t, :PAD], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_dropout_site_of_a_pass_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = []
    keep_mask = dropout.keep_mask

    def recording(shape: Any, rate: float, r: Any, site: Any) -> jax.Array:
        sites.append(int(site))
        return keep_mask(shape, rate, r, site)

    monkeypatch.setattr(dropout, "keep_mask", recording)
    config = dataclasses.replace(CONFIG, attention_probs_dropout_prob=0.1)
    batch = padded([(3, 2)])
    with jax.disable_jit():
        inputs = (jnp.asarray(batch[name]) for name in INPUTS)
        model.Transformer(config).apply({"params": initial(CONFIG)}, *inputs, None, jax.random.key(0))
    assert sorted(sites) == list(range(2 + 3 * 2 + 5 * 2))


@pytest.mark.slow
def test_cross_attention_weights_are_there_when_asked_for() -> None:
    batch = padded([(5, 3), (3, 2)])
    inputs = (jnp.asarray(batch[name]) for name in INPUTS)
    _, state = model.Transformer(CONFIG).apply({"params": initial(CONFIG)}, *inputs, mutable=["intermediates"])
    for i in range(2):
        (weights_BNTS,) = state["intermediates"]["decoder"][f"layer_{i}"]["cross_attention"]["attention_weights"]
        assert weights_BNTS.shape == (2, 4, 4, 5)
        np.testing.assert_allclose(weights_BNTS.sum(-1), 1, rtol=1e-5)
        assert not np.asarray(weights_BNTS)[1, :, :3, 3:].any()


@pytest.mark.slow
def test_half_precision_is_near_float32_with_float32_parameters_and_logits() -> None:
    batch = padded([(6, 3), (9, 5)])
    config = dataclasses.replace(CONFIG, dtype="bfloat16", initializer="normal")
    params = initial(dataclasses.replace(config, dtype="float32"))
    single, half = run(batch, params), run(batch, params, config)
    assert half.dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(model.abstract_params(config))} == {np.dtype("float32")}
    np.testing.assert_allclose(half[..., :PAD], single[..., :PAD], atol=0.02)


@pytest.mark.slow
def test_initial_numbers_have_the_spread_of_the_initializer() -> None:
    config = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=256)
    kernel = np.asarray(initial(config)["encoder"]["layer_0"]["feed_forward"]["intermediate"]["kernel"])
    assert kernel.std() == pytest.approx(np.sqrt(2 / (64 + 256)), rel=0.03)
    assert np.abs(kernel).max() <= np.sqrt(6 / (64 + 256))
    table = np.asarray(initial(config)["embeddings"]["target"]["embedding"])[:PAD]
    assert table.std() == pytest.approx(0.8796 * 64**-0.5, rel=0.03)
    normal = initial(dataclasses.replace(config, initializer="normal"))
    kernel = np.asarray(normal["encoder"]["layer_0"]["feed_forward"]["intermediate"]["kernel"])
    assert kernel.std() == pytest.approx(0.02 * 0.8796, rel=0.03)


def test_rows_longer_than_the_model_are_refused_before_compiling() -> None:
    """C014"""
    batch = padded([(5, 3)], source=33)
    with pytest.raises(ConfigError, match=r"rows of input_ids are 33 pieces long, but the model has 32 positions"):
        jax.eval_shape(lambda p: model.Transformer(CONFIG).apply(p, *(batch[k] for k in INPUTS)), {"params": {}})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder_input_ids", (2,), "decoder_input_ids has shape"),
        ("position_ids", (2, 3), "position_ids has shape"),
        ("decoder_sequence_ids", (2, 3), "decoder_sequence_ids has shape"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused_by_name(name: str, shape: tuple[int, ...], message: str) -> None:
    batch = {k: v for k, v in padded([(6, 3), (9, 5)]).items() if k in INPUTS}
    with pytest.raises(ConfigError, match=message):
        model.check_shapes(CONFIG, **(batch | {name: np.zeros(shape, np.int32)}))
    with pytest.raises(ConfigError, match="different numbers of rows"):
        model.check_shapes(CONFIG, **{k: v[:1] if k.startswith("decoder") else v for k, v in batch.items()})


def test_a_model_without_a_vocabulary_says_where_the_size_comes_from() -> None:
    with pytest.raises(ConfigError, match=r"model\.source_vocab_size is 0; prepare the data first"):
        model.abstract_params(dataclasses.replace(CONFIG, source_vocab_size=0))


def test_model_flops_count_each_product_once_and_the_causal_half() -> None:
    h, f, v, s, t = 512, 2048, 37_000, 20, 15
    config = dataclasses.replace(PRESETS["transformer-base"], source_vocab_size=v, target_vocab_size=v)
    encoder = 6 * (s * (4 * h * h + 2 * h * f) + 2 * s * s * h)
    own = t * (4 * h * h + 2 * h * f) + 2 * (t * (t + 1) / 2) * h
    cross = t * 2 * h * h + s * 2 * h * h + 2 * s * t * h
    flops = model.model_flops(
        config,
        source_tokens=s,
        source_pairs=s * s,
        target_tokens=t,
        target_pairs=t * (t + 1) / 2,
        cross_pairs=s * t,
        predictions=t,
    )
    assert flops == 6 * (encoder + 6 * (own + cross) + t * h * v)
