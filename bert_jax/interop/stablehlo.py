"""Folders with the model as a StableHLO program (`jax.export`): it runs under JAX without this package.

model.stablehlo      the program for CPU, CUDA and TPU, batch and length free
params.safetensors   its parameters, named by their path (docs/parameters.md)
config.json, vocab.txt, tokenizer.json, tokenizer_config.json, README.md
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from safetensors.numpy import load_file, save_file

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop.huggingface import config_to_hf
from bert_jax.interop.huggingface_names import from_hf, to_hf
from bert_jax.interop.model_card import model_card
from bert_jax.interop.probe import (
    INPUTS,
    as_choices,
    compare_parts,
    failed,
    named_outputs,
    outputs_of,
    probe_rows,
    reference,
)
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.named_trees import flat, nest
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.safetensors_folder import write_json
from transformer_jax.tokenizer import WordPiece

MARKS = ("model.stablehlo", "params.safetensors")
"""Files by which an earlier export is known."""
PLATFORMS = ("cpu", "cuda", "tpu")


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    head: HeadConfig | None = None,
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the program and its parameters, load both again, compare, and only then put the folder at `out`.

    Args:
      params: nested dict of arrays without Flax boxes, vocabulary padded.
      head: of a fine-tuned model.
      extra_card: facts for the model card.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.

    Returns:
      `out`.

    Raises:
      UserError: the extra `stablehlo` is not installed, the target is in use, the disk refuses, or what was read back
        gives other numbers than the model. Nothing is then left at `out` that was not there before.
    """
    out = storage.path(out)
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("export to StableHLO needs flatbuffers: pip install 'bert-transformer-jax[stablehlo]'")
    check_target(out, overwrite, MARKS)
    # The padding of the vocabulary is for the hardware of training; here it would only be carried about.
    tight = dataclasses.replace(config, vocab_multiple=1, dtype="float32", remat="none")
    tree = from_hf(to_hf(params, config, head), tight, head=head)
    arrays = flat(tree)
    batch = probe_rows(config)
    expected = reference(params, config, batch, head)
    facts = dict(extra_card or {})
    names = ", ".join(f"`{name}`" for name in outputs_of(head))
    shape = "[batch, choices, length]" if head is not None and head.kind == "choice" else "[batch, length]"
    facts |= {
        "program": f"StableHLO for {', '.join(PLATFORMS)}, float32, at most {config.max_position_embeddings} pieces",
        "written_by": f"JAX {jax.__version__}; this or a newer JAX loads it",
        "use": f"{_use(tokenizer)}\nInputs {shape}; outputs, by name: {names}.",
    }
    with new_folder(out) as folder:
        (folder / MARKS[0]).write_bytes(program(arrays, tight, head))
        save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, folder / MARKS[1])
        write_json(folder / "config.json", config_to_hf(config, tokenizer, head))
        shutil.copymode(folder / "config.json", folder / MARKS[1])
        tokenizer.save(folder, config.max_position_embeddings)
        gap = _verify(folder, arrays, batch, expected, head)
        facts["checked"] = (
            "When this folder was written, program and parameters were loaded again and run on rows of several "
            f"lengths, one of them empty, and on smaller batches: every output is within 1e-4 of the model's (the "
            f"largest difference is {gap:.1e}), and every parameter is the same bit for bit."
        )
        card = model_card(config, tokenizer, facts, head, form="stablehlo")
        (folder / "README.md").write_text(card, encoding="utf-8")
    return out


def program(params: Mapping[str, np.ndarray], config: BertConfig, head: HeadConfig | None = None) -> bytes:
    """The serialised program (parameters by name, input_ids, attention_mask, token_type_ids) -> outputs by name.

    Args:
      params: arrays by their path, whose names, shapes and dtypes become part of the program.
    """
    limit = f"length <= {config.max_position_embeddings}"
    axes = "batch, choices, length" if head is not None and head.kind == "choice" else "batch, length"
    shape = jax_export.symbolic_shape(axes, constraints=[limit])
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}

    def bert(params: dict[str, jax.Array], ids: jax.Array, mask: jax.Array, types: jax.Array) -> dict[str, jax.Array]:
        return named_outputs(config, head, nest(params.items()), ids, mask, types)

    return bytes(jax_export.export(jax.jit(bert), platforms=PLATFORMS)(abstract, *[ids] * len(INPUTS)).serialize())


def _verify(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    head: HeadConfig | None,
) -> float:
    model = jax_export.deserialize(bytearray((folder / MARKS[0]).read_bytes()))
    params = load_file(folder / MARKS[1])
    for name, value in arrays.items():
        if not np.array_equal(params[name], value):
            raise failed(f"parameter {name} reads back changed")
    call = functools.partial(jax.jit(model.call), params)

    def run(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = as_choices(rows) if head is not None and head.kind == "choice" else rows
        return {name: np.asarray(x) for name, x in call(*(jnp.asarray(rows[n], jnp.int32) for n in INPUTS)).items()}

    return compare_parts(run, batch, expected)


def _use(tokenizer: WordPiece) -> str:
    ids = f"[[{tokenizer.cls_id}, {tokenizer.mask_id}, {tokenizer.sep_id}]]"
    return f"""Any program with JAX, safetensors and flatbuffers runs it, without this package, on CPU, CUDA GPUs
and TPU; batch and length are free.

```python
import jax, pathlib, safetensors.numpy, jax.export
model = jax.export.deserialize(pathlib.Path("model.stablehlo").read_bytes())
params = safetensors.numpy.load_file("params.safetensors")
ids = jax.numpy.array({ids})  # as tokenizer.json gives them
outputs = jax.jit(model.call)(params, ids, ids * 0 + 1, ids * 0)  # ids, attention_mask, token_type_ids: int32
```
"""
