"""Data of BERT with a head: labelled texts or words, see `launch.data.labelled_texts`.

Without files it is Python's own source, see `launch.data.python_tasks`.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
import tokenizers

from launch import input_pipeline
from launch.data import (
    cache,
    classes,
    draws,
    labelled_samples,
    labelled_texts,
    labelled_tokens,
    python_tasks,
    tokenizer,
)
from launch.data.labelled_samples import ClassifiedSamples, TaggedSamples
from launch.data.labelled_texts import LabelledTexts
from launch.data.labelled_tokens import NO_LABEL, Encode, LabelledTokens
from launch.data.tokenizer import Vocabulary
from launch.input_pipeline import Splits
from launch.run_config import DataConfig
from models.bert_heads import BertHeadConfig

TAGGER_FIELDS = frozenset(
    "files validation_files classes tokenizer cache_dir seq_length validation_fraction"
    " num_workers".split()
)
CLASSIFIER_FIELDS = TAGGER_FIELDS | {"label_smoothing"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is to be learned of texts.

    Attributes:
        open: Opens files.
        embedded: What it is about without files.
        encode: Turns samples into tokens.
    """

    open: Callable[[Sequence[str], pathlib.Path, str], LabelledTexts]
    embedded: Callable[[], LabelledTexts]
    encode: Encode


CLASSIFY = _Task(
    open=labelled_texts.open_classified,
    embedded=python_tasks.packages,
    encode=labelled_tokens.encode_texts,
)
TAG = _Task(
    open=labelled_texts.open_tagged,
    embedded=python_tasks.token_kinds_of_source,
    encode=labelled_tokens.encode_words,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Labelled samples, split.

    Attributes:
        name: For people.
        stores: Samples to train on and held out, with the labels of the model.
        indices: Which of them.
        vocabulary: Of the tokenizer.
        tokenizer: From text to ids.
        classes: Their names, by label.
    """

    name: str
    stores: tuple[LabelledTokens, LabelledTokens]
    indices: tuple[np.ndarray, np.ndarray]
    vocabulary: Vocabulary
    tokenizer: tokenizers.Tokenizer
    classes: tuple[str, ...]


def open_classifier_splits(
    data: DataConfig, model: BertHeadConfig, seed: int
) -> Splits:
    """Returns what to train on, after tokenizing it unless that is cached.

    Args:
        data: What to train on.
        model: Says how many classes there may be; a trained tokenizer has at most its
            ``vocab_size`` tokens.
        seed: Of the split; below 2**32.

    Raises:
        FileNotFoundError: If files are missing; all of them are named.
        ValueError: If a sample is not of the right form, of a class that is unknown, or
            there are too many classes, or too few samples; the tokenizer does not fit
            the model; or the cache cannot be written.
    """
    opened = _open(data, model, seed, CLASSIFY)
    train, validation = (
        ClassifiedSamples(
            store=store,
            indices=indices,
            vocabulary=opened.vocabulary,
            seq_length=data.seq_length,
            num_classes=model.num_classes,
            label_smoothing=smoothing,
        )
        for store, indices, smoothing in zip(
            opened.stores, opened.indices, (data.label_smoothing, 0.0), strict=True
        )
    )
    return _splits(data, opened, train, validation)


def open_tagger_splits(data: DataConfig, model: BertHeadConfig, seed: int) -> Splits:
    """Returns what to train on; see `open_classifier_splits`."""
    opened = _open(data, model, seed, TAG)
    train, validation = (
        TaggedSamples(
            store=store,
            indices=indices,
            vocabulary=opened.vocabulary,
            seq_length=data.seq_length,
        )
        for store, indices in zip(opened.stores, opened.indices, strict=True)
    )
    return _splits(data, opened, train, validation)


def classifier_batch_shapes(
    data: DataConfig, model: BertHeadConfig, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the samples."""
    shapes = labelled_samples.classified_shapes(
        data.seq_length, model.num_classes, global_batch_size
    )
    return input_pipeline.structs(shapes)


def tagger_batch_shapes(
    data: DataConfig, model: BertHeadConfig, global_batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a global batch, without looking at the samples."""
    shapes = labelled_samples.tagged_shapes(data.seq_length, global_batch_size)
    return input_pipeline.structs(shapes)


def _open(data: DataConfig, model: BertHeadConfig, seed: int, task: _Task) -> _Opened:
    cache_dir = cache.directory(data.cache_dir)
    if data.files:
        texts = task.open(data.files, cache_dir, "data.files")
    else:
        texts = task.embedded()
    if data.tokenizer is None:
        tokens = tokenizer.train(texts, cache_dir, vocab_size=model.vocab_size)
    else:
        tokens = tokenizer.load(
            data.tokenizer, vocab_size=model.vocab_size, masks_words=False
        )
    found = labelled_tokens.tokenize(texts, tokens, cache_dir, task.encode)
    names = data.classes or classes.order(found.names.tolist())
    found = _relabel(found, names, texts)
    classes.check(names, name=texts.name, num_classes=model.num_classes)
    if data.validation_files:
        others = task.open(data.validation_files, cache_dir, "data.validation_files")
        held_from = labelled_tokens.tokenize(others, tokens, cache_dir, task.encode)
        held_from = _relabel(held_from, names, others)
        is_held_out = np.isin(found.hashes, held_from.hashes)
        held_out = np.arange(len(held_from))
    else:
        held_from = found
        held_out = _held_out(found, data.validation_fraction, seed)
        is_held_out = np.isin(found.hashes, found.hashes[held_out])
    trained = np.flatnonzero(~is_held_out)
    if len(trained) == 0:
        raise ValueError(
            f"All {len(found)} samples of {texts.name} are held out, and none is left"
            " to train on. Add samples, or change"
            f" data.validation_fraction={data.validation_fraction} or"
            f" data.validation_files={data.validation_files}."
        )
    return _Opened(
        name=texts.name,
        stores=(found, held_from),
        # So that a part of the validation is like the whole, not the first classes.
        indices=(trained, draws.shuffle(held_out, seed=seed)),
        vocabulary=tokenizer.vocabulary(tokens),
        tokenizer=tokens,
        classes=tuple(names),
    )


def _held_out(store: LabelledTokens, fraction: float, seed: int) -> np.ndarray:
    """Returns the indices of samples to hold out, all or none of each source.

    Pieces with a class each are drawn from each class apart: it may have few sources.
    """
    is_of_part = [np.ones(len(store), bool)]
    are_pieces = not np.array_equal(store.sources, store.hashes)
    if are_pieces and len(store.labels) == len(store):
        is_of_part = [store.labels == label for label in np.unique(store.labels)]
    parts = map(np.flatnonzero, is_of_part)
    drawn = [
        part[draws.is_held_out(store.sources[part], fraction=fraction, seed=seed)]
        for part in parts
    ]
    return np.sort(np.concatenate(drawn))


def _relabel(
    store: LabelledTokens, names: Sequence[str], texts: LabelledTexts
) -> LabelledTokens:
    """Returns the samples with the labels of the model.

    Raises:
        ValueError: If a label is none of ``names``.
    """
    label_of = {name: label for label, name in enumerate(names)}
    unknown = [name for name in store.names.tolist() if name not in label_of]
    if unknown:
        raise ValueError(
            f"{texts.place_of(unknown[0])}: the label {unknown[0]!r} is none of the"
            f" {len(names)} classes {classes.describe(names)}"
            + (f", nor are {len(unknown) - 1} others" if unknown[1:] else "")
            + ". Correct it, or name all classes in data.classes."
        )
    numbers = np.array([label_of[name] for name in store.names.tolist()], np.int32)
    labels = np.where(store.labels == NO_LABEL, NO_LABEL, numbers[store.labels])
    return dataclasses.replace(store, labels=labels, names=np.array(names))


def _splits(
    data: DataConfig,
    opened: _Opened,
    train: ClassifiedSamples | TaggedSamples,
    validation: ClassifiedSamples | TaggedSamples,
) -> Splits:
    num_cut = sum(
        labelled_samples.count_cut(part.store, part.indices, data.seq_length)
        for part in (train, validation)
    )
    summary = (
        f"{opened.name}: {len(train):,} samples to train on of"
        f" {len(opened.classes):,} classes, {len(validation):,} held out;"
        f" {opened.vocabulary.size:,} tokens in the vocabulary"
    )
    num_equal = len(train.store) - len(train)
    if data.validation_files and num_equal:
        summary += f"; {num_equal:,} left out, as they are held out too"
    if num_cut:
        summary += f"; {num_cut:,} cut to data.seq_length={data.seq_length} tokens"
    return Splits(
        train=train,
        validation=validation,
        fingerprint=labelled_tokens.fingerprint(train.store),
        summary=summary,
        tokenizer=opened.tokenizer,
        classes=opened.classes,
    )
