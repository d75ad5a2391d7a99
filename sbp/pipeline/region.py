"""The part of a program that is written per rank along some mesh axes.

Inside a region a value is one rank's own along the manual axes, and only there does
code communicate by name; the other axes are left to XLA. Axes of one device are left
out: nothing varies over them, and XLA 0.10 refuses collectives of such groups.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sbp._compat import is_on_host, to_host


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

    def index(self, axis_name: str) -> jax.Array:
        """Returns this rank's position along an axis."""
        if axis_name in self.manual:
            return jax.lax.axis_index(axis_name)
        return jnp.zeros((), jnp.int32)

    def psum(self, tree: Any, *axis_names: str) -> Any:
        """Returns the sum over the ranks along the axes, the same on all of them."""
        axes = tuple(name for name in axis_names if name in self.manual)
        return jax.lax.psum(tree, axes) if axes else tree

    def pmax(self, tree: Any, *axis_names: str) -> Any:
        """Returns the maximum over the ranks along the axes, on all of them."""
        axes = tuple(name for name in axis_names if name in self.manual)
        return jax.lax.pmax(tree, axes) if axes else tree

    def all_gather(self, x: jax.Array, axis_name: str, *, dim: int) -> jax.Array:
        """Returns the ranks' values along an axis, one after another along ``dim``."""
        if axis_name not in self.manual:
            return x
        return jax.lax.all_gather(x, axis_name, axis=dim, tiled=True)

    def psum_scatter(self, x: jax.Array, axis_name: str, *, dim: int) -> jax.Array:
        """Returns this rank's part, along ``dim``, of the sum over the ranks."""
        if axis_name not in self.manual:
            return x
        return jax.lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=True)

    def varying(self, tree: Any) -> Any:
        """Marks values as this rank's own, so that gradients of them stay local."""

        def mark(x: jax.Array) -> jax.Array:
            missing = set(self.manual) - set(jax.typeof(x).mat.varying)
            return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

        return jax.tree.map(mark, tree)

    def zeros(self, like: Any, *sizes: int) -> jax.Array:
        """Returns zeros of this rank's own, of the shape and dtype of ``like``.

        Args:
            like: An array or its type. Where that is one in the memory of the host,
                there are the zeros.
            sizes: Of dims to add in front.
        """
        shape = (*sizes, *like.shape)
        if is_on_host(like):  # one number, made many there
            zero = to_host(self.varying(jnp.zeros((), like.dtype)))
            return jax.lax.broadcast(zero, shape)
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
            self._narrow, specs, is_leaf=lambda leaf: isinstance(leaf, P)
        )

    def _narrow(self, spec: P) -> P:
        def keep(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
            names = entry if isinstance(entry, tuple) else (entry,)
            kept = tuple(name for name in names if name in self.manual)
            return kept[0] if len(kept) == 1 else kept or None

        return P(*(keep(entry) for entry in spec))
