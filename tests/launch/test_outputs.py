"""What a model says of each sample does not depend on the layout either."""

import jax
import numpy as np
import pytest

from launch import step
from tests.launch import cases
from tests.launch.cases import Case
from tests.launch.test_equivalence import ENDS


def logits(model, x_BLD, batch):
    tokens_BNV, next_B2 = model.logits(x_BLD, batch)
    return {"tokens": tokens_BNV, "next": next_B2, "best": tokens_BNV.argmax(-1)}


def run(case):
    program = step.build_output_step(cases.make_steps(case), logits)
    params = cases.create_state(case).params
    return jax.device_get(program(params, cases.make_batch(case.config)))


@pytest.mark.parametrize(
    "case", [Case(2, 1, 2), Case(1, 2, 2, fields=(ENDS,))], ids=str
)
def test_logits_are_those_of_one_device_in_the_order_of_the_batch(case):
    expected = run(Case(num_microbatches=1))
    found = run(case)
    assert found["tokens"].shape == (16, 3, 64)
    assert found.keys() == expected.keys()
    for name in ("tokens", "next"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(found["best"], expected["best"])
