"""Export to CTranslate2: its scores are ours, in every form of the model that has a place there."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_translation_run
from flax import linen as nn

from transformer_jax import pieces
from transformer_jax.config import UserError
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.interop import ctranslate2 as interop
from transformer_jax.translation.interop import marian
from transformer_jax.translation.model import Transformer
from transformer_jax.translation.vocabularies import Vocabularies


def own_vocabularies() -> Vocabularies:
    """A vocabulary for each side, of different sizes."""
    pairs = tiny_translation_run.pairs(60, 0)
    source, target = (pieces.train([text for text, _ in pairs], vocab_size=n) for n in (44, 37))
    return Vocabularies(source, target)


def config(vocabularies: Vocabularies, **changes: Any) -> TransformerConfig:
    sizes = {side: getattr(vocabularies, side).vocab_size for side in ("source", "target")}
    named = {f"{side}_vocab_size": size for side, size in sizes.items()}
    return dataclasses.replace(tiny_translation_run.MODEL, **{**named, "num_hidden_layers": 2, **changes})


@functools.cache
def params(model: TransformerConfig) -> dict[str, Any]:
    """Every tensor at random, biases and norms included."""
    ids = np.zeros((1, 1), np.int32)
    shapes = nn.meta.unbox(jax.eval_shape(Transformer(model).init, jax.random.key(0), *[ids] * 6)["params"])
    rng = np.random.default_rng(3)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        value = rng.standard_normal(leaf.shape) * 0.3 + (path[-1].key == "scale")
        if path[0].key in ("embeddings", "output"):
            value[(model.source_vocab_size if path[1].key == "source" else model.target_vocab_size) - 1 :] = 0
        return value.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def quiet(line: str) -> None:
    pass


@pytest.fixture
def ctranslate2() -> Any:
    return pytest.importorskip("ctranslate2")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "embeddings": "untied", "hidden_act": "gelu", "layer_norm_eps": 1e-3},
        {"embeddings": "separate", "scale_embedding": False, "hidden_act": "gelu_new"},
        {"hidden_act": "swish", "output_bias": True},
    ],
    ids=["as Marian", "pre-norm, untied", "separate, unscaled", "as OPUS-MT"],
)
@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_the_written_model_scores_as_ours_does(
    changes: dict[str, Any], quantization: Any, tmp_path: Path, ctranslate2: Any
) -> None:
    """The export's own check; that it can fail is the next test."""
    vocabularies = own_vocabularies() if "embeddings" in changes else tiny_translation_run.vocabularies()
    model = config(vocabularies, **changes)
    out = interop.export(params(model), model, vocabularies, tmp_path / "out", quantization=quantization, say=quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    names = {p.name for p in out.iterdir()}
    own = {"shared_vocabulary.json"} if vocabularies.joint else {"source_vocabulary.json", "target_vocabulary.json"}
    assert names == {"config.json", "model.bin", "source.spm", "target.spm"} | own
    for name in own:
        assert "<pad>" not in json.loads((out / name).read_text(encoding="utf-8"))


def scoring(ctranslate2: Any, changed: Callable[[str, list[list[float]]], None]) -> Any:
    """The library with other scores: `changed(compute_type, log-probabilities of each pair)` changes them."""

    def translator(folder: str, device: str, compute_type: str) -> Any:
        real = ctranslate2.Translator(folder, device=device, compute_type="float32")

        def score_batch(sources: Any, targets: Any) -> Any:
            found = [list(result.log_probs) for result in real.score_batch(sources, targets)]
            changed(compute_type, found)
            return [types.SimpleNamespace(log_probs=row) for row in found]

        return types.SimpleNamespace(score_batch=score_batch)

    return types.SimpleNamespace(specs=ctranslate2.specs, Translator=translator)


@pytest.mark.parametrize("row", [0, 1])
def test_a_score_that_is_no_number_fails_the_check(
    tmp_path: Path, ctranslate2: Any, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    def changed(compute_type: str, found: list[list[float]]) -> None:
        found[row][0] = float("nan")

    library = scoring(ctranslate2, changed)
    monkeypatch.setattr(interop, "_library", lambda: library)
    vocabularies = tiny_translation_run.vocabularies()
    model = config(vocabularies)
    with pytest.raises(UserError, match=r"failed its own check.*differ by nan"):
        interop.export(params(model), model, vocabularies, tmp_path / "out", say=quiet)
    assert not list(tmp_path.iterdir())


def test_files_that_another_form_of_model_left_are_replaced(tmp_path: Path, ctranslate2: Any) -> None:
    for vocabularies, changes in (
        (tiny_translation_run.vocabularies(), {}),
        (own_vocabularies(), {"embeddings": "separate"}),
    ):
        model = config(vocabularies, **changes)
        out = interop.export(params(model), model, vocabularies, tmp_path / "out", overwrite=True, say=quiet)
    assert {p.name for p in out.glob("*.json")} == {"config.json", "source_vocabulary.json", "target_vocabulary.json"}


def test_a_processor_that_is_wrong_in_eight_bits_is_told_and_fails_no_export(
    tmp_path: Path, ctranslate2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those without VNNI are, with oneDNN's products: sums are lost. The file is what it should be."""

    def changed(compute_type: str, found: list[list[float]]) -> None:
        if compute_type == "int8":
            found[:] = [[x - 0.3 for x in row] for row in found]  # a few times what the 8 bits of the weights cost

    library = scoring(ctranslate2, changed)
    monkeypatch.setattr(interop, "_library", lambda: library)
    vocabularies, said = tiny_translation_run.vocabularies(), []
    model = config(vocabularies)
    for quantization in ("float32", "int8"):
        interop.export(
            params(model), model, vocabularies, tmp_path / quantization, quantization=quantization, say=said.append
        )
        assert any("CT2_USE_MKL=1" in line for line in said) == (quantization == "int8")


@pytest.mark.parametrize(("quantization", "epsilon"), [("float32", 0.3), ("int8", 10.0)])
def test_an_export_that_fails_its_own_check_leaves_nothing(
    tmp_path: Path, ctranslate2: Any, quantization: Any, epsilon: float
) -> None:
    vocabularies = tiny_translation_run.vocabularies()
    model = config(vocabularies)
    other = dataclasses.replace(model, layer_norm_eps=epsilon)
    spec = interop._spec

    def wrong(library: Any, tree: Any, _: Any) -> Any:
        return spec(library, tree, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interop, "_spec", wrong)
        with pytest.raises(UserError, match=r"failed its own check.*log-probabilities"):
            interop.export(params(model), model, vocabularies, tmp_path / "out", quantization=quantization, say=quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{}, {"hidden_act": "swish", "output_bias": True}], ids=["", "as OPUS-MT"])
def test_the_file_is_that_of_the_official_converter(changes: Any, tmp_path: Path, ctranslate2: Any) -> None:
    """Its converter reads Marian's folder with torch; ours never imports it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from ctranslate2.converters.transformers import MarianMTLoader

    vocabularies = tiny_translation_run.vocabularies()
    model = config(vocabularies, **changes)
    ours = interop.export(params(model), model, vocabularies, tmp_path / "ours", say=quiet)
    marian.export(params(model), model, vocabularies, tmp_path / "marian", say=quiet)
    peer, loader = transformers.MarianMTModel.from_pretrained(tmp_path / "marian"), MarianMTLoader()
    peer.final_logits_bias[0, -1] = 0  # it forbids <pad>, which neither file has
    spec = loader.get_model_spec(peer)

    class Names:
        """What the converter asks of a tokenizer."""

        eos_token, unk_token, bos_token = "</s>", "<unk>", None

    loader.set_config(spec.config, peer, Names)
    spec.config.add_source_eos = True
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(vocabularies.source.vocab[:-1])
    spec.validate()
    spec.optimize()
    (tmp_path / "theirs").mkdir()
    spec.save(str(tmp_path / "theirs"))
    source = [[vocabularies.source.vocab[i] for i in vocabularies.source.encode(text)] for text in ("bal bel", "gon")]
    found = [
        ctranslate2.Translator(str(folder)).translate_batch(
            source, beam_size=4, num_hypotheses=4, max_decoding_length=12, return_scores=True
        )
        for folder in (ours, tmp_path / "theirs")
    ]
    for a, b in zip(*found, strict=True):
        assert a.hypotheses == b.hypotheses
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-5)


def test_eight_bits_are_about_a_quarter_of_the_size(tmp_path: Path, ctranslate2: Any) -> None:
    vocabularies = tiny_translation_run.vocabularies()
    model = config(vocabularies, hidden_size=64, intermediate_size=256, max_position_embeddings=16)
    sizes = {}
    for quantization in ("float32", "int8"):
        folder = tmp_path / quantization
        interop.export(params(model), model, vocabularies, folder, quantization=quantization, say=quiet)
        sizes[quantization] = (folder / "model.bin").stat().st_size
    assert sizes["int8"] < 0.35 * sizes["float32"]


def test_a_model_with_bert_s_embeddings_is_refused_by_name(tmp_path: Path, ctranslate2: Any) -> None:
    vocabularies = tiny_translation_run.vocabularies()
    model = config(vocabularies, embeddings="separate", encoder_embeddings="bert")
    with pytest.raises(UserError, match=r'model\.encoder_embeddings is "bert".*tokenizer\.source_wordpiece'):
        interop.export({}, model, vocabularies, tmp_path / "out", say=quiet)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UserError, match=r"install the extra `ct2`"):
        interop.export({}, config(own_vocabularies(), embeddings="separate"), own_vocabularies(), tmp_path / "out")


@pytest.mark.slow
def test_the_script_beside_the_folder_gives_a_line_for_each_line(
    ctranslate2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C017, C028: blank and odd lines keep their places; what is cut is told by its number; a tag is one piece."""
    both = pieces.train([a for a, _ in tiny_translation_run.pairs(60, 0)], vocab_size=44, user_symbols=[">>de<<"])
    vocabularies = Vocabularies(both, both)
    model = config(vocabularies, max_position_embeddings=256)
    interop.export(params(model), model, vocabularies, tmp_path / "out", max_source_length=7, say=quiet)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["length_penalty"] == 0.5 and settings["max_source_length"] == 7
    script = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "translate_ctranslate2.py"))
    monkeypatch.setitem(script["main"].__globals__, "MOST_PIECES", 8)
    monkeypatch.setitem(script["main"].__globals__, "LINES_AT_ONCE", 2)
    lines = [b"\xef\xbb\xbfbal bel\r", b"", b"ba\xff\rl", b"  ", b"bal " * 20, b"bal\xe2\x80\xa8bel", b"bal bel"]
    lines += [b">>de<< bal bel", b">>xx<< b"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines))))
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "out")])
    script["main"]()
    out, err = capsys.readouterr()
    found = out.split("\n")
    assert len(found) == 10 and found[0] == found[6] and [found[n] for n in (1, 3, 9)] == ["", "", ""]
    tagged = [[both.vocab[i] for i in both.encode(line.decode())] for line in lines[7:]]
    assert tagged[0][0] == ">>de<<" and tagged[1][0] != ">>xx<<"
    translator = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", intra_threads=1)
    results = translator.translate_batch(tagged, beam_size=4, length_penalty=0.5)
    assert found[7:9] == [both.decode(map(both.vocab.index, r.hypotheses[0])) for r in results]
    counts = [len(both.encode(line.decode("utf-8-sig", "replace").strip("\r"))) for line in lines]
    trained = [n for n, count in enumerate(counts, 1) if 7 <= count <= 8]
    of_sources = [line for line in err.splitlines() if "its translation was cut after 256 pieces" not in line]
    assert [line.split(":")[0] for line in of_sources] == [f"line {n}" for n in sorted([5, *trained])]
    assert "line 5: cut after 8 of its " in err and all(
        f"line {n}: {counts[n - 1]} pieces, more than the 6" in err for n in trained
    )
    given: dict[str, Any] = {}

    class Asked:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def translate_batch(self, pieces: list[list[str]], **options: Any) -> list[Any]:
            given.update(options)
            return translator.translate_batch(pieces)

    monkeypatch.setattr(script["ctranslate2"], "Translator", Asked)
    monkeypatch.setitem(script["main"].__globals__, "MOST_GIVEN", 1)
    for arguments, penalty, beam in (([], 0.5, 4), (["--length-penalty", "1", "--beam", "2"], 1.0, 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"bal")))
        monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "out"), *arguments])
        script["main"]()
        assert (given["length_penalty"], given["beam_size"], given["max_decoding_length"]) == (penalty, beam, 1)
        assert capsys.readouterr().err == "line 1: its translation was cut after 1 pieces\n"
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has no model\.bin"):
        script["main"]()
