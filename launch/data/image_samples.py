"""Samples of labelled images, a batch at a time.

An image is cropped and resized; in training it is changed at random, from the seed and
the number of the sample alone, and possibly mixed with another one of the same split.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image

from launch.data import augmentation, classes, draws, mixing
from launch.data.images import AbstractImages

Batch = dict[str, np.ndarray]

# Streams of random numbers; those of the image that is mixed in come after.
_CROP, _FLIP, _CHANGE, _ERASE, _MIX, _NUM_STREAMS = range(6)
_CROP_RATIOS = (3 / 4, 4 / 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How samples are made; `configs.base` and `models.vit` say what a field means."""

    image_size: int
    num_channels: int
    num_classes: int
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    crop_area: float
    flip: bool
    randaugment_layers: int
    randaugment_magnitude: float
    erasing_probability: float
    mixup_alpha: float
    cutmix_alpha: float
    label_smoothing: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageSamples:
    """Makes samples of some images.

    Attributes:
        recipe: How.
        images: Where they are from.
        indices: Which of them, int64.
        seed: Of all that is random.
        is_random: False changes no image, as in validation.
    """

    recipe: Recipe
    images: AbstractImages
    indices: np.ndarray
    seed: int
    is_random: bool

    def __len__(self) -> int:
        return len(self.indices)

    def shapes(self, batch_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Returns shape and NumPy type of each array of a batch."""
        return shapes(self.recipe, batch_size)

    def make(self, items_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch, as `models.vit.Vit` describes it.

        Args:
            items_B: Which image each sample is made of.
            samples_B: The number of each sample, of which all random numbers are drawn.

        Raises:
            OSError: If an image cannot be read any more.
        """
        images_B = self._images(self.indices[items_B], samples_B, which=0)
        targets_BC = self._targets(self.indices[items_B])
        recipe = self.recipe
        if self.is_random and (recipe.mixup_alpha or recipe.cutmix_alpha):
            images_B, targets_BC = self._mix(images_B, targets_BC, samples_B)
        return {
            "images": images_B,
            "targets": targets_BC,
            "weights": np.ones(len(items_B), np.float32),
        }

    def _targets(self, indices_B: np.ndarray) -> np.ndarray:
        return classes.one_hot(
            self.images.labels[indices_B],
            self.recipe.num_classes,
            smoothing=self.recipe.label_smoothing if self.is_random else 0.0,
        )

    def _images(
        self, indices_B: np.ndarray, samples_B: np.ndarray, *, which: int
    ) -> np.ndarray:
        """Returns normalized images, of the first or the second kind of each sample."""
        size, channels = self.recipe.image_size, self.recipe.num_channels
        images = np.empty((len(indices_B), size, size, channels), np.float32)
        units: Sequence[_Units | None] = [None] * len(indices_B)
        if self.is_random:
            units = self._units(samples_B, which=which)
        for row, (index, drawn) in enumerate(zip(indices_B, units, strict=True)):
            images[row] = self._image(int(index), drawn)
        return images

    def _units(self, samples_B: np.ndarray, *, which: int) -> list["_Units"]:
        first = _NUM_STREAMS * which
        num = augmentation.NUM_RECTANGLE_UNITS
        parts = [
            draws.uniform(self.seed, first + stream, samples_B, size)
            for stream, size in (
                (_CROP, num),
                (_FLIP, 1),
                (_CHANGE, 2 * self.recipe.randaugment_layers),
                (_ERASE, num + 1),
            )
        ]
        return [
            _Units(crop=crop, flip=flip[0], change=change, erase=erase)
            for crop, flip, change, erase in zip(*parts, strict=True)
        ]

    def _image(self, index: int, units: "_Units | None") -> np.ndarray:
        recipe = self.recipe
        with self.images.open(index) as file:
            image = _cut(file, recipe, units)
        if units is not None:
            if recipe.flip and units.flip < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            image = augmentation.rand_augment(
                image, units.change, magnitude=recipe.randaugment_magnitude
            )
        pixels = np.asarray(image, np.float32).reshape(*image.size, -1) / 255
        mean, std = (np.array(x) for x in (recipe.pixel_mean, recipe.pixel_std))
        pixels = ((pixels - mean[None, None]) / std[None, None]).astype(np.float32)
        if units is not None:
            probability = recipe.erasing_probability
            augmentation.erase(pixels, units.erase, probability=probability)
        return pixels

    def _mix(
        self, images_B: np.ndarray, targets_BC: np.ndarray, samples_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mixes each image with another one of the split."""
        recipe = self.recipe
        units = draws.uniform(self.seed, _MIX, samples_B, 5).T
        others_B = self.indices[(units[0] * len(self)).astype(np.int64)]
        other_images_B = self._images(others_B, samples_B, which=1)
        is_mixup_B = np.full(len(samples_B), recipe.mixup_alpha > 0)
        if recipe.mixup_alpha and recipe.cutmix_alpha:
            is_mixup_B = units[1] < 0.5
        shares_B = np.empty(len(samples_B))
        for chosen_B, alpha in (
            (is_mixup_B, recipe.mixup_alpha),
            (~is_mixup_B, recipe.cutmix_alpha),
        ):
            if alpha:
                shares_B[chosen_B] = mixing.symmetric_beta(alpha, units[2][chosen_B])
        for row, is_mixup in enumerate(is_mixup_B):
            pair = images_B[row], other_images_B[row]
            if is_mixup:
                images_B[row] = mixing.mixup(*pair, shares_B[row])
            else:
                images_B[row], shares_B[row] = mixing.cutmix(
                    *pair, shares_B[row], units[3:, row]
                )
        shares_B1 = shares_B[:, None].astype(np.float32)
        others_BC = self._targets(others_B)
        return images_B, shares_B1 * targets_BC + (1 - shares_B1) * others_BC


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """The random numbers in [0, 1) of an image, by what they are for."""

    crop: np.ndarray
    flip: float
    change: np.ndarray
    erase: np.ndarray


def shapes(recipe: Recipe, batch_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Returns shape and NumPy type of each array of a batch; see `models.vit.Vit`."""
    size = recipe.image_size
    return {
        "images": ((batch_size, size, size, recipe.num_channels), np.float32),
        "targets": ((batch_size, recipe.num_classes), np.float32),
        "weights": ((batch_size,), np.float32),
    }


def _cut(file: Image.Image, recipe: Recipe, units: _Units | None) -> Image.Image:
    """Returns the part of an image that a sample shows, in its size and mode."""
    box = None
    if units is not None and recipe.crop_area < 1:
        areas = recipe.crop_area, 1.0
        box = augmentation.rectangle(
            units.crop, file.size, areas=areas, ratios=_CROP_RATIOS
        )
    left, top, right, bottom = box or augmentation.central_square(file.size)
    mode = "L" if recipe.num_channels == 1 else "RGB"
    width, height = file.size
    # A JPEG can be decoded to a smaller size, which is faster.
    scale = min(1, recipe.image_size / min(right - left, bottom - top))
    file.draft(mode, (round(width * scale), round(height * scale)))
    x, y = file.width / width, file.height / height
    image = file.convert("RGBA") if file.mode == "P" else file
    return image.convert(mode).resize(
        (recipe.image_size, recipe.image_size),
        resample=Image.Resampling.BICUBIC,
        box=(left * x, top * y, right * x, bottom * y),
    )
