"""Random changes of an image that keep its class. Random numbers come from outside."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

NUM_TRIES = 10
NUM_RECTANGLE_UNITS = 2 * NUM_TRIES + 2

Box = tuple[int, int, int, int]  # left, top, right, bottom
_Change = Callable[[Image.Image, float], Image.Image]

_GRAY = 128  # what comes in from outside the image


def rectangle(
    units: np.ndarray,
    size: tuple[int, int],
    *,
    areas: tuple[float, float],
    ratios: tuple[float, float],
) -> Box | None:
    """Returns a random rectangle within an image; None if no try fits.

    Args:
        units: `NUM_RECTANGLE_UNITS` random numbers in [0, 1).
        size: Width and height of the image.
        areas: Smallest and largest share of the image.
        ratios: Smallest and largest width divided by height, uniform in the logarithm.
    """
    width, height = size
    area_T = areas[0] + (areas[1] - areas[0]) * units[:NUM_TRIES]
    low, high = map(math.log, ratios)
    ratio_T = np.exp(low + (high - low) * units[NUM_TRIES : 2 * NUM_TRIES])
    width_T = np.rint(np.sqrt(width * height * area_T * ratio_T)).astype(int)
    height_T = np.rint(np.sqrt(width * height * area_T / ratio_T)).astype(int)
    fits_T = (width_T <= width) & (height_T <= height) & (width_T * height_T > 0)
    if not fits_T.any():
        return None
    first = fits_T.argmax()
    cut_width, cut_height = int(width_T[first]), int(height_T[first])
    left = int(units[-2] * (width - cut_width + 1))
    top = int(units[-1] * (height - cut_height + 1))
    return left, top, left + cut_width, top + cut_height


def central_square(size: tuple[int, int]) -> Box:
    """Returns the largest square in the middle of an image.

    Example:
        >>> central_square((6, 4))
        (1, 0, 5, 4)
    """
    side = min(size)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return left, top, left + side, top + side


def rand_augment(
    image: Image.Image, units: np.ndarray, *, magnitude: float
) -> Image.Image:
    """Returns an image after some changes, chosen at random (arXiv:1909.13719).

    Args:
        image: Mode ``L`` or ``RGB``.
        units: Two random numbers in [0, 1) for each change: which, and its direction.
        magnitude: Of every change, from 0 to 10.
    """
    changes = list(CHANGES.values())
    for which, direction in units.reshape(-1, 2):
        sign = 1 if direction < 0.5 else -1
        image = changes[int(which * len(changes))](image, sign * magnitude / 10)
    return image


def erase(image_HWC: np.ndarray, units: np.ndarray, *, probability: float) -> None:
    """Sets a random rectangle to 0, at times, in place (arXiv:1708.04896).

    Args:
        image_HWC: Normalized, so that 0 is the mean.
        units: ``NUM_RECTANGLE_UNITS + 1`` random numbers in [0, 1).
        probability: That anything is erased.
    """
    size = image_HWC.shape[1], image_HWC.shape[0]
    limits = {"areas": (0.02, 1 / 3), "ratios": (0.3, 1 / 0.3)}
    if units[-1] < probability and (box := rectangle(units[:-1], size, **limits)):
        left, top, right, bottom = box
        image_HWC[top:bottom, left:right] = 0


def _moved(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        resample=Image.Resampling.BILINEAR,
        fillcolor=_GRAY if image.mode == "L" else (_GRAY,) * 3,
    )


def _rotated(image: Image.Image, level: float) -> Image.Image:
    return image.rotate(
        30 * level,
        resample=Image.Resampling.BILINEAR,
        fillcolor=_GRAY if image.mode == "L" else (_GRAY,) * 3,
    )


# Each takes a level from -1 to 1, of which many have no use for the sign.
CHANGES: Mapping[str, _Change] = {
    "identity": lambda image, level: image,
    "autocontrast": lambda image, level: ImageOps.autocontrast(image),
    "equalize": lambda image, level: ImageOps.equalize(image),
    "rotate": _rotated,
    "solarize": lambda image, level: ImageOps.solarize(
        image, round(256 * (1 - abs(level)))
    ),
    "posterize": lambda image, level: ImageOps.posterize(
        image, 8 - round(4 * abs(level))
    ),
    "color": lambda image, level: ImageEnhance.Color(image).enhance(1 + 0.9 * level),
    "contrast": lambda image, level: ImageEnhance.Contrast(image).enhance(
        1 + 0.9 * level
    ),
    "brightness": lambda image, level: ImageEnhance.Brightness(image).enhance(
        1 + 0.9 * level
    ),
    "sharpness": lambda image, level: ImageEnhance.Sharpness(image).enhance(
        1 + 0.9 * level
    ),
    "shear_x": lambda image, level: _moved(image, (1, 0.3 * level, 0, 0, 1, 0)),
    "shear_y": lambda image, level: _moved(image, (1, 0, 0, 0.3 * level, 1, 0)),
    "translate_x": lambda image, level: _moved(
        image, (1, 0, 0.3 * level * image.width, 0, 1, 0)
    ),
    "translate_y": lambda image, level: _moved(
        image, (1, 0, 0, 0, 1, 0.3 * level * image.height)
    ),
}
