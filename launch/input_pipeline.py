"""Batches of a run: from ``config.data`` to arrays for the training step.

Training goes through an endless stream of samples. Sample ``i`` is span ``i mod n`` of
a shuffle of epoch ``i // n``, with random numbers of its own, so any process can make
any row of any batch without having made what comes before: that is what resuming and
reading with several processes rest on.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Generator, Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from launch.data import bert_samples, cache, corpus, token_store, tokenizer
from launch.data.bert_samples import Batch, BertSamples, Recipe
from launch.data.token_store import TokenStore
from launch.run_config import DataConfig

_TRAIN, _VALIDATION = 0, 1
_NUM_THREADS = 2  # one makes a batch while the other waits for the disk
_NUM_READY = 4  # batches


def build(
    data: DataConfig,
    *,
    vocab_size: int,
    seed: int,
    global_batch_size: int,
    rows: slice = slice(None),
) -> "InputPipeline":
    """Returns the batches of a run, after tokenizing its corpus unless that is cached.

    Args:
        data: What to train on.
        vocab_size: Tokens that the model has. A trained tokenizer has at most as many.
        seed: Of the split, the order and the samples; below 2**32.
        global_batch_size: Samples of a batch, over all processes.
        rows: The rows of each batch that this process loads.

    Raises:
        FileNotFoundError: If files are missing; all of them are named.
        ValueError: If a field is out of its range, a file cannot be read, the corpus is
            too small, the tokenizer does not fit the model, or the cache cannot be
            written.
    """
    _check(data, global_batch_size=global_batch_size, rows=rows)
    recipe = _recipe(data)
    cache_dir = pathlib.Path(data.cache_dir or cache.DEFAULT_DIRECTORY).expanduser()
    text = corpus.open_corpus(data.files, cache_dir)
    if data.tokenizer is None:
        tokens = tokenizer.train(text, cache_dir, vocab_size=vocab_size)
    else:
        masks_words = data.masking != "token"
        tokens = tokenizer.load(
            data.tokenizer, vocab_size=vocab_size, masks_words=masks_words
        )
    store = token_store.tokenize(text, tokens, cache_dir)
    vocabulary = tokenizer.vocabulary(tokens)
    splits = bert_samples.split_documents(
        store, validation_fraction=data.validation_fraction, seed=seed
    )
    _check_size(data, text.name, store, splits)

    def make_samples(split: int) -> BertSamples:
        length = recipe.seq_length - bert_samples.NUM_SPECIAL
        return BertSamples(
            recipe=recipe,
            store=store,
            vocabulary=vocabulary,
            spans=bert_samples.cut_spans(store, splits[split], length),
            seed=2 * seed + split,
        )

    return InputPipeline(
        name=text.name,
        tokenizer=tokens,
        train=make_samples(_TRAIN),
        validation=make_samples(_VALIDATION),
        documents=splits,
        seed=seed,
        global_batch_size=global_batch_size,
        rows=np.arange(global_batch_size)[rows],
        num_workers=data.num_workers,
    )


def batch_shapes(
    data: DataConfig, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the corpus."""
    return _structs(_recipe(data), global_batch_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """The batches of a run. `build` makes it.

    Attributes:
        name: Of the corpus, for people.
        tokenizer: From text to ids and back.
        train: Makes samples of the documents to train on.
        validation: Makes samples of those held out.
        documents: Both splits' documents, as indices of the token store.
        seed: Of the order of the samples.
        global_batch_size: Samples of a batch, over all processes.
        rows: The rows that this process loads, int64.
        num_workers: Processes that make batches; 0 for threads of this one.
    """

    name: str
    tokenizer: Any
    train: BertSamples
    validation: BertSamples
    documents: tuple[np.ndarray, np.ndarray]
    seed: int
    global_batch_size: int
    rows: np.ndarray
    num_workers: int

    def train_batches(self, start_step: int = 0) -> Generator[Batch, None, None]:
        """Yields this process's rows of the batches from ``start_step`` on, forever.

        What runs in the background stops with the ``close()`` of the iterator.
        """
        make = _TrainBatch(
            samples=self.train,
            order=self._order(),
            global_batch_size=self.global_batch_size,
            rows=self.rows,
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
            samples=self.validation,
            global_batch_size=self.global_batch_size,
            rows=self.rows,
        )
        num = num_all if num_batches is None else min(num_batches, num_all)
        return _iterate(grain.MapDataset.range(num).map(make), num_workers=0)

    def _order(self) -> grain.MapDataset[int]:
        """The span of each sample, endless; every epoch is shuffled differently."""
        spans = grain.MapDataset.range(len(self.train.spans))
        return spans.shuffle(self.seed).repeat()

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a global batch."""
        return _structs(self.train.recipe, self.global_batch_size)

    @property
    def fingerprint(self) -> str:
        """Digest of the tokens: equal where processes or runs read the same corpus."""
        return self.train.store.fingerprint

    @property
    def num_train_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.train.spans)

    @property
    def num_validation_samples(self) -> int:
        """Samples of the held-out split, 0 if none is held out."""
        return len(self.validation.spans)

    @property
    def num_train_tokens(self) -> int:
        """Tokens of the documents to train on."""
        return bert_samples.count_tokens(self.train.store, self.documents[_TRAIN])

    def summary(self) -> str:
        """Returns a line for the log."""
        return (
            f"{self.name}: {len(self.documents[_TRAIN]):,} documents to train on with"
            f" {self.num_train_tokens:,} tokens of {self.train.vocabulary.size:,},"
            f" {self.num_train_samples:,} samples an epoch;"
            f" {len(self.documents[_VALIDATION]):,} documents held out,"
            f" {self.num_validation_samples:,} samples"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _TrainBatch:
    """From the number of a step to its batch."""

    samples: BertSamples
    order: grain.MapDataset[int]
    global_batch_size: int
    rows: np.ndarray

    def __call__(self, step: int) -> Batch:
        numbers_B = step * self.global_batch_size + self.rows
        spans_B = np.array([self.order[number] for number in numbers_B.tolist()])
        return self.samples.make(spans_B, numbers_B)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ValidationBatch:
    """From the number of a batch to that part of the held-out split."""

    samples: BertSamples
    global_batch_size: int
    rows: np.ndarray

    def __call__(self, number: int) -> Batch:
        spans_B = number * self.global_batch_size + self.rows
        is_extra_B = spans_B >= len(self.samples.spans)
        spans_B = np.minimum(spans_B, len(self.samples.spans) - 1)
        batch = self.samples.make(spans_B, spans_B)
        batch["sample_weights"][is_extra_B] = 0
        batch["weights"][is_extra_B] = 0
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


def _structs(recipe: Recipe, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = bert_samples.shapes(recipe, batch_size)
    return {name: jax.ShapeDtypeStruct(*array) for name, array in shapes.items()}


def _recipe(data: DataConfig) -> Recipe:
    return Recipe(
        seq_length=data.seq_length,
        masked_fraction=data.masked_fraction,
        masking=data.masking,
        short_fraction=data.short_fraction,
    )


def _check(data: DataConfig, *, global_batch_size: int, rows: slice) -> None:
    """Checks what needs no file."""
    if broken := list(data.broken_rules()):
        raise ValueError("\n".join(f"data.{rule}" for rule in broken))
    if not len(range(global_batch_size)[rows]):
        raise ValueError(
            f"{rows} selects no row of train.global_batch_size={global_batch_size}."
            " Use a batch with at least a row for each process."
        )


def _check_size(
    data: DataConfig,
    name: str,
    store: TokenStore,
    splits: tuple[np.ndarray, np.ndarray],
) -> None:
    """Checks that each split makes at least a sample."""
    needs = data.seq_length - bert_samples.NUM_SPECIAL
    for split, documents in zip(("training", "validation"), splits, strict=True):
        if split == "validation" and data.validation_fraction == 0:
            continue
        num_tokens = bert_samples.count_tokens(store, documents)
        if len(documents) < 2 or num_tokens < needs:
            raise ValueError(
                f"The corpus, {name}, is smaller than a sample: of its"
                f" {store.num_documents} documents the {split} split has"
                f" {len(documents)} of two sentences or more, {num_tokens} tokens. It"
                f" needs two, and {needs} tokens for data.seq_length={data.seq_length}."
                " Add text, put blank lines between documents, or change"
                f" data.validation_fraction={data.validation_fraction} or"
                " data.seq_length."
            )
