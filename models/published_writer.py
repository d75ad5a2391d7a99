"""Writes the weights of a published (Hugging Face) checkpoint, some at a time."""

import json
import pathlib
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save_file

from models.published_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE


def write(
    path: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int
) -> None:
    """Writes tensors beside a ``config.json``, and an index if there are several files.

    Args:
        path: Directory.
        tensors: By name.
        max_bytes: Of one file; the host holds as much at once.
    """
    _name_files(path, list(_write_files(path, tensors, max_bytes)))


def _write_files(
    path: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int
) -> Iterator[list[tuple[str, int]]]:
    """Writes numbered files; yields the names and sizes of the tensors in each."""
    pending: dict[str, np.ndarray] = {}
    number = 0

    def write() -> list[tuple[str, int]]:
        written = {name: np.ascontiguousarray(value) for name, value in pending.items()}
        # Without this entry `transformers` takes the file for one of another library.
        save_file(written, path / f"{number}.safetensors", {"format": "pt"})
        # What `save_file` writes is for its owner alone.
        mode = (path / CONFIG_FILE).stat().st_mode
        (path / f"{number}.safetensors").chmod(mode)
        return [(name, value.nbytes) for name, value in pending.items()]

    for name, value in tensors:
        size = sum(held.nbytes for held in pending.values())
        if pending and size + value.nbytes > max_bytes:
            yield write()
            pending, number = {}, number + 1
        pending[name] = value
    yield write()


def _name_files(path: pathlib.Path, files: list[list[tuple[str, int]]]) -> None:
    """Gives the numbered files their published names, and writes their index."""
    if len(files) == 1:
        (path / "0.safetensors").rename(path / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (path / f"{number}.safetensors").rename(path / file)
        weight_map |= {name: file for name, _ in tensors}
    total = sum(size for tensors in files for _, size in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
