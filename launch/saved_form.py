"""The train state as it is saved: the same on every layout.

A pipeline may hold its layers in another order, or with unused places between them. A
checkpoint has them in the order of the model, so that any layout can read it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedForm:
    """Converts between the state of a run and its saved form.

    Attributes:
        abstract: Shapes, dtypes and shardings of the state of the run, or of a part of
            its parameters.
        layer_order: See `StackedModel.layer_order`.
        num_layers: Layers of the model.
    """

    abstract: Any
    layer_order: tuple[int, ...]
    num_layers: int

    @property
    def is_same(self) -> bool:
        """Whether the run holds its layers in the order of the model."""
        return self.layer_order == tuple(range(self.num_layers))

    @property
    def abstract_saved(self) -> Any:
        """Shapes, dtypes and shardings of the saved form."""
        if self.is_same:
            return self.abstract

        def reshape(path: tuple, leaf: Any) -> Any:
            if not _is_of_blocks(path):
                return leaf
            shape = (self.num_layers, *leaf.shape[1:])
            # The number of layers need not divide by the number of stages.
            sharding = NamedSharding(
                leaf.sharding.mesh, P(None, *leaf.sharding.spec[1:])
            )
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map_with_path(reshape, self.abstract)

    def to_saved(self, state: Any) -> Any:
        """Returns the saved form of a state.

        Communication: an all-gather of the blocks over ``stage``, unless `is_same`.
        """
        places = jnp.asarray(
            [self.layer_order.index(i) for i in range(self.num_layers)]
        )
        return self._convert(state, lambda x: x[places], self.abstract_saved)

    def from_saved(self, state: Any) -> Any:
        """Returns the state of which this is the saved form."""
        order = jnp.asarray(self.layer_order)

        def arrange(x: jax.Array) -> jax.Array:
            is_used = (order >= 0).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(is_used, x[jnp.maximum(order, 0)], 0).astype(x.dtype)

        return self._convert(state, arrange, self.abstract)

    def _convert(self, state: Any, arrange: Any, target: Any) -> Any:
        if self.is_same:
            return state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

        def convert(state: Any) -> Any:
            return jax.tree.map_with_path(
                lambda path, x: arrange(x) if _is_of_blocks(path) else x, state
            )

        return jax.jit(convert, out_shardings=shardings)(state)


def _is_of_blocks(path: tuple) -> bool:
    return any(getattr(key, "key", None) == "blocks" for key in path)
