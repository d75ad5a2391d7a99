"""A stack of equal layers, differentiated one layer at a time.

The weights of the layers are stacked along dim 0 of each leaf. What the backward pass
needs of a layer's forward pass, its residuals, is an explicit value that can be put
into a buffer. Residuals that are weights, or that a layer is given anew in the backward
pass, are left out: they exist already, and are put back where they belong.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sbp.pipeline.parts import Block, Tree
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.splitting import Split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Consecutive layers of a stack.

    Attributes:
        region: Where the stack is run.
        block: One layer.
        weights: Of all layers held here, stacked.
        first: Where in ``weights`` the layers begin, an int32 scalar.
        indices: Index in the whole model of each of them, int32 ``(num_layers,)``; -1
            where there is none.
        is_full: Whether every index is of a layer, known when the program is built.
    """

    region: ManualRegion
    block: Block
    weights: Tree
    first: jax.Array
    indices: jax.Array
    is_full: bool

    def run(self, x: jax.Array, context: Tree) -> jax.Array:
        """Returns the output of the last layer; for the arguments see `forward`."""

        def step(x: jax.Array, position: jax.Array) -> tuple[jax.Array, None]:
            layer = self.indices[position]

            def run() -> jax.Array:
                return self.block(self._weights_at(position), x, context, layer)

            return self._where_there_is_one(layer, run, lambda: x), None

        return jax.lax.scan(step, x, jnp.arange(self.indices.shape[0]))[0]

    def forward(self, x: jax.Array, context: Tree) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the output of the last layer and the residuals of all, stacked.

        Args:
            x: Input of the first layer.
            context: What every layer is given besides, such as a mask.
        """

        def step(x: jax.Array, position: jax.Array) -> tuple[jax.Array, list]:
            layer = self.indices[position]

            def run() -> tuple[jax.Array, list[jax.Array]]:
                given = self._weights_at(position), context, layer
                y, vjp = self._vjp(x, *given)
                return y, _take_out(vjp, given)

            if self.is_full:
                return run()
            _, residuals = jax.eval_shape(run)
            zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in residuals]
            return self._where_there_is_one(layer, run, lambda: (x, zeros))

        return jax.lax.scan(step, x, jnp.arange(self.indices.shape[0]))

    def backward(
        self,
        residuals: list[jax.Array],
        gradients: Tree,
        cotangent: jax.Array,
        context: Tree,
    ) -> tuple[jax.Array, Tree]:
        """Goes back through the layers, from last to first.

        Args:
            residuals: From `forward`.
            gradients: Sums so far, in the form of ``weights``.
            cotangent: Gradient of the output.
            context: What `forward` was given.

        Returns:
            Gradient of the input, and the sums with those of these layers added.
        """

        def step(carry: tuple, position_and_residuals: tuple) -> tuple[tuple, None]:
            position, saved = position_and_residuals
            layer = self.indices[position]

            def run() -> tuple[jax.Array, Tree]:
                cotangent, gradients = carry
                given = self._weights_at(position), context, layer
                grad_x, grad_weights = self._gradients(given, (saved, cotangent))
                return grad_x, self._add_at(position, gradients, grad_weights)

            return self._where_there_is_one(layer, run, lambda: carry), None

        positions = jnp.arange(self.indices.shape[0])
        carry = (cotangent, gradients)
        return jax.lax.scan(step, carry, (positions, residuals), reverse=True)[0]

    def backward_input(
        self, residuals: list[jax.Array], cotangent: jax.Array, context: Tree
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Goes back through the layers, without the gradients of weights.

        Args:
            residuals: From `forward`.
            cotangent: Gradient of the output.
            context: What `forward` was given.

        Returns:
            Gradient of the input, and what `backward_weight` needs of all layers,
            stacked.
        """

        def step(cotangent: jax.Array, position_and_residuals: tuple) -> tuple:
            position, saved = position_and_residuals
            layer = self.indices[position]

            def run() -> tuple[jax.Array, list[jax.Array]]:
                given = self._weights_at(position), context, layer
                return Split(self._gradients).first(given, (saved, cotangent))

            if self.is_full:
                return run()
            _, aside = jax.eval_shape(run)
            zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in aside]
            return self._where_there_is_one(layer, run, lambda: (cotangent, zeros))

        positions = jnp.arange(self.indices.shape[0])
        return jax.lax.scan(step, cotangent, (positions, residuals), reverse=True)

    def backward_weight(
        self, aside: list[jax.Array], gradients: Tree, context: Tree, unused: tuple
    ) -> Tree:
        """Adds the gradients of weights that `backward_input` left out.

        Args:
            aside: From `backward_input`.
            gradients: Sums so far, in the form of ``weights``.
            context: What `forward` was given.
            unused: Anything of the types of `backward_input`'s residuals and cotangent;
                its values do not matter.
        """
        residuals, cotangent = unused
        passing = [leaf[0] for leaf in residuals], cotangent

        def step(gradients: Tree, position_and_aside: tuple) -> tuple[Tree, None]:
            position, of_layer = position_and_aside
            layer = self.indices[position]

            def run() -> Tree:
                given = self._weights_at(position), context, layer
                grad_weights = Split(self._gradients).later(given, passing, of_layer)
                return self._add_at(position, gradients, grad_weights)

            return self._where_there_is_one(layer, run, lambda: gradients), None

        positions = jnp.arange(self.indices.shape[0])
        return jax.lax.scan(step, gradients, (positions, aside))[0]

    def _gradients(
        self, given: tuple, passing: tuple[list[jax.Array], jax.Array]
    ) -> tuple[jax.Array, Tree]:
        """Returns the gradients of a layer's input and of its weights.

        Args:
            given: Weights, context and layer.
            passing: Residuals and cotangent.
        """
        residuals, cotangent = passing
        # Only its structure is used: nothing of this is computed again. The cotangent
        # is of the shape of the input.
        _, vjp = self._vjp(cotangent, *given)
        grad_weights, grad_x = _put_back(vjp, given, residuals)(cotangent)
        return grad_x, grad_weights

    def _add_at(self, position: jax.Array, gradients: Tree, of_layer: Tree) -> Tree:
        index = self.first + position
        return jax.tree.map(
            lambda total, part: total.at[index].add(part.astype(total.dtype)),
            gradients,
            of_layer,
        )

    def _where_there_is_one(
        self, layer: jax.Array, run: Callable, skip: Callable
    ) -> Tree:
        if self.is_full:
            return run()
        return self.region.cond(layer >= 0, run, skip)

    def _weights_at(self, position: jax.Array) -> Tree:
        index = self.first + position
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False),
            self.weights,
        )

    def _vjp(
        self, x: jax.Array, weights: Tree, context: Tree, layer: jax.Array
    ) -> tuple[jax.Array, Callable]:
        return jax.vjp(lambda w, x: self.block(w, x, context, layer), weights, x)


def _take_out(vjp: Callable, given: Tree) -> list[jax.Array]:
    """Returns the residuals of ``vjp`` that are none of the values ``given``."""
    known = {id(leaf) for leaf in jax.tree.leaves(given)}
    return [leaf for leaf in jax.tree.leaves(vjp) if id(leaf) not in known]


def _put_back(vjp: Callable, given: Tree, residuals: list[jax.Array]) -> Callable:
    """Returns ``vjp`` with ``residuals`` in the places where `_take_out` found them."""
    known = {id(leaf) for leaf in jax.tree.leaves(given)}
    leaves, structure = jax.tree.flatten(vjp)
    pending = iter(residuals)
    filled = [leaf if id(leaf) in known else next(pending) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)
