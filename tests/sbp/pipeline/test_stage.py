"""Stage assignment: every layer in one stage, in order, and balanced."""

import itertools
import re

import pytest

import sbp
from sbp.pipeline import stage

LIBAI = {
    (8, 2): (4, 4),
    (12, 2): (6, 6),
    (12, 4): (3, 4, 4, 1),
    (10, 3): (3, 3, 4),
    (11, 4): (2, 3, 3, 3),
    (13, 4): (3, 3, 3, 4),
    (12, 5): (2, 2, 2, 3, 3),
    (8, 4): (2, 2, 3, 1),
    (8, 8): (1,) * 8,
    (7, 4): (1, 2, 2, 2),
    (6, 4): (1, 1, 2, 2),
    (24, 4): (6, 7, 7, 4),
    (24, 5): (4, 5, 5, 5, 5),
    (24, 6): (4, 4, 5, 5, 5, 1),
    (24, 8): (3, 3, 3, 3, 3, 4, 4, 1),
    (32, 8): (4, 4, 4, 4, 5, 5, 5, 1),
    (48, 8): (6, 6, 7, 7, 7, 7, 7, 1),
    (48, 4): (12, 13, 13, 10),
    (16, 4): (4, 5, 5, 2),
    (16, 8): (2, 2, 2, 2, 2, 2, 3, 1),
    (96, 8): (12, 13, 13, 13, 13, 13, 13, 6),
    (96, 16): (6,) * 10 + (7,) * 5 + (1,),
}


@pytest.mark.parametrize(("sizes", "counts"), LIBAI.items(), ids=str)
def test_libai_split_equals_the_published_table(sizes, counts):
    assert stage.assign_libai(*sizes).layers_per_piece == counts


def test_libai_split_never_leaves_a_stage_empty():
    for num_layers in range(1, 100):
        for num_stages in range(1, num_layers + 1):
            counts = stage.assign_libai(num_layers, num_stages).layers_per_piece
            assert sum(counts) == num_layers
            assert min(counts) >= 1


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_layers", [15, 24, 31])
def test_balanced_pieces_differ_by_one_layer_at_most(
    num_layers, num_stages, num_chunks
):
    counts = stage.assign_balanced(
        num_layers, num_stages, num_chunks=num_chunks
    ).layers_per_piece
    assert len(counts) == num_stages * num_chunks
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("head_cost", [0.0, 0.4, 1.0, 2.5, 9.0])
@pytest.mark.parametrize("embedding_cost", [0.0, 0.7, 2.0])
def test_weighted_split_has_the_smallest_maximum_of_all_splits(
    embedding_cost, head_cost
):
    def slowest(counts):
        first, *middle, last = counts
        return max(first + embedding_cost, *middle, last + head_cost)

    counts = stage.assign_balanced(
        9, 3, embedding_cost=embedding_cost, head_cost=head_cost
    ).layers_per_piece
    splits = [
        split for split in itertools.product(range(1, 8), repeat=3) if sum(split) == 9
    ]
    assert counts in splits
    assert slowest(counts) == min(map(slowest, splits))


def test_one_stage_gets_embedding_head_and_all_layers():
    assignment = stage.assign_balanced(3, 1, embedding_cost=1, head_cost=4)
    assert assignment.layers_per_piece == (3,)


def test_head_cost_is_the_ratio_of_multiplications():
    cost = stage.head_cost(vocab_size=50_304, model_dim=768, mlp_dim=3072)
    layer = 4 * 768**2 + 2 * 768 * 3072
    assert cost == pytest.approx(50_304 * 768 / layer)


def test_layers_of_chunks_go_round_the_stages():
    assignment = stage.assign_balanced(8, 2, num_chunks=2)
    assert [list(assignment.layers_of(0, chunk)) for chunk in (0, 1)] == [
        [0, 1],
        [4, 5],
    ]
    assert [assignment.stage_of(i) for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [assignment.chunk_of(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_negative_layer_index_counts_from_the_end():
    assignment = stage.assign_layers((1, 3), num_layers=4, num_stages=2)
    stages = [assignment.stage_of(index) for index in range(4)]
    assert stages == [0, 1, 1, 1]
    assert [assignment.stage_of(index - 4) for index in range(4)] == stages


def test_layer_indices_hold_every_layer_once_and_pad_with_minus_one():
    assignment = stage.assign_balanced(7, 2, num_chunks=2)
    indices = assignment.layer_indices
    assert indices.shape == (2, 2, 2)
    assert sorted(indices[indices >= 0]) == list(range(7))
    assert indices[0, 0].tolist() == [0, -1]
    assert not assignment.is_uniform
    assert stage.assign_balanced(8, 4).is_uniform


def test_placement_of_layer_is_the_placement_of_its_stage():
    whole = sbp.placement("cpu", [[0, 1], [2, 3]], ("stage", "data"))
    assignment = stage.assign_layers((3, 1), num_layers=4, num_stages=2)
    assert assignment.placement_of_layer(whole, 2) == whole.along("stage", 0)
    assert assignment.placement_of_layer(whole, -1) == whole.along("stage", 1)


def test_list_of_stages_gives_the_same_assignment_as_the_list_of_counts():
    by_id = stage.from_stage_ids([0, 0, 0, 1, 2, 2], num_layers=6, num_stages=3)
    assert by_id == stage.assign_layers((3, 1, 2), num_layers=6, num_stages=3)


WRONG = {
    "more_stages_than_layers": (
        lambda: stage.assign_balanced(3, 4),
        "num_layers=3 is fewer than the 4 pieces of 4 stages x 1 chunks, and every "
        "piece holds at least one layer. Use at most 3 pieces, or more layers.",
    ),
    "more_pieces_than_layers": (
        lambda: stage.assign_balanced(7, 4, num_chunks=2),
        "num_layers=7 is fewer than the 8 pieces of 4 stages x 2 chunks",
    ),
    "no_stage": (
        lambda: stage.assign_libai(3, 0),
        "num_stages=0 is less than 1. Give a positive integer.",
    ),
    "negative_cost": (
        lambda: stage.assign_balanced(3, 2, head_cost=-1),
        "embedding_cost=0.0 and head_cost=-1 are times in layers, and a time is not "
        "negative. Use 0 to leave one out.",
    ),
    "list_of_wrong_length": (
        lambda: stage.assign_layers((2, 2), num_layers=4, num_stages=4),
        "pipeline_stage_layers=(2, 2) lists 2 numbers, but there are 4 pieces: "
        "4 stages x 1 chunks. List one number for each.",
    ),
    "list_too_small": (
        lambda: stage.assign_layers((2, 1), num_layers=4, num_stages=2),
        "pipeline_stage_layers=(2, 1) adds up to 3 layers, but the model has 4. "
        "Add 1 more.",
    ),
    "list_too_large": (
        lambda: stage.assign_layers((2, 4), num_layers=4, num_stages=2),
        "adds up to 6 layers, but the model has 4. Take 2 away.",
    ),
    "empty_stage": (
        lambda: stage.assign_layers((4, 0), num_layers=4, num_stages=2),
        "layers_per_piece=(4, 0) leaves piece 1 with 0 layers, but every piece holds "
        "at least one. Move a layer there, or use fewer stages or chunks.",
    ),
    "pieces_that_do_not_fill_the_stages": (
        lambda: stage.StageAssignment(layers_per_piece=(1, 1, 1), num_stages=2),
        "layers_per_piece=(1, 1, 1) has 3 pieces, but every one of the num_stages=2 "
        "stages holds the same positive number of them. List one piece per stage, or "
        "per chunk of a stage.",
    ),
    "stages_of_wrong_length": (
        lambda: stage.from_stage_ids([0, 1], num_layers=3, num_stages=2),
        "The list of stages [0, 1] has 2 entries, but the model has 3 layers. List "
        "one stage per layer.",
    ),
    "stage_that_does_not_exist": (
        lambda: stage.from_stage_ids([0, 1, 2], num_layers=3, num_stages=2),
        "names the stages [0, 1, 2], but with num_stages=2 each of 0 to 1 needs a "
        "layer. Name exactly these.",
    ),
    "stages_out_of_order": (
        lambda: stage.from_stage_ids([0, 1, 0], num_layers=3, num_stages=2),
        "The list of stages [0, 1, 0] goes back from stage 1 to stage 0 at layer 2, "
        "but a microbatch passes the stages in order. Sort the list.",
    ),
    "layer_that_does_not_exist": (
        lambda: stage.assign_balanced(4, 2).stage_of(4),
        "There is no layer 4 in a stack of 4. Use an index from -4 to 3.",
    ),
    "negative_layer_that_does_not_exist": (
        lambda: stage.assign_balanced(4, 2).chunk_of(-5),
        "There is no layer -5 in a stack of 4. Use an index from -4 to 3.",
    ),
    "chunk_that_does_not_exist": (
        lambda: stage.assign_balanced(4, 2).layers_of(1, 1),
        "There is no chunk 1 of stage 1: the stages are 0 to 1, their chunks 0 to 0. "
        "Use an index in these ranges.",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_assignment_names_values_rule_and_remedy(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
