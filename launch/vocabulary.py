"""A vocabulary whose rows are spread over the stages of a pipeline.

Every stage looks up and scores its own tokens, so that the work, the parameters and the
optimizer state of embedding and output layer are shared by all stages. In training no
stage ever sees more than its part of the logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.vocabulary import Vocabulary, vocabulary_logits
from sbp.pipeline.region import ManualRegion


class StageVocabulary(nnx.Module):
    """One stage's rows of a `Vocabulary`, with the same methods.

    To be used inside ``region``, by all stages at once and for the same tokens. The
    results are those of the whole vocabulary, on every stage.
    """

    def __init__(self, part: Vocabulary, region: ManualRegion):
        self.embedding = part.embedding
        self.size = part.size
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

    def logits(self, h_BND: jax.Array, bias_V: jax.Array | None) -> jax.Array:
        """Scores every token: ``(B, N, D)`` to float32 ``(B, N, V)``.

        Communication: an all-gather of the result over ``stage``.
        """
        return self.region.all_gather(self._own_logits(h_BND, bias_V), "stage", dim=2)

    def cross_entropy(
        self, h_BND: jax.Array, bias_V: jax.Array | None, targets_BN: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `losses.cross_entropy` over the whole vocabulary, both ``(B, N)``.

        Communication: all-reduces over ``stage`` of three numbers per prediction.
        """
        logits_BNV = self._own_logits(h_BND, bias_V)
        highest_BN = jax.lax.stop_gradient(logits_BNV.max(-1))
        highest_BN = self.region.pmax(highest_BN, "stage")
        shifted_BNV = logits_BNV - highest_BN[..., None]
        tokens_V = self._first_token() + jnp.arange(logits_BNV.shape[-1])
        is_target_BNV = tokens_V[None, None] == targets_BN[..., None]
        own = jnp.stack(
            [
                jnp.exp(shifted_BNV).sum(-1),
                jnp.where(is_target_BNV, shifted_BNV, 0.0).sum(-1),
            ]
        )
        total_BN, target_BN = self.region.psum(own, "stage")
        is_correct_BN = jax.lax.stop_gradient(target_BN >= 0)
        return jnp.log(total_BN) - target_BN, is_correct_BN.astype(jnp.float32)

    def _own_logits(self, h_BND: jax.Array, bias_V: jax.Array | None) -> jax.Array:
        return vocabulary_logits(
            self.embedding[...],
            bias_V,
            h_BND.astype(self.dtype),
            size=self.size,
            first_token=self._first_token(),
        )

    def _first_token(self) -> jax.Array:
        return self.region.index("stage") * self.embedding.shape[0]


def over_stages(region: ManualRegion) -> Callable[[Any], None]:
    """Returns a function that replaces every `Vocabulary` in a model by one stage's."""

    def adapt(model: nnx.Module) -> None:
        holders = [module for _, module in nnx.iter_modules(model)]
        for holder in holders:
            for name, child in vars(holder).items():
                if isinstance(child, Vocabulary):
                    setattr(holder, name, StageVocabulary(child, region))

    return adapt
