"""Writes the TensorFlow checkpoints in this folder's `tf1`. Needs TensorFlow (an environment of its own):

    python -m venv made && made/bin/pip install tensorflow-cpu==2.21.0 msgspec
    made/bin/python tests/golden/make_tf1.py

`one` has Google's names for a tiny BERT with optimizer slots and counters besides, saved by TensorFlow into one data
file; `two` the same in two, joined by TensorFlow itself; `snappy` is `one` with every block of its index compressed,
here with literals and copies, since TensorFlow writes its index uncompressed today. Values are those of `value`, which
the test works out again.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np

HIDDEN, INNER, LAYERS, POSITIONS = 8, 16, 2, 16
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefgh")]
CONFIG = {
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
    "vocab_size": len(PIECES),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Google's names and shapes."""
    found: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (len(PIECES), HIDDEN),
        "bert/embeddings/position_embeddings": (POSITIONS, HIDDEN),
        "bert/embeddings/token_type_embeddings": (2, HIDDEN),
        "cls/predictions/output_bias": (len(PIECES),),
        "cls/seq_relationship/output_weights": (2, HIDDEN),
        "cls/seq_relationship/output_bias": (2,),
    }

    def dense(name: str, inputs: int, outputs: int) -> None:
        found[f"{name}/kernel"], found[f"{name}/bias"] = (inputs, outputs), (outputs,)

    def norm(name: str) -> None:
        found[f"{name}/LayerNorm/gamma"] = found[f"{name}/LayerNorm/beta"] = (HIDDEN,)

    norm("bert/embeddings")
    for i in range(LAYERS):
        layer = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            dense(f"{layer}/attention/self/{part}", HIDDEN, HIDDEN)
        dense(f"{layer}/attention/output/dense", HIDDEN, HIDDEN)
        norm(f"{layer}/attention/output")
        dense(f"{layer}/intermediate/dense", HIDDEN, INNER)
        dense(f"{layer}/output/dense", INNER, HIDDEN)
        norm(f"{layer}/output")
    dense("bert/pooler/dense", HIDDEN, HIDDEN)
    dense("cls/predictions/transform/dense", HIDDEN, HIDDEN)
    norm("cls/predictions/transform")
    return found


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that differ for each tensor, and need nothing but numpy."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)


def slots() -> dict[str, np.ndarray]:
    """What training leaves besides weights."""
    kernel = "bert/encoder/layer_0/attention/self/query/kernel"
    shape = (HIDDEN, HIDDEN)
    found = {f"{kernel}/{slot}": value(slot, shape) for slot in ("adam_m", "adam_v", "BERTAdam", "lamb_m_1")}
    found["AdamWeightDecay/cls/seq_relationship/output_bias"] = value("scoped", (2,))
    found["bert/encoder/layer_0/attention/beta1_power"] = np.asarray(0.9, np.float32)
    return found | {"global_step": np.asarray(1000, np.int64)}


def main(folder: Path) -> None:
    import tensorflow as tf

    tensors = {name: value(name, shape) for name, shape in shapes().items()} | slots()
    names = sorted(tensors)
    for kind in ("one", "two", "snappy"):
        shutil.rmtree(folder / kind, ignore_errors=True)
        (folder / kind).mkdir(parents=True)
        (folder / kind / "bert_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        (folder / kind / "vocab.txt").write_text("".join(p + "\n" for p in PIECES))

    def save(prefix: Path, wanted: list[str]) -> None:
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=wanted,
            shape_and_slices=[""] * len(wanted),
            tensors=[tf.constant(tensors[name]) for name in wanted],
        )

    save(folder / "one" / "bert_model.ckpt", names)
    parts = [folder / "two" / f"part{i}" for i in range(2)]
    for i, part in enumerate(parts):
        save(part, names[i::2])
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(p) for p in parts],
        destination_prefix=str(folder / "two" / "bert_model.ckpt"),
        delete_old_dirs=False,
    )
    for file in (folder / "one").glob("*.data-*"):
        shutil.copy(file, folder / "snappy" / file.name)
    index = (folder / "one" / "bert_model.ckpt.index").read_bytes()
    (folder / "snappy" / "bert_model.ckpt.index").write_bytes(compressed(index))


# A table whose blocks are compressed.


def compressed(table: bytes) -> bytes:
    """The same table, of one data block, with its blocks compressed."""
    from transformer_jax.crc32c import crc32c, masked
    from transformer_jax.tensor_bundle import _block, _handle

    at = _handle(table[-48:-8], 0)[1]
    (index_offset, index_size), _ = _handle(table[-48:-8], at)
    ((last_key, handle),) = list(_block(table, index_offset, index_size))
    (offset, size), _ = _handle(handle, 0)

    def put(out: bytes, block: bytes) -> tuple[bytes, bytes]:
        packed = snappy(block) + b"\1"
        place = varint(len(out)) + varint(len(packed) - 1)
        return out + packed + masked(crc32c(packed)).to_bytes(4, "little"), place

    out, place = put(b"", table[offset : offset + size])
    out, meta = put(out, b"\0\0\0\0\1\0\0\0")
    entry = varint(0) + varint(len(last_key)) + varint(len(place)) + last_key + place
    out, index = put(out, entry + b"\0\0\0\0\1\0\0\0")
    return out + (meta + index).ljust(40, b"\0") + table[-8:]


def snappy(data: bytes) -> bytes:
    """Snappy's raw format: greedy copies of four or more bytes, else literals."""
    out, literal, at = bytearray(varint(len(data))), bytearray(), 0
    seen: dict[bytes, int] = {}

    def flush() -> None:
        for start in range(0, len(literal), 256):
            piece = bytes(literal[start : start + 256])
            out.extend([(len(piece) - 1) << 2] if len(piece) <= 60 else [60 << 2, len(piece) - 1])
            out.extend(piece)
        literal.clear()

    while at < len(data):
        before = seen.get(data[at : at + 4], -1)
        seen[data[at : at + 4]] = at
        size = 0
        while before >= 0 and size < 64 and at + size < len(data) and data[before + size] == data[at + size]:
            size += 1
        if size < 4:
            literal.append(data[at])
            at += 1
            continue
        flush()
        back = at - before
        if size < 12 and back < 2048:
            out.extend([1 | (size - 4) << 2 | (back >> 8) << 5, back & 255])
        else:
            out.extend([2 | (size - 1) << 2, back & 255, back >> 8])
        at += size
    flush()
    return bytes(out)


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(Path(__file__).parent / "tf1")
