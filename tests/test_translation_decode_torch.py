"""The same translations as Hugging Face's `generate` and CTranslate2 find with the same weights, under their rules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_translation import CONFIG, PAD, QUICK, VOCAB

from transformer_jax.translation import batching
from transformer_jax.translation.batching import Decoder, Hypothesis, Sentence
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.decode import DecodeSettings
from transformer_jax.translation.interop import marian_names

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """Programs that are compiled fast and run slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "jit", functools.partial(jax.jit, compiler_options=QUICK))
        batching.programs.cache_clear()
        yield
    batching.programs.cache_clear()


SIZE = dataclasses.replace(CONFIG, num_hidden_layers=1, max_position_embeddings=128)
LIMIT = 16
AS_OPUS = {"hidden_act": "swish", "output_bias": True}
CLOSE = 1e-5
"""Where a peer's two best scores differ by less, either may come out first."""


def tensors(config: TransformerConfig, end: float, seed: int) -> dict[str, np.ndarray]:
    """Random weights; `end` scales the vector of `</s>`, so that some sentences end by themselves."""
    rng = np.random.default_rng(seed)
    found = {}
    for entry in marian_names.entries(config):
        spread = 0.15 if len(entry.shape) == 2 else 0.5 if entry.name == marian_names.BIAS else 0.05
        draws = rng.standard_normal(entry.shape) * spread
        found[entry.name] = (draws + (entry.path[-1] == "scale")).astype(np.float32)
        if entry.padded_rows:
            found[entry.name][0] *= end if len(entry.shape) == 2 else 1
            found[entry.name][PAD] = 0
    return found


def peer(config: TransformerConfig, weights: dict[str, np.ndarray]) -> Any:
    untied = config.embeddings == "untied"
    marian = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=VOCAB,
            d_model=config.hidden_size,
            encoder_layers=config.num_hidden_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_attention_heads,
            decoder_attention_heads=config.num_attention_heads,
            encoder_ffn_dim=config.intermediate_size,
            decoder_ffn_dim=config.intermediate_size,
            activation_function=config.hidden_act,
            scale_embedding=config.scale_embedding,
            max_position_embeddings=config.max_position_embeddings,
            pad_token_id=PAD,
            eos_token_id=0,
            bos_token_id=None,
            decoder_start_token_id=PAD,
            forced_eos_token_id=None,
            share_encoder_decoder_embeddings=not untied,
            tie_word_embeddings=not untied,
        )
    ).eval()
    given = {name: torch.from_numpy(x) for name, x in weights.items()}
    bias = given.get(marian_names.BIAS, torch.zeros(VOCAB))[None].clone()
    bias[0, PAD] = -1e9
    given[marian_names.BIAS] = bias
    assert not marian.load_state_dict(given, strict=False).unexpected_keys
    return marian


def sentences(count: int, seed: int) -> list[Sentence]:
    rng = np.random.default_rng(seed)
    return [Sentence(i, [*rng.integers(2, PAD, rng.integers(1, 20)).tolist(), 0]) for i in range(count)]


def ours(config: TransformerConfig, weights: Any, given: list[Sentence], settings: DecodeSettings) -> list[Hypothesis]:
    params = marian_names.from_marian(weights, config)
    waiting = [given]
    with jax.default_matmul_precision("highest"):
        decoder = Decoder(config, params, settings, 8)
        found = dict(itertools.chain.from_iterable(decoder.decode(lambda wait: waiting.pop() if waiting else None)))
    return [found[s.number][0] for s in given]


@pytest.mark.parametrize(
    ("changes", "end", "beam", "alpha"),
    [({}, 3.0, 3, 0.6), ({}, 2.0, 4, 1.0), ({"embeddings": "untied"}, 4.0, 4, 1.0), ({}, 2.0, 1, 1.0),
     (AS_OPUS, 3.0, 4, 1.0), (AS_OPUS, 3.0, 6, 0.6)],
)  # fmt: skip
def test_hugging_face_finds_the_same_pieces(changes: Any, end: float, beam: int, alpha: float) -> None:
    config = dataclasses.replace(SIZE, **changes)
    weights, given = tensors(config, end, beam), sentences(12, beam)
    settings = DecodeSettings(
        beam_size=beam, alpha=alpha, length_penalty="power", stop="huggingface", max_length=LIMIT, max_extra=LIMIT
    )
    marian, ended = peer(config, weights), 0
    for sentence, found in zip(given, ours(config, weights, given, settings), strict=True):
        with torch.inference_mode():
            out = marian.generate(
                input_ids=torch.tensor([sentence.ids]),
                num_beams=beam,
                num_return_sequences=min(2, beam),
                max_new_tokens=LIMIT,
                do_sample=False,
                length_penalty=alpha,
                early_stopping=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        expected = out.sequences[0, 1:].tolist()
        expected = expected[: expected.index(0)] if 0 in expected else expected
        if beam > 1:
            first, second = out.sequences_scores.tolist()
            np.testing.assert_allclose(found.score, first, atol=1e-4)
            if first - second < CLOSE:
                continue
        assert found.ids == expected
        ended += not found.cut
    assert ended or end != 3  # the last case's sentences are all cut


@pytest.mark.parametrize(
    ("changes", "end", "beam", "alpha"),
    [({}, 3.0, 4, 1.0), ({}, 3.0, 3, 0.0), ({}, 2.0, 1, 1.0), (AS_OPUS, 3.0, 4, 1.0)],
)
def test_ctranslate2_finds_the_same_pieces(changes: Any, end: float, beam: int, alpha: float, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from ctranslate2.converters.transformers import MarianMTLoader

    class Names:
        """What the converter asks of a tokenizer."""

        eos_token, unk_token, bos_token, pad_token = "t0", "t1", None, f"t{PAD}"

    config = dataclasses.replace(SIZE, **changes)
    weights, given = tensors(config, end, beam), sentences(12, beam)
    marian, loader = peer(config, weights), MarianMTLoader()
    spec = loader.get_model_spec(marian)
    loader.set_config(spec.config, marian, Names)
    names = [f"t{i}" for i in range(VOCAB - 1)]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    spec.save(str(tmp_path))
    translator = ctranslate2.Translator(str(tmp_path), device="cpu", inter_threads=1, intra_threads=1)
    settings = DecodeSettings(
        beam_size=beam, alpha=alpha, length_penalty="power", stop="ctranslate2", max_length=LIMIT, max_extra=LIMIT
    )
    for sentence, found in zip(given, ours(config, weights, given, settings), strict=True):
        (out,) = translator.translate_batch(
            [[f"t{x}" for x in sentence.ids]],
            beam_size=beam,
            num_hypotheses=min(2, beam),
            length_penalty=alpha,
            max_decoding_length=LIMIT,
            min_decoding_length=0,  # its default, 1, takes the end's share from the first piece's log-probability
            return_scores=True,
        )
        if beam > 1 and out.scores[0] - out.scores[1] < CLOSE:
            continue
        assert found.ids == [int(x[1:]) for x in out.hypotheses[0]]
        np.testing.assert_allclose(found.score, out.scores[0], atol=1e-4)
