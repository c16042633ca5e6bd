"""Hugging Face folders: written with a check of their own, and read back.

Neither torch nor transformers is needed: numpy writes the safetensors file, and our own model is the judge.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from bert_jax.config import BertConfig, PretrainConfig
from bert_jax.interop.huggingface_names import Say, absent_heads, from_hf, to_hf
from bert_jax.interop.model_card import model_card
from bert_jax.model import BertForPreTraining
from bert_jax.presets import nearest_preset
from transformer_jax import config as core
from transformer_jax import imported_run
from transformer_jax.config import UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.safetensors_folder import read_json, read_tensors, write_json
from transformer_jax.tokenizer import WordPiece

__all__ = [
    "config_from_hf",
    "config_to_hf",
    "export",
    "from_hf",
    "import_folder",
    "open_folder",
    "read_folder",
    "to_hf",
]

TOLERANCE = 1e-4
"""Most that a logit of the written folder may differ from the model's, in float32."""
SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Déjà vu, CAFÉ and naïve ÅNGSTRÖM; l'œuvre coûte 1 234,56 €!",
    "深度学习 and 機械学習 mixed with words",
    "unaffable incomprehensibilities " + "a" * 120 + " " + "b" * 250,
    "tabs\tand\u00a0odd\u200b spaces \u2014 \U0001f600",
)
"""Texts whose ids the written tokenizer must give again: case, accents, characters without spaces, long words."""
_SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
)
"""Settings that have the same name and meaning in both configurations."""
_log = logging.getLogger(__name__).info
_warn = logging.getLogger(__name__).warning


def config_to_hf(config: BertConfig, tokenizer: WordPiece) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder: true vocabulary size, the activation by its published name."""
    same = {name: getattr(config, name) for name in _SAME_FIELDS}
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        **same,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> BertConfig:
    """The model configuration from the contents of a `config.json`; what it leaves out has BERT's published default.

    Raises:
      UserError: another kind of model, or a variant of BERT that this model is not.
    """
    only = {
        "model_type": ("bert",),
        "hidden_act": typing.get_args(typing.get_type_hints(BertConfig)["hidden_act"]),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, allowed in only.items():
        if key in data and data[key] not in allowed:
            raise UserError(f"{where}: {key} is {data[key]!r}; this model can be read with {_either(allowed)} only")
    vocab_size = {"vocab_size": 30522}  # the published default, which a folder may leave out
    return core.load(BertConfig, vocab_size | {k: data[k] for k in _SAME_FIELDS if k in data}, where)


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a Hugging Face folder holds."""

    config: BertConfig
    params: dict[str, Any]
    tokenizer: WordPiece
    drawn: tuple[str, ...]
    """Heads ("pooler", "mlm", "nsp") that the folder lacks and that were drawn at random."""


def read_folder(
    path: str | Path, *, seed: int | None = None, say: Say = _log
) -> tuple[BertConfig, dict[str, Any], WordPiece]:
    """Configuration, parameters and tokenizer of a Hugging Face folder; arguments and errors as `open_folder`."""
    folder = open_folder(path, seed=seed, say=say)
    return folder.config, folder.params, folder.tokenizer


def open_folder(path: str | Path, *, seed: int | None = None, say: Say = _log) -> Folder:
    """Read a Hugging Face folder with safetensors weights, in one file or several.

    Args:
      seed: draws heads that the folder lacks, as `from_hf` says; None refuses such a folder.
      say: called with one line for whatever was left out, drawn or converted.

    Raises:
      UserError: a file is missing, broken or a pickle; or as in `config_from_hf`, `from_hf` and the tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    tensors = read_tensors(folder, "BertForPreTraining")
    try:
        params = from_hf(tensors, config, seed=seed, say=say)
    except UserError as e:
        hint = "; with a seed, a pooler and heads that are missing as a whole are drawn" if seed is None else ""
        raise UserError(f"{folder}: {e}{hint if absent_heads(tensors, config) else ''}") from None
    tokenizer = WordPiece.load(folder)
    _check_tokenizer(folder, tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size} rows "
            "for them; tokenizer and weights are not of the same model"
        )
    if tokenizer.vocab_size < config.vocab_size:
        say(f"{config.vocab_size - tokenizer.vocab_size} rows of the vocabulary have no entry in the tokenizer")
    return Folder(config, params, tokenizer, absent_heads(tensors, config))


def probe_batch(config: BertConfig) -> dict[str, np.ndarray]:
    """Four padded pairs: both segments, different lengths, ids over the whole vocabulary; for comparing models."""
    rows, length, picks = 4, min(64, config.max_position_embeddings), 4
    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(0, config.vocab_size, (rows, length)),
        "token_type_ids": np.zeros((rows, length)),
        "position_ids": np.tile(np.arange(length), (rows, 1)),
        "sequence_ids": np.zeros((rows, length)),
        "masked_lm_positions": np.zeros((rows, picks)),
        "cls_positions": np.zeros((rows, 1)),
    }
    batch["input_ids"][:, 1] = config.vocab_size - 1
    for row in range(rows):
        real = length - row * length // 6
        first = max(1, (row + 1) * real // 6)
        batch["token_type_ids"][row, first:real] = min(1, config.type_vocab_size - 1)
        batch["sequence_ids"][row, :real] = 1
        for name in ("input_ids", "position_ids"):
            batch[name][row, real:] = 0
        batch["masked_lm_positions"][row] = np.linspace(0, real - 1, picks)
    return {name: value.astype(np.int32) for name, value in batch.items()}


def probe_logits(params: Mapping[str, Any], config: BertConfig) -> dict[str, np.ndarray]:
    """MLM logits [4, 4, vocab_size] and NSP logits [4, 1, 2] on `probe_batch`, computed in float32 without dropout."""
    model = BertForPreTraining(dataclasses.replace(config, dtype="float32", remat="none"))
    mlm, nsp = _logits(model, dict(params), probe_batch(config))
    return {"MLM": np.asarray(mlm)[..., : config.vocab_size], "NSP": np.asarray(nsp)}


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: BertForPreTraining, params: dict[str, Any], batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    out: Any = model.apply({"params": params}, **batch)
    return out["mlm_logits_BPV"], out["nsp_logits_BS2"]


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, extra_card: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """`export` of a run, RUN@STEP or another Hugging Face folder; the card's facts come from the checkpoint."""
    from bert_jax.loading import load  # it imports this module

    found = load(checkpoint)
    facts: dict[str, Any] = {}
    if found.step is not None:
        facts["step"] = found.step
    if "data" in found.meta:
        facts["data_fingerprint"] = found.meta["data"]["fingerprint"]
        facts["sources"] = ", ".join(found.meta["data"]["sources"])
        # Which licence the model has is for who publishes it to say.
        facts["licence_of_the_text"] = found.meta["data"].get("license", "not stated in the recipe")
        facts["language"] = found.meta["data"].get("language", "")
    if found.drawn:
        facts["never_trained"] = ", ".join(found.drawn) + ": random numbers"
    if found.meta and "imported_from" not in found.meta:
        settings = dict(found.meta["config"])
        name = Path(settings.pop("run_dir")).name
        # Where things lay on the machine of the run is nobody's business.
        settings["data"] = {k: v for k, v in settings.get("data", {}).items() if k != "prepared"}
        facts |= {"name": name, "command": "bert-jax pretrain RUN.toml", "settings": settings}
        facts["sentence_task"] = settings["examples"]["sentence_task"]
    facts |= extra_card or {}
    return export(found.params, found.config, found.tokenizer, out, extra_card=facts, overwrite=overwrite)


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    reference: Mapping[str, np.ndarray] | None = None,
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face folder, read it back, compare, and only then put it at `out`.

    Args:
      params: nested dict of arrays without Flax boxes, vocabulary padded.
      reference: what `probe_logits` gave where the model was trained; None computes it here from `params`.
      extra_card: facts for the model card. `name`, `licence`, `language`, `sentence_task` and `settings` (nested) have
        their places; all others become rows of a table.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.

    Returns:
      `out`.

    Raises:
      UserError: the target is in use, the disk refuses, or what was read back differs. Nothing is then left at `out`
        that was not there before.
    """
    out = Path(out)
    check_target(out, overwrite, ("config.json", "model.safetensors"))
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size}")
    with new_folder(out) as folder:
        _write(folder, params, config, tokenizer, extra_card or {})
        _verify(folder, params, config, tokenizer, reference)
    return out


def import_folder(source: str | Path, run_dir: str | Path, *, seed: int | None = 0, say: Say = _warn) -> Path:
    """Make a run folder whose step 0 holds the parameters and tokenizer of a Hugging Face folder.

    `pretrain` starts from it by `[init]`, and `export` gives the same tensors again.

    Args:
      seed: draws heads that the source lacks, as `from_hf` says; None refuses such a source.

    Returns:
      `run_dir`.

    Raises:
      UserError: as `open_folder`; or `run_dir` is in use, the disk refuses, or the checkpoint reads back changed.
        Nothing is then left at `run_dir`.
    """
    run_dir = Path(run_dir)
    imported_run.check_unused(run_dir)
    found = open_folder(source, seed=seed, say=say)
    config = PretrainConfig(
        preset=nearest_preset(found.config),
        run_dir=str(run_dir),
        model=found.config,
        tokenizer=found.tokenizer.config,
    )
    meta = {"drawn": list(found.drawn)}
    return imported_run.write(run_dir, source, config, found.params, found.tokenizer, naming=1, more_meta=meta)


def _write(
    folder: Path, params: Mapping[str, Any], config: BertConfig, tokenizer: WordPiece, card: Mapping[str, Any]
) -> None:
    save_file(to_hf(params, config), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config_to_hf(config, tokenizer))
    # The library makes a file that only its owner can read; this one is to be read like those beside it.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    for name, text in tokenizer.files(model_max_length=config.max_position_embeddings).items():
        (folder / name).write_bytes(text.encode())
    (folder / "README.md").write_text(model_card(config, tokenizer, card), encoding="utf-8")


def _verify(
    folder: Path,
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    reference: Mapping[str, np.ndarray] | None,
) -> None:
    """Read the folder as a stranger would and compare settings, tensors, both logits and token ids."""
    read_config, read_params, read_tokenizer = read_folder(folder)
    for field in _SAME_FIELDS:
        if getattr(read_config, field) != getattr(config, field):
            raise _failed(f"{field} reads back as {getattr(read_config, field)!r}")
    # What the file does not carry (layers, padding of the vocabulary) is ours.
    read_params = from_hf(to_hf(read_params, read_config), config)
    expected = reference if reference is not None else probe_logits(params, config)
    found = probe_logits(read_params, config)
    for head, value in found.items():
        if not np.isfinite(expected[head]).all():
            raise UserError(f"the model's own {head} logits are not finite, so it is not exported")
        gap = np.max(np.abs(value - expected[head]))
        if not gap <= TOLERANCE:  # NaN too
            raise _failed(f"{head} logits of the written folder differ by {gap:.3g}, more than {TOLERANCE:g}")
    written, meant = to_hf(read_params, config), to_hf(params, config)
    for name, tensor in meant.items():
        if not np.array_equal(written[name], tensor):
            raise _failed(f"tensor {name} reads back changed")
    for text in SAMPLE_TEXTS:
        if read_tokenizer.encode(text) != tokenizer.encode(text):
            raise _failed(f"other token ids for {text!r}")


def _failed(what: str) -> UserError:
    return UserError(f"export failed its own check, so nothing was written: {what}")


def _check_tokenizer(folder: Path, tokenizer: WordPiece) -> None:
    """Compare what we made of a folder's tokenizer files with what the `tokenizers` library makes of them."""
    if not (folder / "tokenizer.json").exists():
        return
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_padding()
    library.no_truncation()
    # Only our own programs know of a pre-splitter.
    plain = WordPiece(tokenizer.vocab, dataclasses.replace(tokenizer.config, pre_splitter=""))
    for text in SAMPLE_TEXTS:
        ours, theirs = plain.encode(text), library.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise UserError(
                f"{folder}: tokenizer.json cuts text in a way that is not supported here: {text!r} has the ids "
                f"{theirs} by the library, {ours} by ours"
            )


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(v) for v in values)
