"""A corpus of whole texts, character for character, for models of the next token.

A text file is a document, and so is the string under ``text`` of each line in a file of
JSON lines; `END_OF_TEXT` in either ends a document as well. A long document is cut
into pieces at the ends of lines, so that a single book can be trained on and held out
in parts.
"""

import pathlib
from collections.abc import Iterable, Iterator, Sequence

from launch.data import python_docs, text_files
from launch.data.text_files import Corpus

END_OF_TEXT = "<|endoftext|>"
MAX_CHARACTERS = 2**15  # of a document


def open_texts(
    files: Sequence[str], cache_dir: pathlib.Path, field: str = "data.files"
) -> Corpus:
    """Returns the corpus made of ``files``, without reading it as text yet.

    Args:
        files: Paths or patterns, see `text_files.expand`. None: the source of Python's
            standard library.
        cache_dir: Where the digests of large files are kept.
        field: That the files are from, for messages.

    Raises:
        FileNotFoundError: If files are missing: all of them are named.
        ValueError: If files are empty, or folders, or cannot be read.
    """
    if files:
        paths = text_files.expand(files, field)
        name = text_files.describe(paths)
    else:
        sources = python_docs.source_files()
        paths = [path for path in sources if path.stat().st_size > 0]
        name = "the source of Python's standard library"
    return Corpus(
        name=name,
        files=tuple(paths),
        fingerprint=text_files.fingerprint(paths, cache_dir, reader=__file__),
        read=_documents,
    )


def cut(lines: Iterable[str]) -> Iterator[str]:
    r"""Yields the documents in a stream of lines.

    Example:
        >>> list(cut(["One.\n", "Two.\n", "<|endoftext|>\n", "Three."]))
        ['One.\nTwo.\n', 'Three.']
    """
    parts: list[str] = []
    size = 0
    for line in lines:
        *ended, rest = line.split(END_OF_TEXT)
        for text in ended:
            yield "".join([*parts, text])
            parts, size = [], 0
        parts.append(rest.removeprefix("\n") if ended else rest)
        size += len(rest)
        if size >= MAX_CHARACTERS:
            yield "".join(parts)
            parts, size = [], 0
    yield "".join(parts)


def _documents(path: pathlib.Path) -> Iterator[list[str]]:
    """Yields the documents, each a list of one string."""
    for text in _texts(path):
        if text.strip():
            yield [text]


def _texts(path: pathlib.Path) -> Iterator[str]:
    if not text_files.is_json(path):
        yield from cut(line for _, line in text_files.lines(path))
        return
    for text in text_files.json_texts(path):
        yield from cut(text.splitlines(keepends=True))
