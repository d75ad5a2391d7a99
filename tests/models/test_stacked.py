import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import stacked
from models.block import Block
from models.layers import BlockConfig
from tests.models import cases
from tests.models.cases import FAMILIES, LAYOUT_TOLERANCE, assert_close

DROPPING = dict(dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth_rate=0.3)


class Chain(nnx.Module):
    """Blocks of the given widths and nothing else."""

    def __init__(self, widths, *, rngs):
        self.blocks = nnx.List(
            [Block(BlockConfig(mlp_dim=width), rngs=rngs) for width in widths]
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_pure_functions_give_what_the_plain_module_gives_with_dropout(name):
    case = cases.with_config(cases.shallow(cases.load(name)), **DROPPING)

    @jax.jit
    def losses(keys_B):
        module = cases.module_of(case, case.params)
        plain, _ = cases.objective(module, case.batch, keys_B)
        return plain, cases.stacked_objective(case, case.params, keys_B)[0]

    keys_B = jax.random.split(jax.random.key(0), 4)
    plain, stacked_loss = losses(keys_B)
    assert_close(stacked_loss, plain, LAYOUT_TOLERANCE)
    assert abs(losses(keys_B[::-1])[0] - plain) > 1e-3


@pytest.fixture(scope="module")
def model():
    return cases.load("gpt2").model


@pytest.fixture(scope="module")
def initial(model):
    return jax.jit(model.init)(jax.random.key(7))


def test_initial_values_do_not_depend_on_the_layout(model, initial, devices):
    mesh = jax.sharding.Mesh(np.array(devices[:8]).reshape(4, 2), ("stage", "tensor"))
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def sharding(key_path, leaf):
        if stacked.path_of(key_path).startswith("blocks/"):
            return NamedSharding(mesh, P("stage", *[None] * (leaf.ndim - 2), "tensor"))
        return NamedSharding(
            mesh, P(("stage", "tensor") if leaf.shape[0] == 96 else ())
        )

    shardings = jax.tree.map_with_path(sharding, shapes)
    split = jax.jit(model.init, out_shardings=shardings)(jax.random.key(7))
    jax.tree.map(np.testing.assert_array_equal, initial, split)
    kernel = np.asarray(initial["blocks"]["mlp"]["up"]["kernel"])
    assert kernel.std() == pytest.approx(0.02, rel=0.1)
    assert (kernel[0] != kernel[1]).all()


def test_layers_in_other_places_keep_their_values_and_unused_places_are_0(
    model, initial
):
    moved = dataclasses.replace(model, layer_order=(2, -1, 0, 3, 1))
    blocks = jax.jit(moved.init)(jax.random.key(7))["blocks"]
    for place, layer in enumerate(moved.layer_order):
        found = jax.tree.map(lambda leaf, place=place: leaf[place], blocks)
        wanted = jax.tree.map(
            lambda leaf, layer=layer: leaf[layer] if layer >= 0 else 0 * leaf[0],
            initial["blocks"],
        )
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_blocks_of_other_shapes_are_an_error_that_names_the_first():
    with pytest.raises(ValueError, match="Block 2 of Chain differs") as error:
        stacked.stack(lambda rngs: Chain([8, 8, 16], rngs=rngs))
    assert "Give every block the same config" in str(error.value)


def test_model_without_blocks_is_an_error():
    with pytest.raises(ValueError, match="Chain has no blocks to stack"):
        stacked.stack(lambda rngs: Chain([], rngs=rngs))
