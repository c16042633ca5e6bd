"""A TFDS set of five articles."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def make_articles(root: Path, file_format: str) -> Path:
    """A set of five articles, written by TFDS itself, without TensorFlow."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class Articles(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
            VERSION = tfds.core.Version("1.2.0")

            def _info(self) -> object:
                features = tfds.features.FeaturesDict(
                    {"text": tfds.features.Text(), "title": tfds.features.Text(), "id": np.int64}
                )
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, dl_manager: object) -> object:
                return {"train": self._generate_examples()}

            def _generate_examples(self) -> Iterator[tuple[int, dict[str, object]]]:
                for i in range(5):
                    yield (
                        i,
                        {"text": f"Article {i} é.\nSecond line. It goes on.\n\nNext.", "title": f"Title {i}", "id": i},
                    )

    Articles(data_dir=root, file_format=file_format).download_and_prepare()
    return root
