"""Global tensors: functions on ``jax.Array`` whose type carries its signature."""

from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh

from sbp._compat import sharding_of
from sbp.placement import Placement
from sbp.reshard import reshard
from sbp.signature import Signature, SignatureLike, broadcast, resolve
from sbp.spec import check_divides, from_partition_spec, to_sharding
from sbp.tiling import from_signature


def to_global(
    x: jax.typing.ArrayLike,
    placement: Placement | None = None,
    sbp: SignatureLike | None = None,
    *,
    grad_sbp: SignatureLike | None = None,
) -> jax.Array:
    """Returns ``x`` as a global tensor with this placement and signature."""
    if is_global(x):
        sharding = sharding_of(x)
        assert sharding is not None
        names = sharding.mesh.axis_names
        sizes = dict(sharding.mesh.shape)
        signature = resolve(signature_of(x) if sbp is None else sbp, names, x.ndim)
        check_divides(signature, sizes, x.shape)
        grad = None
        if grad_sbp is not None:
            grad = from_signature(resolve(grad_sbp, names, x.ndim), names, x.ndim)
        return reshard(x, from_signature(signature, names, x.ndim), grad=grad)
    if placement is None or sbp is None:
        raise ValueError("A tensor that is not global needs a placement and an sbp.")
    signature = resolve(sbp, placement.axis_names, np.ndim(x))
    check_divides(signature, placement.axis_sizes, np.shape(x))
    plain = to_sharding(placement, (broadcast,) * len(signature))
    return to_global(jax.device_put(x, plain), sbp=signature)


def is_global(x: object) -> TypeGuard[jax.Array]:
    """Returns whether ``x`` is a ``jax.Array`` on a mesh."""
    return sharding_of(x) is not None


def signature_of(x: jax.Array) -> Signature:
    """Returns the signature of a global tensor, one component per mesh axis."""
    sharding = sharding_of(x)
    assert sharding is not None
    return from_partition_spec(sharding.spec, sharding.mesh.axis_names)


def placement_of(x: jax.Array) -> Placement:
    """Returns the placement of a global tensor."""
    sharding = sharding_of(x)
    assert sharding is not None
    assert isinstance(sharding.mesh, Mesh)
    return Placement.from_mesh(sharding.mesh)
