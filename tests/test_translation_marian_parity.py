"""The same numbers as Hugging Face's PyTorch MarianMTModel on the same weights, forward, backward and in training.

Each side runs in float32 (JAX at the highest matmul precision) and, where that says more, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_translation import CONFIG, PAD, QUICK, padded

from transformer_jax import masks, optim
from transformer_jax.config import OptimizerConfig, UserError
from transformer_jax.embeddings import sinusoids
from transformer_jax.translation import model
from transformer_jax.translation.config import BatchesConfig, ObjectiveConfig, TransformerConfig
from transformer_jax.translation.interop import marian_names
from transformer_jax.translation.task import INPUTS, TranslationTask

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "shared": CONFIG,
    "untied": dataclasses.replace(
        CONFIG,
        hidden_size=48,
        num_hidden_layers=1,
        num_decoder_layers=3,
        intermediate_size=160,
        embeddings="untied",
        hidden_act="gelu",
        scale_embedding=False,
    ),
    "as OPUS-MT": dataclasses.replace(CONFIG, hidden_act="swish", output_bias=True),
}
LENGTHS = ((12, 6), (9, 9), (5, 3))
SMOOTHING = 0.1

Tensors = dict[str, np.ndarray]


class Result(NamedTuple):
    memory: np.ndarray
    logits: np.ndarray
    loss: float
    """With label smoothing ..."""
    plain: float
    """... and without."""
    gradients: Tensors
    """Of the smoothed loss, under Marian's names."""


def weights(config: TransformerConfig) -> Tensors:
    """Random float32 tensors under Marian's names, with biases and norms that are not 0 and 1, and `<pad>` zero."""
    rng = np.random.default_rng(7)
    out = {}
    for entry in marian_names.entries(config):
        draws = rng.standard_normal(entry.shape) * (0.15 if len(entry.shape) == 2 else 0.05)
        out[entry.name] = (draws + (entry.path[-1] == "scale")).astype(np.float32)
        if entry.padded_rows:
            out[entry.name][-1] = 0
    return out


def run_jax(config: TransformerConfig, batch: dict[str, np.ndarray]) -> Result:
    task = TranslationTask(config, BatchesConfig(), ObjectiveConfig(label_smoothing=SMOOTHING))

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        arrays = jax.tree.map(jnp.asarray, batch)
        sums, counts = task.loss_fn(params, arrays, None)
        inputs = [arrays[name] for name in INPUTS]
        memory = task.model.apply({"params": params}, *inputs[:3], method="encode")
        logits = task.model.apply({"params": params}, *inputs)
        loss, plain = (
            sums[k] / counts["translation"].astype(sums[k].dtype) for k in ("translation", "translation_nll")
        )
        return loss, (plain, memory, logits)

    with jax.enable_x64(config.dtype == "float64"), jax.default_matmul_precision("highest"):
        params = marian_names.from_marian(weights(config), config)
        params = jax.tree.map(lambda x: jnp.asarray(x, config.dtype), params)
        step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), compiler_options=QUICK)
        (loss, (plain, memory, logits)), gradients = step(params)
        named = {}
        for entry in marian_names.entries(config):
            value = np.asarray(functools.reduce(lambda node, part: node[part], entry.path, gradients))
            if entry.padded_rows:
                assert not value[PAD:].any(), "the row of <pad> or a padding row has a gradient"
                value = value[: entry.shape[0]]
            named[entry.name] = value.T if entry.is_kernel else value
        return Result(np.asarray(memory), np.asarray(logits), float(loss), float(plain), named)


def torch_model(config: TransformerConfig) -> Any:
    peer = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=config.source_vocab_size,
            decoder_vocab_size=config.target_vocab_size,
            d_model=config.hidden_size,
            encoder_layers=config.num_hidden_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_attention_heads,
            decoder_attention_heads=config.num_attention_heads,
            encoder_ffn_dim=config.intermediate_size,
            decoder_ffn_dim=config.intermediate_size,
            activation_function=config.hidden_act,
            scale_embedding=config.scale_embedding,
            max_position_embeddings=config.max_position_embeddings,
            share_encoder_decoder_embeddings=config.embeddings == "shared",
            tie_word_embeddings=config.embeddings != "untied",
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            dropout=0.0,
            attn_implementation="eager",
        )
    )
    tensors = weights(config)
    bias = tensors.get(marian_names.BIAS, np.zeros(config.target_vocab_size, np.float32))[None].copy()
    bias[0, PAD] = masks.FORBIDDEN
    state = {k: torch.from_numpy(v.copy()) for k, v in (tensors | {marian_names.BIAS: bias}).items()}
    missing, unexpected = peer.load_state_dict(state, strict=False)
    tied = ("embed_tokens.weight", "embed_positions.weight", "lm_head.weight")
    assert not unexpected and all(name.endswith(tied) for name in missing)
    return peer.to(getattr(torch, config.dtype)).train()


def torch_losses(peer: Any, batch: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    """(smoothed loss written out, the model's own loss, its output)."""
    long = {k: torch.from_numpy(v).long() for k, v in batch.items()}
    labels = torch.where(long["label_weights"] > 0, long["labels"], -100)
    out = peer(
        input_ids=long["input_ids"],
        attention_mask=long["sequence_ids"],
        decoder_input_ids=long["decoder_input_ids"],
        labels=labels,
    )
    log_p = torch.log_softmax(out.logits[labels >= 0], -1)
    spread = -log_p[:, :PAD].mean(-1).mean()
    return (1 - SMOOTHING) * out.loss + SMOOTHING * spread, out.loss, out


@functools.cache
def run_torch(config: TransformerConfig) -> Result:
    peer = torch_model(config)
    peer.final_logits_bias.requires_grad_()  # no parameter there, so that only ours trains it
    loss, plain, out = torch_losses(peer, padded(LENGTHS))
    loss.backward()
    named = dict(peer.named_parameters()) | dict(peer.named_buffers())
    gradients = {e.name: named[e.name].grad.numpy().reshape(e.shape) for e in marian_names.entries(config)}
    memory, logits = out.encoder_last_hidden_state, out.logits
    return Result(memory.detach().numpy(), logits.detach().numpy(), loss.item(), plain.item(), gradients)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 norm of the difference."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(
    ("size", "layers", "dtype"),
    [
        ("shared", "unrolled", "float32"),
        ("shared", "scanned", "float32"),
        ("shared", "unrolled", "float64"),
        ("untied", "unrolled", "float32"),
        ("untied", "scanned", "float32"),
        ("untied", "scanned", "float64"),
        ("as OPUS-MT", "unrolled", "float32"),
        ("as OPUS-MT", "scanned", "float64"),
    ],
)
def test_outputs_losses_and_gradients_are_those_of_pytorch(size: str, layers: Any, dtype: Any) -> None:
    bound = {"float32": 1e-5, "float64": 1e-9}[dtype]
    config, batch = dataclasses.replace(SIZES[size], layers=layers, dtype=dtype), padded(LENGTHS)
    ours, theirs = run_jax(config, batch), run_torch(dataclasses.replace(SIZES[size], dtype=dtype))

    assert ours.loss == pytest.approx(theirs.loss, rel=bound)
    assert ours.plain == pytest.approx(theirs.plain, rel=bound)
    assert ours.logits.dtype == ours.memory.dtype == np.dtype(dtype)
    assert (ours.logits[..., PAD:] < -1e8).all() and (theirs.logits[..., PAD:] < -1e8).all()
    real = batch["sequence_ids"] > 0
    scored = batch["label_weights"] > 0
    for got, expected in (
        (ours.memory[real], theirs.memory[real]),
        (ours.logits[scored][:, :PAD], theirs.logits[scored][:, :PAD]),
    ):
        assert difference(got, expected) < bound
        assert np.abs(got - expected).max() < bound * np.abs(expected).max()

    total = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in theirs.gradients.values()))
    assert sorted(ours.gradients) == sorted(theirs.gradients)
    for name, expected in theirs.gradients.items():
        if name.endswith("k_proj.bias"):
            # The softmax cannot see it: the exact gradient is zero.
            assert np.linalg.norm(ours.gradients[name]) < 1e-6 * total, name
        else:
            assert difference(ours.gradients[name], expected) < bound, name


def test_a_table_of_the_source_apart_gives_the_logits_of_pytorch() -> None:
    config = dataclasses.replace(CONFIG, embeddings="separate")
    batch = padded(LENGTHS)
    params = marian_names.from_marian(weights(config), config)
    apply = jax.jit(model.Transformer(config).apply, compiler_options=QUICK)
    with jax.default_matmul_precision("highest"):
        logits = apply({"params": params}, *(jnp.asarray(batch[k]) for k in INPUTS))
    expected = torch_losses(torch_model(config), batch)[2].logits.detach().numpy()
    scored = batch["label_weights"] > 0
    assert difference(np.asarray(logits)[scored][:, :PAD], expected[scored][:, :PAD]) < 1e-5


STEPS = 50
OPTIMIZER = OptimizerConfig(
    name="adam", learning_rate=0.08, schedule="noam", warmup_steps=20, beta2=0.98, epsilon=1e-9, weight_decay=0.0
)


def test_fifty_steps_follow_the_loss_curve_of_pytorch() -> None:
    """The paper's Adam and schedule, label smoothing on, dropout off."""
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0)
    batches = [padded(LENGTHS, seed) for seed in range(3)]
    task = TranslationTask(config, BatchesConfig(), ObjectiveConfig(label_smoothing=SMOOTHING))
    rule = optim.make(OPTIMIZER, STEPS, config.hidden_size)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=QUICK)
    def step(params: Any, state: Any, batch: Any, number: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            sums, counts = task.loss_fn(params, batch, None)
            return sums["translation"] / counts["translation"]

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        direction, state = rule.update(gradients, state, params)
        return jax.tree.map(lambda p, d: p - rule.schedule(number) * d, params, direction), state, loss

    params = jax.tree.map(jnp.asarray, marian_names.from_marian(weights(config), config))
    state, ours = rule.init(params), []
    with jax.default_matmul_precision("highest"):
        for i in range(STEPS):
            params, state, loss = step(params, state, batches[i % 3], jnp.asarray(i, jnp.int32))
            ours.append(float(loss))
    assert not np.asarray(params["embeddings"]["target"]["embedding"])[PAD:].any()

    peer = torch_model(config)
    adam = torch.optim.Adam(peer.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    theirs = []
    for i in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = 0.08 * 32**-0.5 * min((i + 1) ** -0.5, (i + 1) * 20**-1.5)
        adam.zero_grad()
        loss = torch_losses(peer, batches[i % 3])[0]
        loss.backward()
        adam.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert theirs[-1] < 0.8 * theirs[0], "the run must learn, or the curves say nothing"


@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize("embeddings", ["shared", "separate", "untied"])
def test_names_and_shapes_are_those_of_the_fresh_tree_and_of_the_peer(embeddings: Any, output_bias: bool) -> None:
    config = dataclasses.replace(CONFIG, embeddings=embeddings, output_bias=output_bias)
    params = marian_names.from_marian(weights(config), config)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, model.abstract_params(config))
    published, given = marian_names.to_marian(params, config), weights(config)
    bias = published.pop(marian_names.BIAS)[0]
    assert bias[:PAD].tolist() == given.pop(marian_names.BIAS, np.zeros(PAD + 1))[:PAD].tolist()
    assert bias[PAD] == masks.FORBIDDEN and bias[:PAD].all() == output_bias
    assert sorted(published) == sorted(given)
    for name, value in given.items():
        np.testing.assert_array_equal(published[name], value)
    named = dict(torch_model(config).named_parameters())
    trained = {name for name in named if not name.endswith("embed_positions.weight")}
    assert trained == set(published)


def test_models_that_marian_cannot_hold_are_refused_by_the_settings_that_do_not_fit() -> None:
    config = dataclasses.replace(CONFIG, norm="pre", layer_norm_eps=1e-12, embeddings="separate", source_vocab_size=90)
    with pytest.raises(UserError, match=r'norm is "pre".*layer_norm_eps is 1e-12.*source_vocab_size is 90'):
        marian_names.entries(config)
    with pytest.raises(UserError, match='encoder_embeddings is "bert"'):
        marian_names.entries(dataclasses.replace(CONFIG, embeddings="separate", encoder_embeddings="bert"))


def test_tensors_that_mean_something_else_are_refused() -> None:
    good = weights(CONFIG)
    bias = np.zeros((1, 101), np.float32)
    bias[0, 3] = 1
    learned = sinusoids(8, CONFIG.hidden_size) + 0.01
    wrong: dict[str, tuple[Tensors, str]] = {
        "bias": (good | {"final_logits_bias": bias}, "is not 0 everywhere.*has output_bias = true"),
        "positions": (good | {"model.decoder.embed_positions.weight": learned}, "does not hold sinusoids"),
        "tied": (good | {"lm_head.weight": good["model.shared.weight"] + 1}, "lm_head.weight differs from"),
        "pad": (good | {"model.shared.weight": good["model.shared.weight"] + 1}, "that of <pad>, is not zero"),
        "missing": ({k: v for k, v in good.items() if "fc1" not in k}, "8 missing: .*fc1"),
    }
    for tensors, message in wrong.values():
        with pytest.raises(UserError, match=message):
            marian_names.from_marian(tensors, CONFIG)
