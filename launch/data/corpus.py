"""A corpus: files of text, read as documents of sentences.

In a text file a blank line ends a document. In a file of JSON lines each line is a
document, the string under ``text``. Either may be compressed with gzip. Files are
streamed: no more than a document is held at a time.
"""

import pathlib
import re
from collections.abc import Iterator, Sequence

from launch.data import cache, python_docs, text_files
from launch.data.text_files import Corpus

# Text without full stops, and books without blank lines, still make samples.
MAX_SENTENCE_WORDS = 100
MAX_DOCUMENT_SENTENCES = 1000

Document = list[str]

_SENTENCE_END = re.compile(
    r"(?:(?<![.!?…])[.!?…]++[\"'”’)\]»]*+(\s++)|[。！？]++[”’」』）]*+\s*+)(?=(\S))"
)
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|cf|e\.g|i\.e|approx|Figs?|figs?|pp|[A-Z])$"
    r"|^\s*\d{1,3}$"  # the number of a list item
)


def open_corpus(
    files: Sequence[str], cache_dir: pathlib.Path, field: str = "data.files"
) -> Corpus:
    """Returns the corpus made of ``files``, without reading it as text yet.

    Args:
        files: Paths, or patterns such as ``wiki/*.jsonl.gz``, whose files are sorted.
            None: the embedded corpus, `launch.data.python_docs`.
        cache_dir: Where the text of the embedded corpus is kept, and the digests of
            large files.
        field: That the files are from, for messages.

    Raises:
        FileNotFoundError: If files are missing: all of them are named.
        ValueError: If files are empty, or folders: all of them are named. If one cannot
            be read, or the cache not written.
    """
    if files:
        paths = text_files.expand(files, field)
        name = text_files.describe(paths)
    else:
        name = "the documentation of Python"
        paths = [cache.entry(cache_dir, python_docs.cache_name(), python_docs.write)]
    return Corpus(
        name=name,
        files=tuple(paths),
        fingerprint=text_files.fingerprint(paths, cache_dir, reader=__file__),
        read=_documents,
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


def _documents(path: pathlib.Path) -> Iterator[Document]:
    """Yields the documents, each a list of at least one sentence."""
    for text in _texts(path):
        sentences = split_sentences(text)
        for start in range(0, len(sentences), MAX_DOCUMENT_SENTENCES):
            yield sentences[start : start + MAX_DOCUMENT_SENTENCES]


def _words(text: str) -> list[str]:
    words = text.split()
    return [
        " ".join(words[start : start + MAX_SENTENCE_WORDS])
        for start in range(0, len(words), MAX_SENTENCE_WORDS)
    ]


def _texts(path: pathlib.Path) -> Iterator[str]:
    """Yields the text of each document."""
    if text_files.is_json(path):
        yield from text_files.json_texts(path)
        return
    block: list[str] = []
    for _, line in text_files.lines(path):
        block.append(line)
        if not line.strip():
            yield "".join(block)
            block = []
    yield "".join(block)
