"""What a model card may tell of a run: its settings and sources, without the places of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without where things lay on the machine of the run, which is nobody's business."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found[key] = without_places(value)
        elif key not in ("run_dir", "prepared", "folder"):
            found[key] = place_name(value) if isinstance(value, str) else value
    return found


def place_name(text: str) -> str:
    """The last part of an absolute path; any other text as it is."""
    return Path(text).name if Path(text).is_absolute() else text
