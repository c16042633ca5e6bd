"""TensorFlow's checkpoint files: read as written, damage found, nothing trusted."""

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from transformer_jax import crc32c as crc
from transformer_jax.config import UserError
from transformer_jax.crc32c import crc32c, masked, unmasked
from transformer_jax.snappy import SnappyError, decompress
from transformer_jax.tensor_bundle import open_bundle

GOLDEN = Path(__file__).parent / "golden"


def golden_maker():
    """The script that made the files, for the values it gave them."""
    spec = importlib.util.spec_from_file_location("make_tf1", GOLDEN / "make_tf1.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tf1"] = module
    spec.loader.exec_module(module)
    return module


make_tf1 = golden_maker()


@pytest.mark.parametrize("kind", ["one", "two", "snappy"])
def test_every_tensor_is_the_one_that_tensorflow_saved(kind):
    bundle = open_bundle(GOLDEN / "tf1" / kind / "bert_model.ckpt")
    assert bundle.shards == (2 if kind == "two" else 1)
    shapes = make_tf1.shapes()
    assert bundle.entries.keys() == shapes.keys() | make_tf1.slots().keys()
    for name, shape in shapes.items():
        np.testing.assert_array_equal(bundle.read(name), make_tf1.value(name, shape), strict=True)
    step = bundle.read("global_step")
    assert step == 1000 and step.dtype == np.int64 and step.shape == ()


def test_checksums_are_castagnolis_for_any_length():
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA
    data = np.random.default_rng(0).bytes((1 << 20) + 4099)
    for size in (1, crc._SMALL - 1, crc._SMALL, 4096, 4097, 100_001, len(data)):
        assert crc32c(data[:size]) == crc._start(data[:size]) ^ 0xFFFFFFFF, size
    assert unmasked(masked(0xE3069283)) == 0xE3069283 != masked(0xE3069283)


@pytest.mark.parametrize(
    ("packed", "plain"),
    [
        (b"\x00", b""),
        (b"\x03\x08abc", b"abc"),
        (b"\x0a\x04ab" + b"\x11\x02", b"ababababab"),  # a copy of eight that runs into itself
        (b"\x06\x08abc" + b"\x0a\x03\x00", b"abcabc"),  # two bytes of distance
        (b"\x06\x08abc" + b"\x0b\x03\x00\x00\x00", b"abcabc"),  # four
        (b"\xc8\x01\xf0\xc7" + b"x" * 200, b"x" * 200),
    ],
)
def test_snappy_elements_of_each_kind(packed, plain):
    assert decompress(packed) == plain
    assert decompress(make_tf1.snappy(plain * 9)) == plain * 9


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"", "no length"),
        (b"\x05\x08abc", "3 bytes, and 5"),
        (b"\x02\x08abc", "more than the stated"),
        (b"\x09\x08ab", "past the end"),
        (b"\x09\x04ab\x11\x03", "before the start"),
        (b"\x09\x04ab\x0a\x03", "past the end"),
        (b"\xff\xff\xff\xff\x0f\x08abc", "bytes long, more than"),
    ],
)
def test_broken_snappy_data_is_refused(packed, why):
    with pytest.raises(SnappyError, match=why):
        decompress(packed)


@pytest.fixture
def copied(tmp_path):
    for file in (GOLDEN / "tf1" / "two").iterdir():
        shutil.copy(file, tmp_path / file.name)
    return tmp_path / "bert_model.ckpt"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_one_flipped_bit_of_a_tensor_is_found(copied):
    bundle = open_bundle(copied)
    name = "bert/encoder/layer_1/output/dense/kernel"
    entry = bundle.entries[name]
    flip(copied.with_name(f"{copied.name}.data-{entry.shard:05d}-of-00002"), entry.offset + entry.size - 1)
    with pytest.raises(UserError, match=rf"tensor {name} is damaged: its checksum"):
        bundle.read(name)


def test_a_missing_or_shortened_shard_is_named(copied):
    shard = copied.with_name("bert_model.ckpt.data-00001-of-00002")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    bundle = open_bundle(copied)
    last = max((e for e in bundle.entries.items() if e[1].shard == 1), key=lambda item: item[1].offset)[0]
    with pytest.raises(UserError, match=r"reaches past the end of bert_model.ckpt.data-00001-of-00002"):
        bundle.read(last)
    shard.unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002: no such file; the index needs all 2 shards"):
        open_bundle(copied)


def test_no_damage_to_the_index_gives_anything_but_a_message_or_the_same_entries(copied):
    index = copied.with_name("bert_model.ckpt.index")
    whole, meant = index.read_bytes(), open_bundle(copied).entries
    refused = 0
    for at in range(0, len(whole), 13):
        index.write_bytes(whole)
        flip(index, at)
        try:
            assert open_bundle(copied).entries == meant
        except UserError as e:
            refused += 1
            assert "bert_model.ckpt.index: not the index of a TensorFlow checkpoint, or damaged" in str(e)
    assert refused > len(whole) / 13 * 0.9
    for size in (0, 47, 48, len(whole) - 1):
        index.write_bytes(whole[:size])
        with pytest.raises(UserError, match="damaged"):
            open_bundle(copied)
    index.unlink()
    with pytest.raises(UserError, match=r"index: cannot be read: No such file"):
        open_bundle(copied)
