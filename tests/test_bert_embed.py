"""Features of texts: whose they are, in what order they come, and what is written of them."""

import io
import sys

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_bert import random_params, tiny_config, tiny_tokenizer
from tiny_finetune import checkpoint

from bert_jax import activations, feature_files
from bert_jax.embed import EmbedConfig, embed, embed_file
from bert_jax.finetune.loading import Encoder, load_encoder
from bert_jax.main import main
from bert_jax.model import BertForPreTraining
from transformer_jax.config import UserError

TOKENIZER = tiny_tokenizer()
CONFIG = tiny_config(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=64)
LONG = "the world, going on and on and on and on and on and on and on"
TEXTS = ["hello world.", "", LONG, "深度 hello", "Hello WORLD!"]
SMALL = {"batch_tokens": 64}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(CONFIG, random_params(CONFIG), TOKENIZER)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"), hidden_size=16, max_position_embeddings=64)


def row(text: str, length: int) -> dict[str, np.ndarray]:
    ids = [TOKENIZER.cls_id, *TOKENIZER.encode(text), TOKENIZER.sep_id]
    real = (np.arange(length) < len(ids))[None].astype(np.int32)
    return {
        "input_ids": np.pad(np.array([ids], np.int32), [(0, 0), (0, length - len(ids))]),
        "token_type_ids": 0 * real,
        "position_ids": np.arange(length, dtype=np.int32)[None],
        "sequence_ids": real,
    }


@pytest.fixture(scope="module")
def expected(encoder) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each text by itself: all layers' vectors of its pieces [T, 3, H], and the pooled output [H]."""

    @jax.jit
    def compute(batch):
        with jax.default_matmul_precision("highest"):
            states = activations.hidden_states(CONFIG, encoder.params, batch)
            out = BertForPreTraining(CONFIG).apply({"params": encoder.params}, **batch)
        return states, out["sequence_output_BLH"], out["pooled_output_BSH"]

    found = []
    for text in TEXTS:
        states, last, pooled = compute(row(text, 40))
        np.testing.assert_allclose(states[-1], last, rtol=1e-5, atol=1e-5)
        real = row(text, 40)["sequence_ids"].sum()
        found.append((np.stack(states, 2)[0, :real], np.array(pooled)[0, 0]))
    return found


@pytest.mark.slow
def test_features_are_what_the_model_computes_for_the_text_alone(encoder, expected):
    """Whatever else is in the batch, of whatever length: the same numbers, in the order of the texts."""
    found = embed(encoder, TEXTS, EmbedConfig(features="tokens", layers=(0, 1, 2), **SMALL))
    for values, (states, _) in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, states.reshape(len(states), -1), rtol=1e-5, atol=1e-5)
    assert np.abs(found[0][:2] - found[4][:2]).max() > 0.1, "a piece's vector depends on its text"


def test_each_kind_of_feature_follows_from_the_pieces(encoder, expected):
    short, of_short = [TEXTS[i] for i in (4, 1, 0)], [expected[i] for i in (4, 1, 0)]
    mean = embed(encoder, short, EmbedConfig(layers=(-2, -1), join="sum", **SMALL))
    cls = embed(encoder, short, EmbedConfig(features="cls", layers=(2, 1), **SMALL))
    pooled = embed(encoder, short, EmbedConfig(features="pooled", **SMALL))
    np.testing.assert_allclose(mean, [x[:, 1:].sum(1).mean(0) for x, _ in of_short], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cls, [x[0, [2, 1]].reshape(-1) for x, _ in of_short], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pooled, [x for _, x in of_short], rtol=1e-5, atol=1e-5)
    assert mean.shape == (3, CONFIG.hidden_size) and mean.dtype == np.float32
    assert embed(encoder, [], EmbedConfig(layers=(0, 1))).shape == (0, 2 * CONFIG.hidden_size)


def test_windows_show_every_piece_of_a_long_text(encoder):
    text = "a b c d e f g h i j"
    settings = {"max_seq_length": 8, "long_text": "windows", "stride": 4, **SMALL}
    parts = ["a b c d e f", "e f g h i j"]
    whole, *windows = embed(encoder, [text, *parts], EmbedConfig(features="tokens", **settings))
    mean = embed(encoder, [text], EmbedConfig(**settings))[0]
    np.testing.assert_allclose(mean, np.mean([w.mean(0) for w in windows], 0), rtol=1e-4, atol=1e-5)
    assert whole.shape == (12, CONFIG.hidden_size)
    # [CLS] a b c d e | f g h i j [SEP]: e and f have equal context in both, and the first window keeps e.
    np.testing.assert_allclose(whole[:5], windows[0][:5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole[7:], windows[1][3:], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_of_a_file_are_its_lines(run, tmp_path, monkeypatch):
    """A file and standard input give the same rows; lines that are cut are named; chunks do not show."""
    source = tmp_path / "text.txt"
    source.write_bytes("\n".join(TEXTS).encode() + b"\r\n")
    said = []
    counts = embed_file(
        str(run), str(source), tmp_path / "a.npy", EmbedConfig(max_seq_length=9, **SMALL), say=said.append
    )
    assert (counts.lines, counts.cut) == (5, 1)
    assert "cut: 29 pieces at the end of line 3" in said
    monkeypatch.setattr("bert_jax.embed.GROUP_LINES", 2)
    monkeypatch.setattr("bert_jax.embed.CHUNK_ROWS", 1)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    embed_file(str(run), None, tmp_path / "b.npy", EmbedConfig(max_seq_length=9, **SMALL), say=said.append)
    a, b = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert a.shape == (5, 16)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_pieces_are_written_with_their_places(run, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    settings = EmbedConfig(features="tokens", layers=(0, -1), dtype="float16", **SMALL)
    expected = embed(load_encoder(run), TEXTS, settings)
    for name in ("x.npy", "x.parquet"):
        embed_file(str(run), str(source), tmp_path / name, settings)
    offsets, tokens = np.load(tmp_path / "x.offsets.npy"), np.load(tmp_path / "x.tokens.npy")
    flat = np.load(tmp_path / "x.npy")
    assert flat.dtype == np.float16 and flat.shape == (offsets[-1], 32) and tokens.shape == (offsets[-1], 3)
    np.testing.assert_allclose(flat, np.concatenate(expected), rtol=1e-2, atol=1e-2)
    table = pq.read_table(tmp_path / "x.parquet").to_pydict()
    np.testing.assert_array_equal(np.array(table["features"], np.float16), flat)
    for n, text in enumerate(TEXTS):
        ids = tokens[offsets[n] : offsets[n + 1]]
        assert ids[:, 0].tolist() == [TOKENIZER.cls_id, *TOKENIZER.encode(text), TOKENIZER.sep_id]
        assert ids[0, 1:].tolist() == ids[-1, 1:].tolist() == [-1, -1]
    words = {
        (line, piece): TEXTS[line - 1][start:end]
        for line, piece, start, end in zip(*(table[k] for k in ("line", "piece", "start", "end")), strict=True)
        if start is not None
    }
    assert words[5, "world"] == "WORLD" and words[4, "度"] == "度" and words[1, "."] == "."
    assert table["piece"][offsets[1] : offsets[2]] == ["[CLS]", "[SEP]"]
    assert table["token"][: offsets[1]] == list(range(offsets[1])) and table["start"][0] is None


def test_nothing_half_written_is_left(run, tmp_path):
    """A line that is not UTF-8 is met after output has begun; what stood there before stays."""
    source, out = tmp_path / "text.txt", tmp_path / "out.npy"
    source.write_bytes(b"hello\n\xff\xfe\n")
    out.write_bytes(b"as it was")
    with pytest.raises(UserError, match="add --overwrite"):
        embed_file(str(run), str(source), out)
    with pytest.raises(UserError, match="line 2 is not UTF-8"):
        embed_file(str(run), str(source), out, overwrite=True)
    assert out.read_bytes() == b"as it was" and [p.name for p in tmp_path.iterdir()].count("out.npy") == 1
    assert len(list(tmp_path.iterdir())) == 2
    embed_file(str(run), str(source), out, encoding_errors="replace", overwrite=True)
    assert np.load(out).shape == (2, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2"], "there is no layer 2; the model has 0 (the embeddings) to 1"),
        (["--layers", "last"], "give numbers"),
        (["--features", "pooled", "--layers", "0"], "pooled output is of the last layer alone"),
        (["--max-seq-length", "65"], "between 3 and the model's 64 positions"),
        (["--stride", "4"], "it is of --long-text windows"),
        (["--out", "x.csv"], "ends in .npy or .parquet"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, arguments, message):
    source = tmp_path / "text.txt"
    source.write_text("hello\n")
    assert main(["embed", str(run), str(source), "--out", str(tmp_path / "x.npy"), *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_float16_that_overflows_is_refused(encoder):
    params = jax.tree.map(np.array, encoder.params)
    params["embeddings"]["norm"]["bias"] += 1e6
    with pytest.raises(UserError, match="not finite in float16"):
        embed(Encoder(CONFIG, params, TOKENIZER), ["hello"], EmbedConfig(layers=(0,), dtype="float16", **SMALL))


def test_a_header_is_written_for_any_number_of_rows(tmp_path):
    """The place that NumPy leaves for the number of rows, which is not known when the first row is written."""
    with feature_files.writer(tmp_path / "x.npy", 1, "float32", False, []) as sink:
        text = feature_files.TextFeatures(1, np.zeros(0), np.zeros((0, 2)), 0, np.ones(1, np.float32))
        for _ in range(3):
            sink.write([text] * 5000)
    assert np.load(tmp_path / "x.npy").shape == (15000, 1)


@pytest.mark.torch
def test_layers_are_those_of_hugging_face(encoder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from bert_jax.interop.huggingface_names import to_hf

    same = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings vocab_size"
    settings = transformers.BertConfig(
        **{name: getattr(CONFIG, name) for name in same.split()}, attn_implementation="eager"
    )
    model = transformers.BertModel(settings).eval()
    tensors = {k.removeprefix("bert."): torch.tensor(v) for k, v in to_hf(encoder.params, CONFIG).items()}
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert not [name for name in missing if "position_ids" not in name]
    batch = row(LONG, 38)
    with torch.no_grad():
        theirs = model(torch.tensor(batch["input_ids"]).long(), output_hidden_states=True, output_attentions=True)

    @jax.jit
    def compute(batch):
        with jax.default_matmul_precision("highest"):
            both = (activations.hidden_states, activations.attention_weights)
            return [inside(CONFIG, encoder.params, batch) for inside in both]

    states, weights = compute(batch)
    assert len(states) == len(theirs.hidden_states) == CONFIG.num_hidden_layers + 1
    for ours, expected in zip(states, theirs.hidden_states, strict=True):
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-4, atol=1e-5)
    for ours, expected in zip(weights, theirs.attentions, strict=True):
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.sum(-1), 1.0, rtol=1e-5)
    assert np.std(weights) > 0.01
