"""Parameters from and to published checkpoints; `models.published` has the tables."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from models.published import Published, Table
from models.stacked import Params, path_of

Read = Callable[[str], np.ndarray]


def to_params(table: Table, read: Read, shapes: Params) -> Params:
    """Returns parameters made of published tensors.

    Args:
        table: Of the model.
        read: Returns the published tensor of a name.
        shapes: The parameters as anything with shapes, blocks stacked.
    """

    def make(key_path: tuple, leaf: Any) -> np.ndarray:
        path = path_of(key_path)
        published = table[path]
        if not path.startswith("blocks/"):
            return _to_ours(published, read, leaf.shape)
        return np.stack(
            [
                _to_ours(of_layer(published, layer), read, leaf.shape[1:])
                for layer in range(leaf.shape[0])
            ]
        )

    return jax.tree.map_with_path(make, shapes)


def to_published(table: Table, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the published tensors of parameters, by name."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(key_path)
        if not path.startswith("blocks/"):
            yield from _to_theirs(table[path], np.asarray(leaf))
        else:
            for layer, value in enumerate(leaf):
                yield from _to_theirs(of_layer(table[path], layer), np.asarray(value))


def of_layer(published: Published, layer: int) -> Published:
    """Returns the names of one layer."""
    names = tuple(name.replace("*", str(layer)) for name in published.names)
    return Published(names, published.form)


def _to_ours(published: Published, read: Read, shape: tuple[int, ...]) -> np.ndarray:
    return published.form.to_ours([read(name) for name in published.names], shape)


def _to_theirs(
    published: Published, value: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    yield from zip(published.names, published.form.to_theirs(value), strict=True)
