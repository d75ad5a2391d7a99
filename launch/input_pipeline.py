"""Batches of a run: from samples of any kind to arrays for the training step.

Training goes through an endless stream of samples. Sample ``i`` is item ``i mod n`` of
a shuffle of epoch ``i // n``, with random numbers of its own, so any process can make
any row of any batch without having made what comes before: that is what resuming and
reading with several processes rest on.
"""

import dataclasses
import sys
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import grain
import jax
import numpy as np
from absl import flags

from launch import ramp_up
from launch.ramp_up import BatchSizes

Batch = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], type]]

TRAIN, VALIDATION = 0, 1
_NUM_THREADS = 2  # one makes a batch while the other waits for the disk
_NUM_READY = 4  # batches


class AbstractSamples(Protocol):
    """Makes samples of a split; what an item of it is, a span or an image, it knows.

    It is pickled if processes make the batches.
    """

    def __len__(self) -> int:
        """Returns the number of items: samples of an epoch."""

    def shapes(self, batch_size: int) -> Shapes:
        """Returns shape and NumPy type of each array of a batch."""

    def make(self, items_B: np.ndarray, samples_B: np.ndarray) -> Batch:
        """Returns a batch, a function of the arguments alone.

        What an array of a name that ends in ``weights`` gives 0 does not count.

        Args:
            items_B: Which item each sample is made of.
            samples_B: The number of each sample, of which its random numbers are drawn.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What a run trains on and is evaluated on.

    Attributes:
        train: Makes samples to train on.
        validation: Makes samples of what is held out; it may have no item.
        fingerprint: Digest of the data: equal where processes or runs read the same.
        summary: A line for the log.
        tokenizer: From text to ids and back; None for images.
        classes: Names of the classes, by label; None if there are none.
    """

    train: AbstractSamples
    validation: AbstractSamples
    fingerprint: str
    summary: str
    tokenizer: Any = None
    classes: tuple[str, ...] | None = None


def build(
    splits: Splits,
    *,
    seed: int,
    global_batch_size: int,
    rows: slice = slice(None),
    num_workers: int = 0,
    sizes: BatchSizes | None = None,
) -> "InputPipeline":
    """Returns the batches of a run.

    Args:
        splits: What they are made of.
        seed: Of the order, below 2**32.
        global_batch_size: Samples of a batch, over all processes.
        rows: The rows of each batch that this process loads.
        num_workers: Processes that make batches; 0 for threads of this one.
        sizes: Of the batches to train on, if they grow to ``global_batch_size``.

    Raises:
        ValueError: If there are no such rows.
    """
    if not len(range(global_batch_size)[rows]):
        raise ValueError(
            f"{rows} selects no row of train.global_batch_size={global_batch_size}."
            " Use a batch with at least a row for each process."
        )
    return InputPipeline(
        splits=splits,
        seed=seed,
        global_batch_size=global_batch_size,
        rows=np.arange(global_batch_size)[rows],
        num_workers=num_workers,
        sizes=sizes or ramp_up.build(None, global_batch_size),
    )


def structs(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types as JAX has them."""
    return {name: jax.ShapeDtypeStruct(*array) for name, array in shapes.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """The batches of a run. `build` makes it.

    Attributes:
        splits: What they are made of.
        seed: Of the order of the samples.
        global_batch_size: Samples of a batch, over all processes.
        rows: The rows that this process loads, int64; of a smaller batch as large a
            share.
        num_workers: Processes that make batches; 0 for threads of this one.
        sizes: Of the batches to train on.
    """

    splits: Splits
    seed: int
    global_batch_size: int
    rows: np.ndarray
    num_workers: int
    sizes: BatchSizes

    def train_batches(self, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yields this process's rows of the batches from ``start_step`` on, forever.

        What runs in the background stops with the ``close()`` of the iterator.
        """
        make = _TrainBatch(
            samples=self.splits.train,
            order=self._order(),
            sizes=self.sizes,
            share=(self.rows[0], self.rows[-1] + 1, self.global_batch_size),
        )
        steps = grain.MapDataset.range(start_step, sys.maxsize)
        return _iterate(steps.map(make), num_workers=self.num_workers)

    def validation_batches(self, num_batches: int | None = None) -> Iterator[Batch]:
        """Yields this process's rows of the held-out samples, each sample once.

        They are the same ones in the same order every time. Rows of the last batch
        beyond the last sample repeat it with weight 0.

        Args:
            num_batches: Ends after so many, if there are more. None: all of them.
        """
        num_all = -(-self.num_validation_samples // self.global_batch_size)
        make = _ValidationBatch(
            samples=self.splits.validation,
            global_batch_size=self.global_batch_size,
            rows=self.rows,
        )
        num = num_all if num_batches is None else min(num_batches, num_all)
        return _iterate(grain.MapDataset.range(num).map(make), num_workers=0)

    def _order(self) -> grain.MapDataset[int]:
        """The item of each sample, endless; every epoch is shuffled differently."""
        items = grain.MapDataset.range(self.num_train_samples)
        return items.shuffle(self.seed).repeat()

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a global batch."""
        return self.shapes_of(self.global_batch_size)

    def shapes_of(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch of so many samples."""
        return structs(self.splits.train.shapes(size))

    @property
    def tokenizer(self) -> Any:
        """From text to ids and back; None for images."""
        return self.splits.tokenizer

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, by label; None if there are none."""
        return self.splits.classes

    @property
    def fingerprint(self) -> str:
        """Digest of the data: equal where processes or runs read the same."""
        return self.splits.fingerprint

    @property
    def num_train_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.splits.train)

    @property
    def num_validation_samples(self) -> int:
        """Samples of the held-out split, 0 if none is held out."""
        return len(self.splits.validation)

    def summary(self) -> str:
        """Returns a line for the log."""
        return self.splits.summary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _TrainBatch:
    """From the number of a step to its batch.

    Attributes:
        samples: Makes it.
        order: The item of each sample.
        sizes: Of the batches.
        share: The rows of this process: begin, end, of how many.
    """

    samples: AbstractSamples
    order: grain.MapDataset[int]
    sizes: BatchSizes
    share: tuple[int, int, int]

    def __call__(self, step: int) -> Batch:
        begin, end, whole = self.share
        size = self.sizes.size_at(step)
        rows_B = np.arange(begin * size // whole, end * size // whole)
        numbers_B = self.sizes.samples_before(step) + rows_B
        items_B = np.array([self.order[number] for number in numbers_B.tolist()])
        return self.samples.make(items_B, numbers_B)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ValidationBatch:
    """From the number of a batch to that part of the held-out split."""

    samples: AbstractSamples
    global_batch_size: int
    rows: np.ndarray

    def __call__(self, number: int) -> Batch:
        items_B = number * self.global_batch_size + self.rows
        is_extra_B = items_B >= len(self.samples)
        items_B = np.minimum(items_B, len(self.samples) - 1)
        batch = self.samples.make(items_B, items_B)
        for name, array in batch.items():
            if name.endswith("weights"):
                array[is_extra_B] = 0
        return batch


def _iterate(
    batches: grain.MapDataset[Batch], *, num_workers: int
) -> Generator[Batch, None, None]:
    """Yields the batches in order, while the next ones are being made."""
    dataset = batches.to_iter_dataset(
        grain.ReadOptions(num_threads=_NUM_THREADS, prefetch_buffer_size=_NUM_READY)
    )
    if num_workers:
        if not flags.FLAGS.is_parsed():  # in a notebook; Grain reads its flags
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers)
        dataset = dataset.mp_prefetch(options).map(_copy)
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()


def _copy(batch: Batch) -> Batch:
    """Returns plain arrays; those from another process hold on to shared memory."""
    return {name: np.array(array) for name, array in batch.items()}
