"""Corpora: recipes, lines, documents, formats, and every way in which a file can be broken."""

import gzip
import hashlib
import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiny_tfds
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax import corpora, records, tfds_prepare, tfds_source
from transformer_jax import lines as text_lines
from transformer_jax.config import ConfigError, UserError
from transformer_jax.corpora import describe, documents, load_recipe, source_names, word_sources
from transformer_jax.lines import lines


def recipe(folder: Path, text: str) -> corpora.Recipe:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def source(folder: Path, *settings: str) -> corpora.Recipe:
    return recipe(folder, "[[sources]]\n" + "\n".join(settings) + "\n")


def read(found: corpora.Recipe) -> list[list[str]]:
    return [d.sentences for d in documents(found)]


def one_file(folder: Path, data: bytes, *settings: str, name: str = "a.txt") -> list[list[str]]:
    (folder / name).write_bytes(data)
    return read(source(folder, f'files = ["{name}"]', *settings))


# --- lines and documents of text


def test_only_lf_and_crlf_end_a_line(tmp_path: Path) -> None:
    """C005."""
    (tmp_path / "a").write_bytes("one\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85two\nthree\rfour\r\n\r\nfive".encode())
    assert list(lines(tmp_path / "a")) == [
        (1, "one\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85two"), (2, "three four"), (3, ""), (4, "five"),
    ]  # fmt: skip


def test_windows_files_read_like_others(tmp_path: Path) -> None:
    """C036: a byte order mark goes, CRLF is LF, a lone CR a space."""
    assert one_file(tmp_path, b"\xef\xbb\xbfa b\r\nc\rd\r\n") == [["a b", "c d"]]


@given(
    st.lists(
        st.sampled_from([b"a", "é".encode(), "汉".encode(), b"\n", b"\r", b"\r\n", b" ", b"\xef\xbb\xbf"]), max_size=30
    ),
    st.integers(1, 9),
)
def test_lines_do_not_depend_on_the_block_size(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], size: int
) -> None:
    data = b"".join(parts)
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(data)
    text = data.removeprefix(b"\xef\xbb\xbf").decode().replace("\r\n", "\n").replace("\r", " ")
    expected = text.split("\n")
    if expected[-1] == "":
        expected.pop()
    before = text_lines.BLOCK_BYTES
    try:
        text_lines.BLOCK_BYTES = size
        assert list(lines(path)) == list(enumerate(expected, 1))
    finally:
        text_lines.BLOCK_BYTES = before


def test_any_run_of_blank_lines_is_one_break_and_the_last_document_counts(tmp_path: Path) -> None:
    """C080: blank means white space only, NBSP and ideographic space included."""
    text = "\n\n\n   \n\u00a0\nFirst one.\nStill first.\n\n \u3000\t\n\u00a0\n  Second one. "
    assert one_file(tmp_path, text.encode()) == [["First one.", "Still first."], ["Second one."]]
    found = list(documents(load_recipe(tmp_path / "recipe.toml")))
    assert [(d.source, d.line) for d in found] == [(0, 6), (0, 11)]


def test_running_text_is_split_and_wrapped_text_is_joined_first(tmp_path: Path) -> None:
    text = b"It rains. We stay\nin. Mr. Smith\ngoes.\n\nNew one. End."
    assert one_file(tmp_path, text, 'sentences = "split"') == [
        ["It rains.", "We stay", "in.", "Mr. Smith", "goes."], ["New one.", "End."],
    ]  # fmt: skip
    assert one_file(tmp_path, text, 'sentences = "unwrap"') == [
        ["It rains.", "We stay in.", "Mr. Smith goes."], ["New one.", "End."],
    ]  # fmt: skip
    assert one_file(tmp_path, text, 'sentences = "unwrap"', 'documents = "file"') == [
        ["It rains.", "We stay in.", "Mr. Smith goes.", "New one.", "End."]
    ]
    assert one_file(tmp_path, "他说\n了。我走。".encode(), 'sentences = "unwrap"') == [["他说了。", "我走。"]]


def test_bytes_that_are_not_utf_8_are_named_or_replaced(tmp_path: Path) -> None:
    """C075: file, line, byte."""
    data = b"one\ntwo\nth\xffee\nfour\nfive\n"
    with pytest.raises(UserError, match=r"a\.txt: line 3 is not UTF-8: byte 0xff at byte 3 of the line"):
        one_file(tmp_path, data)
    assert one_file(tmp_path, data, 'encoding_errors = "replace"') == [["one", "two", "th\ufffdee", "four", "five"]]
    with pytest.raises(UserError, match="line 2 is not UTF-8"):
        one_file(tmp_path, "ok\n汉".encode()[:-1])


def test_the_line_of_bad_bytes_is_right_beyond_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "BLOCK_BYTES", 7)
    with pytest.raises(UserError, match="line 41 is not UTF-8: byte 0xfe at byte 6"):
        one_file(tmp_path, b"abc\n" * 40 + b"hello\xfe\n")


# --- files


def test_files_come_in_the_order_given_and_globs_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "z.txt", "sub/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with gzip.open(tmp_path / "c.txt.gz", "wb") as f:
        f.write(b"zipped\n")
    found = source(tmp_path, 'files = ["z.txt", "[ab].txt", "*.gz", "sub/*.txt"]')
    assert read(found) == [["z.txt"], ["a.txt"], ["b.txt"], ["zipped"], ["sub/a.txt"]]
    assert [d.source for d in documents(found)] == [0, 1, 2, 3, 4]
    names = source_names(found)
    assert names[0] == "z.txt" and names[3] == "c.txt.gz" and names[4] == "sub/a.txt" and len(set(names)) == 5


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"recipe\.toml: .*corpsu\.txt: no such file; did you mean `corpus\.txt`"):
        source(tmp_path, 'files = ["corpsu.txt"]')
    with pytest.raises(ConfigError, match=r"no file matches .*\*\.gz"):
        source(tmp_path, 'files = ["*.gz"]')
    with pytest.raises(ConfigError, match="named twice"):
        source(tmp_path, 'files = ["corpus.txt", "*.txt"]')
    (tmp_path / "books").mkdir()
    with pytest.raises(ConfigError, match=r"books is a folder; name the files in it, as in books/\*\.txt"):
        source(tmp_path, 'files = ["books"]')
    found = source(tmp_path, 'files = ["corpus.txt"]')
    (tmp_path / "corpus.txt").unlink()
    with pytest.raises(UserError, match=r"corpus\.txt: no such file"):
        read(found)


def test_a_gzip_file_cut_anywhere_or_damaged_is_named(tmp_path: Path) -> None:
    """C121: a part of a file is never taken for the file."""
    whole = gzip.compress(b"".join(b"line %d\n" % i for i in range(2000)))
    for end in (len(whole) // 2, len(whole) - 1, len(whole) - 8, 11, 1):
        with pytest.raises(UserError, match=r"a\.txt\.gz: (the gzip file ends too early|not a whole gzip)"):
            one_file(tmp_path, whole[:end], name="a.txt.gz")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    with pytest.raises(UserError, match=r"a\.txt\.gz: (the gzip file ends too early|not a whole gzip)"):
        one_file(tmp_path, bytes(damaged), name="a.txt.gz")
    with pytest.raises(UserError, match="not a whole gzip file"):
        one_file(tmp_path, b"plain text", name="a.txt.gz")


def test_sizes_and_digests_of_the_recipe_are_checked(tmp_path: Path) -> None:
    """C121: for plain text, only these can notice a file cut in half."""
    data = b"one\ntwo\n"
    digest = hashlib.sha256(data).hexdigest()
    good = ('sizes = {"a.txt" = 8}', f'sha256 = {{"a.txt" = "{digest}"}}')
    assert one_file(tmp_path, data, *good) == [["one", "two"]]
    with pytest.raises(UserError, match=r"a\.txt has 4 bytes and not the 8"):
        one_file(tmp_path, data[:4], good[0])
    with pytest.raises(UserError, match=r"a\.txt: SHA-256 .* is not the recipe's"):
        one_file(tmp_path, b"one\nTwo\n", good[1])
    with pytest.raises(ConfigError, match=r"given for b\.txt, which is not among"):
        one_file(tmp_path, data, 'sizes = {"b.txt" = 8}')


@pytest.mark.parametrize("data", [b"", b"\n \n", "\u00a0\n".encode(), b"\xef\xbb\xbf"])
def test_an_empty_corpus_is_an_error_that_names_the_files(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UserError, match=r"the corpus is empty: no document in .*a\.txt"):
        one_file(tmp_path, data)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """C035: by blocks, never whole; measured by Python's own count of memory."""
    peaks = []
    for blocks in (2, 16):
        (tmp_path / "a.txt").write_bytes((b"some words in a line of text\n" * 30 + b"\n") * (blocks * 1150))
        found = source(tmp_path, 'files = ["a.txt"]')
        tracemalloc.start()
        assert sum(1 for _ in documents(found)) == blocks * 1150
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 20e6, peaks


# --- recipes


def test_a_mistyped_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `sources\[0\]\.fiels`; did you mean `sources\[0\]\.files`"):
        source(tmp_path, 'fiels = ["a"]')
    with pytest.raises(ConfigError, match="at least one"):
        recipe(tmp_path, "name = 'x'\n")
    with pytest.raises(ConfigError, match="needs `files`"):
        source(tmp_path, 'format = "jsonl"')
    with pytest.raises(ConfigError, match="names `dataset`"):
        source(tmp_path, 'format = "tfds"')
    with pytest.raises(ConfigError, match='needs `sentences = "lines"`'):
        source(tmp_path, 'files = ["a"]', 'words = "spaces"', 'sentences = "split"')
    with pytest.raises(ConfigError, match="heldout is 1"):
        recipe(tmp_path, "heldout = 1.0\n[[sources]]\nfiles = ['a']\n")
    with pytest.raises(ConfigError, match="did you mean `characters`"):
        recipe(tmp_path, "pre_splitter = 'character'\n[[sources]]\nfiles = ['a']\n")


def test_a_description_has_what_matters_and_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("segmented text\n")
    text = 'heldout = 0.5\n[[sources]]\nfiles = ["a.txt"]\n[[sources]]\nfiles = ["b.txt"]\nwords = "spaces"\n'
    found = recipe(tmp_path, text)
    assert found.name == "recipe" and word_sources(found) == [False, True]
    first = describe(found)
    assert json.loads(json.dumps(first)) == first and str(tmp_path) not in json.dumps(first)
    (tmp_path / "moved").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert describe(recipe(tmp_path / "moved", text)) == first
    (tmp_path / "moved" / "a.txt").write_text("two\n")
    os.utime(tmp_path / "moved" / "a.txt", ns=(1, 1))
    assert describe(load_recipe(tmp_path / "moved" / "recipe.toml")) != first


# --- JSONL


def jsonl(*records: object) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def test_jsonl_records_are_documents(tmp_path: Path) -> None:
    data = jsonl(
        {"text": "One.\nTwo\u2028still.\r\n\nThree. Four.", "id": 1}, {"text": ["A b.\nc", " ", "D."]}, {"text": None}
    )
    found = one_file(tmp_path, data + b"\n" + jsonl({"text": " "}), 'format = "jsonl"')
    assert found == [["One.", "Two\u2028still.", "Three. Four."], ["A b. c", "D."]]
    split = one_file(tmp_path, data, 'format = "jsonl"', 'sentences = "split"')
    assert split[0] == ["One.", "Two\u2028still.", "Three.", "Four."]
    wrapped = one_file(
        tmp_path, jsonl({"body": "a\nb. C.\n\nd"}), 'format = "jsonl"', 'sentences = "unwrap"', 'key = "body"'
    )
    assert wrapped == [["a b.", "C.", "d"]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"', "line 2 is not valid JSON"),
        (b'{"text": "a"}\n{"text": ' + b"[" * 50000 + b"]" * 50000 + b"}", "line 2 is not valid JSON"),
        (b'["a"]\n', "line 1 is not a JSON object"),
        (b'{"txt": "a"}\n', r"line 1 has no key 'text'; set `key`; did you mean `txt`"),
        (b'{"text": 3}\n', "line 1: 'text' is neither a text nor a list of texts"),
        (b'{"text": "a\xff"}\n', "line 1 is not UTF-8"),
    ],
)
def test_a_broken_line_of_jsonl_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        one_file(tmp_path, data, 'format = "jsonl"')


# --- Parquet


def parquet(path: Path, **columns: list[object]) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def test_parquet_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROWS", 2)
    data = parquet(tmp_path / "a", text=["One.\nTwo.", None, "Drei. Vier.", "", "汉。"], n=[1, 2, 3, 4, 5])
    assert one_file(tmp_path, data, 'format = "parquet"') == [["One.", "Two."], ["Drei. Vier."], ["汉。"]]
    assert [d.line for d in documents(load_recipe(tmp_path / "recipe.toml"))] == [1, 3, 5]
    listed = parquet(tmp_path / "a", sentences=[["A.", "B."], []])
    assert one_file(tmp_path, listed, 'format = "parquet"', 'key = "sentences"') == [["A.", "B."]]


def test_a_broken_parquet_file_or_column_is_named(tmp_path: Path) -> None:
    data = parquet(tmp_path / "a", text=["x" * 50, "y"], n=[1, 2])
    with pytest.raises(UserError, match="no column 'txt'; set `key`; did you mean `text`"):
        one_file(tmp_path, data, 'format = "parquet"', 'key = "txt"')
    with pytest.raises(UserError, match="column 'n' holds int64"):
        one_file(tmp_path, data, 'format = "parquet"', 'key = "n"')
    with pytest.raises(UserError, match=r"a\.txt: not a whole Parquet file"):
        one_file(tmp_path, data[: len(data) // 2], 'format = "parquet"')


def test_parquet_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        one_file(tmp_path, b"", 'format = "parquet"')


# --- TFDS


@pytest.fixture(scope="module")
def tfds_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tfds.make_articles(tmp_path_factory.mktemp("tfds"), "array_record")


def articles(folder: Path, root: Path, *settings: str) -> corpora.Recipe:
    return source(folder, 'format = "tfds"', 'dataset = "articles"', f'data_dir = "{root}"', *settings)


def test_tfds_array_record_is_read_without_tensorflow(
    tmp_path: Path, tfds_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tensorflow" not in sys.modules
    monkeypatch.setattr(tfds_source, "RECORDS", 2)
    found = read(articles(tmp_path, tfds_root, 'sentences = "split"'))
    assert sorted(found) == [[f"Article {i} é.", "Second line.", "It goes on.", "Next."] for i in range(5)]
    assert found == read(articles(tmp_path, tfds_root / "articles" / "1.2.0", 'sentences = "split"'))
    titles = articles(tmp_path, tfds_root, 'key = "title"', 'split = "train[:40%]"')
    assert len(read(titles)) == 2 and source_names(titles) == ["articles:train[:40%]"]
    assert len(describe(titles)["inputs"][0]["sha256"]) == 64


def test_mistakes_in_a_tfds_source_are_named(tmp_path: Path, tfds_root: Path) -> None:
    with pytest.raises(UserError, match=r"split 'test' cannot be read: .*Unknown split"):
        read(articles(tmp_path, tfds_root, 'split = "test"'))
    with pytest.raises(UserError, match="no feature 'txt'; set `key`; did you mean `text`"):
        read(articles(tmp_path, tfds_root, 'key = "txt"'))
    with pytest.raises(UserError, match="feature 'id' is not a text"):
        read(articles(tmp_path, tfds_root, 'key = "id"'))


@pytest.mark.parametrize("name", ["wikipedia/20230601.en", "wmt14_translate/de-en"])
def test_a_tfds_set_that_is_not_there_stops_with_the_command_that_makes_it(tmp_path: Path, name: str) -> None:
    command = f"python -m transformer_jax.tfds_prepare {name} --data-dir {tmp_path}"
    with pytest.raises(ConfigError, match="extra `tfds-prepare`") as e:
        source(tmp_path, 'format = "tfds"', f'dataset = "{name}"', 'data_dir = "."')
    assert str(e.value).endswith(command)


@pytest.mark.parametrize("file_format", ["tfrecord", "parquet"])
def test_a_tfds_set_in_another_format_stops_with_the_command(tmp_path: Path, file_format: str) -> None:
    folder = tmp_path / "wikipedia" / "20230601.en" / "1.0.0"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(json.dumps({"name": "wikipedia", "fileFormat": file_format}))
    found = source(tmp_path, 'format = "tfds"', 'dataset = "wikipedia/20230601.en"', f'data_dir = "{tmp_path}"')
    with pytest.raises(UserError, match=f"in the format {file_format}") as e:
        read(found)
    assert str(e.value).endswith(f"transformer_jax.tfds_prepare wikipedia/20230601.en --data-dir {tmp_path}")


def test_a_parquet_set_is_copied_to_array_record(tmp_path: Path, tfds_root: Path) -> None:
    tiny_tfds.make_articles(tmp_path, "parquet")
    found = articles(tmp_path, tmp_path)
    with pytest.raises(UserError, match="in the format parquet"):
        read(found)
    tfds_prepare.copy_parquet(tmp_path / "articles" / "1.2.0")
    assert read(found) == read(articles(tmp_path, tfds_root))


def test_a_tfds_set_with_a_missing_or_cut_file_is_an_error(tmp_path: Path, tfds_root: Path) -> None:
    """C121."""
    for damage in ("missing", "cut"):
        root = tmp_path / damage
        shutil.copytree(tfds_root, root)
        (file,) = root.glob("articles/1.2.0/*.array_record*")
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(UserError, match=r"articles/1\.2\.0"):
            read(articles(tmp_path, root))


def test_the_tfds_command_says_that_tensorflow_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tfds_prepare.main(["wikipedia/20230601.en", "--data-dir", str(tmp_path)]) == 2
    assert "bert-transformer-jax[tfds-prepare]" in capsys.readouterr().err
