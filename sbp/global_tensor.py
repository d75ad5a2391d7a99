"""Global tensors: functions on ``jax.Array``, whose type carries its signature.

There is no tensor class. A global tensor is an array on a mesh with Explicit axes;
``jax.typeof(x)`` prints its signature, and JAX's own operations propagate it.

One program sees whole tensors. An array that is not on a mesh yet (a list, a NumPy
array, an array on one device) counts as a whole value, the same in every process;
pieces that differ from rank to rank become one tensor with ``sbp.from_local``.
"""

from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from sbp._compat import concrete_mesh, expect_devices, is_tracing, mesh_set, sharding_of
from sbp.assemble import assemble, fit, not_global
from sbp.placement import Placement
from sbp.reshard import axes_of, reshard
from sbp.signature import (
    PartialSum,
    Signature,
    SignatureLike,
    short,
)
from sbp.spec import from_partition_spec, to_partition_spec
from sbp.tiling import Tiling, from_signature, from_spec
from sbp.transfer import transfer


def to_global(
    x: jax.typing.ArrayLike,
    placement: Placement | None = None,
    sbp: SignatureLike | None = None,
    *,
    grad_sbp: SignatureLike | None = None,
) -> jax.Array:
    """Returns ``x`` as a global tensor with this placement and signature.

    The only function that moves a tensor: from the host to devices, from signature
    to signature, from placement to placement. It works inside and outside of
    ``jit`` (inside, all placements have the same devices in the same order), and
    JAX differentiates through it.

    Args:
        x: A global tensor, or a whole value that is on no mesh yet.
        placement: Where it should be. None keeps the placement of ``x``.
        sbp: How it should lie: one component per axis of the placement, or a mapping
            from axis name to component, in which an axis left out is broadcast. None
            keeps the signature of ``x``.
        grad_sbp: Signature, on the placement of ``x``, that the gradient takes on
            its way back; then it is brought into the layout that JAX demands, that
            of ``x``. None takes the cheapest route.

    Returns:
        The tensor; ``x`` itself if it is already as wanted.

    Raises:
        TypeError: If ``x`` is no array, or a signature holds no components.
        ValueError: If a signature does not fit the placement or the shape, a
            placement or signature is missing, or ``jit`` cannot move the tensor.

    Communication: what ``sbp.plan`` lists, and nothing if ``x`` was on no mesh.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))
        >>> x = sbp.to_global(np.ones((8, 16), np.float32), p, sbp.parse("S(0),P"))
        >>> print(jax.typeof(x))
        float32[8@data,16]{U:tensor}
        >>> print(jax.typeof(sbp.to_global(x, sbp={"tensor": sbp.split(1)})))
        float32[8,16@tensor]
    """
    if not is_global(x):
        return _place(x, placement, sbp, grad_sbp)
    x = _on_explicit_mesh(x)
    grad = None if grad_sbp is None else _tiling_here(grad_sbp, x)
    if placement is None or _is_on(x, placement):
        return _reshard(x, placement, sbp, grad)
    return _move(x, placement, sbp, grad)


def is_global(x: object) -> TypeGuard[jax.Array]:
    """Returns whether ``x`` is an array on a mesh.

    Example:
        >>> import numpy as np, sbp
        >>> is_global(np.ones(4))
        False
        >>> p = sbp.placement("cpu", [0, 1])
        >>> is_global(sbp.to_global(np.ones(4), p, sbp.split(0)))
        True
    """
    return sharding_of(x) is not None


def signature_of(x: jax.Array) -> Signature:
    """Returns the signature of a global tensor, one component per mesh axis.

    Works inside ``jit`` too, where it reads the type.

    Raises:
        TypeError: If ``x`` is on no mesh.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [[0, 1], [2, 3]])
        >>> signature_of(sbp.to_global(np.ones((4, 4)), p, sbp.parse("B,S(0)")))
        (sbp.broadcast, sbp.split(0))
    """
    sharding = sharding_of(x)
    if sharding is None:
        raise TypeError(not_global(x, "signature"))
    return from_partition_spec(sharding.spec, sharding.mesh.axis_names)


def placement_of(x: jax.Array) -> Placement:
    """Returns the placement of a global tensor.

    Raises:
        TypeError: If ``x`` is on no mesh, or traced by ``jit``, where the devices are
            not known.

    Example:
        >>> import numpy as np, sbp
        >>> p = sbp.placement("cpu", [3, 1], ("data",))
        >>> placement_of(sbp.to_global(np.ones(4), p, sbp.split(0)))
        sbp.placement('cpu', ranks=[3, 1], axis_names=('data',))
    """
    if not is_global(x):
        raise TypeError(not_global(x, "placement"))
    mesh = concrete_mesh(x)
    if mesh is None:
        raise TypeError(
            f"The placement of {jax.typeof(x)} is not known while jit traces it: the "
            "type carries the names of the axes, not the devices. Ask for it outside "
            "of jit, or pass the placement to the function."
        )
    return Placement.from_mesh(mesh)


def constrain(x: jax.Array, sbp: SignatureLike) -> jax.Array:
    """Pins the signature of an activation, in model code that runs on any mesh.

    On a mesh with Explicit axes this is ``to_global``; where the compiler chooses
    (Auto axes, set with ``jax.set_mesh``) it is a constraint; without a mesh it does
    nothing, so that the same code runs on one device.

    Args:
        x: A tensor.
        sbp: Its signature, best as a mapping from axis name to component.

    Raises:
        ValueError: If the signature does not fit, or asks an Auto axis for a partial
            sum.

    Example:
        >>> import jax.numpy as jnp, sbp
        >>> constrain(jnp.ones(3), {"tensor": sbp.split(0)}).shape
        (3,)
    """
    sharding = sharding_of(x)
    if sharding is not None and _all_explicit(sharding.mesh):
        return to_global(x, sbp=sbp)
    mesh = mesh_set()
    if mesh is None:
        return x
    names = tuple(
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Auto
    )
    signature = fit(sbp, names, {name: mesh.shape[name] for name in names}, x)
    if any(isinstance(component, PartialSum) for component in signature):
        raise ValueError(
            f"sbp.constrain asks for {short(signature)} on the axes {names}, but they "
            "are Auto, where the compiler keeps partial sums to itself. Use a split or "
            "a broadcast, or a mesh with Explicit axes."
        )
    return jax.lax.with_sharding_constraint(x, to_partition_spec(signature, names))


def _reshard(
    x: jax.Array,
    placement: Placement | None,
    sbp: SignatureLike | None,
    grad: Tiling | None,
) -> jax.Array:
    """Returns ``x`` with another signature on its mesh."""
    y = reshard(x, _tiling_here(signature_of(x) if sbp is None else sbp, x), grad=grad)
    if placement is None or concrete_mesh(x) is not None:
        return y
    return expect_devices(y, placement.mesh)


def _move(
    x: jax.Array, placement: Placement, sbp: SignatureLike | None, grad: Tiling | None
) -> jax.Array:
    """Returns ``x`` on another placement."""
    wanted = _kept_signature(x, placement) if sbp is None else sbp
    signature = fit(wanted, placement.axis_names, placement.axis_sizes, x)
    tiling = from_signature(signature, placement.axis_names, x.ndim)
    here = concrete_mesh(x)
    if here is not None and Placement.from_mesh(here).type != placement.type:
        return _change_device_type(x, placement, tiling, grad)
    target = tiling.to_spec()
    grad_spec = None if grad is None else grad.to_spec()
    return transfer(x, placement.mesh, target, grad=grad_spec)


def _change_device_type(
    x: jax.Array, placement: Placement, tiling: Tiling, grad: Tiling | None
) -> jax.Array:
    """Returns ``x`` on devices of another type: no collective reaches those."""
    summed = from_spec(_sharding(x).spec, x.ndim).with_partial(frozenset())
    held = tiling.with_partial(frozenset()).to_spec()
    y = reshard(x, summed, grad=grad)
    return reshard(jax.device_put(y, NamedSharding(placement.mesh, held)), tiling)


def _tiling_here(sbp: SignatureLike, x: jax.Array) -> Tiling:
    """Returns the tiling asked for on the mesh of ``x``."""
    mesh = _sharding(x).mesh
    signature = fit(sbp, mesh.axis_names, dict(mesh.shape), x)
    return from_signature(signature, mesh.axis_names, x.ndim)


def _sharding(x: jax.Array) -> NamedSharding:
    sharding = sharding_of(x)
    assert sharding is not None, "x is global"
    return sharding


def _place(
    x: jax.typing.ArrayLike,
    placement: Placement | None,
    sbp: SignatureLike | None,
    grad_sbp: SignatureLike | None,
) -> jax.Array:
    """Returns a whole value, which is on no mesh, as a global tensor."""
    if grad_sbp is not None:
        raise ValueError(
            f"sbp.to_global got grad_sbp={grad_sbp!r} for a value that is on no mesh. "
            "Its gradient is on no mesh either: leave grad_sbp out."
        )
    if placement is None or sbp is None:
        missing = " and ".join(
            name
            for name, value in (("placement", placement), ("sbp", sbp))
            if value is None
        )
        raise ValueError(
            f"sbp.to_global got a value that is on no mesh, without {missing}. Such a "
            "value has neither: give both, as in sbp.to_global(x, placement, "
            "sbp.split(0))."
        )
    names, sizes = placement.axis_names, placement.axis_sizes
    if is_tracing() or (isinstance(x, jax.Array) and jax.process_count() == 1):
        x = x if isinstance(x, jax.Array) else jax.numpy.asarray(_as_array(x))
        signature = fit(sbp, names, sizes, x)
        tiling = from_signature(signature, names, x.ndim)
        held = tiling.with_partial(frozenset()).to_spec()
        y = jax.device_put(x, NamedSharding(placement.mesh, held))
        return reshard(y, tiling)
    value = _as_array(x)
    signature = fit(sbp, names, sizes, value)
    return assemble(value.shape, value.dtype, placement, signature, value.__getitem__)


def _as_array(x: object) -> np.ndarray:
    array = np.asarray(x)
    if array.dtype == object or array.dtype.kind in "USMm":
        raise TypeError(
            f"sbp.to_global takes arrays of numbers, but got {type(x).__name__}"
            f" {str(x)[:40]!r}. For a tree of arrays use jax.tree.map."
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _on_explicit_mesh(x: jax.Array) -> jax.Array:
    """Returns ``x`` with its signature in its type; the same shards, not copied."""
    sharding = _sharding(x)
    if _all_explicit(sharding.mesh):
        return x
    if AxisType.Manual in sharding.mesh.axis_types:
        raise ValueError(
            f"{jax.typeof(x)} is one device's shard inside jax.shard_map, not a global "
            "tensor. Call sbp.to_global outside of it, or use the collectives of "
            "jax.lax inside."
        )
    mesh = concrete_mesh(x)
    if mesh is None or isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{jax.typeof(x)} is traced on a mesh whose axes are not all Explicit, so "
            "that its type does not carry a signature. Use sbp.constrain there, or "
            "placement.mesh, whose axes are Explicit."
        )
    explicit = Placement.from_mesh(mesh).mesh
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(explicit, sharding.spec), shards, dtype=x.dtype
    )


def _all_explicit(mesh: Mesh | jax.sharding.AbstractMesh) -> bool:
    return all(axis_type == AxisType.Explicit for axis_type in mesh.axis_types)


def _is_on(x: jax.Array, placement: Placement) -> bool:
    """Returns whether ``x`` is on a placement, as far as can be known."""
    mesh = concrete_mesh(x)
    if mesh is not None:
        return mesh == placement.mesh
    return axes_of(_sharding(x).mesh) == axes_of(placement.mesh)


def _kept_signature(x: jax.Array, placement: Placement) -> Signature:
    signature = signature_of(x)
    if len(signature) == len(placement.axis_names):
        return signature
    raise ValueError(
        f"sbp.to_global keeps the signature of the tensor if none is given, but "
        f"{short(signature)} has {len(signature)} components and the placement has "
        f"{len(placement.axis_names)} axes {placement.axis_names}. Give a signature: "
        "sbp=..."
    )
