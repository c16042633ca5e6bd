"""load: a run, RUN@STEP or a Hugging Face folder, ready for use."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_bert import random_params, tiny_config, tiny_tokenizer

import bert_jax
from bert_jax import loading
from bert_jax.interop import exports, imports
from transformer_jax import config as core
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig, UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with steps 0, 10 and 20, whose NSP bias is the step; (folder, config, tokenizer, params of step 0)."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("loading") / "run"
    params = random_params(config)
    meta = {
        "config": {
            "model": core.to_builtins(config),
            "run_dir": "/home/me/runs/tiny",
            "data": {"recipe": "recipe.toml", "prepared": "/home/me/prepared"},
            "examples": {"sentence_task": "sop"},
        },
        "tokenizer": tokenizer.files(),
        "data": {"fingerprint": "f00d", "sources": ["a.txt", "b.txt"]},
        "naming": 1,
    }
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep_last=3))
    for step in (0, 10, 20):
        params["nsp"]["bias"][:] = step
        checkpoints.save(step, {"params": jax.tree.map(jnp.array, params)}, {}, meta)
    checkpoints.close()
    return folder, config, tokenizer


def test_a_run_gives_its_newest_step_or_the_step_that_is_named(run):
    folder, config, tokenizer = run
    newest = bert_jax.load(folder)
    assert newest.step == 20 and newest.config == config and newest.tokenizer.digest == tokenizer.digest
    assert newest.params["nsp"]["bias"].tolist() == [20, 20]
    named = bert_jax.load(f"{folder}@10")
    assert named.step == 10 and named.params["nsp"]["bias"].tolist() == [10, 10]
    assert named.meta["data"]["fingerprint"] == "f00d"


def test_each_step_exports_and_loads_as_what_it_was(run, tmp_path):
    """C116."""
    folder = run[0]
    for step in (0, 10, 20):
        loaded = bert_jax.load(f"{folder}@{step}")
        out = exports.export_checkpoint(f"{folder}@{step}", tmp_path / str(step))
        again = bert_jax.load(out)
        assert again.step is None and again.drawn == ()
        jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
        card = (out / "README.md").read_text()
        for part in ("# tiny", f"| step | {step} |", "| data fingerprint | f00d |", "a.txt, b.txt", "*in order*"):
            assert part in card
        assert "/home/me" not in card and 'recipe = "recipe.toml"' in card


def test_the_five_lines_of_the_docstring_work(run):
    folder, config, _ = run
    bert = bert_jax.load(folder)
    ids, _ = bert.tokenizer.encode_query("hello [MASK], world.")
    row = jnp.array([[bert.tokenizer.cls_id, *ids, bert.tokenizer.sep_id]])
    out = jax.jit(bert.model.apply)({"params": bert.params}, row, 0 * row, jnp.arange(row.size)[None], 0 * row + 1)
    assert out["mlm_logits_BPV"].shape == (1, row.size, config.padded_vocab_size)
    assert np.isfinite(out["nsp_logits_BS2"]).all()


def test_heads_that_a_folder_lacks_are_drawn_and_named(run, tmp_path):
    out = exports.export_checkpoint(run[0], tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    save_file({n: v for n, v in tensors.items() if "cls.seq" not in n}, out / "model.safetensors")
    said: list[str] = []
    assert loading.load(out, say=said.append).drawn == ("nsp",)
    assert said == ["drawn at random with seed 0, since the source has none: nsp"]
    with pytest.raises(UserError, match="2 missing"):
        loading.load(out, seed=None)
    imported = imports.import_folder(out, tmp_path / "run", say=said.append)
    assert loading.load(imported).drawn == ("nsp",)
    card = (exports.export_checkpoint(imported, tmp_path / "again") / "README.md").read_text()
    assert "| never trained | nsp: random numbers |" in card


def test_what_is_no_checkpoint_is_refused_with_a_message(run, tmp_path):
    folder, _, _ = run
    for name in (tmp_path / "nothing", tmp_path, f"{folder}@7", f"{folder}@last"):
        with pytest.raises(UserError):
            loading.load(name)


def test_a_folder_whose_config_is_missing_is_said_to_lack_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has a model\.safetensors and no config\.json"):
        loading.load(tmp_path)


@pytest.mark.parametrize("read", [loading.load, loading.checkpoints.verify])
def test_a_folder_of_several_trainings_names_them(tmp_path, read):
    (tmp_path / "seed0" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"those of several trainings lie apart: name .*seed0"):
        read(tmp_path)


def test_parameters_named_by_an_unknown_scheme_are_refused(run, tmp_path, monkeypatch):
    step, params, data, meta = loading.checkpoints.read_params(run[0])
    changed = (step, params, data, meta | {"naming": 2})
    monkeypatch.setattr(loading.checkpoints, "read_params", lambda _: changed)
    with pytest.raises(UserError, match=r"naming scheme 2 .* only 1"):
        loading.load(run[0])


def test_a_damaged_newest_step_is_passed_over(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    (folder / "checkpoints" / "20" / "digests.json").unlink()
    assert loading.load(folder).step == 10


def test_importing_the_package_loads_no_jax():
    code = "import sys, bert_jax; assert callable(bert_jax.load); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
