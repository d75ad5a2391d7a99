"""From the ``dist`` section to the pipeline that runs a model."""

import numpy as np

from launch.run_config import DistConfig
from models.bert import BertConfig
from sbp import pipeline
from sbp.pipeline.executor import Executor
from sbp.pipeline.parts import AbstractPipeline
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.single_stage import SingleStage


def assign(dist: DistConfig, model: BertConfig) -> pipeline.StageAssignment:
    """Returns which stage holds which layers.

    Where the first and the last stage have embedding and output layer to themselves,
    they get fewer layers by default.

    Args:
        dist: Sizes and ``pipeline_stage_layers``.
        model: Sizes of the model.

    Raises:
        ValueError: If the layers cannot be assigned so.
    """
    stages, chunks = dist.pipeline_parallel_size, dist.pipeline_num_chunks
    layers = dist.pipeline_stage_layers
    if layers == "libai":
        return pipeline.assign_libai(model.num_layers, stages)
    if isinstance(layers, tuple):
        return pipeline.assign_layers(
            layers, num_layers=model.num_layers, num_stages=stages, num_chunks=chunks
        )
    head_cost = 0.0
    if dist.pipeline_vocabulary == "first_and_last_stage":
        head_cost = pipeline.head_cost(
            vocab_size=model.vocab_size,
            model_dim=model.model_dim,
            mlp_dim=model.mlp_dim,
        )
    return pipeline.assign_balanced(
        model.num_layers, stages, num_chunks=chunks, head_cost=head_cost
    )


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
    sizes = dist.pipeline_parallel_size, num_microbatches, dist.pipeline_num_chunks
    tables = [
        pipeline.to_tables(pipeline.build(name, *sizes, head_delay=1))
        for name in (dist.pipeline_schedule, "forward_only")
    ]
    return Executor(
        region=region,
        tables=tables[0],
        forward_tables=tables[1],
        layer_indices=layer_indices,
        is_shared=dist.pipeline_vocabulary == "all_stages",
    )
