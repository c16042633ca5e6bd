"""Corpora: files named by a recipe, read as a stream of documents, each a list of sentences.

A recipe is a TOML file with one `[[sources]]` table for each kind of file. Nothing is read whole: text goes by blocks,
Parquet by batches of rows, TFDS by batches of records. Only LF or CRLF ends a line; a lone CR is a space; a byte order
mark at the start of a file is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from transformer_jax import records, scripts, source_files, storage, tfds_source
from transformer_jax.config import ConfigError, UserError, load, read_toml
from transformer_jax.lines import lines, one_line_end
from transformer_jax.sentences import split_sentences
from transformer_jax.source_files import Input


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of one format, read alike."""

    name: str = ""
    format: Literal["text", "jsonl", "parquet", "tfds"] = "text"
    """text: documents as `documents` says. jsonl, parquet, tfds: a record is a document."""
    files: tuple[str, ...] = ()
    """Paths or globs (each sorted by name), relative to the recipe. A name that ends in .gz is read through gzip."""
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """File, as in `files` or as a glob finds it, to the digest it must have."""
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Likewise the size it must have, as it lies on disk."""
    documents: Literal["blank", "file"] = "blank"
    """text: a blank line (or several, of white space only) ends a document, or each file is one, held in memory."""
    sentences: Literal["lines", "split", "unwrap"] = "lines"
    """A line is a sentence; or a paragraph that is split into sentences; or (unwrap) lines up to the next blank one are
    joined before they are split, for text wrapped at a fixed width."""
    words: Literal["", "spaces"] = ""
    """spaces: the text is segmented, and its spaces mark the words that whole-word masking takes as one."""
    key: str = "text"
    """jsonl, parquet, tfds: the field that holds the text, or (jsonl) a list of sentences."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """replace puts U+FFFD for bytes that are not UTF-8, which BERT's tokenizer then drops."""
    dataset: str = ""
    """tfds: its name, such as "wikipedia/20230601.en"."""
    data_dir: str = ""
    """tfds: the folder that holds it (the TFDS data_dir), relative to the recipe; ~/tensorflow_datasets without it."""
    split: str = "train"
    """tfds: the split, slices such as "train[:10%]" included."""

    def __post_init__(self) -> None:
        if self.format == "tfds":
            if not self.dataset or self.files:
                raise ConfigError('a tfds source names `dataset` (and `data_dir`), not `files`; see "data/README.md"')
        elif not self.files:
            raise ConfigError(f"a {self.format} source needs `files`: a list of paths or globs")
        if self.words and self.sentences != "lines":
            raise ConfigError('`words = "spaces"` needs `sentences = "lines"`: segmented text is not split again')


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A corpus: its sources, and how much of it is held out."""

    name: str = ""
    description: str = ""
    license: str = ""
    language: str = ""
    heldout: float = 0.02
    """Share of documents, chosen by a hash of their content, that are kept from training for evaluation."""
    pre_splitter: str = ""
    """For writing without spaces: "characters" (Thai, Lao, Khmer, Burmese) or "jieba" (Chinese words, extra zh)."""
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.heldout < 1.0:
            raise ConfigError(f"heldout is {self.heldout}; it is a share of the documents, at least 0 and below 1")
        if not self.sources:
            raise ConfigError("a recipe needs at least one [[sources]] table")
        if self.pre_splitter:
            scripts.pre_splitter(self.pre_splitter)


@dataclasses.dataclass
class Document:
    """One document.

    Attributes:
      source: index of its input file, over the whole recipe.
      line: number of its first line (jsonl, parquet, tfds: of its record), from 1.
      sentences: none of them blank, without white space around them.
    """

    source: int
    line: int
    sentences: list[str]


def load_recipe(path: Path | str, fetch: bool = True) -> Recipe:
    """The recipe in a TOML file, with its file names made absolute and its globs resolved.

    Args:
      fetch: copy files in storage (`gs://`) to this machine; without it they are an error.

    Raises:
      ConfigError: an unknown key (the nearest one is named), a wrong value, a file that is not there.
    """
    path = storage.path(path)
    found = read_toml(path)
    if "source_language" in found or "target_language" in found:
        raise ConfigError(f"{path} is a recipe of pairs, for translation; a recipe of documents is needed here")
    recipe = load(Recipe, found, str(path))
    try:
        sources = tuple(_absolute(s, storage.absolute(path).parent, fetch) for s in recipe.sources)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    return dataclasses.replace(recipe, name=recipe.name or path.stem, sources=sources)


def documents(recipe: Recipe) -> Iterator[Document]:
    """All documents of a recipe, in the order of its files; memory does not grow with the corpus.

    Raises:
      UserError: an input that cannot be read, is not what its digest or size says, or is not UTF-8; no documents.
    """
    inputs = _inputs(recipe)
    empty = True
    for index, item in enumerate(inputs):
        source_files.check(item)
        for line, sentences in _READERS[item.source.format](item):
            empty = False
            yield Document(index, line, sentences)
    if empty:
        raise UserError(f"the corpus is empty: no document in {', '.join(str(i.path) for i in inputs)}")


def check(recipe: Recipe) -> None:
    """Compare every file with the size and digest that the recipe gives.

    Raises:
      UserError: an input that is not what they say.
    """
    for item in _inputs(recipe):
        source_files.check(item)


def source_names(recipe: Recipe) -> list[str]:
    """The names of the input files, in the order that `Document.source` counts."""
    return [item.name for item in _inputs(recipe)]


def word_sources(recipe: Recipe) -> list[bool]:
    """For each input file, whether the spaces in it mark words."""
    return [item.source.words == "spaces" for item in _inputs(recipe)]


def describe(recipe: Recipe, digests: bool = True) -> dict[str, Any]:
    """All that decides which documents come, as JSON without paths of this machine: settings, and digests of files.

    The files are read once for their digests, or not at all without them.
    """
    settings = msgspec.to_builtins(recipe)
    kept = ("heldout", "pre_splitter")
    per_source = ("format", "documents", "sentences", "words", "key", "encoding_errors", "dataset", "split")
    inputs = [
        {
            **{k: msgspec.to_builtins(item.source)[k] for k in per_source},
            "name": item.name,
            **({"sha256": source_files.digest(item.path)} if digests else {}),
        }
        for item in _inputs(recipe)
    ]
    return {**{k: settings[k] for k in kept}, "inputs": inputs}


# --- which files


def _absolute(source: Source, folder: Path, fetch: bool) -> Source:
    """The source with absolute file names, globs resolved, and a TFDS set found."""
    if source.format == "tfds":
        found = tfds_source.find(source.dataset, source.data_dir, folder, fetch)
        return dataclasses.replace(source, data_dir=str(found))
    files = source_files.find(source.files, source.sha256, source.sizes, folder, fetch)
    return dataclasses.replace(source, **files._asdict())


def _inputs(recipe: Recipe) -> list[Input]:
    found = []
    for source in recipe.sources:
        if source.format == "tfds":
            found.append(Input(source, f"{source.dataset}:{source.split}", Path(source.data_dir)))
        for file in source.files:
            found.append(Input(source, "", Path(file), source.sha256.get(file, ""), source.sizes.get(file)))
    return source_files.named(found)


# --- readers: (first line, sentences) of each document of an input


def _read_text(item: Input) -> Iterator[tuple[int, list[str]]]:
    one_document = item.source.documents == "file"
    unwrap = item.source.sentences == "unwrap"
    first = 0
    sentences: list[str] = []
    paragraph: list[str] = []
    for number, line in lines(item.path, item.source.encoding_errors):
        line = line.strip()
        if line:
            first = first or number
            if unwrap:
                paragraph.append(line)
            else:
                sentences += _sentences(line, item.source)
            continue
        if paragraph:
            sentences += split_sentences(_joined(paragraph))
            paragraph = []
        if sentences and not one_document:
            yield first, sentences
            first, sentences = 0, []
    if paragraph:
        sentences += split_sentences(_joined(paragraph))
    if sentences:
        yield first, sentences


def _sentences(line: str, source: Source) -> list[str]:
    """The sentences of one line without white space around it."""
    return [line] if source.sentences == "lines" else split_sentences(line)


def _joined(wrapped: Sequence[str]) -> str:
    """Lines of one paragraph as running text: with a space, but between Chinese or Japanese characters without."""
    text = wrapped[0]
    for line in wrapped[1:]:
        text += ("" if text[-1] > "\u2e7f" and line[0] > "\u2e7f" else " ") + line
    return text


def _of_record(value: Any, source: Source) -> list[str]:
    """The sentences of a record: of its text, line by line, or of its list of sentences."""
    parts = value if isinstance(value, list) else [value]
    found = []
    for part in parts:
        text = one_line_end(part)
        if source.sentences == "unwrap":
            for paragraph in _paragraphs(text):
                found += split_sentences(_joined(paragraph))
            continue
        # An element of a list is one line already.
        pieces = [text.replace("\n", " ")] if isinstance(value, list) else text.split("\n")
        for line in pieces:
            if line := line.strip():
                found += _sentences(line, source)
    return found


def _paragraphs(text: str) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line := line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _read_jsonl(item: Input) -> Iterator[tuple[int, list[str]]]:
    key = item.source.key
    for number, (value,) in records.from_jsonl(item, [key]):
        if value is None:
            continue
        listed = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if not (isinstance(value, str) or listed):
            raise UserError(f"{item.path}: line {number}: {key!r} is neither a text nor a list of texts")
        if sentences := _of_record(value, item.source):
            yield number, sentences


def _read_parquet(item: Input) -> Iterator[tuple[int, list[str]]]:
    for number, (value,) in records.from_parquet(item, [item.source.key], lists=True):
        if value is not None and (sentences := _of_record(value, item.source)):
            yield number, sentences


def _read_tfds(item: Input) -> Iterator[tuple[int, list[str]]]:
    for number, (text,) in tfds_source.texts(item, [item.source.key]):
        if sentences := _of_record(text, item.source):
            yield number, sentences


_READERS: Mapping[str, Any] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "tfds": _read_tfds,
}
