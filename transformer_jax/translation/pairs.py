"""Pairs: two aligned files, TSV, JSON lines, Parquet or TFDS, named by a recipe and read as a stream.

A recipe is a TOML file with one `[[sources]]` table for each kind of file, as for documents (`corpora.py`). A side of a
pair is one line: white space around it goes, and a line end inside a record is a space.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from transformer_jax import records, source_files, storage, tfds_source
from transformer_jax.config import ConfigError, UserError, load, read_toml
from transformer_jax.lines import lines, one_line_end
from transformer_jax.source_files import Input

SPLITS = ("train", "validation", "test")
KEYS = "source_key` and `target_key"
"""What a message about a field that is not there tells the user to set."""


@dataclasses.dataclass(frozen=True)
class PairSource:
    """Files of one format, read alike."""

    name: str = ""
    format: Literal["lines", "tsv", "jsonl", "parquet", "tfds"] = "lines"
    """lines: two files, of which line n and line n are a pair. The others hold both sides of a pair in one record."""
    source: tuple[str, ...] = ()
    """lines: paths or globs (each sorted by name) of the source side, relative to the recipe ..."""
    target: tuple[str, ...] = ()
    """... and as many of the target side, in the same order. A name that ends in .gz is read through gzip."""
    files: tuple[str, ...] = ()
    """tsv, jsonl, parquet: paths or globs."""
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """File, as named above or as a glob finds it, to the digest it must have."""
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Likewise the size it must have, as it lies on disk."""
    source_key: str = ""
    """jsonl, parquet, tfds: the field of the source side (`translation.en` is a field in a field); by default the
    recipe's source_language."""
    target_key: str = ""
    source_column: int = 1
    """tsv: the number of the column, from 1."""
    target_column: int = 2
    use: Literal["", "train", "validation", "test"] = ""
    """The split that all its pairs belong to; by default the hash of a pair decides, as the recipe's shares say."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """replace puts U+FFFD for bytes that are not UTF-8."""
    dataset: str = ""
    """tfds: its name, such as "wmt14_translate/de-en"."""
    data_dir: str = ""
    """tfds: the folder that holds it, relative to the recipe; ~/tensorflow_datasets without it."""
    split: str = "train"
    """tfds: the split of the set, slices such as "train[:10%]" included."""

    def __post_init__(self) -> None:
        if self.format == "lines":
            if not self.source or not self.target or self.files:
                raise ConfigError(
                    "a source of two aligned files needs `source` and `target`, lists of paths or globs"
                    + ('; with `files`, `format` must be "tsv", "jsonl" or "parquet"' if self.files else "")
                )
        elif self.source or self.target:
            raise ConfigError(f'a {self.format} source does not name `source` and `target`; those go with "lines"')
        if self.format == "tfds":
            if not self.dataset or self.files:
                raise ConfigError('a tfds source names `dataset` (and `data_dir`), not `files`; see "data/README.md"')
        elif self.format != "lines" and not self.files:
            raise ConfigError(f"a {self.format} source needs `files`: a list of paths or globs")
        if self.source_column < 1 or self.target_column < 1 or self.source_column == self.target_column:
            raise ConfigError(
                f"source_column is {self.source_column} and target_column {self.target_column}; they are two different "
                "numbers, the first column being 1"
            )


@dataclasses.dataclass(frozen=True)
class PairRecipe:
    """Pairs of two languages: their sources, and what is kept from training."""

    name: str = ""
    description: str = ""
    license: str = ""
    source_language: str = ""
    """Codes such as "en" and "de"."""
    target_language: str = ""
    validation: float = 0.0
    """Share of the pairs of sources without `use` that go into this split, by a hash of their source side ..."""
    test: float = 0.0
    """... and into this one."""
    sources: tuple[PairSource, ...] = ()

    def __post_init__(self) -> None:
        for name in ("validation", "test"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it is a share of the pairs, at least 0 and below 1"
                )
        if self.validation + self.test >= 1.0:
            raise ConfigError(f"validation {self.validation} and test {self.test} leave no pair for training")
        if not self.sources:
            raise ConfigError("a recipe needs at least one [[sources]] table")
        if not any(source.use in ("", "train") for source in self.sources):
            raise ConfigError("no source of the recipe is for training: each has `use` set to another split")
        for source in self.sources:
            if source.format in ("jsonl", "parquet", "tfds"):
                for side in ("source", "target"):
                    if not (getattr(source, f"{side}_key") or getattr(self, f"{side}_language")):
                        raise ConfigError(
                            f"a {source.format} source needs {side}_key, or the recipe {side}_language: the field that "
                            "holds this side"
                        )


class Pair(NamedTuple):
    """One pair.

    Attributes:
      input: index of its input over the whole recipe.
      line: number of its line or record, from 1.
      source, target: without white space around them; either may be empty.
    """

    input: int
    line: int
    source: str
    target: str


def load_recipe(path: Path | str, fetch: bool = True) -> PairRecipe:
    """The recipe in a TOML file, with its file names made absolute and its globs resolved.

    Args:
      fetch: copy files in storage (`gs://`) to this machine; without it they are an error.

    Raises:
      ConfigError: an unknown key (the nearest one is named), a wrong value, a file that is not there, or not as many
        files of the one side as of the other.
    """
    path = storage.path(path)
    found = read_toml(path)
    if "language" in found or "heldout" in found:
        raise ConfigError(
            f"{path} is a recipe of documents; a recipe of pairs is needed here, such as data/pairs_*.toml"
        )
    recipe = load(PairRecipe, found, str(path))
    try:
        sources = tuple(_absolute(s, recipe, storage.absolute(path).parent, fetch) for s in recipe.sources)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    return dataclasses.replace(recipe, name=recipe.name or path.stem, sources=sources)


def read(recipe: PairRecipe, malformed: Callable[[str, int], None] | None = None) -> Iterator[Pair]:
    """All pairs of a recipe, empty sides included, in the order of its files; memory does not grow with their number.

    Args:
      malformed: called with the input's name and the line number for a line of a TSV file that has too few columns, or
        a record with nothing on a side; without it, such a line is an error. (Two aligned files have none.)

    Raises:
      UserError: an input that cannot be read, is not what its digest or size says, is not UTF-8, or has other than two
        sides of equally many lines.
    """
    for index, items in enumerate(_inputs(recipe)):
        for item in items:
            source_files.check(item)
        for number, sides in _READERS[items[0].source.format](items):
            if sides is None:
                if malformed is None:
                    raise UserError(f"{items[0].path}: line {number} does not have both sides of a pair")
                malformed(items[0].name, number)
                continue
            yield Pair(index, number, _one_line(sides[0]), _one_line(sides[1]))


def _one_line(side: str) -> str:
    if "\n" in side or "\r" in side:
        side = one_line_end(side).replace("\n", " ")
    return side.strip()


def check(recipe: PairRecipe) -> None:
    """Compare every file with the size and digest that the recipe gives.

    Raises:
      UserError: an input that is not what they say.
    """
    for items in _inputs(recipe):
        for item in items:
            source_files.check(item)


def input_names(recipe: PairRecipe) -> list[str]:
    """The names of the inputs, in the order that `Pair.input` counts: of two aligned files, that of the source side."""
    return [items[0].name for items in _inputs(recipe)]


def input_uses(recipe: PairRecipe) -> list[str]:
    """For each input, the split its pairs belong to, or "" where the hash of a pair decides."""
    return [items[0].source.use for items in _inputs(recipe)]


def describe(recipe: PairRecipe, digests: bool = True) -> dict[str, Any]:
    """All that decides which pairs come, as JSON without paths of this machine: settings, and digests of files.

    The files are read once for their digests, or not at all without them.
    """
    settings = msgspec.to_builtins(recipe)
    kept = ("source_language", "target_language", "validation", "test")
    per_source = ("format", "source_key", "target_key", "source_column", "target_column", "use", "encoding_errors",
                  "dataset", "split")  # fmt: skip
    inputs = {
        "+".join(item.name for item in items): {
            **{k: msgspec.to_builtins(items[0].source)[k] for k in per_source},
            **({"sha256": [source_files.digest(item.path) for item in items]} if digests else {}),
        }
        for items in _inputs(recipe)
    }
    return {**{k: settings[k] for k in kept}, "inputs": inputs, "order": list(inputs)}


# --- which files


def _absolute(source: PairSource, recipe: PairRecipe, folder: Path, fetch: bool) -> PairSource:
    """The source with absolute file names, globs resolved, keys filled in, and a TFDS set found."""
    source = dataclasses.replace(
        source,
        source_key=source.source_key or recipe.source_language,
        target_key=source.target_key or recipe.target_language,
    )
    if source.format == "tfds":
        found = tfds_source.find(source.dataset, source.data_dir, folder, fetch)
        return dataclasses.replace(source, data_dir=str(found))
    if source.format != "lines":
        return dataclasses.replace(
            source, **source_files.find(source.files, source.sha256, source.sizes, folder, fetch)._asdict()
        )
    both = source_files.find((*source.source, *source.target), source.sha256, source.sizes, folder, fetch)
    count = len(source_files.find(source.source, {}, {}, folder, fetch).files)
    sides = both.files[:count], both.files[count:]
    if len(sides[0]) != len(sides[1]):
        raise ConfigError(
            f"{len(sides[0])} files are found for `source` and {len(sides[1])} for `target`: "
            f"{', '.join(Path(f).name for f in sides[0])}; {', '.join(Path(f).name for f in sides[1])}"
        )
    return dataclasses.replace(source, source=sides[0], target=sides[1], sha256=both.sha256, sizes=both.sizes)


def _inputs(recipe: PairRecipe) -> list[tuple[Input, ...]]:
    """What is read one after another: single files, pairs of aligned files, TFDS sets."""
    groups: list[list[Input]] = []
    for source in recipe.sources:
        if source.format == "tfds":
            groups.append([Input(source, f"{source.dataset}:{source.split}", Path(source.data_dir))])
            continue
        names = [(f,) for f in source.files] if source.files else zip(source.source, source.target, strict=True)
        groups += [
            [Input(source, "", Path(f), source.sha256.get(f, ""), source.sizes.get(f)) for f in files]
            for files in names
        ]
    flat = iter(source_files.named([item for group in groups for item in group]))
    return [tuple(next(flat) for _ in group) for group in groups]


# --- readers: number and both sides of each pair, or None where a line does not have them

Sides = tuple[str, str] | None


def _read_lines(items: tuple[Input, ...]) -> Iterator[tuple[int, Sides]]:
    sides = [lines(item.path, item.source.encoding_errors) for item in items]
    number = 0
    while True:
        one, other = (next(side, None) for side in sides)
        if one is None and other is None:
            return
        if one is None or other is None:
            counts = [number, number]
            counts[one is None] = number + 1 + sum(1 for _ in sides[one is None])
            raise UserError(
                f"{items[0].path} has {counts[0]:,} lines and {items[1].path} has {counts[1]:,}; line n of the one "
                "must be the translation of line n of the other, so both need as many"
            )
        number += 1
        yield number, (one[1], other[1])


def _read_tsv(items: tuple[Input, ...]) -> Iterator[tuple[int, Sides]]:
    """Quotes are characters like others."""
    (item,) = items
    first, second = item.source.source_column - 1, item.source.target_column - 1
    for number, line in lines(item.path, item.source.encoding_errors):
        columns = line.split("\t")
        if len(columns) > max(first, second):
            yield number, (columns[first], columns[second])
        elif line.strip():
            yield number, None


def _of_record(item: Input, number: int, values: list[Any]) -> Sides:
    for key, value in zip(_keys(item), values, strict=True):
        if value is None:
            return None
        if not isinstance(value, str):
            raise UserError(f"{item.path}: line {number}: {key!r} is not a text")
    return values[0], values[1]


def _keys(item: Input) -> tuple[str, str]:
    return item.source.source_key, item.source.target_key


def _read_jsonl(items: tuple[Input, ...]) -> Iterator[tuple[int, Sides]]:
    (item,) = items
    for number, values in records.from_jsonl(item, _keys(item), KEYS):
        yield number, _of_record(item, number, values)


def _read_parquet(items: tuple[Input, ...]) -> Iterator[tuple[int, Sides]]:
    (item,) = items
    for number, values in records.from_parquet(item, _keys(item), lists=False, setting=KEYS):
        yield number, _of_record(item, number, values)


def _read_tfds(items: tuple[Input, ...]) -> Iterator[tuple[int, Sides]]:
    (item,) = items
    for number, values in tfds_source.texts(item, _keys(item)):
        yield number, (values[0], values[1])


_READERS: Mapping[str, Any] = {
    "lines": _read_lines,
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "tfds": _read_tfds,
}
