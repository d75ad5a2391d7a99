"""How probable texts are to a trained language model, in batches.

A *piece* is a context and the tokens that follow it, of which the log-probability is
asked; tokens of the context count nothing. `windows` cuts a text of any length into
pieces that the model has positions for.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from launch import generation, step, text_batches
from launch.text_batches import TextBatch
from launch.trained import Trained
from models.losses import cross_entropy

Tokens = Sequence[int]
Piece = tuple[Tokens, Tokens]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How probable the tokens after a context are.

    Attributes:
        log_prob: Sum of their log-probabilities, in nats.
        is_greedy: Whether no token scores higher than any of them, so that taking the
            best token every time gives them.
    """

    log_prob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Scores pieces; `build` makes it.

    Attributes:
        trained: The model.
        global_batch_size: Pieces at once, at most.
        program: Compiled once for each shape of a batch.
    """

    trained: Trained
    global_batch_size: int
    program: Callable[..., Any]

    def score(self, pieces: Sequence[Piece]) -> list[Score]:
        """Returns the score of each piece.

        A context is cut at its beginning where the model has no positions for it.

        Args:
            pieces: A context, of at least one token, and what follows it.

        Raises:
            ValueError: If a context is empty, or more follows than the model has
                positions for.
        """
        max_len = self.trained.config.model.max_len
        for number, (context, following) in enumerate(pieces):
            _check(number, context, following, max_len)
        scores: list[Score | None] = [None] * len(pieces)
        for rows in text_batches.by_length(
            [len(context) + len(following) - 1 for context, following in pieces],
            longest=max_len,
            global_batch_size=self.global_batch_size,
            data_parallel_size=self.trained.data_parallel_size,
        ):
            batch = _make_batch(pieces, rows)
            outputs = jax.device_get(self.program(self.trained.params, batch))
            for row, number in enumerate(rows.texts):
                scores[number] = Score(
                    log_prob=float(outputs["log_prob"][row]),
                    is_greedy=bool(outputs["num_missed"][row] == 0),
                )
        return [score for score in scores if score is not None]

    def score_texts(self, texts: Sequence[Tokens], prefix: int) -> list[float]:
        """Returns the log-probability of each text, however long it is.

        Args:
            texts: Tokens of each.
            prefix: Token before each text.
        """
        max_len = self.trained.config.model.max_len
        cut = [list(windows(text, prefix, max_len)) for text in texts]
        scores = iter(self.score([piece for pieces in cut for piece in pieces]))
        return [sum(next(scores).log_prob for _ in pieces) for pieces in cut]


def build(trained: Trained, *, global_batch_size: int = 16) -> Scorer:
    """Returns what scores pieces with a model.

    Args:
        trained: The model.
        global_batch_size: Pieces at once, at most.

    Raises:
        ValueError: If the model is none of the next token, or the batch size does not
            divide by the data-parallel size.
    """
    generation.check_family(trained.config.model_name)
    if global_batch_size < 1 or global_batch_size % trained.data_parallel_size:
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a positive multiple of"
            f" data_parallel_size={trained.data_parallel_size}. Use one."
        )
    program = step.build_output_step(trained.steps, _head)
    return Scorer(trained=trained, global_batch_size=global_batch_size, program=program)


def windows(text: Tokens, prefix: int, max_len: int) -> Iterator[Piece]:
    """Yields a text as pieces with as much context as there is room for.

    Every token of the text is asked for once.

    Args:
        text: The tokens.
        prefix: Token before the text.
        max_len: Positions of the model: of a piece, the last token excluded.

    Example:
        >>> list(windows([1, 2, 3, 4, 5, 6, 7], 0, 3))
        [([0], [1, 2, 3]), ([3], [4, 5, 6]), ([4, 5, 6], [7])]
    """
    for start in range(0, len(text), max_len):
        following = list(text[start : start + max_len])
        room = max_len + 1 - len(following)
        yield [prefix, *text[:start]][-room:], following


def _head(model: Any, x_BLD: jax.Array, batch: dict[str, jax.Array]) -> Any:
    """Returns the score of each row; the logits of one row are held at a time."""

    def of_row(row: tuple) -> tuple:
        x_LD, targets_L = row
        return cross_entropy(model.logits(x_LD[None]), targets_L[None])

    found = jax.lax.map(of_row, (x_BLD, batch["targets"]))
    loss_BL, correct_BL = found[0][:, 0], found[1][:, 0]
    is_asked_BL = batch["is_asked"]
    return {
        "log_prob": -(loss_BL * is_asked_BL).sum(-1),
        "num_missed": ((1 - correct_BL) * is_asked_BL).sum(-1),
    }


def _check(number: int, context: Tokens, following: Tokens, max_len: int) -> None:
    if not context:
        raise ValueError(
            f"Piece {number} has no context, and a model cannot score its first token."
            " Begin with <|endoftext|>."
        )
    if len(following) > max_len:
        raise ValueError(
            f"Piece {number} asks for {len(following)} tokens, more than the"
            f" {max_len} positions of model.max_len. Score it as a text, in windows."
        )


def _make_batch(pieces: Sequence[Piece], rows: TextBatch) -> dict[str, np.ndarray]:
    shape = rows.num_rows, rows.length
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "is_asked": np.zeros(shape, np.float32),
    }
    for row, number in enumerate(rows.texts):
        context, following = pieces[number]
        # Of a context that is too long, what comes last is kept.
        whole = [*context, *following][-(rows.length + 1) :]
        end = len(whole) - 1
        batch["tokens"][row, :end] = whole[:-1]
        batch["targets"][row, :end] = whole[1:]
        batch["is_asked"][row, end - len(following) : end] = 1
    return batch
