"""Export to Marian's format and import of it: bit for bit, checked before it appears, refused where it does not fit."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_translation_run
from safetensors.numpy import load_file, save_file

from transformer_jax import pieces
from transformer_jax.checkpoint import read_params
from transformer_jax.config import UserError
from transformer_jax.translation import loading, main
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.decode import DecodeSettings
from transformer_jax.translation.interop import ctranslate2, marian, marian_names
from transformer_jax.translation.presets import PRESETS, nearest_preset
from transformer_jax.translation.translate import TranslateSettings, translate
from transformer_jax.translation.vocabularies import Vocabularies

TEXTS = ["bal bel bol", "gon  gam fel.", "", "dalbel unbekannt 深"]
AS_OPUS = {"hidden_act": "swish", "output_bias": True}
PAIRS = Path(__file__).parents[1] / "data" / "pairs" / "en-de" / "train.permissive.tsv.gz"


def config(**changes: Any) -> TransformerConfig:
    size = changes.pop("size", tiny_translation_run.vocabularies().vocab_size)
    sizes = {"source_vocab_size": size, "target_vocab_size": size, "num_hidden_layers": 2}
    return dataclasses.replace(tiny_translation_run.MODEL, **{**sizes, **changes})


@functools.cache
def params(model: TransformerConfig) -> dict[str, Any]:
    """Every tensor at random, biases and norms included, each kernel different from its transpose."""
    rng = np.random.default_rng(3)
    tensors = {}
    for entry in marian_names.entries(model):
        value = rng.standard_normal(entry.shape) * 0.3 + (entry.path[-1] == "scale")
        if entry.padded_rows:
            value[-1] = 0
        tensors[entry.name] = value.astype(np.float32)
    return marian_names.from_marian(tensors, model)


def own_vocabularies() -> Vocabularies:
    """A vocabulary for each side, of one size."""
    pairs = tiny_translation_run.pairs(60, 0)
    source, target = (
        pieces.train([text for text, _ in pairs], vocab_size=n, model=kind)  # type: ignore[arg-type]
        for n, kind in ((44, "bpe"), (44, "unigram"))
    )
    return Vocabularies(source, target)


def export(folder: Path, model: TransformerConfig, vocabularies: Vocabularies | None = None, **options: Any) -> Path:
    vocabularies = vocabularies or tiny_translation_run.vocabularies()
    return marian.export(params(model), model, vocabularies, folder, say=lambda line: None, **options)


def same_trees(a: Any, b: Any) -> None:
    left, right = (dict(marian_names.published_names.flatten(tree)) for tree in (a, b))
    assert left.keys() == right.keys()
    for path, value in left.items():
        np.testing.assert_array_equal(value, right[path], err_msg="/".join(path))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("marian") / "out", config())


def test_the_folder_holds_what_marian_needs_and_reads_back_bit_for_bit(exported: Path) -> None:
    assert sorted(p.name for p in exported.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "source.spm", "target.spm",
        "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    assert sorted(p.name for p in exported.parent.iterdir()) == ["out"], "nothing is left beside it"
    found = marian.read_folder(exported)
    same_trees(found.params | {"embeddings": None}, params(config()) | {"embeddings": None})
    size = config().target_vocab_size
    table = params(config())["embeddings"]["target"]["embedding"][:size]
    np.testing.assert_array_equal(found.params["embeddings"]["target"]["embedding"][:size], table)
    vocabularies = tiny_translation_run.vocabularies()
    assert found.vocabularies.joint
    assert [found.vocabularies.source.encode(t) for t in TEXTS] == [vocabularies.source.encode(t) for t in TEXTS]


@pytest.mark.parametrize("changes", [{}, AS_OPUS], ids=["", "as OPUS-MT"])
def test_an_imported_run_exports_the_same_files(changes: dict[str, Any], tmp_path: Path) -> None:
    exported = export(tmp_path / "out", config(**changes))
    run = marian.import_folder(exported, tmp_path / "run")
    loaded = loading.load(run)
    assert loaded.step == 0 and loaded.config.embeddings == "shared"
    assert ("output" in loaded.params) == loaded.config.output_bias == bool(changes)
    again = marian.export_checkpoint(run, tmp_path / "again", say=lambda line: None)
    for name in ("model.safetensors", "config.json", "vocab.json", "source.spm", "target.spm"):
        assert (again / name).read_bytes() == (exported / name).read_bytes(), name
    assert read_params(run)[3]["imported_from"] == "out"


def test_the_commands_import_and_export(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["import", str(exported), "run"]) == 0
    assert main.main(["export", "run", "again"]) == 0
    out, err = capsys.readouterr()
    assert out == "run\nagain\n" and "alpha is written as 0.5" in err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert main.main(["export", "run", "again"]) == 2 and "again is not empty" in capsys.readouterr().err
    assert main.main(["export", "run", "again", "--overwrite"]) == 0
    assert main.main(["export", "run", "int8", "--int8"]) == 2
    assert "--int8 is for --format ctranslate2" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "run"]


def test_an_imported_run_names_the_preset_of_its_sizes() -> None:
    for name in ("transformer-tiny", "transformer-small", "transformer-base", "transformer-big", "transformer-bert"):
        assert nearest_preset(PRESETS[name]) == name
    assert nearest_preset(config()) == "transformer-tiny"


def test_two_vocabularies_of_one_size_are_two_vocabularies_there(tmp_path: Path) -> None:
    vocabularies = own_vocabularies()
    assert vocabularies.source.vocab_size == vocabularies.target.vocab_size
    model = config(embeddings="separate", size=vocabularies.source.vocab_size)
    found = marian.read_folder(export(tmp_path / "out", model, vocabularies))
    assert not found.vocabularies.joint and found.config.embeddings == "separate"
    assert found.vocabularies.source.vocab == vocabularies.source.vocab != found.vocabularies.target.vocab
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["separate_vocabs"]


def test_two_models_with_one_list_of_pieces_share_embeddings(tmp_path: Path) -> None:
    """As in the folders that Marian's own training makes: source.spm and target.spm differ, vocab.json is one."""
    own = own_vocabularies()
    names = [*own.source.vocab[:-1], *(p for p in own.target.vocab if p not in own.source.vocab), own.source.vocab[-1]]
    both = Vocabularies(*(pieces.SentencePiece(side.model, names) for side in (own.source, own.target)))
    assert both.shared_ids and not both.joint and not own.shared_ids
    out = export(tmp_path / "out", config(size=len(names)), both)
    assert not (out / "target_vocab.json").exists()
    assert not json.loads((out / "tokenizer_config.json").read_text())["separate_vocabs"]
    run = marian.import_folder(out, tmp_path / "run")
    found = loading.load(run)
    assert found.config.embeddings == "shared" and found.vocabularies.digest == both.digest
    assert loading.read_vocabularies(run).digest == loading.read_vocabularies(out).digest == both.digest
    for text in TEXTS:
        assert found.vocabularies.source.encode(text) == both.source.encode(text)
        assert found.vocabularies.target.encode(text) == both.target.encode(text)
    with pytest.raises(UserError, match=r"not a run; make a run .* with `transformer-jax import FOLDER RUN`"):
        loading.load(out)


def test_models_that_do_not_fit_are_refused_by_their_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'model\.norm is "pre"'):
        marian.export({}, config(norm="pre"), tiny_translation_run.vocabularies(), tmp_path / "out")
    with pytest.raises(UserError, match=r'encoder_embeddings is "bert"'):
        bert = config(embeddings="separate", encoder_embeddings="bert")
        marian.export({}, bert, tiny_translation_run.vocabularies(), tmp_path / "out")
    tagged = pieces.train(["bal bel bol"], vocab_size=20, user_symbols=["<de>", ">>de<<"])
    with pytest.raises(UserError, match=r"tokenizer\.user_symbols holds <de>; Marian's tokenizer"):
        marian.export({}, config(), Vocabularies(tagged, tagged), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_its_own_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = marian.read_folder

    def other(path: Path) -> marian.Folder:
        found = read(path)
        found.params["decoder"]["layer_0"]["cross_attention"]["key"]["kernel"] += 1e-3
        return found

    monkeypatch.setattr(marian, "read_folder", other)
    with pytest.raises(UserError, match=r"failed its own check.*decoder\.layers\.0\.encoder_attn\.k_proj\.weight"):
        export(tmp_path / "out", config())
    assert not list(tmp_path.iterdir())


def test_a_target_in_use_is_kept(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="not empty" if not overwrite else "not an earlier export"):
            export(tmp_path, config(), overwrite=overwrite)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    shutil.copytree(exported, tmp_path / "out")
    (tmp_path / "out" / "own").mkdir()
    (tmp_path / "out" / "own" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out holds own, which this export does not write"):
        export(tmp_path / "out", config(), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "out"]
    assert (tmp_path / "out" / "own" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "tanh"}, "Invalid enum value 'tanh'"),
        ({"normalize_before": True}, "normalize_before is True; this model has the form for False alone"),
        ({"eos_token_id": 5}, r"eos_token_id is 5; it must be 0 \(</s> first, <pad> last\)"),
        ({"pad_token_id": 0}, r"pad_token_id is 0; it must be \d+ \(</s> first, <pad> last\)"),
        ({"decoder_ffn_dim": 7}, "encoder and decoder must be alike"),
        ({"model_type": "bart"}, "model_type is 'bart'"),
        ({"max_position_embeddings": 1}, r"config\.json.*max_position_embeddings is 1; it must be at least 2"),
        ({"max_position_embeddings": 10**9}, r"max_position_embeddings is 1,000,000,000; it must be at most 131,072"),
        ({"decoder_layers": 10**7}, r"decoder_layers is 10,000,000; it must be at most 1,000"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_folders_that_this_model_cannot_be_are_refused(
    exported: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((exported / "config.json").read_text()) | change
    settings = {k: v for k, v in settings.items() if v is not None or k == "bos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        marian.read_folder(tmp_path)


def test_a_folder_in_marian_s_own_format_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.npz is in Marian's own format; make a Hugging Face folder"):
        marian.read_folder(tmp_path)


def test_weights_of_another_model_are_refused(exported: Path, tmp_path: Path) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((exported / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"encoder_layers": 1, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"16 unknown: model\.encoder\.layers\.1"):
        marian.read_folder(tmp_path)


def test_pickled_weights_are_refused_with_what_to_do(exported: Path, tmp_path: Path) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = (
        r"pickle \(pytorch_model\.bin\).*environment of its own.*MarianMTModel\.from_pretrained.*copy the other files"
    )
    with pytest.raises(UserError, match=message):
        marian.read_folder(tmp_path)


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of OPUS-MT's form, by the classes that write those: half precision, a bias, two models and one list of
    pieces with tags of languages; and in config.json what versions of their time wrote."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import sentencepiece

    folder = tmp_path_factory.mktemp("opus")
    with gzip.open(PAIRS, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t")[:2] for line in itertools.islice(file, 300)]
    listed = ["</s>", "<unk>"]
    for name, texts in (("source", [a for a, _ in lines]), ("target", [b for _, b in lines])):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=written, vocab_size=200, model_type="unigram",
            character_coverage=0.98, num_threads=1, minloglevel=2,
        )  # fmt: skip
        (folder / f"{name}.spm").write_bytes(written.getvalue())
        made = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        assert [made.id_to_piece(i) for i in range(3)] == ["<unk>", "<s>", "</s>"]
        # Some are in neither's list, as where Marian counted them too seldom.
        listed += [made.id_to_piece(i) for i in range(3, made.vocab_size() - 5)]
    names = [*dict.fromkeys(listed), ">>deu<<", ">>nds_x<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(names)}))
    files = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": "vocab.json"}
    tokenizer = transformers.MarianTokenizer(**{k: str(folder / v) for k, v in files.items()})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    pad = len(names) - 1
    peer = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=len(names), d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, activation_function="swish",
            init_std=0.3, max_position_embeddings=64, scale_embedding=True, pad_token_id=pad,
            decoder_start_token_id=pad,
        )
    )  # fmt: skip
    peer.final_logits_bias[0, :-1] = torch.randn(pad)
    peer.half().save_pretrained(folder)
    old = {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True,
           "add_bias_logits": False, "add_final_layer_norm": False, "extra_pos_embeddings": pad, "num_beams": 6,
           "bad_words_ids": [[pad]], "bos_token_id": 0, "forced_eos_token_id": 0, "id2label": {"0": "LABEL_0"},
           "transformers_version": "4.22.0.dev0"}  # fmt: skip
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | old))
    return folder


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_folder_of_opus_s_form_gives_the_ids_and_logits_of_transformers(opus: Path, tmp_path: Path) -> None:
    import sentencepiece
    import torch
    import transformers

    run = loading.load(marian.import_folder(opus, tmp_path / "run"))
    c = run.config
    assert (c.hidden_act, c.output_bias, c.embeddings, c.num_hidden_layers) == ("swish", True, "shared", 2)
    assert not run.vocabularies.joint and run.vocabularies.shared_ids
    tokenizer = transformers.MarianTokenizer.from_pretrained(opus)
    source = sentencepiece.SentencePieceProcessor(model_file=str(opus / "source.spm"))
    names = run.vocabularies.source.vocab
    other = next(p for p in names if p.isalpha() and source.piece_to_id(p) == source.unk_id())
    texts = [*TEXTS, "The house is green.", f"The gr{other}n house", f"{other} {other}{other}",
             "Größe, “naïve” – 1 234 €", ">>deu<< The house is green.", ">>nds_x<< Hello"]  # fmt: skip
    for text in texts:
        assert run.vocabularies.source.encode(text) == tokenizer(text)["input_ids"][:-1], text
        ids = tokenizer(text_target=text)["input_ids"][:-1]
        assert run.vocabularies.target.encode(text) == ids, text
        if 1 not in ids and ">>" not in text:
            assert run.vocabularies.target.decode(ids) == tokenizer.decode(ids), text
    assert run.vocabularies.source.encode(f"e {other}").count(1) == 0, "a piece of the other model is no <unk>"
    assert run.vocabularies.source.encode(">>deu<< e")[0] == len(tokenizer) - 3

    rng = np.random.default_rng(0)
    for _ in range(50):  # pieces of both models, beside each other
        ids = rng.integers(2, len(tokenizer) - 3, rng.integers(1, 9)).tolist()
        assert run.vocabularies.target.decode(ids).strip() == tokenizer.decode(ids), [names[i] for i in ids]

    peer = transformers.MarianMTModel.from_pretrained(opus, dtype=torch.float32).eval()
    batch = marian.probe_batch(c)
    long = {k: torch.tensor(v).long() for k, v in batch.items()}
    with torch.no_grad():
        logits = peer(
            input_ids=long["input_ids"],
            attention_mask=long["sequence_ids"],
            decoder_input_ids=long["decoder_input_ids"],
        ).logits.numpy()
    scored = batch["decoder_sequence_ids"] > 0
    ours = marian.probe_logits(run.params, c)
    np.testing.assert_allclose(logits[scored][:, :-1], ours[scored], rtol=1e-4, atol=1e-4)

    lines = [text for text in texts if text]
    settings = DecodeSettings(beam_size=1, max_length=12, max_extra=12)
    translations = translate(c, run.params, run.vocabularies, lines, TranslateSettings(settings))
    found = [list(t.hypotheses[0].ids) for t in translations]
    for text, ids in zip(lines, found, strict=True):
        out = peer.generate(
            **tokenizer(text, return_tensors="pt"), num_beams=1, max_new_tokens=12,
            bad_words_ids=[[len(tokenizer) - 1]], forced_eos_token_id=None,
        )[0, 1:].tolist()  # fmt: skip
        assert ids == [i for i in out if i != 0]
    assert len(set(map(tuple, found))) > 1


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_folder_of_opus_s_form_comes_out_with_the_same_tensors(opus: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    run = marian.import_folder(opus, tmp_path / "run")
    out = marian.export_checkpoint(run, tmp_path / "out", say=lambda line: None)
    before, after = (load_file(folder / "model.safetensors") for folder in (opus, out))
    assert after["final_logits_bias"][0, -1] == -1e9 and before["final_logits_bias"][0, -1] == 0
    after["final_logits_bias"][0, -1] = 0
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == np.float16 and after[name].dtype == np.float32
        np.testing.assert_array_equal(after[name], value.astype(np.float32), err_msg=name)
    for name in ("source.spm", "target.spm"):
        assert (out / name).read_bytes() == (opus / name).read_bytes()
    assert json.loads((out / "vocab.json").read_text()) == json.loads((opus / "vocab.json").read_text())
    again = marian.export_checkpoint(
        marian.import_folder(out, tmp_path / "second"), tmp_path / "again", say=lambda line: None
    )
    for file in set(out.iterdir()) - {out / "README.md"}:
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    ctranslate2.export_checkpoint(run, tmp_path / "ct2", say=lambda line: None)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("embeddings", ["shared", "separate"])
def test_transformers_loads_the_folder_and_gives_our_ids_and_logits(embeddings: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    vocabularies = tiny_translation_run.vocabularies() if embeddings == "shared" else own_vocabularies()
    model = config(embeddings=embeddings, size=vocabularies.source.vocab_size)
    folder = export(tmp_path / "out", model, vocabularies)

    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.source_vocab_size and tokenizer.pad_token_id == model.source_vocab_size - 1
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == [*vocabularies.source.encode(text), 0], text
        ids = [*vocabularies.target.encode(text), 0]
        assert tokenizer(text_target=text)["input_ids"] == ids, text
        if 1 not in ids:
            assert tokenizer.decode(ids, skip_special_tokens=True) == vocabularies.target.decode(ids), text

    peer, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    batch = marian.probe_batch(model)
    long = {k: torch.tensor(v).long() for k, v in batch.items()}
    with torch.no_grad():
        logits = peer.eval()(
            input_ids=long["input_ids"],
            attention_mask=long["sequence_ids"],
            decoder_input_ids=long["decoder_input_ids"],
        ).logits.numpy()
    scored = batch["decoder_sequence_ids"] > 0
    ours = marian.probe_logits(params(model), model)
    np.testing.assert_allclose(logits[scored][:, :-1], ours[scored], rtol=1e-4, atol=1e-4)

    out = peer.generate(**tokenizer(TEXTS[:2], return_tensors="pt", padding=True), max_length=12)
    assert out.shape[0] == 2 and (out[:, 0] == model.target_vocab_size - 1).all()
    assert peer.generation_config.num_beams == 4 and jnp.isfinite(peer.generation_config.length_penalty)


def test_a_link_is_not_written_through(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(UserError, match=r"link is a symbolic link; give the folder itself"):
        export(tmp_path / "link", config(), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "there"] and (tmp_path / "link").is_symlink()


def changed_tensors(exported: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(exported, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.encoder.layers.0.fc1.weight", lambda x: np.round(100 * x).astype(np.int8), "holds int8, as quantised"),
        ("model.encoder.layers.0.fc1.weight", lambda x: x * np.float32(np.nan), "intermediate/kernel.* not finite"),
        ("model.shared.weight", lambda x: x.astype(np.float64) * 1e300, "target/embedding.* not finite"),
        ("model.shared.weight", lambda x: np.zeros((0, x.shape[1]), x.dtype), r"has shape \(0, \d+\)"),
        ("final_logits_bias", lambda x: x[:, :0], r"final_logits_bias has shape \(1, 0\)"),
        ("final_logits_bias", lambda x: x.T, r"final_logits_bias has shape \(\d+, 1\); it must be \(1, "),
    ],
)
def test_weights_that_are_no_model_s_are_refused(
    exported: Path, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    folder = changed_tensors(exported, tmp_path / "in", lambda tensors: tensors | {name: change(tensors[name])})
    with pytest.raises(UserError, match=message):
        marian.import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(), (0, 16), (7,)])
def test_a_table_of_positions_of_another_form_is_refused(exported: Path, tmp_path: Path, shape: Any) -> None:
    name = "model.encoder.embed_positions.weight"
    table = np.zeros(shape, np.float32)
    folder = changed_tensors(exported, tmp_path / "in", lambda tensors: tensors | {name: table})
    with pytest.raises(UserError, match=r"embed_positions\.weight has shape .* it must be \(positions, "):
        marian.import_folder(folder, tmp_path / "run")


def test_a_bias_in_bfloat16_is_read(tmp_path: Path) -> None:
    model = config(**AS_OPUS)
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in marian_names.to_marian(params(model), model).items()}
    found = marian_names.from_marian(half, model)
    bias, meant = (np.asarray(tree["output"]["bias"]) for tree in (found, params(model)))
    assert bias.dtype == np.float32
    np.testing.assert_allclose(bias, meant, rtol=2**-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "44"}, 'vocab_size is "44"; it must be a number'),
        ({"d_model": [16]}, r"d_model is \[16\]; it must be a number"),
        ({"activation_function": {}}, r"activation_function is \{\}; it must be a name"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"; it must be true or false'),
        ({"encoder_layers": None}, "encoder_layers is null; it must be a number"),
    ],
)
def test_settings_of_another_kind_are_refused_by_name(
    exported: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(exported, tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        marian.import_folder(tmp_path / "in", tmp_path / "run")


def test_an_empty_model_of_pieces_and_a_list_that_is_missing_are_refused(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "in")
    settings = tmp_path / "in" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"separate_vocabs": True}))
    with pytest.raises(UserError, match=r"separate_vocabs = true, but there is no target_vocab\.json"):
        marian.import_folder(tmp_path / "in", tmp_path / "run")
    (tmp_path / "in" / "source.spm").write_bytes(b"")
    settings.unlink()
    with pytest.raises(UserError, match="not a SentencePiece model: the file is empty"):
        marian.import_folder(tmp_path / "in", tmp_path / "run")


def test_the_longest_source_of_training_and_a_card_go_with_the_model(tmp_path: Path) -> None:
    """The length at which `translate` cuts a line is that of training, after an export and an import too."""
    first = marian.import_folder(export(tmp_path / "out", config(), max_source_length=7), tmp_path / "run")
    assert loading.load(first).max_source_length == 7
    second = marian.export_checkpoint(first, tmp_path / "again", say=lambda line: None)
    assert json.loads((second / "tokenizer_config.json").read_text())["model_max_length"] == 7
    text = (second / "README.md").read_text()
    assert "7 pieces" in text and "imported from | out" in text and str(tmp_path) not in text
