"""The pairs and recipes of `data/`: all load, are what their digests say, hold no copies, and have cards."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from transformer_jax import corpora, pieces, shards
from transformer_jax.config import ConfigError
from transformer_jax.translation import data, pairs, prepare, survey
from transformer_jax.translation.config import BatchesConfig, PairsConfig, SentencePieceConfig, TranslationConfig
from transformer_jax.translation.survey import Splitter
from transformer_jax.translation.vocabularies import Vocabularies

DATA = Path(__file__).parents[1] / "data"
RECIPES = sorted(DATA.glob("pairs_*.toml"))
BUNDLED = [path for path in RECIPES if "wmt14" not in path.name]


def ids(path):
    return path.name


def test_the_recipes_of_all_formats_are_there():
    formats = set(
        re.findall(r'^format = "(\w+)"', "".join(p.read_text(encoding="utf-8") for p in RECIPES), re.MULTILINE)
    )
    assert formats == {"lines", "tsv", "jsonl", "parquet", "tfds"}


@pytest.mark.parametrize("path", BUNDLED, ids=ids)
def test_a_bundled_recipe_gives_pairs_and_the_digests_of_all_its_files(path):
    recipe = pairs.load_recipe(path)
    assert recipe.name == path.stem and recipe.license and recipe.source_language == "en" and recipe.target_language
    for source in recipe.sources:
        files = (*source.files, *source.source, *source.target)
        assert set(source.sha256) == set(files)
        for file, digest in source.sha256.items():
            assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest
    found = list(pairs.read(recipe))
    assert len(found) >= 60 and all(p.source and p.target for p in found)


@pytest.mark.parametrize("path", [p for p in RECIPES if p not in BUNDLED], ids=ids)
def test_a_tfds_recipe_names_the_command_that_makes_the_set(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command = r"python -m transformer_jax\.tfds_prepare wmt14_translate/\w\w-en --data-dir "
    with pytest.raises(ConfigError, match=command) as caught:
        pairs.load_recipe(path)
    said = re.search(command, str(caught.value))
    assert said is not None and said[0] in path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("language", ["de", "fr", "zh"])
def test_the_bundled_splits_share_no_sentence_and_hold_no_faults(language):
    recipe = pairs.load_recipe(DATA / f"pairs_en_{language}.toml")
    limits = PairsConfig(check_script=language == "zh")
    found = survey.make(recipe, limits, Splitter(tuple(pairs.input_uses(recipe)), 0.0, 0.0))
    totals = survey.totals(found.counts)
    assert totals["read"] == totals["train"] + totals["validation"] + totals["test"] == len(found.verdicts)
    assert min(totals["validation"], totals["test"]) >= 60 and totals["train"] > 10_000


@pytest.mark.parametrize("path", sorted(DATA.glob("pairs/*/*.gz")), ids=ids)
def test_the_card_states_the_counts_of_the_file(path):
    card = (DATA / "pairs" / "CARDS.md").read_text(encoding="utf-8")
    row = next(line for line in card.splitlines() if line.startswith(f"| {path.relative_to(DATA / 'pairs')} "))
    text = gzip.decompress(path.read_bytes()).decode()
    assert f" {len(text.splitlines()):,} " in row and f" {len(text.encode()):,} " in row
    assert f"## {path.name.split('.')[1]}\n" in card


def test_the_example_recipes_hold_the_same_pairs_and_prepare_alike(tmp_path):
    reports = []
    for name in ("two_files", "jsonl", "parquet"):
        config = TranslationConfig(
            data=PairsConfig(recipe=str(DATA / f"pairs_{name}.toml"), prepared=str(tmp_path / name)),
            tokenizer=SentencePieceConfig(vocab_size=200),
        )
        reports.append(prepare.prepare(config, workers=1))
    assert reports[0]["pairs"]["train"] + reports[0]["pairs"]["validation"] + reports[0]["pairs"]["test"] == 60
    assert reports[0]["tokens"] == reports[1]["tokens"] == reports[2]["tokens"]
    assert shards.verify(tmp_path / "parquet") == []


def test_recipes_of_documents_and_of_pairs_are_told_apart():
    with pytest.raises(ConfigError, match=r"demo_en\.toml is a recipe of documents; a recipe of pairs is needed"):
        pairs.load_recipe(DATA / "demo_en.toml")
    with pytest.raises(ConfigError, match=r"pairs_en_de\.toml is a recipe of pairs, for translation"):
        corpora.load_recipe(DATA / "pairs_en_de.toml")


def worked_example(folder, pack):
    """The rows of two pairs, as data/README.md prints them."""
    words = ["the", "cat", "sleeps", "dogs", "bark", "die", "Katze", "schläft", "Hunde", "bellen"]
    vocab = ["</s>", "<unk>", *(f"▁{word}" for word in words), "<pad>"]
    trained = pieces.train([" ".join(words)] * 9, vocab_size=200)
    model = pieces.SentencePiece(trained.model, vocab)
    write = [("the cat sleeps", "die Katze schläft"), ("dogs bark", "Hunde bellen")]
    prepare.write_pairs(folder, Vocabularies(model, model), {"train": write})
    settings = BatchesConfig(max_source_length=10, max_target_length=10, pack=pack)
    stream = data.TrainingData(shards.Shards.open(folder), settings, seed=0)
    batch = stream.batch(0, stream.num_rows(0))
    lines = []
    for row in range(len(batch["input_ids"])):
        for name in ("input_ids", "labels"):
            shown = (model.vocab[i] for i in batch[name][row])
            lines += [f"row {row}, {'source' if name == 'input_ids' else 'target'}: " + " ".join(shown)]
        for name, values in batch.items():
            if name != "row_ids":
                lines += [f"  {name:22}" + " ".join(f"{int(v):>2}" for v in values[row])]
    return "\n".join(lines) + "\n", set(batch)


@pytest.mark.parametrize("pack", [False, True])
def test_the_batch_contract_shows_what_batches_are(tmp_path, pack):
    """If this fails because batches are meant to change, put the text it prints into data/README.md."""
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    example, names = worked_example(tmp_path, pack)
    assert example in readme, "\n" + example
    section = readme[readme.index("## The batch contract of pairs") :]
    assert set(re.findall(r"^\| `(\w+)` \| (?:int|float)32 \[", section, re.MULTILINE)) == names
