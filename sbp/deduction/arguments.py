"""Reads placement and signatures of the arguments of a call."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sbp.placement import Placement
from sbp.rules.form import Shape
from sbp.signature import Signature, broadcast
from sbp.spec import from_partition_spec


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """What a program is compiled for.

    Attributes:
        shape: Global shape.
        dtype: Element type.
        is_weak: Whether it came from a Python scalar.
        spec: Partition spec, or None if the argument is on no mesh. It is then the
            same on every device.
        signature: Signature, broadcast everywhere if on no mesh.
    """

    shape: Shape
    dtype: Any
    is_weak: bool
    spec: P | None
    signature: Signature

    def to_struct(self) -> jax.ShapeDtypeStruct:
        """Returns the type without the mesh, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.is_weak)


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The leaves of a call's arguments.

    Attributes:
        leaves: The arguments.
        types: Their types.
        mesh: The mesh they are on: concrete, or abstract while tracing.
    """

    leaves: tuple[Any, ...]
    types: tuple[TensorType, ...]
    mesh: Mesh | AbstractMesh

    @property
    def is_traced(self) -> bool:
        """Whether the values are not known yet."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in self.leaves)

    def on_mesh(self) -> list[jax.Array]:
        """Returns the arguments, those on no mesh copied to every device."""
        everywhere = NamedSharding(self.mesh, P())
        pairs = zip(self.leaves, self.types, strict=True)
        return [
            _to_every_device(leaf, everywhere)
            if type_.spec is None
            else _to_explicit_mesh(leaf)
            for leaf, type_ in pairs
        ]


def is_on_mesh(leaf: Any) -> bool:
    """Returns whether an argument is a global tensor, or stands for one."""
    return _named_sharding(leaf) is not None


def read(leaves: Sequence[Any], what: str) -> Arguments:
    """Reads the arguments of a call.

    Args:
        leaves: Arrays, scalars, tracers or ``ShapeDtypeStruct``.
        what: Name of the called function, for messages.

    Raises:
        ValueError: If none is on a mesh, or they are on different ones.
    """
    shardings = [_named_sharding(leaf) for leaf in leaves]
    meshes = dict.fromkeys(s.mesh for s in shardings if s is not None)
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        # Traced, so that only abstract meshes can be compared.
        meshes = dict.fromkeys(mesh.abstract_mesh for mesh in meshes)
    if not meshes:
        raise ValueError(
            f"{what} got no global tensor among its {len(leaves)} arguments, so that "
            "there is no placement to compute on. Make one first: "
            "sbp.to_global(x, placement, sbp)."
        )
    mesh, *others = meshes
    if others:
        raise ValueError(
            f"{what} got tensors on two placements, {_describe(mesh)} and "
            f"{_describe(others[0])}, but computes on one. Move them together: "
            "sbp.to_global(x, placement)."
        )
    names = tuple(mesh.axis_names)
    types = tuple(
        _type_of(leaf, None if sharding is None else sharding.spec, names)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
    return Arguments(tuple(leaves), types, mesh)


def _named_sharding(leaf: Any) -> NamedSharding | None:
    if isinstance(leaf, jax.core.Tracer):
        sharding = getattr(jax.typeof(leaf), "sharding", None)
    else:
        sharding = getattr(leaf, "sharding", None)
    return _explicit(sharding) if isinstance(sharding, NamedSharding) else None


@functools.lru_cache(maxsize=4096)
def _explicit(sharding: NamedSharding) -> NamedSharding | None:
    """Returns the same sharding on a mesh whose axes are all Explicit."""
    if sharding.mesh.empty:
        return None
    if all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
        return sharding
    if not isinstance(sharding.mesh, Mesh):
        return None  # the compiler chooses here, so that nothing is deduced
    mesh = Placement.from_mesh(sharding.mesh).mesh
    return NamedSharding(mesh, sharding.spec)


def _type_of(leaf: Any, spec: P | None, names: tuple[str, ...]) -> TensorType:
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
    if dtype is None or isinstance(leaf, np.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    is_weak = bool(getattr(leaf, "weak_type", isinstance(leaf, (int, float, complex))))
    return _make_type(shape, dtype, is_weak, spec, names)


@functools.lru_cache(maxsize=4096)
def _make_type(
    shape: Shape, dtype: Any, is_weak: bool, spec: P | None, names: tuple[str, ...]
) -> TensorType:
    if spec is None:
        return TensorType(shape, dtype, is_weak, None, (broadcast,) * len(names))
    signature = from_partition_spec(spec, names)
    return TensorType(shape, dtype, is_weak, spec, signature)


def _to_explicit_mesh(leaf: jax.Array) -> jax.Array:
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    sharding = _named_sharding(leaf)
    return leaf if sharding is leaf.sharding else jax.device_put(leaf, sharding)


def _to_every_device(leaf: Any, everywhere: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.core.Tracer) or isinstance(everywhere.mesh, AbstractMesh):
        return jax.sharding.reshard(jnp.asarray(leaf), everywhere)
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf, dtype=jnp.result_type(leaf))
    return jax.device_put(leaf, everywhere)


def _describe(mesh: Mesh | AbstractMesh) -> str:
    if isinstance(mesh, Mesh):
        return repr(Placement.from_mesh(mesh))
    return f"one with axes {dict(mesh.shape)}"
