"""Buffers of slots: arrays with a dim of slots in front; slot -1 is none."""

import jax
import jax.numpy as jnp


def read(buffer: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Returns the content of a slot; of any slot if it is -1."""
    index = jnp.maximum(slot, 0)
    return jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)


def store(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the buffer with a slot filled; unchanged if the slot is -1."""
    kept = jnp.where(slot >= 0, value.astype(buffer.dtype), read(buffer, slot))
    return jax.lax.dynamic_update_index_in_dim(buffer, kept, jnp.maximum(slot, 0), 0)
