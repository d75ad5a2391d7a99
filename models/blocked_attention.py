"""Attention in blocks of queries and keys, in memory that grows with the length alone.

The softmax over the keys is taken block by block (arXiv:2205.14135): of each query its
highest score so far, the sum of the exponentials and the weighted sum of the values are
kept. The backward pass computes the weights again, from the logarithm of that sum.

All products are of two plain matrices, for some heads at a time (`models.head_blocks`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.head_blocks import LOWEST, TINY, Head, Heads, product
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout

# Over the keys seen so far, of each query: values times weights, ``(rows, K)``; the
# weights, ``(rows, 1)``; and the highest score, which weighs 1.
_Sums = tuple[jax.Array, jax.Array, jax.Array]

# Of the queries, ``(rows, K)``; of the keys and of the values, transposed, ``(K, T)``:
# products of that form are the faster ones on CPU.
_Gradients = tuple[jax.Array, jax.Array, jax.Array]


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

    def run(group: Sequence[Head]) -> list[tuple[jax.Array, jax.Array]]:
        def of_block(nothing: None, i: Index) -> tuple[None, list]:
            return nothing, _forward_block(heads, group, i)

        return heads.over_query_blocks(of_block, None)[1]

    out, lse = heads.run(run, [q_BLHK], [k_BTHK, v_BTHK])
    num_queries = q_BLHK.shape[1]
    return out[:, :num_queries].astype(v_BTHK.dtype), lse[:, :num_queries, :, 0]


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
    inner_BLH = (grad32_BLHK * out_BLHK).sum(-1)

    def run(group: Sequence[Head]) -> list[tuple[jax.Array, ...]]:
        grads = _gradients_of_group(heads, group)
        return [(grad_q, grad_k.T, grad_v.T) for grad_q, grad_k, grad_v in grads]

    of_queries = q_BLHK, grad32_BLHK, lse_BLH, inner_BLH
    grad_q, grad_k, grad_v = heads.run(run, of_queries, (k_BTHK, v_BTHK))
    num_queries, num_keys = q_BLHK.shape[1], k_BTHK.shape[1]
    return (
        grad_q[:, :num_queries].astype(q_BLHK.dtype),
        grad_k[:, :num_keys].astype(k_BTHK.dtype),
        grad_v[:, :num_keys].astype(v_BTHK.dtype),
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
    heads: Heads, group: Sequence[Head], i: Index
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the results of a block of queries, for each head.

    They are the means of the values ``(rows, K)`` and the logarithms of the sums of the
    weights ``(rows, 1)``.
    """

    def step(j: Index, so_far: list[_Sums]) -> list[_Sums]:
        found = [_weighted(head, i, j) for head in group]
        return [_add(*sums) for sums in zip(group, so_far, found, strict=True)]

    if heads.num_key_blocks == 1:
        found = [_weighted(head, i, 0) for head in group]
    else:
        found = heads.over_key_blocks(i, step, [_no_sums(head, i) for head in group])
    results = []
    for head, (values, total, highest) in zip(group, found, strict=True):
        total = jnp.maximum(total, TINY)
        results.append((values / total, highest * head.scale + jnp.log(total)))
    return results


def _weighted(head: Head, i: Index, j: Index) -> _Sums:
    """Returns the sums over one block of keys."""
    (q,), (k, v) = head.queries(i), head.keys(j)
    scores = head.scores(q, k, i, j)
    highest = jnp.maximum(scores.max(1, keepdims=True), LOWEST)
    weights = jnp.exp((scores - highest) * head.scale)
    values = product(head.drop(weights, i, j), v, 1, 0)
    return values, weights.sum(1, keepdims=True), highest


def _no_sums(head: Head, i: Index) -> _Sums:
    """Returns the sums over no keys."""
    values = jnp.zeros_like(head.queries(i)[0])
    return values, values[:, :1], jnp.full_like(values[:, :1], LOWEST)


def _add(head: Head, first: _Sums, second: _Sums) -> _Sums:
    """Returns the sums over the keys of both."""
    highest = jnp.maximum(first[2], second[2])
    shares = [jnp.exp((x[2] - highest) * head.scale) for x in (first, second)]
    values, total = (
        a * shares[0] + b * shares[1]
        for a, b in zip(first[:2], second[:2], strict=True)
    )
    return values, total, highest


def _gradients_of_group(heads: Heads, group: Sequence[Head]) -> list[_Gradients]:
    """Returns the gradients of some heads.

    Args:
        heads: All heads.
        group: Those at hand. Of their queries they hold the queries themselves, the
            gradients of the means, the logarithms of the sums of weights, and the
            products of gradients and means.
    """
    if heads.num_query_blocks == heads.num_key_blocks == 1:
        return [_gradients(head, 0, 0) for head in group]

    def of_block(sums: list, i: Index) -> tuple[list, list]:
        def step(j: Index, so_far: list[_Gradients]) -> list[_Gradients]:
            found = [_gradients(head, i, j) for head in group]
            return [_add_gradients(*x, j) for x in zip(so_far, found, strict=True)]

        no_grads = [jnp.zeros_like(head.queries(i)[0]) for head in group]
        start = [
            (grad_q, *of_keys) for grad_q, of_keys in zip(no_grads, sums, strict=True)
        ]
        found = heads.over_key_blocks(i, step, start)
        return [of_keys for _, *of_keys in found], [grad_q for grad_q, *_ in found]

    start = [[jnp.zeros_like(x.T) for x in head.of_keys] for head in group]
    sums, grads_q = heads.over_query_blocks(of_block, start)
    return [(grad_q, *of_keys) for grad_q, of_keys in zip(grads_q, sums, strict=True)]


def _gradients(head: Head, i: Index, j: Index) -> _Gradients:
    """Returns the terms of two blocks, of the queries and of the keys of these."""
    (q, grad, lse, inner), (k, v) = head.queries(i), head.keys(j)
    weights = jnp.exp(head.scores(q, k, i, j) * head.scale - lse)
    grad_weights = head.drop(product(grad, v, 1, 1), i, j)
    grad_scores = weights * (grad_weights - inner) * head.scale
    return (
        product(grad_scores, k, 1, 0),
        product(q.T, grad_scores, 1, 0),
        product(grad.T, head.drop(weights, i, j), 1, 0),
    )


def _add_gradients(so_far: _Gradients, found: _Gradients, j: Index) -> _Gradients:
    """Returns the sums, where the block of keys is the j-th of those so far."""

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        start, size = j * part.shape[1], part.shape[1]
        part += jax.lax.dynamic_slice_in_dim(total, start, size, 1)
        return jax.lax.dynamic_update_slice_in_dim(total, part, start, 1)

    (grad_q, *of_keys), (more_q, *more) = so_far, found
    grad_k, grad_v = map(add, of_keys, more)
    return grad_q + more_q, grad_k, grad_v
