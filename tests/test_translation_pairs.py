"""Pairs: every format, and every way in which two sides can go apart."""

import gc
import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from transformer_jax import lines as text_lines
from transformer_jax.config import ConfigError, UserError
from transformer_jax.translation import pairs
from transformer_jax.translation.pairs import load_recipe, read

HEAD = 'source_language = "en"\ntarget_language = "de"\n'


def recipe(folder: Path, *settings: str, head: str = HEAD) -> pairs.PairRecipe:
    path = folder / "recipe.toml"
    path.write_text(head + "[[sources]]\n" + "\n".join(settings) + "\n", encoding="utf-8")
    return load_recipe(path)


def aligned(folder: Path, source: bytes, target: bytes, *settings: str) -> list[tuple[int, str, str]]:
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    found = recipe(folder, 'source = ["a.en"]', 'target = ["a.de"]', *settings)
    return [(p.line, p.source, p.target) for p in read(found)]


def tsv(folder: Path, text: bytes, *settings: str) -> pairs.PairRecipe:
    (folder / "a.tsv").write_bytes(text)
    return recipe(folder, 'format = "tsv"', 'files = ["a.tsv"]', *settings)


def test_only_lf_and_crlf_end_a_line(tmp_path):
    """C005: other characters that some readers take for line ends are part of the sentence."""
    source = "one\u2028two\x0bthree\nfour\n".encode()
    target = "eins\nzwei\u0085drei\rvier\n".encode()
    assert aligned(tmp_path, source, target) == [
        (1, "one\u2028two\x0bthree", "eins"),
        (2, "four", "zwei\u0085drei vier"),
    ]


def test_files_from_windows_give_the_same_pairs(tmp_path):
    """C036: a BOM goes, CRLF is LF, a lone CR is a space; in aligned files and in TSV."""
    source, target = b"\xef\xbb\xbfa b\r\nc\rd\r\n", b"\xef\xbb\xbfA B\r\nC\rD\r\n"
    expected = [(1, "a b", "A B"), (2, "c d", "C D")]
    assert aligned(tmp_path, source, target) == expected
    both = tsv(tmp_path, b"\xef\xbb\xbfa b\tA B\r\nc\rd\tC\rD\r\n")
    assert [(p.line, p.source, p.target) for p in read(both)] == expected


def test_bytes_that_are_not_utf8_are_named_by_file_line_and_byte(tmp_path):
    """C075: with `replace` all lines pass."""
    good, bad = b"1\n2\n3\n4\n5\n", b"1\n2\nx\xff\n4\n5\n"
    with pytest.raises(UserError, match=r"a\.de: line 3 is not UTF-8: byte 0xff at byte 2"):
        aligned(tmp_path, good, bad)
    found = aligned(tmp_path, good, bad, 'encoding_errors = "replace"')
    assert len(found) == 5 and found[2] == (3, "3", "x\ufffd")


@pytest.mark.parametrize(("one", "other"), [(b"a\nb\nc\n", b"A\n"), (b"a\n", b"A\nB\nC\n"), (b"", b"A\n")])
def test_unequal_numbers_of_lines_are_an_error_that_names_both(tmp_path, one, other):
    """C005: the pairs before the end of the shorter file are not taken for the whole."""
    counts = rf"a\.en has {one.count(10)} lines and .*a\.de has {other.count(10)};"
    with pytest.raises(UserError, match=counts):
        aligned(tmp_path, one, other)


def test_blank_lines_keep_their_place(tmp_path):
    assert aligned(tmp_path, b"a\n\n  \nd", b"A\nB\n\nD\n") == [
        (1, "a", "A"), (2, "", "B"), (3, "", ""), (4, "d", "D"),
    ]  # fmt: skip


def test_gzip_and_globs_pair_files_by_name(tmp_path):
    for name, text in {"x1.en": "a\n", "x2.en": "b\n", "x1.de": "A\n", "x2.de": "B\n"}.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    found = recipe(tmp_path, 'source = ["x*.en.gz"]', 'target = ["x*.de.gz"]')
    assert [p[2:] for p in read(found)] == [("a", "A"), ("b", "B")]
    assert pairs.input_names(found) == ["x1.en.gz", "x2.en.gz"]
    (tmp_path / "x2.de.gz").unlink()
    with pytest.raises(ConfigError, match=r"2 files are found for `source` and 1 for `target`: x1\.en\.gz, x2\.en\.gz"):
        recipe(tmp_path, 'source = ["x*.en.gz"]', 'target = ["x*.de.gz"]')


def test_a_file_cut_short_is_noticed(tmp_path):
    """C121: a part of a gzip file, and a file that is not the one of the digest."""
    (tmp_path / "a.en").write_bytes(b"a\n")
    whole = gzip.compress(b"line\n" * 1000, mtime=0)
    (tmp_path / "a.de.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.de\.gz: the gzip file ends too early"):
        list(read(recipe(tmp_path, 'source = ["a.en"]', 'target = ["a.de.gz"]')))
    found = recipe(tmp_path, 'source = ["a.en"]', 'target = ["a.de.gz"]', "[sources.sizes]", '"a.de.gz" = 9')
    with pytest.raises(UserError, match="not the 9 the recipe says"):
        pairs.check(found)
    with pytest.raises(UserError, match="not the 9 the recipe says"):
        next(read(found))


def test_quotes_in_tsv_are_characters_and_short_lines_are_counted(tmp_path):
    """C078: no quoting; further columns do not matter; a line with too few columns is reported by its number."""
    text = b'"a\tA"\nb\tB\textra\n\nonly one\n\tD\n'
    found = tsv(tmp_path, text)
    with pytest.raises(UserError, match=r"a\.tsv: line 4 does not have both sides"):
        list(read(found))
    malformed = []
    kept = list(read(found, lambda *place: malformed.append(place)))
    assert [p[1:] for p in kept] == [(1, '"a', 'A"'), (2, "b", "B"), (5, "", "D")]
    assert malformed == [("a.tsv", 4)]
    turned = tsv(tmp_path, b"x\tA\ta\n", "source_column = 3", "target_column = 2")
    assert [p[2:] for p in read(turned)] == [("a", "A")]


def test_json_lines_have_a_key_for_each_side(tmp_path):
    rows = [{"en": "a\nb", "de": "A"}, {"en": "c", "de": None}, {"en": "e", "de": "E"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = recipe(tmp_path, 'format = "jsonl"', 'files = ["a.jsonl"]')
    malformed = []
    assert [p[1:] for p in read(found, lambda *place: malformed.append(place))] == [(1, "a b", "A"), (3, "e", "E")]
    assert malformed == [("a.jsonl", 2)]
    with pytest.raises(UserError, match=r"no key 'eng'; set `source_key` and `target_key`; did you mean `en`"):
        list(read(recipe(tmp_path, 'format = "jsonl"', 'files = ["a.jsonl"]', 'source_key = "eng"')))
    (tmp_path / "a.jsonl").write_text('{"en": ["a"], "de": "A"}\n')
    with pytest.raises(UserError, match="line 1: 'en' is not a text"):
        list(read(found))


def test_fields_in_fields_are_named_with_a_dot(tmp_path):
    rows = [{"translation": {"en": "a", "de": "A"}}, {"translation": {"en": "b", "de": "B"}}]
    keys = 'source_key = "translation.en"', 'target_key = "translation.de"'
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        found = recipe(tmp_path, f'format = "{kind}"', f'files = ["a.{kind}"]', *keys)
        assert [p[1:] for p in read(found)] == [(1, "a", "A"), (2, "b", "B")]
        wrong = recipe(
            tmp_path, f'format = "{kind}"', f'files = ["a.{kind}"]', keys[0], 'target_key = "translation.fr"'
        )
        with pytest.raises(UserError, match=r"no (key|column) 'translation\.fr'.*; set `source_key` and `target_key`"):
            list(read(wrong))


def test_parquet_columns_must_hold_texts(tmp_path):
    table = pyarrow.table({"en": ["a", None], "de": ["A", "B"], "n": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    settings = 'format = "parquet"', 'files = ["a.parquet"]'
    assert [p[1:] for p in read(recipe(tmp_path, *settings), lambda *place: None)] == [(1, "a", "A")]
    with pytest.raises(UserError, match="column 'n' holds int64; it must hold texts"):
        list(read(recipe(tmp_path, *settings, 'target_key = "n"')))


def test_a_tfds_set_of_translations_is_read_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    class TinyTranslate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(languages=("de", "en"))
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(3), "test": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"en": f"sentence {i}", "de": f"Sätzchen {i}"}

    TinyTranslate(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    head = HEAD + f'[[sources]]\nformat = "tfds"\ndataset = "tiny_translate"\ndata_dir = "{tmp_path}"\nuse = "train"\n'
    found = recipe(
        tmp_path, 'format = "tfds"', 'dataset = "tiny_translate"', f'data_dir = "{tmp_path}"', 'split = "test"',
        'use = "test"', head=head,
    )  # fmt: skip
    pairs_read = list(read(found))
    assert sorted(p.target for p in pairs_read) == ["Sätzchen 0"] * 2 + ["Sätzchen 1", "Sätzchen 2"]
    assert all(p.source.split()[1] == p.target.split()[1] for p in pairs_read)
    assert pairs.input_names(found) == ["tiny_translate:train", "tiny_translate:test"]
    assert pairs.input_uses(found) == ["train", "test"]


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """C035: two aligned files go by blocks."""
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 1 << 12)
    peaks = []
    for count in (5_000, 50_000):
        text = b"".join(b"this is line %d\n" % i for i in range(count))
        (tmp_path / "a.en").write_bytes(text)
        (tmp_path / "a.de").write_bytes(text)
        found = recipe(tmp_path, 'source = ["a.en"]', 'target = ["a.de"]')
        peaks.append(min(peak_of_reading(found, count) for _ in range(3)))  # other threads only add
    assert peaks[1] < 1.2 * peaks[0] < 1e6


def peak_of_reading(found, count):
    gc.collect()
    tracemalloc.start()
    try:
        assert sum(1 for _ in read(found)) == count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['source = ["a.en"]'], "needs `source` and `target`"),
        (['format = "tsv"', 'source = ["a.en"]'], "does not name `source` and `target`"),
        (['format = "tsv"'], "a tsv source needs `files`"),
        (['format = "tsv"', 'files = ["a.tsv"]', "target_column = 1"], "two different numbers"),
        (['format = "tfds"'], "a tfds source names `dataset`"),
        (['format = "tsv"', 'files = ["nowhere.tsv"]'], r"nowhere\.tsv: no such file"),
        (
            ['format = "tsv"', 'fils = ["a.tsv"]'],
            r"unknown key `sources\[0\]\.fils`; did you mean `sources\[0\]\.files`",
        ),
        (['format = "tsv"', 'files = ["a.tsv"]', 'use = "test"'], "no source of the recipe is for training"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path, settings, message):
    (tmp_path / "a.tsv").write_bytes(b"a\tA\n")
    (tmp_path / "a.en").write_bytes(b"a\n")
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(tmp_path, *settings)
    assert "recipe.toml" in str(caught.value)


@pytest.mark.parametrize("share", ["validation = 1.0", "test = -0.1", "validation = 0.6\ntest = 0.5"])
def test_shares_must_leave_pairs_for_training(tmp_path, share):
    (tmp_path / "a.tsv").write_bytes(b"a\tA\n")
    with pytest.raises(ConfigError, match=r"share of the pairs|leave no pair for training"):
        recipe(tmp_path, 'format = "tsv"', 'files = ["a.tsv"]', head=HEAD + share + "\n")


def test_a_description_has_no_path_of_the_machine_and_changes_with_the_files(tmp_path):
    found = tsv(tmp_path, b"a\tA\n")
    before = pairs.describe(found)
    assert str(tmp_path) not in json.dumps(before)
    assert before["order"] == ["a.tsv"] and before["inputs"]["a.tsv"]["source_key"] == "en"
    (tmp_path / "a.tsv").write_bytes(b"a\tA\nb\tB\n")
    after = pairs.describe(found)
    assert before["inputs"]["a.tsv"]["sha256"] != after["inputs"]["a.tsv"]["sha256"]
    assert "sha256" not in pairs.describe(found, digests=False)["inputs"]["a.tsv"]
