"""Reads the files of a published (Hugging Face) checkpoint, one tensor at a time."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint, not read yet.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype.
        read: Returns its values.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedFiles:
    """A checkpoint directory, opened.

    Attributes:
        directory: Where it is.
        config: Values of ``config.json``.
        tensors: By the names in the files.
    """

    directory: pathlib.Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_published(directory: str) -> PublishedFiles:
    """Returns what a directory holds; of the weights only names and shapes are read.

    Args:
        directory: With ``config.json`` and the weights as ``model.safetensors``, or
            several files and their index, or where PyTorch is installed
            ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, or is a PyTorch one and there is no PyTorch.
    """
    path = pathlib.Path(directory)
    if not (path / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"'{path}' holds no {CONFIG_FILE}. Name the directory of a checkpoint in"
            " the format of Hugging Face."
        )
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        is_torch = file.suffix == ".bin"
        tensors |= _torch_tensors(file) if is_torch else _safetensors(file)
    return PublishedFiles(path, _read_json(path / CONFIG_FILE), tensors)


def read_preprocessor(directory: pathlib.Path) -> dict[str, Any]:
    """Returns how images are prepared for a model, {} if its checkpoint does not say.

    Raises:
        ValueError: If the file is damaged.
    """
    path = directory / PREPROCESSOR_FILE
    return _read_json(path) if path.is_file() else {}


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the weights, checked to be there."""
    for single, index in (
        (WEIGHTS_FILE, INDEX_FILE),
        (TORCH_FILE, TORCH_INDEX_FILE),
    ):
        if (path / single).is_file():
            return [path / single]
        if (path / index).is_file():
            names = sorted(set(_read_json(path / index)["weight_map"].values()))
            missing = [name for name in names if not (path / name).is_file()]
            if missing:
                raise FileNotFoundError(
                    f"'{path / index}' lists files that are not there:"
                    f" {', '.join(missing)}. Download them too."
                )
            return [path / name for name in names]
    raise FileNotFoundError(
        f"'{path}' holds no weights: none of {WEIGHTS_FILE}, {INDEX_FILE},"
        f" {TORCH_FILE} and {TORCH_INDEX_FILE}."
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON: {error}. Download it again.") from None
    if not isinstance(values, dict):
        raise ValueError(f"'{path}' is not a JSON object. Download it again.")
    return values


def _safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        return dict(_scan_safetensors(path))
    except SafetensorError as error:
        raise ValueError(f"'{path}' is damaged: {error}. Download it again.") from error


def _scan_safetensors(path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    file = safe_open(path, "np")  # stays open, its data mapped into memory
    for name in file.keys():
        part = file.get_slice(name)
        dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())

        read = functools.partial(file.get_tensor, name)
        yield name, Tensor(tuple(part.get_shape()), dtype, read)


def _torch_tensors(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"'{path}' is a file of PyTorch, which is not installed. Install it (pip"
            f" install torch), or use a checkpoint with {WEIGHTS_FILE}."
        ) from None
    values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def read(name: str) -> np.ndarray:
        value = values[name]
        if value.dtype == torch.bfloat16:  # unknown to NumPy itself
            return value.view(torch.int16).numpy().view(jnp.bfloat16)
        return value.numpy()

    return {
        name: Tensor(
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            functools.partial(read, name),
        )
        for name, value in values.items()
    }
