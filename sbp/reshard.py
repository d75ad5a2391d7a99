"""Changes the tiling of an array on its mesh: runs the steps that boxing plans.

``reshard`` is a JAX primitive of its own, linear and with its own transpose: the
gradient takes the cheapest route from the layout in which it arrives to the one
that belongs to the input (split to split, broadcast to broadcast; a partial sum's
gradient is the same on every device). It shows up by name in jaxprs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sbp._compat import (
    concrete_mesh,
    linear_primitive,
    meet_others,
    no_mesh_set,
    on_mesh,
    sharding_of,
)
from sbp.boxing import Step, exchange_on_one_mesh, route
from sbp.exchange import Exchange
from sbp.tiling import Axes, Tiling, from_spec


def reshard(
    x: jax.Array,
    target: Tiling,
    *,
    grad: Tiling | None = None,
    reduced: frozenset[str] = frozenset(),
) -> jax.Array:
    """Returns ``x``, on its mesh, with another tiling.

    Args:
        x: An array or tracer on a mesh with Explicit axes.
        target: How it should lie; it must divide the shape of ``x`` evenly.
        grad: Tiling that the gradient passes through on its way back, or None for
            the cheapest route.
        reduced: Axes that the type of the result marks as already summed: that of
            the cotangent of a partial sum does.
    """
    sharding = sharding_of(x)
    assert sharding is not None, "reshard takes arrays on a mesh"
    source = canonical_spec(sharding.spec, x.ndim)
    spec = target.to_spec(reduced)
    if source == spec and grad is None:
        return x
    mesh = sharding.mesh.abstract_mesh
    grad_spec = None if grad is None else grad.to_spec()
    return reshard_p.bind(x, source=source, target=spec, mesh=mesh, grad=grad_spec)


def canonical_spec(spec: P, ndim: int) -> P:
    """Returns the spec in the one form that equal layouts share."""
    return from_spec(spec, ndim).to_spec(frozenset(spec.reduced))


def dual_spec(spec: P) -> P:
    """Returns the spec of the gradient of a tensor with this spec.

    The types of the two swap what is to be summed and what is the sum already.
    """
    return P(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced)


def with_mapped_dim(spec: P, x: jax.Array) -> P:
    """Returns the spec of what ``vmap`` maps over: ``x`` has its dim more, in front.

    Raises:
        ValueError: If the mapped dim is cut along an axis that the spec uses too.
    """
    sharding = sharding_of(x)
    cut = () if sharding is None else from_spec(sharding.spec, x.ndim).dims[0]
    inside = from_spec(spec, x.ndim - 1)
    if clash := sorted(inside.used.intersection(cut)):
        raise ValueError(
            f"vmap maps over a dim that is split along mesh axis {clash[0]!r}, so that "
            f"inside it no tensor can be {inside} there. Convert the whole tensor "
            "outside of vmap, or leave that axis broadcast inside."
        )
    return Tiling((cut, *inside.dims), inside.partial).to_spec(frozenset(spec.reduced))


def axes_of(mesh: Any) -> Axes:
    """Returns names and sizes of a mesh's axes."""
    return tuple(mesh.shape.items())


def steps_between(x: Any, source: P, target: P, mesh: AbstractMesh) -> tuple[Step, ...]:
    """Returns the planned steps from one spec of ``x`` to another."""
    return route(
        from_spec(source, x.ndim),
        from_spec(target, x.ndim),
        x.shape,
        x.dtype.itemsize,
        axes_of(mesh),
    )


def without_elements(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """Returns an array like ``x``, which has no elements, on a mesh.

    The compiler does not cut such arrays: their shards would have the global shape.
    """
    sharding = NamedSharding(mesh, spec)
    shard = np.zeros(sharding.shard_shape(x.shape), x.dtype)
    shards = [
        jax.device_put(shard, device)
        for device in mesh.devices.flat
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, shards, dtype=x.dtype
    )


def run_steps(shard: jax.Array, steps: Sequence[Step], axes: Axes) -> jax.Array:
    """Runs planned steps on each device's shard, inside a ``shard_map``."""
    for step in steps:
        shard = _MOVES[step.collective](shard, step, axes)
    return shard


def _run(
    x: jax.Array, *, source: P, target: P, mesh: AbstractMesh, **_: Any
) -> jax.Array:
    """Runs step by step, so that conversions share their compiled steps."""
    here = concrete_mesh(x)
    assert here is not None
    if x.size == 0:
        return without_elements(x, here, target)
    if jax.process_count() > 1:
        kind = jax.typeof(x)
        meet_others(f"sbp.to_global({kind} on {axes_of(here)} -> {target})", [here])
    steps = steps_between(x, source, target, mesh)
    if not steps:
        with no_mesh_set():
            return _run_jitted(x, steps=(), source=source, target=target, mesh=mesh)
    for i, step in enumerate(steps):
        begin = source if i == 0 else step.source.to_spec()
        end = target if i == len(steps) - 1 else step.target.to_spec()
        with no_mesh_set():
            x = _run_jitted(x, steps=(step,), source=begin, target=end, mesh=mesh)
    return x


def _lower(
    x: jax.Array, *, source: P, target: P, mesh: AbstractMesh, **_: Any
) -> jax.Array:
    steps = steps_between(x, source, target, mesh)
    return _apply(x, steps=steps, source=source, target=target, mesh=mesh)


def _apply(
    x: jax.Array, *, steps: tuple[Step, ...], source: P, target: P, mesh: AbstractMesh
) -> jax.Array:
    if mesh.size == 1:  # JAX cannot lower a shard_map of partial sums on one device
        return jax.sharding.reshard(x, NamedSharding(mesh, target))

    def run_locally(shard: jax.Array) -> jax.Array:
        return run_steps(shard, steps, axes_of(mesh))

    return on_mesh(run_locally, mesh, source=source, target=target)(x)


_run_jitted = jax.jit(_apply, static_argnames=("steps", "source", "target", "mesh"))


def _transpose(
    cotangent: jax.Array, x: Any, *, source: P, grad: P | None, **_: Any
) -> jax.Array:
    if grad is not None:
        cotangent = reshard(cotangent, from_spec(grad, x.ndim))
    wanted = dual_spec(source)
    reduced = frozenset(wanted.reduced)
    return reshard(cotangent, from_spec(wanted, x.ndim), reduced=reduced)


def _batch(
    x: jax.Array, *, source: P, target: P, mesh: AbstractMesh, grad: P | None
) -> jax.Array:
    return reshard_p.bind(
        x,
        source=with_mapped_dim(source, x),
        target=with_mapped_dim(target, x),
        mesh=mesh,
        grad=None if grad is None else with_mapped_dim(grad, x),
    )


reshard_p = linear_primitive(
    "sbp_reshard", run=_run, lower=_lower, transpose=_transpose, batch=_batch
)


def _all_gather(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    return lax.all_gather(shard, step.axes, axis=_dim(step), tiled=True)


def _reduce_scatter(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    dim = _dim(step)
    return lax.psum_scatter(shard, step.axes, scatter_dimension=dim, tiled=True)


def _all_reduce(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    return lax.psum(shard, step.axes)


def _all_to_all(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    gathered = next(
        dim
        for dim, (before, after) in enumerate(
            zip(step.source.dims, step.target.dims, strict=True)
        )
        if len(after) < len(before)
    )
    return lax.all_to_all(shard, step.axes, _dim(step), gathered, tiled=True)


def _relabel(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    """Changes nothing, unless there are no elements: then the shape."""
    return shard if shard.size else shard.reshape(_target_shape(shard, step, axes))


def _slice(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    if step.dim is None:
        return _permute(shard, step, axes)
    size = shard.shape[step.dim] // dict(axes)[step.axes[0]]
    start = lax.axis_index(step.axes) * size
    return lax.dynamic_slice_in_dim(shard, start, size, axis=step.dim)


def _fill(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    """Keeps the data on one device per piece, with zeros on the others."""
    index = lax.axis_index(step.axes)
    if step.dim is None:
        return jnp.where(index == 0, shard, jnp.zeros_like(shard))
    zeros = jnp.zeros(_target_shape(shard, step, axes), shard.dtype)
    start = index * shard.shape[step.dim]
    return lax.dynamic_update_slice_in_dim(zeros, shard, start, axis=step.dim)


def _permute(shard: jax.Array, step: Step, axes: Axes) -> jax.Array:
    exchange = exchange_on_one_mesh(step.source, step.target, axes)
    return run_exchange(shard, exchange, tuple(name for name, _ in axes))


def _target_shape(shard: jax.Array, step: Step, axes: Axes) -> tuple[int, ...]:
    sizes = dict(axes)
    counts = zip(step.source.counts(sizes), step.target.counts(sizes), strict=True)
    return tuple(
        size * before // after
        for size, (before, after) in zip(shard.shape, counts, strict=True)
    )


def _dim(step: Step) -> int:
    assert step.dim is not None
    return step.dim


_MOVES: dict[str, Callable[[jax.Array, Step, Axes], jax.Array]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
    "relabel": _relabel,
    "slice": _slice,
    "fill": _fill,
}


def run_exchange(
    shard: jax.Array, exchange: Exchange, axis_names: tuple[str, ...]
) -> jax.Array:
    """Runs an exchange on each device's shard, inside a ``shard_map``.

    Args:
        shard: The source shard; on devices that have none, zeros of its shape.
        exchange: What to do.
        axis_names: The axes whose devices take part, in row-major order.

    Returns:
        The target shard. On devices that have none its values have no meaning.
    """
    index = lax.axis_index(axis_names)
    piece = tuple(
        size // span
        for size, span in zip(shard.shape, exchange.source_span, strict=True)
    )
    result = _keep_own(shard, exchange, piece, index)
    for round_ in exchange.rounds:
        sent = lax.dynamic_slice(shard, _starts(round_.send, piece, index), piece)
        received = lax.ppermute(sent, axis_names, round_.pairs)
        starts = _starts(round_.receive, piece, index)
        old = lax.dynamic_slice(result, starts, piece)
        new = jnp.where(jnp.asarray(round_.receives)[index], received, old)
        result = lax.dynamic_update_slice(result, new, starts)
    return result


def _keep_own(
    shard: jax.Array, exchange: Exchange, piece: tuple[int, ...], index: jax.Array
) -> jax.Array:
    """Returns the target shard with the pieces that the device already has."""
    target_shape = tuple(
        size * span for size, span in zip(piece, exchange.target_span, strict=True)
    )
    if not exchange.keep.any():
        return jnp.zeros(target_shape, shard.dtype)
    spans = zip(exchange.source_span, piece, strict=True)
    tiles = shard.reshape(sum(spans, ()))
    for dim, table in enumerate(exchange.read):
        if exchange.source_span[dim] > 1 or exchange.target_span[dim] > 1:
            tiles = jnp.take(tiles, jnp.asarray(table)[index], axis=2 * dim)
    own = jnp.asarray(exchange.keep)[index]
    own = own.reshape(sum(((span, 1) for span in exchange.target_span), ()))
    return jnp.where(own, tiles, jnp.zeros_like(tiles)).reshape(target_shape)


def _starts(
    table: np.ndarray, piece: tuple[int, ...], index: jax.Array
) -> list[jax.Array]:
    scaled = jnp.asarray(table * np.array(piece, dtype=table.dtype))[index]
    return [scaled[dim] for dim in range(len(piece))]
