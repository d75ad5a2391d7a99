"""The classes that samples are labelled with: their names, and targets made of them."""

from collections.abc import Iterable, Sequence

import numpy as np

_NUM_NAMED = 10  # of many classes, in an error


def order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names, each once, in the order of their labels.

    Numbers are in the order of their values, everything else in that of the alphabet.

    Example:
        >>> order(["10", "9", "10"]), order(["b", "10", "9"])
        (('9', '10'), ('10', '9', 'b'))
    """
    distinct = set(names)
    if all(name.removeprefix("-").isdecimal() for name in distinct):
        return tuple(sorted(distinct, key=int))
    return tuple(sorted(distinct))


def check(classes: Sequence[str], *, name: str, num_classes: int) -> None:
    """Checks that samples of these classes can be trained on.

    Args:
        classes: Their names, by label.
        name: Of the data, for people.
        num_classes: Of the model.

    Raises:
        ValueError: If there are more than the model has, or fewer than two, or several
            of one name.
    """
    if len(classes) > num_classes:
        raise ValueError(
            f"The samples, {name}, are of {len(classes)} classes, more than"
            f" model.num_classes={num_classes}. Set model.num_classes={len(classes)}."
        )
    if len(classes) < 2:
        raise ValueError(
            f"All samples, {name}, are of one class, {', '.join(classes)!r}, so there"
            " is nothing to tell apart. Add samples of another one."
        )
    if repeated := sorted({each for each in classes if classes.count(each) > 1}):
        raise ValueError(
            f"data.classes has several classes of the name {repeated[0]!r}, and samples"
            " do not say which of them is meant. Give each class a name of its own."
        )


def describe(classes: Sequence[str]) -> str:
    """Returns the names for a message, the first ones of many."""
    listed = ", ".join(map(repr, classes[:_NUM_NAMED]))
    more = len(classes) - _NUM_NAMED
    return f"{listed} and {more} more" if more > 0 else listed


def one_hot(labels_B: np.ndarray, num_classes: int, *, smoothing: float) -> np.ndarray:
    """Returns the probability of each class, float32 ``(B, C)``.

    Args:
        labels_B: The right class of each sample.
        num_classes: Number of classes.
        smoothing: Share that all classes have alike (arXiv:1512.00567, section 7).

    Example:
        >>> one_hot(np.array([1]), 4, smoothing=0.5).tolist()
        [[0.125, 0.625, 0.125, 0.125]]
    """
    is_label_BC = np.arange(num_classes)[None] == labels_B[:, None]
    return np.where(is_label_BC, 1 - smoothing, 0).astype(np.float32) + np.float32(
        smoothing / num_classes
    )
