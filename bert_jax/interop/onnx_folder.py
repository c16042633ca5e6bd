"""Folders with an ONNX model: written, run in ONNX Runtime, compared with ours, and only then kept.

model.onnx            float32; model.onnx.data beside it where the weights are past ONNX's limit of 2 GB
model_int8.onnx       if asked for: the same with 8-bit weights, and what that costs in the model card
config.json, vocab.txt, tokenizer.json, tokenizer_config.json, README.md
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop import onnx_int8
from bert_jax.interop.huggingface import config_to_hf
from bert_jax.interop.huggingface_names import Say
from bert_jax.interop.model_card import model_card
from bert_jax.interop.probe import as_choices, compare_parts, outputs_of, probe_rows, reference
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.safetensors_folder import write_json
from transformer_jax.tokenizer import WordPiece

MARKS = ("config.json", "model.onnx")
"""Files by which an earlier export is known."""
EXTERNAL_BYTES = 1_900_000_000
"""From here the weights go into a file of their own."""
_log = logging.getLogger(__name__).warning


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    head: HeadConfig | None = None,
    int8: bool = False,
    drawn: Collection[str] = (),
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    say: Say = _log,
) -> Path:
    """Write an ONNX folder. Batch and length are free; inputs are input_ids, attention_mask and token_type_ids.

    Args:
      params: nested dict of arrays without Flax boxes, vocabulary padded.
      head: of a fine-tuned model.
      int8: also a file whose matrix products have 8-bit weights (ONNX Runtime's dynamic quantisation).
      drawn: parts of the model that hold random numbers; the cost of 8-bit weights is not measured on them.
      extra_card: facts for the model card.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.
      say: told what the 8-bit weights cost.

    Returns:
      `out`.

    Raises:
      UserError: the extra `onnx` is not installed, the target is in use, the disk refuses, or ONNX Runtime gives other
        numbers than the model. Nothing is then left at `out` that was not there before.
    """
    out = storage.path(out)
    onnx, _ = _library("onnx"), _library("onnxruntime")
    check_target(out, overwrite, MARKS)
    from bert_jax.interop import onnx_graph  # it needs the extra

    model = onnx_graph.build(params, config, head)
    batch = probe_rows(config)
    expected = reference(params, config, batch, head)
    facts = dict(extra_card or {}) | {
        "opset": f"{onnx_graph.OPSET} (ONNX), float32",
        "use": _use(outputs_of(head), head),
    }
    with new_folder(out, ("model_int8.onnx",)) as folder:
        _save(onnx, model, folder / "model.onnx")
        gap = _verify(folder / "model.onnx", batch, expected)
        facts["checked"] = (
            "When this folder was written, ONNX Runtime ran it on rows of several lengths, one of them empty, and on "
            f"smaller batches: every output is within 1e-4 of the model's in float32 (the largest difference is "
            f"{gap:.1e})."
        )
        if int8:
            whole, small = folder / "model.onnx", folder / "model_int8.onnx"
            onnx_int8.quantise(whole, small)
            facts |= onnx_int8.cost(whole, small, _run_file, config, tokenizer, head, "mlm" not in drawn)
            say(f"8-bit weights: {facts['int8_size']}; {facts['int8_loss']}")
        write_json(folder / "config.json", config_to_hf(config, tokenizer, head))
        tokenizer.save(folder, config.max_position_embeddings)
        (folder / "README.md").write_text(model_card(config, tokenizer, facts, head, form="onnx"), encoding="utf-8")
    return out


def open_session(path: Path) -> Any:
    """An ONNX Runtime session on CPU."""
    runtime = _library("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(session: Any, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name; inputs are bound by name."""
    names = [output.name for output in session.get_outputs()]
    if len(session.get_inputs()[0].shape) == 3 and batch["input_ids"].ndim == 2:
        batch = as_choices(batch)
    return dict(zip(names, session.run(names, dict(batch)), strict=True))


def _run_file(path: Path, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return run(open_session(path), batch)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"export to ONNX needs {name}: pip install 'bert-transformer-jax[onnx]'") from None


def _save(onnx: Any, model: Any, path: Path) -> None:
    large = sum(len(x.raw_data) for x in model.graph.initializer) > EXTERNAL_BYTES
    if large:
        place = path.name + ".data"
        onnx.save_model(model, path, save_as_external_data=True, all_tensors_to_one_file=True, location=place)
    else:
        onnx.save_model(model, path)
    onnx.checker.check_model(str(path))


def _verify(path: Path, batch: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    session = open_session(path)
    return compare_parts(lambda rows: run(session, rows), batch, expected)


def _use(outputs: tuple[str, ...], head: HeadConfig | None) -> str:
    shape = "[batch, choices, length]" if head and head.kind == "choice" else "[batch, length]"
    names = ", ".join(f"`{name}`" for name in outputs)
    return f"""Any ONNX runtime runs `model.onnx`; batch and length are free.

```python
import numpy as np, onnxruntime, tokenizers
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
ids = np.array([tokenizer.encode("the text").ids])
session = onnxruntime.InferenceSession("model.onnx")
feeds = {{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}}
outputs = session.run(None, feeds)
```

Inputs by name, int64 {shape}; outputs: {names}."""
