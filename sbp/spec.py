"""Translates signatures to JAX's partition specs and shardings, and back.

For signature ``(s_0, ..., s_k)`` on mesh axes ``(m_0, ..., m_k)``, tensor dim ``d``
gets the tuple of the axes whose component is ``split(d)``, in mesh order; axes with
``partial_sum`` go to ``unreduced``; axes with ``broadcast`` are absent.
"""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sbp.placement import Placement
from sbp.signature import (
    Component,
    PartialSum,
    Signature,
    SignatureLike,
    Split,
    partial_sum,
    resolve,
)


def to_partition_spec(signature: Signature, axis_names: Sequence[str]) -> P:
    """Returns the partition spec of a signature.

    Args:
        signature: One component per axis, with dims counted from the first.
        axis_names: Names of the mesh axes, in order.

    Raises:
        ValueError: If the lengths differ or a dim is negative.

    Example:
        >>> from sbp.signature import split, partial_sum
        >>> to_partition_spec((split(1), split(1)), ("data", "tensor"))
        P(None, ('data', 'tensor'))
        >>> to_partition_spec((split(0), partial_sum), ("data", "tensor"))
        P('data', unreduced={'tensor'})
    """
    signature = resolve(signature, axis_names)
    dims = [s.dim for s in signature if isinstance(s, Split)]
    if any(dim < 0 for dim in dims):
        raise ValueError(
            f"The signature {signature!r} has a negative dim, which a spec cannot "
            "express. Resolve it first: sbp.signature.resolve(..., ndim=ndim)."
        )
    axes: list[list[str]] = [[] for _ in range(max(dims, default=-1) + 1)]
    unreduced = set()
    for component, name in zip(signature, axis_names, strict=True):
        if isinstance(component, Split):
            axes[component.dim].append(name)
        elif isinstance(component, PartialSum):
            unreduced.add(name)
    entries = [_entry(names) for names in axes]
    return P(*entries, unreduced=unreduced) if unreduced else P(*entries)


def from_partition_spec(spec: P, axis_names: Sequence[str]) -> Signature:
    """Returns the signature of a partition spec.

    Args:
        spec: The spec. An axis that it leaves out is broadcast.
        axis_names: Names of the mesh axes, in order.

    Raises:
        ValueError: If the spec splits a dim over axes in another order than the
            mesh's, which no signature says, or names an axis that is unknown.

    Example:
        >>> from_partition_spec(P(None, "tensor"), ("data", "tensor"))
        (sbp.broadcast, sbp.split(1))
    """
    by_name: dict[str, Component] = dict.fromkeys(spec.unreduced, partial_sum)
    for dim, entry in enumerate(spec.partitions):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        by_name |= dict.fromkeys(names, Split(dim))
        positions = [axis_names.index(n) for n in names if n in axis_names]
        if positions != sorted(positions):
            raise ValueError(
                f"{spec} splits dim {dim} over the axes {names}, but a signature "
                f"splits in mesh order, which is {tuple(axis_names)}. Use a placement "
                "whose axes are in the order of the spec."
            )
    return signature_by_axis(by_name, axis_names)


def signature_by_axis(
    by_name: Mapping[str, Component], axis_names: Sequence[str]
) -> Signature:
    """Returns the signature of a table row that names components by axis.

    Args:
        by_name: Component per axis name; an axis left out is broadcast.
        axis_names: Names of the mesh axes, in order.

    Raises:
        ValueError: If ``by_name`` has an axis that is not among ``axis_names``.

    Example:
        >>> from sbp.signature import split
        >>> signature_by_axis({"tensor": split(1)}, ("data", "tensor"))
        (sbp.broadcast, sbp.split(1))
    """
    return resolve(by_name, axis_names)


def to_sharding(placement: Placement, signature: SignatureLike) -> NamedSharding:
    """Returns the sharding that puts a signature on a placement.

    Args:
        placement: The devices.
        signature: One component per axis of the placement, or a mapping by name.

    Raises:
        ValueError: If the signature does not fit the placement's axes.
    """
    resolved = resolve(signature, placement.axis_names)
    spec = to_partition_spec(resolved, placement.axis_names)
    return NamedSharding(placement.mesh, spec)


def num_shards(
    signature: Signature, axis_sizes: Sequence[int], ndim: int
) -> tuple[int, ...]:
    """Returns into how many parts a signature cuts each of ``ndim`` dims.

    Example:
        >>> from sbp.signature import split
        >>> num_shards((split(0), split(0)), (2, 4), 2)
        (8, 1)
    """
    counts = [1] * ndim
    for component, size in zip(signature, axis_sizes, strict=True):
        if isinstance(component, Split):
            counts[component.dim] *= size
    return tuple(counts)


def local_shape(
    signature: Signature, axis_sizes: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of each device's piece of a tensor of ``shape``.

    Args:
        signature: One component per axis, resolved for this many dims.
        axis_sizes: Sizes of the mesh axes, in order.
        shape: Global shape, divisible as ``check_divides`` demands.
    """
    counts = num_shards(signature, axis_sizes, len(shape))
    return tuple(size // n for size, n in zip(shape, counts, strict=True))


def check_divides(
    signature: Signature, axis_sizes: Mapping[str, int], shape: Sequence[int]
) -> None:
    """Raises ValueError if a signature cuts a dim into unequal parts.

    Args:
        signature: One component per axis, resolved for this many dims.
        axis_sizes: Size of each mesh axis, in mesh order.
        shape: Global shape.
    """
    counts = num_shards(signature, tuple(axis_sizes.values()), len(shape))
    for dim, (size, n) in enumerate(zip(shape, counts, strict=True)):
        if size % n == 0:
            continue
        names = [
            name
            for name, component in zip(axis_sizes, signature, strict=True)
            if component == Split(dim)
        ]
        axes = "axis " if len(names) == 1 else "axes "
        padded = math.ceil(size / n) * n
        raise ValueError(
            f"sbp.split({dim}) on mesh {axes}{' and '.join(map(repr, names))} cuts dim "
            f"{dim} of shape {tuple(shape)} into {n} shards, but {size} is not "
            f"divisible by {n}. Pad the dim to {padded} (sbp.pad_to does), or use "
            f"{_divisors(size)} devices along it."
        )


def _divisors(size: int) -> str:
    numbers = [str(d) for d in range(1, min(size, 64) + 1) if size % d == 0]
    return " or ".join([", ".join(numbers[:-1])] * (len(numbers) > 1) + numbers[-1:])


def _entry(names: list[str]) -> str | tuple[str, ...] | None:
    if len(names) > 1:
        return tuple(names)
    return names[0] if names else None
