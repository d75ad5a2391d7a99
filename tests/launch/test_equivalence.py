"""The loss and every gradient do not depend on layout, schedule or microbatches."""

import itertools

import jax
import numpy as np
import pytest

from tests.launch.cases import Case, train

# Largest difference of a gradient relative to its largest element, and of a loss.
GRADIENT_TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-5
NUM_STEPS = 20

LAYOUTS = (  # data x tensor x stage
    (8, 1, 1),
    (1, 8, 1),
    (1, 1, 8),
    (2, 2, 2),
    (4, 1, 2),
    (1, 2, 4),
    (2, 1, 4),
    (4, 2, 1),
)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
ENDS = ("dist.pipeline_vocabulary", "first_and_last_stage")
FULL, SELECTIVE = ("remat", "full"), ("remat", "selective")
PRE_NORM = ("model.norm_position", "pre")
SIXTEEN_LAYERS = ("model.num_layers", 16)  # two for each chunk of eight stages
UNEVEN = ("dist.pipeline_stage_layers", (3, 1, 4))
DROPOUT = (("model.dropout_rate", 0.2), ("model.attention_dropout_rate", 0.2))

# Each axis, place of the vocabulary and remat policy at least once.
SOME = [
    Case(2, 2, 2, "1f1b"),
    Case(1, 2, 4, "zero_bubble", num_microbatches=8, fields=(SELECTIVE, *DROPOUT)),
    Case(4, 1, 2, "gpipe", num_microbatches=1, fields=(ENDS, FULL)),
    Case(1, 2, 3, "1f1b", num_microbatches=8, fields=(ENDS, UNEVEN, *DROPOUT)),
]
EVERY = [
    Case(*sizes, name, fields=(SIXTEEN_LAYERS,) if sizes[2] == 8 else ())
    for sizes, name in itertools.product(LAYOUTS, SCHEDULES)
]
OTHERS = [
    Case(2, 1, 4, "interleaved_1f1b", fields=DROPOUT),
    Case(1, 1, 3, "zero_bubble", num_microbatches=4, fields=(ENDS, UNEVEN, FULL)),
    Case(1, 2, 4, "1f1b", num_microbatches=16, fields=(SELECTIVE, ENDS, *DROPOUT)),
    Case(1, 2, 4, "gpipe", fields=(SELECTIVE, PRE_NORM)),
    Case(1, 2, 4, "interleaved_1f1b", fields=(FULL, ENDS)),
    Case(2, 2, 2, "zero_bubble", fields=(ENDS, PRE_NORM)),
    Case(2, 2, 2, "zero_bubble", fields=(FULL, *DROPOUT)),
    Case(4, 1, 1, num_microbatches=4, fields=DROPOUT),
    Case(8, 1, 1, num_microbatches=1, fields=DROPOUT),
]


def check(case, num_steps=NUM_STEPS, least_drop=0.5):
    """Asserts that gradients and losses are those of one device, and that it learns."""
    of_model = tuple(f for f in case.fields if f[0].startswith(("model.", "data.")))
    one_device = Case(num_microbatches=1, fields=of_model, model=case.model)
    expected, found = train(one_device, num_steps), train(case, num_steps)

    def error(ours, theirs):
        return np.abs(ours - theirs).max() / np.abs(theirs).max()

    errors = {
        jax.tree_util.keystr(path): error(ours, theirs)
        for (path, ours), theirs in zip(
            jax.tree.leaves_with_path(found.gradients),
            jax.tree.leaves(expected.gradients),
            strict=True,
        )
    }
    worst, loss = max(errors.values()), error(found.losses, expected.losses)
    print(f"{case}: gradients {worst:.1e}, losses {loss:.1e}")
    assert {k: v for k, v in errors.items() if v > GRADIENT_TOLERANCE} == {}
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS_TOLERANCE)
    assert expected.losses[-1] < expected.losses[0] - least_drop


@pytest.mark.parametrize("case", SOME, ids=str)
def test_step_equals_that_of_one_device(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY + OTHERS, ids=str)
def test_step_equals_that_of_one_device_in_every_case(case):
    check(case)


HALF = ("model.dtype", "bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 2, "gpipe", fields=(HALF, FULL)),
        pytest.param(
            Case(2, 2, 2, "zero_bubble", fields=(HALF,)), marks=pytest.mark.slow
        ),
        pytest.param(
            Case(1, 2, 4, "1f1b", fields=(HALF, ENDS)), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_half_precision_stays_close_to_single_precision(case):
    expected = train(Case(num_microbatches=1), NUM_STEPS).losses[:5]
    found = train(case, 5).losses
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    assert np.abs(found - expected).max() > 1e-6 * expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt2", "vit"])
def test_half_precision_differs_less_than_seeds_do(model):
    fields = (("model.num_layers", 4), SELECTIVE)
    curves = [
        train(Case(num_microbatches=1, fields=fields, model=model, weights_seed=i), 20)
        for i in range(5)
    ]
    spread = np.std([curve.losses for curve in curves], axis=0, ddof=1)
    half = train(Case(2, 2, 2, fields=(*fields, HALF), model=model), 20).losses
    differences = np.abs(half - curves[0].losses)
    print(model, (differences / spread).max())
    assert (differences < spread).all()


def test_dropout_makes_a_difference():
    with_dropout = train(Case(num_microbatches=1, fields=DROPOUT), NUM_STEPS)
    without = train(Case(num_microbatches=1), NUM_STEPS)
    assert np.abs(with_dropout.losses - without.losses).min() > 1e-3
