"""BERT's training samples (arXiv:1810.04805, appendix A.2), a batch at a time.

An epoch goes once over *spans*: runs of sentences of one document that fill a sample.
A sample cuts its span in two segments, or replaces the second one by sentences of
another document, and masks tokens. All that is random in it is drawn anew every time,
from the seed and the number of the sample alone.
"""

import dataclasses
import math

import numpy as np

from launch.data import draws, masking, token_store
from launch.data.token_store import TokenStore
from launch.data.tokenizer import Vocabulary

NUM_SPECIAL = 3  # [CLS] first [SEP] second [SEP]

Batch = dict[str, np.ndarray]

_CUT, _ORDER, _REPLACE = range(3)  # streams of random numbers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How samples are made; `configs.base` says what each field means."""

    seq_length: int
    masked_fraction: float
    masking: str
    short_fraction: float

    @property
    def num_predicted(self) -> int:
        """Positions to predict in each sample, some of them with weight 0."""
        # Rounded first: 0.07 * 100 is a little more than 7.
        return math.ceil(round(self.masked_fraction * self.seq_length, 6))


def shapes(recipe: Recipe, batch_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Returns shape and NumPy type of each array of a batch; see `models.bert.Bert`."""
    B, L, N = batch_size, recipe.seq_length, recipe.num_predicted
    return {
        "tokens": ((B, L), np.int32),
        "segments": ((B, L), np.int32),
        "is_token": ((B, L), np.bool_),
        "positions": ((B, N), np.int32),
        "targets": ((B, N), np.int32),
        "weights": ((B, N), np.float32),
        "is_random_next": ((B,), np.int32),
        "sample_weights": ((B,), np.float32),
    }


def split_documents(
    store: TokenStore,
    *,
    validation_fraction: float,
    seed: int,
    held_from: TokenStore | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents to train on and those held out, int64 indices.

    Documents of one sentence are in neither. Equal documents are on the same side, so
    that none of them is trained on and held out.

    Args:
        store: The corpus.
        validation_fraction: Of the documents, rounded up; 0 holds out none.
        seed: Decides which.
        held_from: Whose documents are held out; None for a part of the corpus.
    """
    return token_store.split(
        store,
        held_from or store,
        fraction=validation_fraction,
        seed=seed,
        min_sentences=2,
    )


def count_tokens(store: TokenStore, documents: np.ndarray) -> int:
    """Returns the number of tokens of some documents."""
    ends = store.sentence_starts[store.document_starts[documents + 1]]
    return int((ends - store.sentence_starts[store.document_starts[documents]]).sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Runs of at least two sentences of one document, int64 ``(num_spans,)`` each.

    Attributes:
        first: Sentence that the span begins with.
        last: Sentence before which it ends.
        document_last: Sentence before which its document ends.
        siblings_first: First span of the same document.
        siblings_last: Span before which those of the same document end.
    """

    first: np.ndarray
    last: np.ndarray
    document_last: np.ndarray
    siblings_first: np.ndarray
    siblings_last: np.ndarray

    def __len__(self) -> int:
        return len(self.first)


def cut_spans(store: TokenStore, documents: np.ndarray, num_tokens: int) -> Spans:
    """Cuts documents of two sentences or more into spans of ``num_tokens`` or more.

    The last span of a document reaches back so far that it has as many. A document with
    fewer is one span.
    """
    starts = store.sentence_starts
    begin, end = store.document_starts[documents], store.document_starts[documents + 1]
    owner = np.arange(len(documents))
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    first = begin
    while len(owner):
        last = np.searchsorted(starts, starts[first] + num_tokens)
        last = np.minimum(np.maximum(last, first + 2), end[owner])
        is_last = last == end[owner]
        back = np.searchsorted(starts, starts[last] - num_tokens, "right") - 1
        back = np.clip(np.minimum(back, last - 2), begin[owner], first)
        parts.append((owner, np.where(is_last, back, first), last))
        owner, first = owner[~is_last], last[~is_last]
    owner, first, last = (
        np.concatenate(column) if parts else np.zeros(0, np.int64)
        for column in (zip(*parts, strict=True) if parts else ((), (), ()))
    )
    order = np.lexsort((last, owner))
    owner = owner[order]
    return Spans(
        first=first[order],
        last=last[order],
        document_last=end[owner],
        siblings_first=np.searchsorted(owner, owner, "left"),
        siblings_last=np.searchsorted(owner, owner, "right"),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BertSamples:
    """Makes samples of some documents.

    Attributes:
        recipe: How.
        store: The tokenized corpus.
        vocabulary: Of the tokenizer that made it.
        spans: Of at least two documents, so that there is another one.
        seed: Of all that is random.
    """

    recipe: Recipe
    store: TokenStore
    vocabulary: Vocabulary
    spans: Spans
    seed: int

    def __len__(self) -> int:
        return len(self.spans)

    def shapes(self, batch_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Returns shape and NumPy type of each array of a batch."""
        return shapes(self.recipe, batch_size)

    def make(self, spans_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch, as `models.bert.Bert` describes it.

        Args:
            spans_B: Which span each sample is made of.
            samples_B: The number of each sample, of which all random numbers are drawn.
        """
        length = self.recipe.seq_length
        pairs = self._pairs(spans_B, samples_B)
        columns = np.arange(length)[None]
        middle_B1 = 1 + pairs.lengths[0][:, None]  # the first [SEP]
        end_B1 = middle_B1 + 1 + pairs.lengths[1][:, None]  # the second
        is_second_BL = (columns > middle_B1) & (columns <= end_B1)
        is_token_BL = columns <= end_B1
        is_sep_BL = (columns == middle_B1) | (columns == end_B1)
        is_text_BL = is_token_BL & ~is_sep_BL
        is_text_BL[:, 0] = False
        begin_BL = np.where(
            is_second_BL,
            pairs.starts[1][:, None] - middle_B1 - 1,
            pairs.starts[0][:, None] - 1,
        )
        places_BL = np.where(is_text_BL, begin_BL + columns, 0)
        tokens_BL = self.store.tokens[places_BL].astype(np.int32)
        is_start_BL = self._word_starts(tokens_BL)
        is_start_BL[:, 1] = True
        np.put_along_axis(is_start_BL, middle_B1 + 1, True, axis=1)
        tokens_BL[~is_text_BL] = self.vocabulary.pad
        tokens_BL[is_sep_BL] = self.vocabulary.sep
        tokens_BL[:, 0] = self.vocabulary.cls
        batch = {
            "tokens": tokens_BL,
            "segments": is_second_BL.astype(np.int32),
            "is_token": is_token_BL,
            "is_random_next": pairs.is_random_next.astype(np.int32),
            "sample_weights": np.ones(len(spans_B), np.float32),
        }
        return batch | self._mask(tokens_BL, is_start_BL, is_text_BL, samples_B)

    def _pairs(self, spans_B: np.ndarray, samples_B: np.ndarray) -> "_Pairs":
        """Chooses the two segments, and cuts them to fit."""
        units = draws.uniform(self.seed, _CUT, samples_B, 8).T
        starts = self.store.sentence_starts
        room = self.recipe.seq_length - NUM_SPECIAL
        wanted_B = np.where(
            units[0] < self.recipe.short_fraction, 2 + _below(room - 1, units[1]), room
        )
        first_B, last_B = self.spans.first[spans_B], self.spans.last[spans_B]
        reached_B = np.searchsorted(starts, starts[first_B] + wanted_B)
        last_B = np.minimum(np.maximum(reached_B, first_B + 2), last_B)
        middle_B = first_B + 1 + _below(last_B - first_B - 1, units[2])

        is_random_B = units[3] < 0.5
        others_B = self._others(spans_B, units[4])
        other_B = self.spans.first[others_B]
        other_B = (
            other_B + 1 + _below(self.spans.last[others_B] - other_B - 1, units[5])
        )
        missing_B = wanted_B - (starts[middle_B] - starts[first_B])
        reached_B = np.searchsorted(starts, starts[other_B] + missing_B)
        reached_B = np.maximum(reached_B, other_B + 1)
        other_last_B = np.minimum(reached_B, self.spans.document_last[others_B])

        starts_2B = np.stack([first_B, np.where(is_random_B, other_B, middle_B)])
        ends_2B = np.stack([middle_B, np.where(is_random_B, other_last_B, last_B)])
        starts_2B, ends_2B = starts[starts_2B], starts[ends_2B]
        lengths_2B = _truncate(ends_2B - starts_2B, room)
        # What is too much goes from the front and the back.
        excess_2B = ends_2B - starts_2B - lengths_2B
        return _Pairs(
            starts=starts_2B + _below(excess_2B + 1, units[6:8]),
            lengths=lengths_2B,
            is_random_next=is_random_B,
        )

    def _others(self, spans_B: np.ndarray, units_B: np.ndarray) -> np.ndarray:
        """Returns spans of other documents."""
        first_B = self.spans.siblings_first[spans_B]
        num_siblings_B = self.spans.siblings_last[spans_B] - first_B
        others_B = _below(len(self.spans) - num_siblings_B, units_B)
        return np.where(others_B < first_B, others_B, others_B + num_siblings_B)

    def _word_starts(self, tokens_BL: np.ndarray) -> np.ndarray:
        if not masking.MASKINGS[self.recipe.masking].joins_pieces:
            return np.ones(tokens_BL.shape, bool)
        return ~self.vocabulary.is_continuation[tokens_BL]

    def _mask(
        self,
        tokens_BL: np.ndarray,
        is_start_BL: np.ndarray,
        is_text_BL: np.ndarray,
        samples_B: np.ndarray,
    ) -> Batch:
        """Replaces tokens in place; returns what is to be predicted."""
        num_B = np.rint(self.recipe.masked_fraction * is_text_BL.sum(axis=1))
        is_masked_BL = masking.choose(
            is_start_BL,
            is_text_BL,
            np.maximum(num_B, 1).astype(np.int64),
            max_words=masking.MASKINGS[self.recipe.masking].max_words,
            bits_BL=draws.bits(self.seed, _ORDER, samples_B, tokens_BL.shape[1]),
        )
        rows, columns = np.nonzero(is_masked_BL)
        num_B = is_masked_BL.sum(axis=1)
        slots = np.arange(len(rows)) - np.repeat(num_B.cumsum() - num_B, num_B)
        shape = (len(num_B), self.recipe.num_predicted)
        positions_BN, targets_BN = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights_BN = np.zeros(shape, np.float32)
        positions_BN[rows, slots] = columns
        targets_BN[rows, slots] = tokens_BL[rows, columns]
        weights_BN[rows, slots] = 1

        units_2BN = draws.uniform(self.seed, _REPLACE, samples_B, 2 * shape[1])
        how, which = (units_2BN[rows, slots + half * shape[1]] for half in (0, 1))
        ordinary = self.vocabulary.ordinary
        replacements = np.where(
            how < 0.8, self.vocabulary.mask, ordinary[_below(len(ordinary), which)]
        )
        kept = how >= 0.9
        tokens_BL[rows, columns] = np.where(
            kept, tokens_BL[rows, columns], replacements
        )
        return {"positions": positions_BN, "targets": targets_BN, "weights": weights_BN}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """The two segments of each sample, as runs of tokens of the store.

    Attributes:
        starts: ``(2, B)``, first token of each.
        lengths: ``(2, B)``, number of tokens.
        is_random_next: ``(B,)``, the second is of another document.
    """

    starts: np.ndarray
    lengths: np.ndarray
    is_random_next: np.ndarray


def _below(limits: np.ndarray | int, units: np.ndarray) -> np.ndarray:
    """Returns random integers from 0 up to ``limits``."""
    return (limits * units).astype(np.int64)


def _truncate(lengths_2B: np.ndarray, room: int) -> np.ndarray:
    """Shortens the longer segment, then both alike, until they fit."""
    first_B, second_B = lengths_2B
    first_B = np.minimum(first_B, np.maximum(room - second_B, -(-room // 2)))
    return np.stack([first_B, np.minimum(second_B, room - first_B)])
