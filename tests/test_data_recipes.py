"""The recipes and texts of `data/`: all load, are what their digests say, and have cards and licences."""

import gzip
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import ExamplesConfig
from bert_jax.data import PretrainingData
from transformer_jax import config, corpora, prepare, shards
from transformer_jax.config import ConfigError, UserError
from transformer_jax.corpora import Recipe
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig

DATA = Path(__file__).parents[1] / "data"
RECIPES = sorted(p for p in DATA.glob("*.toml") if not p.name.startswith("pairs_"))
"""Those of documents; test_translation_recipes.py has those of pairs."""
TEXTS = sorted(
    p for folder in ("docs", "examples", "pairs") for p in (DATA / folder).rglob("*") if p.suffix not in ("", ".md")
)


def parsed(path):
    return config.load(Recipe, config.read_toml(path), str(path))


def bundled():
    return [path for path in RECIPES if all(source.format != "tfds" for source in parsed(path).sources)]


def ids(path):
    return path.name


def test_the_recipes_of_all_formats_are_there():
    formats = {source.format for path in RECIPES for source in parsed(path).sources}
    assert formats == {"text", "jsonl", "parquet", "tfds"}


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_a_recipe_says_what_it_is(path):
    recipe = parsed(path)
    assert recipe.name == path.stem and recipe.license and recipe.language and recipe.heldout > 0


@pytest.mark.parametrize("path", bundled(), ids=ids)
def test_a_bundled_recipe_loads_and_gives_digests_of_all_its_files(path):
    for source in corpora.load_recipe(path).sources:
        assert set(source.sha256) == set(source.files)
        for file, digest in source.sha256.items():
            assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("path", bundled(), ids=ids)
def test_a_bundled_recipe_gives_documents_of_several_sentences(path):
    recipe = corpora.load_recipe(path)
    seen = set()
    sentences = []
    for document in corpora.documents(recipe):
        seen.add(document.source)
        sentences.append(len(document.sentences))
        assert all(s and s == s.strip() for s in document.sentences)
    assert seen == set(range(len(corpora.source_names(recipe))))
    assert len(sentences) >= 20 and np.mean(sentences) > 2


@pytest.mark.parametrize("path", [p for p in RECIPES if p not in bundled()], ids=ids)
def test_a_tfds_recipe_names_the_command_that_makes_the_set(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = parsed(path).sources[0].dataset
    command = rf"python -m transformer_jax\.tfds_prepare {dataset} --data-dir "
    with pytest.raises(ConfigError, match=command):
        corpora.load_recipe(path)
    assert re.search(command, path.read_text(encoding="utf-8"))


def test_a_bundled_file_cut_in_half_is_noticed(tmp_path):
    """C121: partial data is an error, without any network."""
    (tmp_path / "examples").mkdir()
    whole = (DATA / "examples" / "jargon.jsonl").read_bytes()
    (tmp_path / "examples" / "jargon.jsonl").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "example_jsonl.toml").write_bytes((DATA / "example_jsonl.toml").read_bytes())
    with pytest.raises(UserError, match=r"jargon\.jsonl"):
        list(corpora.documents(corpora.load_recipe(tmp_path / "example_jsonl.toml")))


@pytest.mark.parametrize("path", TEXTS, ids=ids)
def test_every_bundled_text_has_a_licence_whose_text_is_there(path):
    licences = (DATA / "LICENSES.md").read_text(encoding="utf-8")
    row = next(line for line in licences.splitlines() if line.startswith("|") and str(path.relative_to(DATA)) in line)
    assert re.search(r"public domain|\]\(licenses/", row)
    for target in re.findall(r"\]\((licenses/[^)]+)\)", row):
        assert (DATA / target).stat().st_size > 1000


@pytest.mark.parametrize("path", [p for p in TEXTS if p.is_relative_to(DATA / "docs")], ids=ids)
def test_the_card_states_the_counts_of_the_file(path):
    card = (path.parent / "CARDS.md").read_text(encoding="utf-8")
    assert f"## {path.name.removesuffix('.txt.gz')}\n" in card
    row = next(line for line in card.splitlines() if line.startswith(f"| {path.name} "))
    text = gzip.decompress(path.read_bytes()).decode()
    documents = [d for d in text.split("\n\n") if d.strip()]
    lines = [line for line in text.split("\n") if line.strip()]
    for number in (len(documents), len(lines), len(text.encode())):
        assert f" {number:,} " in row


def test_an_example_recipe_prepares(tmp_path):
    recipe = corpora.load_recipe(DATA / "example_jsonl.toml")
    settings = WordPieceConfig(vocab_size=300, min_frequency=1)
    messages = []
    for _ in range(2):
        report = prepare.prepare(recipe, settings, tmp_path, workers=1, min_documents=2, say=messages.append)
    assert report["documents"]["train"] + report["documents"]["heldout"] == 22
    assert messages == [f"{tmp_path} is up to date"]
    assert shards.Shards.open(tmp_path, "train", check="digests").num_tokens == report["tokens"]["train"]


def test_an_own_vocabulary_file_is_followed_by_content(tmp_path):
    recipe = corpora.load_recipe(DATA / "example_parquet.toml")
    vocabulary = tmp_path / "vocab.txt"
    characters = sorted({c for d in corpora.documents(recipe) for s in d.sentences for c in s.lower() if c != " "})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *("##" + c for c in characters)]
    vocabulary.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    settings = WordPieceConfig(vocab_file=str(vocabulary))
    messages = []
    arguments = {"workers": 1, "max_unknown_rate": 0.5, "say": messages.append}
    prepare.prepare(recipe, settings, tmp_path / "p", **arguments)
    assert shards.Shards.open(tmp_path / "p").tokenizer.vocab == pieces
    vocabulary.write_text("\n".join([*pieces, "hacker"]) + "\n", encoding="utf-8")
    prepare.prepare(recipe, settings, tmp_path / "p", **arguments)
    assert len(messages) == 1 and messages[0].startswith("tokenizer.vocab_file was ")
    assert shards.Shards.open(tmp_path / "p").tokenizer.vocab == [*pieces, "hacker"]
    settings = WordPieceConfig(vocab_file=str(tmp_path / "nowhere.txt"))
    with pytest.raises(UserError, match=r"tokenizer.vocab_file .*nowhere.txt cannot be read: No such file"):
        prepare.prepare(recipe, settings, tmp_path / "q", **arguments)


def worked_example(folder, pack):
    """The rows of two pairs, as data/README.md prints them."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "it", "purr", "##ed"]
    vocab += ["dogs", "bark", "they", "ran", "far"]
    tokenizer = WordPiece(vocab, WordPieceConfig())
    documents = [["the cat sat", "it purred"], ["dogs bark", "they ran far"]]
    train = [[tokenizer.encode(sentence) for sentence in document] for document in documents]
    shards.write_prepared(folder, tokenizer, {"train": train, "heldout": []})
    settings = ExamplesConfig(
        max_seq_length=20, pack=pack, max_sequences_per_row=2 * pack, max_predictions_per_row=4, short_seq_prob=0.0
    )
    data = PretrainingData(shards.Shards.open(folder), settings, seed=0)
    batch = data.batch(0, data.num_rows(0))
    lines = []
    for row, pieces in enumerate(batch["input_ids"]):
        lines += [f"row {row}: " + " ".join(vocab[i] for i in pieces)]
        for name, values in batch.items():
            if name != "row_ids":
                lines += [f"  {name:22}" + " ".join(f"{int(v):>2}" for v in values[row])]
    return "\n".join(lines) + "\n", set(batch)


@pytest.mark.parametrize("pack", [False, True])
def test_the_batch_contract_shows_what_batches_are(tmp_path, pack):
    """If this fails because batches are meant to change, put the text it prints into data/README.md."""
    readme = (DATA / "README.md").read_text(encoding="utf-8").partition("\n## The batch contract of pairs\n")[0]
    example, names = worked_example(tmp_path, pack)
    assert example in readme, "\n" + example
    assert set(re.findall(r"^\| `(\w+)` \| (?:int|float)32 \[", readme, re.MULTILINE)) == names
