"""What classifiers are trained on and judged by, as sums over a batch.

They all are sums over samples, so that those of microbatches, devices and batches add
up to what one large batch gives.
"""

import abc

import jax
import jax.numpy as jnp

from models.losses import soft_cross_entropy

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

TOP = 5  # classes among which the right one may be; of as few, all are


class SampleClassifier:
    """What a model that gives each sample a class is trained on and judged by.

    Its batches have ``targets`` float32 ``(B, C)``, the probability of each class, such
    as 1 for one of them or what Mixup makes of two; and ``weights`` float32 ``(B,)``, 0
    on samples that only fill up a batch.
    """

    @abc.abstractmethod
    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the score of every class, float32 ``(B, C)``."""

    def losses(self, x_BLD: jax.Array, batch: Batch) -> Sums:
        """Returns `classification_sums` of the batch."""
        logits = self.logits(x_BLD)
        return classification_sums(logits, batch["targets"], batch["weights"])

    @staticmethod
    def counts(batch: Batch) -> Sums:
        """Returns what each sum of `losses` is to be divided by, over a whole batch."""
        return classification_counts(batch["targets"], batch["weights"])

    def tallies(self, x_BLD: jax.Array, batch: Batch) -> Sums:
        """Returns further sums, of which evaluation makes F1 scores."""
        logits, labels_B = self.logits(x_BLD), batch["targets"].argmax(-1)
        return {"class_counts": class_counts(logits, labels_B, batch["weights"])}


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
