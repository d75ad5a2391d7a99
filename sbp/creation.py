"""Functions that create global tensors: ``sbp.zeros``, ``sbp.randn`` and the like.

All take the global shape, a placement and a signature. Each device makes only its own
part. Random numbers are in ``sampling.py``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp._compat import is_tracing, same_in_all_processes
from sbp.assemble import Index, Shape, as_shape, assemble, fit_shape
from sbp.global_tensor import placement_of, signature_of, to_global
from sbp.placement import Placement
from sbp.signature import SignatureLike


def tensor(
    data: Any, placement: Placement, sbp: SignatureLike, *, dtype: Any = None
) -> jax.Array:
    """Returns a global tensor with the values of ``data``, which is the whole value.

    Args:
        data: Numbers, nested lists or an array.
        placement: Where it should be.
        sbp: How it should lie.
        dtype: Its dtype; None takes that of ``data``.

    Raises:
        ValueError: If in a job of several processes they do not give the same data.

    Communication: in several processes a checksum, to compare the data.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> print(jax.typeof(tensor([[1, 2], [3, 4]], p, sbp.split(1))))
        int32[2,2@x]
    """
    value = np.asarray(data, dtype=dtype)
    if not same_in_all_processes(value):
        raise ValueError(
            f"sbp.tensor got data of shape {value.shape} that differ between the "
            f"{jax.process_count()} processes, but it takes the whole value, the same "
            "everywhere. To join what each process has use sbp.from_local."
        )
    return to_global(value, placement, sbp)


def full(
    shape: Shape,
    value: float,
    *,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = None,
) -> jax.Array:
    """Returns a global tensor that is ``value`` everywhere.

    Args:
        shape: Global shape, or the size of the only dim.
        value: A number.
        placement: Where it should be.
        sbp: How it should lie.
        dtype: Its dtype; None takes that of ``value``: float32 or int32 or bool.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> print(full((2, 4), 7, placement=p, sbp=sbp.split(1)))
        [[7 7 7 7]
         [7 7 7 7]]
    """
    shape = as_shape(shape)
    dtype = _dtype(dtype, np.asarray(value).dtype)
    whole = np.broadcast_to(np.asarray(value, dtype), shape)
    return _from_pieces(shape, dtype, placement, sbp, whole.__getitem__)


def zeros(
    shape: Shape, *, placement: Placement, sbp: SignatureLike, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns a global tensor of zeros; see ``sbp.full``."""
    return full(shape, 0, placement=placement, sbp=sbp, dtype=dtype)


def ones(
    shape: Shape, *, placement: Placement, sbp: SignatureLike, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns a global tensor of ones; see ``sbp.full``.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1, 2, 3])
        >>> x = ones((4, 2), placement=p, sbp=sbp.partial_sum)
        >>> print(jax.typeof(x), sbp.full_value(x).sum())
        float32[4,2]{U:x} 8.0
    """
    return full(shape, 1, placement=placement, sbp=sbp, dtype=dtype)


def empty(
    shape: Shape, *, placement: Placement, sbp: SignatureLike, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns ``sbp.zeros``: there is no memory without values in JAX."""
    return zeros(shape, placement=placement, sbp=sbp, dtype=dtype)


def full_like(x: jax.Array, value: float, *, dtype: Any = None) -> jax.Array:
    """Returns ``value`` in the shape, dtype, placement and signature of ``x``."""
    return full(
        x.shape,
        value,
        placement=placement_of(x),
        sbp=signature_of(x),
        dtype=x.dtype if dtype is None else dtype,
    )


def zeros_like(x: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Returns zeros in the shape, dtype, placement and signature of ``x``."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Returns ones in the shape, dtype, placement and signature of ``x``."""
    return full_like(x, 1, dtype=dtype)


def empty_like(x: jax.Array, *, dtype: Any = None) -> jax.Array:
    """Returns ``sbp.zeros_like``."""
    return zeros_like(x, dtype=dtype)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = None,
) -> jax.Array:
    """Returns evenly spaced numbers, as ``numpy.arange`` does.

    Example:
        >>> import sbp
        >>> print(arange(4, placement=sbp.placement("cpu", [0, 1]), sbp=sbp.split(0)))
        [0 1 2 3]
    """
    values = np.arange(start, stop, step) if stop is not None else np.arange(start)
    return _from_value(values, placement, sbp, dtype)


def linspace(
    start: float,
    stop: float,
    num: int,
    *,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns ``num`` numbers from ``start`` to ``stop``, both included."""
    return _from_value(np.linspace(start, stop, num), placement, sbp, dtype)


def logspace(
    start: float,
    stop: float,
    num: int,
    base: float = 10.0,
    *,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns ``num`` powers of ``base``, from ``base**start`` to ``base**stop``."""
    values = np.logspace(start, stop, num, base=base)
    return _from_value(values, placement, sbp, dtype)


def eye(
    num_rows: int,
    num_columns: int | None = None,
    *,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns the matrix with ones on its diagonal and zeros elsewhere.

    Example:
        >>> import sbp
        >>> print(eye(2, 4, placement=sbp.placement("cpu", [0, 1]), sbp=sbp.split(1)))
        [[1. 0. 0. 0.]
         [0. 1. 0. 0.]]
    """
    shape = (num_rows, num_rows if num_columns is None else num_columns)
    rows, columns = (np.arange(size) for size in shape)

    def piece(index: Index) -> np.ndarray:
        return rows[index[0]][:, None] == columns[index[1]]

    return _from_pieces(shape, _dtype(dtype, None), placement, sbp, piece)


def hann_window(
    size: int,
    *,
    placement: Placement,
    sbp: SignatureLike,
    periodic: bool = True,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns a Hann window, ``sin(pi * n / N) ** 2`` with ``N = size``.

    Args:
        size: Number of points.
        placement: Where it should be.
        sbp: How it should lie.
        periodic: False gives the symmetric window, with ``N = size - 1``.
        dtype: Its dtype.
    """
    period = max(size if periodic else size - 1, 1)
    values = (
        np.sin(np.pi * np.arange(size) / period) ** 2 if size > 1 else np.ones(size)
    )
    return _from_value(values, placement, sbp, dtype)


def _from_value(
    value: np.ndarray, placement: Placement, sbp: SignatureLike, dtype: Any
) -> jax.Array:
    value = value.astype(_dtype(dtype, value.dtype))
    return _from_pieces(value.shape, value.dtype, placement, sbp, value.__getitem__)


def _from_pieces(
    shape: tuple[int, ...],
    dtype: Any,
    placement: Placement,
    sbp: SignatureLike,
    piece: Callable[[Index], np.ndarray],
) -> jax.Array:
    signature = fit_shape(shape, dtype, placement, sbp)
    if is_tracing():
        whole = piece(tuple(slice(0, size) for size in shape))
        return to_global(np.asarray(whole, dtype), placement, signature)
    return assemble(shape, dtype, placement, signature, piece)


def _dtype(dtype: Any, default: Any) -> np.dtype:
    """Returns the dtype as JAX has it: 32 bits unless 64 are enabled."""
    chosen = default if dtype is None else dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(chosen))
