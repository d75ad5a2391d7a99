"""The pipeline of one stage gives the gradients of the plain model."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sbp.pipeline.region import ManualRegion
from sbp.pipeline.single_stage import SingleStage
from tests.sbp.pipeline import toy


def make_region(num_data):
    devices = np.array(jax.devices()[:num_data]).reshape(1, num_data)
    mesh = Mesh(devices, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    return ManualRegion(mesh, ("stage", "data"))


@pytest.mark.parametrize("num_data", [1, 2])
def test_gradients_are_those_of_the_plain_model(num_data):
    region = make_region(num_data)
    pipeline = SingleStage(region)
    blocks, outer, microbatches = toy.make(3, 4)

    def run(blocks, outer, microbatches):
        blocks, outer = region.varying((blocks, outer))
        found = pipeline.gradients(toy.PARTS, blocks, outer, microbatches)
        losses = pipeline.losses(toy.PARTS, blocks, outer, microbatches)
        return region.psum((found, losses), "data")

    def encode(blocks, outer, microbatches):
        blocks, outer = region.varying((blocks, outer))
        return pipeline.outputs(
            toy.PARTS, blocks, outer, microbatches, lambda outer, x, microbatch: x
        )

    in_specs = (P(), P(), P("data"))
    program = region.run(run, in_specs=in_specs, out_specs=P())
    found, losses = jax.jit(program)(blocks, outer, microbatches)
    program = region.run(encode, in_specs=in_specs, out_specs=P("data"))
    outputs = jax.jit(program)(blocks, outer, microbatches)

    expected = toy.gradients_of_one_device(blocks, outer, microbatches)
    toy.assert_close(found, expected)
    toy.assert_close(losses, expected[0])
    encode_one = functools.partial(toy.encode, blocks, outer)
    toy.assert_close(outputs, jax.vmap(encode_one)(microbatches))
