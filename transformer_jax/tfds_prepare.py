"""Download or convert a TFDS set so that it can be read without TensorFlow.

    python -m transformer_jax.tfds_prepare wikipedia/20230601.en --data-dir ~/tensorflow_datasets

For an environment of its own with the extra `tfds-prepare`: it needs TensorFlow and Apache Beam, which training never
does. A set that is already there in another format (TFRecord, Parquet) is converted in its place, and the old files
stay; any other is downloaded and written as array_record.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.config import UserError


def prepare(name: str, data_dir: Path) -> Path:
    """Make the set `name` ("wikipedia/20230601.en") readable under `data_dir`; returns its folder.

    Raises:
      UserError: TensorFlow or Apache Beam is not installed, or TFDS knows no such set.
    """
    missing = [p for p in ("tensorflow", "apache_beam") if importlib.util.find_spec(p) is None]
    if missing:
        raise UserError(
            f"this command needs {' and '.join(missing)}, which this environment lacks. In a separate environment: "
            "pip install 'bert-transformer-jax[tfds-prepare]', then run the same command again"
        )
    import tensorflow_datasets as tfds
    from tensorflow_datasets.scripts.cli import convert_format_utils

    try:
        there = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as e:
        raise UserError(f"TFDS knows no set {name!r}: {str(e).splitlines()[0]}") from None
    folder = Path(there.data_dir)
    if not there.is_prepared():
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare()
        return Path(builder.data_dir)
    if tfds.core.FileFormat.ARRAY_RECORD in there.info.available_file_formats():
        return folder
    if there.info.file_format is tfds.core.FileFormat.PARQUET:
        copy_parquet(folder)
    else:
        convert_format_utils.convert_dataset(
            out_dir=None, out_file_format="array_record", dataset_version_dir=[folder], num_workers=1
        )
    return folder


def copy_parquet(folder: Path) -> None:
    """Write the records of a set's Parquet files as array_record beside them; TFDS's own conversion cannot read these.

    Both hold the same serialised examples, Parquet in a column `data`.
    """
    import pyarrow.parquet
    from array_record.python.array_record_module import ArrayRecordWriter

    for file in sorted(folder.glob("*.parquet-*-of-*")):
        target = file.with_name(file.name.replace(".parquet-", ".array_record-"))
        writer = ArrayRecordWriter(str(target), "group_size:1")
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=512, columns=["data"]):
                for record in batch.column(0).to_pylist():
                    writer.write(record)
        writer.close()
    info_file = folder / "dataset_info.json"
    info = json.loads(info_file.read_text(encoding="utf-8"))
    info["alternativeFileFormats"] = [*info.get("alternativeFileFormats", []), "array_record"]
    written = info_file.with_suffix(".new")
    written.write_text(json.dumps(info, indent=2), encoding="utf-8")
    written.replace(info_file)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 after a mistake of the user."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer_jax.tfds_prepare", description="Make a TFDS set readable without TensorFlow."
    )
    parser.add_argument("name", help="the set, such as wikipedia/20230601.en or wmt14_translate/de-en")
    parser.add_argument("--data-dir", type=Path, default=Path("~/tensorflow_datasets"), help="where sets are kept")
    given = parser.parse_args(arguments)
    try:
        folder = prepare(given.name, given.data_dir.expanduser())
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
