"""Pieces and wholes: shards by rank, from and to global tensors, and full values."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sbp._compat import gather_from_processes, sharding_of
from sbp.assemble import fit
from sbp.global_tensor import is_global, placement_of, to_global
from sbp.placement import Placement
from sbp.reshard import axes_of
from sbp.signature import (
    Component,
    Signature,
    SignatureLike,
    Split,
    broadcast,
    partial_sum,
    resolve,
    short,
)
from sbp.spec import num_shards, to_sharding
from sbp.tiling import block_indices, from_signature, labels
from sbp.uneven import balanced_sizes

Shards = Mapping[int, jax.typing.ArrayLike] | Sequence[jax.typing.ArrayLike]


@dataclasses.dataclass(frozen=True, slots=True)
class _Meta:
    """What the ranks tell each other about their shards."""

    shape: tuple[int, ...]
    dtype: str


def from_local(
    shards: Shards,
    placement: Placement,
    sbp: SignatureLike,
    *,
    check_replicas: bool = True,
) -> jax.Array:
    """Returns the global tensor made of the shards that the ranks hold.

    Where ``sbp.to_global`` takes a whole value, this takes the pieces: split dims are
    joined, addends of a partial sum stay apart. In several processes each gives the
    shards of its own ranks, and all processes must call.

    Args:
        shards: Arrays by rank, or a sequence of them in the order in which the
            placement lists this process's ranks.
        placement: Where they are.
        sbp: How the tensor lies, as for ``sbp.to_global``.
        check_replicas: Whether to compare shards that the signature says are equal.
            It reads them on the host; False trusts the caller.

    Returns:
        The tensor, whose split dims are as long as the shards together.

    Raises:
        ValueError: If a rank's shard is missing, shards do not fit together, or
            replicas differ.

    Communication: shapes, between processes; no data. The gradient of a shard is its
    part of the gradient: of a replica an addend, so that those of all replicas add up
    to the whole; of an addend the whole.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> shards = [np.array([0, 1]), np.array([2, 3])]
        >>> x = from_local(shards, p, sbp.split(0))
        >>> print(jax.typeof(x), x)
        int32[4@x] [0 1 2 3]
        >>> full_value(from_local(shards, p, sbp.partial_sum))
        array([2, 4], dtype=int32)
    """
    arrays, metas = _by_rank_with_metas(shards, placement)
    ranks = placement.flat_ranks
    _check_alike({rank: meta.dtype for rank, meta in metas.items()}, "dtype")
    _check_alike({rank: len(meta.shape) for rank, meta in metas.items()}, "ndim")
    shapes = {rank: meta.shape for rank, meta in metas.items()}
    ndim, dtype = len(shapes[ranks[0]]), np.dtype(metas[ranks[0]].dtype)
    signature = resolve(sbp, placement.axis_names, ndim)
    shape = _joined_shape(shapes, ranks, placement, signature)
    like = jax.ShapeDtypeStruct(shape, dtype)
    fit(signature, placement.axis_names, placement.axis_sizes, like)
    return _join(arrays, _Whole(placement, signature, like, check_replicas))


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """What shards are joined to."""

    placement: Placement
    signature: Signature
    like: jax.ShapeDtypeStruct
    check_replicas: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _join(arrays: dict[int, jax.Array | np.ndarray], whole: _Whole) -> jax.Array:
    """Returns the tensor; its derivative takes it apart again."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        raise TypeError(
            f"sbp.from_local got shards that jit traces, for {whole.placement}: there "
            "they are on no device. Call it outside of jit."
        )
    if whole.check_replicas:
        _check_replicas(arrays, whole.placement, whole.signature)
    devices = dict(
        zip(whole.placement.flat_ranks, whole.placement.devices.flat, strict=True)
    )
    return jax.make_array_from_single_device_arrays(
        whole.like.shape,
        to_sharding(whole.placement, whole.signature),
        [jax.device_put(array, devices[rank]) for rank, array in arrays.items()],
        dtype=whole.like.dtype,
    )


def _join_forward(
    arrays: dict[int, jax.Array | np.ndarray], whole: _Whole
) -> tuple[jax.Array, None]:
    return _join(arrays, whole), None


def _join_backward(
    whole: _Whole, _: None, cotangent: jax.Array
) -> tuple[dict[int, jax.Array]]:
    """Replicas get addends of the gradient, addends all get the whole gradient."""
    dual: dict[Component, Component] = {broadcast: partial_sum, partial_sum: broadcast}
    signature = tuple(dual.get(s, s) for s in whole.signature)
    return (to_local(to_global(cotangent, sbp=signature)),)


_join.defvjp(_join_forward, _join_backward)


def to_local(x: jax.Array) -> dict[int, jax.Array]:
    """Returns the shards that this process holds, by rank. Moves nothing.

    The shard of a partial sum is the addend, not the sum.

    Args:
        x: A global tensor.

    Returns:
        A dict from rank to an array on that rank's device, in the order of the
        placement; empty in a process that holds none. ``sbp.from_local`` takes it
        back.

    Raises:
        TypeError: If ``x`` is on no mesh or traced.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [2, 3])
        >>> x = sbp.to_global(np.arange(4), p, sbp.split(0))
        >>> {rank: shard.tolist() for rank, shard in to_local(x).items()}
        {2: [0, 1], 3: [2, 3]}
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"sbp.to_local got {jax.typeof(x)} while it is traced, where there are no "
            "shards yet. Call it outside of jit and grad, or work on the shards inside "
            "jax.shard_map."
        )
    placement = placement_of(x)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    pairs = zip(placement.flat_ranks, placement.devices.flat, strict=True)
    return {rank: shards[device] for rank, device in pairs if device in shards}


def full_value(x: jax.typing.ArrayLike) -> np.ndarray:
    """Returns the logical value as a NumPy array: partial sums are summed.

    In several processes all of them must call it, also those that hold no part.

    Args:
        x: A global tensor, or anything that NumPy converts.

    Communication: none within one process, which reads the shards; else to broadcast
    on all ranks.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [0, 1])
        >>> full_value(sbp.to_global(np.arange(3.0), p, sbp.partial_sum))
        array([0., 1., 2.], dtype=float32)
    """
    if not is_global(x):
        return np.asarray(x)
    if not x.is_fully_addressable:
        everyone = Placement.all(placement_of(x).type)
        x = to_global(x, everyone, broadcast)
        return np.asarray(x.addressable_shards[0].data)
    sharding = sharding_of(x)
    assert sharding is not None
    if not sharding.spec.unreduced:
        return np.asarray(x)
    return _sum_of_addends(x, sharding)


def _sum_of_addends(x: jax.Array, sharding: NamedSharding) -> np.ndarray:
    """Adds up the shards of a tensor with partial axes, on the host."""
    assert isinstance(sharding.mesh, Mesh)
    axes = axes_of(sharding.mesh)
    addends = labels(frozenset(sharding.spec.unreduced), axes).tolist()
    plain = NamedSharding(sharding.mesh, P(*sharding.spec.partitions))
    where = plain.devices_indices_map(x.shape)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    result = np.zeros(x.shape, x.dtype)
    seen = set()  # replicas count once
    for device, addend in zip(sharding.mesh.devices.flat, addends, strict=True):
        key = (addend, str(where[device]))
        if key not in seen:
            seen.add(key)
            result[where[device]] += np.asarray(shards[device])
    return result


def _by_rank_with_metas(
    shards: Shards, placement: Placement
) -> tuple[dict[int, jax.Array | np.ndarray], dict[int, _Meta]]:
    """Returns this process's shards, and shape and dtype of those of all processes.

    A process that was called with the wrong shards tells the others before it raises,
    so that all of them raise and none waits.
    """
    alone = jax.process_count() == 1
    try:
        arrays = _by_rank(shards, placement)
    except (TypeError, ValueError) as error:
        if not alone:
            gather_from_processes({-1: f"process {jax.process_index()}: {error}"})
        raise
    metas = {rank: _Meta(a.shape, a.dtype.name) for rank, a in arrays.items()}
    if alone:
        return arrays, metas
    everyone = gather_from_processes(metas)
    if -1 in everyone:
        raise ValueError(f"sbp.from_local failed in {everyone[-1]}")
    return arrays, everyone


def _by_rank(shards: Shards, placement: Placement) -> dict[int, jax.Array | np.ndarray]:
    """Returns the shards of this process by rank, in the order of the placement."""
    mine = [
        rank
        for rank, device in zip(
            placement.flat_ranks, placement.devices.flat, strict=True
        )
        if device.process_index == jax.process_index()
    ]
    if isinstance(shards, Mapping):
        given = dict(shards)
    elif isinstance(shards, (list, tuple)):
        if len(shards) != len(mine):
            raise ValueError(
                f"sbp.from_local got {len(shards)} shards, but this process holds the "
                f"{len(mine)} ranks {mine} of {placement}. Give one shard for each, in "
                "this order, or a dict by rank."
            )
        given = dict(zip(mine, shards, strict=True))
    else:
        raise TypeError(
            "sbp.from_local takes a list of shards, or a dict from rank to shard, but "
            f"got {type(shards).__name__}. For one shard write [shard]; for a whole "
            "value use sbp.to_global."
        )
    if set(given) != set(mine):
        raise ValueError(
            f"sbp.from_local got shards for the ranks {sorted(given)}, but this "
            f"process holds the ranks {sorted(mine)} of {placement}. Give exactly "
            "those."
        )
    return {rank: _as_shard(given[rank]) for rank in mine}


def _as_shard(shard: jax.typing.ArrayLike) -> jax.Array | np.ndarray:
    if isinstance(shard, jax.Array):
        return shard
    array = np.asarray(shard)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _check_alike(values: Mapping[int, object], what: str) -> None:
    (rank, value), *others = values.items()
    for other, different in others:
        if different != value:
            raise ValueError(
                f"sbp.from_local got shards of different {what}: {value} on rank "
                f"{rank}, but {different} on rank {other}. Make them alike on all "
                "ranks."
            )


def _joined_shape(
    shapes: Mapping[int, tuple[int, ...]],
    ranks: Sequence[int],
    placement: Placement,
    signature: Signature,
) -> tuple[int, ...]:
    """Returns the global shape, after checking that the shards are equal parts."""
    first = shapes[ranks[0]]
    counts = num_shards(signature, placement.shape, len(first))
    axes = tuple(placement.axis_sizes.items())
    blocks = block_indices(
        from_signature(signature, placement.axis_names, len(first)), axes
    )
    for dim, size in enumerate(first):
        if all(shapes[rank][dim] == size for rank in ranks):
            continue
        if Split(dim) not in signature:
            rank = next(r for r in ranks if shapes[r][dim] != size)
            raise ValueError(
                f"sbp.from_local expects the same size in dim {dim} of all shards, "
                f"since {short(signature)} does not split it, but got {size} on rank "
                f"{ranks[0]} and {shapes[rank][dim]} on rank {rank}. Make the shapes "
                "equal there, or split that dim."
            )
        sizes = {
            int(block): shapes[rank][dim]
            for rank, block in zip(ranks, blocks[:, dim], strict=True)
        }
        raise ValueError(_unequal_parts(dim, [sizes[i] for i in range(counts[dim])]))
    return tuple(size * n for size, n in zip(first, counts, strict=True))


def _unequal_parts(dim: int, sizes: list[int]) -> str:
    total, largest = sum(sizes), max(sizes)
    balanced = tuple(sizes) == balanced_sizes(total, len(sizes))
    told = (
        f"the balanced parts of {total}"
        if balanced
        else f"neither equal nor the balanced parts of {total}, which would be "
        f"{balanced_sizes(total, len(sizes))}"
    )
    return (
        f"sbp.from_local got shards of sizes {tuple(sizes)} in the split dim {dim}: "
        f"{told}. The parts of a tensor on a mesh have equal sizes: pad each shard to "
        f"{largest} there, or pad the whole value with sbp.pad_to."
    )


def _check_replicas(
    arrays: Mapping[int, jax.Array | np.ndarray],
    placement: Placement,
    signature: Signature,
) -> None:
    """Compares the shards of this process that should be equal."""
    axes = tuple(placement.axis_sizes.items())
    ndim = next((array.ndim for array in arrays.values()), 0)
    tiling = from_signature(signature, placement.axis_names, ndim)
    keys = labels(frozenset(tiling.used), axes).tolist()
    first: dict[int, int] = {}
    for rank, key in zip(placement.flat_ranks, keys, strict=True):
        if rank not in arrays:
            continue
        other = first.setdefault(key, rank)
        if other != rank and not np.array_equal(
            np.asarray(arrays[other]),
            np.asarray(arrays[rank]),
            equal_nan=jax.dtypes.issubdtype(arrays[rank].dtype, np.inexact),
        ):
            raise ValueError(
                f"sbp.from_local got different values on the ranks {other} and {rank}, "
                f"which {short(signature)} on {placement} says are equal. Use a split "
                "or a partial sum along the axis on which they differ, or make them "
                "equal."
            )
