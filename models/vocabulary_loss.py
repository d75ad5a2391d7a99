"""Cross entropy over a vocabulary, without ever holding the scores of all predictions.

Predictions are dealt with a chunk at a time: scored, their losses added up, and, where
gradients are wanted, taken back through the scores at once. What remains of a chunk are
two sums, the gradients of its activations and its part of those of the table, so that
no score is computed twice. This needs the weights of the predictions beforehand.

The rows of the table may be spread over devices, each of which then scores its own
tokens; `Rows` says how.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

COLUMNS = 256  # of the gradient of a table that are computed at a time, at most


class Rows(Protocol):
    """Where the rows of a table are, some of which are at hand. Hashable."""

    def first_token(self, num_rows: int) -> int | jax.Array:
        """Returns the token of the first of the ``num_rows`` rows at hand."""
        ...

    def psum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all who hold rows."""
        ...

    def pmax(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over all who hold rows."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class AllRows:
    """All rows of the table are at hand."""

    def first_token(self, num_rows: int) -> int:
        """Returns 0."""
        return 0

    def psum(self, x: jax.Array) -> jax.Array:
        """Returns ``x``."""
        return x

    def pmax(self, x: jax.Array) -> jax.Array:
        """Returns ``x``."""
        return x


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How predictions are scored.

    Attributes:
        size: Tokens of the whole vocabulary; a row past them is padding.
        rows: Where the rows of the table are.
        chunk_size: Most predictions at a time; None for all.
    """

    size: int
    rows: Rows = AllRows()
    chunk_size: int | None = None

    def logits(
        self, table_VD: jax.Array, bias_V: jax.Array | None, h_TD: jax.Array
    ) -> jax.Array:
        """Returns the scores of the tokens at hand, float32 ``(..., V)``.

        Args:
            table_VD: Their rows.
            bias_V: Their biases; None for none.
            h_TD: What to score, ``(..., D)``; its dtype is that of the products.

        Returns:
            The lowest float on padding.
        """
        scores_TV = jnp.einsum(
            "...d,vd->...v",
            h_TD,
            table_VD.astype(h_TD.dtype),
            preferred_element_type=jnp.float32,
        )
        leading = (1,) * (scores_TV.ndim - 1)
        if bias_V is not None:
            scores_TV += bias_V.astype(jnp.float32).reshape(*leading, -1)
        num_rows = table_VD.shape[0]
        is_token_V = self.rows.first_token(num_rows) + jnp.arange(num_rows) < self.size
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(is_token_V.reshape(*leading, -1), scores_TV, lowest)


def sum_cross_entropy(
    scoring: Scoring,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    h_BND: jax.Array,
    targets_BN: jax.Array,
    weights_BN: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sums of the losses and of the correct predictions.

    Those of `models.losses.cross_entropy` of the logits. Gradients are those of the
    first, with respect to table, biases and activations.

    Args:
        scoring: How to score.
        table_VD: The rows at hand.
        bias_V: Their biases; None for none.
        h_BND: What to score; its dtype is that of the products.
        targets_BN: The right tokens.
        weights_BN: Of each prediction, float32.

    Communication: that of ``scoring.rows``, of three numbers per prediction.

    Example:
        >>> table_VD, h_BND = jnp.zeros((4, 2)), jnp.ones((1, 3, 2))
        >>> targets_BN, weights_BN = jnp.zeros((1, 3), int), jnp.array([[1.0, 1, 0]])
        >>> scoring = Scoring(size=4, chunk_size=2)
        >>> total = sum_cross_entropy(
        ...     scoring, table_VD, None, h_BND, targets_BN, weights_BN
        ... )
        >>> [round(float(x), 4) for x in total]
        [2.7726, 2.0]
    """
    num = targets_BN.size
    num_chunks = -(-num // (scoring.chunk_size or max(num, 1)))

    def cut(x: jax.Array) -> jax.Array:
        rows = x.reshape(num, *x.shape[2:])
        more = -num % num_chunks
        rows = jnp.pad(rows, ((0, more), *((0, 0),) * (rows.ndim - 1)))
        return rows.reshape(num_chunks, -1, *rows.shape[1:])

    weights_BN = jax.lax.stop_gradient(weights_BN.astype(jnp.float32))
    chunks = map(cut, (h_BND, targets_BN, weights_BN))
    return _sums(scoring, table_VD, bias_V, *chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    scoring: Scoring, table_VD: jax.Array, bias_V: jax.Array | None, *chunks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the two sums over chunks ``(chunks, C, ...)``."""

    def step(_: None, chunk: tuple) -> tuple[None, tuple]:
        return None, _of_chunk(scoring, table_VD, bias_V, *chunk).sums

    losses, corrects = jax.lax.scan(step, None, chunks)[1]
    return losses.sum(), corrects.sum()


def _forward(
    scoring: Scoring, table_VD: jax.Array, bias_V: jax.Array | None, *chunks: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    """Returns the sums and their gradients."""

    def step(totals: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        h_CD, _, weights_C = chunk
        found = _of_chunk(scoring, table_VD, bias_V, *chunk)
        grad_CV = found.score_gradients * weights_C[:, None]
        grad_bias_V = grad_CV.sum(0)
        grad_CV = grad_CV.astype(h_CD.dtype)
        grad_h_CD = grad_CV @ table_VD.astype(h_CD.dtype)
        totals = (
            _add_product(totals[0], grad_CV, h_CD),
            totals[1] + grad_bias_V,
        )
        return totals, (*found.sums, grad_h_CD)

    start_V = jnp.zeros_like(table_VD[:, 0], jnp.float32)
    start = jnp.zeros_like(table_VD, jnp.float32), start_V
    (grad_table, grad_bias), found = jax.lax.scan(step, start, chunks)
    losses, corrects, grad_h = found
    grad_table = grad_table.astype(table_VD.dtype)
    grads_of_bias = None if bias_V is None else grad_bias.astype(bias_V.dtype)
    return (losses.sum(), corrects.sum()), (grad_table, grads_of_bias, grad_h)


def _backward(scoring: Scoring, gradients: tuple, cotangents: tuple) -> tuple:
    scale, _ = cotangents
    scaled = jax.tree.map(lambda x: x * scale.astype(x.dtype), gradients)
    return *scaled, None, None


_sums.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Some predictions, scored.

    Attributes:
        shifted: Scores ``(C, V)`` of the tokens at hand, less the highest of all.
        total: Sum ``(C,)`` of their exponentials, over all tokens.
        is_target: Whether a token is the right one, ``(C, V)``.
        target: Shifted score of the right one, ``(C,)``.
        weights: Of each prediction, ``(C,)``.
    """

    shifted: jax.Array
    total: jax.Array
    is_target: jax.Array
    target: jax.Array
    weights: jax.Array

    @property
    def sums(self) -> tuple[jax.Array, jax.Array]:
        """Weighted sums of the losses and of the correct predictions."""
        losses_C = jnp.log(self.total) - self.target
        is_correct_C = (self.target >= 0).astype(jnp.float32)
        return (losses_C * self.weights).sum(), (is_correct_C * self.weights).sum()

    @property
    def score_gradients(self) -> jax.Array:
        """Gradients of each loss with respect to its scores, ``(C, V)``."""
        probs_CV = jnp.exp(self.shifted) / self.total[:, None]
        return probs_CV - self.is_target


def _of_chunk(
    scoring: Scoring,
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    h_CD: jax.Array,
    targets_C: jax.Array,
    weights_C: jax.Array,
) -> _Chunk:
    rows = scoring.rows
    scores_CV = scoring.logits(table_VD, bias_V, h_CD)
    shifted_CV = scores_CV - rows.pmax(scores_CV.max(-1))[:, None]
    tokens_V = rows.first_token(table_VD.shape[0]) + jnp.arange(table_VD.shape[0])
    is_target_CV = tokens_V[None] == targets_C[:, None]
    own_C = jnp.exp(shifted_CV).sum(-1), jnp.where(is_target_CV, shifted_CV, 0).sum(-1)
    # One sum for both, in an operation that has a rule for every signature.
    total_C, target_C = rows.psum(jnp.concatenate([x[None] for x in own_C]))
    return _Chunk(
        shifted=shifted_CV,
        total=total_C,
        is_target=is_target_CV,
        target=target_C,
        weights=weights_C,
    )


def _add_product(total_VD: jax.Array, a_CV: jax.Array, b_CD: jax.Array) -> jax.Array:
    """Adds the product of two matrices, some columns at a time to save memory."""
    size = _columns_at_a_time(b_CD.shape[1])

    def add(block: jax.Array, total_VD: jax.Array) -> jax.Array:
        first = block * size
        part = jnp.einsum(
            "cv,cd->vd",
            a_CV,
            jax.lax.dynamic_slice_in_dim(b_CD, first, size, 1),
            preferred_element_type=jnp.float32,
        )
        part += jax.lax.dynamic_slice_in_dim(total_VD, first, size, 1)
        return jax.lax.dynamic_update_slice_in_dim(total_VD, part, first, 1)

    return jax.lax.fori_loop(0, b_CD.shape[1] // size, add, total_VD)


def _columns_at_a_time(num_columns: int) -> int:
    """Returns the largest divisor up to `COLUMNS`; all columns if that is small."""
    sizes = (n for n in range(COLUMNS, COLUMNS // 4, -1) if num_columns % n == 0)
    return next(sizes, num_columns)
