"""The manifest of a prepared folder: what is in it, with the size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transformer_jax import storage
from transformer_jax.config import UserError

FORMAT = "token-shards"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
CACHES = "plans"
"""Folder in which readers keep what they have worked out from the shards; it can always be made again."""


class Tokenizer(Protocol):
    """What a prepared folder keeps of the tokenizer that made the ids."""

    @property
    def digest(self) -> str: ...

    def files(self) -> dict[str, str]: ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256, as the manifest keeps them."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing: under another name, forced to disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the tokenizer's files and return the manifest's entry for them."""
    target = folder / TOKENIZER
    target.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer.files().items():
        write_atomically(target / name, text)
    return {"digest": tokenizer.digest, "files": {name: describe_file(target / name) for name in tokenizer.files()}}


def make_manifest(
    *,
    vocab_size: int,
    tokenizer: Mapping[str, Any],
    source_names: Sequence[str],
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
    made_from: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest as it will be written.

    Args:
      tokenizer: what `write_tokenizer` returned.
      splits: for each split what `write_shard` returned, in order.
      made_from: digests of the inputs, by which a second preparation knows that nothing has changed.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": vocab_size,
        "dtype": token_dtype(vocab_size).name,
        "tokenizer": dict(tokenizer),
        "source_names": list(source_names),
        "splits": {split: [dict(entry) for entry in entries] for split, entries in splits.items()},
        "made_from": dict(made_from or {}),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest.json, which makes the folder complete."""
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished prepared folder.

    Raises:
      UserError: no folder, an unfinished one, or one of another version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"{folder} is not a finished prepared folder: it has no {MANIFEST}; "
                "run `prepare` again with the same run file, it goes on where it stopped"
            ) from None
        raise UserError(f"{folder}: no prepared data here; make it with `prepare` first") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}; run `prepare` again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} is not the manifest of a prepared folder")
    if manifest["version"] != VERSION:
        raise UserError(
            f"{folder} was prepared in version {manifest['version']} of the format, this program reads {VERSION}; "
            "run `prepare` again into a new folder"
        )
    return manifest


def local_copy(folder: Path | str, split: str | None = None) -> Path:
    """The prepared folder on this machine: `folder` itself, or the copy of one in storage, with the files of a split.

    A file of the copy that is missing, or is not what the manifest says, is fetched (again); nothing else is.

    Raises:
      UserError: no finished folder, one that cannot be fetched, or files that are not those of its manifest.
    """
    remote = storage.path(folder)
    if not storage.is_remote(remote):
        return remote
    with storage.reported(remote):
        text = (remote / MANIFEST).read_bytes().decode() if (remote / MANIFEST).exists() else None
    storage.refuse_unfinished(remote)
    if text is None:
        raise UserError(f"{remote}: no prepared data here; make it with `prepare` first")
    local = storage.place(remote)
    with storage.locked(local):
        if not (local / MANIFEST).exists() or (local / MANIFEST).read_text(encoding="utf-8") != text:
            write_atomically(local / MANIFEST, text)
        wanted = files_of(read_manifest(local), split)

        def bring(name: str) -> None:
            def wrong(file: Path) -> str | None:
                return None if file.exists() and describe_file(file) == wanted[name] else "not what the manifest says"

            if wrong(local / name):
                storage.fetch_file(remote / name, local / name, wrong)

        storage.each(bring, wanted)
    return local


def files_of(manifest: Mapping[str, Any], split: str | None = None) -> dict[str, dict[str, Any]]:
    """Relative path -> size and digest, of one split or of the whole folder, tokenizer included."""
    files = {f"{TOKENIZER}/{name}": entry for name, entry in manifest["tokenizer"]["files"].items()}
    for name, entries in manifest["splits"].items():
        if split in (None, name):
            for shard in entries:
                files |= {f"{shard['name']}/{file}": entry for file, entry in shard["files"].items()}
    return files


def wrong_size(path: Path, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with a file's size, in words, if anything."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    if size != entry["bytes"]:
        return f"{path} has {size} bytes, the manifest says {entry['bytes']}"
    return None


def verify(folder: Path, split: str | None = None) -> list[str]:
    """Read every file and compare it with the manifest; returns what is wrong, in words, or an empty list."""
    problems = []
    for relative, entry in files_of(read_manifest(folder), split).items():
        path = folder / relative
        problem = wrong_size(path, entry)
        if problem is None and describe_file(path)["sha256"] != entry["sha256"]:
            problem = f"{path} has been changed: its SHA-256 is not the manifest's"
        if problem is not None:
            problems.append(problem)
    return problems


def entry_is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    """Whether the shard of a manifest entry lies in `folder` with the sizes and digests it should have."""
    return all(
        wrong_size(folder / entry["name"] / file, want) is None and describe_file(folder / entry["name"] / file) == want
        for file, want in entry["files"].items()
    )
