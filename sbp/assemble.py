"""Makes global tensors from pieces on the host, and checks what is asked of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sbp.placement import Placement
from sbp.signature import PartialSum, Signature, SignatureLike, resolve
from sbp.spec import check_divides, to_sharding
from sbp.tiling import from_signature, labels

Index = tuple[slice, ...]
Shape = int | Sequence[int]


def fit(
    sbp: SignatureLike,
    axis_names: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    x: jax.Array | np.ndarray | jax.ShapeDtypeStruct,
) -> Signature:
    """Returns the signature asked for, after checking that it fits ``x``.

    Raises:
        TypeError: If a tensor of booleans should be a partial sum.
        ValueError: If it does not fit the axes or the shape.
    """
    signature = resolve(sbp, axis_names, len(x.shape))
    check_divides(signature, axis_sizes, x.shape)
    if x.dtype == bool and any(isinstance(s, PartialSum) for s in signature):
        raise TypeError(
            f"sbp.partial_sum of a tensor of booleans of shape {x.shape}: booleans do "
            "not add up. Cast it to an integer type first, as in x.astype('int32')."
        )
    return signature


def fit_shape(
    shape: tuple[int, ...], dtype: Any, placement: Placement, sbp: SignatureLike
) -> Signature:
    """Returns the signature asked for, after checking that it fits a shape."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    return fit(sbp, placement.axis_names, placement.axis_sizes, like)


def as_shape(shape: Shape) -> tuple[int, ...]:
    """Returns a shape as a tuple, after checking its sizes."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(
                f"The shape {shape!r} holds {size!r} of type {type(size).__name__}, "
                "but sizes are whole numbers. Write a tuple of them, as in (16, 8)."
            )
        if size < 0:
            raise ValueError(
                f"The shape {shape!r} holds {size}, but sizes count from 0."
            )
    return tuple(int(size) for size in sizes)


def assemble(
    shape: tuple[int, ...],
    dtype: Any,
    placement: Placement,
    signature: Signature,
    piece: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Returns a global tensor of pieces that each process computes for its devices.

    Nothing is compiled and nothing is communicated. Along axes of partial sums the
    first device holds the value, the others zeros.

    Args:
        shape: Global shape, which the signature divides.
        dtype: Dtype of the tensor.
        placement: Where it should be.
        signature: How it should lie.
        piece: Returns the values at an index, one slice per dim.
    """
    tiling = from_signature(signature, placement.axis_names, len(shape))
    axes = tuple(placement.axis_sizes.items())
    addends = labels(tiling.partial, axes).tolist()
    plain = NamedSharding(placement.mesh, tiling.with_partial(frozenset()).to_spec())
    indices = plain.addressable_devices_indices_map(shape)
    local_shape = plain.shard_shape(shape)
    shards = []
    for device, addend in zip(placement.devices.flat, addends, strict=True):
        if device in indices:
            index = indices[device]
            assert index is not None
            values = piece(index) if addend == 0 else np.zeros(local_shape)
            shards.append(jax.device_put(np.asarray(values, dtype), device))
    return jax.make_array_from_single_device_arrays(
        shape, to_sharding(placement, signature), shards, dtype=dtype
    )


def not_global(x: object, what: str) -> str:
    """Returns the message for a value on no mesh that is asked for its ``what``."""
    shape = getattr(x, "shape", None)
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    return (
        f"{type(x).__name__}{of_shape} is on no mesh and has no {what}. "
        "Make it a global tensor first: sbp.to_global(x, placement, sbp)."
    )
