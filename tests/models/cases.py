"""One small model of each family, with weights, a batch and what comes out of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import MODELS, convert, published, published_config, stacked
from tests.models import make_golden

# Of the largest absolute value of a tensor: against other software, and against the
# same computation in another order.
SOFTWARE_TOLERANCE = 2e-5
LAYOUT_TOLERANCE = 2e-6

FAMILIES = tuple(MODELS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its weights and a batch.

    Attributes:
        name: Of the family.
        config: Without dropout.
        model: Its pure functions.
        params: Weights, blocks stacked.
        batch: Four samples.
        golden: What `transformers` computes of them; None if it has no such model.
    """

    name: str
    config: Any
    model: stacked.StackedModel
    params: dict
    batch: dict
    golden: make_golden.Golden

    @property
    def table(self):
        """Names in published checkpoints."""
        return published.PUBLISHED[self.name].table(self.config)

    def to_params(self, tensors):
        """Returns published tensors in the form of the parameters."""
        return convert.to_params(self.table, tensors.__getitem__, self.params)


@functools.cache
def load(name):
    """Returns the case of a family."""
    return from_golden(make_golden.load(name))


def from_golden(golden):
    """Returns the case of what `transformers` computed."""
    name, config = published_config.from_published(golden.config)
    config = dataclasses.replace(config, dropout_rate=0.0, attention_dropout_rate=0.0)
    if name != "vit":
        config = dataclasses.replace(config, vocab_multiple=32)
    return build(name, config, golden)


def shallow(case):
    """Returns the first two layers of a case, which compile faster when unrolled."""
    blocks = jax.tree.map(lambda leaf: leaf[:2], case.params["blocks"])
    case = dataclasses.replace(case, params={**case.params, "blocks": blocks})
    return with_config(case, num_layers=2)


def with_config(case, **fields):
    """Returns the case with another config, such as with dropout, and its weights."""
    config = dataclasses.replace(case.config, **fields)
    return dataclasses.replace(case, config=config, model=stack(case.name, config))


def build(name, config, golden):
    """Returns the case of a config."""
    model = stack(name, config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    table = published.PUBLISHED[name].table(config)
    params = convert.to_params(table, golden.weights.__getitem__, shapes)
    return Case(
        name=name,
        config=config,
        model=model,
        params=jax.tree.map(jnp.asarray, params),
        batch=jax.tree.map(jnp.asarray, golden.inputs),
        golden=golden,
    )


def stack(name, config):
    """Returns the pure functions of a model."""
    return stacked.stack(lambda rngs: MODELS[name].module(config, rngs=rngs))


def module_of(case, params):
    """Returns the plain module with these weights, each block with its own."""
    build = MODELS[case.name].module
    module = nnx.eval_shape(lambda: build(case.config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    layers = range(case.config.num_layers)
    blocks = {
        i: jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in layers
    }
    nnx.replace_by_pure_dict(state, {**params, "blocks": blocks})
    return nnx.merge(graph, state)


def objective(module, batch, keys_B=None):
    """Returns the training loss of a plain module, and all its means."""
    sums = module.losses(module.encode(batch, keys_B), batch)
    counts = module.counts(batch)
    means = {name: sums[name] / counts[name] for name in sums}
    return sum(v for name, v in means.items() if name.endswith("_loss")), means


def run_blocks(case, params, x, keys_B=None, wrap=lambda block: block):
    """Returns the output of the last block, by the pure functions."""
    context = case.model.context(case.batch, keys_B)
    block = wrap(case.model.block)

    def step(carry, weights):
        x, layer = carry
        return (block(weights, x, context, layer), layer + 1), None

    return jax.lax.scan(step, (x, jnp.int32(0)), params["blocks"])[0][0]


def stacked_objective(case, params, keys_B=None, wrap=lambda block: block):
    """Returns the training loss by the pure functions, and the last block's output."""
    outer = {key: value for key, value in params.items() if key != "blocks"}
    x = case.model.embed(outer, case.batch, keys_B)
    x = run_blocks(case, params, x, keys_B, wrap)
    return objective_of(case, outer, x), x


def objective_of(case, outer, x):
    """Returns the training loss of the last block's output, by the pure functions."""
    sums, counts = (
        case.model.losses(outer, x, case.batch),
        case.model.counts(case.batch),
    )
    return sum(sums[n] / counts[n] for n in sums if n.endswith("_loss"))


def assert_close(actual, expected, tolerance):
    """Asserts that every leaf is near the expected one, and names those that are not.

    Args:
        actual: Tree of arrays.
        expected: Tree of the same paths.
        tolerance: Of the largest absolute value of the expected leaf.
    """
    actual = dict(jax.tree_util.tree_leaves_with_path(actual))
    expected = dict(jax.tree_util.tree_leaves_with_path(expected))
    assert actual.keys() == expected.keys()
    far = {}
    for path, wanted in expected.items():
        wanted = np.asarray(wanted, np.float64)
        error = np.abs(np.asarray(actual[path], np.float64) - wanted).max()
        scale = np.abs(wanted).max()
        if not error <= tolerance * scale:
            far[jax.tree_util.keystr(path)] = f"{error / scale:.1e}"
    assert not far, far
