"""The training step and the steps without a backward pass, one XLA program each.

Inside the program one `jax.shard_map` is manual over ``stage``, ``data`` and
``context`` and leaves ``tensor`` to XLA. Each rank sums the gradients of its
microbatches on its own, and they are reduced over ``data`` and ``context`` once, after
the loop.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from launch import offload, update
from launch.context_parallel import Context
from launch.loss_scale import LossScaling
from launch.state import TrainState
from launch.zero import WHOLE, Cut, Zero
from models import delayed_scaling
from models.remat import Policy, with_remat
from models.stacked import Batch, Params, StackedModel, split_blocks
from sbp.pipeline.parts import AbstractPipeline, Parts
from sbp.pipeline.region import ManualRegion

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[Params, Batch], tuple[Metrics, Metrics]]
OutputStep = Callable[[Params, Batch], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What the programs of a run are built from.

    Attributes:
        model: The model.
        optimizer: The update rule.
        learning_rate: Rate by step, for the metrics.
        region: Where code is written per stage and per data-parallel rank.
        zero: Which parts of the parameters each rank holds, and when they are whole.
        specs: `PartitionSpec` of each parameter, as it is held.
        shardings: Sharding of each leaf of the state.
        num_microbatches: Of each data-parallel rank.
        seed: Of dropout; None if the model drops nothing.
        pipeline: Runs microbatches through the stages.
        remat: What a layer keeps for its backward pass.
        loss_scaling: How the loss is scaled; None if it is not.
        context: How ranks share the tokens of a sample; None if they do not.
        is_offloaded: Whether the optimizer's state is in the memory of the host.
    """

    model: StackedModel
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    region: ManualRegion
    zero: Zero
    specs: Params
    shardings: TrainState
    num_microbatches: int
    seed: int | None
    pipeline: AbstractPipeline
    remat: Policy = "none"
    loss_scaling: LossScaling | None = None
    context: Context | None = None
    is_offloaded: bool = False

    @property
    def mesh(self) -> Mesh:
        """Axes ``stage``, ``data``, ``context``, ``tensor``, all Auto."""
        return self.region.mesh


def build_train_step(config: StepConfig) -> TrainStep:
    """Returns the jitted ``(state, batch) -> (state, metrics)``.

    The state is donated. The batch is global, split over ``data`` along dim 0, and each
    rank cuts its part into microbatches. Losses and gradients are those of the mean
    over the *whole* batch: sums are divided by the global counts, so neither the number
    of ranks nor of microbatches changes them.

    Communication: in the loop over microbatches that of the tensor-parallel layers and
    of the pipeline, and of attention around the ring of ``context``; after it one
    reduction of all gradients over ``data`` and ``context``.
    """
    region, scaling = config.region, config.model.fp8_scaling
    trained = config.model.trained(config.specs)
    config = _with_scales(config)

    def gradients(params: Params, batch: Batch, step: Any, scale: Any) -> tuple:
        batch = _own_part(config, batch)
        counts = region.psum(config.model.counts(batch), "data", "context")
        keys_B = _sample_keys(config, step, batch)
        params = config.zero.gather_once(region.varying(params))
        blocks, outer = split_blocks(params)
        sums, block_grads, outer_grads = config.pipeline.gradients(
            _parts(config, counts, scale),
            blocks,
            outer,
            _microbatches(config, batch, keys_B),
        )
        sums = region.psum(sums, "stage", "data", "context")
        grads = {"blocks": block_grads, **outer_grads}
        metrics = {name: sums[name] / counts[name] for name in sums}
        grads = config.zero.sum_gradients(grads, config.specs)
        grads["blocks"], seen = delayed_scaling.part(grads["blocks"])
        return metrics, config.model.trained(grads), seen

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale and state.loss_scale.scale
        scales = scaling.scales(state.fp8, scale) if scaling else {}
        metrics, grads, seen = region.run(
            gradients,
            in_specs=(config.specs, P("data"), P(), P()),
            out_specs=(P(), trained, P("stage")),
        )(delayed_scaling.join(state.params, scales), batch, state.step, scale)
        apply = update.apply_gradients
        new, update_metrics = (offload.around(apply) if config.is_offloaded else apply)(
            state, grads, config.optimizer, config.learning_rate, config.loss_scaling
        )
        history = scaling.update(state.fp8, seen) if scaling else None
        new = dataclasses.replace(new, fp8=history)
        return new, metrics | {"loss": objective(metrics)} | update_metrics

    replicated = region.sharding(P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(config.shardings, region.sharding(P("data"))),
        out_shardings=(config.shardings, replicated),
        compiler_options=None if config.context is None else config.context.options,
    )


def build_eval_step(config: StepConfig) -> EvalStep:
    """Returns the jitted ``(params, batch) -> (sums, counts)``, without dropout.

    Both are over the global batch, so that several batches can be added up before
    dividing: a short last batch weighs what it holds.
    """
    region = config.region

    def sums_and_counts(params: Params, batch: Batch) -> tuple[Metrics, Metrics]:
        batch = _own_part(config, batch)
        counts = config.model.counts(batch)
        params = config.zero.gather_once(region.varying(params))
        blocks, outer = split_blocks(params)
        sums = config.pipeline.losses(
            _parts(config, counts), blocks, outer, _microbatches(config, batch, None)
        )
        counts = region.psum(counts, "data", "context")
        return region.psum(sums, "stage", "data", "context"), counts

    program = region.run(
        sums_and_counts, in_specs=(config.specs, P("data")), out_specs=P()
    )
    return jax.jit(
        program,
        in_shardings=(config.shardings.params, region.sharding(P("data"))),
        out_shardings=region.sharding(P()),
    )


def build_output_step(config: StepConfig, head: Callable[..., Any]) -> OutputStep:
    """Returns the jitted ``(params, batch) -> outputs``, without dropout.

    Args:
        config: Of the run.
        head: ``head(model, x_BLD, batch)``, from the output of the last block, for a
            model without its blocks: arrays with the samples along dim 0.

    Raises:
        ValueError: If ranks share the tokens of a sample.
    """
    region, model = config.region, config.model
    if config.context is not None:
        raise ValueError(
            f"An output step reads whole samples, but {config.context.ring.size} ranks"
            " share the tokens of each. Use dist.context_parallel_size=1."
        )

    def read(outer: Params, x: jax.Array, microbatch: Any) -> Any:
        outer = config.zero.gather_outer(outer, x)
        return model.read(outer, x, microbatch[0], head)

    def outputs(params: Params, batch: Batch) -> Any:
        params = config.zero.gather_once(region.varying(params))
        blocks, outer = split_blocks(params)
        found = config.pipeline.outputs(
            _parts(config, {}),
            blocks,
            outer,
            _microbatches(config, batch, None),
            read,
        )
        found = region.psum(found, "stage")
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    program = region.run(
        outputs, in_specs=(config.specs, P("data")), out_specs=P("data")
    )
    over_data = region.sharding(P("data"))
    return jax.jit(
        program,
        in_shardings=(config.shardings.params, over_data),
        out_shardings=over_data,
    )


def _with_scales(config: StepConfig) -> StepConfig:
    """Returns the config of a step that is given the scales of products too."""
    scaling = config.model.fp8_scaling
    if scaling is None:
        return config
    whole = Cut(dim=WHOLE, dtype=jnp.float32, gathered_dtype=jnp.float32)
    cuts = delayed_scaling.join(config.zero.cuts, scaling.filled(whole))
    return dataclasses.replace(
        config,
        zero=dataclasses.replace(config.zero, cuts=cuts),
        specs=delayed_scaling.join(config.specs, scaling.filled(P("stage"))),
    )


def objective(means: Mapping[str, Any]) -> Any:
    """Returns the training loss: the sum of the losses among the means."""
    return sum(value for name, value in means.items() if name.endswith("_loss"))


def _parts(config: StepConfig, counts: Metrics, scale: Any = None) -> Parts:
    """Returns the model as functions of a microbatch ``(batch, keys_B)``.

    Args:
        config: Of the run.
        counts: What sums of losses are divided by.
        scale: What the objective is multiplied by, a scalar; None for 1.
    """
    model = config.model

    def losses(outer: Params, x: jax.Array, microbatch: Any) -> tuple[Any, Metrics]:
        sums = model.losses(outer, x, microbatch[0])
        total = objective({name: sums[name] / counts[name] for name in counts})
        return total if scale is None else total * scale, sums

    parts = Parts(
        embed=lambda outer, microbatch: model.embed(outer, *microbatch),
        context=lambda microbatch: model.context(*microbatch),
        block=with_remat(model.block, config.remat),
        losses=losses,
    )
    return config.zero.over_data(parts)


def _own_part(config: StepConfig, batch: Batch) -> Batch:
    """Returns what this rank has of each of its samples."""
    return batch if config.context is None else config.context.own(batch)


def _microbatches(config: StepConfig, batch: Batch, keys_B: Any) -> Any:
    """Cuts this rank's samples into microbatches, a new dim in front."""
    return jax.tree.map(
        lambda x: x.reshape(config.num_microbatches, -1, *x.shape[1:]), (batch, keys_B)
    )


def _sample_keys(config: StepConfig, step: jax.Array, batch: Batch) -> jax.Array | None:
    """Returns a key per sample of this rank, made of its index in the whole run."""
    if config.seed is None:
        return None
    num_local = jax.tree.leaves(batch)[0].shape[0]
    samples = config.region.index("data") * num_local + jnp.arange(num_local)
    step_key = jax.random.fold_in(jax.random.key(config.seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples)
