"""The command `translate`: streams and files, notes on standard error, mistakes, and the page of attention."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from test_translation_translate import CONFIG, VOCABULARIES, params, text
from tiny_translation import QUICK

from transformer_jax import sharding
from transformer_jax.translation import attention_page, batching, stream
from transformer_jax.translation import main as program
from transformer_jax.translation.loading import Loaded
from transformer_jax.translation.model import Transformer

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True, scope="module")
def quick_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One device, a checkpoint that needs no file, and programs that are compiled fast."""
    meta = {"config": {"examples": {"max_source_length": 16}}}
    loaded = Loaded(Transformer(CONFIG), params(), VOCABULARIES, CONFIG, 1, meta)
    load, make_mesh = stream.load, sharding.make_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "jit", functools.partial(jax.jit, compiler_options=QUICK))
        patch.setattr(stream, "load", lambda name: loaded if name == "RUN" else load(name))
        patch.setattr(sharding, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:1]))
        patch.setattr("transformer_jax.command.keep_programs", lambda: None)
        batching.programs.cache_clear()
        yield
    batching.programs.cache_clear()


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Call `translate`; returns (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = program.main(["translate", *map(str, arguments)])
        except SystemExit as e:
            code = int(str(e.code))
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.mark.slow
def test_a_file_is_translated_and_what_is_odd_is_told(call: Call, tmp_path: Path) -> None:
    """C028, C110: cut translations, split lines and bytes that are not UTF-8 are listed by number."""
    given = tmp_path / "in.txt"
    given.write_bytes(f"{text(1, 2)}\n\n{text(2, 30)}\n".encode() + b"ba\xff\n" + text(3, 2).encode())
    short = ("--beam", 2, "--max-extra", 2, "--min-length", 3)
    code, out, err = call("RUN", "--input", given, *short)
    assert code == 0 and out.count("\n") == 5 and out.splitlines()[1] == ""
    assert re.search(r"^line 3: split into \d+ parts", err, re.M)
    assert re.search(r"^line 4: holds bytes that are not UTF-8", err, re.M)
    assert re.search(r"^line \d: its translation was cut at the limit", err, re.M)
    assert re.search(r"^5 lines in .* lines/s; \d with notes$", err, re.M)

    page = tmp_path / "page.html"
    code, records, err = call("RUN", "--input", given, *short, "--json", "--attention", page)
    assert [json.loads(row)["translations"][0]["text"] for row in records.splitlines()] == out.splitlines()
    assert "page:" in err
    drawn = page.read_text(encoding="utf-8")
    maps = json.loads(drawn.split('id="data">')[1].split("</script>")[0])
    assert (maps["layers"], maps["heads"]) == (CONFIG.num_decoder_layers, CONFIG.num_attention_heads)
    assert "default-src 'none'" in drawn and "src=" not in drawn and text(1, 2) in drawn

    target, packed = tmp_path / "out.txt", tmp_path / "in.txt.gz"
    packed.write_bytes(gzip.compress(given.read_bytes()))
    code, nothing, _ = call("RUN", "--input", packed, *short, "--output", target)
    assert (code, nothing) == (0, "") and target.read_text() == out
    packed.write_bytes(packed.read_bytes()[:-9])
    code, _, err = call("RUN", "--input", packed, *short)
    assert code == 2 and "in.txt.gz: the gzip file ends too early" in err


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    given = tmp_path / "in.txt"
    given.write_text("a\n")
    kept = tmp_path / "kept.txt"
    kept.write_text("as it was")
    for arguments, message in (
        (("RUN", "--input", tmp_path / "none.txt"), "none.txt: No such file"),
        (("RUN", "--input", tmp_path), "Is a directory"),
        (("RUN", "--input", given, "--output", given), "is read and would be written over"),
        (("RUN", "--input", given, "--output", tmp_path / "no" / "out"), "no: no such folder"),
        (("RUN", "--input", given, "--attention", tmp_path / "no" / "page"), "no: no such folder"),
        (("RUN", "--input", given, "--temperature", 0.5), "temperature is 0.5, but nothing is sampled"),
        (("RUN", "--input", given, "--seed", 3), "seed is 3, but nothing is sampled"),
        (("RUN", "--input", given, "--n-best", 5), "n_best is 5, but a beam of 4"),
        (("RUN", "--input", given, "--beam", 0), "beam_size is 0"),
        (("RUN", "--input", given, "--max-source-length", 65), "has 64 positions"),
        ((tmp_path / "nothing", "--input", given, "--output", kept), "nothing"),
    ):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "") and message in err, err
        assert len(err.strip().splitlines()) == 1
    assert given.read_text() == "a\n" and kept.read_text() == "as it was"


@pytest.mark.slow
def test_the_drawn_weights_are_those_of_each_step() -> None:
    """Each row sums to one, and depends on the pieces before it alone."""
    source, target = [5, 9, 7, 0], [3, 8, 2, 0]
    with jax.default_matmul_precision("highest"):
        weights = attention_page.cross_attention(CONFIG, params(), source, target)
        fewer = attention_page.cross_attention(CONFIG, params(), source, target[:2])
    assert weights.shape == (CONFIG.num_decoder_layers, CONFIG.num_attention_heads, 4, 4)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(weights[:, :, :2], fewer, rtol=1e-4, atol=1e-6)
    assert weights.std() > 0.01


def test_pieces_on_the_page_are_text() -> None:
    weights = np.full((1, 1, 1, 2), 0.5, np.float32)
    page = attention_page.render(weights, ["<b>", "&"], ['"x'], "a < b")
    assert "<b>" not in page and '"\\u003cb>"' in page and "a &lt; b" in page
