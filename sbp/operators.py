"""Operators on global tensors.

Each takes global tensors of any signature on one placement, and gives a global tensor
whose signature is deduced by the rules of `sbp.rules`. Partial sums stay partial
through additive operations. An operand that does not fit is converted by the cheapest
route; ``sbp.explain(sbp.matmul, x, w)`` says which, and what it costs. All of them
can be differentiated, and used inside ``sbp.jit`` and ``jax.jit``.

Operands that are not global tensors, such as numbers, are the same on every device.
Dims and shapes are always those of the global tensor.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp.infer import Jitted

Operand = jax.typing.ArrayLike
Dims = int | tuple[int, ...] | None


def add(x: Operand, y: Operand) -> jax.Array:
    """Returns ``x + y``; the sum of partial sums is partial.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> x = sbp.to_global(jnp.ones((4, 2)), p, sbp.split(0))
        >>> y = sbp.to_global(jnp.ones((4, 2)), p, sbp.broadcast)
        >>> sbp.signature_of(add(x, y))  # slicing y is free, gathering x is not
        (sbp.split(0),)
    """
    return _apply(jnp.add, x, y)


def subtract(x: Operand, y: Operand) -> jax.Array:
    """Returns ``x - y``; the difference of partial sums is partial."""
    return _apply(jnp.subtract, x, y)


def multiply(x: Operand, y: Operand) -> jax.Array:
    """Returns ``x * y``; partial if one of them is and the other is broadcast."""
    return _apply(jnp.multiply, x, y)


def divide(x: Operand, y: Operand) -> jax.Array:
    """Returns ``x / y``; partial if ``x`` is and ``y`` is broadcast."""
    return _apply(jnp.true_divide, x, y)


def negative(x: Operand) -> jax.Array:
    """Returns ``-x``, with the signature of ``x``."""
    return _apply(jnp.negative, x)


def matmul(x: Operand, y: Operand) -> jax.Array:
    """Returns the matrix product, over the last two dims as in NumPy.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
        >>> x = sbp.to_global(jnp.ones((4, 8)), p, (sbp.split(0), sbp.split(1)))
        >>> w = sbp.to_global(jnp.ones((8, 6)), p, (sbp.broadcast, sbp.split(0)))
        >>> print(jax.typeof(matmul(x, w)))
        float32[4@data,6]{U:tensor}
    """
    return _apply(jnp.matmul, x, y)


def einsum(subscripts: str, *operands: Operand) -> jax.Array:
    """Returns the sum of products that ``subscripts`` describe, as in NumPy.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1], ("tensor",))
        >>> q = sbp.to_global(jnp.ones((2, 5, 4, 8)), p, sbp.split(2))
        >>> print(jax.typeof(einsum("bqhk,bthk->bhqt", q, q)))
        float32[2,4@tensor,5,5]
    """
    return _apply(_einsum, *operands, subscripts=subscripts)


def sum(x: Operand, axis: Dims = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the sum over dims ``axis``, over all if None.

    Partial if ``x`` is, or if a summed dim is split.
    """
    return _apply(jnp.sum, x, axis=axis, keepdims=keepdims)


def mean(x: Operand, axis: Dims = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the mean over dims ``axis``; partial where ``sum`` is."""
    return _apply(jnp.mean, x, axis=axis, keepdims=keepdims)


def max(x: Operand, axis: Dims = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the maximum over dims ``axis``; a split one costs an all-reduce."""
    return _apply(jnp.max, x, axis=axis, keepdims=keepdims)


def min(x: Operand, axis: Dims = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the minimum over dims ``axis``; a split one costs an all-reduce."""
    return _apply(jnp.min, x, axis=axis, keepdims=keepdims)


def exp(x: Operand) -> jax.Array:
    """Returns ``e**x``. Not additive: a partial sum is added up first."""
    return _apply(jnp.exp, x)


def relu(x: Operand) -> jax.Array:
    """Returns ``max(x, 0)``. Not additive: a partial sum is added up first."""
    return _apply(jax.nn.relu, x)


def gelu(x: Operand) -> jax.Array:
    """Returns the Gaussian error linear unit (arXiv:1606.08415), by the tanh."""
    return _apply(jax.nn.gelu, x)


def tanh(x: Operand) -> jax.Array:
    """Returns the hyperbolic tangent. Not additive, as `exp`."""
    return _apply(jnp.tanh, x)


def softmax(x: Operand, axis: int = -1) -> jax.Array:
    """Returns ``exp(x)`` normalized over dim ``axis``.

    Where the dim is split, maximum and sum of each row are reduced over the devices,
    and the result keeps the split.
    """
    return _apply(jax.nn.softmax, x, axis=axis)


def log_softmax(x: Operand, axis: int = -1) -> jax.Array:
    """Returns the logarithm of `softmax`; splits are kept as there."""
    return _apply(jax.nn.log_softmax, x, axis=axis)


def layer_norm(
    x: Operand, scale: Operand, bias: Operand, *, epsilon: float = 1e-5
) -> jax.Array:
    """Returns ``x`` with mean 0 and deviation 1 over its last dim, scaled and shifted.

    Args:
        x: Shape ``(..., D)``. Where D is split, the statistics of each row are
            reduced over the devices.
        scale: Shape ``(D,)``.
        bias: Shape ``(D,)``.
        epsilon: Added to the variance.
    """
    return _apply(_layer_norm, x, scale, bias, epsilon=epsilon)


def embedding(table: Operand, indices: Operand) -> jax.Array:
    """Returns ``table[indices]``: rows of a table.

    The table may be split by rows (its vocabulary): each device looks up what it has,
    and the result is a partial sum. It may be split by columns: so is the result.

    Args:
        table: Shape ``(V, D)``.
        indices: Integers from 0 to V - 1, of any shape. Others give NaN.

    Returns:
        Shape ``(*indices.shape, D)``.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1], ("tensor",))
        >>> table = sbp.to_global(jnp.ones((8, 4)), p, sbp.split(0))
        >>> print(jax.typeof(embedding(table, jnp.array([1, 7, 3]))))
        float32[3,4]{U:tensor}
    """
    return _apply(jnp.take, table, indices, axis=0)


def reshape(x: Operand, shape: int | Sequence[int]) -> jax.Array:
    """Returns ``x`` with another shape of as many elements, in row-major order.

    Dims fall into groups that are joined or taken apart. A split of the first dim of a
    group is kept, on the first dim of what the group becomes, if both sizes allow.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]], ("x", "y"))
        >>> x = sbp.to_global(jnp.ones((8, 4)), p, (sbp.split(0), sbp.split(0)))
        >>> sbp.signature_of(reshape(x, (2, 4, 4)))
        (sbp.split(0), sbp.split(1))
    """
    return _apply(jnp.reshape, x, shape=shape if isinstance(shape, int) else (*shape,))


def transpose(x: Operand, axes: Sequence[int] | None = None) -> jax.Array:
    """Returns ``x`` with its dims in the order ``axes``, reversed if None."""
    return _apply(jnp.transpose, x, axes=None if axes is None else tuple(axes))


def squeeze(x: Operand, axis: Dims = None) -> jax.Array:
    """Returns ``x`` without dims ``axis`` of size 1, without any such if None."""
    return _apply(jnp.squeeze, x, axis=axis)


def expand_dims(x: Operand, axis: int | tuple[int, ...]) -> jax.Array:
    """Returns ``x`` with new dims of size 1 at ``axis``."""
    return _apply(jnp.expand_dims, x, axis=axis)


def concatenate(xs: Sequence[Operand], axis: int = 0) -> jax.Array:
    """Returns the tensors joined along dim ``axis``, which none may have split."""
    return _apply(_concatenate, *xs, axis=axis)


def getitem(x: Operand, index: Any) -> jax.Array:
    """Returns ``x[index]`` for integers and slices.

    A dim that is kept whole may be split. Of a dim that is cut, the selection from the
    shards is a partial sum, or the dim is made whole before, whichever moves less.

    Args:
        x: Global tensor.
        index: As in ``x[index]``; ``numpy.s_[:, 0:8]`` writes slices.
    """
    parts = index if isinstance(index, tuple) else (index,)
    return _apply(_getitem, x, index=tuple(map(_to_hashable, parts)))


def where(condition: Operand, x: Operand, y: Operand) -> jax.Array:
    """Returns ``x`` where the condition holds, else ``y``.

    Partial if one of them is and the condition is broadcast.
    """
    return _apply(jnp.where, condition, x, y)


def astype(x: Operand, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns ``x`` in another dtype; partial sums stay so between floats."""
    return _apply(lax.convert_element_type, x, new_dtype=jnp.dtype(dtype))


def _apply(function: Callable[..., Any], *operands: Operand, **static: Any) -> Any:
    return _operator(function, tuple(sorted(static.items())))(*operands)


@functools.lru_cache(maxsize=1024)
def _operator(
    function: Callable[..., Any], static: tuple[tuple[str, Hashable], ...]
) -> Jitted:
    bound = functools.partial(function, **dict(static))
    functools.update_wrapper(bound, function)
    return Jitted(bound, partial_outputs="keep")


def _einsum(*operands: jax.Array, subscripts: str) -> jax.Array:
    return jnp.einsum(subscripts, *operands)


def _concatenate(*operands: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate(operands, axis=axis)


def _layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float
) -> jax.Array:
    dims = (*range(x.ndim - 1),)
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    normalized = centered * lax.rsqrt(variance + epsilon)
    return normalized * jnp.expand_dims(scale, dims) + jnp.expand_dims(bias, dims)


def _getitem(x: jax.Array, *, index: tuple) -> jax.Array:
    return x[tuple(slice(*p[1:]) if isinstance(p, tuple) else p for p in index)]


def _to_hashable(part: Any) -> Hashable:
    # Slices can be hashed from Python 3.12 on only.
    if isinstance(part, slice):
        return ("slice", part.start, part.stop, part.step)
    return part
