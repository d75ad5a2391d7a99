"""Optimizer state in another dtype than that of the arithmetic, which is float32.

A moving average changes by a thousandth of its value in a step; bfloat16 has eight bits
and would round that away, so that a moment never fell. It is rounded at random, up with
the probability of the part that is cut off: right on average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class StoredState(NamedTuple):
    """State of `stored_in`, in another dtype than float32.

    Attributes:
        num_updates: int32 scalar.
        stored: State of the rule.
    """

    num_updates: jax.Array
    stored: Any


def stored_in(
    dtype: str, rule: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns the rule, computing in float32, its moments kept in ``dtype``.

    What is not an array in the form of a parameter, such as a count, is kept as it is.
    The random numbers depend on the count of updates and the place of an element.

    Args:
        dtype: ``"float32"`` or ``"bfloat16"``.
        rule: The rule; its updates are in float32.
    """
    if dtype == "float32":
        return optax.GradientTransformation(
            lambda params: rule.init(_widen(params)),
            lambda updates, state, params=None: rule.update(
                _widen(updates), state, _widen(params)
            ),
        )

    def init(params: Any) -> StoredState:
        state = rule.init(_widen(params))
        stored = _map_moments(lambda _, x: x.astype(dtype), state)
        return StoredState(num_updates=jnp.zeros((), jnp.int32), stored=stored)

    def update(updates: Any, state: StoredState, params: Any = None) -> tuple:
        updates, new = rule.update(
            _widen(updates), _widen(state.stored), _widen(params)
        )
        key = jax.random.fold_in(jax.random.key(0), state.num_updates)
        stored = _map_moments(
            lambda number, x: round_at_random(x, jax.random.fold_in(key, number)), new
        )
        return updates, StoredState(num_updates=state.num_updates + 1, stored=stored)

    return optax.GradientTransformation(init, update)


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns one of the two bfloat16 around ``x``, whose mean over keys is ``x``.

    Args:
        x: float32, finite.
        key: Of the random numbers.

    Example:
        >>> x = jnp.full(10_000, 1 + 2**-9)
        >>> rounded = round_at_random(x, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(rounded.tolist())), round(float(rounded.mean()), 3)
        ([1.0, 1.0078125], 1.002)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = ((bits + noise) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(kept, jnp.bfloat16)


def _widen(tree: Any) -> Any:
    def widen(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float32) if is_float else x

    return jax.tree.map(widen, tree)


def _map_moments(run: Any, state: Any) -> Any:
    """Applies ``run(number, leaf)`` to what lies in a tree like the parameters."""
    leaves, structure = jax.tree.flatten_with_path(state)
    return jax.tree.unflatten(
        structure,
        [
            run(number, leaf)
            if path and isinstance(path[-1], jax.tree_util.DictKey)
            else leaf
            for number, (path, leaf) in enumerate(leaves)
        ],
    )
