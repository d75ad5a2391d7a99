"""Attention to some of the keys that queries see: what a ring of devices is made of.

The results for several sets of keys are put together by `models.blocked_attention.
merge`. The backward pass is given the results over all keys, so that the gradients of
queries for each set are terms of a sum.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from models.blocked_attention import attention_backward, attention_forward
from models.head_blocks import HIDDEN, LOWEST, TINY, score_scale
from models.masks import AttentionMask
from models.weight_dropout import WeightDropout
from sbp._compat import cudnn_attention_backward, cudnn_attention_forward

Means = tuple[jax.Array, jax.Array]
Gradients = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialAttention:
    """An implementation.

    Attributes:
        forward: ``forward(q, k, v, mask, dropout)`` returns the means of the values and
            the logarithms of the sums of weights; see `attention_forward`.
        backward: ``backward(q, k, v, mask, dropout, out_BLHK=, lse_BLH=, grad_BLHK=)``
            returns the gradients of queries, keys and values; see `attention_backward`.
    """

    forward: Callable[..., Means]
    backward: Callable[..., Gradients]


def plain_forward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None = None,
) -> Means:
    """Returns what `attention_forward` does, from all scores at once."""
    weights_BHLT, highest_BHL = _weights(q_BLHK, k_BTHK, mask)
    total_BHL = jnp.maximum(weights_BHLT.sum(-1), TINY)
    kept_BHLT = _drop(weights_BHLT, dropout).astype(v_BTHK.dtype)
    sums_BLHK = _product("bhlt,bthk->blhk", kept_BHLT, v_BTHK)
    total_BLH, highest_BLH = total_BHL.swapaxes(1, 2), highest_BHL.swapaxes(1, 2)
    means_BLHK = (sums_BLHK / total_BLH[..., None]).astype(v_BTHK.dtype)
    return means_BLHK, highest_BLH + jnp.log(total_BLH)


def plain_backward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None = None,
    *,
    out_BLHK: jax.Array,
    lse_BLH: jax.Array,
    grad_BLHK: jax.Array,
) -> Gradients:
    """Returns what `attention_backward` does, from all weights at once."""
    dtype, scale = v_BTHK.dtype, score_scale(q_BLHK)
    lse_BHL = lse_BLH.swapaxes(1, 2)
    weights_BHLT = jnp.exp(_scores(q_BLHK, k_BTHK, mask) - lse_BHL[..., None])
    inner_BLH = (grad_BLHK.astype(jnp.float32) * out_BLHK).sum(-1)
    grad_kept_BHLT = _product("blhk,bthk->bhlt", grad_BLHK, v_BTHK)
    grad_weights_BHLT = _drop(grad_kept_BHLT, dropout)
    inner_BHL1 = inner_BLH.swapaxes(1, 2)[..., None]
    grad_scores_BHLT = (weights_BHLT * (grad_weights_BHLT - inner_BHL1)).astype(dtype)
    kept_BHLT = _drop(weights_BHLT, dropout).astype(dtype)
    grad_q_BLHK = _product("bhlt,bthk->blhk", grad_scores_BHLT, k_BTHK) * scale
    grad_k_BTHK = _product("bhlt,blhk->bthk", grad_scores_BHLT, q_BLHK) * scale
    grad_v_BTHK = _product("bhlt,blhk->bthk", kept_BHLT, grad_BLHK)
    return grad_q_BLHK, grad_k_BTHK, grad_v_BTHK


def cudnn_forward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None = None,
) -> Means:
    """Returns what `attention_forward` does, by cuDNN; it drops no weights."""
    assert dropout is None, "the rules of attention='cudnn' exclude dropout"
    means_BLHK, lse_BHL = cudnn_attention_forward(
        q_BLHK,
        k_BTHK,
        v_BTHK,
        _bias(q_BLHK, k_BTHK, mask),
        is_causal=mask.is_causal,
    )
    return means_BLHK, lse_BHL.swapaxes(1, 2)


def cudnn_backward(
    q_BLHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    mask: AttentionMask,
    dropout: WeightDropout | None = None,
    *,
    out_BLHK: jax.Array,
    lse_BLH: jax.Array,
    grad_BLHK: jax.Array,
) -> Gradients:
    """Returns what `attention_backward` does, by cuDNN."""
    assert dropout is None, "the rules of attention='cudnn' exclude dropout"
    return cudnn_attention_backward(
        q_BLHK,
        k_BTHK,
        v_BTHK,
        _bias(q_BLHK, k_BTHK, mask),
        lse=lse_BLH.swapaxes(1, 2),
        out=out_BLHK,
        grad=grad_BLHK,
        is_causal=mask.is_causal,
    )


def _bias(
    q_BLHK: jax.Array, k_BTHK: jax.Array, mask: AttentionMask
) -> jax.Array | None:
    """Returns what hides keys when it is added to scores, but for the causal rule."""
    others = dataclasses.replace(mask, is_causal=False)
    visible = others.dense(q_BLHK.shape[1], k_BTHK.shape[1])
    if visible is None:
        return None
    lowest = jnp.asarray(jnp.finfo(q_BLHK.dtype).min / 2, q_BLHK.dtype)
    bias = jnp.where(visible, jnp.zeros((), q_BLHK.dtype), lowest)
    # cuDNN wants every query and key of it, if not every sample and head.
    return jnp.broadcast_to(bias, (*bias.shape[:2], q_BLHK.shape[1], k_BTHK.shape[1]))


def _weights(
    q_BLHK: jax.Array, k_BTHK: jax.Array, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    """Returns exponentials of scores, and the score that they are relative to."""
    scores_BHLT = _scores(q_BLHK, k_BTHK, mask)
    highest_BHL = jnp.maximum(scores_BHLT.max(-1), LOWEST)
    return jnp.exp(scores_BHLT - highest_BHL[..., None]), highest_BHL


def _scores(q_BLHK: jax.Array, k_BTHK: jax.Array, mask: AttentionMask) -> jax.Array:
    scores_BHLT = _product("blhk,bthk->bhlt", q_BLHK * score_scale(q_BLHK), k_BTHK)
    visible = mask.dense(q_BLHK.shape[1], k_BTHK.shape[1])
    return scores_BHLT if visible is None else jnp.where(visible, scores_BHLT, HIDDEN)


def _drop(weights_BHLT: jax.Array, dropout: WeightDropout | None) -> jax.Array:
    if dropout is None:
        return weights_BHLT
    _, num_heads, num_queries, num_keys = weights_BHLT.shape

    def keep(words: jax.Array, head: jax.Array) -> jax.Array:
        return dropout.of_head(words, head)(0, 0, (num_queries, num_keys))

    of_sample = jax.vmap(keep, in_axes=(None, 0))
    keep_BHLT = jax.vmap(of_sample, in_axes=(0, None))(
        dropout.words, jnp.arange(num_heads)
    )
    return jnp.where(keep_BHLT, weights_BHLT / (1 - dropout.rate), 0)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


PLAIN = PartialAttention(forward=plain_forward, backward=plain_backward)
BLOCKED = PartialAttention(forward=attention_forward, backward=attention_backward)
CUDNN = PartialAttention(forward=cudnn_forward, backward=cudnn_backward)
IMPLEMENTATIONS: Mapping[str, PartialAttention] = {
    "plain": PLAIN,
    "blocked": BLOCKED,
    "cudnn": CUDNN,
}
