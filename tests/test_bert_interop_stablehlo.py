"""StableHLO: the written program runs without this package, for any batch and length, and gives our numbers."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export
from safetensors.numpy import load_file
from tiny_bert import HEADS, padded_rows, random_params, tiny_config, tiny_tokenizer, tuned

from bert_jax.interop import exports, huggingface, probe, stablehlo
from transformer_jax.config import UserError

pytest.importorskip("flatbuffers")  # the extra


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(parameters, configuration, folder)."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    params = random_params(config)
    return params, config, stablehlo.export(params, config, tokenizer, tmp_path_factory.mktemp("hlo") / "out")


def call(folder, batch):
    model = jax_export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    params = load_file(folder / "params.safetensors")
    return jax.jit(model.call)(params, *(jnp.asarray(batch[name], jnp.int32) for name in probe.INPUTS))


@pytest.mark.slow
def test_batch_and_length_are_free_and_a_row_of_padding_is_finite(exported):
    params, config, folder = exported
    batch = padded_rows(config, (17, 9, 0), 17)
    found, expected = call(folder, batch), probe.reference(params, config, batch)
    assert found.keys() == expected.keys() and found["prediction_logits"].shape == (3, 17, 69)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4, err_msg=name)


def test_the_program_is_for_three_platforms_and_says_how_long_a_row_may_be(exported):
    _, config, folder = exported
    model = jax_export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    assert model.platforms == ("cpu", "cuda", "tpu")
    with pytest.raises(ValueError, match="refining shapes") as error:
        call(folder, padded_rows(config, (33,), 33))
    assert "constraint length <= 32" in str(error.value.__cause__)


def test_the_lines_of_the_card_run_in_a_program_that_knows_nothing_of_ours(exported):
    folder = exported[2]
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S).group(1)
    code += "import sys; assert not {'bert_jax', 'transformer_jax'} & sys.modules.keys()\n"
    code += "print(outputs['seq_relationship_logits'].shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "(1, 2)\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["choice", "span"])
def test_a_head_is_part_of_the_program(tmp_path, kind):
    params, config, tokenizer = tuned(HEADS[kind])
    source = huggingface.export(params, config, tokenizer, tmp_path / "source", head=HEADS[kind])
    out = exports.export_checkpoint(source, tmp_path / "out", "stablehlo")
    model = jax_export.deserialize(bytearray((out / "model.stablehlo").read_bytes()))
    shape = "(batch, choices, length)" if kind == "choice" else "(batch, length)"
    assert str(model.in_avals[-1].shape).replace("'", "") == shape
    assert len(model.out_avals) == (1 if kind == "choice" else 2)


def test_a_program_that_gives_other_numbers_is_not_kept(exported, tmp_path, monkeypatch):
    params, config, _ = exported
    other = {**params, "nsp": {"kernel": params["nsp"]["kernel"], "bias": params["nsp"]["bias"] + 1}}
    real = stablehlo.reference
    monkeypatch.setattr(stablehlo, "reference", lambda _, *rest: real(other, *rest))
    with pytest.raises(UserError, match=r"seq_relationship_logits logits of the written folder differ by 1"):
        stablehlo.export(params, config, tiny_tokenizer(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
