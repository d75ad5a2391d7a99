"""The training step and the evaluation step, one XLA program each.

Inside the program one `jax.shard_map` is manual over ``stage`` and ``data`` and leaves
``tensor`` to XLA. Each data-parallel rank sums the gradients of its microbatches on its
own, and they are reduced over ``data`` once, after the loop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.state import TrainState
from models.stacked import Batch, Params, StackedModel
from sbp.pipeline.region import ManualRegion

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[Params, Batch], tuple[Metrics, Metrics]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What a step is built from.

    Attributes:
        model: The model.
        optimizer: The update rule.
        learning_rate: Rate by step, for the metrics.
        mesh: Axes ``stage``, ``data``, ``tensor``, all Auto.
        specs: `PartitionSpec` of each parameter.
        shardings: Sharding of each leaf of the state.
        num_microbatches: Of each data-parallel rank.
        seed: Of dropout; None if the model drops nothing.
    """

    model: StackedModel
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    mesh: Mesh
    specs: Params
    shardings: TrainState
    num_microbatches: int
    seed: int | None

    @property
    def region(self) -> ManualRegion:
        """Where code is written per stage and per data-parallel rank."""
        return ManualRegion(self.mesh, ("stage", "data"))


def build_train_step(config: StepConfig) -> TrainStep:
    """Returns the jitted ``(state, batch) -> (state, metrics)``.

    The state is donated. The batch is global, split over ``data`` along dim 0, and each
    rank cuts its part into microbatches. Losses and gradients are those of the mean
    over the *whole* batch: sums are divided by the global counts, so neither the number
    of ranks nor of microbatches changes them.

    Communication: in the loop over microbatches that of the tensor-parallel layers
    only; after it one reduction of all gradients over ``data``.
    """
    region = config.region
    grad_specs = _manual_specs(config.specs)

    def gradients(params: Params, batch: Batch, step: jax.Array) -> tuple[Any, Any]:
        counts = region.psum(config.model.counts(batch), "data")
        keys_B = _sample_keys(config, step, batch)
        sums, grads = _accumulate(config, region.varying(params), batch, keys_B, counts)
        metrics = {name: sums[name] / counts[name] for name in sums}
        return region.psum(metrics, "data"), _reduce_gradients(region, grads)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        metrics, grads = region.run(
            gradients,
            in_specs=(grad_specs, P("data"), P()),
            out_specs=(P(), grad_specs),
        )(state.params, batch, state.step)
        updates, opt_state = config.optimizer.update(
            grads, state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        metrics |= {
            "loss": _objective(metrics),
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(config.learning_rate(state.step)),
        }
        new = TrainState(step=state.step + 1, params=params, opt_state=opt_state)
        return new, metrics

    replicated = NamedSharding(config.mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(config.shardings, NamedSharding(config.mesh, P("data"))),
        out_shardings=(config.shardings, replicated),
    )


def build_eval_step(config: StepConfig) -> EvalStep:
    """Returns the jitted ``(params, batch) -> (sums, counts)``, without dropout.

    Both are over the global batch, so that several batches can be added up before
    dividing: a short last batch weighs what it holds.
    """
    model, region = config.model, config.region

    def sums_and_counts(params: Params, batch: Batch) -> tuple[Metrics, Metrics]:
        blocks, outer = split_blocks(params)
        x = model.embed(outer, batch, None)
        x = model.run_blocks(blocks, x, batch, keys_B=None)
        totals = model.losses(outer, x, batch), model.counts(batch)
        return region.psum(totals, "data")

    program = region.run(
        sums_and_counts,
        in_specs=(_manual_specs(config.specs), P("data")),
        out_specs=P(),
    )
    return jax.jit(
        program,
        in_shardings=(config.shardings.params, NamedSharding(config.mesh, P("data"))),
        out_shardings=NamedSharding(config.mesh, P()),
    )


def split_blocks(params: Params) -> tuple[Params, Params]:
    """Returns the stacked blocks and all other parameters."""
    outer = {name: value for name, value in params.items() if name != "blocks"}
    return params["blocks"], outer


def _accumulate(
    config: StepConfig,
    params: Params,
    batch: Batch,
    keys_B: jax.Array | None,
    counts: Metrics,
) -> tuple[Metrics, Params]:
    """Sums losses and gradients over this rank's microbatches."""
    model = config.model

    def objective(params: Params, part: Batch, keys_B: Any) -> tuple[Any, Metrics]:
        blocks, outer = split_blocks(params)
        x = model.embed(outer, part, keys_B)
        x = model.run_blocks(blocks, x, part, keys_B=keys_B)
        sums = model.losses(outer, x, part)
        means = {name: sums[name] / counts[name] for name in sums}
        return _objective(means), sums

    grad = jax.grad(objective, has_aux=True)

    def add_microbatch(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(params, *microbatch)), None

    microbatches = jax.tree.map(
        lambda x: x.reshape(config.num_microbatches, -1, *x.shape[1:]), (batch, keys_B)
    )
    first = jax.tree.map(lambda x: x[0], microbatches)
    zeros = jax.tree.map(
        lambda leaf: config.region.varying(jnp.zeros(leaf.shape, leaf.dtype)),
        jax.eval_shape(grad, params, *first),
    )
    (grads, sums), _ = jax.lax.scan(add_microbatch, zeros, microbatches)
    return sums, grads


def _reduce_gradients(region: ManualRegion, grads: Params) -> Params:
    """Sums gradients over the ranks that hold the same parameter."""
    blocks, outer = split_blocks(grads)
    return {
        "blocks": region.psum(blocks, "data"),
        **region.psum(outer, "stage", "data"),
    }


def _sample_keys(config: StepConfig, step: jax.Array, batch: Batch) -> jax.Array | None:
    """Returns a key per sample of this rank, made of its index in the whole run."""
    if config.seed is None:
        return None
    num_local = jax.tree.leaves(batch)[0].shape[0]
    samples = config.region.index("data") * num_local + jnp.arange(num_local)
    step_key = jax.random.fold_in(jax.random.key(config.seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, samples)


def _manual_specs(specs: Params) -> Params:
    """Returns the specs with nothing but the manual axes, for `jax.shard_map`."""
    return {
        name: jax.tree.map(
            lambda _, name=name: P("stage") if name == "blocks" else P(), tree
        )
        for name, tree in specs.items()
    }


def _objective(means: Metrics) -> jax.Array:
    return jnp.asarray(sum(v for name, v in means.items() if name.endswith("_loss")))
