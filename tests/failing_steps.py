"""Steps that cannot be made, for the process that compiles; it imports them by name."""

import os

from transformer_jax.config import ConfigError


def ends_natively(settings, devices):
    os.abort()


def refuses(settings, devices):
    raise ConfigError("mesh data=3 asks for 3 devices")


def makes_an_array_whole(settings, devices):
    """A step in which an array split over the second axis is to be split over the first, another way round."""
    import types

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from transformer_jax.compiled_step import PlannedStep

    mesh = Mesh(np.array(devices).reshape(2, 8, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    split, other = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), (None, "data")))

    def step(state, batch, key):
        return jax.lax.with_sharding_constraint(jnp.sin(state["x"]), other) * 2

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=split)
    state = types.SimpleNamespace(params={"x": x}, opt_state=())
    engine = types.SimpleNamespace(
        mesh=mesh,
        abstract_state=state,
        train_step=types.SimpleNamespace(lower=lambda s, batch, key: jax.jit(step).lower(s.params, batch, key)),
        task=types.SimpleNamespace(flops=lambda counts: 0.0),
        dropout_key=jax.random.key(0),
        shardings=types.SimpleNamespace(step=NamedSharding(mesh, PartitionSpec())),
    )
    return PlannedStep(engine, {}, {"tokens": 1.0})
