"""Folders for Hugging Face's `MarianMTModel` and `MarianTokenizer`: written with a check of their own, and read back.

Neither torch nor transformers is needed: numpy writes the safetensors file, and our own model is the judge.

    model.safetensors        weights under Marian's names
    config.json              sizes; generation_config.json: beam search as near to ours as theirs goes
    source.spm, target.spm   the SentencePiece models
    vocab.json               id of each piece (target_vocab.json too where the sides have vocabularies of their own)
    tokenizer_config.json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from transformer_jax import config as core
from transformer_jax import imported_run, storage
from transformer_jax.config import UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.pieces import SentencePiece
from transformer_jax.safetensors_folder import read_json, read_tensors, write_json
from transformer_jax.translation.config import BatchesConfig, SentencePieceConfig, TransformerConfig, TranslationConfig
from transformer_jax.translation.interop.card import card
from transformer_jax.translation.interop.marian_names import from_marian, has_output_bias, refuse_unfit, to_marian
from transformer_jax.translation.loading import NAMING
from transformer_jax.translation.model import Transformer
from transformer_jax.translation.presets import nearest_preset
from transformer_jax.translation.vocabularies import Vocabularies

Say = Callable[[str], None]
_warn = logging.getLogger(__name__).warning

TOLERANCE = 1e-4
"""Most that a logit of the written folder may differ from the model's, in float32."""
SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Déjà vu, CAFÉ and naïve ÅNGSTRÖM; 1 234,56 €!",
    "Der Fluß fließt über die Straße.  Zwei  Leerzeichen.",
    "深度学习 and 機械学習 mixed with words",
    "tabs\tand\u00a0odd\u200b spaces \u2014 \U0001f600",
)
"""Texts whose ids the written vocabularies must give again."""
BEAM_SIZE = 4
ALPHA = 0.5
"""Hugging Face divides a score by length^alpha, we by ((5 + length) / 6)^0.6 (Wu et al. 2016, equation 14). At a length
of 25 pieces both grow alike with an alpha of 0.6 * 25 / (5 + 25)."""

_FIELDS = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("encoder_layers", "num_hidden_layers"),
    "num_decoder_layers": ("decoder_layers",),
    "num_attention_heads": ("encoder_attention_heads", "decoder_attention_heads"),
    "intermediate_size": ("encoder_ffn_dim", "decoder_ffn_dim"),
    "hidden_act": ("activation_function",),
    "hidden_dropout_prob": ("dropout",),
    "attention_probs_dropout_prob": ("attention_dropout",),
    "initializer_range": ("init_std",),
    "scale_embedding": ("scale_embedding",),
    "max_position_embeddings": ("max_position_embeddings",),
    "source_vocab_size": ("vocab_size",),
    "target_vocab_size": ("decoder_vocab_size",),
}
"""Settings of ours and the names that Marian's configuration has for each."""
_MOST = {"num_hidden_layers": 1000, "num_decoder_layers": 1000, "max_position_embeddings": 1 << 17}
"""What a broken or hostile file may not exceed, since names and tables are made of these before weights are read."""
_ACTIVATIONS = {"silu": "swish"}
"""Other names of ours; OPUS-MT's folders say swish."""
_ARCHITECTURE = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}
"""Keys that earlier versions of the library wrote, with the only value that is Marian's form of the model."""
_LANGUAGE_CODE = re.compile(r">>[^<]*<<")


def config_to_marian(config: TransformerConfig) -> dict[str, Any]:
    """`config.json` of a Marian folder."""
    pad = config.target_vocab_size - 1
    settings = {name: getattr(config, ours) for ours, names in _FIELDS.items() for name in names}
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        **settings,
        "activation_dropout": 0.0,
        "bos_token_id": None,
        "decoder_start_token_id": pad,
        "dtype": "float32",
        "eos_token_id": SentencePiece.eos_id,
        "forced_eos_token_id": None,
        "is_encoder_decoder": True,
        "pad_token_id": pad,
        "share_encoder_decoder_embeddings": config.embeddings == "shared",
        "tie_word_embeddings": config.embeddings != "untied",
    }


def config_from_marian(data: Mapping[str, Any], where: str = "config.json") -> TransformerConfig:
    """The model configuration from the contents of a Marian `config.json`. Keys that say nothing of the model are free.

    Whether the output has a bias stands in the weights alone: `marian_names.has_output_bias`.

    Raises:
      UserError: another kind of model, or a variant of Marian that this model is not.
    """
    if data.get("model_type") != "marian":
        raise UserError(f'{where}: model_type is {data.get("model_type")!r}; only "marian" can be read')
    missing = [names[0] for names in _FIELDS.values() if names[0] not in data and names[0] != "decoder_vocab_size"]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    _check_types(data, where)
    for ours, most in _MOST.items():
        for name in _FIELDS[ours]:
            if data.get(name, 0) > most:
                raise UserError(f"{where}: {name} is {data[name]:,}; it must be at most {most:,}")
    settings = {ours: data[names[0]] for ours, names in _FIELDS.items() if names[0] in data}
    settings["target_vocab_size"] = settings.get("target_vocab_size") or data["vocab_size"]
    settings["hidden_act"] = _ACTIVATIONS.get(settings["hidden_act"], settings["hidden_act"])
    for names in _FIELDS.values():
        values = {name: data[name] for name in names if name in data}
        if len(set(values.values())) > 1:
            raise UserError(f"{where}: {values} differ; encoder and decoder must be alike in this")
    for name, value in _ARCHITECTURE.items():
        if data.get(name, value) != value:
            raise UserError(f"{where}: {name} is {data[name]!r}; this model has the form for {value!r} alone")
    pad = data["vocab_size"] - 1
    for name, expected in (("eos_token_id", 0), ("pad_token_id", pad), ("decoder_start_token_id", pad)):
        if data.get(name) != expected:
            raise UserError(f"{where}: {name} is {data.get(name)!r}; it must be {expected} (</s> first, <pad> last)")
    shared, tied = data.get("share_encoder_decoder_embeddings", True), data.get("tie_word_embeddings", True)
    if shared and not tied:
        raise UserError(f"{where}: embeddings are shared but not tied to the output, which this model has no form of")
    settings["embeddings"] = "shared" if shared else "separate" if tied else "untied"
    settings["initializer"] = "normal"
    return core.load(TransformerConfig, settings, where)


def _check_types(data: Mapping[str, Any], where: str) -> None:
    kinds = {"hidden_act": str, "scale_embedding": bool}
    kind_of = {name: kinds.get(ours, float) for ours, names in _FIELDS.items() for name in names}
    kind_of |= dict.fromkeys(("share_encoder_decoder_embeddings", "tie_word_embeddings"), bool)
    words = {str: "a name", bool: "true or false", float: "a number"}
    for name, kind in kind_of.items():
        value = data.get(name)
        if name not in data or (value is None and name == "decoder_vocab_size"):
            continue
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            raise UserError(f"{where}: {name} is {json.dumps(value)[:80]}; it must be {words[kind]}")


@dataclasses.dataclass(frozen=True)
class Folder:
    """What a Marian folder holds."""

    config: TransformerConfig
    params: dict[str, Any]
    vocabularies: Vocabularies
    max_source_length: int | None
    """Pieces of the longest source that the model is for, where the folder says it."""


def is_folder(path: Path) -> bool:
    """Whether this is a folder of Hugging Face's kind (of Marian's, or else `read_folder` says of which)."""
    return (path / "config.json").is_file()


def read_folder(path: str | Path) -> Folder:
    """Read a Marian folder with safetensors weights.

    Raises:
      UserError: a file is missing, broken or a pickle, or the model or its vocabularies are not of our kind.
    """
    folder = storage.fetch(storage.path(path))
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    native = sorted(p.name for p in folder.glob("*.npz"))
    if native and not (folder / "config.json").exists():
        raise UserError(
            f"{folder}: {native[0]} is in Marian's own format; make a Hugging Face folder of it first, as the script "
            "convert_marian_to_pytorch.py of transformers 4 does"
        )
    config = config_from_marian(read_json(folder / "config.json"), str(folder / "config.json"))
    vocabularies = read_vocabularies(folder)
    for side in ("source", "target"):
        entries, rows = getattr(vocabularies, side).vocab_size, getattr(config, f"{side}_vocab_size")
        if entries != rows:
            raise UserError(f"{folder}: the {side} vocabulary has {entries} entries, the model {rows} rows for them")
    tensors = read_tensors(folder, "MarianMTModel")
    config = dataclasses.replace(config, output_bias=has_output_bias(tensors))
    try:
        params = from_marian(tensors, config)
    except UserError as e:
        raise UserError(f"{folder}: {e}") from None
    longest = _tokenizer_settings(folder).get("model_max_length")
    known = isinstance(longest, int) and 2 <= longest <= config.max_position_embeddings
    return Folder(config, params, vocabularies, longest if known else None)


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def read_vocabularies(folder: Path) -> Vocabularies:
    """The vocabularies of a Marian folder. Its two models may cut into pieces of one list, or of a list each.

    Raises:
      UserError: a file is missing or broken, or a list is not in Marian's layout.
    """

    def pieces(model: str, vocab: str) -> SentencePiece:
        ids = read_json(folder / vocab)
        if sorted(map(str, ids.values())) != sorted(map(str, range(len(ids)))):
            raise UserError(f"{folder / vocab}: ids are not 0 to {len(ids) - 1}, each once")
        names = sorted(ids, key=lambda piece: int(ids[piece]))
        try:
            tags = [piece for piece in names if _LANGUAGE_CODE.fullmatch(piece)]
            return SentencePiece((folder / model).read_bytes(), names, tags)
        except OSError as e:
            raise UserError(f"{folder / model}: cannot be read: {e.strerror}") from None
        except UserError as e:
            raise UserError(f"{folder}: {e}") from None

    if (folder / "target_vocab.json").exists():
        return Vocabularies(pieces("source.spm", "vocab.json"), pieces("target.spm", "target_vocab.json"))
    if _tokenizer_settings(folder).get("separate_vocabs") is True:
        raise UserError(
            f"{folder}: tokenizer_config.json has separate_vocabs = true, but there is no target_vocab.json"
        )
    source = pieces("source.spm", "vocab.json")
    same = (folder / "source.spm").read_bytes() == (folder / "target.spm").read_bytes()
    return Vocabularies(source, source if same else pieces("target.spm", "vocab.json"))


def probe_batch(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Three padded pairs with ids over the whole vocabularies, for comparing models; sources end with `</s>`."""
    rows, length = 3, min(24, config.max_position_embeddings)
    rng = np.random.default_rng(0)
    batch = {}
    for side, size in (("", config.source_vocab_size), ("decoder_", config.target_vocab_size)):
        ids = rng.integers(0, size - 1, (rows, length))
        ids[:, 1] = size - 2
        if side:
            ids[:, 0] = size - 1
        lengths = np.asarray([length, max(1, length // 2), 1])
        real = np.arange(length)[None] < lengths[:, None]
        if not side:
            ids[np.arange(rows), lengths - 1] = SentencePiece.eos_id
        batch[f"{side}input_ids"] = np.where(real, ids, size - 1).astype(np.int32)
        batch[f"{side}position_ids"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        batch[f"{side}sequence_ids"] = real.astype(np.int32)
    return batch


def probe_logits(params: Mapping[str, Any], config: TransformerConfig) -> np.ndarray:
    """Logits [3, L, target_vocab_size - 1] on `probe_batch`, in float32 without dropout; 0 on padding."""
    batch = probe_batch(config)
    model = Transformer(dataclasses.replace(config, dtype="float32", remat="none"))
    logits = np.asarray(_logits(model, dict(params), batch))[..., : config.target_vocab_size - 1]
    return np.where(batch["decoder_sequence_ids"][..., None] > 0, logits, 0)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Transformer, params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    logits: Any = model.apply({"params": params}, **batch)
    return logits


def export_checkpoint(checkpoint: str | Path, out: str | Path, *, overwrite: bool = False, say: Say = _warn) -> Path:
    """`export` of a run or RUN@STEP."""
    from transformer_jax.translation.loading import load

    found = load(checkpoint)
    model_card = card(checkpoint, found, "marian")
    length = found.max_source_length
    arguments = (found.params, found.config, found.vocabularies, out)
    return export(*arguments, max_source_length=length, model_card=model_card, overwrite=overwrite, say=say)


def export(
    params: Mapping[str, Any],
    config: TransformerConfig,
    vocabularies: Vocabularies,
    out: str | Path,
    *,
    max_source_length: int | None = None,
    model_card: str = "",
    overwrite: bool = False,
    say: Say = _warn,
) -> Path:
    """Write a Marian folder, read it back, compare, and only then put it at `out`.

    Args:
      params: nested dict of arrays without Flax boxes, tables padded.
      max_source_length: pieces of the longest source in training, `</s>` included; without it, the model's positions.
      model_card: the text of README.md.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.
      say: called with one line for whatever means something else there.

    Returns:
      `out`.

    Raises:
      UserError: the model does not fit Marian's format (the message names the settings), the target is in use, the
        disk refuses, or what was read back differs. Nothing is then left at `out` that was not there before.
    """
    out = storage.path(out)
    refuse_unfit(config)
    _refuse_unfit_vocabularies(vocabularies)
    check_target(out, overwrite, ("config.json", "model.safetensors"))
    say(
        f"beam search there divides scores by length^alpha; alpha is written as {ALPHA}, the nearest to our "
        "((5 + length) / 6)^0.6 at 25 pieces"
    )
    with new_folder(out, ("README.md", "target_vocab.json")) as folder:
        _write(folder, params, config, vocabularies, max_source_length or config.max_position_embeddings)
        if model_card:
            (folder / "README.md").write_text(model_card, encoding="utf-8")
        _verify(folder, params, config, vocabularies)
    return out


def _refuse_unfit_vocabularies(vocabularies: Vocabularies) -> None:
    if not isinstance(vocabularies.source, SentencePiece):
        raise UserError(
            "the source side is cut by WordPiece (tokenizer.source_wordpiece), and Marian's format has SentencePiece "
            "on both sides"
        )
    tags = {*vocabularies.source.user_symbols, *vocabularies.target.user_symbols}
    wrong = sorted(tag for tag in tags if not _LANGUAGE_CODE.fullmatch(tag))
    if wrong:
        raise UserError(
            f"tokenizer.user_symbols holds {', '.join(wrong)}; Marian's tokenizer knows tags of the form >>xx<< alone"
        )


def _write(
    folder: Path, params: Mapping[str, Any], config: TransformerConfig, vocabularies: Vocabularies, longest: int
) -> None:
    save_file(to_marian(params, config), folder / "model.safetensors", metadata={"format": "pt"})
    settings = config_to_marian(config)
    write_json(folder / "config.json", settings)
    # The library makes a file that only its owner can read; this one is to be read like those beside it.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    pad = settings["pad_token_id"]
    generation = {
        "decoder_start_token_id": pad,
        "early_stopping": False,
        "eos_token_id": SentencePiece.eos_id,
        "length_penalty": ALPHA,
        "max_length": config.max_position_embeddings,
        "num_beams": BEAM_SIZE,
        "pad_token_id": pad,
    }
    write_json(folder / "generation_config.json", generation)
    source, target = vocabularies.source, vocabularies.target
    assert isinstance(source, SentencePiece)
    (folder / "source.spm").write_bytes(source.model)
    (folder / "target.spm").write_bytes(target.model)
    _write_vocab(folder / "vocab.json", source)
    if not vocabularies.shared_ids:
        _write_vocab(folder / "target_vocab.json", target)
    tokenizer = {
        "eos_token": "</s>",
        "model_max_length": longest,
        "pad_token": "<pad>",
        "separate_vocabs": not vocabularies.shared_ids,
        "source_lang": None,
        "target_lang": None,
        "tokenizer_class": "MarianTokenizer",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", tokenizer)


def _write_vocab(path: Path, pieces: SentencePiece) -> None:
    ids = {piece: i for i, piece in enumerate(pieces.vocab)}
    path.write_text(json.dumps(ids, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _verify(folder: Path, params: Mapping[str, Any], config: TransformerConfig, vocabularies: Vocabularies) -> None:
    """Read the folder as a stranger would and compare settings, tensors, logits and ids."""
    found = read_folder(folder)
    for field in (*_FIELDS, "embeddings"):
        if getattr(found.config, field) != getattr(config, field):
            raise _failed(f"{field} reads back as {getattr(found.config, field)!r}")
    meant, written = to_marian(params, config), to_marian(found.params, found.config)
    for name, tensor in meant.items():
        if not np.array_equal(written[name], tensor):
            if not np.isfinite(tensor).all():
                raise UserError(f"{name} of the model is not finite, so it is not exported")
            raise _failed(f"tensor {name} reads back changed")
    # What the file does not carry (the form of the layers, padding of the tables) is ours.
    expected, logits = probe_logits(params, config), probe_logits(from_marian(written, config), config)
    if not np.isfinite(expected).all():
        raise UserError("the model's own logits are not finite, so it is not exported")
    gap = np.max(np.abs(logits - expected))
    if not gap <= TOLERANCE:  # NaN too
        raise _failed(f"logits of the written folder differ by {gap:.3g}, more than {TOLERANCE:g}")
    for side in ("source", "target"):
        ours, theirs = getattr(vocabularies, side), getattr(found.vocabularies, side)
        if ours.vocab != theirs.vocab:
            raise _failed(f"the {side} vocabulary reads back changed")
        for text in SAMPLE_TEXTS:
            if ours.encode(text) != theirs.encode(text):
                raise _failed(f"other ids on the {side} side for {text!r}")


def _failed(what: str) -> UserError:
    return UserError(f"export failed its own check, so nothing was written: {what}")


def import_folder(source: str | Path, run_dir: str | Path) -> Path:
    """Make a run folder whose step 0 holds the parameters and vocabularies of a Marian folder.

    `train` starts from it by `[init]`, and `export` gives the same tensors again.

    Raises:
      UserError: as `read_folder`; or `run_dir` is in use, the disk refuses, or the checkpoint reads back changed.
        Nothing is then left at `run_dir`.
    """
    run_dir = storage.path(run_dir)
    imported_run.check_unused(run_dir)
    found = read_folder(source)
    sizes = max(found.config.source_vocab_size, found.config.target_vocab_size)
    tokenizer = SentencePieceConfig(vocab_size=sizes, joint=found.vocabularies.shared_ids)
    length = found.max_source_length or min(BatchesConfig.max_source_length, found.config.max_position_embeddings)
    examples = BatchesConfig(max_source_length=length, max_target_length=length)
    config = TranslationConfig(
        preset=nearest_preset(found.config),
        run_dir=str(run_dir),
        model=found.config,
        tokenizer=tokenizer,
        examples=examples,
    )
    return imported_run.write(run_dir, source, config, found.params, found.vocabularies, NAMING)
