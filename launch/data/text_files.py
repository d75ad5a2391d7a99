"""Files of text: finding them, telling whether they changed, reading them.

Files are streamed: no more than a line is held at a time.
"""

import dataclasses
import functools
import glob
import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence

from launch.data import cache

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
LARGE_FILE = 2**26  # bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files of text, read as documents.

    Attributes:
        name: For people.
        files: In the order in which they are read.
        fingerprint: Digest of the contents and of the code that reads them.
        read: Yields the documents of a file, each a list of strings.
    """

    name: str
    files: tuple[pathlib.Path, ...]
    fingerprint: str
    read: Callable[[pathlib.Path], Iterator[list[str]]]

    def documents(self) -> Iterator[list[str]]:
        """Yields the documents of all files.

        Raises:
            ValueError: If a file cannot be read as text or JSON lines, with the place,
                or holds no text.
        """
        for path in self.files:
            is_empty = True
            for document in self.read(path):
                is_empty = False
                yield document
            if is_empty:
                raise ValueError(
                    f"Data file '{path}' holds no text. Remove it from data.files."
                )


def expand(files: Sequence[str], field: str = "data.files") -> list[pathlib.Path]:
    """Returns the files that paths and patterns name.

    Args:
        files: Paths, or patterns such as ``wiki/*.jsonl.gz``, whose files are sorted.
        field: That they are from, for messages.

    Raises:
        FileNotFoundError: If files are missing: all of them are named.
        ValueError: If files are empty, or folders: all of them are named.
    """
    found = {file: sorted(glob.glob(file)) or [file] for file in files}
    paths = [pathlib.Path(path) for file in files for path in found[file]]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{field} names {len(missing)} of {len(paths)} files that do not exist:"
            f" {_list(missing)}. Paths are relative to '{pathlib.Path.cwd()}'."
        )
    if folders := [str(path) for path in paths if path.is_dir()]:
        raise ValueError(
            f"{field} names folders: {_list(folders)}. Name the files in them, for"
            f" example '{folders[0]}/*.txt'."
        )
    if empty := [str(path) for path in paths if path.stat().st_size == 0]:
        raise ValueError(
            f"{field} names empty files: {_list(empty)}. Remove them, or fill them."
        )
    return paths


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def describe(paths: Sequence[pathlib.Path]) -> str:
    """Returns a name for people."""
    return paths[0].name if len(paths) == 1 else f"{len(paths)} files"


def fingerprint(
    paths: Sequence[pathlib.Path], cache_dir: pathlib.Path, *, reader: str
) -> str:
    """Returns a digest of the files and of the code that reads them.

    Args:
        paths: The files.
        cache_dir: Where the digests of large files are kept.
        reader: ``__file__`` of the module.

    Raises:
        ValueError: If a file cannot be read, or the cache not written.
    """
    digest = hashlib.sha256()
    for code in (__file__, reader):
        digest.update(pathlib.Path(code).read_bytes())
    for path in paths:
        digest.update(f"{is_json(path)} {_digest(path, cache_dir)}\n".encode())
    return digest.hexdigest()


def _digest(path: pathlib.Path, cache_dir: pathlib.Path) -> str:
    """Returns a digest of the content; that of a large file is kept with its times."""
    stat = path.stat()
    if stat.st_size < LARGE_FILE:
        return _hash(path)
    times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
    identity = f"{path.resolve()} {stat.st_ino} {stat.st_size} {times}"
    name = f"digest-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    entry = cache.entry(cache_dir, name, lambda entry: entry.write_text(_hash(path)))
    return entry.read_text()


def _hash(path: pathlib.Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(
            f"Data file '{path}' cannot be read: {error.strerror}."
        ) from error


def is_json(path: pathlib.Path) -> bool:
    """Whether each line of the file is a JSON object."""
    return path.name.removesuffix(".gz").endswith(JSON_SUFFIXES)


def json_texts(path: pathlib.Path) -> Iterator[str]:
    """Yields the string under ``text`` in each line of a file of JSON lines.

    Raises:
        ValueError: If there is none, or the file cannot be read, with the place.
    """
    for number, line in lines(path):
        if line.strip():
            yield _json_text(path, number, line)


def _json_text(path: pathlib.Path, number: int, line: str) -> str:
    example = '{"text": "One document."}'
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{number}: not JSON: {error}. Each line of a '.jsonl' file is an"
            f" object such as {example}."
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        keys = list(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{path}:{number}: there is no string under the key 'text', only {keys}."
            f" Each line of a '.jsonl' file is an object such as {example}."
        )
    return record["text"]


def lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields the decoded lines of a file with their numbers, from 1.

    Raises:
        ValueError: If it cannot be read, or is not text, with the place.
    """
    compressed = path.name.endswith(".gz")
    opener = functools.partial(gzip.open if compressed else open, path, "rb")
    offset = 0
    try:
        with opener() as file:
            for number, line in enumerate(file, start=1):
                yield number, _decode(path, line, offset)
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"Data file '{path}' cannot be read after byte {offset}"
            f"{' of its decompressed text' if compressed else ''}: {error}."
        ) from error


def _decode(path: pathlib.Path, line: bytes, offset: int) -> str:
    bad = line.find(b"\0")
    if bad < 0:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            bad = error.start
        else:
            return text if offset else text.removeprefix("\ufeff")
    raise ValueError(
        f"Data file '{path}' is not text: at byte offset {offset + bad} there is"
        f" 0x{line[bad]:02x}. Text files are UTF-8 without NUL bytes; convert others,"
        " for example with iconv."
    )
