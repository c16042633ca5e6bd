"""The mesh and the table from logical axes to mesh axes, as written-out expectations."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bert_jax.config import BertConfig
from bert_jax.task import PretrainingTask
from transformer_jax import engine as engines
from transformer_jax import optim, sharding
from transformer_jax.config import ConfigError, MeshConfig, OptimizerConfig, TrainConfig

MODEL = BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=61, vocab_multiple=16
)


def mesh(preset="fsdp_tensor", devices=8, **sizes):
    return sharding.make_mesh(MeshConfig(preset=preset, **sizes), jax.devices()[:devices])


@pytest.mark.parametrize(
    ("preset", "sizes", "devices", "expected"),
    [
        ("data_parallel", {}, 8, (8, 1, 1)),
        ("data_parallel", {"fsdp": 2}, 8, (4, 2, 1)),
        ("fsdp", {}, 8, (1, 8, 1)),
        ("fsdp", {}, 256, (16, 16, 1)),
        ("fsdp", {}, 24, (2, 12, 1)),
        ("fsdp", {"data": 2}, 8, (2, 4, 1)),
        ("fsdp", {"data": 2, "fsdp": -1}, 8, (2, 4, 1)),
        ("fsdp_tensor", {"tensor": 2}, 8, (1, 4, 2)),
        ("fsdp_tensor", {"fsdp": 2, "tensor": 2}, 8, (2, 2, 2)),
    ],
)
def test_devices_are_shared_out_as_documented(preset, sizes, devices, expected):
    assert sharding.mesh_shape(MeshConfig(preset=preset, **sizes), devices) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, "data=3, fsdp=0, tensor=1 asks for 3 devices, and there are 8"),
        ({"fsdp": 3}, "asks for 3 devices or a multiple of it, and there are 8"),
        ({"fsdp": -1}, "one may be -1"),
        ({"tensor": 0}, "each must be a positive number"),
        ({"data": 16}, "asks for 16 devices, and there are 8"),
    ],
)
def test_a_mesh_that_does_not_fit_names_both_numbers(sizes, message):
    with pytest.raises(ConfigError, match=message):
        sharding.mesh_shape(MeshConfig(**sizes), 8)


def test_slices_take_the_data_axis():
    with pytest.raises(ConfigError, match=r"mesh\.data is 1; it must be a multiple of mesh\.slices 2"):
        sharding.make_mesh(MeshConfig(preset="fsdp", slices=2))


# Parameters of the model with the axes that they are split over, for the mesh data 2, fsdp 2, tensor 2.
EXPECTED = {
    "data_parallel": {
        "embeddings/word/embedding": P(None, None),
        "encoder/layer_0/attention/query/kernel": P(None, None),
        "encoder/layer_0/feed_forward/intermediate/kernel": P(None, None),
        "mlm/bias": P(None),
    },
    "fsdp": {
        "embeddings/word/embedding": P(None, "fsdp"),
        "embeddings/position/embedding": P(None, "fsdp"),
        "embeddings/norm/scale": P(None),
        "encoder/layer_0/attention/query/kernel": P("fsdp", None),
        "encoder/layer_0/attention/query/bias": P(None),
        "encoder/layer_0/attention/output/kernel": P(None, "fsdp"),
        "encoder/layer_0/attention/output/bias": P("fsdp"),
        "encoder/layer_0/feed_forward/intermediate/kernel": P("fsdp", None),
        "nsp/kernel": P("fsdp", None),
        "mlm/bias": P(None),
    },
    "fsdp_tensor": {
        "embeddings/word/embedding": P("tensor", "fsdp"),
        "embeddings/token_type/embedding": P(None, "fsdp"),
        "encoder/layer_0/attention/query/kernel": P("fsdp", "tensor"),
        "encoder/layer_0/attention/query/bias": P("tensor"),
        "encoder/layer_0/attention/output/kernel": P("tensor", "fsdp"),
        "encoder/layer_0/feed_forward/intermediate/kernel": P("fsdp", "tensor"),
        "encoder/layer_0/feed_forward/output/kernel": P("tensor", "fsdp"),
        "encoder/layer_0/feed_forward_norm/scale": P(None),
        "mlm/bias": P("tensor"),
        "nsp/bias": P(None),
    },
}
MOMENTS = {
    "data_parallel": {
        "embeddings/word/embedding": P(None, "data"),
        "encoder/layer_0/attention/query/kernel": P("data", None),
        "encoder/layer_0/attention/output/bias": P("data"),
        "embeddings/norm/scale": P(None),
    },
    "fsdp": {"encoder/layer_0/attention/query/kernel": P(("data", "fsdp"), None)},
    "fsdp_tensor": {
        "embeddings/word/embedding": P("tensor", ("data", "fsdp")),
        "encoder/layer_0/attention/output/kernel": P("tensor", ("data", "fsdp")),
    },
}


def engine(preset, mesh_, batch_size=8):
    task = PretrainingTask(MODEL, 32)
    return engines.Engine(
        task, optim.make(OptimizerConfig(), 10), TrainConfig(batch_size=batch_size), mesh_, preset, 1.0
    )


def by_name(tree):
    return {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("preset", list(EXPECTED))
def test_each_preset_places_parameters_and_moments_by_the_table(preset):
    shardings = engine(preset, mesh(preset, data=2, fsdp=2, tensor=2)).shardings
    params = by_name(shardings.params)
    assert {k: params[k].spec for k in EXPECTED[preset]} == EXPECTED[preset]
    for moments in (shardings.opt_state[0].mu, shardings.opt_state[0].nu):
        found = by_name(moments)
        assert {k: found[k].spec for k in MOMENTS[preset]} == MOMENTS[preset]
    assert shardings.step.spec == shardings.opt_state[0].updates.spec == P()


def test_an_axis_that_does_not_divide_stays_whole():
    rules = {"embed": ("data", "fsdp"), "mlp": ("tensor",)}
    m = mesh(data=2, fsdp=2, tensor=2)
    assert sharding.spec((8, 6), ("embed", "mlp"), rules, m) == P(("data", "fsdp"), "tensor")
    assert sharding.spec((6, 7), ("embed", "mlp"), rules, m) == P("data", None)
    assert sharding.spec((7, 6), ("embed", "mlp"), rules, m) == P(None, "tensor")


def test_one_mesh_axis_never_splits_two_axes_of_an_array():
    assert sharding.spec((8, 8), ("embed", "embed"), {"embed": ("fsdp",)}, mesh(fsdp=4, tensor=2)) == P("fsdp", None)


@pytest.mark.slow
def test_the_state_is_born_sharded():
    """With ZeRO-1 each of 8 devices holds an eighth of a kernel's moments; with fsdp also of the kernel."""
    for preset, share in (("data_parallel", 32), ("fsdp", 4)):
        e = engine(preset, mesh(preset))
        state = e.init()
        kernel = state.params["encoder"]["layer_0"]["attention"]["query"]["kernel"]
        moment = state.opt_state[0].mu["encoder"]["layer_0"]["attention"]["query"]["kernel"]
        assert {s.data.shape for s in kernel.addressable_shards} == {(share, 32)}
        assert {s.data.shape for s in moment.addressable_shards} == {(4, 32)}
        same = jax.tree.map(lambda x, a: x.dtype == a.dtype and x.sharding == a.sharding, state, e.abstract_state)
        assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_initial_parameters_do_not_depend_on_the_mesh():
    """They are drawn from uniform numbers in (-1, 1), whose rounding near 0 (2^-24) follows how the compiler fused the
    arithmetic; it comes out scaled by the initial deviation."""
    one = engine("data_parallel", mesh("data_parallel", 1)).init()
    many = engine("fsdp_tensor", mesh(data=2, fsdp=2, tensor=2)).init()
    rounding = 2**-23 * BertConfig().initializer_range
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=rounding), one.params, many.params)


def test_a_batch_that_does_not_divide_names_both_numbers_and_the_nearest():
    """C091: 10 rows on 8 devices are refused before anything is compiled."""
    with pytest.raises(ConfigError, match=r"train\.batch_size is 10 rows .* multiple of 8 .* nearest are 8 and 16"):
        engine("data_parallel", mesh("data_parallel"), batch_size=10)
    with pytest.raises(ConfigError, match=r"nearest is 8$"):
        sharding.check_batch(4, 1, mesh("data_parallel"))
    with pytest.raises(ConfigError, match=r"multiple of 32 \(8 devices .* x 4 accumulation parts\)"):
        sharding.check_batch(16, 4, mesh("data_parallel"))
    sharding.check_batch(16, 2, mesh("data_parallel"))


class FakeSharding:
    """Where an imagined host's devices lie."""

    def __init__(self, slices):
        self.slices = slices

    def addressable_devices_indices_map(self, shape):
        return {i: (s,) for i, s in enumerate(self.slices)}


@pytest.mark.parametrize(
    ("slices", "runs"),
    [
        ([slice(None)], [(0, 8)]),
        ([slice(4, 6), slice(6, 8)], [(4, 4)]),
        ([slice(6, 8), slice(0, 2)], [(0, 2), (6, 2)]),
        ([slice(0, 4), slice(0, 4)], [(0, 4)]),  # a tensor axis: both devices see the same rows
    ],
)
def test_a_host_makes_the_rows_of_its_own_devices(monkeypatch, slices, runs):
    monkeypatch.setattr(sharding, "batch_sharding", lambda mesh: FakeSharding(slices))
    assert sharding.host_rows(8, None) == runs


def test_rows_are_made_run_by_run_and_numbered_in_the_global_batch(monkeypatch):
    class Numbers:
        def batch(self, first_row, count, offset=0):
            rows = np.arange(count)
            return {"row": first_row + rows, "row_ids": offset + rows}

    monkeypatch.setattr(sharding, "host_rows", lambda size, mesh: [(0, 2), (6, 2)])
    made = engine("data_parallel", mesh("data_parallel")).make(Numbers(), 40, 8)
    assert made["row"].tolist() == [40, 41, 46, 47]
    assert made["row_ids"].tolist() == [0, 1, 6, 7]
