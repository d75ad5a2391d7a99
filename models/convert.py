"""Parameters from and to published (Hugging Face) checkpoints, one tensor at a time.

No arithmetic is done: values go in and come out bit by bit, unless the dtype is to be
another. `models.published` has the names, `models.published_config` the sizes.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import published_config, published_writer
from models.layers import DTYPES
from models.published import PUBLISHED, Published, Shape, Table
from models.published_files import (
    CONFIG_FILE,
    PublishedFiles,
    Tensor,
)
from models.stacked import Params, combine, path_of, select

Read = Callable[[str], np.ndarray]
Tensors = Mapping[str, Tensor]
Bounds = tuple[tuple[int, int], ...]

_MAX_NAMES = 12  # of each kind, so that a message fits a screen
_MAX_PIECE_BYTES = 64 * 2**20  # of several layers, read at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How the tensors of a checkpoint differ from those that a model needs.

    Attributes:
        missing: Names that the model needs and the checkpoint lacks.
        unexpected: Names of the checkpoint that the model has no use for.
        misshapen: A sentence for each tensor of another shape.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]


def read_config(files: PublishedFiles) -> tuple[str, Any]:
    """Returns the name of the family and the config of a published checkpoint.

    Its parameters have the dtype of the tensors.

    Raises:
        ValueError: If the model has a part that ours lacks, or tensors of several
            dtypes, or of one that is no float.
    """
    name, config = published_config.from_published(files.config)
    used = _needed(PUBLISHED[name].table(config), config.num_layers)
    tensors = tensors_by_name(name, files)
    dtypes = {tensors[n].dtype for n in used if n in tensors}
    if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        raise ValueError(
            f"The tensors in '{files.directory}' are of {', '.join(sorted(dtypes))}."
            f" Use a checkpoint of one dtype, of {', '.join(DTYPES)}."
        )
    (dtype,) = dtypes or {config.param_dtype}
    return name, dataclasses.replace(config, param_dtype=dtype)


def load(
    name: str,
    config: Any,
    files: PublishedFiles,
    *,
    abstract: Params,
    layer_order: tuple[int, ...] | None = None,
    initial: Params | None = None,
    allow_unexpected: bool = False,
) -> Params:
    """Returns the parameters of a published checkpoint, laid out as asked.

    Each device gets its part as it is read: the host never holds more than one tensor
    of the checkpoint, the same in our form, and what of it a device has.

    Args:
        name: Family, as in `models.MODELS`.
        config: Of the model to load into.
        files: The checkpoint.
        abstract: Shape, dtype and sharding of each parameter, blocks stacked.
        layer_order: See `StackedModel.layer_order`; None for that of the model.
        initial: Values of the parameters that the checkpoint lacks, such as the head
            of a new task. None: lacking one is an error.
        allow_unexpected: Whether tensors without a use here are passed over.

    Raises:
        ValueError: If the checkpoint does not fit; everything that does not is named.
    """
    table = PUBLISHED[name].table(config)
    tensors = tensors_by_name(name, files)
    order = tuple(range(config.num_layers)) if layer_order is None else layer_order
    problems = _problems(
        compare(table, abstract, tensors, num_layers=config.num_layers)
    )
    if initial is not None:
        problems.pop("missing", None)
    if allow_unexpected:
        problems.pop("unexpected", None)
    if problems:
        raise ValueError(
            f"The checkpoint in '{files.directory}' does not fit this {name}:\n"
            + "\n".join(line for lines in problems.values() for line in lines)
            + "\nUse the config it was saved with, or allow what is missing"
            " (--allow_missing) or unexpected (--allow_unexpected)."
        )

    def is_there(path: str) -> bool:
        layers = order if path.startswith("blocks/") else None
        return all(name in tensors for name in _names_of(table[path], layers))

    found = stream(table, tensors, select(abstract, is_there), layer_order=order)
    if initial is None:
        return found
    return combine(found, select(initial, lambda path: not is_there(path)))


def stream(
    table: Table, tensors: Tensors, abstract: Params, *, layer_order: tuple[int, ...]
) -> Params:
    """Returns parameters, laid out as asked, of tensors that are all there.

    Args:
        table: Of the model.
        tensors: By canonical name.
        abstract: Shape, dtype and sharding of each parameter, blocks stacked.
        layer_order: See `StackedModel.layer_order`.
    """

    def make(key_path: tuple, leaf: Any) -> jax.Array:
        path = path_of(key_path)
        layers = layer_order if path.startswith("blocks/") else None
        return _stream(table[path], leaf, layers, lambda n: tensors[n].read())

    return jax.tree.map_with_path(make, abstract)


def compare(
    table: Table, shapes: Params, tensors: Tensors, *, num_layers: int
) -> Mismatch:
    """Returns how tensors differ from those that parameters of these shapes need.

    Args:
        table: Of the model.
        shapes: The parameters as anything with shapes, blocks stacked.
        tensors: By canonical name.
        num_layers: Of the model.
    """
    needed = _needed(table, num_layers)
    expected: dict[str, Shape] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        expected |= needed_shapes(table, path_of(key_path), leaf, num_layers)
    return Mismatch(
        missing=tuple(name for name in needed if name not in tensors),
        unexpected=tuple(name for name in tensors if name not in needed),
        misshapen=tuple(
            f"{name} has shape {tensors[name].shape}, but the model needs {shape}."
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ),
    )


def needed_shapes(
    table: Table, path: str, leaf: Any, num_layers: int
) -> dict[str, Shape]:
    """Returns the shapes of the tensors that make up one parameter, by name.

    Args:
        table: Of the model.
        path: Of the parameter.
        leaf: Anything with its shape and dtype, a block's stacked.
        num_layers: Of the model.
    """
    is_block = path.startswith("blocks/")
    one = jax.ShapeDtypeStruct(leaf.shape[is_block:], leaf.dtype)
    theirs = jax.eval_shape(table[path].form.to_theirs, one)
    return {
        name: tensor.shape
        for published in _each(table[path], range(num_layers) if is_block else None)
        for name, tensor in zip(published.names, theirs, strict=True)
    }


def tensors_by_name(name: str, files: PublishedFiles) -> dict[str, Tensor]:
    """Returns the tensors that are parameters, by canonical name."""
    published = PUBLISHED[name]
    names = published.canonical_names(files.tensors)
    return {
        canonical: files.tensors[given]
        for given, canonical in names.items()
        if not published.is_ignored(canonical)
    }


def save(
    name: str,
    config: Any,
    params: Params,
    directory: str,
    *,
    classes: Sequence[str] | None = None,
    max_file_bytes: int = 2 * 1024**3,
) -> None:
    """Writes parameters as a checkpoint that `transformers` loads.

    Args:
        name: Family, as in `models.MODELS`.
        config: Of the model.
        params: Its parameters, blocks stacked in the order of the model.
        directory: To make, or an empty one.
        classes: Names of the classes of a classifier; None if they have none.
        max_file_bytes: Of one file of weights; the host holds as much at once.

    Raises:
        ValueError: If the published model has no such variant.
        FileExistsError: If there is something in the directory.
    """
    values = published_config.to_published(name, config, classes)
    table = PUBLISHED[name].table(config)
    path = pathlib.Path(directory)
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"'{path}' is not empty. Name a new directory.")
    path.mkdir(parents=True, exist_ok=True)
    values["dtype"] = config.param_dtype
    (path / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
    published_writer.write(path, to_published(table, params), max_file_bytes)


def to_params(table: Table, read: Read, shapes: Params) -> Params:
    """Returns parameters on the host, made of published tensors.

    Args:
        table: Of the model.
        read: Returns the published tensor of a name.
        shapes: The parameters as anything with shapes, blocks stacked.
    """

    def make(key_path: tuple, leaf: Any) -> np.ndarray:
        path = path_of(key_path)
        if not path.startswith("blocks/"):
            return _to_ours(table[path], read, leaf.shape)
        layers = _each(table[path], range(leaf.shape[0]))
        return np.stack([_to_ours(each, read, leaf.shape[1:]) for each in layers])

    return jax.tree.map_with_path(make, shapes)


def to_published(table: Table, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the published tensors of parameters, by name."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(key_path)
        is_block = path.startswith("blocks/")
        layers = _each(table[path], range(len(leaf)) if is_block else None)
        for layer, published in enumerate(layers):
            value = np.asarray(leaf[layer] if is_block else leaf)
            yield from zip(
                published.names, published.form.to_theirs(value), strict=True
            )


def _needed(table: Table, num_layers: int) -> dict[str, None]:
    """Returns all names of a table, in its order."""
    names: dict[str, None] = {}
    for path, published in table.items():
        layers = range(num_layers) if path.startswith("blocks/") else None
        names |= dict.fromkeys(_names_of(published, layers))
    return names


def _problems(mismatch: Mismatch) -> dict[str, list[str]]:
    """Returns the lines that describe each kind of mismatch."""
    found = {}
    for kind, items in dataclasses.asdict(mismatch).items():
        if items:
            title = "of another shape" if kind == "misshapen" else kind
            found[kind] = [f"  {len(items)} {title}:"]
            found[kind] += [f"    {item}" for item in items[:_MAX_NAMES]]
            if len(items) > _MAX_NAMES:
                found[kind].append(f"    ... and {len(items) - _MAX_NAMES} more")
    return found


def _stream(
    published: Published, leaf: Any, layers: tuple[int, ...] | None, read: Read
) -> jax.Array:
    """Returns one parameter, of which each device gets its own part as it is read."""
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(
        leaf.shape
    ).items():
        cut = zip(index, leaf.shape, strict=True)
        key = tuple(part.indices(size)[:2] for part, size in cut)
        holders.setdefault(key, []).append(device)
    parts = []
    for bounds, devices in holders.items():
        pieces: list[list[jax.Array]] = [[] for _ in devices]
        for values in _read_part(published, leaf, layers, bounds, read):
            for device, held in zip(devices, pieces, strict=True):
                held.append(jax.device_put(values, device))
            jax.block_until_ready(pieces)  # only then is the host's copy let go
        parts += [h[0] if len(h) == 1 else jnp.concatenate(h) for h in pieces]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _read_part(
    published: Published,
    leaf: Any,
    layers: tuple[int, ...] | None,
    bounds: Bounds,
    read: Read,
) -> Iterator[np.ndarray]:
    """Yields a part of a parameter, some layers at a time."""
    slices = tuple(slice(*bound) for bound in bounds)
    if layers is None:
        yield _to_ours(published, read, leaf.shape)[slices].astype(leaf.dtype)
        return
    sizes = [stop - start for start, stop in bounds[1:]]
    num_bytes = math.prod(sizes) * leaf.dtype.itemsize
    held, num = layers[slices[0]], max(1, _MAX_PIECE_BYTES // num_bytes)
    for chosen in (held[first : first + num] for first in range(0, len(held), num)):
        values = np.zeros((len(chosen), *sizes), leaf.dtype)
        for place, each in enumerate(chosen):
            if each >= 0:
                (one,) = _each(published, (each,))
                values[place] = _to_ours(one, read, leaf.shape[1:])[slices[1:]]
        yield values


def _each(published: Published, layers: Any) -> Iterator[Published]:
    """Yields the entry with the index of each layer in its names; None: as it is."""
    if layers is None:
        yield published
        return
    for layer in layers:
        names = tuple(name.replace("*", str(layer)) for name in published.names)
        yield Published(names, published.form)


def _names_of(published: Published, layers: Any) -> list[str]:
    used = None if layers is None else [layer for layer in layers if layer >= 0]
    return [name for each in _each(published, used) for name in each.names]


def _to_ours(published: Published, read: Read, shape: Shape) -> np.ndarray:
    return published.form.to_ours([read(name) for name in published.names], shape)
