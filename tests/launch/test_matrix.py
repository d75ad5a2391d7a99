"""Every technique with every other: gradients and losses are those of one device.

The cases are generated: models x layouts x ZeRO stages x recomputation x sequence
parallelism. By default those run in which every pair of choices occurs; with ``-m
slow`` all of them.
"""

import itertools

import pytest

from tests.launch import pairwise
from tests.launch.cases import Case
from tests.launch.test_equivalence import check

MODELS = ("bert", "gpt2", "vit")
LAYOUTS = ((8, 1, 1), (2, 4, 1), (2, 1, 4), (2, 2, 2))  # data x tensor x stage
ZERO_STAGES = (0, 1, 2, 3)
REMAT = ("none", "full", "selective")
SEQUENCE_PARALLEL = (False, True)

NUM_STEPS = 10
SMALL = (
    ("model.num_layers", 4),
    ("model.num_heads", 4),
    ("zero.min_size", 1),  # even the smallest parameter is cut
)


def exists(choice):
    """Whether the config allows it: one rank of tensor has nothing to split among."""
    _, (_, tensor, _), _, _, is_sequence_parallel = choice
    return tensor > 1 or not is_sequence_parallel


PRODUCT = tuple(
    filter(
        exists,
        itertools.product(MODELS, LAYOUTS, ZERO_STAGES, REMAT, SEQUENCE_PARALLEL),
    )
)
SOME = pairwise.cover(PRODUCT)


def to_case(choice):
    model, layout, zero_stage, remat, is_sequence_parallel = choice
    fields = (
        *SMALL,
        ("zero.stage", zero_stage),
        ("remat", remat),
        ("dist.sequence_parallel", is_sequence_parallel),
    )
    return Case(*layout, fields=fields, model=model)


def name_of(choice):
    model, layout, zero_stage, remat, is_sequence_parallel = choice
    sizes = "x".join(map(str, layout))
    sp = "-sp" if is_sequence_parallel else ""
    return f"{model}-{sizes}-zero{zero_stage}-{remat}{sp}"


@pytest.mark.parametrize("choice", SOME, ids=name_of)
def test_step_equals_that_of_one_device(choice):
    check(to_case(choice), NUM_STEPS, least_drop=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [choice for choice in PRODUCT if choice not in SOME], ids=name_of
)
def test_step_equals_that_of_one_device_in_every_case(choice):
    check(to_case(choice), NUM_STEPS, least_drop=0.05)


def test_every_pair_of_choices_is_among_the_default_cases():
    wanted = set().union(*map(pairwise.pairs, PRODUCT))
    assert set().union(*map(pairwise.pairs, SOME)) == wanted
    # All pairs of the choices but those that cannot be had.
    choices = MODELS, LAYOUTS, ZERO_STAGES, REMAT, SEQUENCE_PARALLEL
    num_pairs = sum(len(a) * len(b) for a, b in itertools.combinations(choices, 2))
    num_without_tensor = sum(tensor == 1 for _, tensor, _ in LAYOUTS)
    assert len(wanted) == num_pairs - num_without_tensor
    assert len(PRODUCT) == 216
    assert len(SOME) == len(LAYOUTS) * len(ZERO_STAGES), "no fewer would do"
