"""Everything that a run is made of, built from its config."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import (
    distributed,
    input_pipeline,
    optimizer,
    pipelines,
    state,
    step,
    vocabulary,
)
from launch.run_config import RunConfig
from models import MODELS, stacked
from models.sharding import without_axis
from models.stacked import Batch
from sbp.pipeline.region import ManualRegion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, ready to go.

    Attributes:
        config: Its config.
        mesh: Its devices.
        data: Its batches.
        steps: What its two programs are built from.
    """

    config: RunConfig
    mesh: Mesh
    data: input_pipeline.InputPipeline
    steps: step.StepConfig

    @property
    def num_params(self) -> int:
        """Parameters of the model, padding of the vocabulary included."""
        shapes = jax.tree.leaves(self.abstract_state.params)
        return sum(int(np.prod(leaf.shape)) for leaf in shapes)

    @property
    def abstract_state(self) -> state.TrainState:
        """Shapes, dtypes and shardings of the train state."""
        return state.abstract_state(
            self.steps.model, self.steps.optimizer, self.steps.shardings
        )

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a global batch."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._batch_sharding
            ),
            self.data.batch_shapes,
        )

    def create_state(self) -> state.TrainState:
        """Returns the state at step 0, a function of the seed alone."""
        return state.create_state(
            self.steps.model,
            self.steps.optimizer,
            seed=self.config.train.seed,
            shardings=self.steps.shardings,
        )

    def to_device(self, batch: dict[str, np.ndarray]) -> Batch:
        """Returns a global batch, of which this process gives its rows."""
        size = self.config.train.global_batch_size
        return {
            name: jax.make_array_from_process_local_data(
                self._batch_sharding, rows, (size, *rows.shape[1:])
            )
            for name, rows in batch.items()
        }

    @property
    def _batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("data"))


def build(config: RunConfig, mesh: Mesh) -> Job:
    """Returns the job; reads the data, but makes no array on a device.

    Args:
        config: The resolved config.
        mesh: Its devices, from `distributed.create_mesh`.

    Raises:
        ValueError: If the data cannot be used; see `input_pipeline.build`.
        OSError: If it cannot be read.
    """
    size = config.train.global_batch_size
    data = input_pipeline.build(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        global_batch_size=size,
        rows=distributed.process_rows(mesh, size),
    )
    return Job(config=config, mesh=mesh, data=data, steps=build_steps(config, mesh))


def build_steps(config: RunConfig, mesh: Mesh) -> step.StepConfig:
    """Returns what the programs of a run are built from; no data is read."""
    family, dist = MODELS[config.model_name], config.dist
    region = ManualRegion(mesh, ("stage", "data"))
    assignment = pipelines.assign(dist, config.model)
    indices = assignment.layer_indices
    model = stacked.stack(lambda rngs: family.module(config.model, rngs=rngs))
    rows = family.rows(config.model)
    if dist.pipeline_vocabulary == "all_stages":
        model = dataclasses.replace(model, adapt=vocabulary.over_stages(region))
    else:
        rows = without_axis(rows, "stage")
    model = dataclasses.replace(model, layer_order=tuple(indices.ravel().tolist()))
    rule = optimizer.build(config.optim, num_steps=config.train.num_steps)
    specs = state.param_specs(model, rows, mesh.axis_names)
    is_dropping = config.model.dropout_rate or config.model.attention_dropout_rate
    return step.StepConfig(
        model=model,
        optimizer=rule,
        learning_rate=optimizer.learning_rate_schedule(
            config.optim, num_steps=config.train.num_steps
        ),
        region=region,
        specs=specs,
        shardings=state.state_shardings(model, rule, specs=specs, mesh=mesh),
        num_microbatches=config.train.num_microbatches,
        seed=config.train.seed if is_dropping else None,
        remat=config.train.remat,
        pipeline=pipelines.build(
            dist, region, indices, num_microbatches=config.train.num_microbatches
        ),
    )
