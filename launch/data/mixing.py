"""Mixup and CutMix: two images become one, and so do their labels."""

import numpy as np


def symmetric_beta(alpha: float, units: np.ndarray) -> np.ndarray:
    """Returns random numbers of the distribution Beta(alpha, alpha), in [0, 1].

    Args:
        alpha: Above 0; 1 is uniform, less prefers the ends.
        units: Random numbers in [0, 1), each of which gives one.

    Example:
        >>> symmetric_beta(1.0, np.array([0.25, 0.5])).round(3).tolist()
        [0.25, 0.5]
    """
    # With x = sin(t)**2 the density of t is bounded for any alpha from 1/2 on.
    num = 2**14
    middles = (np.arange(num) + 0.5) * (np.pi / 2 / num)
    density = (np.sin(middles) * np.cos(middles)) ** (2 * alpha - 1)
    total = np.concatenate([[0.0], density.cumsum()])
    edges = np.linspace(0, np.pi / 2, num + 1)
    return np.sin(np.interp(units, total / total[-1], edges)) ** 2


def mixup(image: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    """Returns the weighted mean of two images, ``share`` of the first."""
    return (share * image + (1 - share) * other).astype(image.dtype)


def cutmix(
    image_HWC: np.ndarray, other_HWC: np.ndarray, share: float, units: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns an image with a rectangle of another, and what share is left of it.

    Args:
        image_HWC: The image, which is not changed.
        other_HWC: The other one, of the same shape.
        share: That is to be left of the first, if the rectangle is all inside.
        units: Two random numbers in [0, 1): where the middle of the rectangle is.
    """
    height, width = image_HWC.shape[:2]
    scale = np.sqrt(1 - share) / 2
    top, bottom = _edges(units[0], height, scale)
    left, right = _edges(units[1], width, scale)
    mixed = image_HWC.copy()
    mixed[top:bottom, left:right] = other_HWC[top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _edges(unit: float, length: int, scale: float) -> tuple[int, int]:
    middle = unit * length
    low, high = middle - scale * length, middle + scale * length
    return max(0, round(low)), min(length, round(high))
