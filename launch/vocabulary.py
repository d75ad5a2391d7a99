"""A vocabulary whose rows are spread over the stages of a pipeline.

Every stage looks up and scores its own tokens, so that the work, the parameters and the
optimizer state of embedding and output layer are shared by all stages. In training no
stage ever sees more than its part of the logits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.vocabulary import Vocabulary
from models.vocabulary_loss import sum_cross_entropy
from sbp.pipeline.region import ManualRegion


class StageVocabulary(nnx.Module):
    """One stage's rows of a `Vocabulary`, with the same methods.

    To be used inside ``region``, by all stages at once and for the same tokens. The
    results are those of the whole vocabulary, on every stage.
    """

    def __init__(self, part: Vocabulary, region: ManualRegion):
        self.embedding = part.embedding
        self.scoring = dataclasses.replace(part.scoring, rows=RowsOfStages(region))
        self.dtype = part.dtype
        self.region = region

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Looks the tokens up: ``(B, L)`` to ``(B, L, D)``.

        Communication: one all-reduce of the result over ``stage``.
        """
        rows_BL = tokens_BL - self._first_token()
        num_rows = self.embedding.shape[0]
        is_own_BL = (rows_BL >= 0) & (rows_BL < num_rows)
        rows_BL = jnp.clip(rows_BL, 0, num_rows - 1)
        # Cast afterwards, for the gradients of frequent tokens to be summed in float32.
        own_BLD = jnp.take(self.embedding[...], rows_BL, axis=0).astype(self.dtype)
        own_BLD = jnp.where(is_own_BL[..., None], own_BLD, 0)
        return self.region.psum(own_BLD, "stage")

    def logits(self, h_BND: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
        """Scores every token: ``(B, N, D)`` to float32 ``(B, N, V)``.

        Communication: an all-gather of the result over ``stage``.
        """
        h_BND = h_BND.astype(self.dtype)
        own_BNV = self.scoring.logits(self.embedding[...], bias_V, h_BND)
        return self.region.all_gather(own_BNV, "stage", dim=2)

    def cross_entropy(
        self,
        h_BND: jax.Array,
        bias_V: jax.Array | None,
        targets_BN: jax.Array,
        weights_BN: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of `Vocabulary.cross_entropy`, of the whole vocabulary.

        Communication: all-reduces over ``stage`` of three numbers per prediction.
        """
        # Of this stage, and so are their gradients: sums of them come later.
        arguments = self.embedding[...], bias_V, h_BND.astype(self.dtype)
        table_VD, bias_V, h_BND = self.region.varying(arguments)
        return sum_cross_entropy(
            self.scoring, table_VD, bias_V, h_BND, targets_BN, weights_BN
        )

    def _first_token(self) -> int | jax.Array:
        return self.scoring.rows.first_token(self.embedding.shape[0])


@dataclasses.dataclass(frozen=True, slots=True)
class RowsOfStages:
    """The rows of a table, spread over the stages in their order."""

    region: ManualRegion

    def first_token(self, num_rows: int) -> jax.Array:
        """Returns the token of this stage's first row."""
        return self.region.index("stage") * num_rows

    def psum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the stages."""
        return self.region.psum(x, "stage")

    def pmax(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the stages."""
        return self.region.pmax(x, "stage")


def over_stages(region: ManualRegion) -> Callable[[Any], None]:
    """Returns a function that replaces every `Vocabulary` in a model by one stage's."""

    def adapt(model: nnx.Module) -> None:
        holders = [module for _, module in nnx.iter_modules(model)]
        for holder in holders:
            for name, child in vars(holder).items():
                if isinstance(child, Vocabulary):
                    setattr(holder, name, StageVocabulary(child, region))

    return adapt
