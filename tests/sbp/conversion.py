"""Global tensors made from, and compared with, the NumPy model."""

import ml_dtypes
import numpy as np

import sbp
from tests.sbp import numpy_model

DTYPES = {
    "float32": np.float32,
    "int32": np.int32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float16": np.float16,
    "complex64": np.complex64,
}


def to_signature(components):
    return sbp.parse(",".join(f"S({c[1:]})" if c[0] == "S" else c for c in components))


def make(value, placement, components, rng):
    """A global tensor of ``value`` whose partial sums have random addends."""
    shards = numpy_model.make_shards(value, placement.shape, components, rng)
    ranks = np.array(placement.ranks)
    by_rank = {int(ranks[position]): shard for position, shard in shards.items()}
    return sbp.from_local(by_rank, placement, to_signature(components))


def assert_is(x, value, placement, components):
    """Asserts type, placement, every shard's shape, replicas and logical value."""
    assert sbp.placement_of(x) == placement
    assert sbp.signature_of(x) == to_signature(components)
    assert x.dtype == value.dtype
    ranks = np.array(placement.ranks)
    local = sbp.to_local(x)
    assert {s.device for s in local.values()} == set(placement.devices.flat) or all(
        local[int(ranks[p])].devices() == {placement.devices[p]}
        for p in np.ndindex(placement.shape)
    )
    shards = {
        position: np.asarray(local[int(rank)])
        for position, rank in np.ndenumerate(ranks)
    }
    result = numpy_model.logical_value(shards, value.shape, placement.shape, components)
    np.testing.assert_array_equal(result, value)
    np.testing.assert_array_equal(sbp.full_value(x), value)


def values(shape, dtype):
    """Small whole numbers, which every dtype here adds exactly."""
    count = int(np.prod(shape))
    return (np.arange(count) % 31).reshape(shape).astype(DTYPES[dtype])
