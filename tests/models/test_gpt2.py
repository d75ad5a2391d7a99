import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.gpt2 import SIZES, Gpt2, Gpt2Config
from tests.models import cases


@pytest.mark.parametrize(
    ("size", "num_params"),
    [
        ("124m", 124_439_808),
        ("355m", 354_823_168),
        ("774m", 774_030_080),
        ("1.5b", 1_557_611_200),
    ],
)
def test_parameters_are_as_many_as_those_published(size, num_params):
    config = dataclasses.replace(SIZES[size], vocab_multiple=1)
    state = nnx.state(nnx.eval_shape(lambda: Gpt2(config, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == num_params
    assert SIZES[size].padded_vocab_size == 50304


@pytest.mark.parametrize("is_packed", [False, True], ids=["one_text", "packed"])
def test_no_position_depends_on_what_follows_it(is_packed):
    case = cases.load("gpt2")
    length = case.batch["tokens"].shape[1]
    documents = np.zeros((1, length), np.int32)
    documents[:, 5:] = 1
    batch = {"tokens": case.batch["tokens"][:1]}
    if is_packed:
        batch["documents"] = jax.numpy.asarray(documents)
    case = dataclasses.replace(case, batch=batch)
    outer = {key: value for key, value in case.params.items() if key != "blocks"}

    def sensitivity(position, x_BLD):
        # A weighted sum: the norms of plain sums of features cancel.
        def probe(x_BLD):
            y_BLD = cases.run_blocks(case, case.params, x_BLD)
            return (y_BLD[0, position] * jax.numpy.arange(y_BLD.shape[2])).sum()

        return jax.numpy.linalg.norm(jax.grad(probe)(x_BLD)[0], axis=-1)

    x_BLD = case.model.embed(outer, case.batch, None)
    positions = jax.numpy.arange(length)
    norms_LL = jax.jit(jax.vmap(sensitivity, in_axes=(0, None)))(positions, x_BLD)
    is_seen_LL = np.tril(np.ones((length, length), bool))
    if is_packed:
        is_seen_LL &= documents[0][:, None] == documents[0]
    assert (np.asarray(norms_LL)[~is_seen_LL] == 0).all()
    assert (np.asarray(norms_LL)[is_seen_LL] > 1e-4).all()


def test_positions_of_weight_zero_do_not_count():
    case = cases.shallow(cases.load("gpt2"))

    @jax.jit
    def means(batch):
        return cases.objective(cases.module_of(case, case.params), batch)[1]

    is_counted_BL = case.batch["weights"] > 0
    assert not is_counted_BL.all()
    other_BL = (case.batch["targets"] + 1) % case.config.vocab_size
    targets_BL = jax.numpy.where(is_counted_BL, case.batch["targets"], other_BL)
    assert means({**case.batch, "targets": targets_BL}) == means(case.batch)


def test_norm_after_each_half_is_another_model():
    (sentence,) = Gpt2Config(norm_position="post").broken_rules()
    assert sentence == "norm_position='post' is not one of 'pre'."
