"""Attention in blocks of queries and keys, in memory that grows with the length alone.

The softmax over the keys is taken block by block (arXiv:2205.14135): of each query its
highest score so far, the sum of the exponentials and the weighted sum of values are
kept. The backward pass computes the weights again, from the logarithm of that sum.

Each sample and head is by itself, so that all products are of two plain matrices: on
CPU these are several times faster than batched ones.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout

QUERY_BLOCK, KEY_BLOCK = 128, 256
_HIDDEN = -1e30  # score of a key that a query does not see
_LOWEST = -1e29  # highest score of a query that sees none; exp(_HIDDEN - it) is 0


@jax.custom_vjp
def attend_in_blocks(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None,
    dropout: WeightDropout | None,
) -> jax.Array:
    """Returns for each query the mean of the values, weighted by softmax of the scores.

    The function of `models.attention.attend`; but a query that sees no key gets 0.

    Args:
        q_BLHK: Queries.
        k_BTHK: Keys.
        v_BTHK: Values.
        mask: What is hidden; None for nothing.
        dropout: Of the weights; None for none.

    Returns:
        ``(B, L, H, K)`` in the dtype of the values; inside all is in float32.
    """
    return attention_forward(q_BLHK, k_BTHK, v_BTHK, mask, dropout)[0]


def attention_forward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None = None,
    dropout: WeightDropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns attention to the given keys, and how much weight they have in all.

    Results for several sets of keys can be put together by `merge`.

    Args:
        q_BLHK: Queries.
        k_BTHK: Keys.
        v_BTHK: Values.
        mask: Of these queries and keys; None hides nothing.
        dropout: Placed at these heads, queries and keys; None for none.

    Returns:
        Means ``(B, L, H, K)`` in the dtype of the values, and float32 ``(B, L, H)``, the
        logarithm of the sum of the exponentials of the scores, very low for a query
        that sees none of the keys, whose mean is 0.
    """
    blocks = _Blocks(q_BLHK.shape, k_BTHK.shape, mask, dropout)

    def run(q_LK: jax.Array, k_TK: jax.Array, v_TK: jax.Array, *sample: Any) -> Any:
        def of_query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _forward_block(blocks, i, q_LK, k_TK, v_TK, *sample)

        return jax.lax.map(of_query_block, jnp.arange(blocks.num_query_blocks))

    out_BHNIK, lse_BHNI = blocks.map_heads(
        run,
        queries=[q_BLHK * (1 / math.sqrt(q_BLHK.shape[-1]))],
        keys=[k_BTHK, v_BTHK],
    )
    out_BLHK = blocks.to_queries(out_BHNIK).astype(v_BTHK.dtype)
    return out_BLHK, blocks.to_queries(lse_BHNI[..., None])[..., 0]
