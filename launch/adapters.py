"""Training adapters instead of weights: the section ``lora`` of a config.

What is not trained has no gradient, no place in the optimizer, and nothing of it is
communicated after the backward pass.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from flax import nnx

from launch.families import FAMILIES, batch_shapes
from launch.run_config import RunConfig
from models import MODELS, ModelFamily, lora
from models.lora import LoraConfig
from models.stacked import StackedModel, path_of


def broken_rules(config: RunConfig) -> Iterator[str]:
    """Yields a sentence per pattern of the section that does not fit the model."""
    if not config.lora.is_on:
        return
    family = MODELS[config.model_name]
    sizes = dataclasses.replace(config.model, num_layers=1)
    model = nnx.eval_shape(lambda: family.module(sizes, rngs=nnx.Rngs(0)))
    for problem in lora.problems(model, config.lora, family.heads):
        yield f"lora.{problem}"


def module_of(config: RunConfig, family: ModelFamily) -> Callable[[nnx.Rngs], Any]:
    """Returns what makes the model of a run, adapters included."""

    def build(rngs: nnx.Rngs) -> Any:
        model = family.module(config.model, rngs=rngs)
        return lora.adapt(model, config.lora, rngs=rngs)

    return build


def freeze(
    model: StackedModel, config: LoraConfig, heads: frozenset[str]
) -> StackedModel:
    """Returns the model of which only what the section says is trained."""
    if not config.is_on:
        return model
    return dataclasses.replace(
        model, is_trained=lambda path: lora.is_trained(path, config, heads)
    )


def train_flops(config: RunConfig, model: StackedModel) -> int:
    """Returns the model FLOPs of a training step, see `launch.flops`.

    A product with a frozen matrix is differentiated by its other factor alone.
    """
    family = FAMILIES[config.model_name]
    total = family.train_flops(config)
    if not config.lora.is_on:
        return total
    num_tokens = config.train.global_batch_size * family.num_tokens(config)
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(model.block_shapes):
        path = f"blocks/*/{'/'.join(key.key for key in key_path)}"
        products = 2 * num_tokens * leaf.size * model.num_layers
        if lora.is_adapter(path):
            total += 3 * products
        elif path.endswith("/kernel") and not model.is_trained(path):
            total -= products
    if _has_frozen_table(model) and "classifier" not in MODELS[config.model_name].heads:
        # The output layer is that table.
        num_scored = math.prod(batch_shapes(config)["weights"].shape)
        total -= (
            2 * num_scored * config.model.padded_vocab_size * config.model.model_dim
        )
    return total


def _has_frozen_table(model: StackedModel) -> bool:
    """Whether the model has a table of tokens that is not trained."""
    leaves = jax.tree_util.tree_leaves_with_path(model.outer_shapes)
    paths = [path_of(path) for path, _ in leaves]
    return any(
        path.endswith("token/embedding") and not model.is_trained(path)
        for path in paths
    )


def of_trained(
    rule: optax.GradientTransformation, model: StackedModel
) -> optax.GradientTransformation:
    """Returns an update rule that only sees, and only holds, what is trained.

    Its updates are of that part of the parameters, see `StackedModel.trained`.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return rule.update(model.trained(updates), state, model.trained(params))

    return optax.GradientTransformation(
        lambda params: rule.init(model.trained(params)), update
    )
