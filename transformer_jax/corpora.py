"""Corpora: files named by a recipe, read as a stream of documents, each a list of sentences.

A recipe is a TOML file with one `[[sources]]` table for each kind of file. Nothing is read whole: text goes by blocks,
Parquet by batches of rows, TFDS by batches of records. Only LF or CRLF ends a line; a lone CR is a space; a byte order
mark at the start of a file is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib.util
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from transformer_jax import scripts
from transformer_jax.config import ConfigError, UserError, load, nearest, read_toml
from transformer_jax.sentences import split_sentences

BLOCK_BYTES = 1 << 20
RECORDS = 512
"""Rows of Parquet or records of TFDS read at once."""


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


@dataclasses.dataclass(frozen=True)
class _Input:
    """One file (or TFDS folder) to read, and what is known of it beforehand."""

    source: Source
    name: str
    path: Path
    sha256: str = ""
    size: int | None = None


def load_recipe(path: Path | str) -> Recipe:
    """The recipe in a TOML file, with its file names made absolute and its globs resolved.

    Raises:
      ConfigError: an unknown key (the nearest one is named), a wrong value, a file that is not there.
    """
    path = Path(path)
    recipe = load(Recipe, read_toml(path), str(path))
    try:
        sources = tuple(_absolute(s, path.absolute().parent) for s in recipe.sources)
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
        _check(item)
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
        _check(item)


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
            **({"sha256": _digest(item.path)} if digests else {}),
        }
        for item in _inputs(recipe)
    ]
    return {**{k: settings[k] for k in kept}, "inputs": inputs}


# --- which files


def _absolute(source: Source, folder: Path) -> Source:
    """The source with absolute file names, globs resolved, and a TFDS set found."""
    if source.format == "tfds":
        return dataclasses.replace(source, data_dir=str(_tfds_folder(source, folder)))
    files: list[str] = []
    names: dict[str, str] = {}
    for pattern in source.files:
        wanted = folder / Path(pattern).expanduser()
        if wanted.is_file():
            found = [wanted]
        elif wanted.is_dir():
            raise ConfigError(f"{wanted} is a folder; name the files in it, as in {Path(pattern) / '*.txt'}")
        elif glob.has_magic(pattern):
            start = Path(wanted.anchor)
            found = sorted(p for p in start.glob(str(wanted.relative_to(start))) if p.is_file())
            if not found:
                raise ConfigError(f"no file matches {wanted}")
        else:
            raise ConfigError(f"{wanted}: no such file{_near(wanted)}")
        for path in found:
            if str(path) in files:
                raise ConfigError(f"{path} is named twice in `files`")
            files.append(str(path))
            names[os.path.relpath(path, folder)] = names[str(path)] = str(path)
        names[pattern] = str(found[0])
    for table in (source.sha256, source.sizes):
        for name in table:
            if name not in names:
                raise ConfigError(
                    f"a digest or size is given for {name}, which is not among `files`{nearest(name, names)}"
                )
    return dataclasses.replace(
        source,
        files=tuple(files),
        sha256={names[k]: v.lower() for k, v in source.sha256.items()},
        sizes={names[k]: v for k, v in source.sizes.items()},
    )


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f" (and no folder {path.parent})"
    return nearest(path.name, names) if names else ""


def _inputs(recipe: Recipe) -> list[_Input]:
    found = []
    for source in recipe.sources:
        if source.format == "tfds":
            found.append(_Input(source, f"{source.dataset}:{source.split}", Path(source.data_dir)))
        for file in source.files:
            found.append(_Input(source, "", Path(file), source.sha256.get(file, ""), source.sizes.get(file)))
    # The least part of each path that tells the files apart.
    names = [item.name or item.path.name for item in found]
    depth = 1
    while len(set(names)) < len(names) and depth < 32:
        depth += 1
        twice = {n for n in names if names.count(n) > 1}
        names = [
            "/".join(i.path.parts[-depth:]) if n in twice and not i.name else n
            for i, n in zip(found, names, strict=True)
        ]
    return [dataclasses.replace(item, name=name) for item, name in zip(found, names, strict=True)]


def _check(item: _Input) -> None:
    """Size and digest, where the recipe gives them; a part of a file is not taken for the file."""
    if item.size is not None:
        size = _stat(item.path).st_size
        if size != item.size:
            raise UserError(f"{item.path} has {size} bytes and not the {item.size} the recipe says; get it again")
    if item.sha256 and _digest(item.path) != item.sha256:
        raise UserError(f"{item.path}: SHA-256 {_digest(item.path)} is not the recipe's {item.sha256}; get it again")


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None


def _digest(path: Path) -> str:
    """SHA-256 of a file, or over the names and digests of the files of a folder."""
    if not path.is_dir():
        found = _stat(path)
        return _digest_of(path, found.st_size, found.st_mtime_ns)
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(path).as_posix()} {_digest(file)}\n".encode())
    return whole.hexdigest()


@functools.lru_cache(maxsize=1 << 16)
def _digest_of(path: Path, size: int, changed_ns: int) -> str:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None


# --- lines


def lines(path: Path, encoding_errors: str = "strict") -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file (gzip if the name ends in .gz), numbered from 1, read by blocks.

    Raises:
      UserError: a file that is missing, cut short or broken, or bytes that are not UTF-8 (file, line and byte named).
    """
    number = 1
    rest: list[bytes] = []  # pieces of a line longer than a block
    try:
        with _open(path) as f:
            head = f.read(3)
            block = b"" if head == b"\xef\xbb\xbf" else head
            while True:
                more = f.read(BLOCK_BYTES)
                block += more
                end = block.rfind(b"\n") + 1 if more else len(block)
                if end or not more:
                    text = _decode(b"".join([*rest, block[:end]]), path, number, encoding_errors)
                    rest = [block[end:]]
                    found = _one_line_end(text).split("\n")
                    if found[-1] == "":
                        found.pop()
                    for line in found:
                        yield number, line
                        number += 1
                else:
                    rest.append(block)
                if not more:
                    return
                block = b""
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except EOFError:
        raise UserError(f"{path}: the gzip file ends too early (a part of it is missing); get it again") from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise UserError(f"{path}: not a whole gzip file: {e}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _one_line_end(text: str) -> str:
    """CRLF becomes LF, a lone CR a space."""
    return text.replace("\r\n", "\n").replace("\r", " ") if "\r" in text else text


def _decode(data: bytes, path: Path, first_line: int, errors: str) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as e:
        line = first_line + data.count(b"\n", 0, e.start)
        column = e.start - (data.rfind(b"\n", 0, e.start) + 1) + 1
        raise UserError(
            f"{path}: line {line} is not UTF-8: byte 0x{data[e.start]:02x} at byte {column} of the line; convert the "
            'file to UTF-8, or set `encoding_errors = "replace"` for this source'
        ) from None


# --- readers: (first line, sentences) of each document of an input


def _read_text(item: _Input) -> Iterator[tuple[int, list[str]]]:
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
        text = _one_line_end(part)
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


def _read_jsonl(item: _Input) -> Iterator[tuple[int, list[str]]]:
    key = item.source.key
    for number, line in lines(item.path, item.source.encoding_errors):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as e:  # the latter for brackets in brackets, very deep
            raise UserError(f"{item.path}: line {number} is not valid JSON: {e}") from None
        if not isinstance(record, dict):
            raise UserError(
                f"{item.path}: line {number} is not a JSON object; each line must be one, with the key {key!r}"
            )
        if key not in record:
            raise UserError(f"{item.path}: line {number} has no key {key!r}{nearest(key, record)}; set `key`")
        value = record[key]
        if value is None:
            continue
        listed = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if not (isinstance(value, str) or listed):
            raise UserError(f"{item.path}: line {number}: {key!r} is neither a text nor a list of texts")
        if sentences := _of_record(value, item.source):
            yield number, sentences


def _read_parquet(item: _Input) -> Iterator[tuple[int, list[str]]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{item.path}: Parquet needs the package pyarrow, which is not installed: pip install pyarrow")
    import pyarrow
    import pyarrow.parquet

    key = item.source.key
    _stat(item.path)
    try:
        with pyarrow.parquet.ParquetFile(item.path) as table:
            fields = table.schema_arrow
            if key not in fields.names:
                raise UserError(f"{item.path}: no column {key!r}{nearest(key, fields.names)}; set `key`")
            kind = fields.field(key).type
            inner = kind.value_type if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) else kind
            if not (pyarrow.types.is_string(inner) or pyarrow.types.is_large_string(inner)):
                raise UserError(f"{item.path}: column {key!r} holds {kind}; it must hold texts, or lists of texts")
            number = 0
            for batch in table.iter_batches(batch_size=RECORDS, columns=[key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if value is not None and (sentences := _of_record(value, item.source)):
                        yield number, sentences
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{item.path}: not a whole Parquet file: {e}") from None


def _read_tfds(item: _Input) -> Iterator[tuple[int, list[str]]]:
    source = item.source
    data, fields = _tfds_data(item)
    if not fields.get(source.key):
        texts = [name for name, is_text in fields.items() if is_text]
        what = f"feature {source.key!r} is not a text" if source.key in fields else f"no feature {source.key!r}"
        raise UserError(f"{source.dataset}: {what}{nearest(source.key, texts)}; set `key`")
    for start in range(0, len(data), RECORDS):
        try:
            records = data.__getitems__(range(start, min(start + RECORDS, len(data))))
        except Exception as e:  # the reader raises what its C++ part says, of many types
            raise UserError(f"{item.path}: records from {start + 1} on cannot be read: {e}") from None
        for i, record in enumerate(records):
            value = record[source.key]
            number = start + i + 1
            if not isinstance(value, bytes | str):
                raise UserError(f"{item.path}: record {number} cannot be read: a file is cut short or damaged")
            text = value if isinstance(value, str) else _record_text(value, item, number)
            if sentences := _of_record(text, source):
                yield number, sentences


def _record_text(value: bytes, item: _Input, number: int) -> str:
    try:
        return value.decode("utf-8", item.source.encoding_errors)
    except UnicodeDecodeError as e:
        raise UserError(
            f"{item.name}: record {number} is not UTF-8: byte 0x{value[e.start]:02x} at byte {e.start + 1}; "
            'set `encoding_errors = "replace"` for this source'
        ) from None


_READERS: Mapping[str, Any] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "tfds": _read_tfds,
}


# --- TFDS, read without TensorFlow


def _tfds_folder(source: Source, folder: Path) -> Path:
    """The folder of the prepared set: data_dir itself, or its newest version below data_dir/dataset."""
    root = folder / Path(source.data_dir or "~/tensorflow_datasets").expanduser()
    if (root / "dataset_info.json").is_file():
        return root
    below = root / source.dataset
    if (below / "dataset_info.json").is_file():
        return below
    versions = [p.parent for p in below.glob("*/dataset_info.json")]
    numbered = [p for p in versions if all(part.isdigit() for part in p.name.split("."))]
    if not numbered:
        raise ConfigError(
            f"the TFDS set {source.dataset} is not under {root} in a form that can be read without TensorFlow. "
            + _conversion(source.dataset, root)
        )
    return max(numbered, key=lambda p: [int(part) for part in p.name.split(".")])


def _tfds_data(item: _Input) -> tuple[Any, dict[str, bool]]:
    """The random-access records of a prepared array_record set, and its features: whether each is a text."""
    info_file = item.path / "dataset_info.json"
    try:
        info = msgspec.json.decode(info_file.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise UserError(f"{info_file}: cannot be read: {e}") from None
    found = info.get("fileFormat", "tfrecord")
    formats = {found, *info.get("alternativeFileFormats", [])}
    if "array_record" not in formats:
        root = item.path.parents[len(Path(item.source.dataset).parts)]
        raise UserError(
            f"{item.path}: this set is in the format {found}, which is not read without TensorFlow. "
            + _conversion(item.source.dataset, root)
        )
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(item.path)
        features = builder.info.features
        named = features.items() if isinstance(features, tfds.features.FeaturesDict) else ()
        fields = {name: isinstance(feature, tfds.features.Text) for name, feature in named}
        data = builder.as_data_source(item.source.split, file_format="array_record")
        return data, fields
    except Exception as e:  # of many types, for a split that is not there, a missing file, a broken one
        first = str(e).strip().split("\n")[0]
        raise UserError(f"{item.path}: split {item.source.split!r} cannot be read: {first}") from None


def _conversion(dataset: str, root: Path) -> str:
    return (
        "Make it so, once, in a separate environment that has the extra `tfds-prepare` (TensorFlow): "
        f"python -m transformer_jax.tfds_prepare {dataset} --data-dir {root}"
    )
