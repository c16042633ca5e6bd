"""Folders in Hugging Face's form: weights in safetensors files, settings in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from transformer_jax.config import UserError


def read_tensors(folder: Path, model_class: str) -> dict[str, np.ndarray]:
    """All tensors of `model.safetensors`, or of the files its index names.

    Args:
      model_class: of the library that made the folder, for the message about weights that are a pickle.

    Raises:
      UserError: no safetensors file, or one that cannot be read.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        files = [folder / name for name in _named_files(index)]
    else:
        others = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".h5", ".msgpack", ".index", ".pt", ".npz")
        )
        if any(name.endswith((".bin", ".pt")) for name in others):
            raise UserError(
                f"{folder}: the weights are a pickle ({', '.join(others)}), which can run any code when it is opened, "
                "so it is not read; where you trust it, write them again as safetensors, in an environment of its own "
                f"with torch and transformers: {model_class}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), and "
                "copy the other files there (vocabularies and settings of the tokenizer)"
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


def _named_files(index: Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise UserError(f"{index}: has no weight_map from the names of tensors to files beside it")
    return sorted(set(names.values()))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError if it is missing or holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; it is part of every Hugging Face folder") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds no JSON object")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object as JSON, keys in order."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
