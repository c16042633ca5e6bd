"""An ONNX model with 8-bit weights, and what they cost: measured on sample texts against the float32 file."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop.probe import SAMPLE_TEXTS, failed
from transformer_jax.tokenizer import WordPiece

Run = Callable[[Path, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Runs the model in a file on a batch."""


def quantise(whole: Path, small: Path) -> None:
    """Write `small`: `whole` with 8-bit kernels (a scale for each output) and tables, by ONNX Runtime.

    The inputs of products are rounded when the model runs, each with a scale of its own (dynamic quantisation).
    """
    library = importlib.import_module("onnxruntime.quantization")
    root = logging.getLogger()
    before, handlers = root.manager.disable, root.handlers[:]
    logging.disable(logging.WARNING)  # it advises a step of its own, and sets up logging for that
    try:
        library.quantize_dynamic(
            whole,
            small,
            weight_type=library.QuantType.QInt8,
            per_channel=True,
            use_external_data_format=Path(f"{whole}.data").exists(),
        )
    finally:
        logging.disable(before)
        root.handlers[:] = handlers


def cost(
    whole: Path, small: Path, run: Run, config: BertConfig, tokenizer: WordPiece, head: HeadConfig | None, trained: bool
) -> dict[str, str]:
    """Facts for the model card: size, difference of the outputs, and how often the best answer is the same.

    Args:
      trained: False where the masked-LM head is drawn at random, so that token vectors are compared.

    Raises:
      UserError: the 8-bit model gives numbers that are not finite.
    """
    batch = sample_rows(config, tokenizer)
    exact, rounded = run(whole, batch), run(small, batch)
    real = batch["attention_mask"] > 0
    name = next(output for output in exact if output.endswith("logits"))
    if head is None and not trained:
        name = "last_hidden_state"
    a, b = exact[name], rounded[name]
    if not np.isfinite(b).all():
        raise failed("the 8-bit model gives numbers that are not finite")
    of_tokens = head is None or head.kind in ("tagging", "span")
    gaps = np.abs(a - b)[real] if of_tokens else np.abs(a - b)
    spread = float((a[real] if of_tokens else a).std())
    loss = f"{name} differ by {gaps.mean():.3g} on average (their deviation is {spread:.3g}) on sample texts"
    if name == "last_hidden_state":
        a, b = a[real], b[real]
        cosines = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
        loss += f"; the mean cosine of {len(a)} token vectors is {cosines.mean():.4f}"
    else:
        same = _answers(a, real, head) == _answers(b, real, head)
        if same.size:
            loss += f"; the best one is the same in {same.sum()} of {same.size}"
    share = _size(small) / _size(whole)
    return {"int8_size": f"{share:.0%} of the float32 file", "int8_loss": loss}


def _answers(logits: np.ndarray, real_BL: np.ndarray, head: HeadConfig | None) -> np.ndarray:
    """What would be answered: the best piece, tag, class, choice or start; nothing for a regression."""
    kind = head.kind if head else "pretraining"
    if kind in ("pretraining", "tagging"):
        return logits[real_BL].argmax(-1)
    if kind == "span":
        return np.where(real_BL, logits, -np.inf).argmax(-1)
    if kind == "regression":
        return np.zeros(0)
    return logits > 0 if kind == "multi_label" else logits.argmax(-1)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, Path(f"{path}.data")) if file.exists())


def sample_rows(config: BertConfig, tokenizer: WordPiece) -> dict[str, np.ndarray]:
    """The sample texts as padded rows of [CLS] text [SEP], int64 [n, L]; n is even, for models of choices."""
    room = min(128, config.max_position_embeddings) - 2
    texts = SAMPLE_TEXTS[: len(SAMPLE_TEXTS) // 2 * 2]
    rows = [[tokenizer.cls_id, *ids[:room], tokenizer.sep_id] for ids in tokenizer.encode_batch(texts)]
    length = max(map(len, rows))
    ids = np.full((len(rows), length), tokenizer.pad_id, np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    mask = np.arange(length)[None] < np.array([len(row) for row in rows])[:, None]
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
