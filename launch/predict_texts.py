"""Predictions of BERT: masked tokens, the class of a text, the class of each word."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tokenizers

from launch import predictors, text_batches, workdir
from launch.data import labelled_samples, labelled_texts, text_files, tokenizer
from launch.data.labelled_samples import Rows
from launch.data.labelled_texts import Example
from launch.data.labelled_tokens import (
    Encode,
    LabelledTokens,
    encode_texts,
    encode_words,
    from_examples,
)
from launch.predictors import Batch, Item, Record
from launch.trained import Trained

SUFFIXES = (".txt", *text_files.JSON_SUFFIXES, *labelled_texts.TABLE_SUFFIXES)
MASK = "[MASK]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Turns texts into rows of the length that they need.

    Attributes:
        tokens: The tokenizer of the model.
        vocabulary: Its special tokens.
        max_len: Most tokens of a row, special ones included.
        encode: How a sample becomes tokens.
    """

    tokens: tokenizers.Tokenizer
    vocabulary: tokenizer.Vocabulary
    max_len: int
    encode: Encode

    def read(self, items: Sequence[Item]) -> tuple[LabelledTokens, Rows]:
        """Returns all tokens of some texts, and rows of what the model sees of them.

        The length of the rows is a power of two, so that few programs are compiled.
        """
        examples = [Example(i.place, i.texts, ("",) * len(i.texts)) for i in items]
        store = from_examples(examples, self.tokens, self.encode)
        longest = int(np.diff(store.starts).max()) + 3
        length = text_batches.row_length(longest, self.max_len)
        rows = labelled_samples.make_rows(
            store, np.arange(len(items)), self.vocabulary, length
        )
        return store, rows


def open_reader(trained: Trained, encode: Encode) -> TextReader:
    """Returns what turns texts into rows for a model.

    Raises:
        ValueError: If there is no tokenizer, or it does not fit the model.
    """
    tokens = trained.need_tokenizer()
    tokenizer.check_tokens(
        str(pathlib.Path(trained.directory) / workdir.TOKENIZER_FILE),
        tokens,
        vocab_size=trained.config.model.vocab_size,
        needed=tokenizer.SPECIAL_TOKENS,
        model="BERT",
    )
    return TextReader(
        tokens=tokens,
        vocabulary=tokenizer.vocabulary(tokens),
        max_len=trained.config.model.max_len,
        encode=encode,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaskFiller:
    """Asks for the tokens at each ``[MASK]`` of a text.

    Attributes:
        reader: Of the texts.
        names: Of all tokens.
        top_k: Tokens to name.
    """

    reader: TextReader
    names: Sequence[str]
    top_k: int

    def make(self, items: Sequence[Item]) -> tuple[Batch, Sequence[Any]]:
        """Returns the batch, and how many masks each text has."""
        store, rows = self.reader.read(items)
        mask = self.reader.vocabulary.mask
        is_mask_BL = (rows.arrays["tokens"] == mask) & (rows.places >= 0)
        num_B = is_mask_BL.sum(1)
        for index, item in enumerate(items):
            tokens = store.tokens[store.starts[index] : store.starts[index + 1]]
            num = int((tokens == mask).sum())
            if num == 0:
                raise ValueError(
                    f"{item.place}: the text has no {MASK} to fill in:"
                    f" {item.texts[0][:60]!r}. Write {MASK} where a token is wanted."
                )
            if num_B[index] < num:
                raise ValueError(
                    f"{item.place}: the text has {len(tokens)} tokens, and a {MASK}"
                    f" stands beyond the {rows.places.shape[1]} positions of"
                    " model.max_len. Shorten the text."
                )
        length = rows.places.shape[1]
        columns_BL = np.where(is_mask_BL, np.arange(length)[None], length)
        width = min(length, 1 << (int(num_B.max()) - 1).bit_length())
        positions_BN = np.sort(columns_BL, axis=1)[:, :width]
        positions_BN = np.where(positions_BN < length, positions_BN, 0)
        return {**rows.arrays, "positions": positions_BN.astype(np.int32)}, list(num_B)

    def head(self, model: Any, x: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        """Returns the best tokens at each mask."""
        scores = model.logits(x, batch)[0]
        return predictors.best_of(scores, self.top_k, num_named=len(self.names))

    def describe(self, item: Item, memory: Any, row: Mapping[str, Any]) -> Record:
        """Returns the best tokens at each mask, and the text with the best ones."""
        masks = []
        filled = item.texts
        for number in range(memory):
            part = {name: values[number] for name, values in row.items()}
            masks.append(predictors.name_best(part, self.names, "token"))
            filled = _fill_first(filled, masks[-1][0]["token"])
        return {**_echo(item), "masks": masks, "filled": " ".join(filled)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextClassifier:
    """Asks for the class of a text.

    Attributes:
        reader: Of the texts.
        names: Of the classes.
        top_k: Classes to name.
    """

    reader: TextReader
    names: Sequence[str]
    top_k: int

    def make(self, items: Sequence[Item]) -> tuple[Batch, Sequence[Any]]:
        """Returns the batch, and whether each text was cut."""
        store, rows = self.reader.read(items)
        seen_B = (rows.places >= 0).sum(1)
        return rows.arrays, list(seen_B < np.diff(store.starts))

    def head(self, model: Any, x: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        """Returns the best classes."""
        return predictors.best_of(model.logits(x), self.top_k)

    def describe(self, item: Item, memory: Any, row: Mapping[str, Any]) -> Record:
        """Returns the best class and the runners-up."""
        best = predictors.name_best(row, self.names, "label")
        cut = {"is_cut": True} if memory else {}
        return {**_echo(item), **best[0], "best": best, **cut}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WordTagger:
    """Asks for the class of each word of a text.

    Attributes:
        reader: Of the words.
        names: Of the classes.
    """

    reader: TextReader
    names: Sequence[str]

    def make(self, items: Sequence[Item]) -> tuple[Batch, Sequence[Any]]:
        """Returns the batch, and where each word begins that the model sees."""
        store, rows = self.reader.read(items)
        is_first_BL = (rows.places >= 0) & (store.labels[rows.places] >= 0)
        return rows.arrays, [np.flatnonzero(is_first) for is_first in is_first_BL]

    def head(self, model: Any, x: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        """Returns the best class of each token."""
        best = predictors.best_of(model.logits(x), 1)
        return {name: values[..., 0] for name, values in best.items()}

    def describe(self, item: Item, memory: Any, row: Mapping[str, Any]) -> Record:
        """Returns the class of each word; None for those that were cut off."""
        rest = [None] * (len(item.texts) - len(memory))
        labels = [self.names[index] for index in row["indices"][memory]]
        probabilities = map(predictors.rounded, row["probabilities"][memory].tolist())
        return {
            "words": list(item.texts),
            "labels": labels + rest,
            "probabilities": [*probabilities, *rest],
        }


def fill_masks(trained: Trained, top_k: int) -> MaskFiller:
    """Returns what asks a pre-trained BERT for masked tokens."""
    reader = open_reader(trained, encode_texts)
    ids = reader.tokens.get_vocab(with_added_tokens=True)
    names = [""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        names[number] = token
    return MaskFiller(reader=reader, names=names, top_k=min(top_k, len(names)))


def classify_texts(trained: Trained, top_k: int) -> TextClassifier:
    """Returns what asks a BERT for the class of a text."""
    names = predictors.class_names(trained)
    return TextClassifier(
        reader=open_reader(trained, encode_texts),
        names=names,
        top_k=min(top_k, len(names)),
    )


def tag_words(trained: Trained, top_k: int) -> WordTagger:
    """Returns what asks a BERT for the class of each word, of which it names one."""
    return WordTagger(
        reader=open_reader(trained, encode_words),
        names=predictors.class_names(trained),
    )


def read_texts(inputs: Sequence[str], texts: Sequence[str]) -> Iterator[Item]:
    """Yields the texts in files, then those given.

    Args:
        inputs: Files: a text per line, blank ones left out; JSON lines; or tables.
        texts: The texts themselves.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If a file is of another kind, or cannot be read, with the place.
    """
    for place, record in _records(inputs, texts):
        yield Item(place, labelled_texts.texts_of(place, record, '{"text": "A text."}'))


def read_words(inputs: Sequence[str], texts: Sequence[str]) -> Iterator[Item]:
    """Yields words; those of a text are what has space between them.

    See `read_texts`. A line of JSON may have words in place of a text.
    """
    form = '{"words": ["Two", "words"]}'
    for place, record in _records(inputs, texts):
        if "words" in record:
            words = labelled_texts.words_of(place, record, form)
        else:
            text, *_ = labelled_texts.texts_of(place, record, form)
            words = tuple(text.split())
        yield Item(place, words)


def _records(
    inputs: Sequence[str], texts: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields what there is, each with its place."""
    paths = text_files.expand(inputs, "--inputs")
    for path in paths:
        if not path.name.removesuffix(".gz").endswith(SUFFIXES):
            raise ValueError(
                f"--inputs names '{path}', which is of an unknown kind. Texts are in"
                f" files that end in {', '.join(SUFFIXES)}, or in these and .gz."
            )
    for path in paths:
        if path.name.removesuffix(".gz").endswith(".txt"):
            for number, line in text_files.lines(path):
                if line.strip():
                    yield f"{path}:{number}", {"text": line.strip()}
        else:
            yield from labelled_texts.records(path)
    for number, text in enumerate(texts, start=1):
        yield f"--text number {number}", {"text": text}


def _echo(item: Item) -> Record:
    return dict(zip(("text", "text_pair"), item.texts, strict=False))


def _fill_first(texts: Sequence[str], token: str) -> tuple[str, ...]:
    """Puts a token in the place of the first mask."""
    before = list(itertools.takewhile(lambda text: MASK not in text, texts))
    text, *rest = texts[len(before) :]
    head, _, tail = text.partition(MASK)
    if token.startswith(tokenizer.CONTINUATION):
        head, token = head.rstrip(), token.removeprefix(tokenizer.CONTINUATION)
    return (*before, head + token + tail, *rest)
