"""Matrix products in eight bits, for GPUs that have them (arXiv:2209.05433).

Operands of the forward pass are rounded to E4M3, with four bits of precision, gradients
to E5M2, with three and a wider range. Each tensor is divided by a scale first. There
are two ways to find it:

`dot_general`, current scaling
    The largest element becomes the largest number of the format. It is found just
    before its use: nothing is carried from step to step, a sudden jump cannot overflow,
    and microbatches and ranks need not agree.
`delayed_dot_general`, delayed scaling
    The scale is given, from steps before, a power of two. What would have been right
    comes back as a gradient. See `models.delayed_scaling`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORWARD = jnp.float8_e4m3fn
BACKWARD = jnp.float8_e5m2
MULTIPLE = 16
"""Sizes of the operands must be multiples of this for GPUs to use eight bits."""

NUM_SCALES = 96
SCALES = 2.0 ** np.arange(-64, -64 + NUM_SCALES, dtype=np.float32)
"""Those of delayed scaling."""

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
    return _product(_num_in(x, dimension_numbers, unused), x, kernel)


def delayed_dot_general(
    scales: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: Dims,
    **unused: Any,
) -> jax.Array:
    """Returns the same product, of operands that are divided by given scales.

    What is too large for its scale becomes the largest number of the format, what is
    not finite NaN.

    Args:
        scales: float32 ``(3, NUM_SCALES)``, of ``x``, the kernel and the gradient of
            the product, each the same along dim 1. Their gradients are `marks`.
        x: See `dot_general`, as for the next ones.
        kernel: Of the map.
        dimension_numbers: Of the product.
        **unused: None.

    Example:
        >>> x, kernel = jnp.array([[1.0, 2.0]]), jnp.array([[4.0], [0.3]])
        >>> dims = (((1,), (0,)), ((), ()))
        >>> scales = jnp.full((3, NUM_SCALES), 2.0**-6)
        >>> round(float(delayed_dot_general(scales, x, kernel, dims)[0, 0]), 3)
        4.625
        >>> def run(scales):
        ...     return delayed_dot_general(scales, x, kernel, dims)[0, 0]
        >>> SCALES[jax.grad(run)(scales).argmax(1)].tolist()  # 448 / 256 is below 2
        [0.0078125, 0.015625, 3.0517578125e-05]
    """
    return _delayed(_num_in(x, dimension_numbers, unused), scales, x, kernel)


def _num_in(x: jax.Array, dimension_numbers: Dims, unused: dict[str, Any]) -> int:
    """Returns how many dims are summed over, of a product that a linear map makes."""
    (x_dims, kernel_dims), batch = dimension_numbers
    num_in = len(kernel_dims)
    assert kernel_dims == tuple(range(num_in)), "a kernel begins with its inputs"
    assert x_dims == tuple(range(x.ndim - num_in, x.ndim)), "they are the last of x"
    assert batch == ((), ()), "and there is one kernel"
    assert all(value is None for value in unused.values()), "nothing else is asked for"
    return num_in


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(num_in: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _forward(num_in, x, kernel)[0]


def _forward(
    num_in: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Residuals]:
    saved = *quantize(x, FORWARD), *quantize(kernel, FORWARD)
    return _product_of(num_in, saved).astype(x.dtype), saved


def _backward(
    num_in: int, saved: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    grad_x, grad_kernel = _gradients_of(num_in, saved, *quantize(gradient, BACKWARD))
    return grad_x.astype(gradient.dtype), grad_kernel.astype(gradient.dtype)


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delayed(
    num_in: int, scales: jax.Array, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    return _delayed_forward(num_in, scales, x, kernel)[0]


def _delayed_forward(
    num_in: int, scales: jax.Array, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple]:
    scale_x, scale_kernel, _ = scales[:, 0]
    small_x = round_to(x, FORWARD, scale_x)
    small_kernel = round_to(kernel, FORWARD, scale_kernel)
    y = _product_of(num_in, (small_x, scale_x, small_kernel, scale_kernel))
    saved = small_x, _highest(x), small_kernel, _highest(kernel), scales
    return y.astype(x.dtype), saved


def _delayed_backward(
    num_in: int, saved: tuple, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    small_x, highest_x, small_kernel, highest_kernel, scales = saved
    scale_x, scale_kernel, scale = scales[:, 0]
    small = round_to(gradient, BACKWARD, scale)
    operands = small_x, scale_x, small_kernel, scale_kernel
    grad_x, grad_kernel = _gradients_of(num_in, operands, small, scale)
    seen = [
        marks(highest_x, FORWARD),
        marks(highest_kernel, FORWARD),
        marks(_highest(gradient), BACKWARD),
    ]
    grads = grad_x.astype(gradient.dtype), grad_kernel.astype(gradient.dtype)
    return jnp.stack(seen), *grads


_delayed.defvjp(_delayed_forward, _delayed_backward)


def marks(highest: jax.Array, dtype: Any) -> jax.Array:
    """Returns a 1 in the place of the scale that fits, in zeros of ``(NUM_SCALES,)``.

    In a sum of these the last place that is not 0 is of the largest scale. Of zero, or
    what is not finite, there is none.

    Args:
        highest: float32, the largest absolute element of a tensor.
        dtype: The format of eight bits.

    Example:
        >>> SCALES[marks(jnp.float32(448), FORWARD).argmax()].item()
        1.0
        >>> SCALES[marks(jnp.float32(449), FORWARD).argmax()].item()
        2.0
    """
    above = np.float32(jnp.finfo(dtype).max) * SCALES
    below = np.concatenate([np.zeros(1, np.float32), above[:-1]])
    above[-1] = np.finfo(np.float32).max
    is_there = jnp.greater(highest, below) & jnp.less_equal(highest, above)
    return is_there.astype(jnp.float32)


def round_to(x: jax.Array, dtype: Any, scale: jax.Array) -> jax.Array:
    """Returns ``x / scale`` in a format of eight bits.

    Example:
        >>> round_to(jnp.array([1.0, 900, jnp.inf]), FORWARD, jnp.float32(0.5)).tolist()
        [2.0, 448.0, nan]
    """
    largest = float(jnp.finfo(dtype).max)
    scaled = x.astype(jnp.float32) * (1 / scale)
    clipped = jnp.clip(scaled, -largest, largest)
    return jnp.where(jnp.isfinite(scaled), clipped, jnp.nan).astype(dtype)


def _highest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max().astype(jnp.float32)


def _product_of(num_in: int, operands: Residuals) -> jax.Array:
    small_x, scale_x, small_kernel, scale_kernel = operands
    dims = tuple(range(small_x.ndim - num_in, small_x.ndim)), tuple(range(num_in))
    return _multiply(small_x, small_kernel, dims, scale_x * scale_kernel)


def _gradients_of(
    num_in: int, operands: Residuals, small: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands, from that of the product."""
    small_x, scale_x, small_kernel, scale_kernel = operands
    before = tuple(range(small_x.ndim - num_in))
    outs = (
        tuple(range(len(before), small.ndim)),
        tuple(range(num_in, small_kernel.ndim)),
    )
    grad_x = _multiply(small, small_kernel, outs, scale * scale_kernel)
    grad_kernel = _multiply(small_x, small, (before, before), scale_x * scale)
    return grad_x, grad_kernel


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns ``x`` in a format of eight bits, and the float32 scale it is divided by.

    Example:
        >>> small, scale = quantize(jnp.array([1.0, -448.0, 3.3]), FORWARD)
        >>> small.tolist(), float(scale)
        ([1.0, -448.0, 3.25], 1.0)
    """
    largest = float(jnp.finfo(dtype).max)
    highest = _highest(x)
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
