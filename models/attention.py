"""Multi-head self-attention.

Its linear maps keep heads as a dim of their own, so that a signature can split heads
without splitting a head. What lies between them, the core, has implementations that
differ in speed and memory alone:

===========  ===========================================================================
``plain``    all scores at once, float32 ``(B, H, L, T)``
``blocked``  by blocks of queries and keys, in memory that grows with the length; on CPU
             also the fastest for long sequences (`models.blocked_attention`)
``cudnn``    flash attention of cuDNN, on GPUs, in float16 or bfloat16
===========  ===========================================================================
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import weight_dropout
from models.blocked_attention import attend_in_blocks
from models.head_blocks import score_scale
from models.layers import BlockConfig, dropout, linear
from models.masks import AttentionMask


class Core(Protocol):
    """An implementation of attention; see `attend` for arguments and result."""

    def __call__(
        self,
        q_BLHK: jax.Array,
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        mask: AttentionMask | None,
        *,
        rate: float = 0.0,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns for each query the weighted mean of the values."""
        ...


class Attention(nnx.Module):
    """Multi-head self-attention (arXiv:1706.03762, section 3.2)."""

    def __init__(self, config: BlockConfig, *, out_scale: float, rngs: nnx.Rngs):
        self.config = config
        self.core: Core = CORES.get(config.attention, attend)
        dim, heads = config.model_dim, (config.num_heads, config.head_dim)
        self.qkv = linear(config, (3, *heads), rngs=rngs)
        self.out = linear(config, dim, in_dims=heads, scale=out_scale, rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, mask: AttentionMask | None, keys_B: jax.Array | None
    ) -> jax.Array:
        """Mixes positions; the shape stays ``(B, L, D)``.

        Args:
            x_BLD: Input.
            mask: Which keys a query may see; None lets all see all.
            keys_B: Keys of the dropout on the probabilities, or None.
        """
        q_BLHK, k_BLHK, v_BLHK = self.project(x_BLD)
        rate = self.config.attention_dropout_rate
        return self.out(
            self.core(q_BLHK, k_BLHK, v_BLHK, mask, rate=rate, keys_B=keys_B)
        )

    def project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, each ``(B, L, H, K)``."""
        qkv = checkpoint_name(self.qkv(x_BLD), "qkv")
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def attend(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | jax.Array | None,
    *,
    rate: float = 0.0,
    keys_B: jax.Array | None = None,
) -> jax.Array:
    """Returns for each query the mean of the values, weighted by softmax of the scores.

    This is ``plain``.

    Args:
        q_BLHK: Queries.
        k_BTHK: Keys.
        v_BTHK: Values.
        mask: Which keys a query may see: an `AttentionMask`, or boolean and
            broadcastable to ``(B, H, L, T)``. None lets all see all.
        rate: Of the dropout on the weights.
        keys_B: Its keys, one per sample; None switches it off.

    Returns:
        ``(B, L, H, K)`` in the dtype of the values; scores and softmax are in float32.
    """
    scores_BHLT = jnp.einsum(
        "blhk,bthk->bhlt",
        q_BLHK * score_scale(q_BLHK),
        k_BTHK,
        preferred_element_type=jnp.float32,
    )
    if isinstance(mask, AttentionMask):
        mask = mask.dense(q_BLHK.shape[1], k_BTHK.shape[1])
    if mask is not None:
        scores_BHLT = jnp.where(mask, scores_BHLT, jnp.finfo(jnp.float32).min)
    probs_BHLT = jax.nn.softmax(scores_BHLT).astype(v_BTHK.dtype)
    probs_BHLT = dropout(probs_BHLT, rate, keys_B)
    values_BLHK = jnp.einsum("bhlt,bthk->blhk", probs_BHLT, v_BTHK)
    return checkpoint_name(values_BLHK, "attention_values")


def attend_blocked(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None,
    *,
    rate: float = 0.0,
    keys_B: jax.Array | None = None,
) -> jax.Array:
    """Returns what `attend` does, in memory that grows with the length alone.

    Weights are computed in float32 and dropped as there. A query that sees no key gets
    0.

    Raises:
        ValueError: If weights are to be dropped by keys that are not threefry keys.
    """
    sizes = dict(num_queries=q_BLHK.shape[1], num_keys=k_BTHK.shape[1])
    drops = weight_dropout.make(rate, keys_B, **sizes)
    return attend_in_blocks(q_BLHK, k_BTHK, v_BTHK, mask, drops)


def attend_cudnn(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask | None,
    *,
    rate: float = 0.0,
    keys_B: jax.Array | None = None,
) -> jax.Array:
    """Returns what `attend` does, by cuDNN.

    A causal mask costs nothing there. What else is hidden is handed over as an array
    ``(B, 1, L, T)``, in the dtype of the queries.

    Raises:
        ValueError: If weights are to be dropped.
    """
    if keys_B is not None and rate:
        raise ValueError(CUDNN_DROPS_NOTHING.format(rate=rate))
    mask = mask or AttentionMask()
    lengths = q_BLHK.shape[1], k_BTHK.shape[1]
    others = dataclasses.replace(mask, is_causal=False).dense(*lengths)
    if others is not None:
        others = jnp.broadcast_to(others, (*others.shape[:2], *lengths))
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BTHK,
        v_BTHK,
        mask=others,
        is_causal=mask.is_causal,
        implementation="cudnn",
    )


CUDNN_DROPS_NOTHING = (
    "attention_dropout_rate={rate}, but attention='cudnn' drops no weights. Set the"
    " rate to 0, or use attention='plain' or 'blocked'."
)

CORES: Mapping[str, Core] = {
    "plain": attend,
    "blocked": attend_blocked,
    "cudnn": attend_cudnn,
}
