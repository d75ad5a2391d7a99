import functools

import jax
import pytest

from models.remat import REMAT
from tests.models import cases
from tests.models.cases import LAYOUT_TOLERANCE, assert_close

CASE = cases.with_config(
    cases.load("gpt2"), dropout_rate=0.1, attention_dropout_rate=0.1
)


@functools.cache
def compiled_gradients(remat):
    """Returns the compiled gradient of a model with dropout."""

    def loss(params, keys_B):
        return cases.stacked_objective(CASE, params, keys_B, REMAT[remat])[0]

    keys_B = jax.random.split(jax.random.key(0), 4)
    return jax.jit(jax.value_and_grad(loss)).lower(CASE.params, keys_B).compile()


@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_loss_and_gradients_are_those_of_keeping_everything(remat):
    arguments = CASE.params, jax.random.split(jax.random.key(1), 4)
    actual = compiled_gradients(remat)(*arguments)
    assert_close(actual, compiled_gradients("none")(*arguments), LAYOUT_TOLERANCE)


def test_what_is_computed_again_is_not_kept():
    sizes = [
        compiled_gradients(remat).memory_analysis().temp_size_in_bytes
        for remat in ("full", "selective", "none")
    ]
    assert sizes == sorted(set(sizes)), "bytes of full, selective, none"
