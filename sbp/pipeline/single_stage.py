"""The pipeline of one stage: a loop over microbatches, forward and back at once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sbp.pipeline.layers import Stack
from sbp.pipeline.parts import Head, Parts, Tree, sums_like
from sbp.pipeline.region import ManualRegion


@dataclasses.dataclass(frozen=True, slots=True)
class SingleStage:
    """The pipeline of one stage.

    The layers' residuals have one slot, which every microbatch fills anew, and their
    gradients are added to the sums one layer at a time.

    Attributes:
        region: What the parts are written for.
    """

    region: ManualRegion

    def gradients(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """See `AbstractPipeline`. Communication: what the parts do."""
        stack, zeros = self._stack(parts, blocks), self.region.zeros

        def step(carry: tuple, microbatch: Tree) -> tuple[tuple, None]:
            saved, block_grads, outer_grads, sums = carry
            context = parts.context(microbatch)
            x, embed_vjp = jax.vjp(
                lambda outer: self.region.varying(parts.embed(outer, microbatch)), outer
            )
            y, saved = stack.forward(x, context, saved, 0)
            objective, head_vjp, found = jax.vjp(
                lambda outer, y: self.region.varying(
                    parts.losses(outer, y, microbatch)
                ),
                outer,
                y,
                has_aux=True,
            )
            grad_head, grad_y = head_vjp(jnp.ones_like(objective))
            grad_x, block_grads = stack.backward(grad_y, context, saved, 0, block_grads)
            (grad_embedding,) = embed_vjp(grad_x)
            outer_grads = jax.tree.map(
                # One after the other, since the sum may be in a wider dtype.
                lambda total, of_head, of_embedding: total + of_head + of_embedding,
                outer_grads,
                grad_head,
                grad_embedding,
            )
            return (saved, block_grads, outer_grads, _add(sums, found)), None

        first = _first(microbatches)
        x = jax.eval_shape(parts.embed, outer, first)
        saved = stack.saved_shapes(x, parts.context(first))
        one_slot = [zeros(leaf, 1, stack.num_layers) for leaf in saved]
        sums = self._sums_shapes(parts, blocks, outer, first)
        of_outer = sums_like(outer, parts.sum_dtype)
        shapes = stack.gradient_shapes(), of_outer, sums
        start = one_slot, *jax.tree.map(zeros, shapes)
        (_, *grads, sums), _ = jax.lax.scan(step, start, microbatches)
        return sums, *grads

    def losses(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> Tree:
        """See `AbstractPipeline`. Communication: what the parts do."""
        shapes = self._sums_shapes(parts, blocks, outer, _first(microbatches))

        def step(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
            return _add(sums, self._losses(parts, blocks, outer, microbatch)), None

        start = jax.tree.map(self.region.zeros, shapes)
        return jax.lax.scan(step, start, microbatches)[0]

    def outputs(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree, head: Head
    ) -> Tree:
        """See `AbstractPipeline`. Communication: what the parts do."""

        def run(microbatch: Tree) -> Tree:
            x = self._encode(parts, blocks, outer, microbatch)
            return self.region.varying(head(outer, x, microbatch))

        return jax.lax.map(run, microbatches)

    def _losses(self, parts: Parts, blocks: Tree, outer: Tree, microbatch: Tree) -> Any:
        x = self._encode(parts, blocks, outer, microbatch)
        return self.region.varying(parts.losses(outer, x, microbatch)[1])

    def _encode(self, parts: Parts, blocks: Tree, outer: Tree, microbatch: Tree) -> Any:
        x = parts.embed(outer, microbatch)
        return self._stack(parts, blocks).run(x, parts.context(microbatch))

    def _sums_shapes(self, parts: Parts, *arguments: Tree) -> Tree:
        return jax.eval_shape(lambda: self._losses(parts, *arguments))

    def _stack(self, parts: Parts, blocks: Tree) -> Stack:
        num_layers = jax.tree.leaves(blocks)[0].shape[0]
        return Stack(
            region=self.region,
            block=parts.block,
            weights=blocks,
            first=0,
            indices=jnp.arange(num_layers),
            is_full=True,
            gather=parts.gather,
            scatter=parts.scatter,
            sum_dtype=parts.sum_dtype,
        )


def _first(microbatches: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[0], microbatches)


def _add(total: Tree, part: Tree) -> Tree:
    return jax.tree.map(jnp.add, total, part)
