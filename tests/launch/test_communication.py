"""What the compiled step communicates and keeps, read from the program: no clock."""

import collections

import pytest

from tests import hlo
from tests.launch.cases import Case, compile_step
from tests.launch.test_equivalence import SOME

CUT_EVERY_WAY, ZERO_BUBBLE, ENDS_APART, _ = SOME


def collectives_of(case):
    """The collectives of the step, each with the axes it communicates over."""
    sizes = case.mesh.shape
    return [
        (found, found.axes(sizes))
        for found in hlo.collectives(compile_step(case).as_text())
    ]


@pytest.mark.parametrize("case", [CUT_EVERY_WAY, ZERO_BUBBLE, ENDS_APART], ids=str)
def test_exactly_two_permutations_in_the_loop_over_ticks(case):
    permutes = [
        (found, axes)
        for found, axes in collectives_of(case)
        if found.name == "collective-permute"
    ]
    assert len(permutes) == 2
    for found, axes in permutes:
        assert axes == ("stage",)
        assert len(found.loops) == 1
        assert found.conditionals == 0
    assert permutes[0][0].loops == permutes[1][0].loops


@pytest.mark.parametrize("case", [CUT_EVERY_WAY, ENDS_APART], ids=str)
def test_nothing_crosses_data_inside_a_loop_and_gradients_cross_it_once(case):
    over_data = [found for found, axes in collectives_of(case) if "data" in axes]
    assert [found for found in over_data if found.loops] == []
    assert len([found for found in over_data if found.num_bytes > 1000]) == 1


def test_only_embedding_and_head_cross_stages_besides_the_permutations():
    in_loop = [
        found
        for found, axes in collectives_of(CUT_EVERY_WAY)
        if "stage" in axes and found.loops and found.name != "collective-permute"
    ]
    # All in a branch that all stages take together, directly in the loop over ticks.
    assert {found.conditionals for found in in_loop} == {1}
    assert {len(found.loops) for found in in_loop} == {1}
    # Embedding: 1. Head: its input, maxima and sums of the scores, and back: 4.
    # Gradient of the embedding: forward again, and back: 2.
    assert len(in_loop) == 7


def test_nothing_crosses_stages_besides_the_permutations_where_the_ends_are_apart():
    names = [
        found.name
        for found, axes in collectives_of(ENDS_APART)
        if "stage" in axes and found.loops
    ]
    assert names == ["collective-permute"] * 2


@pytest.mark.parametrize(
    ("case", "expected"),
    [(CUT_EVERY_WAY, [2, 2]), (ZERO_BUBBLE, [2, 2, 2])],
    ids=["forward-backward", "forward-backward-input_alone"],
)
def test_two_sums_over_tensor_per_layer_and_direction(case, expected):
    counts = collections.Counter(
        found.loops[1].body
        for found, axes in collectives_of(case)
        if axes == ("tensor",) and len(found.loops) == 2
    )
    assert list(counts.values()) == expected


def temporary_bytes(schedule, num_microbatches):
    fields = {
        "train.global_batch_size": num_microbatches,
        "model.model_dim": 64,
        "model.mlp_dim": 128,
    }
    case = Case(
        stage=4,
        schedule=schedule,
        num_microbatches=num_microbatches,
        fields=tuple(fields.items()),
    )
    return compile_step(case).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_microbatches():
    few, some, many = (temporary_bytes("1f1b", number) for number in (8, 32, 128))
    gpipe = temporary_bytes("gpipe", 32)
    print(f"1f1b: {few}, {some}, {many} bytes at 8, 32, 128; gpipe: {gpipe} at 32")
    assert some == pytest.approx(few, rel=0.02)
    assert many == pytest.approx(few, rel=0.02)
    assert some < gpipe / 2
