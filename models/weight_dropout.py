"""Dropout on attention weights, by position: any block of the mask by itself.

What is dropped is what `models.layers.dropout` drops of ``(B, H, L, T)``: whether a
weight is kept depends on its sample's key and on head, query and key alone.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from models.masks import Index


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "first_head", "first_query", "first_key"],
    meta_fields=["rate", "num_queries", "num_keys"],
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightDropout:
    """What is dropped of weights ``(B, H, L, T)``, or of a part of them. A pytree.

    Attributes:
        rate: Share that is dropped.
        words: Data of a threefry key per sample, uint32 ``(B, 2)``.
        num_queries: L of the whole.
        num_keys: T of the whole.
        first_head: Where the heads at hand begin in the whole.
        first_query: Where the queries at hand begin.
        first_key: Where the keys at hand begin.
    """

    rate: float
    words: jax.Array
    num_queries: int
    num_keys: int
    first_head: Index = 0
    first_query: Index = 0
    first_key: Index = 0

    def of_head(
        self, words: jax.Array, head: Index
    ) -> Callable[[Index, Index, tuple[int, int]], jax.Array]:
        """Returns ``keep(query, key, shape)``: which weights of a block are kept.

        Args:
            words: Those of the sample.
            head: Counted from ``first_head``, as query and key are from theirs.
        """

        def keep(query: Index, key: Index, shape: tuple[int, int]) -> jax.Array:
            row = (self.first_head + head) * self.num_queries + self.first_query + query
            rows_L = (row + jnp.arange(shape[0])).astype(jnp.uint32)
            column = self.first_key + key
            columns_T = (column + jnp.arange(shape[1])).astype(jnp.uint32)
            bits_LT = _bits(words, rows_L[:, None], columns_T[None], self.num_keys)
            # Uniform numbers are multiples of 2 ** -23; those below 1 - rate are kept.
            num_kept = np.uint32(np.ceil(np.float32(1 - self.rate) * 2.0**23))
            return (bits_LT >> np.uint32(9)) < num_kept

        return keep


def make(
    rate: float, keys_B: jax.Array | None, *, num_queries: int, num_keys: int
) -> WeightDropout | None:
    """Returns the dropout of whole weights; None if nothing is dropped.

    Args:
        rate: Share to drop.
        keys_B: One key per sample; None switches dropout off.
        num_queries: L.
        num_keys: T.

    Raises:
        ValueError: If the keys are not threefry keys.
    """
    if keys_B is None or rate == 0:
        return None
    name = str(jax.random.key_impl(keys_B))
    if name != "threefry2x32":
        raise ValueError(
            f"Dropout of attention weights in blocks was given keys of {name!r}, and"
            " knows the bits of 'threefry2x32' alone. Make keys of that, which is"
            " jax_default_prng_impl unless changed, or set model.attention='plain'."
        )
    return WeightDropout(
        rate=rate,
        words=jax.random.key_data(keys_B),
        num_queries=num_queries,
        num_keys=num_keys,
    )


def _bits(words: jax.Array, row: jax.Array, column: jax.Array, width: int) -> jax.Array:
    """Returns the random bits of places in an array of rows of ``width``."""
    high, low = _times(row, width)
    place = low + column
    return _threefry(words, high + (place < low).astype(jnp.uint32), place)


def _times(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low word of the product of two words."""
    half, low_half = np.uint32(16), np.uint32(0xFFFF)
    b_high, b_low = np.uint32(b >> 16), np.uint32(b & 0xFFFF)
    a_high, a_low = a >> half, a & low_half
    across, down = a_high * b_low, a_low * b_high
    middle = (a_low * b_low >> half) + (across & low_half) + (down & low_half)
    high = a_high * b_high + (across >> half) + (down >> half) + (middle >> half)
    return high, a * np.uint32(b)


def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Returns 32 random bits for each place, those of `jax.random.bits`.

    Threefry-2x32 with 20 rounds (Salmon et al., 2011), both words of it xored.

    Args:
        key: Two words.
        high: High words of the places in the flat array.
        low: Low words.
    """
    words = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    high, low = high + words[0], low + words[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            high = high + low
            low = high ^ (low << np.uint32(turn) | low >> np.uint32(32 - turn))
        high = high + words[(group + 1) % 3]
        low = low + words[(group + 2) % 3] + np.uint32(group + 1)
    return high ^ low
