"""load: a run or RUN@STEP, ready for use."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_bert
import tiny_translation_run as tiny

from transformer_jax import config as core
from transformer_jax import translation
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig, UserError
from transformer_jax.run_file import with_value
from transformer_jax.translation import loading
from transformer_jax.translation.model import abstract_params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with steps 10 and 20 whose parameters are all the step over 100; (folder, model configuration)."""
    size, folder = tiny.vocabularies().target.vocab_size, tmp_path_factory.mktemp("loading") / "run"
    config = tiny.config(folder.parent, model_source_vocab_size=size)
    config = with_value(config, "model.target_vocab_size", size)
    words = tiny.vocabularies()
    meta = {
        "config": core.to_builtins(config),
        "tokenizer": words.files(),
        "tokenizer_digest": words.digest,
        "naming": 1,
    }
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep_last=3))
    for step in (10, 20):
        params = jax.tree.map(lambda s, v=step / 100: jnp.full(s.shape, v, s.dtype), abstract_params(config.model))
        checkpoints.save(step, {"params": params}, {}, meta)
    checkpoints.close()
    return folder, config.model


def test_a_run_or_a_step_of_it_is_loaded_with_its_vocabularies(run):
    folder, model = run
    newest = translation.load(folder)
    assert (newest.step, newest.config, newest.model.config) == (20, model, model)
    assert newest.vocabularies.digest == tiny.vocabularies().digest
    assert newest.params["encoder"]["layer_0"]["attention"]["query"]["bias"][0] == np.float32(0.2)
    assert translation.load(f"{folder}@10").step == 10


def test_the_lines_of_the_docstring_work(run):
    mt = translation.load(run[0])
    ids = [*mt.vocabularies.source.encode("bal dom"), *mt.vocabularies.source_end]
    row = jnp.array([ids])
    memory = mt.model.apply({"params": mt.params}, row, jnp.arange(row.size)[None], 0 * row + 1, method="encode")
    assert memory.shape == (1, len(ids), 16) and np.isfinite(memory).all()
    assert mt.vocabularies.target.decode(mt.vocabularies.target.encode("bal dom")) == "bal dom"


def test_what_is_no_translation_model_is_refused(run, tmp_path):
    for name in (tmp_path / "nothing", tmp_path, f"{run[0]}@7"):
        with pytest.raises(UserError):
            translation.load(name)
    config = tiny_bert.tiny_config(num_hidden_layers=1)
    checkpoints = Checkpoints(tmp_path / "bert" / "checkpoints", CheckpointConfig())
    params = jax.tree.map(jnp.asarray, tiny_bert.random_params(config))
    checkpoints.save(1, {"params": params}, {}, {"naming": 1})
    checkpoints.close()
    with pytest.raises(UserError, match="holds no translation model: its parameters are embeddings, encoder, mlm"):
        translation.load(tmp_path / "bert")


def test_parameters_named_by_an_unknown_scheme_are_refused(run, monkeypatch):
    step, params, data, meta = loading.checkpoints.read_params(run[0])
    monkeypatch.setattr(loading.checkpoints, "read_params", lambda _: (step, params, data, meta | {"naming": 2}))
    with pytest.raises(UserError, match=r"naming scheme 2 .* only 1"):
        translation.load(run[0])


def test_importing_the_package_loads_no_jax():
    code = "import sys; from transformer_jax import translation; assert callable(translation.load); "
    subprocess.run([sys.executable, "-c", code + "assert 'jax' not in sys.modules"], check=True)
