"""Download or convert a TFDS set so that it can be read without TensorFlow.

    python -m transformer_jax.tfds_prepare wikipedia/20230601.en --data-dir ~/tensorflow_datasets

For an environment of its own with the extra `tfds-prepare`: it needs TensorFlow, which training never does. A set that
is already there in another format (TFRecord, Parquet) is converted in its place, and the old files stay; any other is
downloaded and written as array_record.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.config import UserError


def prepare(name: str, data_dir: Path) -> Path:
    """Make the set `name` ("wikipedia/20230601.en") readable under `data_dir`; returns its folder.

    Raises:
      UserError: TensorFlow is not installed, or TFDS knows no such set.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            "this command needs TensorFlow, which is not installed here. In a separate environment: "
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
    if tfds.core.FileFormat.ARRAY_RECORD not in there.info.available_file_formats():
        convert_format_utils.convert_dataset(
            out_dir=None, out_file_format="array_record", dataset_version_dir=folder, num_workers=1
        )
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 after a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m transformer_jax.tfds_prepare", description=__doc__.split("\n")[0])
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
