"""Any checkpoint in any of the formats, with the facts that its model card tells."""

from __future__ import annotations

import logging
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bert_jax.finetune.loading import best_of, is_finetuned, unfinished
from bert_jax.interop import huggingface, onnx_folder, sentence_transformers, stablehlo, tf1
from bert_jax.interop.huggingface_names import Say
from bert_jax.loading import Stored, read
from transformer_jax import checkpoint as checkpoints
from transformer_jax.config import UserError
from transformer_jax.model_facts import place_name, without_places
from transformer_jax.report import read_records

Format = Literal["huggingface", "onnx", "stablehlo", "tf1", "sentence-transformers"]
FORMATS: tuple[Format, ...] = typing.get_args(Format)
_log = logging.getLogger(__name__).warning


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    form: Format = "huggingface",
    *,
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    say: Say = _log,
    **options: Any,
) -> Path:
    """Write a model for other programs; what was written is loaded again and compared before it appears at `out`.

    Args:
      checkpoint: a run, RUN@STEP, a Hugging Face folder or one of google-research/bert; a fine-tuned one keeps
        its head.
      extra_card: facts for the model card, see `bert_jax.interop.model_card`; they come before those of the checkpoint.
      overwrite: replace an earlier export of this format.
      options: of the format's own `export`: `int8` (onnx), `pooling` (sentence-transformers).

    Returns:
      `out`.

    Raises:
      UserError: no such checkpoint, a target in use, or a model that the format has no form for.
    """
    found = read(checkpoint, say=say)
    if found.head is not None and found.step is not None and (half := unfinished(checkpoint, found.meta)):
        say(half)
    if found.config.context != "both" and form != "stablehlo":
        raise UserError(
            f"{checkpoint} sees one side alone (model.context {found.config.context!r}), and {form} has no form for "
            "that; take --format stablehlo"
        )
    facts = {**card_facts(checkpoint, found, f"bert-jax export {Path(checkpoint).name} OUT --format {form}")}
    facts |= extra_card or {}
    arguments = (found.params, found.config, found.tokenizer, out)
    settings: dict[str, Any] = {"head": found.head, "extra_card": facts, "overwrite": overwrite, **options}
    if form == "huggingface":
        return huggingface.export(*arguments, **settings)
    if form == "onnx":
        return onnx_folder.export(*arguments, drawn=found.drawn, say=say, **settings)
    if form == "stablehlo":
        return stablehlo.export(*arguments, **settings)
    if form == "sentence-transformers":
        return sentence_transformers.export(*arguments, say=say, **settings)
    if form == "tf1":
        return tf1.export(*arguments, **settings)
    raise UserError(f"no format {form!r}; there are {', '.join(FORMATS)}")


def card_facts(checkpoint: str | Path, found: Stored, command: str) -> dict[str, Any]:
    """What a model card tells of a checkpoint: step, data, settings, figures on held-out text, and the commands."""
    facts: dict[str, Any] = {}
    if found.step is not None:
        facts["step"] = found.step
    data = found.meta.get("data", {})
    if data:
        if "fingerprint" in data:
            facts["data_fingerprint"] = data["fingerprint"]
        if "sources" in data:
            facts["sources"] = ", ".join(map(place_name, data["sources"]))
        # Which licence the model has is for who publishes it to say.
        facts["licence_of_the_text"] = data.get("license", "not stated in the recipe")
        facts["language"] = data.get("language", "")
    if found.drawn:
        facts["never_trained"] = ", ".join(found.drawn) + ": random numbers"
    if "imported_from" in found.meta:
        facts["imported_from"] = found.meta["imported_from"]
    elif found.meta:
        settings = without_places(found.meta["config"])
        name = Path(found.meta["config"].get("run_dir") or "BERT").name
        trained = "pretrain RUN.toml" if found.head is None else "finetune TASK.toml --from CHECKPOINT"
        facts |= {"name": name, "command": f"bert-jax {trained}", "settings": settings}
        facts["sentence_task"] = settings.get("examples", {}).get("sentence_task", "nsp")
        facts["metrics"] = _held_out(checkpoint, found.step)
    facts["exported_by"] = f"`{command}`"
    return facts


def _held_out(checkpoint: str | Path, step: int | None) -> dict[str, float]:
    """The figures that the run noted at this step on anything but its training batches."""
    try:
        folder, _ = checkpoints.locate(best_of(checkpoint) if is_finetuned(checkpoint) else checkpoint)
    except UserError:
        return {}
    records = read_records(folder.parent / "metrics.jsonl")
    figures: dict[str, float] = {}
    for record in records:
        if record.get("step") == step and record.get("split") not in (None, "train"):
            split = record["split"]
            numbers = {k: v for k, v in record.items() if k not in ("step", "split") and isinstance(v, float)}
            figures |= {f"{split} {k}": v for k, v in numbers.items()}
    return figures
