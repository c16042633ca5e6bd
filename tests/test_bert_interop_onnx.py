"""ONNX: what ONNX Runtime gives for any batch and length is what our model gives, inputs bound by name."""

import json
import re
import sys

import numpy as np
import pytest
from tiny_bert import HEADS, padded_rows, random_params, tiny_config, tiny_tokenizer, tuned

from bert_jax.interop import huggingface, onnx_folder, probe
from bert_jax.main import main
from transformer_jax.config import UserError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(parameters, configuration, session)."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    params = random_params(config)
    out = onnx_folder.export(params, config, tokenizer, tmp_path_factory.mktemp("onnx") / "out")
    return params, config, onnx_folder.open_session(out / "model.onnx"), out


@pytest.mark.parametrize(("lengths", "width"), [((5,), 5), ((17, 9, 0), 17)])
def test_batch_and_length_are_free_and_a_row_of_padding_is_finite(exported, lengths, width):
    """C112: also the outputs of the padding itself."""
    params, config, session, _ = exported
    batch = padded_rows(config, lengths, width)
    found, expected = onnx_folder.run(session, batch), probe.reference(params, config, batch)
    assert found.keys() == expected.keys() and found["prediction_logits"].shape == (*batch["input_ids"].shape, 69)
    for name, value in expected.items():
        assert np.isfinite(found[name]).all()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4, err_msg=name)


def test_inputs_are_bound_by_name_and_swapping_two_changes_the_result(exported):
    """C055: a pair of 5 + 4 tokens padded to 16."""
    params, config, session, _ = exported
    batch = padded_rows(config, (9,), 16)
    batch["token_type_ids"][0] = [0] * 5 + [1] * 4 + [0] * 7
    assert {i.name for i in session.get_inputs()} == batch.keys()
    found, expected = onnx_folder.run(session, batch), probe.reference(params, config, batch)
    np.testing.assert_allclose(found["prediction_logits"], expected["prediction_logits"], rtol=0, atol=1e-4)
    swapped = batch | {"attention_mask": batch["token_type_ids"], "token_type_ids": batch["attention_mask"]}
    other = onnx_folder.run(session, swapped)["prediction_logits"]
    assert np.abs(other[:, :9] - expected["prediction_logits"][:, :9]).max() > 0.01


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_gives_our_logits(tmp_path, kind):
    params, config, tokenizer = tuned(HEADS[kind])
    said: list[str] = []
    options = {"head": HEADS[kind], "int8": kind != "multi_label", "say": said.append}
    out = onnx_folder.export(params, config, tokenizer, tmp_path / "out", **options)
    answers = {"classification": 4, "regression": 0, "tagging": 123, "span": 4, "choice": 2}
    if kind in answers:
        same = f"the best one is the same in .* of {answers[kind]}" if answers[kind] else "on sample texts$"
        assert re.search(same, said[0]), said
    session = onnx_folder.open_session(out / "model.onnx")
    batch = {name: np.roll(x, 1, axis=0) for name, x in probe.probe_rows(config).items()}
    found, expected = onnx_folder.run(session, batch), probe.reference(params, config, batch, HEADS[kind])
    assert list(found) == (["start_logits", "end_logits"] if kind == "span" else ["logits"])
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4)
    settings = json.loads((out / "config.json").read_text())
    if HEADS[kind].labels:
        assert list(settings["id2label"].values()) == list(HEADS[kind].labels)


@pytest.mark.parametrize("act", ["gelu_new", "relu"])
def test_other_activations_and_another_epsilon(tmp_path, act):
    """C009: the export itself compares; gelu is covered by the other tests."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(
        vocab_size=tokenizer.vocab_size, hidden_act=act, layer_norm_eps=1e-3, num_hidden_layers=1, type_vocab_size=1
    )
    out = onnx_folder.export(random_params(config), config, tokenizer, tmp_path / "out")
    kinds = {node.op_type for node in onnx.load(out / "model.onnx").graph.node}
    assert "Erf" not in kinds and ("Relu" in kinds) is (act == "relu")


def test_the_command_writes_an_int8_variant_and_says_what_it_costs(exported, tmp_path, capsys):
    params, config, _, _ = exported
    source = huggingface.export(params, config, tiny_tokenizer(), tmp_path / "source")
    assert main(["export", str(source), str(tmp_path / "out"), "--format", "onnx", "--int8"]) == 0
    out = tmp_path / "out"
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n" and "8-bit weights: " in printed.err
    card = (out / "README.md").read_text()
    for part in (
        "| opset | 17 (ONNX), float32 |",
        "| int8 loss | prediction_logits differ by 0.0",
        "sample texts; the",
    ):
        assert part in card
    small = onnx_folder.open_session(out / "model_int8.onnx")
    batch = padded_rows(config, (9, 5), 9)
    exact = probe.reference(params, config, batch)["prediction_logits"]
    rounded = onnx_folder.run(small, batch)["prediction_logits"]
    assert 1e-5 < np.abs(exact - rounded).max() < 1
    assert "MatMulInteger" in {node.op_type for node in onnx.load(out / "model_int8.onnx").graph.node}
    assert main(["export", str(source), str(tmp_path / "no"), "--format", "tf1", "--int8"]) == 2


def test_the_cost_is_not_measured_on_a_head_of_random_numbers(exported, tmp_path):
    params, config, _, _ = exported
    said: list[str] = []
    options = {"int8": True, "drawn": ("mlm",), "say": said.append}
    onnx_folder.export(params, config, tiny_tokenizer(), tmp_path / "out", **options)
    assert "last_hidden_state differ by" in said[0] and "the mean cosine of" in said[0]


def test_a_model_that_runs_otherwise_is_not_kept(exported, tmp_path, monkeypatch):
    from bert_jax.interop import onnx_graph

    params, config, _, _ = exported
    monkeypatch.setattr(onnx_graph._Graph, "activation", lambda self, x: self.add("Relu", x))
    with pytest.raises(UserError, match=r"export failed its own check, .* of the written folder differ by"):
        onnx_folder.export(params, config, tiny_tokenizer(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_past_the_limit_go_into_a_file_beside_it(exported, tmp_path, monkeypatch):
    params, config, _, _ = exported
    monkeypatch.setattr(onnx_folder, "EXTERNAL_BYTES", 1000)
    out = onnx_folder.export(params, config, tiny_tokenizer(), tmp_path / "out", int8=True)
    assert (out / "model.onnx.data").stat().st_size > (out / "model.onnx").stat().st_size / 10
    assert onnx_folder.open_session(out / "model.onnx") and onnx_folder.open_session(out / "model_int8.onnx")


def test_without_the_extra_the_message_names_it(exported, tmp_path, monkeypatch):
    params, config, _, _ = exported
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs onnxruntime: pip install 'bert-transformer-jax\[onnx\]'"):
        onnx_folder.export(params, config, tiny_tokenizer(), tmp_path / "out")
