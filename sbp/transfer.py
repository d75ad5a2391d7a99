"""Moves a tensor to another placement: other devices, another shape, other axes.

The devices of both placements form one line of ranks. On the source the tensor is
brought into a tiling without partial sums; pieces travel by collective-permutes
straight to the devices that lack them; on the target it is gathered as far as
needed. ``plan_transfer`` looks for the cheapest choice of the two tilings between.

Inside ``jit`` all arrays live on the same devices in the same order, so that there
only the shape and the names of the axes can change.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sbp import cost
from sbp._compat import (
    concrete_mesh,
    expect_devices,
    linear_primitive,
    meet_others,
    mesh_set,
    no_mesh_set,
    on_mesh,
    sharding_of,
)
from sbp.boxing import Step, route
from sbp.exchange import Exchange, Side, plan_exchange
from sbp.reshard import (
    axes_of,
    canonical_spec,
    dual_spec,
    reshard,
    run_exchange,
    with_mapped_dim,
    without_elements,
)
from sbp.tiling import Axes, Tiling, from_spec

_RANK = "rank"  # the one axis of the mesh over all devices that take part


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The mesh of one side, as planning sees it.

    Attributes:
        axes: Names and sizes of its axes.
        positions: Where its devices stand among all that take part.
    """

    axes: Axes
    positions: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def plan_transfer(
    source: Tiling,
    source_place: Place,
    target: Tiling,
    target_place: Place,
    shape: tuple[int, ...],
    itemsize: int,
) -> tuple[Step, ...]:
    """Returns the cheapest steps from a tiling on one mesh to one on another.

    Exactly one of them leads from mesh to mesh: ``'collective-permute'``, or
    ``'slice'`` or ``'relabel'`` if no device lacks anything. Its axis is ``'rank'``.

    Args:
        source: Tiling that the tensor has.
        source_place: The mesh where it is.
        target: Tiling that it should have.
        target_place: The mesh where it should be.
        shape: Global shape.
        itemsize: Bytes per element.
    """
    best: tuple[tuple[int, int, int], tuple[Step, ...]] | None = None
    leaving = _departures(source, source_place.axes, shape)
    arriving = _arrivals(target, target_place.axes, shape)
    for here, there in itertools.product(leaving, arriving):
        steps = (
            *route(source, here, shape, itemsize, source_place.axes),
            _crossing(here, source_place, there, target_place, shape, itemsize),
            *route(there, target, shape, itemsize, target_place.axes),
        )
        price = (
            sum(step.num_bytes for step in steps),
            sum(step.num_messages for step in steps),
            len(steps),
        )
        if best is None or price < best[0]:
            best = price, steps
    assert best is not None
    return best[1]


def _departures(tiling: Tiling, axes: Axes, shape: tuple[int, ...]) -> list[Tiling]:
    """Returns tilings without partial sums that a tensor may leave in."""
    summed = [name for name, _ in axes if name in tiling.partial]
    spare = [name for name, _ in axes if name not in tiling.used]
    base = tiling.with_partial(frozenset())
    choices = [()] if not (summed or spare) else [(), summed, spare, summed + spare]
    return _cut_variants(base, choices, shape, dict(axes))


def _arrivals(tiling: Tiling, axes: Axes, shape: tuple[int, ...]) -> list[Tiling]:
    """Returns tilings from which gathers lead to the one wanted."""
    spare = [name for name, _ in axes if name not in tiling.used]
    return _cut_variants(tiling, [(), spare], shape, dict(axes))


def _cut_variants(
    base: Tiling, choices: list, shape: tuple[int, ...], sizes: dict[str, int]
) -> list[Tiling]:
    """Returns ``base`` with each choice of axes cutting each dim that they divide."""
    variants = {base: None}  # a set that keeps its order
    for names, dim in itertools.product(choices, range(len(shape))):
        cut = base.with_dim(dim, (*base.dims[dim], *names))
        if cut.divides(shape, sizes):
            variants[cut] = None
    return list(variants)


def _crossing(
    here: Tiling,
    source_place: Place,
    there: Tiling,
    target_place: Place,
    shape: tuple[int, ...],
    itemsize: int,
) -> Step:
    exchange = _exchange(here, source_place, there, target_place)
    shard = here.local_shape(shape, dict(source_place.axes))
    piece = [n // span for n, span in zip(shard, exchange.source_span, strict=True)]
    num_rounds = len(exchange.rounds) if 0 not in shape else 0
    if num_rounds:
        collective = "collective-permute"
    else:
        whole = _keeps_whole_shards(exchange, target_place)
        collective = "relabel" if whole else "slice"
    return Step(
        collective=collective,
        axes=(_RANK,),
        dim=None,
        source=here,
        target=there,
        num_bytes=cost.permute_bytes(cost.size_bytes(piece, itemsize), num_rounds),
        num_messages=num_rounds,
    )


def _exchange(
    here: Tiling, source_place: Place, there: Tiling, target_place: Place
) -> Exchange:
    return plan_exchange(
        Side(here, source_place.axes, source_place.positions),
        Side(there, target_place.axes, target_place.positions),
    )


def _keeps_whole_shards(exchange: Exchange, target_place: Place) -> bool:
    spans = {*exchange.source_span, *exchange.target_span, 1}
    return spans == {1} and bool(exchange.keep[list(target_place.positions)].all())


def places_of(
    source: Mesh | AbstractMesh, target: Mesh | AbstractMesh
) -> tuple[Place, Place]:
    """Returns how two meshes lie among all their devices; abstract ones coincide."""
    if not (isinstance(source, Mesh) and isinstance(target, Mesh)):
        positions = tuple(range(source.size))
        return Place(axes_of(source), positions), Place(axes_of(target), positions)
    order = {device: i for i, device in enumerate(_union(source, target))}
    return (
        Place(axes_of(source), tuple(order[d] for d in source.devices.flat)),
        Place(axes_of(target), tuple(order[d] for d in target.devices.flat)),
    )


def _union(source: Mesh, target: Mesh) -> list[jax.Device]:
    return list(dict.fromkeys([*source.devices.flat, *target.devices.flat]))


def transfer(
    x: jax.Array, mesh: Mesh | AbstractMesh, target: P, *, grad: P | None = None
) -> jax.Array:
    """Returns ``x`` on another mesh.

    Args:
        x: An array or tracer on a mesh with Explicit axes.
        mesh: Where it should be.
        target: The spec it should have there.
        grad: Spec, on the mesh of ``x``, that the gradient passes through on its
            way back, or None for the cheapest route.

    Raises:
        ValueError: If ``x`` is being traced by ``jit`` and ``mesh`` has another
            number of devices.
    """
    sharding = sharding_of(x)
    assert sharding is not None, "transfer takes arrays on a mesh"
    source_mesh = concrete_mesh(x) or sharding.mesh.abstract_mesh
    if not isinstance(source_mesh, Mesh) and mesh_set() is not None:
        raise ValueError(
            f"A tensor cannot move from mesh {axes_of(source_mesh)} to mesh "
            f"{axes_of(mesh)} inside jit while a mesh is set. Call the jitted function "
            "outside of `with jax.set_mesh(...)`; global tensors carry their mesh."
        )
    if not isinstance(source_mesh, Mesh) and source_mesh.size != mesh.size:
        raise ValueError(
            f"A tensor on {source_mesh.size} devices cannot move to {mesh.size} inside "
            "jit, where all tensors are on the same devices. Call sbp.to_global "
            "outside of jit to change the devices."
        )
    source = canonical_spec(sharding.spec, x.ndim)
    y = _transfer_p.bind(
        x, source=source, source_mesh=source_mesh, target=target, mesh=mesh, grad=grad
    )
    if isinstance(source_mesh, Mesh) or not isinstance(mesh, Mesh):
        return y
    return expect_devices(y, mesh)


def _steps(
    x: Any, source: P, source_mesh: Any, target: P, mesh: Any
) -> tuple[tuple[Step, ...], int, Exchange]:
    """Returns the planned steps, which of them crosses, and its exchange."""
    here, there = places_of(source_mesh, mesh)
    ends = from_spec(source, x.ndim), from_spec(target, x.ndim)
    itemsize = x.dtype.itemsize
    steps = plan_transfer(ends[0], here, ends[1], there, tuple(x.shape), itemsize)
    index = next(i for i, step in enumerate(steps) if step.axes == (_RANK,))
    crossing = steps[index]
    exchange = _exchange(crossing.source, here, crossing.target, there)
    return steps, index, exchange


def _run(
    x: jax.Array, *, source: P, source_mesh: Mesh, target: P, mesh: Mesh, **_: Any
) -> jax.Array:
    if x.size == 0:
        return without_elements(x, mesh, target)
    if jax.process_count() > 1:
        ids = [device.id for device in mesh.devices.flat]
        call = f"sbp.to_global({jax.typeof(x)} -> {target} on {axes_of(mesh)} {ids})"
        meet_others(call, [source_mesh, mesh])
    steps, index, exchange = _steps(x, source, source_mesh, target, mesh)
    crossing = steps[index]
    x = reshard(x, crossing.source)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    if crossing.collective != "relabel":
        shards = _cross(x, shards, _union(source_mesh, mesh), exchange)
    there = NamedSharding(mesh, crossing.target.to_spec())
    local_shape = there.shard_shape(x.shape)
    pieces = [
        shards[device].reshape(local_shape)
        for device in mesh.devices.flat
        if device in shards
    ]
    y = jax.make_array_from_single_device_arrays(x.shape, there, pieces, dtype=x.dtype)
    return reshard(y, from_spec(target, x.ndim), reduced=frozenset(target.reduced))


def _cross(
    x: jax.Array,
    shards: dict[jax.Device, jax.Array],
    devices: list[jax.Device],
    exchange: Exchange,
) -> dict[jax.Device, jax.Array]:
    """Runs the exchange on the line of all devices; returns their target shards."""
    line = Mesh(np.array(devices, dtype=object), (_RANK,), (AxisType.Explicit,))
    local_shape = x.sharding.shard_shape(x.shape)
    row_shape = local_shape or (1,)
    rows = [
        shards[device].reshape(row_shape)
        if device in shards
        else jax.device_put(np.zeros(row_shape, x.dtype), device)
        for device in devices
        if device.process_index == jax.process_index()
    ]
    stack = jax.make_array_from_single_device_arrays(
        (len(devices) * row_shape[0], *row_shape[1:]),
        NamedSharding(line, P(_RANK)),
        rows,
        dtype=x.dtype,
    )
    with no_mesh_set():
        moved = _run_on_line(stack, exchange=exchange, local_shape=local_shape)
    return {shard.device: shard.data for shard in moved.addressable_shards}


def _exchange_on_line(
    stack: jax.Array, *, exchange: Exchange, local_shape: tuple[int, ...]
) -> jax.Array:
    def run_locally(row: jax.Array) -> jax.Array:
        result = run_exchange(row.reshape(local_shape), exchange, (_RANK,))
        return result.reshape(result.shape or (1,))

    mesh = jax.typeof(stack).sharding.mesh
    return on_mesh(run_locally, mesh, source=P(_RANK), target=P(_RANK))(stack)


_run_on_line = jax.jit(_exchange_on_line, static_argnames=("exchange", "local_shape"))


def _lower(
    x: jax.Array, *, source: P, source_mesh: Any, target: P, mesh: Any, **_: Any
) -> jax.Array:
    """Relabels the devices between two shard_maps: their order is the same."""
    end, reduced = from_spec(target, x.ndim), frozenset(target.reduced)
    if mesh.size == 1:
        whole = reshard(x, Tiling(((),) * x.ndim))
        y = jax.device_put(whole, NamedSharding(mesh, P()))
        return reshard(y, end, reduced=reduced)
    steps, index, exchange = _steps(x, source, source_mesh, target, mesh)
    crossing = steps[index]
    here, there = (tuple(name for name, _ in axes_of(m)) for m in (source_mesh, mesh))
    leave = on_mesh(
        lambda shard: run_exchange(shard, exchange, here)[None],
        source_mesh.abstract_mesh,
        source=crossing.source.to_spec(),
        target=P(here),
    )
    arrive = on_mesh(
        lambda row: row[0],
        mesh.abstract_mesh,
        source=P(there),
        target=crossing.target.to_spec(),
    )
    stack = leave(reshard(x, crossing.source))
    y = arrive(jax.device_put(stack, NamedSharding(mesh, P(there))))
    return reshard(y, end, reduced=reduced)


def _transpose(
    cotangent: jax.Array,
    x: Any,
    *,
    source: P,
    source_mesh: Any,
    mesh: Any,
    grad: P | None,
    **_: Any,
) -> jax.Array:
    sharding = sharding_of(cotangent)
    assert sharding is not None
    arrived = canonical_spec(sharding.spec, x.ndim)
    wanted = dual_spec(source)
    back = _transfer_p.bind(
        cotangent,
        source=arrived,
        source_mesh=mesh,
        target=wanted if grad is None else grad,
        mesh=source_mesh,
        grad=None,
    )
    if grad is None:
        return back
    return reshard(back, from_spec(wanted, x.ndim), reduced=frozenset(wanted.reduced))


def _batch(
    x: jax.Array, *, source: P, target: P, grad: P | None, **meshes: Any
) -> jax.Array:
    uncut = from_spec(target, x.ndim - 1)
    uncut = Tiling(((), *uncut.dims), uncut.partial)
    return _transfer_p.bind(
        x,
        source=with_mapped_dim(source, x),
        target=uncut.to_spec(frozenset(target.reduced)),
        grad=None if grad is None else with_mapped_dim(grad, x),
        **meshes,
    )


_transfer_p = linear_primitive(
    "sbp_transfer",
    run=_run,
    lower=_lower,
    transpose=_transpose,
    batch=_batch,
)
