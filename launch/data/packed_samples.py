"""Documents in rows of one length, for models of the next token, a batch at a time.

All documents of a split make one stream, each after the end-of-text token, with one
more at the end. Row ``i`` has the tokens from ``i * L`` on as inputs and those one
further as targets. So every token of every document is predicted once an epoch: the
first from the end-of-text token alone, the end of a document from its last token.
"""

import dataclasses
from typing import Self

import numpy as np

from launch.data.token_store import TokenStore

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamples:
    """Makes rows of some documents.

    Attributes:
        store: The tokenized corpus.
        documents: Which, in the order of the stream, int64.
        ends: Place in the stream after each document, int64.
        seq_length: Tokens of a row.
        end_of_text: The token before every document.
        separates: Whether rows number their documents, so that none sees another.
        num_rows: Rows of an epoch.
    """

    store: TokenStore
    documents: np.ndarray
    ends: np.ndarray
    seq_length: int
    end_of_text: int
    separates: bool
    num_rows: int

    @classmethod
    def pack(
        cls,
        store: TokenStore,
        documents: np.ndarray,
        *,
        seq_length: int,
        end_of_text: int,
        separates: bool,
        is_whole: bool,
    ) -> Self:
        """Returns the samples.

        Args:
            store: The tokenized corpus, a sentence per document.
            documents: Which of them, in their order, int64.
            seq_length: Tokens of a row.
            end_of_text: The token before every document.
            separates: Whether rows number their documents.
            is_whole: Keep a last row that is not full; its rest has weight 0.
        """
        ends = (np.diff(store.sentence_starts)[documents] + 1).cumsum()
        num_predicted = int(ends[-1]) if len(ends) else 0
        num_rows = num_predicted // seq_length
        if is_whole:
            num_rows = -(-num_predicted // seq_length)
        return cls(
            store=store,
            documents=documents,
            ends=ends,
            seq_length=seq_length,
            end_of_text=end_of_text,
            separates=separates,
            num_rows=num_rows,
        )

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, and one for the end of each."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def shapes(self, batch_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Returns shape and NumPy type of each array of a batch."""
        return shapes(self.seq_length, batch_size, separates=self.separates)

    def make(self, items_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch, as `models.gpt2.Gpt2` describes it.

        Args:
            items_B: The row of each sample.
            samples_B: Unused: nothing is random in a row.
        """
        length = self.seq_length
        places_BK = items_B[:, None] * length + np.arange(length + 1)[None]
        owners_BK = np.searchsorted(self.ends, places_BK, side="right")
        is_inside_BK = owners_BK < len(self.ends)
        owners_BK = np.minimum(owners_BK, len(self.ends) - 1)
        documents_BK = self.documents[owners_BK]
        sizes_BK = self.store.sentence_starts[documents_BK + 1]
        # Counted from the end of the document, of which the stream knows the place.
        tokens_BK = sizes_BK - (self.ends[owners_BK] - places_BK)
        is_text_BK = tokens_BK >= self.store.sentence_starts[documents_BK]
        is_text_BK &= is_inside_BK
        found_BK = self.store.tokens[np.where(is_text_BK, tokens_BK, 0)]
        tokens_BK = np.where(is_text_BK, found_BK, self.end_of_text).astype(np.int32)
        batch = {
            "tokens": np.ascontiguousarray(tokens_BK[:, :-1]),
            "targets": np.ascontiguousarray(tokens_BK[:, 1:]),
            "weights": is_inside_BK[:, :-1].astype(np.float32),
        }
        if self.separates:
            is_start_BL = ~is_text_BK[:, :-1]
            batch["documents"] = is_start_BL.cumsum(axis=1, dtype=np.int32)
        return batch


def shapes(
    seq_length: int, batch_size: int, *, separates: bool
) -> dict[str, tuple[tuple[int, ...], type]]:
    """Returns shape and NumPy type of each array of a batch; see `models.gpt2.Gpt2`."""
    B, L = batch_size, seq_length
    names = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    if separates:
        names["documents"] = np.int32
    return {name: ((B, L), dtype) for name, dtype in names.items()}
