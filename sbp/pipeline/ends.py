"""What comes before the first piece and after the last: embedding, head and losses.

They run either on all stages at once, which pays when their vocabulary is split over
``stage``, or on the first and the last stage alone. In both cases the value that counts
is the one on the first or last stage: the others' cotangent is zero, so the sum over
``stage`` of the gradients is right however much of the work is shared.

In ticks in which no microbatch enters or leaves they are skipped. Where all stages work
together they all skip the same ticks, so that they may communicate inside the branch.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sbp.pipeline import slots
from sbp.pipeline.parts import Head, Parts, Tree, sums_like
from sbp.pipeline.region import ManualRegion


class Ends:
    """Embedding and head of one run of an executor; all methods run in its region.

    Microbatches are numbers, -1 where there is none.
    """

    def __init__(
        self,
        region: ManualRegion,
        parts: Parts,
        *,
        outer: Tree,
        microbatches: Tree,
        is_shared: bool,
    ):
        self.region, self.parts, self.is_shared = region, parts, is_shared
        self.outer, self.microbatches = outer, microbatches
        stage = region.varying(region.index("stage"))
        self.is_first = stage == 0
        self.is_last = stage == region.mesh.shape["stage"] - 1

    def microbatch(self, index: jax.Array | int) -> Tree:
        """Returns a microbatch; any one if the index is -1."""
        return slots.read_all(self.microbatches, index)

    def input_shape(self) -> Any:
        """Returns the shape of a layer's input."""
        return jax.eval_shape(self.parts.embed, self.outer, self.microbatch(0))

    def gradient_shapes(self) -> Tree:
        """Returns the shapes of the sums of the outer parameters' gradients."""
        return sums_like(self.outer, self.parts.sum_dtype)

    def sums_shapes(self) -> Tree:
        """Returns the shapes of what the losses return besides the objective."""
        x, part = self.input_shape(), self.microbatch(0)
        return jax.eval_shape(
            lambda: self.parts.losses(self.outer, self.region.zeros(x), part)[1]
        )

    def embed(self, microbatch: jax.Array) -> jax.Array:
        """Returns the input of the first layer, of use on the first stage alone."""
        x = self.input_shape()
        return self.region.cond(
            self._takes_part(self.is_first, microbatch),
            lambda: self.parts.embed(self.outer, self.microbatch(microbatch)),
            lambda: self.region.zeros(x),
        )

    def losses(self, sums: Tree, y: jax.Array, microbatch: jax.Array) -> Tree:
        """Adds what the losses return of the last stage's ``y``."""

        def run() -> Tree:
            _, found = self._losses(self.outer, y, self.microbatch(microbatch))
            return self._add_on_last(sums, found)

        is_busy = self._takes_part(self.is_last, microbatch)
        return self.region.cond(is_busy, run, lambda: sums)

    def outputs(
        self, head: Head, buffers: Tree, y: jax.Array, microbatch: jax.Array
    ) -> Tree:
        """Stores what ``head`` makes of the last stage's ``y``, by microbatch."""

        def run() -> Tree:
            part = self.microbatch(microbatch)
            found = self.region.varying(head(self.outer, self._shared(y), part))
            return jax.tree.map(
                lambda buffer, value: slots.put(
                    buffer, jnp.where(self.is_last, value, 0), microbatch
                ),
                buffers,
                found,
            )

        is_busy = self._takes_part(self.is_last, microbatch)
        return self.region.cond(is_busy, run, lambda: buffers)

    def head(
        self, gradients: Tree, sums: Tree, y: jax.Array, microbatch: jax.Array
    ) -> tuple[jax.Array, Tree, Tree]:
        """Goes through the head and back.

        Args:
            gradients: Sums so far, in the form of the outer parameters.
            sums: Sums so far of what the losses return besides the objective.
            y: Output of the last stage's last layer; others' is not looked at.
            microbatch: To which it belongs.

        Returns:
            Gradient of ``y``, and both sums with those of this microbatch added.
        """

        def run() -> tuple[jax.Array, Tree, Tree]:
            part = self.microbatch(microbatch)
            objective, vjp, found = jax.vjp(
                lambda outer, y: self._losses(outer, y, part),
                self.outer,
                y,
                has_aux=True,
            )
            grad_outer, grad_y = vjp(self.is_last.astype(objective.dtype))
            total = jax.tree.map(jnp.add, gradients, grad_outer)
            return grad_y, total, self._add_on_last(sums, found)

        def skip() -> tuple[jax.Array, Tree, Tree]:
            return jnp.zeros_like(y), gradients, sums

        return self.region.cond(self._takes_part(self.is_last, microbatch), run, skip)

    def embedding_gradient(
        self, gradients: Tree, grad_x: jax.Array, microbatch: jax.Array
    ) -> Tree:
        """Adds the gradient of the embedding of what leaves the first piece."""

        def run() -> Tree:
            part = self.microbatch(microbatch)
            _, vjp = jax.vjp(
                lambda outer: self.region.varying(self.parts.embed(outer, part)),
                self.outer,
            )
            (found,) = vjp(jnp.where(self.is_first, grad_x, 0))
            return jax.tree.map(jnp.add, gradients, found)

        is_busy = self._takes_part(self.is_first, microbatch)
        return self.region.cond(is_busy, run, lambda: gradients)

    def _takes_part(self, is_end: jax.Array, microbatch: jax.Array) -> jax.Array:
        """Whether this stage has work; the same on all stages if they share it."""
        return microbatch >= 0 if self.is_shared else is_end & (microbatch >= 0)

    def _losses(self, outer: Tree, y: jax.Array, part: Tree) -> tuple[jax.Array, Tree]:
        return self.region.varying(self.parts.losses(outer, self._shared(y), part))

    def _shared(self, y: jax.Array) -> jax.Array:
        """The last stage's ``y``, on all stages if they work together."""
        if not self.is_shared:
            return y
        return self.region.psum(jnp.where(self.is_last, y, 0), "stage")

    def _add_on_last(self, total: Tree, found: Tree) -> Tree:
        return jax.tree.map(
            lambda t, f: t + jnp.where(self.is_last, f, 0), total, found
        )
