"""Predictions of ViT: the class of an image."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from launch import image_data, predictors
from launch.data import images
from launch.data.image_samples import ImageSamples, Recipe
from launch.predictors import Batch, Item, Record
from launch.trained import Trained


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassifier:
    """Asks for the class of an image.

    Attributes:
        recipe: How images are made to fit, which is as in the evaluation of the run.
        names: Of the classes.
        top_k: Classes to name.
    """

    recipe: Recipe
    names: Sequence[str]
    top_k: int

    def make(self, items: Sequence[Item]) -> tuple[Batch, Sequence[Any]]:
        """Returns the batch, and nothing to remember."""
        rows = np.arange(len(items))
        files = images.FileImages(
            name="images",
            classes=(),
            labels=rows,
            hashes=rows,
            paths=tuple(item.texts[0] for item in items),
        )
        samples = ImageSamples(
            recipe=self.recipe, images=files, indices=rows, seed=0, is_random=False
        )
        return {"images": samples.make(rows, rows)["images"]}, [None] * len(items)

    def head(self, model: Any, x: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        """Returns the best classes."""
        return predictors.best_of(model.logits(x), self.top_k)

    def describe(self, item: Item, memory: Any, row: Mapping[str, Any]) -> Record:
        """Returns the best class and the runners-up."""
        best = predictors.name_best(row, self.names, "label")
        return {"file": item.texts[0], **best[0], "best": best}


def classify_images(trained: Trained, top_k: int) -> ImageClassifier:
    """Returns what asks a ViT for the class of an image."""
    names = predictors.class_names(trained)
    return ImageClassifier(
        recipe=image_data.make_recipe(trained.config.data, trained.config.model),
        names=names,
        top_k=min(top_k, len(names)),
    )


def find_images(inputs: Sequence[str]) -> list[pathlib.Path]:
    """Returns files, and all those in folders, sorted; hidden ones are left out.

    Raises:
        FileNotFoundError: If some are missing; all of them are named.
        ValueError: If there is no file.
    """
    roots = [pathlib.Path(given) for given in inputs]
    if missing := [str(root) for root in roots if not root.exists()]:
        raise FileNotFoundError(
            f"--inputs names {len(missing)} of {len(roots)} files and folders that do"
            f" not exist: {', '.join(map(repr, missing))}. Paths are relative to"
            f" '{pathlib.Path.cwd()}'."
        )
    found = []
    for root in roots:
        inside = sorted(root.rglob("*")) if root.is_dir() else [root]
        found += [p for p in inside if p.is_file() and not p.name.startswith(".")]
    if not found:
        raise ValueError(
            f"--inputs={' '.join(inputs)} holds no file. Name images, or folders of"
            " them."
        )
    return found


@dataclasses.dataclass(slots=True)
class ImageReader:
    """Goes through image files and counts the broken ones that it skips.

    Attributes:
        paths: The files.
        skips_broken: Whether to go on after a broken one rather than to fail.
        num_broken: How many were skipped so far.
    """

    paths: Sequence[pathlib.Path]
    skips_broken: bool
    num_broken: int = 0

    def read(self) -> Iterator[Item]:
        """Yields the files that can be read.

        Raises:
            ValueError: If one cannot and is not to be skipped.
        """
        for path in self.paths:
            reason = images.why_broken(path)
            if not reason:
                yield Item(str(path), (str(path),))
            elif self.skips_broken:
                self.num_broken += 1
            else:
                raise ValueError(
                    f"'{path}' cannot be read: {reason}. Repair or remove it, or add"
                    " --skip_broken to do without such files."
                )
