"""Token embedding and output layer, one table."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import BlockConfig, normal
from models.losses import cross_entropy


class Vocabulary(nnx.Module):
    """Token embedding and its transpose, the output layer (arXiv:1608.05859).

    The table has ``padded_size`` rows. Tokens never name the rows past ``size``, and
    their logits are the lowest float, so that they take no probability.
    """

    def __init__(
        self, size: int, padded_size: int, config: BlockConfig, *, rngs: nnx.Rngs
    ):
        self.size = size
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
        table_VD, h_BND = self.embedding[...], h_BND.astype(self.dtype)
        return vocabulary_logits(table_VD, bias_V, h_BND, size=self.size)

    def cross_entropy(
        self, h_BND: jax.Array, bias_V: jax.Array | None, targets_BN: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `losses.cross_entropy` of the logits, both ``(B, N)``."""
        return cross_entropy(self.logits(h_BND, bias_V), targets_BN)


def vocabulary_logits(
    table_VD: jax.Array,
    bias_V: jax.Array | None,
    h_BND: jax.Array,
    *,
    size: int,
    first_token: int | jax.Array = 0,
) -> jax.Array:
    """Scores the tokens of consecutive rows of a vocabulary table.

    Args:
        table_VD: The rows.
        bias_V: Their biases; None for none.
        h_BND: What to score; its dtype is that of the products.
        size: Tokens of the whole vocabulary; a row past them is padding.
        first_token: Token of the first row given.

    Returns:
        float32 ``(B, N, V)``, the lowest float on padding.
    """
    scores_BNV = jnp.einsum(
        "bnd,vd->bnv",
        h_BND,
        table_VD.astype(h_BND.dtype),
        preferred_element_type=jnp.float32,
    )
    if bias_V is not None:
        scores_BNV += bias_V.astype(jnp.float32)[None, None]
    is_token_V = first_token + jnp.arange(table_VD.shape[0]) < size
    return jnp.where(is_token_V, scores_BNV, jnp.finfo(jnp.float32).min)
