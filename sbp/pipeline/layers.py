"""A stack of equal layers, differentiated one layer at a time.

The weights of the layers are stacked along dim 0 of each leaf. What the backward pass
needs of a layer's forward pass, its residuals, is put into a buffer. Weights, and
whatever else a layer is given anew in the backward pass, are not: neither as they are
nor cast or reshaped.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sbp.pipeline import slots
from sbp.pipeline.parts import Block, Tree, sums_like
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.splitting import PRODUCTS, Split

Buffers = list[jax.Array]
Shape = jax.ShapeDtypeStruct
Weights = Callable[[], Tree]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Consecutive layers of a stack.

    Attributes:
        region: Where the stack is run.
        block: One layer.
        weights: Of all layers held here, stacked.
        first: Where in ``weights`` the layers begin.
        indices: Index in the whole model of each of them, int32 ``(num_layers,)``; -1
            where there is none.
        is_full: Whether every index is of a layer, known when the program is built.
        gather: See `Parts`, as for the next two.
        scatter: What is done to a layer's gradients, one layer behind.
        sum_dtype: Of the sums of gradients.
    """

    region: ManualRegion
    block: Block
    weights: Tree
    first: slots.Index
    indices: jax.Array
    is_full: bool
    gather: Callable[[Tree], Tree] | None = None
    scatter: Callable[[Tree], Tree] | None = None
    sum_dtype: str | None = None

    def run(self, x: jax.Array, context: Tree) -> jax.Array:
        """Returns the output of the last layer; for the arguments see `forward`."""

        def step(x: jax.Array, position: jax.Array, weights: Weights) -> jax.Array:
            layer = self.indices[position]

            def run() -> jax.Array:
                return self.block(weights(), x, context, layer)

            return self._where_there_is_one(layer, run, lambda: x)

        return self._scan(step, x)

    def saved_shapes(self, x: Shape, context: Tree) -> list[Shape]:
        """Returns types of what a layer's forward pass saves, for an input like ``x``.

        They say whether it is in the memory of the host.
        """

        def run() -> list[jax.Array]:
            given = self._first_layer(context)
            return Split(self._forward).first(given, self.region.zeros(x))[1]

        return jax.make_jaxpr(run)().out_avals

    def gradient_shapes(self) -> Tree:
        """Returns the shapes of the sums of gradients, all layers stacked."""
        num_layers = jax.tree.leaves(self.weights)[0].shape[0]

        def run() -> Tree:
            of_layer = self._gathered_at(0)
            return of_layer if self.scatter is None else self.scatter(of_layer)

        return jax.tree.map(
            lambda leaf: Shape((num_layers, *leaf.shape), leaf.dtype),
            sums_like(jax.eval_shape(run), self.sum_dtype),
        )

    def aside_shapes(self, x: Shape, context: Tree, saved: list[Shape]) -> list[Shape]:
        """Returns what `backward_input` puts aside of a layer."""

        def run() -> list[jax.Array]:
            given = self._first_layer(context)
            passing = jax.tree.map(self.region.zeros, (saved, x))
            return Split(self._gradients, PRODUCTS).first(given, passing)[1]

        return jax.eval_shape(run)

    def forward(
        self, x: jax.Array, context: Tree, saved: Buffers, slot: slots.Index
    ) -> tuple[jax.Array, Buffers]:
        """Returns the output of the last layer, and the buffers with residuals of all.

        Args:
            x: Input of the first layer.
            context: What every layer is given besides, such as a mask.
            saved: ``(slots, num_layers, ...)`` each.
            slot: Slot to fill.
        """

        def step(carry: tuple, position: jax.Array, weights: Weights) -> tuple:
            layer = self.indices[position]

            def run() -> tuple[jax.Array, Buffers]:
                x, saved = carry
                given = weights(), context, layer
                y, residuals = Split(self._forward).first(given, x)
                return y, slots.put_all(saved, residuals, slot, position)

            return self._where_there_is_one(layer, run, lambda: carry)

        return self._scan(step, (x, saved))

    def backward(
        self,
        cotangent: jax.Array,
        context: Tree,
        saved: Buffers,
        slot: slots.Index,
        gradients: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Goes back through the layers, from last to first.

        Args:
            cotangent: Gradient of the output.
            context: What `forward` was given.
            saved: With the residuals.
            slot: Where they are.
            gradients: Sums so far, in the form of ``weights``.

        Returns:
            Gradient of the input, and the sums with those of these layers added.
        """

        def step(cotangent: jax.Array, position: jax.Array, weights: Weights) -> tuple:
            given = weights(), context, self.indices[position]
            residuals = slots.read_all(saved, slot, position)
            return self._gradients(given, (residuals, cotangent))

        return self._sum_up(step, cotangent, gradients, reverse=True)

    def backward_input(
        self,
        cotangent: jax.Array,
        context: Tree,
        saved: Buffers,
        slot: slots.Index,
        aside: Buffers,
        aside_slot: slots.Index,
    ) -> tuple[jax.Array, Buffers]:
        """Goes back through the layers, without the gradients of weights.

        Args:
            cotangent: Gradient of the output.
            context: What `forward` was given.
            saved: With the residuals.
            slot: Where they are.
            aside: For what `backward_weight` needs, ``(slots, num_layers, ...)`` each.
            aside_slot: Slot of it to fill.

        Returns:
            Gradient of the input, and ``aside`` with the slot filled.
        """

        def step(carry: tuple, position: jax.Array, weights: Weights) -> tuple:
            layer = self.indices[position]

            def run() -> tuple[jax.Array, Buffers]:
                cotangent, aside = carry
                given = weights(), context, layer
                residuals = slots.read_all(saved, slot, position)
                split = Split(self._gradients, PRODUCTS)
                grad_x, kept = split.first(given, (residuals, cotangent))
                return grad_x, slots.put_all(aside, kept, aside_slot, position)

            return self._where_there_is_one(layer, run, lambda: carry)

        return self._scan(step, (cotangent, aside), reverse=True)

    def backward_weight(
        self,
        context: Tree,
        aside: Buffers,
        slot: slots.Index,
        gradients: Tree,
        unused: tuple[list[jax.Array], jax.Array],
    ) -> Tree:
        """Adds the gradients of weights that `backward_input` left out.

        Args:
            context: What `forward` was given.
            aside: From `backward_input`.
            slot: Slot that it filled.
            gradients: Sums so far, in the form of ``weights``.
            unused: A layer's residuals and cotangent, any of their types.
        """

        def step(carry: tuple, position: jax.Array, weights: Weights) -> tuple:
            given = weights(), context, self.indices[position]
            kept = slots.read_all(aside, slot, position)
            return carry, Split(self._gradients, PRODUCTS).later(given, unused, kept)

        return self._sum_up(step, (), gradients)[1]

    @property
    def num_layers(self) -> int:
        """Layers, or places for one."""
        return self.indices.shape[0]

    def _scan(
        self, step: Callable[..., Tree], carry: Tree, *, reverse: bool = False
    ) -> Tree:
        """Runs ``step(carry, position, weights)`` for each layer in turn.

        Weights that have to be gathered are so one layer ahead, while the layer before
        is computed: two layers are there at a time.
        """
        positions = jnp.arange(self.num_layers)
        if self.gather is None:

            def plain(carry: Tree, position: jax.Array) -> tuple[Tree, None]:
                return step(carry, position, lambda: self._weights_at(position)), None

            return jax.lax.scan(plain, carry, positions, reverse=reverse)[0]

        def ahead(carry: tuple, position: jax.Array) -> tuple[tuple, None]:
            others, weights = carry
            following = jnp.clip(position + (-1 if reverse else 1), 0, positions[-1])
            upcoming = self._gathered_at(following)
            return (step(others, position, lambda: weights), upcoming), None

        # Tied to what changes from pass to pass, or XLA keeps the first layer whole.
        position, _ = jax.lax.optimization_barrier(
            (positions[-1 if reverse else 0], jax.tree.leaves(carry)[0])
        )
        first = self._gathered_at(position)
        return jax.lax.scan(ahead, (carry, first), positions, reverse=reverse)[0][0]

    def _sum_up(
        self,
        step: Callable[..., tuple],
        carry: Tree,
        gradients: Tree,
        *,
        reverse: bool = False,
    ) -> tuple[Tree, Tree]:
        """Adds up what ``step(carry, position, weights)`` returns besides the carry.

        Gradients that have to be scattered are so one layer behind, while the layer
        after is computed.
        """

        def at_once(state: tuple, position: jax.Array, weights: Weights) -> tuple:
            def run() -> tuple:
                carry, gradients = state
                carry, of_layer = step(carry, position, weights)
                return carry, self._add_at(position, gradients, of_layer)

            layer = self.indices[position]
            return self._where_there_is_one(layer, run, lambda: state)

        if (scatter := self.scatter) is None:
            return self._scan(at_once, (carry, gradients), reverse=reverse)
        shapes = jax.eval_shape(self._gathered_at, 0)

        def nothing() -> Tree:
            return jax.tree.map(self.region.zeros, shapes)

        def behind(state: tuple, position: jax.Array, weights: Weights) -> tuple:
            carry, gradients, (before, of_before) = state
            carry, of_layer = self._where_there_is_one(
                self.indices[position],
                lambda: step(carry, position, weights),
                lambda: (carry, nothing()),
            )
            gradients = self._add_at(before, gradients, scatter(of_before))
            return carry, gradients, (position, of_layer)

        start = carry, gradients, (jnp.zeros((), jnp.int32), nothing())
        carry, gradients, (last, of_last) = self._scan(behind, start, reverse=reverse)
        return carry, self._add_at(last, gradients, scatter(of_last))

    def _forward(self, given: tuple, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the output of a layer and all residuals of its backward pass.

        Args:
            given: Weights, context and layer.
            x: Input.
        """
        y, vjp = self._vjp(x, *given)
        return y, jax.tree.leaves(vjp)

    def _gradients(
        self, given: tuple, passing: tuple[list[jax.Array], jax.Array]
    ) -> tuple[jax.Array, Tree]:
        """Returns the gradients of a layer's input and of its weights.

        Args:
            given: Weights, context and layer.
            passing: What the forward pass saved, and the cotangent.
        """
        saved, cotangent = passing
        # The cotangent stands for the input, which is of its shape: only the structure
        # of the backward pass is used, and nothing of this is computed again.
        _, vjp = self._vjp(cotangent, *given)
        residuals = Split(self._forward).later(given, cotangent, saved)
        vjp = jax.tree.unflatten(jax.tree.structure(vjp), residuals)
        grad_weights, grad_x = vjp(cotangent)
        return grad_x, grad_weights

    def _add_at(self, position: jax.Array, gradients: Tree, of_layer: Tree) -> Tree:
        place = self.first + position

        def add(total: jax.Array, part: jax.Array) -> jax.Array:
            return slots.put(total, slots.read(total, place) + part, place)

        return jax.tree.map(add, gradients, of_layer)

    def _where_there_is_one(
        self, layer: jax.Array, run: Callable, skip: Callable
    ) -> Tree:
        if self.is_full:
            return run()
        return self.region.cond(layer >= 0, run, skip)

    def _first_layer(self, context: Tree) -> tuple:
        return self._gathered_at(0), context, self.indices[0]

    def _weights_at(self, position: slots.Index) -> Tree:
        return slots.read_all(self.weights, self.first + position)

    def _gathered_at(self, position: slots.Index) -> Tree:
        weights = self._weights_at(position)
        return weights if self.gather is None else self.gather(weights)

    def _vjp(
        self, x: jax.Array, weights: Tree, context: Tree, layer: jax.Array
    ) -> tuple[jax.Array, Callable]:
        return jax.vjp(lambda w, x: self.block(w, x, context, layer), weights, x)
