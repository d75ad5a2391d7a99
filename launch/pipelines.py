"""From the ``dist`` section to the pipeline that runs a model."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from launch.run_config import DistConfig, RunConfig
from sbp import pipeline
from sbp.pipeline.executor import Executor
from sbp.pipeline.parts import AbstractPipeline
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.single_stage import SingleStage

LIBAI = "libai"


def broken_rules(config: RunConfig) -> Iterator[str]:
    """Yields one sentence per broken rule of stages, chunks and schedule."""
    dist = config.dist
    try:
        assign(dist, config.model)
    except ValueError as error:
        yield f"dist: {error}"
    if dist.pipeline_parallel_size == 1:
        return
    try:
        _schedule(dist, dist.pipeline_schedule, _fewest_microbatches(config))
    except ValueError as error:
        yield f"dist: {error}"
    yield from _broken_vocabulary_rules(config)


def assign(dist: DistConfig, model: Any) -> pipeline.StageAssignment:
    """Returns which stage holds which layers.

    Where the first and the last stage have embedding and output layer to themselves,
    they get fewer layers by default.

    Args:
        dist: Sizes and ``pipeline_stage_layers``.
        model: Config of the model.

    Raises:
        ValueError: If the layers cannot be assigned so.
    """
    stages, chunks = dist.pipeline_parallel_size, dist.pipeline_num_chunks
    layers = dist.pipeline_stage_layers
    if layers == LIBAI:
        _check_libai(chunks)
        return pipeline.assign_libai(model.num_layers, stages)
    if isinstance(layers, str):
        raise ValueError(
            f"pipeline_stage_layers={layers!r} is neither {LIBAI!r} nor a list of"
            " numbers. Use None to balance the stages."
        )
    if layers is not None:
        assigned = pipeline.assign_layers(
            layers, num_layers=model.num_layers, num_stages=stages, num_chunks=chunks
        )
    else:
        assigned = pipeline.assign_balanced(
            model.num_layers,
            stages,
            num_chunks=chunks,
            head_cost=_head_cost(dist, model),
        )
    if stages == 1:  # its chunks follow each other: they are one
        return pipeline.assign_balanced(model.num_layers, 1)
    return assigned


def build(
    dist: DistConfig,
    region: ManualRegion,
    layer_indices: np.ndarray,
    *,
    num_microbatches: int,
) -> AbstractPipeline:
    """Returns the pipeline of a run.

    Args:
        dist: Sizes and schedule.
        region: Of the run.
        layer_indices: From the assignment of layers to stages.
        num_microbatches: Of each data-parallel rank.

    Raises:
        ValueError: If the schedule cannot have these sizes.
    """
    if dist.pipeline_parallel_size == 1:
        return SingleStage(region)
    tables = [
        pipeline.to_tables(_schedule(dist, name, num_microbatches))
        for name in (dist.pipeline_schedule, "forward_only")
    ]
    return Executor(
        region=region,
        tables=tables[0],
        forward_tables=tables[1],
        layer_indices=layer_indices,
        is_shared=dist.pipeline_vocabulary == "all_stages",
    )


def _fewest_microbatches(config: RunConfig) -> int:
    """Returns those of the first batch, if batches grow."""
    train = config.train
    if train.rampup_batch_size is None or list(config.broken_rules()):
        return train.num_microbatches
    return config.at_batch_size(train.rampup_batch_size[0]).train.num_microbatches


def _schedule(dist: DistConfig, name: str, num_microbatches: int) -> pipeline.Schedule:
    sizes = dist.pipeline_parallel_size, num_microbatches, dist.pipeline_num_chunks
    return pipeline.build(name, *sizes, head_delay=1)


def _head_cost(dist: DistConfig, model: Any) -> float:
    if dist.pipeline_vocabulary == "all_stages" or not _has_vocabulary(model):
        return 0.0
    return pipeline.head_cost(
        vocab_size=model.vocab_size, model_dim=model.model_dim, mlp_dim=model.mlp_dim
    )


def _has_vocabulary(model: Any) -> bool:
    return "vocab_size" in {field.name for field in dataclasses.fields(model)}


def _check_libai(num_chunks: int) -> None:
    if num_chunks > 1:
        raise ValueError(
            f"pipeline_stage_layers={LIBAI!r} gives every stage one piece, but"
            f" pipeline_num_chunks={num_chunks}. Use one chunk, or list the layers of"
            " each piece."
        )


def _broken_vocabulary_rules(config: RunConfig) -> Iterator[str]:
    dist, model = config.dist, config.model
    if dist.pipeline_vocabulary != "all_stages" or not _has_vocabulary(model):
        return
    stages, tensor = dist.pipeline_parallel_size, dist.tensor_parallel_size
    # That it divides over tensor alone is a rule of the model's.
    if model.padded_vocab_size % tensor or not model.padded_vocab_size % (
        stages * tensor
    ):
        return
    yield (
        f"model.padded_vocab_size={model.padded_vocab_size} is not divisible by"
        f" dist.pipeline_parallel_size={stages} x dist.tensor_parallel_size={tensor},"
        " over which dist.pipeline_vocabulary='all_stages' spreads it. Set"
        f" model.vocab_multiple={math.lcm(model.vocab_multiple, stages * tensor)}, or"
        " use 'first_and_last_stage'."
    )
