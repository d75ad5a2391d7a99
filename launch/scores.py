"""Scores that are no means over samples, made of sums over the whole held-out split.

So they are exact whatever the batch size, and the same on every layout.
"""

from collections.abc import Mapping

import numpy as np

Scores = dict[str, float]


def perplexity(means: Mapping[str, float], sums: Mapping[str, np.ndarray]) -> Scores:
    """Returns the perplexity of a language model, over all tokens.

    Args:
        means: The mean loss per token, ``lm_loss``.
        sums: Unused.
    """
    with np.errstate(over="ignore"):
        return {"perplexity": float(np.exp(means["lm_loss"]))}


def f1(means: Mapping[str, float], sums: Mapping[str, np.ndarray]) -> Scores:
    """Returns F1 scores, the harmonic means of precision and recall.

    ``macro_f1`` is the mean over the classes that occur or are found at least once;
    ``micro_f1`` is of all together, and equals the accuracy. Of two classes, ``f1`` is
    that of the second. A class that is never found rightly has 0.

    Args:
        means: Unused.
        sums: ``class_counts`` of `models.classification.class_counts`.

    Example:
        >>> counts = np.array([[1, 1], [1, 2], [2, 1]])
        >>> {name: round(x, 4) for name, x in f1({}, {"class_counts": counts}).items()}
        {'macro_f1': 0.6667, 'micro_f1': 0.6667, 'f1': 0.6667}
    """
    right, found, expected = np.asarray(sums["class_counts"], np.float64)
    total = found + expected
    each = np.divide(2 * right, total, out=np.zeros_like(total), where=total > 0)
    scores = {
        "macro_f1": float(each[total > 0].mean()),
        "micro_f1": float(2 * right.sum() / total.sum()),
    }
    if len(right) == 2:
        scores["f1"] = float(each[1])
    return scores
