"""What all predictions have in common: items in, a batch at a time, records out."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from launch import step
from launch.trained import Trained

Batch = dict[str, np.ndarray]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """What to predict something of.

    Attributes:
        place: Where it stands, for messages.
        texts: A text or a pair of texts; or words; or the path of an image.
    """

    place: str
    texts: tuple[str, ...]


class AbstractPredictor(Protocol):
    """What a kind of model is asked, and how its answer reads."""

    def make(self, items: Sequence[Item]) -> tuple[Batch, Sequence[Any]]:
        """Returns a batch with a row per item, and what to remember of each.

        Raises:
            ValueError: If an item is not of the right form, with its place.
        """

    def head(self, model: Any, x: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        """Returns outputs with a row per sample; see `step.build_output_step`."""

    def describe(self, item: Item, memory: Any, row: Mapping[str, Any]) -> Record:
        """Returns what to say of an item, from its row of the outputs."""


def predict(
    trained: Trained,
    predictor: AbstractPredictor,
    items: Iterator[Item],
    *,
    global_batch_size: int,
) -> Iterator[Record]:
    """Yields a record per item, in their order.

    The batch size changes nothing but speed: rows that fill up the last batch are
    dropped. While the devices work on a batch the next one is made.

    Args:
        trained: The model.
        predictor: What to ask it.
        items: Any number of them; read as they are needed.
        global_batch_size: Items at once, rounded up to a multiple of the data-parallel
            size.
    """
    ranks = trained.data_parallel_size
    waiting: tuple[Sequence[Item], Sequence[Any], Any] | None = None
    num_rows = 0
    program: Any = step.build_output_step(trained.steps, predictor.head)
    while part := list(itertools.islice(items, global_batch_size)):
        arrays, memories = predictor.make(part)
        num_rows = max(num_rows, -(-len(part) // ranks) * ranks)
        outputs = program(trained.params, _fill(arrays, num_rows))
        if waiting:
            yield from _describe(predictor, *waiting)
        waiting = part, memories, outputs
    if waiting:
        yield from _describe(predictor, *waiting)


def best_of(
    scores: jax.Array, num: int, *, num_named: int | None = None
) -> dict[str, jax.Array]:
    """Returns the ``num`` highest probabilities of a softmax, and whose they are.

    Args:
        scores: float32 ``(..., C)``.
        num: At most C.
        num_named: Only the first so many are looked at, the others have no name. None
            for all.

    Example:
        >>> import jax.numpy as jnp
        >>> best = best_of(jnp.log(jnp.array([[0.25, 0.75]])), 1)
        >>> best["indices"].tolist(), best["probabilities"].round(4).tolist()
        ([[1]], [[0.75]])
    """
    named = jax.nn.softmax(scores)[..., :num_named]
    probabilities, indices = jax.lax.top_k(named, num)
    return {"probabilities": probabilities, "indices": indices}


def name_best(
    row: Mapping[str, np.ndarray], names: Sequence[str], kind: str
) -> list[Record]:
    """Returns a record per probability of a row of `best_of`, highest first.

    Args:
        row: Of one sample, ``(num,)`` each.
        names: Of all classes or tokens.
        kind: What they are called in the records.

    Example:
        >>> row = {"indices": np.array([1]), "probabilities": np.array([0.75])}
        >>> name_best(row, ["cat", "dog"], "label")
        [{'label': 'dog', 'probability': 0.75}]
    """
    pairs = zip(row["indices"].tolist(), row["probabilities"].tolist(), strict=True)
    return [
        {kind: names[index], "probability": rounded(probability)}
        for index, probability in pairs
    ]


def rounded(probability: float) -> float:
    """Returns six digits of a probability: what single precision has."""
    return float(f"{probability:.6g}")


def class_names(trained: Trained) -> list[str]:
    """Returns the names of the classes of a model, by label."""
    given = list(trained.config.data.classes or ())
    others = range(len(given), trained.config.model.num_classes)
    return given + [f"LABEL_{label}" for label in others]


def _fill(arrays: Batch, num_rows: int) -> Batch:
    """Repeats the last row until there are ``num_rows``."""
    rows = np.minimum(np.arange(num_rows), len(next(iter(arrays.values()))) - 1)
    return {name: array[rows] for name, array in arrays.items()}


def _describe(
    predictor: AbstractPredictor,
    items: Sequence[Item],
    memories: Sequence[Any],
    outputs: Any,
) -> Iterator[Record]:
    fetched = jax.device_get(outputs)
    for index, (item, memory) in enumerate(zip(items, memories, strict=True)):
        row = {name: array[index] for name, array in fetched.items()}
        yield predictor.describe(item, memory, row)
