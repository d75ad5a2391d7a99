"""A corpus: files of text, read as documents of sentences.

In a text file a blank line ends a document. In a file of JSON lines each line is a
document, the string under ``text``. Either may be compressed with gzip. Files are
streamed: no more than a document is held at a time.
"""

import dataclasses
import functools
import glob
import gzip
import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence

from launch.data import cache, python_docs

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
# Text without full stops, and books without blank lines, still make samples.
MAX_SENTENCE_WORDS = 100
MAX_DOCUMENT_SENTENCES = 1000
LARGE_FILE = 2**26  # bytes

Document = list[str]
_Line = tuple[int, str]  # its number, from 1

_SENTENCE_END = re.compile(
    r"(?:(?<![.!?…])[.!?…]++[\"'”’)\]»]*+(\s++)|[。！？]++[”’」』）]*+\s*+)(?=(\S))"
)
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|cf|e\.g|i\.e|approx|Figs?|figs?|pp|[A-Z])$"
    r"|^\s*\d{1,3}$"  # the number of a list item
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files of text.

    Attributes:
        name: For people.
        files: In the order in which they are read.
        fingerprint: Digest of the contents and of this module.
    """

    name: str
    files: tuple[pathlib.Path, ...]
    fingerprint: str

    def documents(self) -> Iterator[Document]:
        """Yields the documents, each a list of at least one sentence.

        Raises:
            ValueError: If a file cannot be read as text or JSON lines, with the place,
                or holds no text.
        """
        for path in self.files:
            empty = True
            for text in _texts(path):
                sentences = split_sentences(text)
                for start in range(0, len(sentences), MAX_DOCUMENT_SENTENCES):
                    empty = False
                    yield sentences[start : start + MAX_DOCUMENT_SENTENCES]
            if empty:
                raise ValueError(
                    f"Data file '{path}' holds no text. Remove it from data.files."
                )


def open_corpus(files: Sequence[str], cache_dir: pathlib.Path) -> Corpus:
    """Returns the corpus made of ``files``, without reading it as text yet.

    Args:
        files: Paths, or patterns such as ``wiki/*.jsonl.gz``, whose files are sorted.
            None: the embedded corpus, `launch.data.python_docs`.
        cache_dir: Where the text of the embedded corpus is kept, and the digests of
            large files.

    Raises:
        FileNotFoundError: If files are missing: all of them are named.
        ValueError: If files are empty, or folders: all of them are named. If one cannot
            be read, or the cache not written.
    """
    if not files:
        path = cache.entry(cache_dir, python_docs.cache_name(), python_docs.write)
        return Corpus(
            name="the documentation of Python",
            files=(path,),
            fingerprint=_fingerprint([path], cache_dir),
        )
    paths = _expand(files)
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return Corpus(
        name=name, files=tuple(paths), fingerprint=_fingerprint(paths, cache_dir)
    )


def split_sentences(text: str) -> list[str]:
    r"""Returns the sentences of a document, on one line each.

    A sentence ends with the line that its full stop ends, or where the next word is not
    in lower case. A longer one than `MAX_SENTENCE_WORDS` is cut.

    Example:
        >>> split_sentences('See e.g. Fig. 2. "Why?" asked\nDr. Who.\nnobody knew')
        ['See e.g. Fig. 2.', '"Why?" asked Dr. Who.', 'nobody knew']
    """
    sentences = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        space, following = match.groups()
        if space is not None and "\n" not in space:
            before = text[max(start, match.start() - 10) : match.start()]
            is_abbreviated = text[match.start()] == "." and _ABBREVIATION.search(before)
            if following.islower() or is_abbreviated:
                continue
        sentences += _words(text[start : match.end()])
        start = match.end()
    return sentences + _words(text[start:])


def _words(text: str) -> list[str]:
    words = text.split()
    return [
        " ".join(words[start : start + MAX_SENTENCE_WORDS])
        for start in range(0, len(words), MAX_SENTENCE_WORDS)
    ]


def _expand(files: Sequence[str]) -> list[pathlib.Path]:
    """Returns the files that the paths and patterns name."""
    found = {file: sorted(glob.glob(file)) or [file] for file in files}
    paths = [pathlib.Path(path) for file in files for path in found[file]]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"data.files names {len(missing)} of {len(paths)} files that do not exist:"
            f" {_list(missing)}. Paths are relative to '{pathlib.Path.cwd()}'."
        )
    if folders := [str(path) for path in paths if path.is_dir()]:
        raise ValueError(
            f"data.files names folders: {_list(folders)}. Name the files in them, for"
            f" example '{folders[0]}/*.txt'."
        )
    if empty := [str(path) for path in paths if path.stat().st_size == 0]:
        raise ValueError(
            f"data.files names empty files: {_list(empty)}. Remove them, or fill them."
        )
    return paths


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _fingerprint(paths: Sequence[pathlib.Path], cache_dir: pathlib.Path) -> str:
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for path in paths:
        digest.update(f"{_is_json(path)} {_digest(path, cache_dir)}\n".encode())
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


def _is_json(path: pathlib.Path) -> bool:
    return path.name.removesuffix(".gz").endswith(JSON_SUFFIXES)


def _texts(path: pathlib.Path) -> Iterator[str]:
    """Yields the text of each document."""
    lines = _lines(path)
    if _is_json(path):
        for number, line in lines:
            if line.strip():
                yield _json_text(path, number, line)
        return
    block: list[str] = []
    for _, line in lines:
        block.append(line)
        if not line.strip():
            yield "".join(block)
            block = []
    yield "".join(block)


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


def _lines(path: pathlib.Path) -> Iterator[_Line]:
    """Yields the decoded lines of a file with their numbers."""
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
