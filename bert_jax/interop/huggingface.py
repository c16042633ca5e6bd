"""Hugging Face folders: written with a check of their own, and read back.

Neither torch nor transformers is needed: numpy writes the safetensors file, and our own model is the judge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bert_jax.config import BertConfig
from bert_jax.interop.huggingface_names import Say, from_hf, to_hf
from bert_jax.interop.model_card import model_card
from transformer_jax import config as core
from transformer_jax.config import UserError

if TYPE_CHECKING:
    from transformer_jax.tokenizer import WordPiece

__all__ = ["config_from_hf", "config_to_hf", "export", "from_hf", "read_folder", "to_hf"]

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


def read_folder(
    path: str | Path, *, seed: int | None = None, say: Say = _log
) -> tuple[BertConfig, dict[str, Any], WordPiece]:
    """Configuration, parameters and tokenizer of a Hugging Face folder; safetensors weights, in one file or several.

    `seed` and `say` are those of `from_hf`.

    Raises:
      UserError: a file is missing, broken or a pickle; or as in `config_from_hf`, `from_hf` and the tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    config = config_from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))
    try:
        params = from_hf(_read_tensors(folder), config, seed=seed, say=say)
    except UserError as e:
        raise UserError(f"{folder}: {e}" if str(folder) not in str(e) else str(e)) from None
    from transformer_jax.tokenizer import WordPiece

    tokenizer = WordPiece.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size} rows "
            "for them; tokenizer and weights are not of the same model"
        )
    if tokenizer.vocab_size < config.vocab_size:
        say(f"{config.vocab_size - tokenizer.vocab_size} rows of the vocabulary have no entry in the tokenizer")
    return config, params, tokenizer


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
    import jax

    from bert_jax.model import BertForPreTraining

    model = BertForPreTraining(dataclasses.replace(config, dtype="float32", remat="none"))
    out = jax.jit(lambda p, batch: model.apply({"params": p}, **batch))(dict(params), probe_batch(config))
    return {
        "MLM": np.asarray(out["mlm_logits_BPV"])[..., : config.vocab_size],
        "NSP": np.asarray(out["nsp_logits_BS2"]),
    }


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
      extra_card: facts for the model card. `name`, `licence`, `language` and `settings` (a nested dict) have their
        places; all others become rows of a table.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.

    Returns:
      `out`.

    Raises:
      UserError: the target is in use, the disk refuses, or what was read back differs. Nothing is then left at `out`
        that was not there before.
    """
    out = Path(out)
    _check_target(out, overwrite)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size}")
    with _new_folder(out) as folder:
        _write(folder, params, config, tokenizer, extra_card or {})
        _verify(folder, params, config, tokenizer, reference)
    return out


def _write(
    folder: Path, params: Mapping[str, Any], config: BertConfig, tokenizer: WordPiece, card: Mapping[str, Any]
) -> None:
    save_file(to_hf(params, config), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config_to_hf(config, tokenizer))
    files = dict(tokenizer.files())
    settings = json.loads(files["tokenizer_config.json"]) | {"model_max_length": config.max_position_embeddings}
    files["tokenizer_config.json"] = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    for name, text in files.items():
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
            raise UserError(f"export failed its own check: {field} reads back as {getattr(read_config, field)!r}")
    # What the file does not carry (layers, padding of the vocabulary) is ours.
    read_params = from_hf(to_hf(read_params, read_config), config)
    expected = reference if reference is not None else probe_logits(params, config)
    found = probe_logits(read_params, config)
    for head, value in found.items():
        gap = np.max(np.abs(value - expected[head]))
        if not gap <= TOLERANCE:  # NaN too
            raise UserError(
                f"export failed its own check: {head} logits of the written folder differ by {gap:.3g} from the "
                f"model's, more than {TOLERANCE:g}; nothing was written"
            )
    written, meant = to_hf(read_params, config), to_hf(params, config)
    for name, tensor in meant.items():
        if not np.array_equal(written[name], tensor):
            raise UserError(f"export failed its own check: tensor {name} reads back changed; nothing was written")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in SAMPLE_TEXTS:
        ids = tokenizer.encode(text)
        if read_tokenizer.encode(text) != ids or library.encode(text, add_special_tokens=False).ids != ids:
            raise UserError(f"export failed its own check: other token ids for {text!r}; nothing was written")


def _check_target(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        contents = {p.name for p in out.iterdir()}
        if not contents:
            return
        if not overwrite:
            raise UserError(f"{out} is not empty; give another folder, or ask for it to be overwritten")
        if not {"config.json", "model.safetensors"} <= contents:
            raise UserError(f"{out} is not an earlier export (no config.json and model.safetensors), so it is kept")
    elif out.exists() or out.is_symlink():
        raise UserError(f"{out} is a file; give a folder that is new or empty")


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is gone when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{os.getpid()}.partial"
    old = made.with_suffix(".old")
    try:
        made.mkdir()
        yield made
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except OSError as e:
        raise UserError(f"{target} cannot be written: {e}") from e
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of `model.safetensors`, or of the files its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        files = [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    else:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".h5", ".msgpack", ".index", ".pt"))
        if any(name.endswith((".bin", ".pt")) for name in others):
            raise UserError(
                f"{folder}: the weights are a pickle ({', '.join(others)}), which can run any code when it is opened, "
                "so it is not read; where you trust it, write them again as safetensors: "
                "BertForPreTraining.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        found = f" (only {', '.join(others)})" if others else ""
        raise UserError(f"{folder}: no model.safetensors{found}; weights are read from safetensors files alone")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError, TypeError, ValueError, KeyError) as e:
            raise UserError(f"{file}: cannot be read as safetensors: {e}") from None
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds no JSON object")
    return data


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(v) for v in values)
