"""Checkpoints of google-research/bert (TensorFlow 1), read without TensorFlow; and their names, written as .npz.

    bert_config.json   vocab.txt   bert_model.ckpt.index   bert_model.ckpt.data-00000-of-00001

Kernels are [in, out] there, as here; the weights of the next-sentence head and of fine-tuned heads are [out, in].
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop import probe
from bert_jax.interop.huggingface import config_from_hf
from bert_jax.interop.huggingface_names import HEADS, Say, entries, from_hf, to_hf
from bert_jax.interop.model_card import model_card
from bert_jax.interop.published import Published, refuse_larger_tokenizer
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.published_names import Entry, check_names
from transformer_jax.safetensors_folder import read_json, write_json
from transformer_jax.tensor_bundle import open_bundle
from transformer_jax.tokenizer import CONTROL_TOKENS, WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig

MARKS = ("bert_config.json", "bert_model.npz")
"""Files by which an earlier export is known."""
_SETTINGS = (
    "attention_probs_dropout_prob",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "type_vocab_size",
    "vocab_size",
)
_HEAD_NAMES = {
    "classifier": ("output_weights", "output_bias"),
    "qa_outputs": ("cls/squad/output_weights", "cls/squad/output_bias"),
}
"""Of run_classifier.py and run_squad.py, by the name that Hugging Face's heads have."""
_OPTIMIZER = r"(\w*adam\w*|\w*lamb\w*|\w*lars\w*|adafactor|adagrad|momentum|rmsprop|sgd|ftrl|optimizer|training)"
_SLOT = re.compile(
    rf"/({_OPTIMIZER}|m|v|vr|vc|\w*_power|ExponentialMovingAverage)(_[mv])?(_\d+)?$|(^|/){_OPTIMIZER}(_\d+)?/", re.I
)
"""Slots: under a weight by the optimizer's name (kernel/adam_m, kernel/Adam_1), or under a scope of its own."""
_COUNTER = re.compile(
    r"(^|/)(global_step|beta[12]_power|current_loss_scale|loss_scale|good_steps|bad_steps|save_counter"
    r"|_CHECKPOINTABLE_OBJECT_GRAPH)(_\d+)?$"
)
_log = logging.getLogger(__name__).info


def google_name(entry: Entry) -> str:
    """The name that google-research/bert gives to a tensor."""
    name, _, last = entry.name.rpartition(".")
    if name in _HEAD_NAMES:
        return _HEAD_NAMES[name][last == "bias"]
    if entry.name == "cls.predictions.bias":
        return "cls/predictions/output_bias"
    if name == "cls.seq_relationship":
        return f"cls/seq_relationship/output_{'weights' if last == 'weight' else 'bias'}"
    path = re.sub(r"\.layer\.(\d+)", r"/layer_\1", name).replace(".", "/")
    if name.endswith("_embeddings"):
        return path
    kinds = ("gamma", "beta") if name.endswith("LayerNorm") else ("kernel", "bias")
    return f"{path}/{kinds[last == 'bias']}"


def is_folder(path: Path) -> bool:
    """Whether this is, or is the prefix of, a checkpoint of this kind."""
    return (path / "bert_config.json").is_file() or (
        path.with_name(path.name + ".index").is_file() and (path.parent / "bert_config.json").is_file()
    )


def read(path: str | Path, say: Say = _log) -> Published:
    """Read a checkpoint of google-research/bert, or the folder that `export` here wrote.

    Args:
      path: a folder with bert_config.json, vocab.txt and one checkpoint; or the prefix of one of several checkpoints
        in it, as in FOLDER/model.ckpt-1000.
      say: called with one line each for how the tokenizer was chosen, for slots and counters that were skipped, and for
        a fine-tuned head.

    Raises:
      UserError: a file is missing or damaged, or tensors are missing or unknown, each named.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = config_from_hf(read_json(folder / "bert_config.json"), str(folder / "bert_config.json"))
    tokenizer = _tokenizer(folder, say)
    refuse_larger_tokenizer(str(folder), config, tokenizer, say)
    source = _weights(path)
    if source.suffix == ".npz":
        names, get = _open_npz(source)
    else:
        bundle = open_bundle(source)
        names, get = list(bundle.entries), bundle.read
    try:
        wanted, head = _choose(names, config, get, say)
    except UserError as e:
        raise UserError(f"{source}: {e}") from None
    tensors = {}
    for entry in wanted:
        name = google_name(entry)
        value = get(name)
        is_table = name.endswith("/kernel")
        tensors[entry.name] = value.T if is_table else value
    return Published(str(path), config, tensors, tokenizer, head)


def sort_names(names: Iterable[str], known: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Names of a checkpoint, sorted into (weights that are known, slots and counters, names that are neither).

    A slot is a name that goes on from that of a weight (kernel/adam_m), lies in a scope of an optimizer, or ends as
    one.
    """
    known = set(known)
    weights, skipped, unknown = [], [], []
    for name in sorted(names):
        if name in known:
            weights.append(name)
        elif name.rpartition("/")[0] in known or _SLOT.search(name) or _COUNTER.search(name):
            skipped.append(name)
        else:
            unknown.append(name)
    return weights, skipped, unknown


def _choose(names: list[str], config: BertConfig, get: Any, say: Say) -> tuple[list[Entry], HeadConfig | None]:
    """The tensors to read, and the fine-tuned head if there is one."""
    table = entries(config)
    head = None
    if _HEAD_NAMES["qa_outputs"][0] in names:
        head = HeadConfig("span")
    elif _HEAD_NAMES["classifier"][0] in names:
        classes = len(get(_HEAD_NAMES["classifier"][0]))
        labels = tuple(f"LABEL_{i}" for i in range(classes))
        head = HeadConfig("regression" if classes == 1 else "classification", labels)
        say(f"a fine-tuned head of {classes} outputs, whose names the checkpoint does not hold: LABEL_0, ...")
    if head is not None:
        table = [*table, *(e for e in entries(config, head) if e.path[0] == "head")]
    _, skipped, unknown = sort_names(names, map(google_name, table))
    if skipped:
        slots = [name for name in skipped if not _COUNTER.search(name)]
        counters = [name for name in skipped if _COUNTER.search(name)]
        kinds = sorted({name.rpartition("/")[2] for name in slots})
        said = f"{len(slots)} slots of the optimizer ({', '.join(kinds)})" if slots else ""
        both = " and " if slots and counters else ""
        say(f"skipped, no weights: {said}{both}{', '.join(counters)}")
    there = set(names)
    absent = tuple(
        start for start in HEADS.values() if not any(google_name(e) in there for e in table if e.name.startswith(start))
    )
    wanted = [e for e in table if not (absent and e.name.startswith(absent))]
    found = there - set(skipped)
    check_names({google_name(e) for e in wanted}, found, "tensors", "BERT")
    assert not unknown
    return wanted, head


def _weights(path: Path) -> Path:
    """Prefix of the checkpoint, or the .npz file."""
    if not path.is_dir():
        return path
    found = sorted(p.with_suffix("") for p in path.glob("*.index"))
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise UserError(f"{path} holds several checkpoints ({names}); name one, as in {path / found[-1].name}")
    if found:
        return found[0]
    if (path / MARKS[1]).is_file():
        return path / MARKS[1]
    raise UserError(f"{path}: no checkpoint beside bert_config.json: neither *.ckpt.index nor {MARKS[1]}")


def _open_npz(path: Path) -> tuple[list[str], Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            tensors = dict(file)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
    return list(tensors), tensors.__getitem__


def _tokenizer(folder: Path, say: Say) -> WordPiece:
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        return WordPiece.load(folder)
    tokenizer = WordPiece.from_vocab_file(folder / "vocab.txt", WordPieceConfig())
    ordinary = (p for p in tokenizer.vocab if p not in CONTROL_TOKENS and not p.startswith("[unused"))
    cased = next((piece for piece in ordinary if piece != piece.lower()), None)
    if cased is None:
        say("no piece of vocab.txt has a capital letter, so text is lower-cased")
        return tokenizer
    say(f"vocab.txt has capital letters ({cased}), so text keeps its case")
    return WordPiece.from_vocab_file(folder / "vocab.txt", WordPieceConfig(lowercase=False))


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    head: HeadConfig | None = None,
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder with the weights under Google's names as .npz, read it back, compare, and put it at `out`.

    Args and errors as `bert_jax.interop.huggingface.export`; besides, tags and choices have no form there.
    """
    out = storage.path(out)
    if head is not None and head.kind in ("tagging", "choice", "multi_label"):
        raise UserError(f"google-research/bert has no head for {head.kind}; export with --format huggingface")
    if config.layer_norm_eps != BertConfig.layer_norm_eps:
        raise UserError(
            f"layer_norm_eps is {config.layer_norm_eps}; google-research/bert has {BertConfig.layer_norm_eps} and no "
            "setting for it, so this model cannot be one of its kind"
        )
    check_target(out, overwrite, MARKS)
    table, published = entries(config, head), to_hf(params, config, head)
    named = {google_name(e): published[e.name] for e in table}
    arrays = {name: np.ascontiguousarray(x.T) if name.endswith("/kernel") else x for name, x in named.items()}
    with new_folder(out) as folder:
        np.savez(folder / MARKS[1], **arrays)  # type: ignore[arg-type]
        write_json(folder / MARKS[0], {name: getattr(config, name) for name in _SETTINGS})
        tokenizer.save(folder, config.max_position_embeddings)
        card = model_card(config, tokenizer, extra_card or {}, head, form="tf1")
        (folder / "README.md").write_text(card, encoding="utf-8")
        found = read(folder)
        back = from_hf(found.tensors, config, head=head)
        for name, tensor in published.items():
            if not np.array_equal(found.tensors[name], tensor):
                raise probe.failed(f"tensor {name} reads back changed")
        probe.compare(probe.probe_logits(back, config, head), probe.probe_logits(params, config, head))
        if found.tokenizer.digest != tokenizer.digest:
            raise probe.failed("the tokenizer reads back changed")
    return out
