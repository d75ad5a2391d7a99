"""The cache on disk. An entry is complete or it is not there.

Entries are built beside their place and renamed into it, by one process at a time: the
others wait for it and take what it made. A process that is killed leaves a partial
entry under another name, which the next one to build something removes.
"""

import contextlib
import fcntl
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

DEFAULT_DIRECTORY = "~/.cache/sbp-jax"
_PARTIAL = ".partial-"


def directory(cache_dir: str | None) -> pathlib.Path:
    """Returns the cache that a run is to use, `DEFAULT_DIRECTORY` if it names none."""
    return pathlib.Path(cache_dir or DEFAULT_DIRECTORY).expanduser()


def entry(
    directory: pathlib.Path, name: str, build: Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """Returns the path of a cache entry, after building it if it is not there.

    Args:
        directory: The cache; made if it is not there.
        name: What the entry is and everything it depends on, as a file name.
        build: Writes the entry, a file or a folder, at the path it gets. What it raises
            passes through, except an `OSError` about the cache itself.

    Raises:
        ValueError: If the cache cannot be written.
    """
    path = directory / name
    if path.exists():
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            if not path.exists():
                _build(path, build)
    except OSError as error:
        raise ValueError(
            f"The data cache '{directory}' cannot be written: {error.strerror or error}"
            f" ('{error.filename or name}'). Set data.cache_dir to a folder that can,"
            " with room for the tokens of the corpus."
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock that the system takes back from a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: pathlib.Path, build: Callable[[pathlib.Path], object]) -> None:
    for partial in path.parent.glob(f"{_PARTIAL}*"):  # the lock is ours: left behind
        shutil.rmtree(partial)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=path.parent))
    try:
        build(partial / path.name)
        (partial / path.name).rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what went wrong before matters
