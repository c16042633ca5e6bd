"""sentence-transformers folders: their layout, the model in them, and what is left out."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_bert import HEADS, random_params, tiny_config, tiny_tokenizer, tuned

from bert_jax import loading
from bert_jax.interop import huggingface, sentence_transformers
from bert_jax.main import main


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_layout_is_that_of_the_library(tmp_path, capsys, pooling):
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    source = huggingface.export(random_params(config), config, tokenizer, tmp_path / "source")
    option = [] if pooling == "mean" else ["--pooling", pooling]
    out = tmp_path / "out"
    assert main(["export", str(source), str(out), "--format", "sentence-transformers", *option]) == 0
    modules = json.loads((out / "modules.json").read_text())
    assert [(m["idx"], m["path"], m["type"].rpartition(".")[2]) for m in modules] == [
        (0, "", "Transformer"),
        (1, "1_Pooling", "Pooling"),
    ]
    settings = json.loads((out / "1_Pooling" / "config.json").read_text())
    on = [name for name, value in settings.items() if value is True]
    assert settings["word_embedding_dimension"] == 8
    assert on == [{"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}[pooling]]
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertModel"]
    given, written = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {f"bert.{name}" for name in written} == {name for name in given if name.startswith("bert.")}
    for name, value in written.items():
        np.testing.assert_array_equal(value, given[f"bert.{name}"])
    assert loading.load(out, say=lambda _: None).drawn == ("mlm", "nsp")
    card = (out / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card and "SentenceTransformer(" in card


def test_a_fine_tuned_head_is_left_out_and_said(tmp_path):
    params, config, tokenizer = tuned(HEADS["span"])
    said: list[str] = []
    out = sentence_transformers.export(params, config, tokenizer, tmp_path / "out", head=HEADS["span"], say=said.append)
    assert said == ["its head (span) is left out"]
    assert not [name for name in load_file(out / "model.safetensors") if "qa" in name or "pooler" in name]
