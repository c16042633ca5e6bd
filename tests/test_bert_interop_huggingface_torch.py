"""What transformers makes of an exported folder: PyTorch is the judge."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_bert import random_params, tiny_config, tiny_tokenizer

from bert_jax.interop import huggingface
from bert_jax.interop.probe import SAMPLE_TEXTS, probe_batch
from bert_jax.model import BertForPreTraining

pytestmark = pytest.mark.torch


def load_torch(folder, kind="BertForPreTraining"):
    """The model, after checking that nothing was missing, left over or of another shape."""
    import transformers

    model, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    if kind == "BertForPreTraining":
        assert not report["unexpected_keys"]
    return model.eval(), report


def torch_logits(model, config) -> dict[str, np.ndarray]:
    """Both logits on the pairs of `probe_batch`, in our layout."""
    import torch

    batch = probe_batch(config)
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(batch["input_ids"]).long(),
            token_type_ids=torch.tensor(batch["token_type_ids"]).long(),
            attention_mask=torch.tensor(batch["sequence_ids"]).long(),
        )
    mlm = out.prediction_logits.numpy()
    return {
        "MLM": np.take_along_axis(mlm, batch["masked_lm_positions"][:, :, None], axis=1),
        "NSP": out.seq_relationship_logits.numpy()[:, None],
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A random model whose decoder bias is the ramp 0 .. V - 1; (folder, params, config, tokenizer)."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    params = random_params(config)
    params["mlm"]["bias"][: config.vocab_size] = np.arange(config.vocab_size)
    folder = huggingface.export(params, config, tokenizer, tmp_path_factory.mktemp("export") / "out")
    return folder, params, config, tokenizer


@pytest.mark.parametrize(
    ("kind", "unused"),
    [("BertForPreTraining", ()), ("BertForMaskedLM", ("bert.pooler.", "cls.seq_")), ("BertModel", ("cls.",))],
)
def test_three_classes_load_the_folder_and_lack_nothing(exported, kind, unused):
    """C011: what a class does not have is a whole head, and only that is left over."""
    _, report = load_torch(exported[0], kind)
    assert all(name.startswith(unused) for name in report["unexpected_keys"])


def test_logits_on_padded_pairs_are_those_of_pytorch(exported):
    """C011, C012: the ramp of the decoder's bias is in them."""
    folder, params, config, _ = exported
    model, _ = load_torch(folder)
    theirs, ours = torch_logits(model, config), huggingface.probe_logits(params, config)
    for head in ("MLM", "NSP"):
        np.testing.assert_allclose(theirs[head], ours[head], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(model.cls.predictions.decoder.bias.detach().numpy(), np.arange(config.vocab_size))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    params = {**params, "mlm": {**params["mlm"], "bias": np.zeros_like(params["mlm"]["bias"])}}
    without = huggingface.probe_logits(params, config)["MLM"]
    ramp = np.broadcast_to(np.arange(config.vocab_size), without.shape)
    np.testing.assert_allclose(theirs["MLM"] - without, ramp, rtol=0, atol=1e-4)


def kernel_values(i, j, layer, names):
    """What stands at input i and output j, other for each layer and for query, key and value."""
    projection = sum({"query": 10, "key": 20, "value": 30}.get(name, 0) for name in names)
    return ((i + 1000 * j) * 1e-4 + layer + projection).astype(np.float32)


@pytest.mark.parametrize("inner", [8, 32])
def test_every_kernel_and_scale_arrives_by_value(tmp_path, inner):
    """C056: square kernels hide a wrong transpose from shape checks."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, intermediate_size=inner)
    params = random_params(config)

    def fill(path, value):
        names = [key.key for key in path]
        layer = next((int(n.removeprefix("layer_")) for n in names if n.startswith("layer_")), 7)
        if names[-1] == "kernel":
            i, j = np.indices(value.shape)
            return kernel_values(i, j, layer, names)
        return np.full_like(value, layer) if names[-1] == "scale" else value

    params = jax.tree_util.tree_map_with_path(fill, params)
    model, _ = load_torch(huggingface.export(params, config, tokenizer, tmp_path / "out"))
    checked = 0
    for name, module in model.named_modules():
        kind, layer = type(module).__name__, next((int(p) for p in name.split(".") if p.isdigit()), 7)
        if kind == "Linear" and not name.endswith("decoder"):
            weight = module.weight.detach().numpy()  # [out, in]: i is the input, j the output
            j, i = np.indices(weight.shape)
            np.testing.assert_array_equal(weight, kernel_values(i, j, layer, name.split(".")), err_msg=name)
            checked += 1
        elif kind == "LayerNorm":
            np.testing.assert_array_equal(module.weight.detach().numpy(), layer, err_msg=name)
            checked += 1
    assert checked == (6 * 2 + 3) + (2 * 2 + 2)


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_layers_are_exported_in_order_scanned_or_not(tmp_path, layers):
    """C114."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=3, layers=layers)
    params = random_params(config)
    for i in range(3):
        params["encoder"][f"layer_{i}"]["feed_forward"]["intermediate"]["bias"][:] = i
    model, _ = load_torch(huggingface.export(params, config, tokenizer, tmp_path / "out"))
    biases = [layer.intermediate.dense.bias.detach().numpy() for layer in model.bert.encoder.layer]
    assert [set(b.tolist()) for b in biases] == [{0.0}, {1.0}, {2.0}]
    theirs, ours = torch_logits(model, config), huggingface.probe_logits(params, config)
    np.testing.assert_allclose(theirs["MLM"], ours["MLM"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("act", ["gelu_new", "relu"])
def test_the_exported_activation_is_the_one_that_was_used(tmp_path, act):
    """C009: gelu is covered by the other tests."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, hidden_act=act)
    params = random_params(config)
    model, _ = load_torch(huggingface.export(params, config, tokenizer, tmp_path / "out"))
    theirs, ours = torch_logits(model, config), huggingface.probe_logits(params, config)
    np.testing.assert_allclose(theirs["MLM"], ours["MLM"], rtol=0, atol=2e-5)
    other = huggingface.probe_logits(params, dataclasses.replace(config, hidden_act="gelu"))
    assert np.abs(other["MLM"] - theirs["MLM"]).max() > 5e-5


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_exported_tokenizer_gives_our_ids(tmp_path, lowercase):
    """C068, C024: case, accents, length, words above 100 characters, [MASK] as one id."""
    import transformers

    tokenizer = tiny_tokenizer(lowercase)
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    out = huggingface.export(random_params(config), config, tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    texts = ["Hello World É", "héllo WORLD, the 深度!", "a" * 150, "a" * 201, *SAMPLE_TEXTS]
    for text in texts:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text), text
    assert (tokenizer.encode("HELLO") == tokenizer.encode("hello")) is lowercase
    query = "the [MASK] world"
    ids = theirs(query)["input_ids"]
    assert ids == [tokenizer.cls_id, *tokenizer.encode_query(query)[0], tokenizer.sep_id]
    assert ids.count(theirs.mask_token_id) == 1
    assert theirs.model_max_length == 32 and theirs.pad_token_id == tokenizer.pad_id
    pair = theirs("hello", "world")
    assert pair["token_type_ids"] == [0] * (2 + len(tokenizer.encode("hello"))) + [1] * (
        1 + len(tokenizer.encode("world"))
    )


def test_what_transformers_saves_comes_in_and_goes_out_the_same(tmp_path):
    """C118: a random PyTorch model saved by transformers itself."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    settings = huggingface.config_to_hf(config, tokenizer)
    torch.manual_seed(0)
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**settings)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    read_config, params, read_tokenizer = huggingface.read_folder(tmp_path / "theirs")
    assert read_config == config
    for head, value in torch_logits(theirs, config).items():
        np.testing.assert_allclose(huggingface.probe_logits(params, config)[head], value, rtol=0, atol=1e-5)
    out = huggingface.export(params, read_config, read_tokenizer, tmp_path / "out")
    ours, saved = load_file(out / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() - saved.keys() == set()
    assert all(name.startswith("cls.predictions.decoder.") for name in saved.keys() - ours.keys())
    for name, value in ours.items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        ("BertForMaskedLM", ("pooler", "nsp")),
        ("BertModel", ("mlm", "nsp")),
        ("BertForNextSentencePrediction", ("mlm",)),
    ],
)
def test_models_without_all_heads_that_transformers_saves_are_read(tmp_path, kind, absent):
    import transformers

    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    settings = huggingface.config_to_hf(config, tokenizer)
    model = getattr(transformers, kind)(transformers.BertConfig(**settings))
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    params, drawn = huggingface.read(tmp_path / "theirs").pretraining(0, print)
    assert drawn == absent
    words = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(params["embeddings"]["word"]["embedding"][: config.vocab_size], words)


def test_label_0_means_is_next_in_pytorch_too(tmp_path):
    """C073: the sentence head is fitted to our labels here (0 = is next) and judged there."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    params = random_params(config)
    batch = probe_batch(config)
    apply = jax.jit(BertForPreTraining(config).apply)
    pooled_BH = np.asarray(apply({"params": params}, **batch)["pooled_output_BSH"])[:, 0]
    labels_B = np.array([0, 1, 1, 0])
    with_one_BX = np.concatenate([pooled_BH, np.ones((4, 1))], axis=1)
    wanted_B2 = np.where(np.eye(2)[labels_B] == 1, 3.0, -3.0)
    head_X2 = np.linalg.lstsq(with_one_BX, wanted_B2)[0].astype(np.float32)
    params["nsp"] = {"kernel": head_X2[:-1], "bias": head_X2[-1]}
    model, _ = load_torch(huggingface.export(params, config, tokenizer, tmp_path / "out"))
    logits_B2 = torch_logits(model, config)["NSP"][:, 0]
    assert (logits_B2[:, 0] > logits_B2[:, 1] + 1).tolist() == (labels_B == 0).tolist()
    assert (logits_B2[:, 1] > logits_B2[:, 0] + 1).tolist() == (labels_B == 1).tolist()
