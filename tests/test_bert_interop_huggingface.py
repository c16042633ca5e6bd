"""Hugging Face folders: names, layouts, the export's own check, and reading back."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tiny_bert import random_params, random_tensors, tiny_config, tiny_tokenizer

from bert_jax import loading
from bert_jax.config import BertConfig, PretrainConfig
from bert_jax.interop import huggingface, imports
from bert_jax.interop.probe import probe_batch
from bert_jax.task import PretrainingTask
from transformer_jax import config as config_module
from transformer_jax import engine, optim
from transformer_jax.config import OptimizerConfig, UserError
from transformer_jax.tokenizer import WordPiece


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("vocab_size", [101, 128, 13])
def test_import_then_export_gives_the_same_tensors(vocab_size):
    """C118."""
    config = tiny_config(vocab_size=vocab_size)
    tensors = random_tensors(config)
    params = huggingface.from_hf(tensors, config)
    assert params["embeddings"]["word"]["embedding"].shape == (config.padded_vocab_size, 8)
    assert not params["mlm"]["bias"][vocab_size:].any()
    assert_same_tensors(huggingface.to_hf(params, config), tensors)


def test_padding_rows_are_not_exported():
    """C008."""
    config = tiny_config()
    params = huggingface.from_hf(random_tensors(config), config)
    params["embeddings"]["word"]["embedding"][101:] = 100.0
    params["mlm"]["bias"][101:] = 100.0
    tensors = huggingface.to_hf(params, config)
    assert tensors["bert.embeddings.word_embeddings.weight"].shape == (101, 8)
    assert tensors["cls.predictions.bias"].shape == (101,)
    assert max(v.max() for v in tensors.values()) < 100


def test_old_and_bare_names_are_read():
    config = tiny_config()
    tensors = random_tensors(config)
    old = {}
    for name, value in tensors.items():
        name = name.removeprefix("bert.")
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        old[name] = value
    old["embeddings.position_ids"] = np.arange(32)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    said: list[str] = []
    assert_same_tensors(huggingface.to_hf(huggingface.from_hf(old, config, say=said.append), config), tensors)
    assert said == ["left out, no weights: embeddings.position_ids"]


def test_missing_unknown_doubled_and_misshapen_tensors_are_named():
    config = tiny_config()
    tensors = random_tensors(config)
    bad = dict(tensors)
    bad["classifier.weight"] = bad.pop("bert.encoder.layer.1.output.dense.bias")
    with pytest.raises(UserError, match=r"1 missing: bert.encoder.layer.1.output.dense.bias; 1 unknown: classifier.w"):
        huggingface.from_hf(bad, config)
    with pytest.raises(UserError, match=r"pooler.dense.bias twice, once as pooler.dense.bias"):
        huggingface.from_hf({**tensors, "pooler.dense.bias": np.zeros(8, np.float32)}, config)
    with pytest.raises(UserError, match=r"seq_relationship.bias has shape \(3,\); the configuration says \(2,\)"):
        huggingface.from_hf({**tensors, "cls.seq_relationship.bias": np.zeros(3, np.float32)}, config)


def test_an_untied_decoder_is_refused():
    config = tiny_config()
    tensors = random_tensors(config)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        alias = "cls.predictions.decoder." + name.rsplit(".", 1)[1]
        with pytest.raises(UserError, match="differs from"):
            huggingface.from_hf({**tensors, alias: tensors[name] + 1}, config)


def test_missing_heads_are_drawn_only_with_a_seed_and_that_is_said():
    config = tiny_config()
    bare = {n: v for n, v in random_tensors(config).items() if n.startswith("bert.") and "pooler" not in n}
    with pytest.raises(UserError, match=r"9 missing: bert.pooler.dense.bias"):
        huggingface.from_hf(bare, config)
    said: list[str] = []
    params = huggingface.from_hf(bare, config, seed=3, say=said.append)
    assert said == ["drawn at random with seed 3, since the source has none: pooler, mlm, nsp"]
    kernel = params["pooler"]["kernel"]
    assert 0.01 < kernel.std() < 0.03 and abs(kernel).max() <= 0.04
    assert not params["nsp"]["bias"].any() and (params["mlm"]["norm"]["scale"] == 1).all()
    again = huggingface.from_hf(bare, config, seed=3)
    np.testing.assert_array_equal(again["nsp"]["kernel"], params["nsp"]["kernel"])
    assert not np.array_equal(huggingface.from_hf(bare, config, seed=4)["nsp"]["kernel"], params["nsp"]["kernel"])


def test_half_a_head_is_an_error_even_with_a_seed():
    config = tiny_config()
    tensors = random_tensors(config)
    del tensors["cls.predictions.transform.dense.weight"]
    with pytest.raises(UserError, match=r"1 missing: cls.predictions.transform.dense.weight"):
        huggingface.from_hf(tensors, config, seed=0)


# The folder: written, checked, read.


@pytest.fixture(scope="module")
def tokenizer() -> WordPiece:
    return tiny_tokenizer()


def exported(tmp_path: Path, config: BertConfig, tokenizer: WordPiece, **options) -> tuple[Path, dict]:
    params = random_params(config)
    return huggingface.export(params, config, tokenizer, tmp_path / "out", **options), params


@pytest.mark.slow
def test_an_exported_folder_reads_back_to_the_same_parameters_settings_and_tokenizer(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size, hidden_act="gelu_new", layer_norm_eps=1e-6)
    out, params = exported(tmp_path, config, tokenizer)
    assert {p.name for p in out.parent.iterdir()} == {"out"}
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    read_config, read_params, read_tokenizer = huggingface.read_folder(out)
    assert read_config == config
    jax.tree.map(np.testing.assert_array_equal, read_params, params)
    assert read_tokenizer.digest == tokenizer.digest
    settings = json.loads((out / "config.json").read_text())
    assert settings["hidden_act"] == "gelu_new" and settings["tie_word_embeddings"] is True
    assert settings["architectures"] == ["BertForPreTraining"] and settings["pad_token_id"] == tokenizer.pad_id
    words = json.loads((out / "tokenizer_config.json").read_text())
    assert words["model_max_length"] == 32 and words["do_lower_case"] is True and words["mask_token"] == "[MASK]"


@pytest.mark.slow
def test_two_exports_are_the_same_bytes(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    one, two = (exported(tmp_path / name, config, tokenizer)[0] for name in "ab")
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_the_model_card_states_the_sentence_label_and_the_given_facts(tmp_path, tokenizer):
    """C073."""
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    facts = {"licence": "cc0-1.0", "language": ["en"], "data_fingerprint": "ab12", "settings": {"train": {"steps": 7}}}
    out, _ = exported(tmp_path, config, tokenizer, extra_card=facts)
    card = (out / "README.md").read_text()
    assert card.startswith('---\nlicense: "cc0-1.0"\n')
    for part in ("label 0 means *is next*", "| data fingerprint | ab12 |", "[train]\nsteps = 7", 'language: ["en"]'):
        assert part in card


def corrupt_tensor(folder: Path, config: BertConfig) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.token_type_embeddings.weight"][1, 0] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_tensor(folder: Path, config: BertConfig) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.pooler.dense.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_activation(folder: Path, config: BertConfig) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"relu"'))


def swap_pieces(folder: Path, config: BertConfig) -> None:
    (folder / "tokenizer.json").unlink()
    path = folder / "vocab.txt"
    lines = path.read_text().split("\n")
    lines[-2], lines[-3] = lines[-3], lines[-2]
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt_tensor, "logits of the written folder differ by"),
        (lose_tensor, "1 missing: bert.pooler.dense.bias"),
        (change_activation, "hidden_act reads back as 'relu'"),
        (swap_pieces, "other token ids"),
    ],
)
def test_an_export_that_reads_back_otherwise_leaves_nothing(tmp_path, tokenizer, monkeypatch, damage, message):
    """C011."""
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    write = huggingface.write

    def write_and_damage(folder, tensors, config, *rest):
        write(folder, tensors, config, *rest)
        damage(folder, config)

    monkeypatch.setattr(huggingface, "write", write_and_damage)
    with pytest.raises(UserError, match=message):
        exported(tmp_path, config, tokenizer)
    assert not list(tmp_path.iterdir())


def test_export_compares_with_the_logits_it_is_given_and_refuses_nan(tmp_path, tokenizer):
    """C011."""
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    params = random_params(config)
    reference = huggingface.probe_logits(params, config)
    huggingface.export(params, config, tokenizer, tmp_path / "good", reference=reference)
    reference["NSP"] = reference["NSP"] + 2e-4
    with pytest.raises(UserError, match="NSP logits"):
        huggingface.export(params, config, tokenizer, tmp_path / "out", reference=reference)
    params["nsp"]["bias"][0] = np.nan
    with pytest.raises(UserError, match="own NSP logits are not finite"):
        huggingface.export(params, config, tokenizer, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_a_target_in_use_is_kept(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    (tmp_path / "out").mkdir()
    out, params = exported(tmp_path, config, tokenizer)  # an empty folder will do
    with pytest.raises(UserError, match="is not empty"):
        exported(tmp_path, config, tokenizer)
    params["nsp"]["bias"][:] = [5, 6]
    huggingface.export(params, config, tokenizer, out, overwrite=True)
    assert load_file(out / "model.safetensors")["cls.seq_relationship.bias"].tolist() == [5, 6]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    for name in (".git", "notes.txt"):
        (out / name).mkdir()
        with pytest.raises(UserError, match=f"holds {re.escape(name)}, which this export does not write"):
            huggingface.export(params, config, tokenizer, out, overwrite=True)
        (out / name).rmdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an earlier export"):
        huggingface.export(params, config, tokenizer, other, overwrite=True)
    assert (other / "chapter.txt").exists()
    with pytest.raises(UserError, match="is a file"):
        huggingface.export(params, config, tokenizer, other / "chapter.txt", overwrite=True)


def test_a_failed_overwrite_keeps_the_earlier_export(tmp_path, tokenizer, monkeypatch):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    out, params = exported(tmp_path, config, tokenizer)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    params["mlm"]["bias"][0] = np.inf
    with pytest.raises(UserError, match="not finite"):
        huggingface.export(params, config, tokenizer, out, overwrite=True)
    params["mlm"]["bias"][0] = 1

    # As the library says it when it writes the weights, and as Python does.
    for name, error in (("save_file", SafetensorError), ("_verify", OSError)):

        def full(*_, error=error, **__):
            raise error("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(huggingface, name, full)
            with pytest.raises(UserError, match="out cannot be written: No space left on device"):
                huggingface.export(params, config, tokenizer, out, overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size - 1)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ entries, the model only"):
        exported(tmp_path, config, tokenizer)


def test_pickled_weights_are_refused_with_what_to_do(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    out, _ = exported(tmp_path, config, tokenizer)
    (out / "model.safetensors").rename(out / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        huggingface.read_folder(out)
    (out / "pytorch_model.bin").rename(out / "bert_model.ckpt.index")
    with pytest.raises(UserError, match=r"no model.safetensors \(only bert_model.ckpt.index\)"):
        huggingface.read_folder(out)


def test_broken_and_missing_files_are_named(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    with pytest.raises(UserError, match="no such folder"):
        huggingface.read_folder(tmp_path / "nowhere")
    out, _ = exported(tmp_path, config, tokenizer)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read as safetensors"):
        huggingface.read_folder(out)
    (out / "model.safetensors").unlink()
    for named in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "../a.safetensors"}}'):
        (out / "model.safetensors.index.json").write_text(named)
        with pytest.raises(UserError, match=r"index.json: has no weight_map from .* to files beside it"):
            huggingface.read_folder(out)
    (out / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: cannot be read as JSON"):
        huggingface.read_folder(out)
    (out / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json: no such file"):
        huggingface.read_folder(out)


def test_weights_in_several_files_and_in_half_precision_are_read(tmp_path, tokenizer):
    """C114."""
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    out, _ = exported(tmp_path, config, tokenizer)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, dtype in enumerate([jnp.bfloat16, np.float16]):
        save_file({n: tensors[n].astype(dtype) for n in names[i::2]}, out / f"part-{i}.safetensors")
    where = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    said: list[str] = []
    _, params, _ = huggingface.read_folder(out, say=said.append)
    assert said == ["converted to float32 from bfloat16, float16"]
    for name, value in huggingface.to_hf(params, config).items():
        np.testing.assert_allclose(value, tensors[name], rtol=4e-3, atol=1e-7)


def test_whole_numbers_as_of_a_quantised_model_are_refused(tmp_path, tokenizer):
    out, _ = exported(tmp_path, tiny_config(vocab_size=tokenizer.vocab_size), tokenizer)
    tensors = load_file(out / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("query.weight"))
    save_file(tensors | {name: tensors[name].astype(np.int8)}, out / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} holds int8, as quantised models do"):
        huggingface.read_folder(out)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "roberta"},
        {"hidden_act": "swish"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"tie_word_embeddings": False},
        {"vocab_size": "many"},
        {"hidden_size": 9},
    ],
)
def test_other_kinds_of_model_are_refused_by_name(tokenizer, change):
    data = huggingface.config_to_hf(tiny_config(vocab_size=tokenizer.vocab_size), tokenizer)
    huggingface.config_from_hf(data)
    with pytest.raises(UserError, match=next(iter(change))):
        huggingface.config_from_hf(data | change)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
def test_the_activation_keeps_its_name(tokenizer, act):
    """C009."""
    config = tiny_config(vocab_size=tokenizer.vocab_size, hidden_act=act)
    data = huggingface.config_to_hf(config, tokenizer)
    assert data["hidden_act"] == act
    assert huggingface.config_from_hf(data) == config


def test_a_tokenizer_file_that_cuts_otherwise_is_refused(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    out, _ = exported(tmp_path, config, tokenizer)
    data = json.loads((out / "tokenizer.json").read_text())
    data["pre_tokenizer"] = {"type": "Whitespace"}
    (out / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="cuts text in a way that is not supported"):
        huggingface.read_folder(out)


# From a folder to a run and back.


@pytest.mark.slow
@pytest.mark.parametrize("with_library_file", [True, False])
def test_an_imported_run_exports_the_same_tensors_and_token_ids(tmp_path, with_library_file):
    """C118, C079: the vocabulary is no multiple of 8, and the pooler is kept."""
    tokenizer = tiny_tokenizer(lowercase=False)
    assert tokenizer.vocab_size % 8
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    source, _ = exported(tmp_path, config, tokenizer)
    if not with_library_file:
        (source / "tokenizer.json").unlink()
    run = imports.import_folder(source, tmp_path / "run")
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "config.toml", "tokenizer"]
    loaded = loading.load(run)
    assert loaded.step == 0 and loaded.tokenizer.encode("Hello World É") == tokenizer.encode("Hello World É")
    again = huggingface.export(loaded.params, loaded.config, loaded.tokenizer, tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json"):
        if (source / name).exists():
            assert (source / name).read_bytes() == (again / name).read_bytes(), name
    stored = config_module.load(PretrainConfig, config_module.read_toml(run / "config.toml"), "config.toml")
    assert stored.model == config and not stored.tokenizer.lowercase


def test_import_draws_heads_only_when_told_and_leaves_nothing_when_it_fails(tmp_path, tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    source, _ = exported(tmp_path, config, tokenizer)
    tensors = load_file(source / "model.safetensors")
    save_file({n: v for n, v in tensors.items() if n.startswith("bert.")}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"missing: cls\..*with a seed"):
        imports.import_folder(source, tmp_path / "run", seed=None)
    assert not (tmp_path / "run").exists()
    said: list[str] = []
    imports.import_folder(source, tmp_path / "run", seed=1, say=said.append)
    assert "mlm, nsp" in said[0]
    with pytest.raises(UserError, match="is in use"):
        imports.import_folder(source, tmp_path / "run", seed=1)


def training_batch(config):
    """Two pairs that differ in their second side: the first is next (0), the second is not (1)."""
    batch = {name: value[:1].repeat(2, axis=0) for name, value in probe_batch(config).items()}
    second = batch["token_type_ids"] == 1
    batch["input_ids"][1] = np.where(second[1], (batch["input_ids"][1] + 11) % config.vocab_size, batch["input_ids"][1])
    rows, picks = batch["masked_lm_positions"].shape
    return batch | {
        "masked_lm_ids": np.full((rows, picks), 7, np.int32),
        "masked_lm_weights": np.ones((rows, picks), np.float32),
        "next_sentence_labels": np.array([[0], [1]], np.int32),
        "next_sentence_weights": np.ones((rows, 1), np.float32),
        "row_ids": np.arange(rows, dtype=np.int32),
    }


def trained(config, params, batch, count, next_sentence, **settings):
    """Parameters after `count` training steps on the one batch."""
    task = PretrainingTask(config, batch["input_ids"].shape[1], next_sentence)
    optimizer = optim.make(OptimizerConfig(schedule="constant", **settings), count)
    step = jax.jit(
        functools.partial(engine.train_step, task=task, optimizer=optimizer, accumulate=1, clip_norm=1.0),
    )
    zero = jnp.zeros((), jnp.int32)
    params = jax.tree.map(jnp.asarray, params)
    state = engine.TrainState(zero, params, optimizer.init(params), zero, zero)
    for _ in range(count):
        state, _ = step(state, batch, jax.random.key(0))
    return jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
def test_the_pooler_is_kept_by_training_that_does_not_use_it(tmp_path):
    """C079: import, 5 steps of masked LM alone (with weight decay), export."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1, hidden_dropout_prob=0.0)
    source = huggingface.export(random_params(config), config, tokenizer, tmp_path / "source")
    _, params, _ = huggingface.read_folder(source)
    params = trained(
        config, params, training_batch(config), 5, next_sentence=False, learning_rate=1e-2, weight_decay=0.1
    )
    out = huggingface.export(params, config, tokenizer, tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    for name in before:
        kept = name.startswith(("bert.pooler.", "cls.seq_relationship."))
        assert np.array_equal(before[name], after[name]) is kept, name
