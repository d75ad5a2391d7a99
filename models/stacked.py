"""A model as pure functions of its parameters, the blocks stacked.

Compilation time and program size of L equal blocks are those of one: their parameters
are stacked along a new dim 0 and `jax.lax.scan` runs over it. The parameters are one
nested dict with the paths of the model, ``{"blocks": <stacked>, ...}``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import delayed_scaling
from models.delayed_scaling import DelayedScaling
from models.layers import fold_keys

Params = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedModel:
    """The pure functions of a model; see `models` for the form of the model.

    Attributes:
        build: Makes the model from random streams.
        model_class: Its class.
        outer_def: Graph of the model without its blocks.
        block_def: Graph of one block.
        outer_shapes: Shapes and dtypes of the parameters without blocks.
        block_shapes: Those of one block.
        num_layers: Blocks.
        layer_order: The layer in each place of the stack; -1 is a place that holds
            zeros and is never used. In the order of the model by default.
        adapt: Changes the model without its blocks before it is used, such as to hold
            its vocabulary in parts. Nothing by default.
        adapt_block: Changes a block before it is used. Nothing by default.
        before_blocks: Applied to the input of the first block.
        after_blocks: Applied to the output of the last.
        is_trained: Whether a parameter is, by its path in a sharding table; the others
            have no gradients. All by default.
        tally: ``tally(model, x, batch)``: sums that `losses` returns besides those of
            the model, which divides them by nothing. None by default.
    """

    build: Callable[[nnx.Rngs], Any]
    model_class: Any
    outer_def: nnx.GraphDef
    block_def: nnx.GraphDef
    outer_shapes: Params
    block_shapes: Params
    num_layers: int
    layer_order: tuple[int, ...]
    adapt: Callable[[Any], None] = lambda model: None
    adapt_block: Callable[[Any], None] = lambda block: None
    before_blocks: Callable[[jax.Array], jax.Array] = lambda x: x
    after_blocks: Callable[[jax.Array], jax.Array] = lambda x: x
    is_trained: Callable[[str], bool] = lambda path: True
    tally: Callable[..., Batch] = lambda model, x, batch: {}
    fp8_scaling: DelayedScaling | None = None

    @property
    def shapes(self) -> Params:
        """Shapes and dtypes of the parameters; nothing is traced to find them."""
        num_places = len(self.layer_order)
        blocks = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_places, *leaf.shape), leaf.dtype),
            self.block_shapes,
        )
        return {"blocks": blocks, **self.outer_shapes}

    def init(self, key: jax.Array) -> Params:
        """Returns new parameters, to be called under `jax.jit`.

        The values depend on ``key`` alone, whatever the sharding of the result.
        """
        outer_key, blocks_key = jax.random.split(key)

        def init_block(layer: jax.Array) -> Params:
            block_key = jax.random.fold_in(blocks_key, layer)
            block = pure_state(self.build(nnx.Rngs(block_key)).blocks[0])
            return jax.tree.map(lambda x: jnp.where(layer >= 0, x, 0), block)

        # Both build the whole model; what they do not return is never compiled.
        model = self.build(nnx.Rngs(outer_key))
        model.blocks = nnx.List([])
        blocks = jax.vmap(init_block)(jnp.asarray(self.layer_order))
        return {"blocks": blocks, **pure_state(model)}

    def trained(self, params: Any) -> Any:
        """Returns the trained part of the parameters, or of what has their paths.

        Anything but nested dicts is returned as it is: Optax sends placeholders.
        """
        return select(params, self.is_trained)

    def embed(self, outer: Params, batch: Batch, keys_B: jax.Array | None) -> jax.Array:
        """Returns the input of the first block, from the parameters without blocks."""
        x = self._merge(outer).embed(batch, fold_keys(keys_B, 0))
        return self.before_blocks(x)

    def context(self, batch: Batch, keys_B: jax.Array | None) -> Any:
        """Returns what every block is given besides its input."""
        return self.model_class.attention_mask(batch), keys_B

    def block(
        self, block: Params, x: jax.Array, context: Any, layer: int | jax.Array
    ) -> jax.Array:
        """Runs one block.

        Args:
            block: Its parameters.
            x: Its input.
            context: From `context`.
            layer: Its index in the stack.
        """
        mask, keys_B = context
        params, scales = delayed_scaling.part(block)
        state = nnx.State(self._freeze(params, "blocks/*/"))
        module = nnx.merge(self.block_def, state)
        delayed_scaling.attach(module, scales)
        self.adapt_block(module)
        return module(x, mask, fold_keys(keys_B, 1 + layer), layer)

    def losses(self, outer: Params, x: jax.Array, batch: Batch) -> Batch:
        """Returns the model's ``losses``, from the parameters without blocks."""
        model, x = self._merge(outer), self.after_blocks(x)
        return {**model.losses(x, batch), **self.tally(model, x, batch)}

    def read(
        self, outer: Params, x: jax.Array, batch: Batch, head: Callable[..., Any]
    ) -> Any:
        """Returns ``head(model, x, batch)``, of the model without its blocks."""
        return head(self._merge(outer), self.after_blocks(x), batch)

    def counts(self, batch: Batch) -> Batch:
        """Returns the model's ``counts``."""
        return self.model_class.counts(batch)

    def _merge(self, outer: Params) -> Any:
        model = nnx.merge(self.outer_def, nnx.State(self._freeze(outer, "")))
        self.adapt(model)
        return model

    def _freeze(self, params: Params, prefix: str) -> Params:
        """Returns parameters of which those that are not trained have no gradient."""

        def freeze(path: tuple, leaf: jax.Array) -> jax.Array:
            name = prefix + "/".join(str(key.key) for key in path)
            return leaf if self.is_trained(name) else jax.lax.stop_gradient(leaf)

        return jax.tree.map_with_path(freeze, params)


def stack(build: Callable[[nnx.Rngs], Any]) -> StackedModel:
    """Returns the pure functions of the model that ``build`` makes.

    Nothing is computed.

    Args:
        build: Makes the model from random streams.

    Raises:
        ValueError: If the model has no blocks, or blocks that differ in structure or
            shapes.
    """
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    blocks = [nnx.split(block) for block in model.blocks]
    model.blocks = nnx.List([])
    name = type(model).__name__
    if not blocks:
        raise ValueError(f"{name} has no blocks to stack. Give it at least one layer.")
    for index, (block_def, state) in enumerate(blocks):
        if block_def != blocks[0][0] or jax.tree.map(_shape, state) != jax.tree.map(
            _shape, blocks[0][1]
        ):
            raise ValueError(
                f"Block {index} of {name} differs in structure or shapes from block 0,"
                " but stacked blocks are all alike. Give every block the same config;"
                " what depends on the layer belongs before or after the blocks."
            )
    return StackedModel(
        build=build,
        model_class=type(model),
        outer_def=nnx.graphdef(model),
        block_def=blocks[0][0],
        outer_shapes=nnx.to_pure_dict(nnx.state(model)),
        block_shapes=nnx.to_pure_dict(blocks[0][1]),
        num_layers=len(blocks),
        layer_order=tuple(range(len(blocks))),
    )


def pure_state(module: nnx.Module) -> Params:
    """Returns the parameters of a module as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module))


def split_blocks(params: Params) -> tuple[Params, Params]:
    """Returns the stacked blocks and all other parameters."""
    outer = {name: value for name, value in params.items() if name != "blocks"}
    return params["blocks"], outer


def select(tree: Any, is_chosen: Callable[[str], bool], names: tuple = ()) -> Any:
    """Returns the leaves of the chosen paths; dicts without any are left out.

    Args:
        tree: Nested dicts in the form of the parameters. Anything else is returned.
        is_chosen: Says it of a path as sharding tables write it.
        names: Of the dicts around ``tree``.

    Example:
        >>> select({"mlp": {"bias": 0}, "norm": {"bias": 1}}, lambda p: "mlp" in p)
        {'mlp': {'bias': 0}}
    """
    if not isinstance(tree, dict):
        return tree
    found = {}
    for name, value in tree.items():
        inside = (*names, name)
        if isinstance(value, dict):
            if part := select(value, is_chosen, inside):
                found[name] = part
        elif is_chosen(_join(inside)):
            found[name] = value
    return found


def combine(tree: Params, other: Params) -> Params:
    """Returns what both hold, nested dicts that have no leaf in common.

    Example:
        >>> combine({"mlp": {"bias": 0}}, {"mlp": {"kernel": 1}})
        {'mlp': {'bias': 0, 'kernel': 1}}
    """
    shared = {name: combine(tree[name], other[name]) for name in tree if name in other}
    return {**tree, **other, **shared}


def path_of(key_path: tuple) -> str:
    """Returns the path of a leaf as sharding tables write it.

    Example:
        >>> leaf = {"blocks": {"mlp": {"bias": 0}}}
        >>> [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(leaf)]
        ['blocks/*/mlp/bias']
    """
    return _join([str(key.key) for key in key_path])


def _join(names: Sequence[str]) -> str:
    first, *rest = names
    return "/".join(["blocks", "*", *rest] if first == "blocks" else names)


def _shape(leaf: Any) -> tuple:
    return leaf.shape, leaf.dtype
