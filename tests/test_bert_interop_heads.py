"""Fine-tuned models as Hugging Face folders: out as the class they are, and in again with their head and labels."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_bert import HEADS, tuned

from bert_jax import loading
from bert_jax.finetune.loading import load_finetuned
from bert_jax.heads import HF_CLASSES
from bert_jax.interop import exports, huggingface, imports
from bert_jax.interop.probe import probe_batch, probe_logits
from transformer_jax.config import UserError


@pytest.fixture(scope="module", params=HEADS)
def exported(request, tmp_path_factory):
    """(head, parameters, configuration, folder)."""
    head = HEADS[request.param]
    params, config, tokenizer = tuned(head)
    out = huggingface.export(params, config, tokenizer, tmp_path_factory.mktemp("heads") / "out", head=head)
    return head, params, config, out


def test_the_class_its_labels_and_every_tensor_are_there_and_come_back(exported):
    head, params, config, out = exported
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == [HF_CLASSES[head.kind]]
    if head.labels:
        assert list(settings["id2label"].values()) == list(head.labels)
        assert settings["label2id"] == {label: i for i, label in enumerate(head.labels)}
    found = loading.read(out)
    assert found.head == head and found.config == config
    assert found.params.keys() == params.keys()
    np.testing.assert_array_equal(found.params["head"]["kernel"], params["head"]["kernel"])
    card = (out / "README.md").read_text()
    assert f"`{HF_CLASSES[head.kind]}` of `transformers` loads this folder." in card and "## The head" in card


def test_as_a_start_for_pretraining_its_head_is_left_out_and_the_others_are_drawn(exported):
    head, params, _, out = exported
    said: list[str] = []
    found = loading.load(out, say=said.append)
    assert found.drawn == (("mlm", "nsp") if head.has_pooler else ("pooler", "mlm", "nsp"))
    assert said[0].endswith(f"its head ({head.kind}) is left out") and "drawn at random with seed 0" in said[1]
    np.testing.assert_array_equal(
        found.params["encoder"]["layer_0"]["attention"]["query"]["kernel"],
        params["encoder"]["layer_0"]["attention"]["query"]["kernel"],
    )


@pytest.mark.torch
def test_transformers_loads_it_with_nothing_missing_or_left_over_and_gives_our_logits(exported):
    """C053: also the names of the classes."""
    import torch
    import transformers

    head, params, config, out = exported
    kind = getattr(transformers, HF_CLASSES[head.kind])
    model, report = kind.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = probe_batch(config)
    names = {"input_ids": "input_ids", "token_type_ids": "token_type_ids", "attention_mask": "sequence_ids"}
    inputs = {theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}
    if head.kind == "choice":
        inputs = {name: x.reshape(2, 2, -1) for name, x in inputs.items()}
    with torch.no_grad():
        given = model.eval()(**inputs)
    theirs = torch.stack([given.start_logits, given.end_logits], -1) if head.kind == "span" else given.logits
    ours = probe_logits(params, config, head)[head.kind]
    # Of scores of tokens those of padding do not count: their positions are 0 here and go on counting there.
    real = batch["sequence_ids"] > 0 if head.kind in ("tagging", "span") else slice(None)
    np.testing.assert_allclose(theirs.numpy()[real], ours[real], rtol=0, atol=1e-5)
    if head.labels:
        assert tuple(model.config.id2label[i] for i in range(len(head.labels))) == head.labels
    problems = {"classification": "single_label_classification", "multi_label": "multi_label_classification"}
    assert model.config.problem_type == problems.get(head.kind, "regression" if head.kind == "regression" else None)


def test_an_imported_one_is_a_fine_tuned_run_that_exports_the_same_tensors(tmp_path):
    """C118."""
    head = HEADS["tagging"]
    params, config, tokenizer = tuned(head)
    out = huggingface.export(params, config, tokenizer, tmp_path / "out", head=head)
    tensors = load_file(out / "model.safetensors")
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
           for n, v in tensors.items()}  # fmt: skip
    old["bert.embeddings.position_ids"] = np.arange(32)[None]
    old["bert.pooler.dense.weight"] = np.zeros((8, 8), np.float32)
    save_file(old, out / "model.safetensors")
    said: list[str] = []
    run = imports.import_folder(out, tmp_path / "run", say=said.append)
    assert said == [
        "left out, not used by its class: bert.pooler.dense.weight",
        "left out, no weights: bert.embeddings.position_ids",
    ]
    found = load_finetuned(run)
    assert found.head == head and found.task.kind == "tagging" and found.task.labels == head.labels
    assert found.step == 0 and found.task.inputs.max_seq_length == 32
    again = load_file(exports.export_checkpoint(run, tmp_path / "again") / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, r"hold a classifier, and architectures is \['BertModel'\]; it must name"),
        ({"id2label": {"0": "a"}}, "id2label must name the classes 0 to 2, each once"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "the label 'a' is there twice"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'; it must be 'single_label"),
    ],
)
def test_a_head_whose_settings_do_not_fit_is_refused(tmp_path, change, message):
    params, config, tokenizer = tuned(HEADS["classification"])
    tensors = huggingface.to_hf(params, config, HEADS["classification"])
    huggingface.write(tmp_path, tensors, config, tokenizer, HEADS["classification"])
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=message):
        loading.load(tmp_path)


def test_labels_that_a_folder_does_not_name_are_numbered(tmp_path):
    head = HEADS["classification"]
    params, config, tokenizer = tuned(head)
    huggingface.write(tmp_path, huggingface.to_hf(params, config, head), config, tokenizer, head)
    settings = json.loads((tmp_path / "config.json").read_text())
    for key in ("id2label", "label2id", "problem_type", "classifier_dropout"):
        del settings[key]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert loading.read(tmp_path).head == dataclasses.replace(
        head, labels=("LABEL_0", "LABEL_1", "LABEL_2"), dropout=-1.0
    )
