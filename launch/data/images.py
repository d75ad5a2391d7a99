"""Labelled images: folders of image files, or the digits that scikit-learn carries.

A folder has a folder per class, whose files are its images. Every file is read once,
before it is trained on, to find those that are broken and those that are equal.
"""

import abc
import concurrent.futures
import dataclasses
import hashlib
import io
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from launch.data import cache

_NUM_NAMED = 5  # of many files, in an error
_DIGITS = tuple("0123456789")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractImages(abc.ABC):
    """Images with a label each.

    Attributes:
        name: For people.
        classes: Names, by label.
        labels: int64 ``(num_images,)``.
        hashes: uint64 ``(num_images,)``: equal images have equal ones.
        num_broken: Files that were left out.
    """

    name: str
    classes: tuple[str, ...]
    labels: np.ndarray
    hashes: np.ndarray
    num_broken: int = 0

    @abc.abstractmethod
    def open(self, index: int) -> Image.Image:
        """Returns an image; that of a file is not decoded yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayImages(AbstractImages):
    """Images in memory: gray uint8 ``(num_images, height, width)``."""

    pixels: np.ndarray

    def open(self, index: int) -> Image.Image:
        """Returns an image."""
        return Image.fromarray(self.pixels[index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileImages(AbstractImages):
    """Images in files, by their paths."""

    paths: tuple[str, ...]

    def open(self, index: int) -> Image.Image:
        """Returns an image, not decoded yet."""
        return Image.open(self.paths[index])


def fingerprint(images: AbstractImages) -> str:
    """Returns a digest of the images, their labels and classes."""
    digest = hashlib.sha256(json.dumps(images.classes).encode())
    digest.update(images.hashes.tobytes() + images.labels.tobytes())
    return digest.hexdigest()


def load_digits(classes: Sequence[str] | None = None) -> ArrayImages:
    """Returns 1,797 handwritten digits, gray, 8 by 8 pixels.

    Args:
        classes: Their names, by label; the ten digits are among them. None: these.

    Raises:
        ValueError: If ``classes`` lack a digit, or scikit-learn, which carries them, is
            not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            "Without data.files the images are the digits in scikit-learn, which is"
            " not installed. Install the extra 'vision', pip install -e '.[vision]',"
            " or name your own folders of images."
        ) from error
    names = tuple(classes or _DIGITS)
    if lacking := [digit for digit in _DIGITS if digit not in names]:
        raise ValueError(
            f"data.classes names {len(names)} classes, but not {_and_more(lacking)}."
            " Without data.files the images are handwritten digits. Name your own"
            " folders of images in data.files, or leave data.classes out."
        )
    found = datasets.load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)
    hashes = [_hash(image.tobytes()) for image in pixels]
    return ArrayImages(
        name="the digits of scikit-learn",
        classes=names,
        labels=np.array([names.index(str(digit)) for digit in found.target]),
        hashes=np.array(hashes, np.uint64),
        pixels=pixels,
    )


def open_folders(
    folders: Sequence[str],
    cache_dir: pathlib.Path,
    *,
    classes: Sequence[str] | None = None,
    skip_broken: bool = False,
) -> FileImages:
    """Returns the images in some folders, after reading each once.

    Args:
        folders: Each with a folder per class.
        cache_dir: Where it is kept which files are broken.
        classes: Their names, by label. None: those that the folders have, sorted.
        skip_broken: Whether to leave out broken files rather than to fail.

    Raises:
        FileNotFoundError: If there are no such folders: all of them are named.
        ValueError: If a folder has no class, a class no image or a name that is not
            among ``classes``, or a file is broken; several of them are named.
    """
    paths, names = _list(folders)
    if unknown := sorted(set(names) - set(classes or names)):
        raise ValueError(
            f"{_and_more(folders)} has classes that are not among the"
            f" {len(classes or names)} known ones: {_and_more(unknown)}. Rename or"
            " remove these folders, or name all classes in data.classes."
        )
    classes = tuple(classes or sorted(set(names)))
    hashes, reasons = _check(paths, cache_dir)
    kept = np.flatnonzero(reasons == "")
    broken = np.flatnonzero(reasons != "")
    if len(broken) and not skip_broken:
        listed = [f"{paths[i]}: {reasons[i]}" for i in broken[: _NUM_NAMED + 1]]
        raise ValueError(
            f"{len(broken)} of {len(paths)} image files cannot be read:"
            f" {_and_more(listed, len(broken))}. Repair or remove them, or set"
            " data.skip_broken=True to do without."
        )
    if lost := sorted(set(names) - {names[i] for i in kept}):
        raise ValueError(
            f"Every file of the classes {_and_more(lost)} is broken. Repair the files,"
            " or remove the folders."
        )
    label_of = {name: label for label, name in enumerate(classes)}
    return FileImages(
        name=_and_more(folders),
        classes=classes,
        labels=np.array([label_of[names[i]] for i in kept], np.int64),
        hashes=hashes[kept],
        paths=tuple(str(paths[i]) for i in kept),
        num_broken=len(broken),
    )


def why_broken(path: pathlib.Path) -> str:
    """Returns why a file is no image that can be read, or an empty string."""
    return _read(path)[1]


def _list(folders: Sequence[str]) -> tuple[list[pathlib.Path], list[str]]:
    """Returns all files and the class of each."""
    roots = [pathlib.Path(folder) for folder in folders]
    if missing := [str(root) for root in roots if not root.is_dir()]:
        raise FileNotFoundError(
            f"data.files or data.validation_files names {len(missing)} of {len(roots)}"
            f" folders that do not exist: {_and_more(missing)}. A folder of images has"
            " a folder per class; paths are relative to"
            f" '{pathlib.Path.cwd()}'."
        )
    paths, names, empty = [], [], []
    for root in roots:
        found = sorted(path for path in root.iterdir() if path.is_dir())
        found = [path for path in found if not path.name.startswith(".")]
        if not found:
            raise ValueError(
                f"'{root}' has no folders, but the folders in it are the classes. Put"
                " the images of each class into a folder of their own, for example"
                f" '{root / 'cat' / '1.jpg'}'."
            )
        for folder in found:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            files = [path for path in files if not path.name.startswith(".")]
            paths += files
            names += [folder.name] * len(files)
            empty += [] if files else [str(folder)]
    if empty:
        raise ValueError(
            f"{len(empty)} class folders hold no image: {_and_more(empty)}. Add images,"
            " or remove the folders."
        )
    return paths, names


def _check(
    paths: Sequence[pathlib.Path], cache_dir: pathlib.Path
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hash of each file, and why it is broken, or an empty string."""
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for path in paths:
        stat = path.stat()
        key.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    name = f"images-{key.hexdigest()[:16]}.npz"
    entry = cache.entry(cache_dir, name, lambda entry: _write(entry, paths))
    with np.load(entry) as arrays:
        return arrays["hashes"], arrays["reasons"]


def _write(entry: pathlib.Path, paths: Sequence[pathlib.Path]) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        hashes, reasons = zip(*pool.map(_read, paths), strict=True)
    with entry.open("wb") as file:
        np.savez(file, hashes=np.array(hashes, np.uint64), reasons=np.array(reasons))


def _read(path: pathlib.Path) -> tuple[int, str]:
    """Returns the hash of a file, and why it is broken, or an empty string."""
    content = b""
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            if image.mode.startswith(("I", "F")):
                return 0, f"more than 8 bits per channel, mode {image.mode!r}"
            image.draft("RGB", (1, 1))  # an eighth of a JPEG is enough
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).split(" <")[0]  # without the address of a buffer
        return 0, reason or type(error).__name__
    return _hash(content), ""


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _and_more(names: Sequence[str], num: int | None = None) -> str:
    more = (num or len(names)) - _NUM_NAMED
    listed = ", ".join(f"'{name}'" for name in names[:_NUM_NAMED])
    return f"{listed} and {more} more" if more > 0 else listed
