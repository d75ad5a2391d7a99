import numpy as np
import pytest

import sbp
from sbp import cost

LINE = sbp.placement("cpu", [0, 1, 2, 3], ("tensor",))
SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))


@pytest.mark.parametrize(
    ("source", "target", "collectives", "num_bytes"),
    [
        ("S(0)", "S(0)", (), 0),
        ("S(0)", "B", ("all-gather",), 384),
        ("P", "S(1)", ("reduce-scatter",), 384),
        ("P", "B", ("all-reduce",), 768),
        ("S(0)", "S(1)", ("all-to-all",), 96),
        ("B", "S(1)", (), 0),
        ("B", "P", (), 0),
        ("S(1)", "P", (), 0),
    ],
)
def test_one_axis_costs_what_the_table_says(source, target, collectives, num_bytes):
    ends = sbp.parse(source), sbp.parse(target)
    plan = sbp.plan(*ends, (8, 16), np.float32, LINE)
    assert (plan.collectives, plan.num_bytes) == (collectives, num_bytes)


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        ("P,B", "S(0),B", [("reduce-scatter", ("data",))]),
        ("S(0),P", "S(0),S(1)", [("reduce-scatter", ("tensor",))]),
        ("P,P", "B,B", [("all-reduce", ("data", "tensor"))]),
        ("P,B", "B,P", [("slice", ("tensor",)), ("all-reduce", ("data",))]),
        ("S(0),S(1)", "S(1),S(0)", [("collective-permute", ("data", "tensor"))]),
    ],
)
def test_steps_name_their_collective_and_axes(source, target, moves):
    plan = sbp.plan(sbp.parse(source), sbp.parse(target), (8, 8), "float32", SQUARE)
    steps = [(step.collective, step.axes) for step in plan.steps]
    assert steps[: len(moves)] == moves
    assert all(step.is_free for step in plan.steps[len(moves) :])


def test_swapping_two_splits_moves_only_what_devices_lack():
    plan = sbp.plan(
        sbp.parse("S(0),S(1)"), sbp.parse("S(1),S(0)"), (8, 8), "float32", SQUARE
    )
    assert plan.num_bytes == 8 * 8 * 4 // 4


def test_plan_to_another_placement():
    there = sbp.placement("cpu", [4, 5])
    plan = sbp.plan(
        sbp.split(0),
        sbp.split(0),
        (8, 16),
        "float32",
        LINE,
        target_placement=there,
    )
    assert [step.axes for step in plan.steps] == [("rank",)]
    assert plan.collectives == ("collective-permute",) * 2
    assert plan.num_bytes == 256


def test_plan_to_a_subset_that_has_everything_moves_nothing():
    there = sbp.placement("cpu", [2, 1])
    plan = sbp.plan(
        sbp.broadcast, sbp.split(1), (8, 16), "int8", LINE, target_placement=there
    )
    assert (plan.collectives, plan.num_bytes) == ((), 0)


def test_plan_prints_its_steps():
    plan = sbp.plan(sbp.parse("S(0),P"), sbp.parse("B,B"), (8, 8), "int32", SQUARE)
    lines = str(plan).splitlines()
    assert lines[0] == "int32[8, 8]: (S(0), P) -> (B, B), 256 bytes per device"
    assert [line.split()[0] for line in lines[1:]] == ["reduce-scatter", "all-gather"]
    assert [int(line.split()[-1]) for line in lines[1:]] == [64, 192]


def test_costs_agree_with_each_other():
    scatter = cost.reduce_scatter_bytes(1024, 4)
    gather = cost.all_gather_bytes(256, 4)
    assert cost.all_reduce_bytes(1024, 4) == scatter + gather
    assert cost.all_to_all_bytes(1024, 1) == 0
    assert cost.permute_bytes(10, 3) == 30
    assert cost.size_bytes((), 4) == 4
