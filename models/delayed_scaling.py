"""Scales of products in eight bits, found in the steps before: delayed scaling.

The scale of a tensor follows from the largest element it had in any of the last steps
(arXiv:2209.05433), so that nothing has to be known of a tensor before it is rounded.
The history is part of the train state. In a step each linear map is given its scales as
one more leaf beside its parameters, and what it sees of its tensors comes back as the
gradient of that leaf, in a form whose sum over microbatches and ranks says the largest:
see `models.fp8.marks`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import fp8

Tree = dict[str, Any]
NAME = "fp8"
"""Of what is not a parameter, among those of a block."""
FIRST = {"input": 2.0**-4, "kernel": 2.0**-8, "gradient": 2.0**-15}
"""Scale of a tensor of which nothing was seen: elements up to 28, 1.75 and 1.75."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """The linear maps of a block that have a history, and its length.

    All trees here are nested dicts by the path of a linear map within a block.

    Attributes:
        paths: Of the linear maps.
        length: Steps.
    """

    paths: tuple[tuple[str, ...], ...]
    length: int

    def filled(self, value: Any) -> Tree:
        """Returns a tree with one value in all places."""
        tree: Tree = {}
        for *holders, name in self.paths:
            at = tree
            for holder in holders:
                at = at.setdefault(holder, {})
            at[name] = value
        return tree

    def init(self, num_places: int) -> Tree:
        """Returns the history before the first step: nothing was seen.

        Args:
            num_places: Of the stack of layers.

        Returns:
            ``{"blocks": tree}`` of ``(num_places, 3, length)``, see `scales`.
        """
        shape = num_places, len(FIRST), self.length
        return {"blocks": self.filled(jnp.zeros(shape, jnp.float32))}

    def scales(self, history: Tree, loss_scale: Any = None) -> Tree:
        """Returns what the linear maps of all layers are given in a step.

        Args:
            history: For each layer, and its input, kernel and gradient, the scale that
                each of the last steps would have needed; 0 if it saw nothing.
            loss_scale: By which gradients are larger than they are; None for 1.

        Returns:
            Of the largest scales, ``(num_places, 3, fp8.NUM_SCALES)``, all the same
            along the last dim.

        Example:
            >>> scaling = DelayedScaling(paths=(("up",),), length=2)
            >>> history = {"blocks": {"up": jnp.array([[[2.0, 8], [4, 0], [0, 0]]])}}
            >>> scaling.scales(history)["up"][0, :, 0].tolist() == [8, 4, 2**-15]
            True
        """
        scale = jnp.float32(1 if loss_scale is None else loss_scale)
        first = jnp.stack([*map(jnp.float32, FIRST.values())])
        first = (first * jnp.stack([jnp.float32(1), jnp.float32(1), scale]))[None]

        def largest(history: jax.Array) -> jax.Array:
            most = history.max(-1)
            most = jnp.where(most > 0, most, first)[..., None]
            return jnp.broadcast_to(most, (*most.shape[:2], fp8.NUM_SCALES))

        return jax.tree.map(largest, history["blocks"])

    def update(self, history: Tree, seen: Tree) -> Tree:
        """Returns the history with one more step, and without the first one.

        Args:
            history: See `scales`.
            seen: Sums of `fp8.marks`, ``(num_places, 3, fp8.NUM_SCALES)``.

        Example:
            >>> scaling = DelayedScaling(paths=(("up",),), length=2)
            >>> seen = jnp.stack([fp8.marks(jnp.float32(448), fp8.FORWARD)] * 3)[None]
            >>> history = scaling.update(scaling.init(1), {"up": seen})
            >>> history["blocks"]["up"].tolist()
            [[[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]]
        """
        powers = jnp.asarray(fp8.SCALES)[None, None]

        def add(history: jax.Array, seen: jax.Array) -> jax.Array:
            newest = jnp.where(seen > 0, powers, 0).max(-1, keepdims=True)
            return jnp.concatenate([history[..., 1:], newest], axis=-1)

        return {"blocks": jax.tree.map(add, history["blocks"], seen)}


def of_block(block: nnx.Module, length: int) -> DelayedScaling | None:
    """Returns the history that a block's products in eight bits need, None for none."""
    paths = tuple(
        tuple(map(str, path))
        for path, module in nnx.iter_modules(block)
        if vars(module).get("dot_general") is fp8.dot_general
    )
    return DelayedScaling(paths=paths, length=length) if paths else None


def attach(block: nnx.Module, scales: Tree) -> None:
    """Gives the linear maps of a block their scales, from `DelayedScaling.scales`."""
    leaves = jax.tree.leaves_with_path(scales)
    found = {tuple(key.key for key in path): leaf for path, leaf in leaves}
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(block))
    for path, module in modules:
        if path in found:
            module.dot_general = _with_scales(found[path])


def join(params: Tree, scales: Tree) -> Tree:
    """Returns parameters, or what has their form, with something beside each block's.

    Example:
        >>> join({"blocks": {"up": 1}, "head": 2}, {"up": 3})
        {'blocks': {'up': 1, 'fp8': {'up': 3}}, 'head': 2}
    """
    if not scales:
        return params
    return {**params, "blocks": {**params["blocks"], NAME: scales}}


def part(block: Tree) -> tuple[Tree, Tree]:
    """Returns the parameters of a block, and what `join` has put beside them.

    Example:
        >>> part({"up": 1, "fp8": {"up": 3}})
        ({'up': 1}, {'up': 3})
    """
    params = {name: value for name, value in block.items() if name != NAME}
    return params, block.get(NAME, {})


def _with_scales(scales: jax.Array) -> Any:
    def product(*args: Any, **others: Any) -> jax.Array:
        return fp8.delayed_dot_general(scales, *args, **others)

    return product
