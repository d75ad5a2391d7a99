"""Sizes that do not divide: balanced parts, and padding to equal ones.

A tensor on a mesh is cut into equal parts; there is no uneven sharding. So a split
that does not divide is an error at the call, and padding is explicit: ``pad_to`` adds
to the end of each dim what a placement and signature need, ``unpad`` takes it off
again, and ``padding_mask`` says what is data. Padding is an ordinary part of the
tensor: it survives every change of signature and placement, elementwise operations,
sums and products of zero-padded tensors are exact, and whatever is not indifferent to
zeros (mean, max, softmax) has to use the mask or another pad value.

``balanced_sizes`` and ``balanced_slices`` give the parts of a balanced split, in which
sizes differ by one at most, the longer ones first: what each rank would hold if uneven
parts were possible, for those who cut data by hand.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sbp.global_tensor import is_global, placement_of, signature_of, to_global
from sbp.placement import Placement
from sbp.signature import SignatureLike, Split, broadcast, resolve
from sbp.spec import num_shards


def balanced_sizes(size: int, num_parts: int) -> tuple[int, ...]:
    """Returns the sizes of the balanced parts of a dim.

    Example:
        >>> balanced_sizes(20, 6)
        (4, 4, 3, 3, 3, 3)
    """
    base, longer = divmod(size, num_parts)
    return tuple(base + (i < longer) for i in range(num_parts))


def balanced_slices(
    shape: Sequence[int], placement: Placement, sbp: SignatureLike
) -> dict[int, tuple[slice, ...]]:
    """Returns which part of a shape each rank has in a balanced split.

    A dim that several axes split is split again and again, the outer axis first.

    Args:
        shape: Global shape; it need not divide.
        placement: The ranks.
        sbp: Signature; along axes of broadcast and partial sums all have the whole.

    Returns:
        A dict from rank to one slice per dim, in the order of the placement.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]])
        >>> balanced_slices((5, 5), p, sbp.parse("S(0),S(1)"))[1]
        (slice(0, 3, None), slice(3, 5, None))
    """
    signature = resolve(sbp, placement.axis_names, len(shape))
    slices = {}
    for position, rank in np.ndenumerate(np.array(placement.ranks)):
        starts, sizes = [0] * len(shape), list(shape)
        for index, parts, component in zip(
            position, placement.shape, signature, strict=True
        ):
            if isinstance(component, Split):
                cut = balanced_sizes(sizes[component.dim], parts)
                starts[component.dim] += sum(cut[:index])
                sizes[component.dim] = cut[index]
        slices[int(rank)] = tuple(
            slice(start, start + size)
            for start, size in zip(starts, sizes, strict=True)
        )
    return slices


def padded_shape(
    shape: Sequence[int], placement: Placement, sbp: SignatureLike
) -> tuple[int, ...]:
    """Returns the smallest shape, none of its dims shorter, that a signature divides.

    Example:
        >>> import sbp
        >>> padded_shape((25, 33), sbp.placement("cpu", [0, 1, 2, 3]), sbp.split(0))
        (28, 33)
    """
    signature = resolve(sbp, placement.axis_names, len(shape))
    counts = num_shards(signature, placement.shape, len(shape))
    return tuple(-(-size // n) * n for size, n in zip(shape, counts, strict=True))


def pad_to(
    x: jax.typing.ArrayLike,
    placement: Placement,
    sbp: SignatureLike,
    *,
    value: float = 0,
) -> jax.Array:
    """Returns ``x`` as a global tensor, padded at the end where it does not divide.

    Args:
        x: A whole value or a global tensor.
        placement: Where it should be.
        sbp: How it should lie.
        value: What to pad with.

    Communication: none for a whole value; a global tensor is broadcast first.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> padded = pad_to(np.arange(3), p, sbp.split(0))
        >>> print(jax.typeof(padded), padded)
        int32[4@x] [0 1 2 0]
        >>> print(unpad(padded, (3,)))
        [0 1 2]
    """
    shape = np.shape(x)
    target = padded_shape(shape, placement, sbp)
    widths = [(0, long - short) for short, long in zip(shape, target, strict=True)]
    if not any(width for _, width in widths):
        return to_global(x, placement, sbp)
    if is_global(x):
        x = _broadcast(x)
    pad = jnp.pad if isinstance(x, jax.Array) else np.pad
    return to_global(pad(x, widths, constant_values=value), placement, sbp)


def unpad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the data of a padded global tensor, broadcast on its placement.

    Args:
        x: A padded tensor, in any signature.
        shape: Its shape before it was padded.

    Raises:
        ValueError: If ``shape`` does not fit into the shape of ``x``.

    Communication: all shards to all devices.
    """
    if len(shape) != x.ndim or any(n > m for n, m in zip(shape, x.shape, strict=True)):
        raise ValueError(
            f"sbp.unpad should cut shape {tuple(x.shape)} down to {tuple(shape)}, "
            "which is not a part of it. Give the shape from before sbp.pad_to."
        )
    if tuple(shape) == x.shape:
        return x
    return jax.lax.slice(_broadcast(x), (0,) * x.ndim, tuple(shape))


def padding_mask(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns True where a padded global tensor holds data, False in the padding.

    Args:
        x: A padded tensor.
        shape: Its shape before it was padded.

    Returns:
        Booleans in the shape, placement and signature of ``x``; broadcast where ``x``
        is a partial sum. ``jnp.where(mask, x, 0).sum() / math.prod(shape)`` is the
        mean of the data.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> print(padding_mask(pad_to(np.arange(3), p, sbp.split(0)), (3,)))
        [ True  True  True False]
    """
    mask = np.zeros(x.shape, dtype=bool)
    mask[tuple(slice(size) for size in shape)] = True
    placement = placement_of(x)
    signature = tuple(
        component if isinstance(component, Split) else broadcast
        for component in signature_of(x)
    )
    return to_global(mask, placement, signature)


def _broadcast(x: jax.Array) -> jax.Array:
    return to_global(x, sbp=(broadcast,) * len(signature_of(x)))
