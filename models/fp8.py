"""Matrix products in eight bits, for GPUs that have them (arXiv:2209.05433).

Operands of the forward pass are rounded to E4M3, with four bits of precision, gradients
to E5M2, with three and a wider range. Each tensor is divided by a scale first, so that
its largest element is the largest number of the format. The scale is that of the tensor
itself, found just before its use: nothing is carried from step to step, a sudden jump
cannot overflow, and microbatches and ranks need not agree.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

FORWARD = jnp.float8_e4m3fn
BACKWARD = jnp.float8_e5m2
MULTIPLE = 16
"""Sizes of the operands must be multiples of this for GPUs to use eight bits."""

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple]
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Dims, **unused: Any
) -> jax.Array:
    """Returns the product of the last dims of ``x`` and the first ones of a kernel.

    Args:
        x: ``(..., *in)``.
        kernel: ``(*in, *out)``.
        dimension_numbers: As of `jax.lax.dot_general`, of such a product.
        **unused: Other arguments of it, all None.

    Returns:
        ``(..., *out)`` in the dtype of ``x``; sums are in float32. So are gradients.

    Example:
        >>> x, kernel = jnp.array([[1.0, 2.0]]), jnp.array([[4.0], [0.3]])
        >>> y = dot_general(x, kernel, (((1,), (0,)), ((), ())))
        >>> round(float(y[0, 0]), 3)  # 0.3 was rounded to four bits
        4.571
    """
    (x_dims, kernel_dims), batch = dimension_numbers
    num_in = len(kernel_dims)
    assert kernel_dims == tuple(range(num_in)), "a kernel begins with its inputs"
    assert x_dims == tuple(range(x.ndim - num_in, x.ndim)), "they are the last of x"
    assert batch == ((), ()), "and there is one kernel"
    assert all(value is None for value in unused.values()), "nothing else is asked for"
    return _product(num_in, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(num_in: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _forward(num_in, x, kernel)[0]


def _forward(
    num_in: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Residuals]:
    small_x, scale_x = quantize(x, FORWARD)
    small_kernel, scale_kernel = quantize(kernel, FORWARD)
    dims = tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in))
    y = _multiply(small_x, small_kernel, dims, scale_x * scale_kernel)
    return y.astype(x.dtype), (small_x, scale_x, small_kernel, scale_kernel)


def _backward(
    num_in: int, saved: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    small_x, scale_x, small_kernel, scale_kernel = saved
    small, scale = quantize(gradient, BACKWARD)
    before = tuple(range(small_x.ndim - num_in))
    outs = (
        tuple(range(len(before), gradient.ndim)),
        tuple(range(num_in, small_kernel.ndim)),
    )
    grad_x = _multiply(small, small_kernel, outs, scale * scale_kernel)
    grad_kernel = _multiply(small_x, small, (before, before), scale_x * scale)
    return grad_x.astype(gradient.dtype), grad_kernel.astype(gradient.dtype)


_product.defvjp(_forward, _backward)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns ``x`` in a format of eight bits, and the float32 scale it is divided by.

    Example:
        >>> small, scale = quantize(jnp.array([1.0, -448.0, 3.3]), FORWARD)
        >>> small.tolist(), float(scale)
        ([1.0, -448.0, 3.25], 1.0)
    """
    largest = float(jnp.finfo(dtype).max)
    highest = jnp.abs(x).max().astype(jnp.float32)
    scale = jnp.where(highest > 0, highest / largest, 1.0)
    # What is not finite becomes NaN, and stays to be seen.
    scaled = x.astype(jnp.float32) / scale
    return jnp.clip(scaled, -largest, largest).astype(dtype), scale


def _multiply(
    x: jax.Array, y: jax.Array, dims: tuple[tuple, tuple], scale: jax.Array
) -> jax.Array:
    product = jax.lax.dot_general(
        x, y, (dims, ((), ())), preferred_element_type=jnp.float32
    )
    return product * scale
