"""Train state, created already sharded."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import loss_scale, offload
from launch.loss_scale import LossScale, LossScaling
from models.sharding import Rows, match_rows
from models.stacked import Params, StackedModel, path_of
from sbp import spec


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that a step reads and writes.

    As a tree it has no place for a field that is None, so that the checkpoint of a run
    without loss scaling is the same whether or not runs can have it.

    Attributes:
        step: int32 scalar, steps done: updates, and steps that were skipped.
        params: Parameters, blocks stacked.
        opt_state: State of the optimizer.
        loss_scale: State of the loss scaling; None if the loss is not scaled.
        fp8: History of products in eight bits, see `models.delayed_scaling`; None if
            their scales need none.
    """

    step: Any
    params: Params
    opt_state: Any
    loss_scale: LossScale | None = None
    fp8: Any = None

    def tree_flatten_with_keys(self) -> tuple[list[tuple], tuple[str, ...]]:
        """Returns the fields that are there, with their keys, and their names."""
        optional = ("loss_scale", "fp8")
        there = (name for name in optional if getattr(self, name) is not None)
        names = ("step", "params", "opt_state", *there)
        key = jax.tree_util.GetAttrKey
        return [(key(name), getattr(self, name)) for name in names], names

    @classmethod
    def tree_unflatten(
        cls, names: tuple[str, ...], values: Iterable[Any]
    ) -> "TrainState":
        """Returns the state with these fields."""
        return cls(**dict(zip(names, values, strict=True)))


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
    loss_scaling: LossScaling | None = None,
    is_offloaded: bool = False,
) -> TrainState:
    """Returns the sharding of every leaf of the train state.

    Optimizer state lies like the parameter it belongs to; scalars are everywhere.

    Args:
        model: The model.
        optimizer: The update rule.
        specs: `PartitionSpec` of each parameter.
        mesh: The devices.
        loss_scaling: Of the run; None if the loss is not scaled.
        is_offloaded: Whether the optimizer's state is in the memory of the host.
    """
    everywhere = NamedSharding(mesh, P())
    opt_shapes = jax.eval_shape(optimizer.init, model.shapes)
    opt_specs = specs_like_params(opt_shapes, shapes=model.shapes, specs=specs)
    opt_state = jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), opt_specs)
    if is_offloaded:
        opt_state = offload.on_host(opt_shapes, opt_state)
    return TrainState(
        step=everywhere,
        params=jax.tree.map(lambda leaf: NamedSharding(mesh, leaf), specs),
        opt_state=opt_state,
        loss_scale=None if loss_scaling is None else loss_scale.filled(everywhere),
        fp8=jax.tree.map(
            lambda leaf: NamedSharding(mesh, P("stage")), _first_history(model)
        ),
    )


def specs_like_params(tree: Any, *, shapes: Params, specs: Params) -> Any:
    """Returns the spec of each leaf of an optimizer's state.

    A leaf whose path ends in that of a parameter lies like it, but for the dims in
    which it has another size, such as the mean over a dim. All others are everywhere.

    Args:
        tree: The state, as shapes.
        shapes: Of the parameters.
        specs: Of the parameters.

    Example:
        >>> shape = jax.ShapeDtypeStruct((4, 6), "float32")
        >>> mean = jax.ShapeDtypeStruct((4, 1), "float32")
        >>> specs_like_params(
        ...     (shape, {"w": shape}, {"w": mean}),
        ...     shapes={"w": shape},
        ...     specs={"w": P("data", "tensor")},
        ... )
        (P(), {'w': P('data', 'tensor')}, {'w': P('data', None)})
    """
    leaves = jax.tree.leaves_with_path(shapes)
    known = {
        tuple(key.key for key in path): (leaf.shape, spec)
        for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True)
    }

    def find(path: tuple, leaf: Any) -> P:
        keys = [getattr(key, "key", None) for key in path]
        ends = (tuple(keys[start:]) for start in range(len(keys)))
        shape, spec = next((known[end] for end in ends if end in known), ((), P()))
        sizes = zip(leaf.shape, shape, spec, strict=False)
        return P(*(names if size == whole else None for size, whole, names in sizes))

    return jax.tree.map_with_path(find, tree)


def abstract_state(
    model: StackedModel, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Returns shapes, dtypes and shardings of the state, for a checkpoint to fill."""
    shapes = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=model.shapes,
        opt_state=jax.eval_shape(optimizer.init, model.shapes),
        loss_scale=shardings.loss_scale and loss_scale.abstract(None),
        fp8=jax.eval_shape(lambda: _first_history(model)),
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
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """Returns a new state; no device ever holds more than its shards.

    The values depend on the seed alone, not on the layout.
    """

    def init(seed: jax.Array) -> TrainState:
        params = model.init(jax.random.key(seed))
        return _first(model, params, optimizer, loss_scaling)

    return jax.jit(init, out_shardings=shardings)(seed)


def begin(
    model: StackedModel,
    params: Params,
    optimizer: optax.GradientTransformation,
    *,
    shardings: TrainState,
    loss_scaling: LossScaling | None = None,
) -> TrainState:
    """Returns the state at step 0 of a training that begins with parameters.

    Args:
        model: The model.
        params: They lie as in ``shardings``, and are donated.
        optimizer: The update rule.
        shardings: Of the state.
        loss_scaling: Of the run; None if the loss is not scaled.
    """

    def init(params: Params) -> TrainState:
        return _first(model, params, optimizer, loss_scaling)

    return jax.jit(init, donate_argnums=0, out_shardings=shardings)(params)


def _first(
    model: StackedModel,
    params: Params,
    optimizer: optax.GradientTransformation,
    loss_scaling: LossScaling | None,
) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        loss_scale=None if loss_scaling is None else loss_scaling.init(),
        fp8=_first_history(model),
    )


def _first_history(model: StackedModel) -> dict[str, Any] | None:
    scaling = model.fp8_scaling
    return None if scaling is None else scaling.init(len(model.layer_order))
