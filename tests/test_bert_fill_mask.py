"""fill_mask: which pieces are offered, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_bert import random_params, tiny_config, tiny_tokenizer

from bert_jax import fill_mask as fill_mask_module
from bert_jax.fill_mask import fill_mask
from bert_jax.loading import Loaded
from bert_jax.model import BertForPreTraining
from transformer_jax.config import UserError


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """One layer, 40 positions: rows of 32 and of 40."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_hidden_layers=1, max_position_embeddings=40)
    return Loaded(BertForPreTraining(config), random_params(config), tokenizer, config)


def test_each_mask_gets_the_likeliest_pieces_with_their_probabilities(loaded):
    """C024: [MASK] is one id, and it is the model's softmax at its place that is given."""
    text = "i am going to [MASK] to study [MASK]."
    tokenizer, config = loaded.tokenizer, loaded.config
    (found,) = fill_mask(loaded, [text], top_k=3)
    ids = [tokenizer.cls_id, *tokenizer.encode_query(text)[0], tokenizer.sep_id]
    assert ids.count(tokenizer.mask_id) == len(found) == 2
    row = np.array([ids], np.int32)
    out = jax.jit(loaded.model.apply)(
        {"params": loaded.params}, row, np.zeros_like(row), np.arange(len(ids), dtype=np.int32)[None], np.ones_like(row)
    )
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
    for place, best in zip(places, found, strict=True):
        expected = np.asarray(jax.nn.softmax(out["mlm_logits_BPV"][0, place]))
        assert [fill.id for fill in best] == np.argsort(-expected)[:3].tolist()
        assert [fill.token for fill in best] == [tokenizer.vocab[fill.id] for fill in best]
        np.testing.assert_allclose([fill.probability for fill in best], np.sort(expected)[::-1][:3], rtol=1e-4)
    every = fill_mask(loaded, [text], top_k=config.vocab_size)
    assert sum(fill.probability for fill in every[0][0]) == pytest.approx(1)


def test_the_answer_does_not_depend_on_the_other_texts(loaded):
    texts = ["hello [MASK]", "[MASK] the world hello world hello", "the [MASK] of [MASK] and so on"]
    together = fill_mask(loaded, texts)
    assert [len(masks) for masks in together] == [1, 1, 2]
    assert [fill_mask(loaded, [text])[0] for text in texts] == together
    assert fill_mask(loaded, texts[::-1]) == together[::-1]


def test_the_answer_does_not_depend_on_the_padding(loaded, monkeypatch):
    text = "hello [MASK] world"
    padded = fill_mask(loaded, [text])[0][0]
    monkeypatch.setattr(fill_mask_module, "LENGTH_STEP", 1)
    exact = fill_mask(loaded, [text])[0][0]
    assert [fill.id for fill in padded] == [fill.id for fill in exact]
    np.testing.assert_allclose([f.probability for f in padded], [f.probability for f in exact], rtol=1e-5)


def test_padding_rows_of_the_vocabulary_are_never_offered(loaded):
    """C008."""
    params = jax.tree.map(np.copy, loaded.params)
    params["embeddings"]["word"]["embedding"][loaded.config.vocab_size :] = 100.0
    params["mlm"]["bias"][loaded.config.vocab_size :] = 100.0
    changed = dataclasses.replace(loaded, params=params)
    assert fill_mask(changed, ["hello [MASK]"]) == fill_mask(loaded, ["hello [MASK]"])


def test_texts_of_similar_length_share_one_program(loaded):
    fill_mask(loaded, ["hello [MASK]"])
    before = fill_mask_module._mlm_logits._cache_size()
    fill_mask(loaded, ["the world [MASK] " + "hello " * n for n in range(8)])
    assert fill_mask_module._mlm_logits._cache_size() == before


def test_a_text_as_long_as_the_model_is_taken_and_a_longer_one_refused(loaded):
    """C014."""
    words = "[MASK]" + " the" * 37
    assert len(fill_mask(loaded, [words])[0][0]) == 5
    with pytest.raises(UserError, match=r"text 1 is 41 pieces long .* 40 positions"):
        fill_mask(loaded, [words, words + " the"])


def test_what_cannot_be_answered_is_refused(loaded):
    with pytest.raises(UserError, match=r"text 1 has no \[MASK\]: 'hello world'"):
        fill_mask(loaded, ["hello [MASK]", "hello world"])
    for top_k in (0, loaded.config.vocab_size + 1):
        with pytest.raises(UserError, match=f"top_k is {top_k}"):
            fill_mask(loaded, ["hello [MASK]"], top_k)
    with pytest.raises(UserError, match=r"text 0 is not Unicode: .*surrogate"):
        fill_mask(loaded, ["[MASK] \udcff"])
    with pytest.raises(UserError, match="list of texts"):
        fill_mask(loaded, "hello [MASK]")
    with pytest.raises(UserError, match="without a masked-LM head"):
        fill_mask(dataclasses.replace(loaded, drawn=("mlm",)), ["hello [MASK]"])
    norm = {k: np.full_like(v, np.nan) for k, v in loaded.params["mlm"]["norm"].items()}
    diverged = dataclasses.replace(loaded, params=loaded.params | {"mlm": loaded.params["mlm"] | {"norm": norm}})
    with pytest.raises(UserError, match="its training has diverged"):
        fill_mask(diverged, ["hello [MASK]"])
    assert fill_mask(loaded, []) == []
