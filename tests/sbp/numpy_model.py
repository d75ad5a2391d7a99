"""What global tensors mean, in NumPy alone: knows neither the package nor JAX.

A signature is a tuple of strings here: ``"S0"``, ``"S1"``, ..., ``"B"``, ``"P"``. A
position is the index of a device in the mesh.
"""

import itertools

import numpy as np


def positions(mesh_shape):
    return list(np.ndindex(*mesh_shape))


def slices(shape, mesh_shape, signature, position):
    """The part of each dim at a position: cut again and again, outer axis first."""
    bounds = [(0, size) for size in shape]
    for index, parts, component in zip(position, mesh_shape, signature, strict=True):
        if component[0] == "S":
            dim = int(component[1:])
            start, stop = bounds[dim]
            cuts = np.array_split(np.arange(start, stop), parts)
            begin = start + sum(len(cut) for cut in cuts[:index])
            bounds[dim] = (begin, begin + len(cuts[index]))
    return tuple(slice(start, stop) for start, stop in bounds)


def divides(shape, mesh_shape, signature):
    sizes = {
        tuple(s.stop - s.start for s in slices(shape, mesh_shape, signature, position))
        for position in positions(mesh_shape)
    }
    return len(sizes) == 1


def addend_of(position, signature):
    return tuple(i for i, c in zip(position, signature, strict=True) if c == "P")


def make_shards(value, mesh_shape, signature, rng):
    """Shards of ``value`` by position. Addends of a partial sum are random."""
    addends = {}
    for position in positions(mesh_shape):
        addends[addend_of(position, signature)] = None
    last = max(addends)
    rest = value.copy()
    for addend in addends:
        if addend != last:
            addends[addend] = rng.integers(0, 8, value.shape).astype(value.dtype)
            rest = rest - addends[addend]
    addends[last] = rest
    return {
        position: addends[addend_of(position, signature)][
            slices(value.shape, mesh_shape, signature, position)
        ]
        for position in positions(mesh_shape)
    }


def logical_value(shards, shape, mesh_shape, signature):
    """The value that shards stand for; replicas must be equal, bit for bit."""
    result = np.zeros(shape, next(iter(shards.values())).dtype)
    seen = {}
    for position, shard in shards.items():
        where = slices(shape, mesh_shape, signature, position)
        assert shard.shape == result[where].shape, (position, shard.shape)
        key = (addend_of(position, signature), str(where))
        if key in seen:
            np.testing.assert_array_equal(shard, seen[key], f"replica at {position}")
        else:
            seen[key] = shard
            result[where] += shard
    return result


def lower_bound(shape, mesh_shape, source, target):
    """Elements that some device must receive at least, whatever the algorithm.

    The larger of two bounds: what the device lacks that lacks most, and the transfers
    that the elements need, spread evenly over the devices. For one element:

    - A device holds one addend of it at most, so that to a place where ``n`` of its
      addends are missing go at least ``n`` transfers.
    - When the first place has it completely, as many transfers have been made as were
      missing there, and every other place that lacks something needs one more.
    """
    everyone = positions(mesh_shape)
    has = {p: _elements(shape, mesh_shape, source, p) for p in everyone}
    wants = {p: _elements(shape, mesh_shape, target, p) for p in everyone}
    addends = {addend_of(p, source) for p in everyone}
    groups = {}
    for p in everyone:
        key = tuple(i for i, c in zip(p, target, strict=True) if c != "P")
        groups.setdefault(key, []).append(p)
    missing = []  # per group: addends that are not there, for each element
    for members in groups.values():
        count = np.zeros(shape, int)
        for addend in addends:
            holders = [p for p in members if addend_of(p, source) == addend]
            held = np.any([has[p] for p in holders], axis=0) if holders else False
            count += wants[members[0]] & ~np.broadcast_to(held, shape)
        missing.append(count)
    lacking = [int((count > 0).sum()) for count in missing]
    busiest = max(
        n / len(members) for n, members in zip(lacking, groups.values(), strict=True)
    )
    wanted = np.array([wants[members[0]] for members in groups.values()])
    first = np.where(wanted, missing, np.iinfo(int).max).min(axis=0)
    others = (np.array(missing) > 0).sum(axis=0) - (first > 0)
    transfers = np.maximum(first + others, np.max(missing, axis=0))
    return max(busiest, int(transfers.sum()) / len(everyone))


def _elements(shape, mesh_shape, signature, position):
    mask = np.zeros(shape, bool)
    mask[slices(shape, mesh_shape, signature, position)] = True
    return mask


def signatures(num_axes, components=("S0", "S1", "B", "P")):
    return list(itertools.product(components, repeat=num_axes))
