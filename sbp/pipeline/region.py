"""The part of a program that is written per rank along some mesh axes.

Inside a region a value is one rank's own along the manual axes, and only there does
code communicate by name; the other axes are left to XLA. Axes of one device are left
out: nothing varies over them, and XLA 0.10 refuses collectives of such groups.

An axis may be made of several: where a mesh has the axes ``data/replica`` and
``data/shard``, ``data`` stands for both, the first the outer one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sbp._compat import empty_on_host, is_on_host


@dataclasses.dataclass(frozen=True, slots=True)
class ManualRegion:
    """Runs functions per rank along ``axis_names`` of ``mesh``.

    Attributes:
        mesh: A mesh whose axes are Auto.
        axis_names: The axes along which code is written per rank.
    """

    mesh: Mesh
    axis_names: tuple[str, ...]

    @property
    def manual(self) -> tuple[str, ...]:
        """The axes of more than one device."""
        return tuple(name for name in self.axis_names if self.mesh.shape[name] > 1)

    def run(self, fn: Callable, *, in_specs: Any, out_specs: Any) -> Callable:
        """Returns ``fn`` of global arrays, run per rank.

        Args:
            fn: Function of this rank's parts of the arguments.
            in_specs: Tree prefix of the arguments. Axes that are not manual are left
                out of the specs here, so those of the arrays themselves will do.
            out_specs: Tree prefix of the results.
        """
        if not self.manual:
            return fn
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            axis_names=set(self.manual),
            in_specs=self._narrow_all(in_specs),
            out_specs=self._narrow_all(out_specs),
        )

    def sharding(self, spec: P) -> NamedSharding:
        """Returns the sharding of arrays that lie so."""
        return NamedSharding(self.mesh, self._expand(spec, self.mesh.axis_names))

    def members(self, *axis_names: str) -> tuple[str, ...]:
        """Returns the axes of the mesh that these stand for, of more than one device.

        A name that the mesh does not have stands for none.
        """
        return _parts(axis_names, self.manual)

    def index(self, axis_name: str) -> jax.Array:
        """Returns this rank's position along an axis."""
        if axes := self.members(axis_name):
            return jax.lax.axis_index(axes)
        return jnp.zeros((), jnp.int32)

    def psum(self, tree: Any, *axis_names: str) -> Any:
        """Returns the sum over the ranks along the axes, the same on all of them."""
        axes = self.members(*axis_names)
        return jax.lax.psum(tree, axes) if axes else tree

    def pmax(self, tree: Any, *axis_names: str) -> Any:
        """Returns the maximum over the ranks along the axes, on all of them."""
        axes = self.members(*axis_names)
        return jax.lax.pmax(tree, axes) if axes else tree

    def all_gather(self, x: jax.Array, axis_name: str, *, dim: int) -> jax.Array:
        """Returns the ranks' values along an axis, one after another along ``dim``."""
        axes = self.members(axis_name)
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def psum_scatter(self, x: jax.Array, axis_name: str, *, dim: int) -> jax.Array:
        """Returns this rank's part, along ``dim``, of the sum over the ranks."""
        if not (axes := self.members(axis_name)):
            return x
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    def varying(self, tree: Any) -> Any:
        """Marks values as this rank's own, so that gradients of them stay local."""

        def mark(x: jax.Array) -> jax.Array:
            missing = set(self.manual) - set(jax.typeof(x).mat.varying)
            return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

        return jax.tree.map(mark, tree)

    def zeros(self, like: Any, *sizes: int) -> jax.Array:
        """Returns zeros of this rank's own, of the shape and dtype of ``like``.

        Args:
            like: An array or its type. If that is one in the memory of the host, the
                result is there too, and its values are any until they are written.
            sizes: Of dims to add in front.
        """
        shape = (*sizes, *like.shape)
        if is_on_host(like):
            scalar = self.varying(empty_on_host(like.dtype))
            return jax.lax.broadcast(scalar, shape)
        return self.varying(jnp.zeros(shape, like.dtype))

    def cond(self, predicate: jax.Array, run: Callable, skip: Callable) -> Any:
        """Returns the results of one of two functions, as this rank's own.

        Both may communicate over those axes alone along which all ranks are sure to
        have the same predicate.
        """
        # By number rather than by truth value: in that form XLA finds, on GPUs too,
        # that a buffer which one branch changes and the other hands on is not copied.
        branches = [lambda: self.varying(skip()), lambda: self.varying(run())]
        return jax.lax.switch(predicate.astype(jnp.int32), branches)

    def _narrow_all(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: self._expand(spec, self.manual),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )

    def _expand(self, spec: P, axes: Sequence[str]) -> P:
        def expand(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            found = _parts(names, axes)
            return found[0] if len(found) == 1 else found or None

        return P(*(expand(entry) for entry in spec))


def _parts(names: Sequence[str], axes: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the axes that the names stand for."""
    return tuple(
        axis
        for name in names
        for axis in axes
        if axis == name or axis.startswith(f"{name}/")
    )
