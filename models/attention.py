"""Multi-head self-attention.

Its linear maps keep heads as a dim of their own, so that a signature can split heads
without splitting a head.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.layers import BlockConfig, dropout, normal


class Attention(nnx.Module):
    """Multi-head self-attention (arXiv:1706.03762, section 3.2)."""

    def __init__(self, config: BlockConfig, *, out_scale: float, rngs: nnx.Rngs):
        self.config = config
        heads = (config.num_heads, config.head_dim)
        self.qkv = nnx.LinearGeneral(
            config.model_dim,
            (3, *heads),
            kernel_init=normal(config.init_scale),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.out = nnx.LinearGeneral(
            heads,
            config.model_dim,
            axis=(-2, -1),
            kernel_init=normal(out_scale),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, x_BLD: jax.Array, mask: jax.Array | None, keys_B: jax.Array | None
    ) -> jax.Array:
        """Mixes positions; the shape stays ``(B, L, D)``.

        Args:
            x_BLD: Input.
            mask: Boolean, broadcastable to ``(B, H, L, L)``, True where a query (dim
                2) may see a key (dim 3). None lets all see all.
            keys_B: Keys of the dropout on the probabilities, or None.
        """
        q_BLHK, k_BLHK, v_BLHK = self.project(x_BLD)
        rate = self.config.attention_dropout_rate
        values_BLHK = attend(q_BLHK, k_BLHK, v_BLHK, mask, rate=rate, keys_B=keys_B)
        return self.out(checkpoint_name(values_BLHK, "attention_values"))

    def project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, each ``(B, L, H, K)``."""
        qkv = checkpoint_name(self.qkv(x_BLD), "qkv")
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def attend(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: jax.Array | None,
    *,
    rate: float = 0.0,
    keys_B: jax.Array | None = None,
) -> jax.Array:
    """Returns for each query the mean of the values, weighted by softmax of the scores.

    Args:
        q_BLHK: Queries.
        k_BTHK: Keys.
        v_BTHK: Values.
        mask: Boolean, broadcastable to ``(B, H, L, T)``, True where a query may see a
            key. None lets all see all.
        rate: Of the dropout on the weights.
        keys_B: Its keys, one per sample; None switches it off.

    Returns:
        ``(B, L, H, K)`` in the dtype of the values; scores and softmax are in float32.
    """
    scores_BHLT = jnp.einsum(
        "blhk,bthk->bhlt",
        q_BLHK * (1 / math.sqrt(q_BLHK.shape[-1])),
        k_BTHK,
        preferred_element_type=jnp.float32,
    )
    if mask is not None:
        scores_BHLT = jnp.where(mask, scores_BHLT, jnp.finfo(jnp.float32).min)
    probs_BHLT = jax.nn.softmax(scores_BHLT).astype(v_BTHK.dtype)
    probs_BHLT = dropout(probs_BHLT, rate, keys_B)
    return jnp.einsum("bhlt,bthk->blhk", probs_BHLT, v_BTHK)
