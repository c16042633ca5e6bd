"""Checkpoints of google-research/bert: names, what is skipped, what is refused, and the way out again."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_transformer_tensor_bundle import GOLDEN, make_tf1
from tiny_bert import random_params, tiny_config, tiny_tokenizer

from bert_jax import loading
from bert_jax.heads import HeadConfig
from bert_jax.interop import exports, imports, tf1
from bert_jax.interop.huggingface_names import entries, to_hf
from transformer_jax.config import UserError

ONE = GOLDEN / "tf1" / "one"


def test_every_weight_arrives_where_it_belongs_and_slots_and_counters_are_listed():
    """C067: kernel/adam_m, kernel/BERTAdam, an optimizer's own scope, beta1_power and global_step are no weights."""
    said: list[str] = []
    found = tf1.read(ONE, said.append)
    params, drawn = found.pretraining(None, said.append)
    assert drawn == () and found.config.num_hidden_layers == 2 and found.config.vocab_size == len(make_tf1.PIECES)
    shapes = make_tf1.shapes()
    names = {tf1.google_name(e): e for e in entries(found.config)}
    assert names.keys() == shapes.keys()
    for name, entry in names.items():
        node = params
        for part in entry.path:
            node = node[part]
        value = make_tf1.value(name, shapes[name])
        if name == "cls/seq_relationship/output_weights":
            value = value.T  # [out, in] there
        np.testing.assert_array_equal(node[: len(value)], value, err_msg=name)
    assert said[0] == "no piece of vocab.txt has a capital letter, so text is lower-cased"
    assert said[1].startswith("skipped, no weights: 5 slots of the optimizer (BERTAdam, adam_m, adam_v, lamb_m_1,")
    assert said[1].endswith("bert/encoder/layer_0/attention/beta1_power, global_step")


@pytest.mark.parametrize("kind", ["two", "snappy"])
def test_shards_and_a_compressed_index_give_the_same_model(kind):
    one, other = tf1.read(ONE), tf1.read(GOLDEN / "tf1" / kind)
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(other.tensors[name], value)


def test_names_are_sorted_into_weights_slots_and_neither():
    """C067: also under names that no list of optimizers has, since they go on from a weight's."""
    weight = "bert/encoder/layer_0/output/dense/kernel"
    slots = [f"{weight}/{s}" for s in ("adam_m", "BERTAdam", "MyOwnOptimizer_7", "ExponentialMovingAverage")]
    slots += [f"bert/other/kernel/{s}" for s in ("adam_v", "Adam_1", "LAMBOptimizer_m", "Momentum")]
    slots += [f"BERTAdam/{weight}", "training/Adam/x", "beta1_power", "x/beta2_power_1", "global_step", "good_steps"]
    neither = ["bert/embeddings/adam", "output_layer/kernel", "bert/encoder/layer_0/output/dense/bias"]
    weights, skipped, unknown = tf1.sort_names([weight, *slots, *neither[1:]], [weight])
    assert weights == [weight] and skipped == sorted(slots) and unknown == sorted(neither[1:])


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(ONE, tmp_path / "google")


def test_missing_and_unknown_tensors_are_named_as_google_names_them(copied):
    settings = json.loads((copied / "bert_config.json").read_text())
    (copied / "bert_config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"16 missing: bert/encoder/layer_2/attention/output/LayerNorm/beta"):
        tf1.read(copied)
    (copied / "bert_config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"16 unknown: bert/encoder/layer_1/attention/output/LayerNorm/beta"):
        tf1.read(copied)
    (copied / "bert_config.json").write_text(json.dumps(settings | {"intermediate_size": 8}))
    with pytest.raises(UserError, match=r"shape .*16.*the configuration says .*8"):
        tf1.read(copied).pretraining(0, print)


def test_one_of_several_checkpoints_is_named_by_its_prefix(copied):
    for file in list(copied.glob("bert_model.ckpt.*")):
        shutil.copy(file, copied / file.name.replace("bert_model.ckpt", "model.ckpt-20"))
    with pytest.raises(UserError, match=r"several checkpoints \(bert_model.ckpt, model.ckpt-20\); name one"):
        tf1.read(copied)
    assert loading.load(copied / "model.ckpt-20").config.num_hidden_layers == 2
    for file in copied.glob("*.ckpt*"):
        file.unlink()
    with pytest.raises(UserError, match=r"no checkpoint beside bert_config.json"):
        loading.load(copied)


def test_capital_letters_in_the_vocabulary_keep_the_case(copied):
    said: list[str] = []
    text = (copied / "vocab.txt").read_text().replace("\nz\n", "\nZ\n")
    (copied / "vocab.txt").write_text(text)
    tokenizer = tf1.read(copied, said.append).tokenizer
    assert not tokenizer.config.lowercase and said[0] == "vocab.txt has capital letters (Z), so text keeps its case"


def test_a_checkpoint_becomes_a_run_and_goes_out_as_npz_and_comes_in_again(tmp_path):
    """C118: bit for bit, by both commands' functions."""
    said: list[str] = []
    run = imports.import_folder(ONE, tmp_path / "run", say=said.append)
    out = exports.export_checkpoint(run, tmp_path / "out", "tf1")
    with np.load(out / "bert_model.npz", allow_pickle=False) as file:
        shapes = make_tf1.shapes()
        assert set(file) == shapes.keys()
        for name, shape in shapes.items():
            np.testing.assert_array_equal(file[name], make_tf1.value(name, shape), strict=True)
    given, written = (json.loads((f / "bert_config.json").read_text()) for f in (ONE, out))
    assert written == {key: given[key] for key in written} and len(written) == 11
    again = loading.load(out)
    before = loading.load(run)
    for (name, a), (_, b) in zip(
        sorted(to_hf(before.params, before.config).items()),
        sorted(to_hf(again.params, again.config).items()),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)
    card = (out / "README.md").read_text()
    assert "| imported from | one |" in card and "tf.raw_ops.SaveV2" in card
    assert "| exported by | `bert-jax export run OUT --format tf1` |" in card


@pytest.mark.parametrize("kind", ["classification", "span"])
def test_fine_tuned_heads_go_out_and_in_again(tmp_path, kind):
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    head = HeadConfig(kind, ("a", "b", "c") if kind == "classification" else ())
    params = {k: v for k, v in random_params(config).items() if k not in ("mlm", "nsp")}
    if not head.has_pooler:
        del params["pooler"]
    rng = np.random.default_rng(0)
    params["head"] = {
        "kernel": rng.normal(size=(8, head.num_outputs)).astype(np.float32),
        "bias": rng.normal(size=head.num_outputs).astype(np.float32),
    }
    out = tf1.export(params, config, tokenizer, tmp_path / "out", head=head)
    with np.load(out / "bert_model.npz") as file:
        name = "cls/squad/output_weights" if kind == "span" else "output_weights"
        np.testing.assert_array_equal(file[name], params["head"]["kernel"].T)
    said: list[str] = []
    found = loading.read(out, say=said.append)
    assert found.head is not None and (found.head.kind, found.head.num_outputs) == (kind, head.num_outputs)
    np.testing.assert_array_equal(found.params["head"]["bias"], params["head"]["bias"])
    assert bool(said) is (kind == "classification")
    with pytest.raises(UserError, match="no head for tagging"):
        tf1.export(params, config, tokenizer, tmp_path / "no", head=HeadConfig("tagging", ("O",)))


def test_what_the_format_has_no_setting_for_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, layer_norm_eps=1e-6)
    with pytest.raises(UserError, match=re.escape("layer_norm_eps is 1e-06")):
        tf1.export(random_params(config), config, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())
