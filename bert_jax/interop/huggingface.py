"""Hugging Face folders of every BERT class: written with a check of their own, and read back.

Neither torch nor transformers is needed: numpy writes the safetensors file, and our own model is the judge.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from bert_jax.config import BertConfig
from bert_jax.heads import HF_CLASSES, HeadConfig, Kind
from bert_jax.interop import probe
from bert_jax.interop.huggingface_names import Say, from_hf, to_hf
from bert_jax.interop.model_card import model_card
from bert_jax.interop.probe import SAMPLE_TEXTS, failed, probe_logits
from bert_jax.interop.published import Published, refuse_larger_tokenizer
from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.safetensors_folder import read_json, read_tensors, write_json
from transformer_jax.tokenizer import WordPiece

MARKS = ("config.json", "model.safetensors")
"""Files by which an earlier export is known."""
_SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
)
"""Settings that have the same name and meaning in both configurations."""
_PROBLEMS: dict[str, Kind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
"""What Hugging Face calls the kinds that one class of theirs serves."""
_log = logging.getLogger(__name__).info


def config_to_hf(config: BertConfig, tokenizer: WordPiece, head: HeadConfig | None = None) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder: true vocabulary size, the activation by its published name.

    With a head also its class, the names of its labels and, for `BertForSequenceClassification`, the kind of problem.
    """
    same = {name: getattr(config, name) for name in _SAME_FIELDS}
    settings = {
        "architectures": ["BertForPreTraining" if head is None else HF_CLASSES[head.kind]],
        "model_type": "bert",
        **same,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    if head is not None:
        settings["classifier_dropout"] = None if head.dropout < 0 else head.dropout
        if head.kind in _PROBLEMS.values():
            settings["problem_type"] = next(name for name, kind in _PROBLEMS.items() if kind == head.kind)
        if head.kind not in ("span", "choice"):
            labels = head.labels or ("LABEL_0",)  # a regression whose number has no name
            settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
            settings["label2id"] = {label: i for i, label in enumerate(labels)}
    return settings


def head_from_hf(
    data: Mapping[str, Any], tensors: Mapping[str, np.ndarray], where: str = "config.json"
) -> HeadConfig | None:
    """The head of a fine-tuned model, from the contents of its `config.json` and the tensors; None if it has none.

    Raises:
      UserError: tensors of a head whose class or labels the configuration does not tell.
    """
    if "qa_outputs.weight" in tensors:
        return HeadConfig("span")
    if "classifier.weight" not in tensors:
        return None
    outputs = len(tensors["classifier.weight"])
    classes = {HF_CLASSES[kind]: kind for kind in ("classification", "tagging", "choice")}
    found = [classes[name] for name in data.get("architectures") or () if name in classes]
    if not found:
        raise UserError(
            f"{where}: the tensors hold a classifier, and architectures is {data.get('architectures')!r}; it must name "
            f"the class, {_either(tuple(classes))}"
        )
    kind: Any = found[0]
    if kind == "classification":
        problem = data.get("problem_type") or ("regression" if outputs == 1 else "single_label_classification")
        if problem not in _PROBLEMS:
            raise UserError(f"{where}: problem_type is {problem!r}; it must be {_either(tuple(_PROBLEMS))}")
        kind = _PROBLEMS[problem]
    rate = data.get("classifier_dropout")
    rate = -1.0 if rate is None else float(rate)
    if kind == "choice":
        return HeadConfig(kind, (), rate)
    names = data.get("id2label") or {str(i): f"LABEL_{i}" for i in range(outputs)}
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(outputs))):
        raise UserError(f"{where}: id2label must name the classes 0 to {outputs - 1}, each once; it is {names!r}")
    return HeadConfig(kind, tuple(str(names[key]) for key in sorted(names, key=int)), rate)


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> BertConfig:
    """The model configuration from the contents of a `config.json`; what it leaves out has BERT's published default.

    Raises:
      UserError: another kind of model, or a variant of BERT that this model is not.
    """
    only = {
        "model_type": ("bert",),
        "hidden_act": typing.get_args(typing.get_type_hints(BertConfig)["hidden_act"]),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, allowed in only.items():
        if key in data and data[key] not in allowed:
            raise UserError(f"{where}: {key} is {data[key]!r}; this model can be read with {_either(allowed)} only")
    vocab_size = {"vocab_size": 30522}  # the published default, which a folder may leave out
    return core.load(BertConfig, vocab_size | {k: data[k] for k in _SAME_FIELDS if k in data}, where)


def read_folder(
    path: str | Path, *, seed: int | None = None, say: Say = _log
) -> tuple[BertConfig, dict[str, Any], WordPiece]:
    """Configuration, parameters of `BertForPreTraining` and tokenizer of a Hugging Face folder.

    Errors as `read` and `Published.pretraining`, whose arguments these are.
    """
    found = read(path, say)
    return found.config, found.pretraining(seed, say)[0], found.tokenizer


def read(path: str | Path, say: Say = _log) -> Published:
    """Read a Hugging Face folder with safetensors weights, in one file or several.

    Args:
      say: called with one line where the vocabulary has rows that the tokenizer does not use.

    Raises:
      UserError: a file is missing, broken or a pickle; or as in `config_from_hf`, `head_from_hf` and the tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    settings, where = read_json(folder / "config.json"), str(folder / "config.json")
    config = config_from_hf(settings, where)
    tensors = read_tensors(folder, "BertForPreTraining")
    head = head_from_hf(settings, tensors, where)
    tokenizer = WordPiece.load(folder)
    _check_tokenizer(folder, tokenizer)
    refuse_larger_tokenizer(str(folder), config, tokenizer, say)
    return Published(str(folder), config, tensors, tokenizer, head)


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    head: HeadConfig | None = None,
    reference: Mapping[str, np.ndarray] | None = None,
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face folder, read it back, compare, and only then put it at `out`.

    Args:
      params: nested dict of arrays without Flax boxes, vocabulary padded.
      head: of a fine-tuned model, which is then written as the class of Hugging Face's that it is.
      reference: what `probe_logits` gave where the model was trained; None computes it here from `params`.
      extra_card: facts for the model card. `name`, `licence`, `language`, `sentence_task` and `settings` (nested) have
        their places; all others become rows of a table.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.

    Returns:
      `out`.

    Raises:
      UserError: the target is in use, the disk refuses, or what was read back differs. Nothing is then left at `out`
        that was not there before.
    """
    out = storage.path(out)
    check_target(out, overwrite, MARKS)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size}")
    with new_folder(out) as folder:
        write(folder, to_hf(params, config, head), config, tokenizer, head)
        card = model_card(config, tokenizer, extra_card or {}, head)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _verify(folder, params, config, tokenizer, head, reference)
    return out


def write(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    config: BertConfig,
    tokenizer: WordPiece,
    head: HeadConfig | None = None,
) -> None:
    """Weights, settings and tokenizer, into a folder that is there."""
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config_to_hf(config, tokenizer, head))
    # The library makes a file that only its owner can read; this one is to be read like those beside it.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    tokenizer.save(folder, config.max_position_embeddings)


def _verify(
    folder: Path,
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    head: HeadConfig | None,
    reference: Mapping[str, np.ndarray] | None,
) -> None:
    """Read the folder as a stranger would and compare settings, tensors, all logits and token ids."""
    found = read(folder)
    for field in _SAME_FIELDS:
        if getattr(found.config, field) != getattr(config, field):
            raise failed(f"{field} reads back as {getattr(found.config, field)!r}")
    if head is None:
        read_params, _ = found.pretraining(None, _log)
    else:
        if found.head is None or (found.head.kind, found.head.num_outputs) != (head.kind, head.num_outputs):
            raise failed(f"its head reads back as {found.head!r}")
        if head.labels and found.head.labels != head.labels:
            raise failed(f"its labels read back as {', '.join(found.head.labels)}")
        read_params = found.fine_tuned(_log)
    # What the file does not carry (layers, padding of the vocabulary) is ours.
    written = to_hf(read_params, found.config, head)
    expected = reference if reference is not None else probe_logits(params, config, head)
    probe.compare(probe_logits(from_hf(written, config, head=head), config, head), expected)
    for name, tensor in to_hf(params, config, head).items():
        if not np.array_equal(written[name], tensor):
            raise failed(f"tensor {name} reads back changed")
    for text in SAMPLE_TEXTS:
        if found.tokenizer.encode(text) != tokenizer.encode(text):
            raise failed(f"other token ids for {text!r}")


def _check_tokenizer(folder: Path, tokenizer: WordPiece) -> None:
    """Compare what we made of a folder's tokenizer files with what the `tokenizers` library makes of them."""
    if not (folder / "tokenizer.json").exists():
        return
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_padding()
    library.no_truncation()
    # Only our own programs know of a pre-splitter.
    plain = WordPiece(tokenizer.vocab, dataclasses.replace(tokenizer.config, pre_splitter=""))
    for text in SAMPLE_TEXTS:
        ours, theirs = plain.encode(text), library.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise UserError(
                f"{folder}: tokenizer.json cuts text in a way that is not supported here: {text!r} has the ids "
                f"{theirs} by the library, {ours} by ours"
            )


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(v) for v in values)
