"""Samples of labelled texts, a batch at a time.

A sample is ``[CLS] text [SEP]``, or ``[CLS] text [SEP] second text [SEP]``. What does
not fit is cut off at the end: first of the longer text, then of both alike.
"""

import dataclasses

import numpy as np

from launch.data import classes
from launch.data.labelled_tokens import LabelledTokens
from launch.data.tokenizer import Vocabulary

Batch = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], type]]

NUM_SPECIAL = 2  # of a single text, one more of a pair


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples as rows of one length.

    Attributes:
        arrays: What `models.bert.Encoder` reads.
        places: int64 ``(B, L)``: which token of the store stands there; -1 for none.
    """

    arrays: Batch
    places: np.ndarray


def make_rows(
    store: LabelledTokens, samples_B: np.ndarray, vocabulary: Vocabulary, length: int
) -> Rows:
    """Returns samples as rows of ``length`` tokens, special ones and padding included.

    Args:
        store: The samples.
        samples_B: Which of them.
        vocabulary: Of the tokenizer.
        length: At least 5.
    """
    starts_B = store.starts[samples_B]
    full_2B = np.stack(
        [store.first_sizes[samples_B], store.starts[samples_B + 1] - starts_B]
    )
    full_2B[1] -= full_2B[0]
    has_second_B = full_2B[1] > 0
    first_B, second_B = _truncate(full_2B, length - NUM_SPECIAL - has_second_B)
    columns = np.arange(length)[None]
    middle_B1 = 1 + first_B[:, None]  # the first [SEP]
    end_B1 = middle_B1 + np.where(has_second_B, 1 + second_B, 0)[:, None]
    is_second_BL = (columns > middle_B1) & (columns <= end_B1)
    is_token_BL = columns <= end_B1
    is_sep_BL = (columns == middle_B1) | (columns == end_B1)
    is_text_BL = is_token_BL & ~is_sep_BL
    is_text_BL[:, 0] = False
    skipped_B1 = np.where(is_second_BL, (1 + first_B - full_2B[0])[:, None], 0)
    places_BL = starts_B[:, None] + columns - 1 - skipped_B1
    places_BL = np.where(is_text_BL, places_BL, -1)
    tokens_BL = np.where(is_sep_BL, vocabulary.sep, vocabulary.pad).astype(np.int32)
    tokens_BL[:, 0] = vocabulary.cls
    tokens_BL[is_text_BL] = store.tokens[places_BL[is_text_BL]]
    return Rows(
        arrays={
            "tokens": tokens_BL,
            "segments": is_second_BL.astype(np.int32),
            "is_token": is_token_BL,
        },
        places=places_BL,
    )


def count_cut(store: LabelledTokens, samples: np.ndarray, length: int) -> int:
    """Returns how many samples are longer than rows of ``length`` tokens."""
    sizes = store.starts[samples + 1] - store.starts[samples]
    has_second = sizes > store.first_sizes[samples]
    return int((sizes > length - NUM_SPECIAL - has_second).sum())


def row_shapes(length: int, batch_size: int) -> Shapes:
    """Returns shape and NumPy type of the arrays of `Rows`."""
    shape = batch_size, length
    return {
        "tokens": (shape, np.int32),
        "segments": (shape, np.int32),
        "is_token": (shape, np.bool_),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedSamples:
    """Makes samples with a class each, see `models.bert_heads.BertClassifier`.

    Attributes:
        store: All samples, with the labels of the model.
        indices: Which of them, int64.
        vocabulary: Of the tokenizer.
        seq_length: Tokens of a row.
        num_classes: Of the model.
        label_smoothing: Share of the probability that all classes have alike.
    """

    store: LabelledTokens
    indices: np.ndarray
    vocabulary: Vocabulary
    seq_length: int
    num_classes: int
    label_smoothing: float = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    def shapes(self, batch_size: int) -> Shapes:
        """Returns shape and NumPy type of each array of a batch."""
        return classified_shapes(self.seq_length, self.num_classes, batch_size)

    def make(self, items_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch.

        Args:
            items_B: Which text each sample is made of.
            samples_B: Unused: nothing is random in a sample.
        """
        samples = self.indices[items_B]
        rows = make_rows(self.store, samples, self.vocabulary, self.seq_length)
        targets_BC = classes.one_hot(
            self.store.labels[samples], self.num_classes, smoothing=self.label_smoothing
        )
        weights_B = np.ones(len(items_B), np.float32)
        return {**rows.arrays, "targets": targets_BC, "weights": weights_B}


def classified_shapes(length: int, num_classes: int, batch_size: int) -> Shapes:
    """Returns shape and NumPy type of each array of `ClassifiedSamples`."""
    return {
        **row_shapes(length, batch_size),
        "targets": ((batch_size, num_classes), np.float32),
        "weights": ((batch_size,), np.float32),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaggedSamples:
    """Makes samples with a class for each word, see `models.bert_heads.BertTagger`.

    The class of a word is asked for at its first piece.

    Attributes:
        store: All samples, with the labels of the model.
        indices: Which of them, int64.
        vocabulary: Of the tokenizer.
        seq_length: Tokens of a row.
    """

    store: LabelledTokens
    indices: np.ndarray
    vocabulary: Vocabulary
    seq_length: int

    def __len__(self) -> int:
        return len(self.indices)

    def shapes(self, batch_size: int) -> Shapes:
        """Returns shape and NumPy type of each array of a batch."""
        return tagged_shapes(self.seq_length, batch_size)

    def make(self, items_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch; for the arguments see `ClassifiedSamples.make`."""
        samples = self.indices[items_B]
        rows = make_rows(self.store, samples, self.vocabulary, self.seq_length)
        targets_BL = np.where(rows.places >= 0, self.store.labels[rows.places], -1)
        return {
            **rows.arrays,
            "targets": np.maximum(targets_BL, 0),
            "weights": (targets_BL >= 0).astype(np.float32),
        }


def tagged_shapes(length: int, batch_size: int) -> Shapes:
    """Returns shape and NumPy type of each array of `TaggedSamples`."""
    shape = batch_size, length
    return {
        **row_shapes(length, batch_size),
        "targets": (shape, np.int32),
        "weights": (shape, np.float32),
    }


def _truncate(sizes_2B: np.ndarray, room_B: np.ndarray) -> np.ndarray:
    """Shortens the longer text, then both alike, until they fit."""
    first_B, second_B = sizes_2B
    first_B = np.minimum(first_B, np.maximum(room_B - second_B, -(-room_B // 2)))
    return np.stack([first_B, np.minimum(second_B, room_B - first_B)])
