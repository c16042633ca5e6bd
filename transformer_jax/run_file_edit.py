"""Setting values in a run file while its comments and its order stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from transformer_jax.config import UserError

HEADING = re.compile(r"^\s*\[([\w.\-]+)\]\s*(?:#.*)?$")
ENTRY = re.compile(r"^(\s*)([\w\-]+)(\s*=\s*)([^#\"']*|\"[^\"]*\"|'[^']*')(\s*#.*)?$")


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """The text of a TOML file with other values of some keys.

    Args:
      values: dotted keys `section.key` with numbers, booleans or strings.

    Raises:
      UserError: the file is written in a way that this does not understand; nothing is guessed.
    """
    wanted = tomllib.loads(text)
    lines = text.splitlines()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        lines = _set(lines, section, name, msgspec.json.encode(value).decode())
        inner = wanted
        for part in section.split(".") if section else ():
            inner = inner.setdefault(part, {})
        inner[name] = value
    new = "\n".join(lines) + "\n"
    try:
        right = tomllib.loads(new) == wanted
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise UserError("the file is laid out in a way that cannot be edited; set by hand: " + ", ".join(values))
    return new


def set_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write a run file anew with other values of some keys; see `with_values`."""
    try:
        new = with_values(path.read_text(encoding="utf-8-sig"), values)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(new, encoding="utf-8")
    temporary.replace(path)


def _set(lines: list[str], section: str, name: str, value: str) -> list[str]:
    first, end = _bounds(lines, section)
    if first is None:
        return [*lines, *([""] if lines and lines[-1].strip() else []), f"[{section}]", f"{name} = {value}"]
    last = first
    for i in range(first, end):
        entry = ENTRY.match(lines[i])
        if entry and entry.group(2) == name:
            spaces, key, equals, _, comment = entry.groups()
            return [*lines[:i], f"{spaces}{key}{equals}{value}{comment or ''}", *lines[i + 1 :]]
        if lines[i].strip() and not lines[i].lstrip().startswith("#"):
            last = i + 1
    return [*lines[:last], f"{name} = {value}", *lines[last:]]


def _bounds(lines: list[str], section: str) -> tuple[int | None, int]:
    """Lines of a section, behind its heading; the file's own top is the section ""."""
    headings = [(i, m.group(1)) for i, line in enumerate(lines) if (m := HEADING.match(line))]
    first = 0 if not section else next((i + 1 for i, name in headings if name == section), None)
    end = next((i for i, _ in headings if first is not None and i >= first), len(lines))
    return first, end
