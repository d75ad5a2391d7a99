"""The embedded corpus: the prose that every Python installation carries.

The topics of the language reference, as `help()` shows them, and the docstrings of the
standard library, read from its source without importing it. A topic is a document, and
so are the docstrings of a module, in the order of the source. Code, doctests, tables
and markup are left out; what remains are paragraphs that end with a full stop.
"""

import ast
import hashlib
import importlib
import inspect
import pathlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator

# Not prose about the language, or not there in every installation.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idle_test lib2to3 turtledemo __phello__"
    " pydoc_data".split()
)
MIN_WORDS = 4  # of a paragraph
MIN_PROSE = 0.7  # of a paragraph's words are plain words

_RULE = re.compile(r"\s*([-=~^*#+`'\"_.])\1{2,}\s*")
_NOT_PROSE = re.compile(r"\s*(>>>|\.\.\s|[|+][-=|+ ]|\$ |@[a-z]+$)")
_ITEM = re.compile(r"\s*(?:[-*•]|\(?\w[.)]|\d+[.)]|:\w+[^:]*:|@\w+)\s+")
_WORD = re.compile(r"[(\[\"'“‘]*[A-Za-z]+(?:['’-][A-Za-z]+)*[.,;:!?)\]\"'”’]*")
_MARKUP = (
    (re.compile(r":[\w:+-]+:`~?([^`]+)`"), r"\1"),  # :class:`Path`
    (re.compile(r"``(.+?)``|`([^`']+)[`']_{0,2}"), r"\1\2"),  # ``x``, `x`, `x'
    (re.compile(r"(?<!\w)(\*{1,2})([^\s*](?:[^*]*[^\s*])?)\1(?!\w)"), r"\2"),  # *x*
    (re.compile(r"\[\d+\]|\|\w*\||:$"), ""),  # footnotes, substitutions
    (re.compile(r"--+|—"), " - "),
    (re.compile(r"\s+"), " "),
)


def source_files() -> list[pathlib.Path]:
    """Returns the source files of the standard library, in a fixed order."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if SKIPPED_FOLDERS.isdisjoint(path.parts)]
    return [root / path for path in sorted(kept)]


def cache_name() -> str:
    """Returns a file name that changes when the installation or this module does."""
    digest = hashlib.sha256(pathlib.Path(__file__).read_bytes())
    for path in source_files():
        digest.update(path.read_bytes())
    digest.update(repr(sorted(_topics().items())).encode())
    return f"python-{platform.python_version()}-docs-{digest.hexdigest()[:16]}.txt"


def write(path: pathlib.Path) -> None:
    """Writes the corpus as text: a line per paragraph, a blank one between documents.

    Raises:
        ValueError: If this installation has no prose.
    """
    num_documents = 0
    with path.open("w", encoding="utf-8") as file:
        for paragraphs in _documents():
            file.write("\n".join(paragraphs) + "\n\n")
            num_documents += 1
    if num_documents < 100:
        raise ValueError(
            "The embedded corpus needs the source of Python's standard library, but"
            f" '{sysconfig.get_path('stdlib')}' has docstrings in only {num_documents}"
            " files. Name your own text with data.files, or use a Python that comes"
            " with its source."
        )


def _documents() -> Iterator[list[str]]:
    for _, text in sorted(_topics().items()):
        # Sphinx renders ``code`` as "code".
        if paragraphs := clean(re.sub(r'"([^"\n]+)"', r"\1", text)):
            yield paragraphs
    for path in source_files():
        paragraphs = [
            paragraph
            for docstring in _docstrings(path.read_bytes())
            for paragraph in clean(docstring)
        ]
        if paragraphs:
            yield paragraphs


def _topics() -> dict[str, str]:
    # Data, half a megabyte of it: imported when the corpus is wanted.
    return importlib.import_module("pydoc_data.topics").topics


def _docstrings(source: bytes) -> Iterator[str]:
    """Yields the docstrings of a module, its classes and functions, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in strings that are not ours
        nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            if docstring := ast.get_docstring(node):
                yield docstring
            nodes.extend(reversed(node.body))


def clean(text: str) -> list[str]:
    r"""Returns the prose in a docstring, a line per paragraph.

    Example:
        >>> clean("Return the :class:`Path`\nof *name*::\n\n    x = path(name)\n")
        ['Return the Path of name.']
        >>> clean("Usage:\n\n>>> path('x')\nPath('x')\n")
        []
    """
    paragraphs = []
    code_indent: int | None = None
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        indent = _indent(block)
        if code_indent is not None and indent > code_indent:
            continue  # what follows a '::' and is indented is code
        code_indent = indent if block.rstrip().endswith("::") else None
        for lines in _items(block):
            if paragraph := _prose(" ".join(lines)):
                paragraphs.append(paragraph)
    return paragraphs


def _indent(block: str) -> int:
    lines = [line for line in block.split("\n") if line.strip()]
    return min((len(line) - len(line.lstrip()) for line in lines), default=0)


def _items(block: str) -> Iterator[list[str]]:
    """Yields the lines of each paragraph or list item, without code and rules."""
    lines: list[str] = []
    for line in block.split("\n"):
        if _NOT_PROSE.match(line):
            break  # the rest of a doctest is its output
        if _RULE.fullmatch(line):
            yield lines
            lines = []
        elif item := _ITEM.match(line):
            yield lines
            lines = [line[item.end() :]]
        else:
            lines.append(line)
    yield lines


def _prose(text: str) -> str | None:
    """Returns the text without markup, None if it is not made of words."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = text.strip(" :;,-")
    words = text.split()
    num_plain = sum(_WORD.fullmatch(word) is not None for word in words)
    if len(words) < MIN_WORDS or num_plain < MIN_PROSE * len(words):
        return None
    return text if text.rstrip("\"')]”’").endswith((".", "!", "?")) else text + "."
