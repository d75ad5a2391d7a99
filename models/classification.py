"""What classifiers are trained on and judged by, as sums over a batch.

They all are sums over samples, so that those of microbatches, devices and batches add
up to what one large batch gives.
"""

import jax
import jax.numpy as jnp

from models.losses import soft_cross_entropy

Sums = dict[str, jax.Array]

TOP = 5  # classes among which the right one may be; of as few, all are


def classification_sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> Sums:
    """Returns the weighted sums of loss and correctness.

    A sample counts as correct if the likeliest of its targets is the class of highest
    score, or among the `TOP` highest if there are more classes than that.

    Args:
        logits: float32 ``(B, C)``.
        targets: The probability of each class, float32 ``(B, C)``.
        weights: float32 ``(B,)``, 0 on samples that only fill up a batch.
    """
    loss_B = soft_cross_entropy(logits, targets)
    label_B1 = targets.argmax(-1, keepdims=True)
    target_B1 = jnp.take_along_axis(logits, label_B1, axis=-1)
    num_higher_B = (logits > target_B1).sum(-1)
    sums = {
        "classification_loss": (loss_B * weights).sum(),
        "top1_accuracy": ((num_higher_B < 1) * weights).sum(),
    }
    if targets.shape[-1] > TOP:
        sums[f"top{TOP}_accuracy"] = ((num_higher_B < TOP) * weights).sum()
    return sums


def classification_counts(targets: jax.Array, weights: jax.Array) -> Sums:
    """Returns what each sum of `classification_sums` is to be divided by."""
    names = ["classification_loss", "top1_accuracy"]
    if targets.shape[-1] > TOP:
        names.append(f"top{TOP}_accuracy")
    return dict.fromkeys(names, weights.sum())


def class_counts(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Counts, for each class, what F1 scores are made of.

    Args:
        logits: float32 ``(..., C)``.
        labels: The right class, integers ``(...)``.
        weights: float32 ``(...)``, 0 on what does not count.

    Returns:
        float32 ``(3, C)``: how often the class of highest score is this one and right,
        how often it is this one, and how often this one is right.

    Example:
        >>> logits = jnp.array([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
        >>> class_counts(logits, jnp.array([0, 0, 1]), jnp.ones(3)).tolist()
        [[1.0, 1.0], [1.0, 2.0], [2.0, 1.0]]
    """
    num_classes = logits.shape[-1]
    is_best = jax.nn.one_hot(logits.argmax(-1), num_classes) * weights[..., None]
    is_label = jax.nn.one_hot(labels, num_classes) * weights[..., None]
    is_right = is_best * is_label
    every = tuple(range(logits.ndim - 1))
    return jnp.stack([x.sum(every) for x in (is_right, is_best, is_label)])
