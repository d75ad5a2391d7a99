"""Attention in blocks of queries and keys, in memory that grows with the length alone.

The softmax over the keys is taken block by block (arXiv:2205.14135): of each query its
highest score so far, the sum of the exponentials and the weighted sum of the values are
kept. The backward pass computes the weights again, from the logarithm of that sum.

Samples and heads are dealt with one after the other, so that all products are of two
plain matrices: on CPU these are several times faster than batched ones.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.head_blocks import LOWEST, TINY, Head, Heads, product, score_scale
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout


@jax.custom_vjp
def attend_in_blocks(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None,
    dropout: WeightDropout | None,
) -> jax.Array:
    """Returns the first result of `attention_forward`, with its own backward pass.

    What is kept for that are the arguments, the result and one number per query and
    head; the names of the latter two are ``attention_values`` and ``attention_lse``.
    """
    return attention_forward(q_BLHK, k_BTHK, v_BTHK, mask, dropout)[0]


def attention_forward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None = None,
    dropout: WeightDropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the means of the values, and how much weight the keys have in all.

    Results for several sets of keys can be put together by `merge`.

    Args:
        q_BLHK: Queries.
        k_BTHK: Keys.
        v_BTHK: Values.
        mask: Of these queries and keys; None hides nothing.
        dropout: Of the weights, at the place of these; None drops none.

    Returns:
        ``(B, L, H, K)`` in the dtype of the values, 0 for a query that sees no key; and
        float32 ``(B, L, H)``, the logarithm of the sum of the exponentials of the
        scores. Inside all is in float32.
    """
    heads = Heads.of(q_BLHK, k_BTHK, mask, dropout)

    def run(head: Head, matrices: tuple) -> tuple[jax.Array, jax.Array]:
        q_LK, k_TK, v_TK = matrices

        def of_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _forward_block(head, block, q_LK, k_TK, v_TK)

        return jax.lax.map(of_block, jnp.arange(heads.num_query_blocks))

    queries = heads.from_queries(q_BLHK) * score_scale(q_BLHK)
    out, lse = heads.run(run, (queries, *map(heads.from_keys, (k_BTHK, v_BTHK))))
    return heads.to_queries(out).astype(v_BTHK.dtype), heads.to_queries(lse)[..., 0]


def attention_backward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None,
    dropout: WeightDropout | None,
    *,
    out_BLHK: jax.Array,
    lse_BLH: jax.Array,
    grad_BLHK: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values.

    If the keys are some of those that the queries see, the gradient of the queries is a
    term of a sum over all such sets of keys.

    Args:
        q_BLHK: See `attention_forward`.
        k_BTHK: See `attention_forward`.
        v_BTHK: See `attention_forward`.
        mask: See `attention_forward`.
        dropout: See `attention_forward`.
        out_BLHK: Result of the forward pass, over all keys.
        lse_BLH: Its second result, over all keys.
        grad_BLHK: Gradient of the result.
    """
    heads = Heads.of(q_BLHK, k_BTHK, mask, dropout)
    grad32_BLHK = grad_BLHK.astype(jnp.float32)
    inner_BLH1 = (grad32_BLHK * out_BLHK).sum(-1, keepdims=True)

    def run(head: Head, matrices: tuple) -> Any:
        *of_queries, k_TK, v_TK = matrices

        def of_block(sums: tuple, block: jax.Array) -> tuple[tuple, jax.Array]:
            return _backward_block(head, block, *of_queries, k_TK, v_TK, *sums)

        start = jnp.zeros_like(k_TK.T), jnp.zeros_like(v_TK.T)
        return jax.lax.scan(of_block, start, jnp.arange(heads.num_query_blocks))

    queries = heads.from_queries(q_BLHK) * score_scale(q_BLHK)
    others = grad32_BLHK, lse_BLH[..., None], inner_BLH1
    keys = map(heads.from_keys, (k_BTHK, v_BTHK))
    (grad_k, grad_v), grad_q = heads.run(
        run, (queries, *map(heads.from_queries, others), *keys)
    )
    return (
        (heads.to_queries(grad_q) * score_scale(q_BLHK)).astype(q_BLHK.dtype),
        heads.to_keys(grad_k.swapaxes(2, 3)).astype(k_BTHK.dtype),
        heads.to_keys(grad_v.swapaxes(2, 3)).astype(v_BTHK.dtype),
    )


def merge(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Puts together what `attention_forward` returns for two sets of keys.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 8))
        >>> first = attention_forward(q, k[:, :1], v[:, :1])
        >>> merged = merge(first, attention_forward(q, k[:, 1:], v[:, 1:]))
        >>> whole = attention_forward(q, k, v)
        >>> bool(jnp.allclose(whole[0], merged[0], atol=1e-6))
        True
    """
    (first_BLHK, first_BLH), (second_BLHK, second_BLH) = first, second
    lse_BLH = jnp.logaddexp(first_BLH, second_BLH)
    shares = [jnp.exp(x - lse_BLH)[..., None] for x in (first_BLH, second_BLH)]
    out_BLHK = first_BLHK * shares[0] + second_BLHK * shares[1]
    return out_BLHK.astype(first_BLHK.dtype), lse_BLH


def _forward(*arguments: Any) -> tuple[jax.Array, tuple]:
    out_BLHK, lse_BLH = attention_forward(*arguments)
    out_BLHK = checkpoint_name(out_BLHK, "attention_values")
    lse_BLH = checkpoint_name(lse_BLH, "attention_lse")
    return out_BLHK, (arguments, out_BLHK, lse_BLH)


def _backward(residuals: tuple, grad_BLHK: jax.Array) -> tuple:
    arguments, out_BLHK, lse_BLH = residuals
    grads = attention_backward(
        *arguments, out_BLHK=out_BLHK, lse_BLH=lse_BLH, grad_BLHK=grad_BLHK
    )
    return *grads, None, None


attend_in_blocks.defvjp(_forward, _backward)


def _forward_block(
    head: Head, i: Index, q_LK: jax.Array, k_TK: jax.Array, v_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns means of values ``(rows, K)`` and logarithms of sums ``(rows, 1)``."""
    q = head.queries(q_LK, i)

    def step(j: Index, carry: tuple) -> tuple:
        means, total, highest = carry
        scores = head.scores(q, head.keys(k_TK, j), i, j)
        now_highest = jnp.maximum(highest, scores.max(1, keepdims=True))
        weights = jnp.exp(scores - now_highest)
        shrink = jnp.exp(highest - now_highest)
        found = product(head.drop(weights, i, j), head.keys(v_TK, j), 1, 0)
        total = total * shrink + weights.sum(1, keepdims=True)
        return means * shrink + found, total, now_highest

    lowest = jnp.full_like(q[:, :1], LOWEST)
    start = jnp.zeros_like(q), jnp.zeros_like(lowest), lowest
    means, total, highest = head.over_keys(i, step, start)
    total = jnp.maximum(total, TINY)
    return means / total, highest + jnp.log(total)


def _backward_block(
    head: Head, i: Index, *matrices: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the sums of the gradients of keys and values, and that of the queries.

    The sums are transposed: products of that form are the faster ones on CPU.

    Args:
        head: Of which.
        i: Block of queries.
        matrices: Of the queries: themselves, gradients of the means, logarithms of the
            sums, products of gradients and means; keys, values, and the sums so far.
    """
    *of_queries, k_TK, v_TK, grad_k_KT, grad_v_KT = matrices
    q, grad, lse, inner = (head.queries(x, i) for x in of_queries)

    def step(j: Index, carry: tuple) -> tuple:
        grad_q, grad_k_KT, grad_v_KT = carry
        k, v = head.keys(k_TK, j), head.keys(v_TK, j)
        weights = jnp.exp(head.scores(q, k, i, j) - lse)
        grad_weights = head.drop(product(grad, v, 1, 1), i, j)
        grad_scores = weights * (grad_weights - inner)
        grad_v = product(grad, head.drop(weights, i, j), 0, 0)
        return (
            grad_q + product(grad_scores, k, 1, 0),
            _add_columns(grad_k_KT, product(q, grad_scores, 0, 0), j),
            _add_columns(grad_v_KT, grad_v, j),
        )

    start = jnp.zeros_like(q), grad_k_KT, grad_v_KT
    grad_q, *sums = head.over_keys(i, step, start)
    return tuple(sums), grad_q


def _add_columns(total: jax.Array, part: jax.Array, block: Index) -> jax.Array:
    start, size = block * part.shape[1], part.shape[1]
    part += jax.lax.dynamic_slice_in_dim(total, start, size, 1)
    return jax.lax.dynamic_update_slice_in_dim(total, part, start, 1)
