"""Tilings: the states between signatures that a conversion passes through.

A signature cuts a dim by several axes in mesh order only. A tiling says the same in
any order, which is what single collectives produce: a dim cut by ``('tensor',
'data')`` is first cut along ``tensor``, and each part along ``data``.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec as P

from sbp.signature import PartialSum, Signature, Split

Axes = tuple[tuple[str, int], ...]  # names and sizes of the mesh axes, in order


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How a tensor lies on a mesh. An axis that it leaves out is broadcast.

    Attributes:
        dims: For each tensor dim the axes that cut it, the outermost cut first.
        partial: Axes along which the tensor is a sum of addends.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    @property
    def used(self) -> set[str]:
        """Axes that are not broadcast."""
        return {name for names in self.dims for name in names} | self.partial

    def with_dim(self, dim: int, names: Sequence[str]) -> "Tiling":
        """Returns the tiling that cuts ``dim`` by ``names`` instead."""
        dims = (*self.dims[:dim], tuple(names), *self.dims[dim + 1 :])
        return dataclasses.replace(self, dims=dims)

    def with_partial(self, names: frozenset[str]) -> "Tiling":
        """Returns the tiling with ``names`` as its partial axes instead."""
        return dataclasses.replace(self, partial=names)

    def counts(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Returns into how many parts each dim is cut."""
        return tuple(math.prod(sizes[n] for n in names) for names in self.dims)

    def local_shape(
        self, shape: Sequence[int], sizes: dict[str, int]
    ) -> tuple[int, ...]:
        """Returns the shape of each device's piece of a tensor of ``shape``."""
        counts = self.counts(sizes)
        return tuple(size // n for size, n in zip(shape, counts, strict=True))

    def divides(self, shape: Sequence[int], sizes: dict[str, int]) -> bool:
        """Returns whether all devices get pieces of the same shape."""
        counts = self.counts(sizes)
        return all(size % n == 0 for size, n in zip(shape, counts, strict=True))

    def to_spec(self, reduced: frozenset[str] = frozenset()) -> P:
        """Returns the partition spec; ``reduced`` axes are marked in its type."""
        entries = [n[0] if len(n) == 1 else n or None for n in self.dims]
        return P(*entries, unreduced=set(self.partial), reduced=set(reduced))

    def __str__(self) -> str:
        parts = [
            f"S({dim}) on {' and '.join(names)}"
            for dim, names in enumerate(self.dims)
            if names
        ]
        parts += [f"P on {' and '.join(sorted(self.partial))}"] * bool(self.partial)
        return ", ".join(parts) or "B"


def from_signature(
    signature: Signature, axis_names: Sequence[str], ndim: int
) -> Tiling:
    """Returns the tiling of a signature whose dims are resolved."""
    dims: list[tuple[str, ...]] = [()] * ndim
    partial = set()
    for component, name in zip(signature, axis_names, strict=True):
        if isinstance(component, Split):
            dims[component.dim] += (name,)
        elif isinstance(component, PartialSum):
            partial.add(name)
    return Tiling(tuple(dims), frozenset(partial))


def from_spec(spec: P, ndim: int) -> Tiling:
    """Returns the tiling of a partition spec of a tensor of ``ndim`` dims."""
    entries = (*spec.partitions, *[None] * (ndim - len(spec.partitions)))
    dims = tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries
    )
    return Tiling(dims, frozenset(spec.unreduced))


def block_indices(tiling: Tiling, axes: Axes) -> np.ndarray:
    """Returns which block of each dim each device holds.

    Args:
        tiling: How the tensor lies on the mesh.
        axes: Names and sizes of the mesh axes.

    Returns:
        Integers of shape ``(num_devices, ndim)``, devices in row-major order.
    """
    sizes = dict(axes)
    grid = np.indices(tuple(sizes.values())).reshape(len(axes), -1)
    coordinates = dict(zip(sizes, grid, strict=True))
    blocks = np.zeros((grid.shape[1], len(tiling.dims)), dtype=np.int64)
    for dim, names in enumerate(tiling.dims):
        for name in names:
            blocks[:, dim] = blocks[:, dim] * sizes[name] + coordinates[name]
    return blocks


def labels(names: frozenset[str], axes: Axes) -> np.ndarray:
    """Returns a number per device, equal where the coordinates on ``names`` are."""
    sizes = dict(axes)
    grid = np.indices(tuple(sizes.values())).reshape(len(axes), -1)
    result = np.zeros(grid.shape[1], dtype=np.int64)
    for name, coordinates in zip(sizes, grid, strict=True):
        if name in names:
            result = result * sizes[name] + coordinates
    return result
