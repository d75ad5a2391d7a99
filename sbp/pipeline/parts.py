"""What a pipeline runs, and what it offers, whatever its number of stages."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

Tree = Any
Head = Callable[[Tree, jax.Array, Tree], Tree]
"""``head(outer, x, microbatch)``: anything of the output of the last layer."""
Block = Callable[[Tree, jax.Array, Tree, jax.Array], jax.Array]
"""``block(weights, x, context, layer)``: the layer of that index in the whole model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model in the parts that a pipeline needs, functions of one microbatch.

    Weights may be held in another form than the block takes, and gradients summed up
    in another form than they come, such as in parts over ``data``.

    Attributes:
        embed: ``embed(outer, microbatch)``: input of the first layer.
        context: ``context(microbatch)``: what each layer is given besides its input.
        block: ``block(weights, x, context, layer)``: one layer.
        losses: ``losses(outer, x, microbatch)``: from the output of the last layer, the
            scalar to differentiate and a tree of values to sum over microbatches.
        gather: From the weights of a layer as they are held to those that ``block``
            takes. May communicate: it is done one layer ahead. None if they are the
            same.
        scatter: From the gradients of a layer's weights, as ``block`` takes them, to
            the form of what is held, one layer behind. None if they are the same.
        sum_dtype: Of the sums of gradients. None for that of the parameters.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    context: Callable[[Tree], Tree]
    block: Block
    losses: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]
    gather: Callable[[Tree], Tree] | None = None
    scatter: Callable[[Tree], Tree] | None = None
    sum_dtype: str | None = None


def sums_like(tree: Tree, dtype: str | None) -> Tree:
    """Returns the shapes of sums of gradients of parameters; see `Parts`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype), tree
    )


class AbstractPipeline(Protocol):
    """Runs a model over microbatches, inside a `ManualRegion`.

    The arguments are the same for both methods. ``blocks`` are this rank's block
    weights, stacked along dim 0, ``outer`` are all other parameters, and
    ``microbatches`` is a tree of ``(num_microbatches, ...)``.
    """

    def gradients(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Returns sums over the microbatches.

        Returns:
            What the losses return besides the objective, from the last stage alone (0
            elsewhere); the gradients of ``blocks``; and those of ``outer``, each
            stage's part of the sum over ``stage``.
        """
        ...

    def losses(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> Tree:
        """Returns the first of these alone, without a backward pass."""
        ...

    def outputs(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree, head: Head
    ) -> Tree:
        """Returns what ``head`` makes of each microbatch, a new dim in front.

        It comes from the last stage alone, and is 0 elsewhere.
        """
        ...
