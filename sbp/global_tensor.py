"""Global tensors: functions on ``jax.Array`` whose type carries its signature."""

from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sbp.placement import Placement
from sbp.signature import Signature, SignatureLike, broadcast, resolve
from sbp.spec import check_divides, from_partition_spec, to_sharding


def to_global(
    x: jax.typing.ArrayLike,
    placement: Placement | None = None,
    sbp: SignatureLike | None = None,
) -> jax.Array:
    """Returns ``x`` as a global tensor with this placement and signature."""
    if is_global(x):
        placement = placement or placement_of(x)
        sbp = signature_of(x) if sbp is None else sbp
    if placement is None or sbp is None:
        raise ValueError("A tensor that is not global needs a placement and an sbp.")
    signature = resolve(sbp, placement.axis_names, np.ndim(x))
    check_divides(signature, placement.axis_sizes, np.shape(x))
    plain = to_sharding(placement, (broadcast,) * len(signature))
    if is_global(x):
        everywhere = (broadcast,) * len(placement_of(x).axis_names)
        x = jax.sharding.reshard(x, to_sharding(placement_of(x), everywhere))
    x = jax.device_put(x, plain)
    return jax.sharding.reshard(x, to_sharding(placement, signature))


def is_global(x: object) -> TypeGuard[jax.Array]:
    """Returns whether ``x`` is a ``jax.Array`` with a named sharding."""
    return isinstance(x, jax.Array) and isinstance(
        jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding,
        NamedSharding,
    )


def signature_of(x: jax.Array) -> Signature:
    """Returns the signature of a global tensor, one component per mesh axis."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    assert isinstance(sharding, NamedSharding)
    return from_partition_spec(sharding.spec, sharding.mesh.axis_names)


def placement_of(x: jax.Array) -> Placement:
    """Returns the placement of a global tensor."""
    assert isinstance(x.sharding, NamedSharding)
    assert isinstance(x.sharding.mesh, Mesh)
    return Placement.from_mesh(x.sharding.mesh)
