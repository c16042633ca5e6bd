"""Folders for CTranslate2, in float32 or with 8-bit weights: written with a check of their own, without torch.

CTranslate2's own classes lay out the file; what goes into it comes from our parameters. It starts the decoder from a
zero vector by itself, so `<pad>` is left out of its vocabulary. Pre-norm, tables of their own for each use and sides
with different vocabularies all have a place there.

Its translator takes pieces without `</s>`, which it adds: `Translator(FOLDER).translate_batch([pieces])`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.embeddings import sinusoids
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.pieces import EOS, UNK, SentencePiece
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.interop.card import card
from transformer_jax.translation.interop.marian import ALPHA, probe_batch, probe_logits
from transformer_jax.translation.vocabularies import Vocabularies

Say = Callable[[str], None]
Quantization = Literal["float32", "int8"]
_warn = logging.getLogger(__name__).warning

TOLERANCE = {"float32": 1e-4, "int8": 0.5}
"""Most that the log-probability of a piece of the written model may differ from ours, in float32 arithmetic."""
LOST = 3.0
"""With 8-bit products the difference may be so many times that, since they round what goes into them too (seen: 1.1);
where it is more, the processor loses sums (seen: 8), and there is a warning."""
OWN_FILES = ("README.md", "shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json")
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_new": "GELUTanh", "swish": "SWISH"}


def _library() -> Any:
    try:
        import ctranslate2
        import ctranslate2.specs
    except ImportError:
        raise UserError(
            "export to CTranslate2 needs the package ctranslate2, which is not installed; install the extra `ct2` "
            "(pip install 'bert-transformer-jax[ct2]')"
        ) from None
    return ctranslate2


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    quantization: Quantization = "float32",
    overwrite: bool = False,
    say: Say = _warn,
) -> Path:
    """`export` of a run or RUN@STEP."""
    from transformer_jax.translation.loading import load

    found = load(checkpoint)
    options: dict[str, Any] = {"quantization": quantization, "overwrite": overwrite, "say": say}
    options["max_source_length"] = found.max_source_length
    options["model_card"] = card(checkpoint, found, "ctranslate2 --int8" if quantization == "int8" else "ctranslate2")
    return export(found.params, found.config, found.vocabularies, out, **options)


def export(
    params: Mapping[str, Any],
    config: TransformerConfig,
    vocabularies: Vocabularies,
    out: str | Path,
    *,
    quantization: Quantization = "float32",
    max_source_length: int | None = None,
    model_card: str = "",
    overwrite: bool = False,
    say: Say = _warn,
) -> Path:
    """Write a CTranslate2 folder, let CTranslate2 score with it, compare, and only then put it at `out`.

    Beside its own files lie `source.spm` and `target.spm`, with which text is cut and put together.

    Args:
      params: nested dict of arrays without Flax boxes, tables padded.
      quantization: "int8" keeps the matrices in 8 bits, a quarter of the size.
      max_source_length: pieces of the longest source in training, `</s>` included; without it, the model's positions.
      model_card: the text of README.md.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.
      say: called with one line for whatever means something else there.

    Returns:
      `out`.

    Raises:
      UserError: the library is missing, the model does not fit (the message names the settings), the target is in
        use, the disk refuses, or the written model scores otherwise than ours. Nothing is then left at `out` that was
        not there before.
    """
    library, out = _library(), storage.path(out)
    if config.encoder_embeddings != "transformer" or not isinstance(vocabularies.source, SentencePiece):
        raise UserError(
            f'this model does not fit CTranslate2: model.encoder_embeddings is "{config.encoder_embeddings}" with a '
            "source side cut by WordPiece (tokenizer.source_wordpiece), and both sides must be SentencePiece's"
        )
    check_target(out, overwrite, ("config.json", "model.bin"))
    spec = _spec(library, jax.tree.map(lambda x: np.array(x, np.float32), dict(params)), config)
    _add_vocabularies(spec, vocabularies)
    spec.validate()
    spec.optimize(quantization=quantization)
    say(
        "beam search there divides scores by length^alpha (its option length_penalty); "
        f"{ALPHA} is the nearest to our ((5 + length) / 6)^0.6 at 25 pieces"
    )
    # CTranslate2 passes over these two of its config.json; launch/translate_ctranslate2.py goes by them.
    spec.config.add_attribute("length_penalty", ALPHA)
    spec.config.add_attribute("max_source_length", max_source_length or config.max_position_embeddings)
    with new_folder(out, OWN_FILES) as folder:
        spec.save(str(folder))
        if model_card:
            (folder / "README.md").write_text(model_card, encoding="utf-8")
        (folder / "source.spm").write_bytes(vocabularies.source.model)
        (folder / "target.spm").write_bytes(vocabularies.target.model)
        _verify(library, folder, params, config, vocabularies, quantization, say)
    return out


def _spec(library: Any, params: Mapping[str, Any], config: TransformerConfig) -> Any:
    """The model in CTranslate2's classes; `<pad>` and the padding of the tables are left out."""
    specs = library.specs
    spec = specs.TransformerSpec.from_config(
        (config.num_hidden_layers, config.num_decoder_layers),
        config.num_attention_heads,
        pre_norm=config.pre_norm,
        activation=getattr(library.specs.Activation, _ACTIVATIONS[config.hidden_act]),
    )
    encoder, decoder, tables = spec.encoder, spec.decoder, params["embeddings"]
    target = tables["target"]["embedding"][: config.target_vocab_size - 1]
    output = tables["output"]["embedding"][: config.target_vocab_size - 1] if "output" in tables else target
    source = tables["source"]["embedding"][: config.source_vocab_size - 1] if "source" in tables else target
    encoder.embeddings[0].weight = source.copy()
    decoder.embeddings.weight = target.copy()
    decoder.projection.weight = output.copy()
    if config.output_bias:
        decoder.projection.bias = params["output"]["bias"][: config.target_vocab_size - 1].copy()
    decoder.start_from_zero_embedding = True
    for side, spec_of_side in (("encoder", encoder), ("decoder", decoder)):
        spec_of_side.scale_embeddings = float(config.hidden_size**0.5) if config.scale_embedding else 1.0
        table = sinusoids(config.max_position_embeddings, config.hidden_size)
        spec_of_side.position_encodings.encodings = table.copy()
        for i, layer in enumerate(spec_of_side.layer):
            ours = params[side][f"layer_{i}"]
            # The products of self-attention are one there, as are keys and values of cross-attention.
            _linear(layer.self_attention.linear[0], *(ours["attention"][n] for n in ("query", "key", "value")))
            _linear(layer.self_attention.linear[1], ours["attention"]["output"])
            _norm(layer.self_attention.layer_norm, ours["attention_norm"])
            if side == "decoder":
                cross = ours["cross_attention"]
                _linear(layer.attention.linear[0], cross["query"])
                _linear(layer.attention.linear[1], cross["key"], cross["value"])
                _linear(layer.attention.linear[2], cross["output"])
                _norm(layer.attention.layer_norm, ours["cross_attention_norm"])
            _linear(layer.ffn.linear_0, ours["feed_forward"]["intermediate"])
            _linear(layer.ffn.linear_1, ours["feed_forward"]["output"])
            _norm(layer.ffn.layer_norm, ours["feed_forward_norm"])
        if config.pre_norm:
            _norm(spec_of_side.layer_norm, params[side]["final_norm"])
    settings = spec.config
    settings.unk_token, settings.eos_token, settings.bos_token = UNK, EOS, EOS
    settings.decoder_start_token = EOS  # any would do: the decoder starts from zero
    settings.add_source_eos = True
    settings.layer_norm_epsilon = config.layer_norm_eps
    return spec


def _linear(spec: Any, *dense: Mapping[str, np.ndarray]) -> None:
    """Kernels [in, out] side by side, as one [all out, in]."""
    spec.weight = np.ascontiguousarray(np.concatenate([d["kernel"].T for d in dense]))
    spec.bias = np.concatenate([d["bias"] for d in dense])


def _norm(spec: Any, norm: Mapping[str, np.ndarray]) -> None:
    spec.gamma, spec.beta = norm["scale"], norm["bias"]


def _add_vocabularies(spec: Any, vocabularies: Vocabularies) -> None:
    spec.register_source_vocabulary(vocabularies.source.vocab[:-1])
    spec.register_target_vocabulary(vocabularies.target.vocab[:-1])


def _verify(
    library: Any,
    folder: Path,
    params: Mapping[str, Any],
    config: TransformerConfig,
    vocabularies: Vocabularies,
    quantization: Quantization,
    say: Say,
) -> None:
    """Compare the log-probabilities that CTranslate2 and our model give to the pieces of made-up pairs.

    What was written is judged with float32 arithmetic, for which CTranslate2 restores the matrices from their 8 bits:
    how well a processor multiplies 8-bit numbers is no matter of the file. It is said, though, where this one does not.
    """
    batch = probe_batch(config)
    logits_BTV = probe_logits(params, config).astype(np.float64)
    if not np.isfinite(logits_BTV).all():
        raise UserError("the model's own logits are not finite, so it is not exported")
    top_BT1 = logits_BTV.max(-1, keepdims=True)
    log_p_BTV = logits_BTV - top_BT1 - np.log(np.exp(logits_BTV - top_BT1).sum(-1, keepdims=True))
    sources, targets, expected = [], [], []
    for row in range(len(log_p_BTV)):
        source_length, target_length = (int(batch[k][row].sum()) for k in ("sequence_ids", "decoder_sequence_ids"))
        # Without the last, the `</s>` that the translator adds.
        ids = batch["input_ids"][row, : source_length - 1]
        labels = batch["decoder_input_ids"][row, 1:target_length]
        if not len(ids):
            continue
        sources.append([vocabularies.source.vocab[i] for i in ids])
        targets.append([vocabularies.target.vocab[i] for i in labels])
        expected.append(log_p_BTV[row, np.arange(len(labels)), labels])

    def gap(compute_type: Quantization) -> float:
        scorer = library.Translator(str(folder), device="cpu", compute_type=compute_type)
        found = [np.asarray(result.log_probs) for result in scorer.score_batch(sources, targets)]
        return float(np.max([np.max(np.abs(a[: len(b)] - b)) for a, b in zip(found, expected, strict=True)]))

    own = gap("float32")
    if not own <= TOLERANCE[quantization]:  # NaN too
        raise UserError(
            "export failed its own check, so nothing was written: log-probabilities of the written model differ "
            f"by {own:.3g}, more than {TOLERANCE[quantization]:g}"
        )
    if quantization == "int8" and not (here := gap("int8")) <= LOST * own:
        say(
            f"the 8-bit products of this processor lose sums: with them log-probabilities differ by {here:.3g}, by "
            f'{own:.3g} with compute_type="float32". CTranslate2 does so on processors without VNNI, where it does not '
            "use MKL; set CT2_USE_MKL=1 there, or that compute_type"
        )
