"""Token embedding and output layer, one table."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import BlockConfig, normal
from models.vocabulary_loss import Scoring, sum_cross_entropy


class Vocabulary(nnx.Module):
    """Token embedding and its transpose, the output layer (arXiv:1608.05859).

    The table has ``padded_size`` rows. Tokens never name the rows past ``size``, and
    their logits are the lowest float, so that they take no probability.
    """

    def __init__(
        self,
        size: int,
        padded_size: int,
        config: BlockConfig,
        *,
        loss_chunk_size: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.scoring = Scoring(size=size, chunk_size=loss_chunk_size)
        self.dtype = config.dtype
        init = normal(config.init_scale)
        shape = (padded_size, config.model_dim)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype))

    def embed(self, tokens_BL: jax.Array) -> jax.Array:
        """Looks the tokens up: ``(B, L)`` to ``(B, L, D)``."""
        # Cast afterwards, for the gradients of frequent tokens to be summed in float32.
        return jnp.take(self.embedding[...], tokens_BL, axis=0).astype(self.dtype)

    def logits(self, h_BND: jax.Array, bias_V: jax.Array | None = None) -> jax.Array:
        """Scores every token: ``(B, N, D)`` to float32 ``(B, N, V)``."""
        h_BND = h_BND.astype(self.dtype)
        return self.scoring.logits(self.embedding[...], bias_V, h_BND)

    def cross_entropy(
        self,
        h_BND: jax.Array,
        bias_V: jax.Array | None,
        targets_BN: jax.Array,
        weights_BN: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns weighted sums of losses and of correct predictions.

        See `vocabulary_loss.sum_cross_entropy`.
        """
        return sum_cross_entropy(
            self.scoring,
            self.embedding[...],
            bias_V,
            h_BND.astype(self.dtype),
            targets_BN,
            weights_BN,
        )
