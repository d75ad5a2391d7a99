"""Texts of many lengths, in batches of few shapes: a program is compiled for each.

A batch is as wide as a power of two, so that texts of about the same length share it.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from models.layers import round_up

SHORTEST = 16  # tokens of a row: shorter texts share a program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """Texts that share a batch.

    Attributes:
        texts: Their numbers, a row each.
        num_rows: With those that hold no text.
        length: Tokens that a row has room for.
    """

    texts: Sequence[int]
    num_rows: int
    length: int


def row_length(num_tokens: int, longest: int) -> int:
    """Returns the width of a batch whose longest text has so many tokens.

    Args:
        num_tokens: Of that text.
        longest: Most tokens of a row.

    Example:
        >>> [row_length(num_tokens, 100) for num_tokens in (3, 20, 64, 65)]
        [16, 32, 64, 100]
    """
    return min(max(SHORTEST, 1 << (num_tokens - 1).bit_length()), longest)


def by_length(
    lengths: Sequence[int],
    *,
    longest: int,
    global_batch_size: int,
    data_parallel_size: int,
) -> Iterator[TextBatch]:
    """Yields batches of texts of about the same length, in their order.

    Args:
        lengths: Tokens of each text.
        longest: Most tokens of a row.
        global_batch_size: Texts at once, at most; a multiple of the next.
        data_parallel_size: Parts of a batch.

    Example:
        >>> sizes = dict(longest=64, global_batch_size=2, data_parallel_size=1)
        >>> for batch in by_length([5, 40, 7, 9], **sizes):
        ...     print(batch.texts, batch.num_rows, batch.length)
        [0, 2] 2 16
        [3] 2 16
        [1] 1 64
    """
    alike: dict[int, list[int]] = collections.defaultdict(list)
    for text, num_tokens in enumerate(lengths):
        alike[row_length(num_tokens, longest)].append(text)
    for length, texts in sorted(alike.items()):
        num_rows = min(global_batch_size, round_up(len(texts), data_parallel_size))
        for start in range(0, len(texts), num_rows):
            part = texts[start : start + num_rows]
            yield TextBatch(texts=part, num_rows=num_rows, length=length)
