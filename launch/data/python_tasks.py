"""The embedded tasks for classifiers of text: what is what in Python's own source.

Samples are some lines of a package of the standard library each, in the order of the
files. Their class is the package; or each word of them has as label what
`tokenize` takes it for, with keywords apart from names. What is inside of strings and
comments is cut into words, which do not tell of themselves where they stand. Of a file
all samples are held out, or none: what is learned of a file must not help.
"""

import hashlib
import io
import keyword
import pathlib
import sysconfig
import token as token_kinds
import tokenize
from collections.abc import Iterator

from launch.data import python_docs
from launch.data.labelled_texts import Example, LabelledTexts

# Those that every installation has, and of which there are a thousand lines or more.
PACKAGES = tuple(
    "asyncio email http importlib logging multiprocessing unittest urllib xml"
    " xmlrpc".split()
)
LINES_PER_SAMPLE = 10
WORDS_PER_SAMPLE = 48


def packages() -> LabelledTexts:
    """Returns pieces of source, and which of the `PACKAGES` each is from.

    Raises:
        ValueError: If this installation has not the source of all of them.
    """
    return LabelledTexts(
        name="packages of Python's standard library",
        fingerprint=f"packages {_fingerprint()}",
        examples=_package_examples,
    )


def token_kinds_of_source() -> LabelledTexts:
    """Returns pieces of source as words, and what kind of token each is of."""
    return LabelledTexts(
        name="tokens of Python's standard library",
        fingerprint=f"tokens {_fingerprint()}",
        examples=_token_examples,
    )


def _files() -> list[tuple[str, pathlib.Path]]:
    """Returns the package and the path of each file."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in python_docs.source_files()]
    files = [(path.parts[0], root / path) for path in paths]
    files = [(package, path) for package, path in files if package in PACKAGES]
    if missing := sorted(set(PACKAGES) - {package for package, _ in files}):
        raise ValueError(
            "The embedded task needs the source of Python's standard library, but"
            f" '{root}' lacks that of {', '.join(missing)}. Name your own samples with"
            " data.files, or use a Python that comes with its source."
        )
    return files


def _fingerprint() -> str:
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for package, path in _files():
        digest.update(package.encode() + path.read_bytes())
    return digest.hexdigest()


def _package_examples() -> Iterator[Example]:
    for package, path in _files():
        source = path.read_text(encoding="utf-8")
        lines = [line for line in source.splitlines() if line.strip()]
        for start in range(0, len(lines), LINES_PER_SAMPLE):
            text = "\n".join(lines[start : start + LINES_PER_SAMPLE])
            yield Example(f"{path}, line {start}", (text,), (package,), source)


def _token_examples() -> Iterator[Example]:
    for _, path in _files():
        source = path.read_text(encoding="utf-8")
        words = list(_words(source))
        for start in range(0, len(words), WORDS_PER_SAMPLE):
            texts, labels = zip(*words[start : start + WORDS_PER_SAMPLE], strict=True)
            yield Example(f"{path}, word {start}", texts, labels, source)


def _words(source: str) -> Iterator[tuple[str, str]]:
    """Yields each word of a module and its kind."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = token_kinds.tok_name[token.type]
        if keyword.iskeyword(token.string):
            kind = "KEYWORD"
        elif "STRING" in kind:  # newer Pythons cut some strings into parts
            kind = "STRING"
        for word in token.string.split():
            yield word, kind
