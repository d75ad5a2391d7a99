"""Texts with a label each, or with a label for each of their words.

A file of JSON lines has an object per text: ``{"text": "...", "label": "..."}``, where
``"text_pair"`` may be a second text, or ``{"words": ["...", ...], "labels": ["...",
...]}``. A file of comma- or tab-separated values has a header that names the columns
``text``, ``label`` and, if there is one, ``text_pair``. In a file of tagged words each
line is a word and, at its end, its label; an empty line ends a text (CoNLL). Any of
them may be compressed with gzip.
"""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launch.data import text_files

TABLE_SUFFIXES: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
TAGGED_SUFFIXES = (".conll", ".bio")


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One sample.

    Attributes:
        place: Where it stands, for messages.
        texts: A text or a pair of texts; or its words.
        labels: Of the text, one; or of each word.
        source: What it is a piece of: pieces of the same are held out together. None if
            it stands for itself.
    """

    place: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    source: str | None = None


Examples = Iterator[Example]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Samples in files, or those that are embedded.

    Attributes:
        name: For people.
        fingerprint: Digest of the contents and of the code that reads them.
        examples: Yields the samples. It raises `ValueError` if one is not of the right
            form, with the place.
    """

    name: str
    fingerprint: str
    examples: Callable[[], Examples]

    def documents(self) -> Iterator[tuple[str, ...]]:
        """Yields the texts of each sample, to train a tokenizer on."""
        for example in self.examples():
            yield example.texts

    def place_of(self, label: str) -> str:
        """Returns where a label stands first."""
        return next(found.place for found in self.examples() if label in found.labels)


def open_classified(
    files: Sequence[str], cache_dir: pathlib.Path, field: str
) -> LabelledTexts:
    """Returns texts, or pairs of them, with a label each.

    Args:
        files: Paths or patterns, see `text_files.expand`.
        cache_dir: Where the digests of large files are kept.
        field: That the files are from, for messages.

    Raises:
        FileNotFoundError: If files are missing: all of them are named.
        ValueError: If files are empty, or folders, or of another kind.
    """
    suffixes = [*text_files.JSON_SUFFIXES, *TABLE_SUFFIXES]
    paths = _expand(files, field, suffixes)
    return _open("classified", paths, cache_dir, _classified)


def open_tagged(
    files: Sequence[str], cache_dir: pathlib.Path, field: str
) -> LabelledTexts:
    """Returns words with a label each; see `open_classified`."""
    suffixes = [*text_files.JSON_SUFFIXES, *TAGGED_SUFFIXES]
    return _open("tagged", _expand(files, field, suffixes), cache_dir, _tagged)


def _expand(
    files: Sequence[str], field: str, suffixes: Sequence[str]
) -> list[pathlib.Path]:
    paths = text_files.expand(files, field)
    for path in paths:
        if not path.name.removesuffix(".gz").endswith(tuple(suffixes)):
            raise ValueError(
                f"{field} names '{path}', which is of an unknown kind. Labelled samples"
                f" are in files that end in {', '.join(suffixes)}, or in these and .gz."
            )
    return paths


def _open(
    kind: str,
    paths: Sequence[pathlib.Path],
    cache_dir: pathlib.Path,
    read: Callable[[pathlib.Path], Examples],
) -> LabelledTexts:
    digest = text_files.fingerprint(paths, cache_dir, reader=__file__)

    def examples() -> Examples:
        for path in paths:
            is_empty = True
            for example in read(path):
                is_empty = False
                yield example
            if is_empty:
                raise ValueError(
                    f"Data file '{path}' holds no sample. Fill it, or leave it out."
                )

    return LabelledTexts(
        name=text_files.describe(paths),
        fingerprint=f"{kind} {digest}",
        examples=examples,
    )


def _classified(path: pathlib.Path) -> Examples:
    form = '{"text": "A text.", "label": "its class"}'
    for place, record in records(path):
        texts = texts_of(place, record, form)
        yield Example(place, texts, (_label(place, record.get("label"), form),))


def texts_of(place: str, record: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """Returns the text of a record, or its pair of texts.

    Args:
        place: For messages.
        record: What a line holds.
        form: What a record should be like.

    Raises:
        ValueError: If there is no text.
    """
    given = [record.get("text"), record.get("text_pair")]
    texts = given if given[1] is not None else given[:1]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        wrong = (
            "text_pair" if isinstance(texts[0], str) and texts[0].strip() else "text"
        )
        raise ValueError(
            f"{place}: there is no text under {wrong!r}, but"
            f" {record.get(wrong)!r}. A sample is like {form}."
        )
    return tuple(str(text) for text in texts)


def words_of(place: str, record: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """Returns the words of a record; see `texts_of`."""
    words = record.get("words")
    if not isinstance(words, list) or not words:
        raise ValueError(
            f"{place}: there is no list of words under 'words', but {words!r}. A"
            f" sample is like {form}."
        )
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise ValueError(
                f"{place}: among 'words' there is {word!r}, which is no word. Leave"
                " it out, and its label."
            )
    return tuple(words)


def _tagged(path: pathlib.Path) -> Examples:
    if not text_files.is_json(path):
        yield from _tagged_lines(path)
        return
    form = '{"words": ["Two", "words"], "labels": ["number", "noun"]}'
    for place, record in records(path):
        words = words_of(place, record, form)
        labels = record.get("labels")
        if not isinstance(labels, list) or len(labels) != len(words):
            found = f"{len(labels)}" if isinstance(labels, list) else f"{labels!r}"
            raise ValueError(
                f"{place}: for {len(words)} words there must be as many 'labels', but"
                f" there are {found}. A sample is like {form}."
            )
        found_labels = tuple(_label(place, label, form) for label in labels)
        yield Example(place, words, found_labels)


def _tagged_lines(path: pathlib.Path) -> Examples:
    words: list[str] = []
    labels: list[str] = []
    start = 1
    for number, line in text_files.lines(path):
        fields = line.split()
        if len(fields) == 1:
            raise ValueError(
                f"{path}:{number}: the line holds {fields[0]!r} alone. A line is a word"
                " and its label, with a space or tab between them."
            )
        if fields:
            words.append(fields[0])
            labels.append(fields[-1])
            continue
        if words:
            yield Example(f"{path}:{start}", tuple(words), tuple(labels))
        words, labels, start = [], [], number + 1
    if words:
        yield Example(f"{path}:{start}", tuple(words), tuple(labels))


def records(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the content of each record of JSON lines or of a table.

    Raises:
        ValueError: If the file cannot be read, with the place.
    """
    suffix = pathlib.Path(path.name.removesuffix(".gz")).suffix
    if suffix in TABLE_SUFFIXES:
        yield from _table_rows(path, TABLE_SUFFIXES[suffix])
        return
    for number, line in text_files.lines(path):
        if line.strip():
            place = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{place}: not JSON: {error}. Each line is an object."
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{place}: a {type(record).__name__}. Each line is an object, in"
                    " braces."
                )
            yield place, record


def _table_rows(
    path: pathlib.Path, delimiter: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(
        (line for _, line in text_files.lines(path)), delimiter=delimiter
    )
    columns = reader.fieldnames or ()
    if "text" not in columns:
        raise ValueError(
            f"{path}:1: the header names the columns {', '.join(columns)}, but none"
            " is 'text'. The first line of a table names its columns: text, label."
        )
    try:
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{place}: the row has not the {len(columns)} fields of the header."
                    " Put fields with delimiters or quotes in them in double quotes."
                )
            yield place, row
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.line_num}: not a table: {error}. Put fields with"
            " delimiters or quotes in them in double quotes."
        ) from error


def _label(place: str, label: Any, form: str) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise ValueError(
            f"{place}: the label is {label!r}, but a label is a string or a whole"
            f" number. A sample is like {form}."
        )
    return str(label)
