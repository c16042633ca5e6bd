"""More positions, segments and words than a checkpoint has: what the new rows start from, and that old inputs give the
same."""

import dataclasses

import numpy as np
import pytest
import tiny_run
from tiny_bert import random_params, tiny_config, tiny_tokenizer

from bert_jax import loading, pretrain, resize
from bert_jax.config import InitConfig
from bert_jax.interop import huggingface, imports
from bert_jax.interop.probe import probe_logits
from bert_jax.main import main
from transformer_jax import sharding
from transformer_jax.config import ConfigError, UserError
from transformer_jax.shards import Shards, write_prepared
from transformer_jax.tokenizer import WordPiece


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1)
    return random_params(config), config, tokenizer


def test_positions_and_segments_grow_and_short_inputs_give_the_same(model):
    params, config, tokenizer = model
    said: list[str] = []
    sized = resize.resize(params, config, tokenizer, max_position_embeddings=80, type_vocab_size=4, say=said.append)
    assert (sized.config.max_position_embeddings, sized.config.type_vocab_size) == (80, 4)
    old, new = (p["embeddings"]["position"]["embedding"] for p in (params, sized.params))
    assert new.shape == (80, 8)
    for i in (0, 31, 32, 63, 64, 79):
        np.testing.assert_array_equal(new[i], old[i % 32])
    segments = sized.params["embeddings"]["token_type"]["embedding"]
    np.testing.assert_array_equal(segments[:2], params["embeddings"]["token_type"]["embedding"])
    np.testing.assert_allclose(segments[2], segments[:2].mean(0), rtol=1e-6)
    assert said == [
        "positions 32 to 79 start as copies of 0, 1, ..., again and again",
        "segments 2 to 3 start as the mean of those that were there",
    ]
    before = probe_logits(params, config)
    after = probe_logits(sized.params, dataclasses.replace(sized.config, max_position_embeddings=80))
    assert after["MLM"].shape == before["MLM"].shape and not np.array_equal(after["MLM"], before["MLM"])
    narrow = {**sized.params["embeddings"], "position": {"embedding": new[:32]}}
    same = probe_logits({**sized.params, "embeddings": narrow}, dataclasses.replace(config, type_vocab_size=4))
    np.testing.assert_array_equal(same["MLM"], before["MLM"])


def test_a_new_word_starts_as_the_mean_of_its_pieces_and_an_unknown_one_is_drawn(model):
    params, config, tokenizer = model
    said: list[str] = []
    words = ["helloworld", "☃", "world"]
    assert "world" in tokenizer.vocab and tokenizer.encode("☃") == [tokenizer.unk_id]
    pieces = tokenizer.encode("helloworld")
    assert len(pieces) > 1
    sized = resize.resize(params, config, tokenizer, add_tokens=words, seed=3, say=said.append)
    new = sized.tokenizer
    ids = new.encode("the helloworld ☃")
    assert [new.vocab[i] for i in ids] == ["the", "helloworld", "☃"]
    table, bias = sized.params["embeddings"]["word"]["embedding"], sized.params["mlm"]["bias"]
    old_table, old_bias = params["embeddings"]["word"]["embedding"], params["mlm"]["bias"]
    np.testing.assert_allclose(table[ids[1]], old_table[pieces].mean(0), rtol=1e-6)
    np.testing.assert_allclose(bias[ids[1]], old_bias[pieces].mean(), rtol=1e-6)
    assert 0 < np.abs(table[ids[2]]).max() <= 2 * config.initializer_range
    kept = [i for i in range(tokenizer.vocab_size) if new.vocab[i] == tokenizer.vocab[i]]
    np.testing.assert_array_equal(table[kept], old_table[kept])
    assert len(kept) >= tokenizer.vocab_size - 1 and not table[new.vocab_size :].any()
    assert sized.config.vocab_size == new.vocab_size
    assert said == [
        "in the vocabulary already: world",
        "new tokens that start as the mean of their pieces: helloworld",
        "new tokens that were [UNK], so their rows are drawn with seed 3: ☃",
    ]
    again = resize.resize(params, config, tokenizer, add_tokens=words, seed=3)
    np.testing.assert_array_equal(again.params["embeddings"]["word"]["embedding"], table)


def test_a_table_cannot_get_smaller(model):
    with pytest.raises(UserError, match="max_position_embeddings is to be 16, and the model has 32; it can only grow"):
        resize.resize(*model, max_position_embeddings=16)
    with pytest.raises(ConfigError, match="white space"):
        resize.resize(*model, add_tokens=["two words"])


def test_extending_a_vocabulary_is_told_from_changing_it(model):
    tokenizer = model[2]
    longer = WordPiece(tokenizer.vocab, dataclasses.replace(tokenizer.config, keep_tokens=("snow", "rain")))
    assert resize.extends(longer, tokenizer) and not resize.extends(tokenizer, longer)
    assert not resize.extends(WordPiece([*tokenizer.vocab, "more"], tokenizer.config), tokenizer)
    cased = WordPiece(longer.vocab, dataclasses.replace(longer.config, lowercase=False))
    assert not resize.extends(cased, tokenizer)


def test_the_import_command_enlarges_and_the_run_exports(model, tmp_path, capsys):
    params, config, tokenizer = model
    source = huggingface.export(params, config, tokenizer, tmp_path / "source")
    (tmp_path / "tokens.txt").write_text("helloworld\n\nhelloworld\n", encoding="utf-8")
    code = main(["import", str(source), str(tmp_path / "run"), "--max-position-embeddings", "64",
                 "--type-vocab-size", "3", "--add-tokens", str(tmp_path / "tokens.txt")])  # fmt: skip
    assert code == 0 and capsys.readouterr().out == f"{tmp_path / 'run'}\n"
    found = loading.load(tmp_path / "run")
    assert (found.config.max_position_embeddings, found.config.type_vocab_size) == (64, 3)
    assert len(found.tokenizer.encode("helloworld")) == 1
    # A run is enlarged in the same way.
    imports.import_folder(tmp_path / "run", tmp_path / "longer", max_position_embeddings=65)
    assert loading.load(tmp_path / "longer").params["embeddings"]["position"]["embedding"].shape == (65, 8)
    (tmp_path / "empty.txt").write_text("\n \n", encoding="utf-8")
    for name, message in (("none.txt", "none.txt: No such file"), ("empty.txt", "empty.txt: no token is in it")):
        assert main(["import", str(source), str(tmp_path / "no"), "--add-tokens", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_pretraining_starts_with_more_of_all_three_than_its_checkpoint_has(tmp_path):
    """A run file with longer rows, a third segment and data prepared with two tokens more."""
    old = tiny_run.tokenizer()
    small = dataclasses.replace(tiny_run.MODEL, vocab_size=old.vocab_size)
    source = huggingface.export(random_params(small), small, old, tmp_path / "source")
    new = WordPiece(old.vocab, dataclasses.replace(old.config, keep_tokens=("wa1wa2", "wb7")))
    write_prepared(
        tmp_path / "prepared", new, {"train": tiny_run.documents(20, 0), "heldout": tiny_run.documents(4, 1)}
    )
    config = tiny_run.config(
        tmp_path,
        init=InitConfig(checkpoint=str(source)),
        model_max_position_embeddings=48,
        examples_max_seq_length=48,
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, type_vocab_size=3))
    shards = Shards.open(tmp_path / "prepared", "train")
    config = pretrain.resolve(config, shards)
    engine = pretrain.make_engine(config, sharding.make_mesh(config.mesh))
    notes: list[str] = []
    start = pretrain.elsewhere(config, engine, shards)(notes)
    tables = start.state.params["embeddings"]
    assert tables["position"]["embedding"].shape == (48, 32) and tables["token_type"]["embedding"].shape == (3, 32)
    given = loading.load(source).params["embeddings"]["word"]["embedding"]
    word = np.asarray(tables["word"]["embedding"])
    assert new.vocab_size == old.vocab_size + 1
    np.testing.assert_array_equal(word[: old.vocab_size], given[: old.vocab_size])
    assert word[old.vocab_size].any() and not word[new.vocab_size :].any()
    text = "\n".join(notes + start.notes)
    assert "positions 32 to 47" in text and "segment 2 starts" in text and "new tokens" in text
