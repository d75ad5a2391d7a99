"""Random global tensors: ``sbp.randn`` and the like.

Values depend on the seed and the shape alone, never on placement or signature, and
each device generates only its own part: JAX's generator can be evaluated at any index.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sbp._compat import is_tracing, no_mesh_set
from sbp.assemble import Shape, as_shape, fit_shape
from sbp.creation import zeros
from sbp.global_tensor import to_global
from sbp.placement import Placement
from sbp.signature import PartialSum, SignatureLike, short
from sbp.spec import to_sharding

Seed = int | jax.Array


def rand(
    shape: Shape,
    *,
    seed: Seed,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns uniform random numbers from 0 to 1, those of ``jax.random.uniform``.

    Args:
        shape: Global shape, or the size of the only dim.
        seed: A whole number or a JAX random key. The same gives the same values, on
            every placement and in every signature.
        placement: Where it should be.
        sbp: How it should lie; a partial sum is an error.
        dtype: Its dtype.

    Raises:
        ValueError: If the signature has a partial sum or does not fit.
    """
    return _sample(jax.random.uniform, seed, as_shape(shape), dtype, placement, sbp)


def randn(
    shape: Shape,
    *,
    seed: Seed,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns standard normal random numbers, those of ``jax.random.normal``.

    Takes what ``sbp.rand`` takes.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]])
        >>> x = randn((16, 8), seed=0, placement=p, sbp=sbp.parse("S(0),S(1)"))
        >>> print(jax.typeof(x), sbp.to_local(x)[3].shape)
        float32[16@x,8@y] (8, 4)
    """
    return _sample(jax.random.normal, seed, as_shape(shape), dtype, placement, sbp)


def normal(
    mean: float,
    std: float,
    shape: Shape,
    *,
    seed: Seed,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns normal random numbers with a mean and a standard deviation.

    ``seed``, ``placement`` and ``sbp`` are those of ``sbp.rand``.
    """
    shape = as_shape(shape)
    return _sample(_scaled_normal, seed, shape, dtype, placement, sbp, (mean, std))


def randint(
    low: int,
    high: int,
    shape: Shape,
    *,
    seed: Seed,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.int32,
) -> jax.Array:
    """Returns random whole numbers from ``low`` to ``high - 1``.

    ``seed``, ``placement`` and ``sbp`` are those of ``sbp.rand``.
    """
    shape = as_shape(shape)
    return _sample(_randint, seed, shape, dtype, placement, sbp, (low, high))


def randperm(
    size: int,
    *,
    seed: Seed,
    placement: Placement,
    sbp: SignatureLike,
    dtype: Any = jnp.int32,
) -> jax.Array:
    """Returns the numbers from 0 to ``size - 1`` in random order.

    ``seed``, ``placement`` and ``sbp`` are those of ``sbp.rand``.

    Example:
        >>> import sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> sorted(randperm(4, seed=0, placement=p, sbp=sbp.split(0)).tolist())
        [0, 1, 2, 3]
    """
    return _sample(_permutation, seed, (size,), dtype, placement, sbp)


def _scaled_normal(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, mean: jax.Array, std: jax.Array
) -> jax.Array:
    values = mean + std * jax.random.normal(key, shape, dtype)
    return values.astype(dtype)


def _randint(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, low: jax.Array, high: jax.Array
) -> jax.Array:
    return jax.random.randint(key, shape, low, high, dtype)


def _permutation(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.permutation(key, shape[0]).astype(dtype)


def _sample(
    sampler: Callable[..., jax.Array],
    seed: Seed,
    shape: tuple[int, ...],
    dtype: Any,
    placement: Placement,
    sbp: SignatureLike,
    args: tuple[float, ...] = (),
) -> jax.Array:
    """Returns random values, of which each device generates only its own part."""
    signature = fit_shape(shape, dtype, placement, sbp)
    if any(isinstance(component, PartialSum) for component in signature):
        raise ValueError(
            f"Random numbers of shape {shape} with signature {short(signature)}: a sum "
            "of random addends has another distribution. Create them with a split or a "
            "broadcast, then call sbp.to_global."
        )
    if 0 in shape:
        return zeros(shape, placement=placement, sbp=signature, dtype=dtype)
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    if is_tracing():
        return to_global(sampler(key, shape, dtype, *args), placement, signature)
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    data, kind = np.asarray(jax.random.key_data(key)), str(jax.random.key_impl(key))
    sharding = to_sharding(placement, signature)
    program = _sampling_program(sampler, kind, shape, np.dtype(dtype), sharding)
    with no_mesh_set():
        return program(data, *args)


@functools.lru_cache(maxsize=1024)
def _sampling_program(
    sampler: Callable[..., jax.Array],
    key_kind: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
) -> Callable[..., jax.Array]:
    def sample(key_data: jax.Array, *args: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl=key_kind)
        return sampler(key, shape, dtype, *args)

    return jax.jit(sample, out_shardings=sharding)
