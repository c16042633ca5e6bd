"""Sets of TensorFlow Datasets in array_record, found and read without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transformer_jax import storage
from transformer_jax.config import ConfigError, UserError, nearest
from transformer_jax.source_files import Input

RECORDS = 512
"""Records read at once."""


def find(dataset: str, data_dir: str, folder: Path, fetch: bool = True) -> Path:
    """The folder of the prepared set: data_dir itself, or its newest version below data_dir/dataset.

    A set in storage is copied to this machine, all its splits, since array_record files are read at random.

    Args:
      folder: what a relative data_dir is relative to.
      fetch: without it a set in storage is an error.

    Raises:
      ConfigError: it is not there; the message names the command that makes it.
    """
    if storage.is_remote(data_dir):
        root = storage.path(data_dir)
    else:
        local = Path(data_dir or "~/tensorflow_datasets").expanduser()
        root = local if local.is_absolute() else folder / local
    if storage.is_remote(root) and not fetch:
        raise ConfigError(f"{root} is in storage")
    with storage.reported(root):
        return storage.fetch(_version(root, dataset))


def _version(root: Path, dataset: str) -> Path:
    if (root / "dataset_info.json").is_file():
        return root
    below = root / dataset
    if (below / "dataset_info.json").is_file():
        return below
    versions = [p.parent for p in below.glob("*/dataset_info.json")]
    numbered = [p for p in versions if all(part.isdigit() for part in p.name.split("."))]
    if not numbered:
        raise ConfigError(
            f"the TFDS set {dataset} is not under {root} in a form that can be read without TensorFlow. "
            + _conversion(dataset, root)
        )
    return max(numbered, key=lambda p: [int(part) for part in p.name.split(".")])


def texts(item: Input, keys: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The texts of these features of each record, with the record's number from 1.

    Args:
      item: its source has `dataset`, `split` and `encoding_errors`.

    Raises:
      UserError: a feature that is not there or is no text, or a set that cannot be read.
    """
    source = item.source
    data, features = opened(item)
    import tensorflow_datasets as tfds

    fields = {name: isinstance(feature, tfds.features.Text) for name, feature in features.items()}
    for key in keys:
        if not fields.get(key):
            known = [name for name, is_text in fields.items() if is_text]
            what = f"feature {key!r} is not a text" if key in fields else f"no feature {key!r}"
            raise UserError(f"{source.dataset}: {what}; set `key`{nearest(key, known)}")
    for number, record in numbered(data, item):
        yield number, [text(record[key], item, number) for key in keys]


def numbered(data: Any, item: Input) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of what `opened` gave, with their numbers from 1."""
    for start in range(0, len(data), RECORDS):
        try:
            records = data.__getitems__(range(start, min(start + RECORDS, len(data))))
        except Exception as e:  # the reader raises what its C++ part says, of many types
            raise UserError(f"{item.path}: records from {start + 1} on cannot be read: {e}") from None
        yield from enumerate(records, start + 1)


def text(value: Any, item: Input, number: int) -> str:
    """The value of a text feature, which comes as bytes; anything but UTF-8 is a UserError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise UserError(f"{item.path}: record {number} cannot be read: a file is cut short or damaged")
    try:
        return value.decode("utf-8", item.source.encoding_errors)
    except UnicodeDecodeError as e:
        raise UserError(
            f"{item.name}: record {number} is not UTF-8: byte 0x{value[e.start]:02x} at byte {e.start + 1}; "
            'set `encoding_errors = "replace"` for this source'
        ) from None


def opened(item: Input) -> tuple[Any, dict[str, Any]]:
    """The random-access records of a split of a prepared array_record set, and the set's features by name.

    Args:
      item: its source has `dataset` and `split`.

    Raises:
      UserError: a set of another format, or one that cannot be read.
    """
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
        named = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
        return builder.as_data_source(item.source.split, file_format="array_record"), named
    except Exception as e:  # of many types, for a split that is not there, a missing file, a broken one
        first = str(e).strip().split("\n")[0]
        raise UserError(f"{item.path}: split {item.source.split!r} cannot be read: {first}") from None


def _conversion(dataset: str, root: Path) -> str:
    return (
        "Make it so, once, in a separate environment that has the extra `tfds-prepare` (TensorFlow): "
        f"python -m transformer_jax.tfds_prepare {dataset} --data-dir {root}"
    )
