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
            in_specs: Tree prefix of the arguments; specs name manual axes only.
            out_specs: Tree prefix of the results.
        """
        if not self.manual:
            return fn
        is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731 - one expression
        narrow = lambda tree: jax.tree.map(self._narrow, tree, is_leaf=is_spec)  # noqa: E731 - one expression
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            axis_names=set(self.manual),
            in_specs=narrow(in_specs),
            out_specs=narrow(out_specs),
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

    def varying(self, tree: Any) -> Any:
        """Marks values as this rank's own, so that gradients of them stay local."""

        def mark(x: jax.Array) -> jax.Array:
            missing = set(self.manual) - set(jax.typeof(x).mat.varying)
            return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

        return jax.tree.map(mark, tree)

    def _narrow(self, spec: P) -> P:
        assert all(entry is None or entry in self.axis_names for entry in spec), spec
        return P(*(entry if entry in self.manual else None for entry in spec))
