"""Buffers of slots: arrays with dims in front that are indexed at run time.

Everything is written in place: XLA makes no copy of a buffer to change a part of it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Index = jax.Array | int


def read(buffer: jax.Array, *index: Index) -> jax.Array:
    """Returns what stands at ``index`` of the dims in front; any if one is -1."""
    start = _start(buffer, index)
    sizes = (*[1] * len(index), *buffer.shape[len(index) :])
    return jax.lax.dynamic_slice(buffer, start, sizes).reshape(sizes[len(index) :])


def put(buffer: jax.Array, value: jax.Array, *index: Index) -> jax.Array:
    """Returns the buffer with the part at ``index`` replaced; none may be -1."""
    part = value.astype(buffer.dtype).reshape(*[1] * len(index), *value.shape)
    return jax.lax.dynamic_update_slice(buffer, part, _start(buffer, index))


def put_if(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the buffer with a slot replaced; unchanged if the slot is -1."""
    kept = jnp.where(slot >= 0, value.astype(buffer.dtype), read(buffer, slot))
    return put(buffer, kept, slot)


def read_all(buffers: Any, *index: Index) -> Any:
    """Returns `read` of each buffer of a tree."""
    return jax.tree.map(lambda buffer: read(buffer, *index), buffers)


def put_all(buffers: Any, values: Any, *index: Index) -> Any:
    """Returns `put` of each buffer of a tree."""
    return jax.tree.map(lambda b, v: put(b, v, *index), buffers, values)


def _start(buffer: jax.Array, index: Sequence[Index]) -> list[Index]:
    first = [jnp.maximum(i, 0) for i in index]
    return [*first, *[0] * (buffer.ndim - len(index))]
