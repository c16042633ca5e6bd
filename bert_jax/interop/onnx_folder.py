"""Folders with an ONNX model: written, run in ONNX Runtime, compared with ours, and only then kept.

model.onnx            float32; model.onnx.data beside it where the weights are past ONNX's limit of 2 GB
model_int8.onnx       if asked for: the same with 8-bit weights, and what that costs in the model card
config.json, vocab.txt, tokenizer.json, tokenizer_config.json, README.md
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop.huggingface import config_to_hf
from bert_jax.interop.huggingface_names import Say
from bert_jax.interop.model_card import model_card
from bert_jax.interop.probe import (
    POOLED,
    SAMPLE_TEXTS,
    as_choices,
    compare_parts,
    failed,
    outputs_of,
    probe_rows,
    reference,
)
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
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    say: Say = _log,
) -> Path:
    """Write an ONNX folder. Batch and length are free; inputs are input_ids, attention_mask and token_type_ids.

    Args:
      params: nested dict of arrays without Flax boxes, vocabulary padded.
      head: of a fine-tuned model.
      int8: also a file whose matrix products have 8-bit weights (ONNX Runtime's dynamic quantisation).
      extra_card: facts for the model card.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.
      say: told what the 8-bit weights cost.

    Returns:
      `out`.

    Raises:
      UserError: the extra `onnx` is not installed, the target is in use, the disk refuses, or ONNX Runtime gives other
        numbers than the model. Nothing is then left at `out` that was not there before.
    """
    out = Path(out)
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
    with new_folder(out) as folder:
        _save(onnx, model, folder / "model.onnx")
        gap = _verify(folder / "model.onnx", batch, expected)
        facts["checked"] = (
            "When this folder was written, ONNX Runtime ran it on rows of several lengths, one of them empty, and on "
            f"smaller batches: every output is within 1e-4 of the model's in float32 (the largest difference is "
            f"{gap:.1e})."
        )
        if int8:
            facts |= _quantised(folder, config, tokenizer, head, say)
        write_json(folder / "config.json", config_to_hf(config, tokenizer, head))
        for name, text in tokenizer.files(model_max_length=config.max_position_embeddings).items():
            (folder / name).write_bytes(text.encode())
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


def _quantised(
    folder: Path, config: BertConfig, tokenizer: WordPiece, head: HeadConfig | None, say: Say
) -> dict[str, Any]:
    """Writes model_int8.onnx; what it costs against model.onnx on sample texts."""
    quantization = importlib.import_module("onnxruntime.quantization")
    whole, small = folder / "model.onnx", folder / "model_int8.onnx"
    external = (folder / "model.onnx.data").exists()
    root = logging.getLogger()
    before, handlers = root.manager.disable, root.handlers[:]
    logging.disable(logging.WARNING)  # it advises a step of its own, and sets up logging for that
    try:
        quantization.quantize_dynamic(
            whole, small, weight_type=quantization.QuantType.QInt8, per_channel=True, use_external_data_format=external
        )
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
    batch = _sample_rows(config, tokenizer)
    exact, rounded = (run(open_session(path), batch) for path in (whole, small))
    name = next(output for output in exact if output.endswith("logits"))
    real = batch["attention_mask"] > 0
    a, b = exact[name], rounded[name]
    if a.shape[:2] == real.shape and name not in POOLED:
        a, b = a[real], b[real]
    if not np.isfinite(b).all():
        raise failed("the 8-bit model gives numbers that are not finite")
    difference, spread = float(np.abs(a - b).mean()), float(a.std())
    facts: dict[str, Any] = {
        "int8_size": f"{small.stat().st_size / whole.stat().st_size:.0%} of the float32 file",
        "int8_loss": f"{name} differ by {difference:.3g} on average (their deviation is {spread:.3g}) on "
        f"{len(SAMPLE_TEXTS)} sample texts",
    }
    if a.shape[-1] > 1:
        agree = (a.argmax(-1) == b.argmax(-1)).mean()
        facts["int8_loss"] += f"; the best one is the same in {agree:.1%} of {a[..., 0].size}"
    say(f"8-bit weights: {facts['int8_size']}; {facts['int8_loss']}")
    return facts


def _sample_rows(config: BertConfig, tokenizer: WordPiece) -> dict[str, np.ndarray]:
    """The sample texts as padded rows of [CLS] text [SEP]; one more row where the number must be even."""
    room = min(128, config.max_position_embeddings) - 2
    rows = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids in tokenizer.encode_batch(SAMPLE_TEXTS)]
    rows += rows[: len(rows) % 2]
    length = max(map(len, rows))
    ids = np.full((len(rows), length), tokenizer.pad_id, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    mask = np.arange(length)[None] < np.array([len(row) for row in rows])[:, None]
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}


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
