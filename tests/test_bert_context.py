"""Models that see one side alone, which BERT is compared with: what they see, what they predict, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_bert
import tiny_finetune
import tiny_run

from bert_jax import examples, run_file
from bert_jax.config import BertConfig, ExamplesConfig, PretrainConfig
from bert_jax.data import PretrainingData, describe
from bert_jax.featurizer import FeatureConfig, Featurizer
from bert_jax.fill_mask import fill_mask
from bert_jax.finetune.loading import Encoder
from bert_jax.heads import BertWithHead
from bert_jax.interop.exports import export_checkpoint
from bert_jax.loading import load
from bert_jax.model import BertForPreTraining
from transformer_jax import config as core
from transformer_jax.config import ConfigError, UserError
from transformer_jax.shards import Shards


@pytest.mark.parametrize("context", ["both", "left", "right"])
def test_a_position_depends_on_what_its_context_holds_and_on_nothing_else(context):
    config = tiny_bert.tiny_config(num_hidden_layers=1, context=context)
    params = tiny_bert.random_params(config)
    length, at = 6, 3
    ids = np.arange(5, 5 + length, dtype=np.int32)[None]
    # A second sequence of the row must not be seen in any case.
    numbers = np.array([[1, 1, 1, 1, 1, 2]], np.int32)
    places = np.array([[0, 1, 2, 3, 4, 0]], np.int32)

    apply = jax.jit(BertForPreTraining(config).apply)

    def run(ids):
        zeros = jnp.zeros_like(ids)
        out = apply({"params": params}, jnp.asarray(ids), zeros, places, numbers)
        return np.asarray(out["sequence_output_BLH"])[0]

    changed = ids.copy()
    changed[0, at] = 60
    moved = np.abs(run(changed) - run(ids)).max(-1) > 1e-6
    expected = {"both": [1, 1, 1, 1, 1, 0], "left": [0, 0, 0, 1, 1, 0], "right": [1, 1, 1, 1, 0, 0]}[context]
    assert moved.astype(int).tolist() == expected


@pytest.mark.parametrize("objective", ["next", "previous"])
def test_every_piece_is_predicted_once_from_its_neighbour_and_none_is_masked(tmp_path, objective):
    prepared = tiny_run.prepare(tmp_path / "prepared", train=20, heldout=4)
    shards = Shards.open(prepared, "train")
    config = ExamplesConfig(max_seq_length=32, sentence_task="none", objective=objective)
    batch = PretrainingData(shards, config, seed=0).batch(0, 4)
    tokenizer, weights = shards.tokenizer, batch["masked_lm_weights"] > 0
    step = {"next": 1, "previous": -1}[objective]
    predicted = np.zeros(batch["input_ids"].shape, int)
    for row, places in enumerate(batch["masked_lm_positions"]):
        for place, label in zip(places[weights[row]], batch["masked_lm_ids"][row][weights[row]], strict=True):
            assert batch["input_ids"][row, place + step] == label
            assert batch["sequence_ids"][row, place + step] == batch["sequence_ids"][row, place]
            predicted[row, place + step] += 1
    made = describe(shards, config, seed=0)
    assert (made["share_mask"], made["share_random"], made["share_kept"]) == (0, 0, 1), "all are seen as they are"
    ordinary = ~np.isin(batch["input_ids"], [tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id])
    assert (predicted == ordinary).all() and ordinary.any()
    assert not (batch["input_ids"] == tokenizer.mask_id).any()


def test_the_head_of_a_left_to_right_model_reads_the_last_token_of_each_row():
    head = tiny_bert.HEADS["classification"]
    params, config, _ = tiny_bert.tuned(head)

    def run(context, ids, real):
        model = BertWithHead(dataclasses.replace(config, context=context), head)
        zeros, places = jnp.zeros_like(ids), jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        numbers = (places < real).astype(jnp.int32)
        return np.asarray(jax.jit(model.apply)({"params": params}, jnp.asarray(ids), zeros, places, numbers))

    ids = np.array([[2, 10, 11, 12, 3]], np.int32)
    changed = np.array([[2, 10, 11, 13, 3]], np.int32)
    padded = np.array([[2, 10, 11, 12, 3, 0, 0]], np.int32)
    for context in ("left", "right"):
        assert np.abs(run(context, changed, 5) - run(context, ids, 5)).max() > 1e-4
        np.testing.assert_allclose(run(context, padded, 5), run(context, ids, 5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "context", "said"),
    [
        ({"objective": "next"}, "both", 'model.context = "left"'),
        ({"objective": "next", "sentence_task": "none"}, "right", 'model.context = "left"'),
        ({"objective": "previous"}, "left", 'model.context = "right"'),
        ({"sentence_task": "nsp"}, "left", 'sentence_task = "none"'),
        ({"objective": "next", "sentence_task": "none", "max_predictions_per_row": 20}, "left", "leave it at 0"),
    ],
)
def test_settings_in_which_the_answer_is_seen_or_nothing_is_seen_are_refused(changes, context, said):
    with pytest.raises(ConfigError, match=said):
        examples.check(ExamplesConfig(**changes), BertConfig(context=context, vocab_size=100))


def test_a_run_does_not_go_on_with_another_context():
    one_way = PretrainConfig(
        model=BertConfig(context="left"), examples=ExamplesConfig(sentence_task="none", objective="next")
    )
    stored = core.to_builtins(one_way)
    assert run_file.check_resume(stored, one_way, force=False) == []
    with pytest.raises(ConfigError, match=r"model\.context: 'left' in the checkpoint, 'both' now"):
        run_file.check_resume(stored, PretrainConfig(), force=False)


def test_what_such_a_model_cannot_do_is_refused(tmp_path):
    run = tiny_finetune.checkpoint(tmp_path / "run", context="left")
    loaded = load(run)
    assert loaded.config.context == "left"
    trained = dataclasses.replace(loaded, drawn=(), meta={"config": {"examples": {"objective": "next"}}})
    with pytest.raises(UserError, match="never seen a"):
        fill_mask(trained, ["[MASK]"])
    with pytest.raises(UserError, match="stablehlo"):
        export_checkpoint(run, tmp_path / "out")
    with pytest.raises(UserError, match="take mean"):
        Featurizer(Encoder(loaded.config, loaded.params, loaded.tokenizer), FeatureConfig(features="cls"))


def test_a_new_setting_leaves_the_fingerprints_of_earlier_runs_as_they_were(tmp_path):
    """Batches of before, and so the stored fingerprints that a resumed run is held against."""
    from bert_jax import plans

    shards = Shards.open(tiny_run.prepare(tmp_path / "prepared", train=8, heldout=4), "train")
    masked, next_piece = ExamplesConfig(), ExamplesConfig(objective="next")
    assert "objective" not in plans._settings(masked) and plans._settings(next_piece)["objective"] == "next"
    assert plans.fingerprint(shards, masked, 0) != plans.fingerprint(shards, next_piece, 0)
