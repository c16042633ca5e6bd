"""The attention page: whose weights it shows, how large it is, and what a browser makes of it."""

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest
from tiny_bert import random_params, tiny_config, tiny_tokenizer
from tiny_finetune import checkpoint

from bert_jax.attention import Attention, attention, page
from bert_jax.finetune.loading import Encoder
from bert_jax.main import main
from transformer_jax.config import UserError

TOKENIZER = tiny_tokenizer()
CONFIG = tiny_config(vocab_size=TOKENIZER.vocab_size)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
ATTACK = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(CONFIG, random_params(CONFIG), TOKENIZER)


@pytest.fixture(scope="module")
def found(encoder) -> Attention:
    return attention(encoder, "hello [MASK] world.", "the world")


def stored(text: str) -> tuple[dict, np.ndarray]:
    """The data of a page, and its weights as the script reads them."""
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), np.uint8).reshape(2, -1).astype(int)
    shape = (data["layers"], data["heads"], len(data["rows"]), len(data["columns"]))
    return data, ((planes[0] + 256 * planes[1]) / data["steps"]).reshape(shape)


def test_a_pair_is_one_row_with_its_segments(found):
    assert found.pieces == ["[CLS]", "hello", "[MASK]", "world", ".", "[SEP]", "the", "world", "[SEP]"]
    assert found.segments == [0] * 6 + [1] * 3
    assert found.weights_LNTT.shape == (2, 2, 9, 9)
    np.testing.assert_allclose(found.weights_LNTT.sum(-1), 1.0, rtol=1e-5)
    data, weights = stored(page(found, "t"))
    assert np.abs(weights - found.weights_LNTT).max() <= 0.5 / data["steps"] + 1e-6
    assert [x["label"] for x in data["shortcuts"]] == ["from [CLS]", "to the first [SEP]", "to the last [SEP]"]
    assert [x.get("column") for x in data["shortcuts"]] == [None, 5, 8]
    assert [p["group"] for p in data["rows"]] == ["sentence A"] * 6 + ["sentence B"] * 3


@pytest.mark.torch
def test_weights_are_those_of_hugging_face(encoder, found):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from bert_jax.interop.huggingface_names import to_hf

    same = "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings vocab_size"
    settings = {name: getattr(CONFIG, name) for name in same.split()}
    model = transformers.BertModel(transformers.BertConfig(**settings, attn_implementation="eager")).eval()
    tensors = {k.removeprefix("bert."): torch.tensor(v) for k, v in to_hf(encoder.params, CONFIG).items()}
    assert not [k for k in model.load_state_dict(tensors, strict=False).missing_keys if "position_ids" not in k]
    ids = torch.tensor([[TOKENIZER.vocab.index(p) for p in found.pieces]])
    with torch.no_grad():
        theirs = model(ids, token_type_ids=torch.tensor([found.segments]), output_attentions=True).attentions
    np.testing.assert_allclose(found.weights_LNTT, torch.cat(theirs).numpy(), rtol=1e-4, atol=1e-5)
    assert found.weights_LNTT.std() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
def test_a_base_model_and_128_pieces_fit_into_a_megabyte(spread):
    """12 layers of 12 heads, from nearly even weights to sharp ones; random numbers are the hardest to pack."""
    rng = np.random.default_rng(0)
    weights = np.exp(spread * rng.standard_normal((12, 12, 128, 128), np.float32))
    weights /= weights.sum(-1, keepdims=True)
    text = page(Attention(["piece"] * 128, [0] * 64 + [1] * 64, weights), "t")
    assert len(text.encode()) < 1_000_000
    data, read = stored(text)
    assert np.abs(read - weights).max() <= 0.5 / data["steps"] + 1e-6 <= 0.0051


def test_a_page_names_no_other_file_and_runs_nothing_of_the_text(found):
    pieces = [ATTACK, *found.pieces[1:]]
    text = page(found._replace(pieces=pieces), ATTACK)
    assert "broken'</script>" not in text and "<img" not in text
    elsewhere = r"""(src|href)\s*=(?!x onerror)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)"""
    assert not re.search(elsewhere, text)
    assert "default-src 'none'" in text and "<title>&lt;/script&gt;" in text


def test_mistakes_are_one_line(encoder, tmp_path, capsys):
    run = str(checkpoint(tmp_path / "run"))
    capsys.readouterr()
    out = tmp_path / "page.html"
    for arguments, message in (
        (["a " * 31], "33 pieces long with [CLS] and [SEP]; the model has 32 positions"),
        (["hello", "--out", str(tmp_path / "none" / "p.html")], "no such folder"),
        (["hello", "--out", str(tmp_path)], "is a folder"),
    ):
        assert main(["attention", run, "--out", str(out), *arguments]) == 2
        err = capsys.readouterr().err.strip()
        assert message in err and "\n" not in err, err
    assert not out.exists()
    assert main(["attention", run, "hello", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and stored(out.read_text())[0]["groups"] == []
    with pytest.raises(UserError, match="not Unicode"):
        attention(encoder, "\ud800")


# --- in a browser


def browse(folder, url: str, *arguments: str) -> str:
    """What a browser without a window writes of a page, once its scripts have run."""
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=5000"]
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *quiet, profile, *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def cells(dom: str, table: str) -> list[tuple[str, float]]:
    """(piece, weight) of each line of a table."""
    body = dom.split(f'<table id="{table}">')[1].split("</table>")[0]
    lines = re.findall(r"<th[^>]*>(.*?)</th>.*?<td class=\"n\">([\d.]+)</td></tr>", body)
    return [(piece, float(weight)) for piece, weight in lines]


@in_a_browser
def test_a_browser_shows_the_head_that_the_address_names(found, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(found._replace(pieces=[ATTACK, *found.pieces[1:]]), "Attention & more"), encoding="utf-8")
    url = f"{path.as_uri()}#layer=2&head=1&from=3&to=5&view=to"
    dom = browse(tmp_path, url, "--dump-dom")
    assert "<title>Attention &amp; more</title>" in dom, "nothing of the text ran"
    weights = found.weights_LNTT[1, 0]
    assert "Layer 2, head 1: “world” (3) looks at “[SEP]” (5) with " in dom
    assert [p for p, _ in cells(dom, "from")][1:] == found.pieces[1:]
    np.testing.assert_allclose([w for _, w in cells(dom, "from")], weights[3], atol=0.0011)
    np.testing.assert_allclose([w for _, w in cells(dom, "to")], weights[:, 5], atol=0.0011)
    assert f"sentence A {weights[3, :6].sum():.2f}" in dom
    assert dom.count("<canvas") == 5 and 'aria-label="layer 2, head 2"' in dom
    assert re.search(r'aria-label="layer 2, head 1"[^>]*aria-pressed="true"', dom)
    assert re.search(r'aria-pressed="true">to the first \[SEP\]', dom)


@in_a_browser
def test_mouse_and_keys_choose_heads_and_pieces(found, tmp_path):
    """A script of the test's own, let in by taking the page's policy away, points, clicks and presses keys."""
    acts = """
    const told = [], readout = () => told.push(document.getElementById("readout").textContent);
    const key = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const wait = setInterval(() => {
      if (!document.body.classList.contains("drawn")) return;
      clearInterval(wait);
      const large = document.getElementById("large"), box = large.getBoundingClientRect();
      const at = (row, column) => ({
        clientX: box.left + (column + 0.5) * box.width / 9, clientY: box.top + (row + 0.5) * box.height / 9 });
      document.querySelector('button[aria-label="layer 2, head 2"]').click(); readout();
      large.dispatchEvent(new MouseEvent("mousemove", at(4, 7))); readout();
      large.dispatchEvent(new MouseEvent("mouseleave")); readout();
      large.dispatchEvent(new MouseEvent("click", at(1, 2))); readout();
      key(document.getElementById("map"), "ArrowDown"); key(document.getElementById("map"), "End"); readout();
      key(document.activeElement.closest("button") || document.querySelector('button[aria-pressed="true"][title]'),
        "ArrowUp"); readout();
      told.push(location.hash);
      document.body.append(Object.assign(document.createElement("pre"), { id: "told", textContent: told.join("\\n") }));
    }, 10);
    """
    path = tmp_path / "page.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", page(found, "t"))
    path.write_text(text.replace("</body>", f"<script>{acts}</script></body>"), encoding="utf-8")
    dom = browse(tmp_path, path.as_uri(), "--dump-dom")
    told = dom.split('<pre id="told">')[1].split("</pre>")[0].replace("&amp;", "&").split("\n")

    expected = [(2, 2, 0, 5), (2, 2, 4, 7), (2, 2, 0, 5), (2, 2, 1, 2), (2, 2, 2, 8), (1, 2, 2, 8)]
    for line, (layer, head, row, column) in zip(told, expected, strict=False):
        sides = [f"“{found.pieces[n]}” ({n})" for n in (row, column)]
        said, weight = line.removesuffix(".").rsplit(" with ", 1)
        assert said == f"Layer {layer}, head {head}: {' looks at '.join(sides)}"
        assert float(weight) == pytest.approx(found.weights_LNTT[layer - 1, head - 1, row, column], abs=0.0011)
    assert told[6:] == ["#layer=1&head=2&from=2&to=8&view=map"]


@in_a_browser
def test_a_screenshot_is_not_blank(found, tmp_path):
    path, shot = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page(found, "Attention"), encoding="utf-8")
    browse(tmp_path, path.as_uri(), "--window-size=1200,900", f"--screenshot={shot}")
    width, height, lines = png(shot.read_bytes())
    assert (width, height) == (1200, 900)
    # PNG stores how pixels differ from those before them: of a page in one colour nothing but zeros is left.
    assert (lines != 0).mean() > 0.01 and len(np.unique(lines)) > 100


def png(data: bytes) -> tuple[int, int, np.ndarray]:
    """Width, height, and the filtered bytes of each line: uint8 [height, bytes]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    return width, height, np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, -1)[:, 1:]
