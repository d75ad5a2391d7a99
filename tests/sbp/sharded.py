"""Global tensors made and read shard by shard, independently of what is tested."""

import itertools

import jax
import numpy as np
from jax.sharding import NamedSharding

import sbp
from sbp.signature import PartialSum, Split
from sbp.spec import to_partition_spec


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_equal(x, dense, rtol=1e-4):
    """Asserts that a tree of global tensors holds the dense values."""

    def check(own, other):
        value = value_of(own, sbp.placement_of(own), sbp.signature_of(own))
        np.testing.assert_allclose(value, other, rtol=rtol, atol=1e-4)

    jax.tree.map(check, x, dense)


def place(value, placement, signature, seed=0):
    """Returns ``value`` as a global tensor; partial sums get random addends."""
    rng = np.random.default_rng(seed)
    shards = {}
    for position in np.ndindex(*placement.shape):
        addend = _addends(value, placement, signature, rng, shards, position)
        shards[position] = addend
    sharding = NamedSharding(
        placement.mesh, to_partition_spec(signature, placement.axis_names)
    )
    arrays = [
        jax.device_put(
            _piece(addend, placement, signature, position), placement.devices[position]
        )
        for position, addend in shards.items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, arrays)


def value_of(x, placement, signature):
    """Returns the value that the shards of ``x`` make up; replicas must agree."""
    local = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    result = np.zeros(x.shape, x.dtype)
    for position in itertools.product(*_positions(placement, signature)):
        piece = _view(result, placement, signature, position)
        piece += local[placement.devices[position]]
    for position in np.ndindex(*placement.shape):
        first = tuple(
            p if isinstance(c, (Split, PartialSum)) else 0
            for p, c in zip(position, signature, strict=True)
        )
        replica, original = (local[placement.devices[p]] for p in (position, first))
        np.testing.assert_array_equal(replica, original, "replicas differ")
    return result


def _addends(value, placement, signature, rng, earlier, position):
    """The whole tensor as seen at a position along the partial axes alone."""
    along = tuple(
        p if isinstance(c, PartialSum) else 0
        for p, c in zip(position, signature, strict=True)
    )
    if along != position:
        return earlier[along]
    last = tuple(
        n - 1 if isinstance(c, PartialSum) else 0
        for n, c in zip(placement.shape, signature, strict=True)
    )
    if along == last:
        others = [addend for addend in earlier.values()]
        unique = {id(addend): addend for addend in others}
        return (value - sum(unique.values())).astype(value.dtype) if unique else value
    if value.dtype.kind in "iu":
        return rng.integers(0, 5, value.shape).astype(value.dtype)
    return rng.normal(size=value.shape).astype(value.dtype)


def _positions(placement, signature):
    """Positions that hold distinct parts: the first of each broadcast axis."""
    return [
        range(n) if isinstance(c, (Split, PartialSum)) else range(1)
        for n, c in zip(placement.shape, signature, strict=True)
    ]


def _piece(value, placement, signature, position):
    return np.array(_view(value, placement, signature, position))


def _view(value, placement, signature, position):
    parts = zip(signature, placement.shape, position, strict=True)
    for component, size, index in parts:
        if isinstance(component, Split):
            dim = component.dim
            length = value.shape[dim] // size
            cut = slice(index * length, (index + 1) * length)
            value = value[(slice(None),) * dim + (cut,)]
    return value
