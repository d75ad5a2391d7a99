"""Attention as many small problems: heads of samples, each cut into blocks.

A head's queries, keys and values are matrices, filled up to whole blocks.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.layers import round_up
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout

BLOCK = 128  # queries, or keys, at most; the fastest on CPU
HIDDEN = -1e30  # score of a key that a query does not see
LOWEST = -1e29  # highest score of a query that sees no key: exp(HIDDEN - it) is 0
TINY = 1e-37  # for the sum of no weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
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
        scores = product(q, k, 1, 1)
        return scores if visible is None else jnp.where(visible, scores, HIDDEN)

    def drop(self, weights: jax.Array, i: Index, j: Index) -> jax.Array:
        """Returns the weights of two blocks, some dropped and the rest scaled up."""
        if self.keep is None:
            return weights
        firsts = i * self.query_block, j * self.key_block
        return jnp.where(
            self.keep(*firsts, weights.shape), weights / (1 - self.rate), 0
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
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
    ) -> "Heads":
        """Returns the heads of queries ``(B, L, H, K)`` and keys ``(B, T, H, K)``."""
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
        """Queries of a block."""
        return _block_size(self.num_queries)

    @property
    def key_block(self) -> int:
        """Keys of a block."""
        return _block_size(self.num_keys)

    @property
    def num_query_blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.num_queries // self.query_block)

    @property
    def _more_queries(self) -> int:
        return -self.num_queries % self.query_block

    @property
    def _more_keys(self) -> int:
        return -self.num_keys % self.key_block

    def from_queries(self, x_BLHK: jax.Array) -> jax.Array:
        """Returns float32 matrices with a row per query."""
        return _to_matrices(x_BLHK, self._more_queries)

    def from_keys(self, x_BTHK: jax.Array) -> jax.Array:
        """Returns float32 matrices with a row per key."""
        return _to_matrices(x_BTHK, self._more_keys)

    def to_queries(self, blocks_BHIRK: jax.Array) -> jax.Array:
        """Returns ``(B, L, H, K)`` of matrices, stacked block by block."""
        x_BHLK = blocks_BHIRK.reshape(
            *blocks_BHIRK.shape[:2], -1, blocks_BHIRK.shape[-1]
        )
        return x_BHLK[:, :, : self.num_queries].swapaxes(1, 2)

    def to_keys(self, x_BHTK: jax.Array) -> jax.Array:
        """Returns ``(B, T, H, K)`` of matrices."""
        return x_BHTK[:, :, : self.num_keys].swapaxes(1, 2)

    def run(self, of_head: Callable[[Head, tuple], Any], matrices: tuple) -> Any:
        """Returns ``of_head(head, its matrices)`` of all heads, stacked."""
        shift, dropout = self.mask.shift, self.dropout
        mask = dataclasses.replace(self.mask, shift=None)

        def of_sample(sample: tuple) -> Any:
            matrices, mask, words = sample
            mask = dataclasses.replace(mask, shift=shift)

            def run(item: tuple) -> Any:
                matrices, index = item
                keep = dropout.of_head(words, index) if dropout else None
                head = Head(
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


def score_scale(q_BLHK: jax.Array) -> float:
    """Returns what the products of queries and keys are multiplied by."""
    return 1 / math.sqrt(q_BLHK.shape[-1])


def product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Returns the product of matrices, summed over these dims."""
    return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())))


def _block_size(length: int) -> int:
    """Returns the size of equal blocks that leave little to fill up."""
    num_blocks = -(-length // BLOCK)
    return round_up(-(-length // num_blocks), 8)


def _to_matrices(x_BLHK: jax.Array, more: int) -> jax.Array:
    x_BHLK = x_BLHK.swapaxes(1, 2).astype(jnp.float32)
    return jnp.pad(x_BHLK, ((0, 0), (0, 0), (0, more), (0, 0)))


def _rows(x: jax.Array, block: Index, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, block * size, size)
