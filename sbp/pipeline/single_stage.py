"""The pipeline of one stage: a loop over microbatches, differentiated as a whole.

What a longer pipeline keeps in buffers between a forward and a backward task, this one
hands over directly.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sbp.pipeline.parts import Parts, Tree
from sbp.pipeline.region import ManualRegion


@dataclasses.dataclass(frozen=True, slots=True)
class SingleStage:
    """The pipeline of one stage.

    Attributes:
        region: What the parts are written for.
    """

    region: ManualRegion

    def gradients(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """See `AbstractPipeline`. Communication: what the parts do."""

        def objective(params: tuple[Tree, Tree], microbatch: Tree) -> tuple[Any, Tree]:
            return _run(parts, *params, microbatch)

        grad = jax.grad(objective, has_aux=True)
        total = self._sum(lambda part: grad((blocks, outer), part), microbatches)
        (block_grads, outer_grads), sums = total
        return sums, block_grads, outer_grads

    def losses(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> Tree:
        """See `AbstractPipeline`. Communication: what the parts do."""
        return self._sum(lambda part: _run(parts, blocks, outer, part)[1], microbatches)

    def _sum(self, fn: Any, microbatches: Tree) -> Tree:
        def add(total: Tree, microbatch: Tree) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, fn(microbatch)), None

        first = jax.tree.map(lambda leaf: leaf[0], microbatches)
        zeros = jax.tree.map(
            lambda leaf: self.region.varying(jnp.zeros(leaf.shape, leaf.dtype)),
            jax.eval_shape(fn, first),
        )
        return jax.lax.scan(add, zeros, microbatches)[0]


def _run(parts: Parts, blocks: Tree, outer: Tree, microbatch: Tree) -> tuple[Any, Tree]:
    """Returns what the losses return for a microbatch that went through all blocks."""
    context = parts.context(microbatch)

    def step(carry: tuple, block: Tree) -> tuple[tuple, None]:
        x, layer = carry
        return (parts.block(block, x, context, layer), layer + 1), None

    start = parts.embed(outer, microbatch), jnp.zeros((), jnp.int32)
    (x, _), _ = jax.lax.scan(step, start, blocks)
    return parts.losses(outer, x, microbatch)
