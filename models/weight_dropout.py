"""Dropout on attention weights, by position: any block of the mask by itself.

What is dropped is what ``dropout(weights_BHLT, rate, keys_B)`` of `models.layers` drops:
whether a weight is kept depends on its sample's key and on head, query and key alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.masks import Index


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys_B", "first_head", "first_query", "first_key"],
    meta_fields=["rate", "num_queries", "num_keys"],
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightDropout:
    """What is dropped of the weights ``(B, H, L, T)``. A pytree.

    Attributes:
        rate: Share that is dropped.
        keys_B: Threefry keys, one per sample.
        num_queries: L of the whole.
        num_keys: T of the whole.
        first_head: Where the heads at hand begin in the whole.
        first_query: Where the queries at hand begin.
        first_key: Where the keys at hand begin.
    """

    rate: float
    keys_B: jax.Array
    num_queries: int
    num_keys: int
    first_head: Index = 0
    first_query: Index = 0
    first_key: Index = 0

    def keep(
        self, key: jax.Array, head: Index, query: Index, first: Index, shape: tuple
    ) -> jax.Array:
        """Returns which weights of a block are kept, boolean.

        Args:
            key: Of the sample.
            head: Counted from ``first_head``.
            query: First query of the block, counted from ``first_query``.
            first: First key of the block, counted from ``first_key``.
            shape: Queries and keys of the block.
        """
        row = (self.first_head + head) * self.num_queries + self.first_query + query
        rows_L = jnp.asarray(row + jnp.arange(shape[0]), jnp.uint32)
        columns_T = jnp.asarray(
            self.first_key + first + jnp.arange(shape[1]), jnp.uint32
        )
        high_L1, low_L1 = _product(rows_L[:, None], self.num_keys)
        low_LT = low_L1 + columns_T[None]
        high_LT = high_L1 + (low_LT < low_L1).astype(jnp.uint32)
        bits_LT = _threefry(jax.random.key_data(key), high_LT, low_LT)
        # Uniform numbers are the multiples of 2 ** -23; those below 1 - rate are kept.
        num_kept = np.uint32(np.ceil(np.float32(1 - self.rate) * 2.0**23))
        return (bits_LT >> np.uint32(9)) < num_kept


def _product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
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
