"""Cross entropy, written so that a split vocabulary stays split."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the correctness of each prediction.

    ``loss = logsumexp(logits) - logits[target]``. Nothing but maxima and sums over the
    classes is taken: if these are split over devices, no device ever needs more than
    its own part of the logits (arXiv:1909.08053, section 3).

    Args:
        logits: float32 ``(..., V)``.
        targets: Integer classes ``(...)``, each in ``[0, V)``.

    Returns:
        Loss in nats and correctness (1.0 if no class scores higher than the target,
        else 0.0), both float32 ``(...)``.

    Example:
        >>> loss, correct = cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))
        >>> round(float(loss[0]), 4), float(correct[0])
        (1.3863, 1.0)
    """
    highest = jax.lax.stop_gradient(logits.max(-1))
    shifted = logits - highest[..., None]
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    is_target = classes == targets[..., None]
    target = jnp.where(is_target, shifted, 0.0).sum(-1)
    loss = jnp.log(jnp.exp(shifted).sum(-1)) - target
    return loss, jax.lax.stop_gradient(target >= 0).astype(jnp.float32)


def soft_cross_entropy(logits: jax.Array, probabilities: jax.Array) -> jax.Array:
    """Returns the loss against a distribution over the classes.

    ``loss = logsumexp(logits) - sum(probabilities * logits)``, the probabilities adding
    up to 1.

    Args:
        logits: float32 ``(..., C)``.
        probabilities: Target, float32 ``(..., C)``.

    Returns:
        Loss in nats, float32 ``(...)``.

    Example:
        >>> loss = soft_cross_entropy(jnp.zeros((1, 4)), jnp.array([[0, 0.5, 0.5, 0]]))
        >>> round(float(loss[0]), 4)
        1.3863
    """
    return -(probabilities * jax.nn.log_softmax(logits)).sum(-1)
