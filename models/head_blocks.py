"""Attention as many small problems: heads of samples, each cut into blocks.

A head's queries, keys and values are matrices, filled up to whole blocks. Some heads,
of one sample or several, are dealt with side by side, each by operations of its own:
XLA runs those at the same time on several cores of a CPU, although each is small.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.layers import round_up
from models.masks import AttentionMask, Index
from models.weight_dropout import WeightDropout

BLOCK = 512  # queries, or keys, at most
GROUP = 12  # heads at most that are dealt with side by side
GROUP_SCORES = 2**20  # of two blocks, in a group of several heads; 4 MB
HIDDEN = -1e30  # score of a key that a query does not see
LOWEST = -1e29  # highest score of a query that sees no key: exp(HIDDEN - it) is 0
TINY = 1e-37  # for the sum of no weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One head of one sample, cut into blocks.

    Attributes:
        of_queries: Float32 matrices with a row per query.
        of_keys: Float32 matrices with a row per key.
        scale: What the products of queries and keys are multiplied by.
        query_block: Queries of a block.
        key_block: Keys of a block.
        mask: Of the sample.
        keep: ``keep(first_query, first_key, shape)``: which weights are not dropped;
            None if all are kept.
        rate: Share that is dropped.
    """

    of_queries: Sequence[jax.Array]
    of_keys: Sequence[jax.Array]
    scale: float
    query_block: int
    key_block: int
    mask: AttentionMask
    keep: Callable[[Index, Index, tuple], jax.Array] | None
    rate: float

    def queries(self, block: Index) -> list[jax.Array]:
        """Returns the rows of a block of queries, of each matrix."""
        return [_rows(x, block, self.query_block) for x in self.of_queries]

    def keys(self, block: Index) -> list[jax.Array]:
        """Returns the rows of a block of keys, of each matrix."""
        return [_rows(x, block, self.key_block) for x in self.of_keys]

    def scores(self, q: jax.Array, k: jax.Array, i: Index, j: Index) -> jax.Array:
        """Returns the products of a block of queries and one of keys, or `HIDDEN`."""
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
    """All heads of all samples.

    Attributes:
        num_samples: B.
        num_queries: L.
        num_keys: T.
        num_heads: H.
        mask: Of whole blocks.
        dropout: Or None.
    """

    num_samples: int
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
            num_samples=num_samples,
            num_queries=num_queries,
            num_keys=num_keys,
            num_heads=num_heads,
            mask=mask,
            dropout=dropout,
        )
        more_keys = heads.num_key_blocks * heads.key_block - num_keys
        if more_keys and mask.is_key is None:
            everywhere = jnp.ones((num_samples, num_keys), bool)
            mask = dataclasses.replace(mask, is_key=everywhere)
        more_queries = heads.num_query_blocks * heads.query_block - num_queries
        return dataclasses.replace(heads, mask=mask.pad(more_queries, more_keys))

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
    def num_key_blocks(self) -> int:
        """Blocks of keys of a head."""
        return -(-self.num_keys // self.key_block)

    @property
    def group(self) -> int:
        """Heads that are dealt with side by side."""
        fitting = GROUP_SCORES // (self.query_block * self.key_block)
        number = self.num_samples * self.num_heads
        num_groups = -(-number // min(max(fitting, 1), GROUP))
        return -(-number // num_groups)

    def run(
        self,
        of_group: Callable[[Sequence[Head]], Sequence[Any]],
        of_queries: Sequence[jax.Array],
        of_keys: Sequence[jax.Array],
    ) -> Any:
        """Returns what ``of_group`` finds for the heads that it is given, put together.

        Args:
            of_group: Returns for each head the same number of matrices, with a row per
                query or key.
            of_queries: Arrays ``(B, L, H, ...)``, of which each head gets a matrix.
            of_keys: Arrays ``(B, T, H, ...)``.

        Returns:
            Arrays ``(B, rows, H, columns)``, where the rows make whole blocks.
        """
        queries = [_fill(x, self.query_block) for x in of_queries]
        keys = [_fill(x, self.key_block) for x in of_keys]
        number = self.num_samples * self.num_heads

        def run(item: jax.Array) -> Any:
            # A last group that is not full does the last head again.
            first, last = item * self.group, number - 1
            numbers = [jnp.minimum(first + i, last) for i in range(self.group)]
            return of_group([self._head(i, queries, keys) for i in numbers])

        def join(*of_heads: jax.Array) -> jax.Array:
            found = jnp.stack(of_heads, 1)
            found = found.reshape(-1, *found.shape[2:])[:number]
            found = found.reshape(self.num_samples, -1, *found.shape[1:])
            return jnp.moveaxis(found, 1, 2)

        groups = jnp.arange(-(-number // self.group))
        return jax.tree.map(join, *jax.lax.map(run, groups))

    def over_query_blocks(self, step: Callable, start: Any) -> tuple[Any, Any]:
        """Runs ``carry, rows = step(carry, block)`` over all blocks of queries.

        Args:
            step: What to do with a block.
            start: First ``carry``.

        Returns:
            The last ``carry``; and the rows of all blocks, one below the other.
        """
        if self.num_query_blocks == 1:
            return step(start, 0)
        carry, rows = jax.lax.scan(step, start, jnp.arange(self.num_query_blocks))
        return carry, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), rows)

    def over_key_blocks(self, block: Index, step: Callable, start: Any) -> Any:
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

    def _head(
        self,
        number: jax.Array,
        of_queries: Sequence[jax.Array],
        of_keys: Sequence[jax.Array],
    ) -> Head:
        """Returns one head.

        Args:
            number: Which of all.
            of_queries: Of all heads, filled up.
            of_keys: Of all heads, filled up.
        """
        sample, index = number // self.num_heads, number % self.num_heads
        dropout = self.dropout
        mask = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, sample, keepdims=False),
            dataclasses.replace(self.mask, shift=None),
        )
        keep = dropout.of_head(dropout.words[sample], index) if dropout else None
        return Head(
            of_queries=[_matrix(x, sample, index) for x in of_queries],
            of_keys=[_matrix(x, sample, index) for x in of_keys],
            scale=score_scale(of_queries[0]),
            query_block=self.query_block,
            key_block=self.key_block,
            mask=dataclasses.replace(mask, shift=self.mask.shift),
            keep=keep,
            rate=dropout.rate if dropout else 0.0,
        )


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


def _fill(x: jax.Array, block: int) -> jax.Array:
    """Returns ``(B, L, ...)`` with zeros behind, so that L is a multiple of a block."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))


def _matrix(x: jax.Array, sample: jax.Array, head: jax.Array) -> jax.Array:
    """Returns one head of ``(B, L, H, ...)``, float32 ``(L, columns)``."""
    first: list[Any] = [sample, 0, head, *[0] * (x.ndim - 3)]
    found = jax.lax.dynamic_slice(x, first, (1, x.shape[1], 1, *x.shape[3:]))
    return found.reshape(x.shape[1], -1).astype(jnp.float32)


def _rows(x: jax.Array, block: Index, size: int) -> jax.Array:
    if x.shape[0] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, block * size, size)
