"""Which tokens of a sample are to be predicted: pieces, whole words, or runs of words.

Words are taken in random order until the wanted number of tokens is reached; one that
does not fit is left out, so that no word is masked in part.
"""

import dataclasses

import numpy as np

from launch.data import draws


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """A way to choose.

    Attributes:
        joins_pieces: The pieces of a word are chosen together, not each on its own.
        max_words: Words in a row that are chosen together, at most. A run of n words is
            wanted with a probability in proportion to 1/n.
    """

    joins_pieces: bool
    max_words: int


MASKINGS = {
    "token": Masking(joins_pieces=False, max_words=1),
    "whole_word": Masking(joins_pieces=True, max_words=1),
    "ngram": Masking(joins_pieces=True, max_words=3),
}


def choose(
    is_start_BL: np.ndarray,
    is_text_BL: np.ndarray,
    num_B: np.ndarray,
    *,
    max_words: int,
    bits_BL: np.ndarray,
) -> np.ndarray:
    """Returns boolean ``(B, L)``: the tokens to predict.

    Args:
        is_start_BL: The token starts a word. The first of a segment always does.
        is_text_BL: The token may be predicted. The last of the L may not.
        num_B: How many to predict; fewer are if no word that is left fits.
        max_words: Words in a row that are chosen together, at most.
        bits_BL: Random uint64.
    """
    words = _Words.find(is_start_BL, is_text_BL, bits_BL, max_words)
    is_taken_BL = np.zeros(is_text_BL.shape, bool)  # of the first token of a word
    rows_B = np.arange(len(num_B))
    room_B = num_B.copy()
    for start_B, wanted_B, ends_nB in zip(
        words.starts, words.wanted, words.ends, strict=True
    ):
        # The longest run that is wanted, is free and fits. Conditions only get harder.
        end_B, first_B, is_free_B = start_B, start_B, np.True_
        for n, next_B in enumerate(ends_nB, start=1):
            is_free_B = is_free_B & ~is_taken_BL[rows_B, first_B]
            fits_B = (n <= wanted_B) & is_free_B & (next_B - start_B <= room_B)
            end_B, first_B = np.where(fits_B, next_B, end_B), next_B
        first_B = start_B
        for next_B in ends_nB:
            is_taken_BL[rows_B, first_B] |= first_B < end_B
            first_B = next_B
        room_B -= end_B - start_B
        if not room_B.any():
            break
    return np.take_along_axis(is_taken_BL, words.start_of, axis=1) & is_text_BL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The words of each sample in random order, then tokens that change nothing.

    Attributes:
        starts: ``(W, B)``, position of the first token.
        wanted: ``(W, B)``, how many words in a row are wanted, if a run begins here.
        ends: ``(W, n, B)``, position after the last token of a run of 1, ..., n words.
        start_of: ``(B, L)``, position of the first token of the word of each token.
    """

    starts: np.ndarray
    wanted: np.ndarray
    ends: np.ndarray
    start_of: np.ndarray

    @classmethod
    def find(
        cls,
        is_start_BL: np.ndarray,
        is_text_BL: np.ndarray,
        bits_BL: np.ndarray,
        max_words: int,
    ) -> "_Words":
        length = is_text_BL.shape[1]
        columns = np.arange(length)[None]
        is_start_BL = is_start_BL & is_text_BL
        is_edge_BL = is_start_BL | ~is_text_BL
        # Where the next word or the end of the segment is; outside of it, stay.
        edges_BL = np.where(is_edge_BL, columns, length)
        after_BL = np.minimum.accumulate(edges_BL[:, ::-1], axis=1)[:, ::-1]
        end_BL = np.broadcast_to(columns, is_text_BL.shape).copy()
        np.copyto(end_BL[:, :-1], after_BL[:, 1:], where=is_text_BL[:, :-1])

        keys_BL = np.where(is_start_BL, bits_BL >> np.uint64(1), np.uint64(2**63))
        num_words = is_start_BL.sum(axis=1).max()
        starts_BW = np.argsort(keys_BL, axis=1)[:, :num_words]
        ends_BW = [starts_BW]
        for _ in range(max_words):
            ends_BW.append(np.take_along_axis(end_BL, ends_BW[-1], axis=1))
        lengths = np.cumsum([1 / n for n in range(1, max_words + 1)])
        # Other bits of the number than those that decide the order.
        units_BW = draws.to_unit(
            draws.mix(np.take_along_axis(bits_BL, starts_BW, axis=1))
        )
        wanted_BW = 1 + np.searchsorted(lengths[:-1] / lengths[-1], units_BW, "right")
        return cls(
            starts=np.ascontiguousarray(starts_BW.T),
            wanted=np.ascontiguousarray(wanted_BW.T),
            ends=np.ascontiguousarray(np.stack(ends_BW[1:]).transpose(2, 0, 1)),
            start_of=np.maximum.accumulate(np.where(is_edge_BL, columns, 0), axis=1),
        )
