"""What the compiled step communicates where activations are split over the sequence."""

import collections
import functools

import pytest

from launch import resolve
from tests import hlo
from tests.launch.cases import BATCH_SIZE, FIELDS, Case, compile_step
from tests.launch.test_equivalence import DROPOUT, check

SPLIT = ("dist.sequence_parallel", True)
ODD = ("data.seq_length", 11)  # one position is added
TWO_LAYERS = ("model.num_layers", 2)
LAYERS = Case(2, 4, 1, fields=(SPLIT, TWO_LAYERS, ODD))
STAGES = Case(2, 2, 2, fields=(SPLIT, TWO_LAYERS, ODD))
LENGTH, DIM = 12, FIELDS["model.model_dim"]


@functools.cache
def collectives_of(case):
    """The collectives of the step, each with the axes it communicates over."""
    return [
        (found, found.axes(case.mesh.shape))
        for found in hlo.collectives(compile_step(case).as_text())
    ]


def in_layers(case):
    """Those over tensor in the loops over layers: {loop: {name: [shapes]}}."""
    loops = collections.defaultdict(lambda: collections.defaultdict(list))
    for found, axes in collectives_of(case):
        if axes == ("tensor",) and len(found.loops) == 2:
            loops[found.loops[1].body][found.name].append(found.shapes)
    return [dict(names) for names in loops.values()]


def test_a_layer_gathers_and_scatters_activations_and_reduces_none():
    forward, backward = in_layers(LAYERS)
    size = BATCH_SIZE // 2 // 2  # of a microbatch
    whole = (f"f32[{size},{LENGTH},{DIM}]",)
    part = (f"f32[{size},{LENGTH // 4},{DIM}]",)

    assert forward == {"all-gather": [whole] * 2, "reduce-scatter": [part] * 2}
    # The inputs of qkv and up are gathered again for the gradients of weights.
    assert backward.pop("all-gather") == [whole] * 4
    assert backward.pop("reduce-scatter") == [part] * 2
    # What is left are the gradients of scales and biases of two norms.
    assert backward == {"all-reduce": [(f"f32[{DIM}]",) * 4]}


def test_stages_send_each_other_a_part_of_the_sequence():
    sent = [
        found.shapes
        for found, axes in collectives_of(STAGES)
        if found.name == "collective-permute" and axes == ("stage",)
    ]
    size = BATCH_SIZE // 2 // 2
    assert sent == [(f"f32[{size},{LENGTH // 2},{DIM}]",)] * 2


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 2, "zero_bubble", fields=(SPLIT, ODD, TWO_LAYERS, *DROPOUT)),
        pytest.param(
            Case(1, 4, 2, "interleaved_1f1b", fields=(SPLIT, ODD, *DROPOUT)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(1, 4, 1, model="vit", fields=(SPLIT, TWO_LAYERS, *DROPOUT)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_what_is_dropped_is_the_same_where_positions_are_added(case):
    check(case, num_steps=10, least_drop=0.02)


def test_one_rank_of_tensor_has_nothing_to_split_among():
    with pytest.raises(resolve.ConfigError) as error:
        Case(8, 1, 1, fields=(SPLIT,)).config  # noqa: B018 - resolving it is the test
    assert (
        "dist.sequence_parallel=True splits activations over the ranks of"
        " tensor_parallel_size=1, which is one. Use a size of at least 2, or"
        " sequence_parallel=False."
    ) in str(error.value)
