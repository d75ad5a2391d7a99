"""Several documents in one row, none of which sees the others.

``documents`` is int32 ``(B, L)``: positions of one document are consecutive and have
the same number, neighbors have different ones.
"""

import jax
import jax.numpy as jnp

Batch = dict[str, jax.Array]


def positions_in_document(documents_BL: jax.Array) -> jax.Array:
    """Returns the position of each token in its own document, int32 ``(B, L)``.

    Example:
        >>> positions_in_document(jnp.array([[0, 0, 0, 1, 1]])).tolist()
        [[0, 1, 2, 0, 1]]
    """
    index_BL = jax.lax.broadcasted_iota(jnp.int32, documents_BL.shape, 1)
    is_start_BL = jnp.diff(documents_BL, axis=1, prepend=documents_BL[:, :1] - 1) != 0
    return index_BL - jax.lax.cummax(jnp.where(is_start_BL, index_BL, 0), axis=1)


def token_positions(batch: Batch) -> jax.Array:
    """Returns the position of each token in its document, int32 ``(B, L)``.

    Args:
        batch: With ``tokens`` ``(B, L)``. If it has ``token_positions`` they are those.
            Without ``documents`` a row is one document.
    """
    if "token_positions" in batch:
        return batch["token_positions"]
    if "documents" in batch:
        return positions_in_document(batch["documents"])
    return jax.lax.broadcasted_iota(jnp.int32, batch["tokens"].shape, 1)


def position_embedding(table: jax.Array, batch: Batch) -> jax.Array:
    """Returns the embedding of each token's position, ``(1 or B, L, D)``.

    Args:
        table: Shape ``(max_len, D)``.
        batch: See `token_positions`.
    """
    if "token_positions" in batch or "documents" in batch:
        return jnp.take(table, token_positions(batch), axis=0)
    return table[None, : batch["tokens"].shape[1]]
