"""ViT's data: folders of images, or handwritten digits, to normalized batches."""

import pathlib

import jax
import numpy as np

from launch import input_pipeline
from launch.data import cache, classes, draws, image_samples, images
from launch.data.image_samples import ImageSamples, Recipe
from launch.input_pipeline import Splits
from launch.run_config import DataConfig
from models.vit import VitConfig

FIELDS = frozenset(
    "files cache_dir validation_files validation_fraction classes label_smoothing"
    " skip_broken pixel_mean pixel_std crop_area flip randaugment_layers"
    " randaugment_magnitude erasing_probability mixup_alpha cutmix_alpha"
    " num_workers".split()
)


def open_splits(data: DataConfig, model: VitConfig, seed: int) -> Splits:
    """Returns what to train on, after reading every image once unless that is cached.

    Args:
        data: What to train on.
        model: Says the size of images, and how many classes there may be.
        seed: Of the split and the samples; below 2**32.

    Raises:
        FileNotFoundError: If folders are missing; all of them are named.
        ValueError: If there are too many classes or too few images, a file is broken,
            or the cache cannot be written.
    """
    cache_dir = cache.directory(data.cache_dir)
    found = held_from = _open_images(data, cache_dir)
    classes.check(found.classes, name=found.name, num_classes=model.num_classes)
    if data.validation_files:
        held_from = images.open_folders(
            data.validation_files,
            cache_dir,
            classes=found.classes,
            skip_broken=data.skip_broken,
        )
        is_held_out = np.isin(found.hashes, held_from.hashes)
        held_out = np.arange(len(held_from.labels))
    else:
        is_held_out = draws.is_held_out(
            found.hashes, fraction=data.validation_fraction, seed=seed
        )
        held_out = np.flatnonzero(is_held_out)
    # So that a part of the validation is like the whole, not the first classes.
    held_out = draws.shuffle(held_out, seed=seed)
    trained = np.flatnonzero(~is_held_out)
    _check_size(data, found, trained)
    recipe = make_recipe(data, model)
    train, validation = (
        ImageSamples(
            recipe=recipe, images=source, indices=part, seed=seed, is_random=is_random
        )
        for source, part, is_random in (
            (found, trained, True),
            (held_from, held_out, False),
        )
    )
    return Splits(
        train=train,
        validation=validation,
        fingerprint=images.fingerprint(found),
        summary=(
            f"{found.name}: {len(trained):,} images to train on of"
            f" {len(found.classes):,} classes, {len(held_out):,} held out"
            + _describe_left_out(found, held_from, is_held_out)
        ),
        classes=found.classes,
    )


def batch_shapes(
    data: DataConfig, model: VitConfig, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the images."""
    shapes = image_samples.shapes(make_recipe(data, model), global_batch_size)
    return input_pipeline.structs(shapes)


def make_recipe(data: DataConfig, model: VitConfig) -> Recipe:
    """Returns how samples are made for a model."""
    return Recipe(
        image_size=model.image_size,
        num_channels=model.num_channels,
        num_classes=model.num_classes,
        pixel_mean=data.pixel_mean,
        pixel_std=data.pixel_std,
        crop_area=data.crop_area,
        flip=data.flip,
        randaugment_layers=data.randaugment_layers,
        randaugment_magnitude=data.randaugment_magnitude,
        erasing_probability=data.erasing_probability,
        mixup_alpha=data.mixup_alpha,
        cutmix_alpha=data.cutmix_alpha,
        label_smoothing=data.label_smoothing,
    )


def _open_images(data: DataConfig, cache_dir: pathlib.Path) -> images.AbstractImages:
    """Returns all images, those to be held out too unless they have their folders."""
    if not data.files:
        return images.load_digits(data.classes)
    return images.open_folders(
        data.files, cache_dir, classes=data.classes, skip_broken=data.skip_broken
    )


def _describe_left_out(
    found: images.AbstractImages,
    held_from: images.AbstractImages,
    is_held_out: np.ndarray,
) -> str:
    if held_from is found:
        num_equal, num_broken = 0, found.num_broken
    else:
        num_equal = int(is_held_out.sum())
        num_broken = found.num_broken + held_from.num_broken
    text = ""
    if num_equal:
        text += f"; {num_equal:,} left out, as they are held out too"
    if num_broken:
        text += f"; {num_broken:,} broken files left out"
    return text


def _check_size(
    data: DataConfig, found: images.AbstractImages, trained: np.ndarray
) -> None:
    if len(trained) == 0:
        raise ValueError(
            f"All {len(found.labels)} images of {found.name} are held out, and none is"
            " left to train on. Add images, or change"
            f" data.validation_fraction={data.validation_fraction} or"
            f" data.validation_files={data.validation_files}."
        )
