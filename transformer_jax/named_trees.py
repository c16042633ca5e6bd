"""Trees as nested dictionaries of arrays named by their path: `params/pooler/bias`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax


def named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names of the leaves, the leaves, and the structure that puts them together again."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(_key(k) for k in path) for path, _ in with_paths]
    assert names and len(set(names)) == len(names), f"no leaves, or two of one name: {names}"
    return names, [leaf for _, leaf in with_paths], treedef


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):  # Dict entries, named tuples and dataclasses, lists and tuples.
        if hasattr(key, attribute):
            text = str(getattr(key, attribute))
            assert text and not set(text) & set("/."), f"{text!r} cannot name an array"
            return text
    raise AssertionError(f"unknown kind of tree key: {key!r}")


def named_tree(tree: Any) -> dict[str, Any]:
    """Any tree as nested dictionaries by the names of its leaves."""
    names, leaves, _ = named_leaves(tree)
    return nest(zip(names, leaves, strict=True))


def nest(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dictionaries from `a/b/c` names and what they name."""
    out: dict[str, Any] = {}
    for name, leaf in named:
        *parents, last = name.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return out


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The way back from `nest`: one dictionary of `a/b/c` names."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return out
