"""States on several layouts, for the tests of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.checkpoint import Checkpointer

# A row says how w is cut; on the axes that a layout does not have, nothing is.
LAYOUTS = {
    "one_device": ((1, 1), AxisType.Auto),
    "dp2_tp2": ((2, 2), AxisType.Auto),
    "dp4": ((4, 1), AxisType.Auto),
    "tp4_explicit": ((1, 4), AxisType.Explicit),
}
SPECS = {
    "w": P(None, "tensor"),
    "zero": P("data", "tensor"),
    "half": P("tensor"),
    "count": P(),
    "flags": P("data"),
}
EXTRA = {"config": {"seed": 1}, "next_sample": 96}


def make_arrays(seed=0):
    rng = np.random.default_rng(seed)
    # Orbax keeps arrays below 1 kB in its index, so one is larger.
    return {
        "w": rng.standard_normal((64, 48), np.float32),
        "zero": rng.standard_normal((4, 4), np.float32),
        "half": np.asarray(jnp.asarray(rng.standard_normal(8), jnp.bfloat16)),
        "count": np.int32(seed + 7),
        "flags": np.arange(8) % 3 == 0,
    }


def make_state(layout="one_device", seed=0):
    return jax.tree.map(
        lambda array, sharding: jax.device_put(array, sharding),
        make_arrays(seed),
        make_shardings(layout),
    )


def make_shardings(layout):
    shape, axis_type = LAYOUTS[layout]
    devices = jax.devices()[-shape[0] * shape[1] :]
    mesh = jax.make_mesh(
        shape, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=devices
    )
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(directory, steps, **options):
    with Checkpointer(directory, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(seed=step), extra=EXTRA)
