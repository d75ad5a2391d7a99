"""Everything that a run is made of, built from its config."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import (
    adapters,
    attention,
    context_parallel,
    distributed,
    families,
    init_from,
    loss_scale,
    offload,
    optimizer,
    pipelines,
    precision,
    resolve,
    sequence_parallel,
    state,
    step,
    vocabulary,
    zero,
)
from launch.checkpoint import Checkpointer
from launch.hardware import Peak
from launch.input_pipeline import InputPipeline
from launch.metrics import StepCost
from launch.run_config import RunConfig
from launch.saved_form import SavedForm
from models import MODELS, ModelFamily, lora, stacked
from models.sharding import Rows, without_axis
from models.stacked import Batch, Params, StackedModel
from sbp._compat import has_cudnn
from sbp.pipeline.region import ManualRegion


class DataError(Exception):
    """The data of a run cannot be used; the message says why and what to do."""


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
    data: InputPipeline
    steps: step.StepConfig

    @property
    def num_params(self) -> int:
        """Parameters of the model, padding of the vocabulary included."""
        shapes = jax.tree.leaves(self.saved_form.abstract_saved.params)
        return sum(int(np.prod(leaf.shape)) for leaf in shapes)

    @property
    def num_trained(self) -> int:
        """Those that are trained."""
        saved = self.saved_form.abstract_saved.params
        shapes = jax.tree.leaves(self.steps.model.trained(saved))
        return sum(int(np.prod(leaf.shape)) for leaf in shapes)

    @property
    def abstract_state(self) -> state.TrainState:
        """Shapes, dtypes and shardings of the train state."""
        return state.abstract_state(
            self.steps.model, self.steps.optimizer, self.steps.shardings
        )

    @property
    def saved_form(self) -> SavedForm:
        """How the state is saved."""
        return SavedForm(
            abstract=self.abstract_state,
            layer_order=self.steps.model.layer_order,
            num_layers=self.config.model.num_layers,
        )

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a global batch."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._batch_sharding
            ),
            self.data.shapes_of(self.config.train.global_batch_size),
        )

    def create_state(
        self, say: Callable[..., None] = lambda *lines: None
    ) -> state.TrainState:
        """Returns the state at step 0, a function of the seed and ``init_from``.

        Args:
            say: Is told what is from where.

        Raises:
            CheckpointError: See `init_from.begin`.
            OSError: See there.
        """
        if self.config.root.init_from is not None:
            begun = init_from.begin(self.config, self.steps, self.saved_form)
            say(*begun.report)
            return begun.state
        return state.create_state(
            self.steps.model,
            self.steps.optimizer,
            seed=self.config.train.seed,
            shardings=self.steps.shardings,
            loss_scaling=self.steps.loss_scaling,
        )

    def restore(self, checkpointer: Checkpointer) -> state.TrainState:
        """Returns the state of the newest checkpoint, which any layout may have saved.

        Raises:
            CheckpointError: If it cannot be read, or is of another model or optimizer.
        """
        form, scaling = self.saved_form, self.steps.loss_scaling
        # A run may have begun in another precision, whose checkpoint has other fields.
        before = checkpointer.read_extra()["config"]
        was_scaled = precision.is_loss_scaled(before)
        everywhere = form.abstract.step.sharding
        saved = dataclasses.replace(
            form.abstract_saved,
            loss_scale=loss_scale.abstract(everywhere) if was_scaled else None,
            fp8=self._saved_history(checkpointer, before),
        )
        restored = checkpointer.restore(saved)
        scale = scaling and jax.device_put(
            scaling.resume(restored.loss_scale), everywhere
        )
        history = restored.fp8
        if not self._is_history_of(before):
            history = self._first_history()
        return form.from_saved(
            dataclasses.replace(restored, loss_scale=scale, fp8=history)
        )

    def extra(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint holds besides the state."""
        return {
            "config": resolve.to_values(self.config),
            "num_samples": self.config.batch_sizes.samples_before(step),
            "data": self.data.fingerprint,
        }

    def changes_since(self, extra: Mapping[str, Any]) -> list[str]:
        """Returns the fields whose values are others than in a checkpoint, and data.

        Those of ``dist`` and ``zero`` are left out: the layout makes no difference.
        """
        saved = resolve.by_path(extra["config"])
        changes = [
            f"{path}: {saved.get(path)} -> {value}"
            for path, value in resolve.by_path(resolve.to_values(self.config)).items()
            if not path.startswith(("dist.", "zero.")) and saved.get(path) != value
        ]
        # A checkpoint that `launch.convert` made knows of no data.
        if extra.get("data") not in (None, self.data.fingerprint):
            changes.append("the contents of the data")
        return changes

    def at_batch_size(self, size: int) -> "Job":
        """Returns the run of steps of this size; only its programs are others."""
        config = self.config.at_batch_size(size)
        return dataclasses.replace(
            self, config=config, steps=build_steps(config, self.mesh)
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

    def compile_train_step(self) -> Any:
        """Returns the compiled training step; nothing runs."""
        program: Any = step.build_train_step(self.steps)
        return program.lower(self.abstract_state, self.abstract_batch).compile()

    def compile_eval_step(self) -> Any:
        """Returns the compiled evaluation step; nothing runs."""
        tally = families.FAMILIES[self.config.model_name].tally
        model = dataclasses.replace(self.steps.model, tally=tally)
        program: Any = step.build_eval_step(
            dataclasses.replace(self.steps, model=model)
        )
        params = self.abstract_state.params
        return program.lower(params, self.abstract_batch).compile()

    def cost(self, peak: Peak) -> StepCost:
        """Returns what a step handles, for its rates relative to ``peak``."""
        config, family = self.config, families.FAMILIES[self.config.model_name]
        size = config.train.global_batch_size
        return StepCost(
            num_samples=size,
            num_tokens=size * family.num_tokens(config),
            model_flops=adapters.train_flops(config, self.steps.model),
            peak=peak,
        )

    def _is_history_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint of such a run has the history that this one goes on."""
        ours = precision.history_of(resolve.to_values(self.config))
        return precision.history_of(config) == ours

    def _saved_history(
        self, checkpointer: Checkpointer, config: Mapping[str, Any]
    ) -> Any:
        """Returns shapes of the history of products in a checkpoint of such a run."""
        abstract = self.saved_form.abstract_saved
        if self._is_history_of(config):
            return abstract.fp8
        if precision.history_of(config) is None:
            return None
        everywhere = abstract.step.sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            checkpointer.read_shapes(part="fp8"),
        )

    def _first_history(self) -> Any:
        """Returns the history of nothing in its saved form, None if there is none."""
        return jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
            self.saved_form.abstract_saved.fp8,
        )

    @property
    def _batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("data"))


def build(config: RunConfig, mesh: Mesh, *, tokenizer: str | None = None) -> Job:
    """Returns the job; reads the data, but makes no array on a device.

    Args:
        config: The resolved config.
        mesh: Its devices, from `distributed.create_mesh`.
        tokenizer: Path of that of the run which goes on: with ``data.tokenizer`` None
            it is taken, and none is trained. Text may have come to the corpus since.

    Raises:
        DataError: If the data cannot be used; see `families.build`.
        OSError: If it cannot be read.
        ConfigError: If the devices cannot do what the config asks for.
    """
    if config.optim.offload and (problems := list(offload.problems(mesh))):
        raise resolve.ConfigError(problems)
    rows = distributed.process_rows(mesh, config.train.global_batch_size)
    found = dataclasses.replace(
        config.data, tokenizer=config.data.tokenizer or tokenizer
    )
    try:
        data = families.build(dataclasses.replace(config, data=found), rows=rows)
    except ValueError as error:
        raise DataError(str(error)) from error
    if data.classes is not None:  # a model without their names is of little use
        named = dataclasses.replace(config.data, classes=data.classes)
        config = dataclasses.replace(config, data=named)
    return Job(config=config, mesh=mesh, data=data, steps=build_steps(config, mesh))


def build_steps(
    config: RunConfig, mesh: Mesh, family: ModelFamily | None = None
) -> step.StepConfig:
    """Returns what the programs of a run are built from; no data is read.

    Args:
        config: The resolved config.
        mesh: Its devices.
        family: The model, by default that of this name in `models.MODELS`.
    """
    family, dist = family or MODELS[config.model_name], config.dist
    family = precision.with_formats(family, config.precision)
    mesh = zero.in_groups(mesh, config.zero)
    region = ManualRegion(mesh, distributed.manual_axes(mesh))
    indices = pipelines.assign(dist, config.model).layer_indices
    model, rows = _build_model(config, family, region)
    model = dataclasses.replace(model, layer_order=tuple(indices.ravel().tolist()))
    num_steps, parts = config.train.num_steps, config.train.num_microbatches
    rule = optimizer.build(config.optim, num_steps=num_steps)
    rule = adapters.of_trained(rule, model)
    specs = state.param_specs(model, rows, mesh.axis_names)
    context = context_parallel.build(config, region, has_cudnn=has_cudnn())
    model = _over_positions(config, model, mesh, specs, context)
    held = zero.build(
        config.zero,
        region,
        shapes=model.shapes,
        specs=specs,
        dtype=config.model.dtype,
        formats=config.precision,
        num_microbatches=parts,
    )
    specs = held.held(specs)
    scaling = config.precision.scaling(config.model.dtype)
    return step.StepConfig(
        model=model,
        optimizer=rule,
        learning_rate=optimizer.learning_rate_schedule(
            config.optim, num_steps=num_steps
        ),
        region=region,
        context=context,
        zero=held,
        specs=specs,
        shardings=state.state_shardings(
            model,
            rule,
            specs=specs,
            mesh=mesh,
            loss_scaling=scaling,
            is_offloaded=config.optim.offload,
        ),
        loss_scaling=scaling,
        is_offloaded=config.optim.offload,
        num_microbatches=parts,
        seed=config.train.seed if config.model.is_random else None,
        remat=config.root.remat,
        pipeline=pipelines.build(dist, region, indices, num_microbatches=parts),
    )


def _build_model(
    config: RunConfig, family: ModelFamily, region: ManualRegion
) -> tuple[StackedModel, Rows]:
    """Returns the model with its vocabulary where it belongs, and its table."""
    model = stacked.stack(adapters.module_of(config, family))
    model = adapters.freeze(model, config.lora, family.heads)
    model = precision.with_history(model, config.precision)
    rows = lora.with_rows(family.rows(config.model), model.shapes)
    if config.dist.pipeline_vocabulary != "all_stages":
        return model, without_axis(rows, "stage")
    return dataclasses.replace(model, adapt=vocabulary.over_stages(region)), rows


def _over_positions(
    config: RunConfig,
    model: StackedModel,
    mesh: Mesh,
    specs: Params,
    context: context_parallel.Context | None,
) -> StackedModel:
    """Returns the model with its attention, and positions split as the config says."""
    model = attention.with_core(model, mesh, has_cudnn=has_cudnn())
    if context is not None:
        model = context_parallel.over_context(model, context)
    if not config.dist.sequence_parallel:
        return model
    length = families.FAMILIES[config.model_name].num_tokens(config)
    length //= config.dist.context_parallel_size
    return sequence_parallel.over_sequence(model, mesh, specs, length=length)


def attention_of(config: RunConfig, mesh: Mesh) -> str:
    """Returns the name of the implementation of attention that a run has."""
    length = families.FAMILIES[config.model_name].num_tokens(config)
    length = context_parallel.part_length(config, length)
    return attention.choose(
        config.model,
        platform=mesh.devices.flat[0].platform,
        length=length,
        has_cudnn=has_cudnn(),
    )
