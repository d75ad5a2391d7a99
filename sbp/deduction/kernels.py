"""Computes one operation on a device's shards, inside a ``shard_map``.

Most primitives compute a shard's result from shards as they are. Those listed here
have parameters that name sizes, which must become local, or look up positions, which
must become positions in the shard.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp._compat import bind
from sbp.deduction.program import Combine, Instruction
from sbp.signature import Signature, Split
from sbp.tiling import Axes

Mode = lax.GatherScatterMode


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An instruction and the mesh that it runs on."""

    instruction: Instruction
    axes: Axes

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters of the primitive."""
        return self.instruction.operation.params

    def axes_cutting(self, operand: int, dim: int) -> tuple[str, ...]:
        """Returns the mesh axes that cut a dim of an operand, in order."""
        signature = self.instruction.inputs[operand]
        return _axes_of(signature, dim, self.axes)

    def num_devices(self, names: Sequence[str]) -> int:
        """Returns how many devices lie along axes."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)


def run_operation(
    instruction: Instruction, axes: Axes, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Returns a device's shards of the results, given its shards of the operands."""
    call = Call(instruction, axes)
    name = instruction.operation.name
    results = _KERNELS.get(name, _bind)(call, *operands)
    for combine in instruction.combines:
        results = [_combine(result, combine) for result in results]
    return results


def _bind(call: Call, *operands: jax.Array, **changed: Any) -> Sequence[jax.Array]:
    """Applies the primitive itself, with some parameters changed."""
    primitive = call.instruction.operation.primitive
    assert primitive is not None
    return bind(primitive, operands, {**call.params, **changed})


def _barrier(call: Call, *operands: jax.Array) -> Sequence[jax.Array]:
    return lax.optimization_barrier(operands)


def _identity(call: Call, *operands: jax.Array) -> Sequence[jax.Array]:
    return operands


def _with_local_shape(param: str) -> Callable[..., Sequence[jax.Array]]:
    def kernel(call: Call, *operands: jax.Array) -> Sequence[jax.Array]:
        return _bind(call, *operands, **{param: call.instruction.shapes[0]})

    return kernel


def _slice(call: Call, operand: jax.Array) -> Sequence[jax.Array]:
    limits = tuple(
        operand.shape[dim] if call.axes_cutting(0, dim) else limit
        for dim, limit in enumerate(call.params["limit_indices"])
    )
    return _bind(call, operand, limit_indices=limits)


def _gather(call: Call, operand: jax.Array, indices: jax.Array) -> Sequence[jax.Array]:
    numbers, mode = call.params["dimension_numbers"], call.params["mode"]
    sizes = tuple(
        operand.shape[dim] if call.axes_cutting(0, dim) and size > 1 else size
        for dim, size in enumerate(call.params["slice_sizes"])
    )
    if not _split_rows(call, numbers.start_index_map, numbers.collapsed_slice_dims):
        return _bind(call, operand, indices, slice_sizes=sizes)
    local = _local_rows(call, operand, indices, numbers.start_index_map)
    # Dims that are not split keep their mode; the split ones are within bounds now.
    (found,) = _bind(call, operand, local.within, slice_sizes=sizes)
    own = jnp.expand_dims(local.is_own, numbers.offset_dims)
    result = jnp.where(own, found, jnp.zeros_like(found))
    if mode == Mode.FILL_OR_DROP:
        outside = jnp.expand_dims(local.is_outside, numbers.offset_dims)
        fill = jnp.full_like(found, _fill_value(call, found.dtype))
        result = jnp.where(outside & local.is_first, fill, result)
    return [result]


def _scatter(
    call: Call, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> Sequence[jax.Array]:
    numbers = call.params["dimension_numbers"]
    dims = numbers.scatter_dims_to_operand_dims
    if not _split_rows(call, dims, numbers.inserted_window_dims):
        return _bind(call, operand, indices, updates)
    if call.params["mode"] == Mode.CLIP:
        indices = _clipped(call, operand, indices, updates)
    # What falls into another device's rows is out of bounds here, and dropped.
    local = _local_rows(call, operand, indices, dims)
    return _bind(call, operand, local.shifted, updates, mode=Mode.FILL_OR_DROP)


@dataclasses.dataclass(frozen=True, slots=True)
class _LocalRows:
    """Indices into a table of which each device holds some rows.

    Attributes:
        shifted: Indices counted from the device's first row.
        within: The same, moved into its rows where they are not.
        is_own: Which indices fall into the device's rows.
        is_outside: Which indices fall into nobody's.
        is_first: Whether the device is the one to answer for those.
    """

    shifted: jax.Array
    within: jax.Array
    is_own: jax.Array
    is_outside: jax.Array
    is_first: jax.Array


def _split_rows(
    call: Call, indexed_dims: Sequence[int], removed: Sequence[int]
) -> list[int]:
    return [d for d in removed if d in indexed_dims and call.axes_cutting(0, d)]


def _local_rows(
    call: Call, operand: jax.Array, indices: jax.Array, indexed_dims: Sequence[int]
) -> _LocalRows:
    if indices.dtype.itemsize < 4 or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        indices = indices.astype(jnp.int32)  # room for what lies outside
    shifted, within = indices, indices
    is_own = jnp.ones(indices.shape[:-1], bool)
    is_outside = jnp.zeros(indices.shape[:-1], bool)
    is_first = jnp.array(True)
    for column, dim in enumerate(indexed_dims):
        names = call.axes_cutting(0, dim)
        if not names:
            continue
        num_rows, index = operand.shape[dim], lax.axis_index(names)
        rows = indices[..., column]
        if call.params["mode"] == Mode.CLIP:
            rows = jnp.clip(rows, 0, num_rows * call.num_devices(names) - 1)
        own = rows - index.astype(rows.dtype) * num_rows
        is_own &= (own >= 0) & (own < num_rows)
        is_outside |= (rows < 0) | (rows >= num_rows * call.num_devices(names))
        is_first &= index == 0
        shifted = shifted.at[..., column].set(own)
        within = within.at[..., column].set(jnp.clip(own, 0, num_rows - 1))
    return _LocalRows(shifted, within, is_own, is_outside, is_first)


def _clipped(
    call: Call, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    """Moves the indices of dims that are not split into bounds; drops nothing."""
    numbers = call.params["dimension_numbers"]
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.ndim) if d not in removed]
    sizes = dict.fromkeys(range(operand.ndim), 1)
    for update_dim, dim in zip(numbers.update_window_dims, window, strict=True):
        sizes[dim] = updates.shape[update_dim]
    for column, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        if not call.axes_cutting(0, dim):
            last = operand.shape[dim] - sizes[dim]
            clipped = jnp.clip(indices[..., column], 0, last)
            indices = indices.at[..., column].set(clipped)
    return indices


def _fill_value(call: Call, dtype: Any) -> Any:
    """Returns what a gather gives for indices out of bounds."""
    if (fill := call.params["fill_value"]) is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else info.min


def _combine(result: jax.Array, combine: Combine) -> jax.Array:
    if combine.kind in ("any", "all"):
        reduce = lax.pmax if combine.kind == "any" else lax.pmin
        return reduce(result.astype(jnp.int32), combine.axes).astype(result.dtype)
    reduce = lax.pmax if combine.kind == "max" else lax.pmin
    return reduce(result, combine.axes)


def _axes_of(signature: Signature, dim: int, axes: Axes) -> tuple[str, ...]:
    return tuple(
        name
        for component, (name, _) in zip(signature, axes, strict=True)
        if component == Split(dim)
    )


_KERNELS: Mapping[str, Callable[..., Sequence[jax.Array]]] = {
    "broadcast_in_dim": _with_local_shape("shape"),
    "dynamic_slice": _with_local_shape("slice_sizes"),
    "gather": _gather,
    "optimization_barrier": _barrier,
    "reshape": _with_local_shape("new_sizes"),
    "sharding_constraint": _identity,
    "slice": _slice,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"),
        _scatter,
    ),
}
