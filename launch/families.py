"""What the trainer needs to know of each model besides the model: one table.

A further model is an entry here and one in `models.MODELS`, and a function that opens
its data if that is of another kind.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from launch import (
    bert_data,
    flops,
    gpt2_data,
    image_data,
    input_pipeline,
    labelled_data,
    scores,
)
from launch.input_pipeline import InputPipeline, Splits
from launch.run_config import DataConfig, RunConfig

Arrays = dict[str, jax.ShapeDtypeStruct]
Batch = dict[str, jax.Array]
Means = dict[str, float]


def no_rules(config: RunConfig) -> Iterator[str]:
    """Yields nothing."""
    yield from ()


def no_scores(means: Mapping[str, float], sums: Mapping[str, np.ndarray]) -> Means:
    """Returns nothing."""
    return {}


def no_tally(model: Any, x: jax.Array, batch: Batch) -> Batch:
    """Returns nothing."""
    return {}


def tallies(model: Any, x: jax.Array, batch: Batch) -> Batch:
    """Returns the ``tallies`` of a model that tells classes apart."""
    return model.tallies(x, batch)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Data and costs of a model.

    Attributes:
        open_splits: Makes samples: ``open_splits(data, model, seed)``.
        batch_shapes: Arrays of a global batch: ``batch_shapes(data, model, size)``.
        train_flops: Of a step on a global batch.
        num_tokens: That a sample has in the model, padding included.
        data_fields: What the data depends on in the section ``data``.
        split_sizes: Sizes of a model that are split over ``tensor``, by name.
        broken_rules: One sentence per broken rule between ``data`` and ``model``.
        tally: What evaluation sums up besides losses, such as what F1 scores are made
            of: ``tally(model, x, batch)``, from the output of the last block.
        scores: What evaluation reports besides, from the means over the held-out split
            and from the sums.
    """

    open_splits: Callable[[DataConfig, Any, int], Splits]
    batch_shapes: Callable[[DataConfig, Any, int], Arrays]
    train_flops: Callable[[RunConfig], int]
    num_tokens: Callable[[RunConfig], int]
    data_fields: frozenset[str]
    split_sizes: Callable[[Any], dict[str, int]]
    broken_rules: Callable[[RunConfig], Iterator[str]] = no_rules
    tally: Callable[[Any, jax.Array, Batch], Batch] = no_tally
    scores: Callable[[Mapping[str, float], Mapping[str, np.ndarray]], Means] = no_scores


def build(config: RunConfig, *, rows: slice = slice(None)) -> InputPipeline:
    """Returns the batches of a run, after preparing its data unless that is cached.

    Args:
        config: The resolved config.
        rows: The rows of each batch that this process loads.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If the data cannot be used.
    """
    if broken := list(config.data.broken_rules()):
        raise ValueError("\n".join(f"data.{rule}" for rule in broken))
    seed = config.train.seed
    family = FAMILIES[config.model_name]
    return input_pipeline.build(
        family.open_splits(config.data, config.model, seed),
        seed=seed,
        global_batch_size=config.train.global_batch_size,
        rows=rows,
        num_workers=config.data.num_workers,
        sizes=config.batch_sizes,
    )


def batch_shapes(config: RunConfig) -> Arrays:
    """Returns the arrays of a global batch, without looking at the data."""
    shapes_of = FAMILIES[config.model_name].batch_shapes
    return shapes_of(config.data, config.model, config.train.global_batch_size)


def broken_rules(config: RunConfig) -> Iterator[str]:
    """Yields one sentence per broken rule between the model and other sections."""
    family = FAMILIES[config.model_name]
    yield from _broken_split_rules(config, family.split_sizes(config.model))
    yield from family.broken_rules(config)
    yield from _broken_held_out_rules(config.data)
    defaults = dataclasses.asdict(DataConfig())
    for name, value in dataclasses.asdict(config.data).items():
        unset = defaults[name]
        if name not in family.data_fields and value != unset:
            yield (
                f"data.{name}={value!r} has no meaning for"
                f" model.name={config.model_name!r}. Leave it at {unset!r}."
            )


def _broken_split_rules(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    tensor = config.dist.tensor_parallel_size
    for name, size in sizes.items():
        if size % tensor:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            near = [n for n in divisors if n <= 2 * tensor]
            yield (
                f"model.{name}={size} is not divisible by"
                f" dist.tensor_parallel_size={tensor}. Use a size of"
                f" {', '.join(map(str, near))}, or another {name}."
            )


def _broken_held_out_rules(data: DataConfig) -> Iterator[str]:
    if data.validation_files and (
        data.validation_fraction != DataConfig().validation_fraction
    ):
        yield (
            f"data.validation_fraction={data.validation_fraction} has no meaning beside"
            f" data.validation_files={data.validation_files}. Leave out the files, or"
            f" set the fraction to {DataConfig().validation_fraction}, its default."
        )


def _sequence_fits(config: RunConfig) -> Iterator[str]:
    if config.data.seq_length > config.model.max_len:
        yield (
            f"data.seq_length={config.data.seq_length} is longer than the"
            f" {config.model.max_len} positions of model.max_len. Shorten the"
            " sequences or raise max_len."
        )


def _classes_fit(config: RunConfig) -> Iterator[str]:
    data, num_classes = config.data, config.model.num_classes
    if data.classes is not None and len(data.classes) > num_classes:
        yield (
            f"data.classes names {len(data.classes)} classes, more than"
            f" model.num_classes={num_classes}. Set"
            f" model.num_classes={len(data.classes)}."
        )


def _labelled_texts_fit(config: RunConfig) -> Iterator[str]:
    yield from _sequence_fits(config)
    yield from _classes_fit(config)


def _images_fit(config: RunConfig) -> Iterator[str]:
    yield from _classes_fit(config)
    data, num = config.data, config.model.num_channels
    if num not in (1, 3):
        yield (
            f"model.num_channels={num}, but images are read as gray or as RGB. Use 1"
            " or 3."
        )
    for name, values in {
        "pixel_mean": data.pixel_mean,
        "pixel_std": data.pixel_std,
    }.items():
        if len(values) not in (1, num):
            yield (
                f"data.{name}={values} has {len(values)} values, but"
                f" model.num_channels={num}. Give one for all channels, or one each."
            )


def _bert_flops(config: RunConfig) -> int:
    return flops.bert_train_flops(
        config.model,
        seq_length=config.data.seq_length,
        num_predicted=batch_shapes(config)["positions"].shape[1],
        num_samples=config.train.global_batch_size,
    )


def _flops_of(train_flops: Callable[..., int]) -> Callable[[RunConfig], int]:
    """Returns the FLOPs of a step of a run whose samples are sequences."""

    def count(config: RunConfig) -> int:
        return train_flops(
            config.model,
            seq_length=config.data.seq_length,
            num_samples=config.train.global_batch_size,
        )

    return count


def _vit_flops(config: RunConfig) -> int:
    size = config.train.global_batch_size
    return flops.vit_train_flops(config.model, num_samples=size)


def _text_sizes(model: Any) -> dict[str, int]:
    return _block_sizes(model) | {"padded_vocab_size": model.padded_vocab_size}


def _block_sizes(model: Any) -> dict[str, int]:
    return {"num_heads": model.num_heads, "mlp_dim": model.mlp_dim}


FAMILIES = {
    "bert": Family(
        open_splits=bert_data.open_splits,
        batch_shapes=bert_data.batch_shapes,
        train_flops=_bert_flops,
        num_tokens=lambda config: config.data.seq_length,
        data_fields=bert_data.FIELDS,
        split_sizes=_text_sizes,
        broken_rules=_sequence_fits,
    ),
    "bert_classifier": Family(
        open_splits=labelled_data.open_classifier_splits,
        batch_shapes=labelled_data.classifier_batch_shapes,
        train_flops=_flops_of(flops.bert_classifier_train_flops),
        num_tokens=lambda config: config.data.seq_length,
        data_fields=labelled_data.CLASSIFIER_FIELDS,
        split_sizes=_text_sizes,
        broken_rules=_labelled_texts_fit,
        tally=tallies,
        scores=scores.f1,
    ),
    "bert_tagger": Family(
        open_splits=labelled_data.open_tagger_splits,
        batch_shapes=labelled_data.tagger_batch_shapes,
        train_flops=_flops_of(flops.bert_tagger_train_flops),
        num_tokens=lambda config: config.data.seq_length,
        data_fields=labelled_data.TAGGER_FIELDS,
        split_sizes=_text_sizes,
        broken_rules=_labelled_texts_fit,
        tally=tallies,
        scores=scores.f1,
    ),
    "gpt2": Family(
        open_splits=gpt2_data.open_splits,
        batch_shapes=gpt2_data.batch_shapes,
        train_flops=_flops_of(flops.gpt2_train_flops),
        num_tokens=lambda config: config.data.seq_length,
        data_fields=gpt2_data.FIELDS,
        split_sizes=_text_sizes,
        broken_rules=_sequence_fits,
        scores=scores.perplexity,
    ),
    "vit": Family(
        open_splits=image_data.open_splits,
        batch_shapes=image_data.batch_shapes,
        train_flops=_vit_flops,
        num_tokens=lambda config: config.model.seq_length,
        data_fields=image_data.FIELDS,
        split_sizes=_block_sizes,
        broken_rules=_images_fit,
        tally=tallies,
        scores=scores.f1,
    ),
}
