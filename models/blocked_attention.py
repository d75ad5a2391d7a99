"""Attention in blocks of queries and keys, in memory that grows with the length alone.

The softmax over the keys is taken block by block (arXiv:2205.14135): of each query its
highest score so far, the sum of the exponentials and the weighted sum of the values are
kept. The backward pass computes the weights again, from the logarithm of that sum.

Samples and heads are dealt with one after the other, so that all products are of two
plain matrices: on CPU these are several times faster than batched ones.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.layers import round_up
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout

QUERY_BLOCK, KEY_BLOCK = 128, 256  # at most; the fastest on CPU
_HIDDEN = -1e30  # score of a key that a query does not see
_LOWEST = -1e29  # highest score of a query that sees none: exp(_HIDDEN - it) is 0
_TINY = 1e-37  # for the sum of no weights


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
    heads = _Heads.of(q_BLHK, k_BTHK, mask, dropout)

    def run(head: _Head, matrices: tuple) -> tuple[jax.Array, jax.Array]:
        q_LK, k_TK, v_TK = matrices

        def of_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _forward_block(head, block, q_LK, k_TK, v_TK)

        return jax.lax.map(of_block, jnp.arange(heads.num_query_blocks))

    queries = heads.from_queries(q_BLHK * _scale(q_BLHK))
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
    heads = _Heads.of(q_BLHK, k_BTHK, mask, dropout)
    grad32_BLHK = grad_BLHK.astype(jnp.float32)
    inner_BLH1 = (grad32_BLHK * out_BLHK).sum(-1, keepdims=True)

    def run(head: _Head, matrices: tuple) -> Any:
        *of_queries, k_TK, v_TK = matrices

        def of_block(sums: tuple, block: jax.Array) -> tuple[tuple, jax.Array]:
            return _backward_block(head, block, *of_queries, k_TK, v_TK, *sums)

        start = jnp.zeros_like(k_TK), jnp.zeros_like(v_TK)
        return jax.lax.scan(of_block, start, jnp.arange(heads.num_query_blocks))

    of_queries = q_BLHK * _scale(q_BLHK), grad32_BLHK, lse_BLH[..., None], inner_BLH1
    of_keys = k_BTHK, v_BTHK
    (grad_k, grad_v), grad_q = heads.run(
        run,
        (*map(heads.from_queries, of_queries), *map(heads.from_keys, of_keys)),
    )
    return (
        (heads.to_queries(grad_q) * _scale(q_BLHK)).astype(q_BLHK.dtype),
        heads.to_keys(grad_k).astype(k_BTHK.dtype),
        heads.to_keys(grad_v).astype(v_BTHK.dtype),
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """One head of one sample, cut into blocks.

    Attributes:
        query_block: Queries of a block.
        key_block: Keys of a block.
        num_key_blocks: In all.
        mask: Of the sample.
        keep: ``keep(first_query, first_key, shape)``: which weights are not dropped;
            None if all are kept.
        rate: Share that is dropped.
    """

    query_block: int
    key_block: int
    num_key_blocks: int
    mask: AttentionMask
    keep: Callable[[Index, Index, tuple], jax.Array] | None
    rate: float

    def queries(self, x_LK: jax.Array, block: Index) -> jax.Array:
        """Returns the rows of a block of queries."""
        return _rows(x_LK, block, self.query_block)

    def keys(self, x_TK: jax.Array, block: Index) -> jax.Array:
        """Returns the rows of a block of keys."""
        return _rows(x_TK, block, self.key_block)

    def over_keys(self, block: Index, step: Callable, start: Any) -> Any:
        """Runs ``carry = step(key block, carry)`` over all that may be seen.

        Args:
            block: Of the queries that see.
            step: What to do with each block of keys.
            start: First ``carry``.
        """
        if not self.mask.is_causal:
            return jax.lax.fori_loop(0, self.num_key_blocks, step, start)
        num_seen = (block + 1) * self.query_block + self.mask.offset
        num_blocks = (num_seen + self.key_block - 1) // self.key_block
        num_blocks = jnp.clip(num_blocks, 0, self.num_key_blocks)
        return jax.lax.fori_loop(0, num_blocks, step, start)

    def scores(self, q: jax.Array, k: jax.Array, i: Index, j: Index) -> jax.Array:
        """Returns the scores of a block of queries and one of keys."""
        place = i * self.query_block, self.query_block
        mask = self.mask.block(*place, j * self.key_block, self.key_block)
        visible = mask.visible(self.query_block, self.key_block)
        scores = _product(q, k, 1, 1)
        return scores if visible is None else jnp.where(visible, scores, _HIDDEN)

    def drop(self, weights: jax.Array, i: Index, j: Index) -> jax.Array:
        """Returns the weights of two blocks, some dropped and the rest scaled up."""
        if self.keep is None:
            return weights
        firsts = i * self.query_block, j * self.key_block
        return jnp.where(
            self.keep(*firsts, weights.shape), weights / (1 - self.rate), 0
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """All heads of all samples; matrices are ``(B, H, rows, K)`` and filled up.

    Attributes:
        num_queries: Queries of each.
        num_keys: Keys of each.
        num_heads: Of a sample.
        mask: Of the filled-up matrices.
        dropout: Or None.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    mask: AttentionMask
    dropout: WeightDropout | None

    @classmethod
    def of(
        cls,
        q_BLHK: jax.Array,
        k_BTHK: jax.Array,
        mask: AttentionMask | None,
        dropout: WeightDropout | None,
    ) -> "_Heads":
        num_samples, num_queries, num_heads, _ = q_BLHK.shape
        num_keys, mask = k_BTHK.shape[1], mask or AttentionMask()
        heads = cls(
            num_queries=num_queries,
            num_keys=num_keys,
            num_heads=num_heads,
            mask=mask,
            dropout=dropout,
        )
        more_keys = heads._more_keys
        if more_keys and mask.is_key is None:
            everywhere = jnp.ones((num_samples, num_keys), bool)
            mask = dataclasses.replace(mask, is_key=everywhere)
        mask = mask.pad(heads._more_queries, more_keys)
        return dataclasses.replace(heads, mask=mask)

    @property
    def query_block(self) -> int:
        return _block_size(self.num_queries, QUERY_BLOCK)

    @property
    def key_block(self) -> int:
        return _block_size(self.num_keys, KEY_BLOCK)

    @property
    def num_query_blocks(self) -> int:
        return -(-self.num_queries // self.query_block)

    @property
    def _more_queries(self) -> int:
        return -self.num_queries % self.query_block

    @property
    def _more_keys(self) -> int:
        return -self.num_keys % self.key_block

    def from_queries(self, x_BLHK: jax.Array) -> jax.Array:
        return _to_matrices(x_BLHK, self._more_queries)

    def from_keys(self, x_BTHK: jax.Array) -> jax.Array:
        return _to_matrices(x_BTHK, self._more_keys)

    def to_queries(self, blocks_BHIRK: jax.Array) -> jax.Array:
        """Returns ``(B, L, H, K)`` of blocks of queries."""
        x_BHLK = blocks_BHIRK.reshape(
            *blocks_BHIRK.shape[:2], -1, blocks_BHIRK.shape[-1]
        )
        return x_BHLK[:, :, : self.num_queries].swapaxes(1, 2)

    def to_keys(self, x_BHTK: jax.Array) -> jax.Array:
        return x_BHTK[:, :, : self.num_keys].swapaxes(1, 2)

    def run(self, of_head: Callable[[_Head, tuple], Any], matrices: tuple) -> Any:
        """Returns ``of_head(head, its matrices)`` of all heads, stacked."""
        shift, dropout = self.mask.shift, self.dropout
        mask = dataclasses.replace(self.mask, shift=None)

        def of_sample(sample: tuple) -> Any:
            matrices, mask, words = sample
            mask = dataclasses.replace(mask, shift=shift)

            def run(item: tuple) -> Any:
                matrices, index = item
                keep = dropout.of_head(words, index) if dropout else None
                head = _Head(
                    query_block=self.query_block,
                    key_block=self.key_block,
                    num_key_blocks=-(-self.num_keys // self.key_block),
                    mask=mask,
                    keep=keep,
                    rate=dropout.rate if dropout else 0.0,
                )
                return of_head(head, matrices)

            return jax.lax.map(run, (matrices, jnp.arange(self.num_heads)))

        all_words = dropout.words if dropout else None
        return jax.lax.map(of_sample, (matrices, mask, all_words))


def _forward_block(
    head: _Head, i: Index, q_LK: jax.Array, k_TK: jax.Array, v_TK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns means of values ``(rows, K)`` and logarithms of sums ``(rows, 1)``."""
    q = head.queries(q_LK, i)

    def step(j: Index, carry: tuple) -> tuple:
        means, total, highest = carry
        scores = head.scores(q, head.keys(k_TK, j), i, j)
        now_highest = jnp.maximum(highest, scores.max(1, keepdims=True))
        weights = jnp.exp(scores - now_highest)
        shrink = jnp.exp(highest - now_highest)
        found = _product(head.drop(weights, i, j), head.keys(v_TK, j), 1, 0)
        total = total * shrink + weights.sum(1, keepdims=True)
        return means * shrink + found, total, now_highest

    lowest = jnp.full_like(q[:, :1], _LOWEST)
    start = jnp.zeros_like(q), jnp.zeros_like(lowest), lowest
    means, total, highest = head.over_keys(i, step, start)
    total = jnp.maximum(total, _TINY)
    return means / total, highest + jnp.log(total)


def _backward_block(
    head: _Head,
    i: Index,
    *matrices: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns the sums of the gradients of keys and values, and that of the queries.

    Args:
        head: Of which.
        i: Block of queries.
        matrices: Of the queries: themselves, gradients of the means, logarithms of the
            sums, products of gradients and means; keys, values, and the sums so far.
    """
    *of_queries, k_TK, v_TK, grad_k_TK, grad_v_TK = matrices
    q, grad, lse, inner = (head.queries(x, i) for x in of_queries)

    def step(j: Index, carry: tuple) -> tuple:
        grad_q, grad_k_TK, grad_v_TK = carry
        k, v = head.keys(k_TK, j), head.keys(v_TK, j)
        weights = jnp.exp(head.scores(q, k, i, j) - lse)
        grad_weights = head.drop(_product(grad, v, 1, 1), i, j)
        grad_scores = weights * (grad_weights - inner)
        grad_v = _product(head.drop(weights, i, j), grad, 0, 0)
        return (
            grad_q + _product(grad_scores, k, 1, 0),
            _add_rows(grad_k_TK, _product(grad_scores, q, 0, 0), j),
            _add_rows(grad_v_TK, grad_v, j),
        )

    start = jnp.zeros_like(q), grad_k_TK, grad_v_TK
    grad_q, *sums = head.over_keys(i, step, start)
    return tuple(sums), grad_q


def _block_size(length: int, largest: int) -> int:
    """Returns the size of equal blocks that leave little to fill up."""
    num_blocks = -(-length // largest)
    return round_up(-(-length // num_blocks), 8)


def _scale(q_BLHK: jax.Array) -> float:
    return 1 / math.sqrt(q_BLHK.shape[-1])


def _to_matrices(x_BLHK: jax.Array, more: int) -> jax.Array:
    x_BHLK = x_BLHK.swapaxes(1, 2).astype(jnp.float32)
    return jnp.pad(x_BHLK, ((0, 0), (0, 0), (0, more), (0, 0)))


def _rows(x: jax.Array, block: Index, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, block * size, size)


def _add_rows(total: jax.Array, part: jax.Array, block: Index) -> jax.Array:
    start, size = block * part.shape[0], part.shape[0]
    part += jax.lax.dynamic_slice_in_dim(total, start, size)
    return jax.lax.dynamic_update_slice_in_dim(total, part, start, 0)


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Returns the product of matrices, summed over these dims."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())))
