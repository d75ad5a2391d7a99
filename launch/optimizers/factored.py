"""Second moments of matrices by rows and columns, as in Adafactor (arXiv:1804.04235).

For a matrix of squared gradients the means of its rows and of its columns are kept, in
place of every element: as much memory as a vector. Other parameters keep every element.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from launch.optimizers.matrices import Matrix, map_matrices


class FactoredState(NamedTuple):
    """State of `scale_by_factored_rms`.

    Attributes:
        num_updates: int32 scalar.
        rows: Means over the columns of each matrix, which are dims of size 1; every
            element of what is no matrix.
        columns: Means over the rows, likewise; zeros of no dim but that of layers for
            what is no matrix.
    """

    num_updates: jax.Array
    rows: Any
    columns: Any


def scale_by_factored_rms(
    *, decay: float = 0.8, epsilon: float = 1e-30
) -> optax.GradientTransformation:
    """Divides gradients by the root of their factored second moments.

    In update ``t`` (from 1 on) the moments decay by ``1 - t**-decay``, so the first one
    sets them.

    Args:
        decay: How fast the decay comes close to 1.
        epsilon: Added to the squares.
    """

    def init(params: Any) -> FactoredState:
        return FactoredState(
            num_updates=jnp.zeros((), jnp.int32),
            rows=map_matrices(_empty_rows, params),
            columns=map_matrices(_empty_columns, params),
        )

    def update(updates: Any, state: FactoredState, params: Any = None) -> tuple:
        del params
        number = state.num_updates + 1
        kept = 1 - number.astype(jnp.float32) ** -decay

        def mix(old: jax.Array, new: jax.Array) -> jax.Array:
            return kept * old + (1 - kept) * new

        def next_rows(matrix: Matrix | None, g: jax.Array, old: jax.Array) -> jax.Array:
            squares = g * g + epsilon
            return mix(
                old, squares if matrix is None else _mean(squares, matrix.columns)
            )

        def next_columns(
            matrix: Matrix | None, g: jax.Array, old: jax.Array
        ) -> jax.Array:
            return (
                old if matrix is None else mix(old, _mean(g * g + epsilon, matrix.rows))
            )

        def scale(
            matrix: Matrix | None, g: jax.Array, rows: jax.Array, columns: jax.Array
        ) -> jax.Array:
            if matrix is None:
                return g * jax.lax.rsqrt(rows)
            whole = _mean(rows, matrix.rows)
            return g * jax.lax.rsqrt(rows / whole) * jax.lax.rsqrt(columns)

        rows = map_matrices(next_rows, updates, state.rows)
        columns = map_matrices(next_columns, updates, state.columns)
        scaled = map_matrices(scale, updates, rows, columns)
        return scaled, FactoredState(num_updates=number, rows=rows, columns=columns)

    return optax.GradientTransformation(init, update)


def _mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return x.mean(dims, keepdims=True)


def _empty_rows(matrix: Matrix | None, x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x if matrix is None else _mean(x, matrix.columns))


def _empty_columns(matrix: Matrix | None, x: jax.Array) -> jax.Array:
    if matrix is None:
        # Dim 0 may be the layers, which a checkpoint has in another order.
        return jnp.zeros((*x.shape[:1], *[1] * (x.ndim - 1)), x.dtype)
    return jnp.zeros_like(_mean(x, matrix.rows))
