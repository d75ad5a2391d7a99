"""An axis made of several is used under its own name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sbp.pipeline.region import ManualRegion

AXES = ("stage", "data/replica", "data/shard")


def make_region():
    devices = np.array(jax.devices()[:4]).reshape(1, 2, 2)
    return ManualRegion(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3), AXES)


def test_members_are_the_axes_of_more_than_one_device_that_a_name_stands_for():
    region = make_region()
    assert region.members("data") == ("data/replica", "data/shard")
    assert region.members("stage", "data/shard") == ("data/shard",)
    assert region.members("context") == ()


def test_specs_positions_and_sums_know_the_whole_and_the_parts():
    region = make_region()

    def run(x):
        own = region.varying(region.index("data"))
        of_group = region.psum(x, "data/shard")
        gathered = region.all_gather(x, "data/shard", dim=0)
        scattered = region.psum_scatter(gathered, "data/shard", dim=0)
        return own[None], region.psum(x, "data"), of_group, scattered

    program = region.run(
        run,
        in_specs=P("data"),
        out_specs=(P("data"), P(), P("data/replica"), P("data")),
    )
    x = jnp.arange(4.0)
    found = jax.jit(program, in_shardings=region.sharding(P("data")))(x)

    for ours, expected in zip(
        found, ([0, 1, 2, 3], [6], [1, 5], [0, 2, 4, 6]), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
