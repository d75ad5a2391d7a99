"""Train state, created already sharded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.sharding import Rows, match_rows
from models.stacked import Params, StackedModel, path_of
from sbp import spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that a step reads and writes.

    Attributes:
        step: int32 scalar, updates done.
        params: Parameters, blocks stacked.
        opt_state: State of the optimizer.
    """

    step: Any
    params: Params
    opt_state: Any


def param_specs(model: StackedModel, rows: Rows, axis_names: tuple[str, ...]) -> Params:
    """Returns the `PartitionSpec` of every parameter.

    Dim 0 of the stacked blocks, the layers, is split over ``stage``; the other dims are
    those of one block, as in the table.

    Raises:
        ValueError: If a parameter has no row, or a row no parameter, or a row names an
            unknown mesh axis.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model.shapes)
    matched = match_rows(rows, [path_of(path) for path, _ in leaves])

    def to_spec(path: str) -> P:
        signature = spec.signature_by_axis(matched[path], axis_names)
        partition = spec.to_partition_spec(signature, axis_names)
        return P("stage", *partition) if path.startswith("blocks/") else partition

    return jax.tree.unflatten(treedef, [to_spec(path_of(path)) for path, _ in leaves])


def state_shardings(
    model: StackedModel,
    optimizer: optax.GradientTransformation,
    *,
    specs: Params,
    mesh: Mesh,
) -> TrainState:
    """Returns the sharding of every leaf of the train state.

    Optimizer state lies like the parameter it belongs to; counters are everywhere.
    """
    params = jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), specs)
    everywhere = NamedSharding(mesh, P())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, model.shapes),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=params, opt_state=opt_state)


def abstract_state(
    model: StackedModel, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Returns shapes, dtypes and shardings of the state, for a checkpoint to fill."""
    shapes = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=model.shapes,
        opt_state=jax.eval_shape(optimizer.init, model.shapes),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def create_state(
    model: StackedModel,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    shardings: TrainState,
) -> TrainState:
    """Returns a new state; no device ever holds more than its shards.

    The values depend on the seed alone, not on the layout.
    """
    init = jax.jit(
        lambda seed: _init(model, optimizer, jax.random.key(seed)),
        out_shardings=shardings,
    )
    return init(seed)


def _init(
    model: StackedModel, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    params = model.init(key)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step=step, params=params, opt_state=optimizer.init(params))
