"""ZeRO: the same numbers as one device, from parts of the state on each rank."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from launch import resolve, state, step, zero
from launch.checkpoint import Checkpointer
from launch.saved_form import SavedForm
from tests import hlo
from tests.launch.cases import Case, compile_step, create_state, make_batch, make_steps
from tests.launch.test_equivalence import DROPOUT, ENDS, FULL, SELECTIVE, UNEVEN, check

NUM_STEPS = 10
SMALL = ("zero.min_size", 64)  # biases and norms are whole, matrices are cut


def stage(number):
    return (("zero.stage", number), SMALL)


ONCE = Case(4, 2, 1, num_microbatches=2, fields=(*stage(1), SELECTIVE))
AT_ONCE = Case(8, 1, 1, num_microbatches=1, fields=stage(2))
BY_LAYER = Case(4, 1, 1, num_microbatches=2, fields=stage(3))
CUT_EVERY_WAY = Case(2, 2, 2, fields=stage(3))
IN_GROUPS = Case(
    4, 2, 1, num_microbatches=2, fields=(*stage(3), ("zero.group_size", 2), *DROPOUT)
)
SOME = [
    ONCE,
    AT_ONCE,
    IN_GROUPS,
    Case(
        2,
        1,
        3,
        "zero_bubble",
        num_microbatches=4,
        fields=(*stage(3), ENDS, UNEVEN),
    ),
]
OTHERS = [
    CUT_EVERY_WAY,
    BY_LAYER,
    Case(4, 1, 2, "1f1b", fields=(*stage(1), ("zero.group_size", 2))),
    Case(2, 1, 4, "interleaved_1f1b", fields=(*stage(3), FULL)),
    Case(2, 1, 4, "interleaved_1f1b", fields=(*stage(1), ENDS)),
    Case(2, 2, 2, "zero_bubble", fields=(*stage(2), SELECTIVE)),
    Case(2, 2, 2, "gpipe", fields=(*stage(1), *DROPOUT)),
    Case(8, 1, 1, num_microbatches=1, fields=(("zero.stage", 3), ("zero.min_size", 1))),
    Case(4, 2, 1, num_microbatches=1, fields=(("zero.stage", 2), ("zero.min_size", 1))),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_step_equals_that_of_one_device(case):
    check(case, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_step_equals_that_of_one_device_in_every_case(case):
    check(case, NUM_STEPS)


def over_data(case, name):
    """The collectives of this name over ``data``."""
    sizes = case.mesh.shape
    found = hlo.collectives(compile_step(case).as_text())
    return [c for c in found if c.name == name and c.axes(sizes) == ("data",)]


def count_cut(case, *, blocks):
    """Parameters that are cut over ``data``, of the blocks or besides them."""
    cuts = make_steps(case).zero.cuts
    cuts = (
        cuts["blocks"] if blocks else {k: c for k, c in cuts.items() if k != "blocks"}
    )
    return sum(cut.dim != zero.WHOLE for cut in jax.tree.leaves(cuts))


def count_arrays(collectives, depth):
    """Arrays that these move, as often as ``depth`` loops are around them."""
    return sum(len(c.shapes) for c in collectives if len(c.loops) == depth)


def test_stage_1_gathers_and_scatters_each_parameter_once_per_step():
    num_cut = count_cut(ONCE, blocks=True) + count_cut(ONCE, blocks=False)
    gathers, scatters = (
        over_data(ONCE, name) for name in ("all-gather", "reduce-scatter")
    )
    assert num_cut > 4
    assert count_arrays(gathers, 0) == count_arrays(scatters, 0) == num_cut
    assert [c for c in gathers + scatters if c.loops] == []
    # What is too small to cut is summed all at once, with the sums of the losses.
    assert [c for c in over_data(ONCE, "all-reduce") if c.loops] == []


def test_stage_2_scatters_layers_one_by_one_where_there_is_one_microbatch():
    scatters = over_data(AT_ONCE, "reduce-scatter")
    per_layer = [c for c in scatters if c.loops]
    assert count_arrays(per_layer, 1) == count_cut(AT_ONCE, blocks=True)
    assert {c.loops[-1].trips for c in per_layer} == {8}
    assert [c for c in over_data(AT_ONCE, "all-gather") if c.loops] == []


def test_stage_3_gathers_and_scatters_inside_the_loop_over_layers():
    num_cut = count_cut(BY_LAYER, blocks=True)
    gathers, scatters = (
        over_data(BY_LAYER, name) for name in ("all-gather", "reduce-scatter")
    )
    # Forward and backward, one layer ahead; gradients once, one layer behind.
    assert count_arrays(gathers, 2) == 2 * num_cut
    assert count_arrays(scatters, 2) == num_cut
    # And for each microbatch: embedding and head, the first layer of each direction,
    # the gradients of the last.
    outer = count_cut(BY_LAYER, blocks=False)
    assert count_arrays(gathers, 1) <= 2 * (num_cut + outer)
    assert count_arrays(scatters, 1) <= num_cut + 2 * outer
    assert count_arrays(gathers + scatters, 0) == 0


def test_groups_gather_among_themselves_and_sum_parts_over_all_once():
    mesh_shape = make_steps(IN_GROUPS).mesh.shape
    found = [
        (c, c.axes(mesh_shape))
        for c in hlo.collectives(compile_step(IN_GROUPS).as_text())
    ]
    in_loops = {
        axes for c, axes in found if c.loops and any("data" in axis for axis in axes)
    }
    assert in_loops == {(zero.SHARD,)}
    over_groups = [c for c, axes in found if axes == (zero.REPLICA,)]
    assert {(c.name, c.loops) for c in over_groups} == {("all-reduce", ())}
    num_cut = count_cut(IN_GROUPS, blocks=True) + count_cut(IN_GROUPS, blocks=False)
    arrays = [s for c in over_groups for s in c.shapes if s != "f32[]"]  # but norms
    assert len(arrays) == num_cut


def test_stage_3_never_has_all_layers_whole():
    mlp = make_steps(BY_LAYER).model.shapes["blocks"]["mlp"]
    at_once, by_layer = (compile_step(case).as_text() for case in (AT_ONCE, BY_LAYER))
    for name in ("up", "down"):
        whole, layer = (
            f"f32[{','.join(map(str, shape))}]"
            for shape in (mlp[name]["kernel"].shape, mlp[name]["kernel"].shape[1:])
        )
        assert whole in at_once
        assert whole not in by_layer
        assert layer in by_layer


@pytest.mark.parametrize("case", [ONCE, BY_LAYER], ids=str)
def test_each_rank_holds_its_part_of_every_cut_parameter_and_its_moments(case):
    steps = make_steps(case)
    batch = make_batch(case.config)

    def bytes_of(shape, cut, spec):
        axes = zero.axes_of(spec) - {"data"}
        parts = math.prod(case.mesh.shape[name] for name in axes)
        parts *= 1 if cut.dim == zero.WHOLE else case.data
        return 4 * math.prod(shape.shape) // parts

    sizes = jax.tree.map(bytes_of, steps.model.shapes, steps.zero.cuts, steps.specs)
    scalars = 3 * 4  # steps of the run, of Adam and of the learning rate
    expected = 4 * sum(jax.tree.leaves(sizes)) + scalars  # with the test's own trace
    expected += sum(x.nbytes for x in batch.values()) // case.data

    found = compile_step(case).memory_analysis().argument_size_in_bytes

    assert found == expected


def test_evaluation_and_outputs_are_those_of_one_device():
    def run(case):
        steps, params = make_steps(case), create_state(case).params
        batch = make_batch(case.config)
        sums, counts = step.build_eval_step(steps)(params, batch)
        outputs = step.build_output_step(steps, lambda model, x, batch: x)
        return sums, counts, outputs(params, batch)

    found, expected = run(BY_LAYER), run(Case(num_microbatches=1))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        found,
        expected,
    )


def form_of(case):
    steps = make_steps(case)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    return SavedForm(
        abstract=abstract,
        layer_order=steps.model.layer_order,
        num_layers=steps.model.num_layers,
    )


def test_a_checkpoint_is_the_same_bit_for_bit_in_every_stage(tmp_path):
    cases = Case(num_microbatches=1), SOME[-1], ONCE
    expected = create_state(cases[0])
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        for number, case in enumerate(cases):
            form, following = form_of(case), form_of(cases[(number + 1) % len(cases)])
            saved = form.to_saved(create_state(case))
            checkpointer.save(number, saved, extra={})
            restored = following.from_saved(
                checkpointer.restore(following.abstract_saved)
            )
            jax.tree.map(
                np.testing.assert_array_equal,
                following.to_saved(restored),
                form_of(cases[0]).to_saved(expected),
            )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero.stage": 4}, "zero.stage=4 is not one of 0, 1, 2, 3."),
        ({"zero.min_size": 0}, "zero.min_size=0 must be at least 1."),
        (
            {"zero.group_size": 2},
            "zero.group_size=2 has no meaning for stage=0, which cuts nothing. Leave it"
            " at None, or use stage 1, 2 or 3.",
        ),
        (
            {"zero.stage": 1, "zero.group_size": 2},
            "zero.group_size=2 does not divide dist.data_parallel_size=1.",
        ),
    ],
)
def test_impossible_values_are_refused(fields, message):
    with pytest.raises(resolve.ConfigError, match=re.escape(message)):
        Case(fields=tuple(fields.items())).config  # noqa: B018 - it raises


def test_dims_are_cut_where_they_divide_and_tensor_does_not_cut_them():
    shapes = {
        "blocks": {
            "up": jax.ShapeDtypeStruct((6, 8, 32), "float32"),
            "odd": jax.ShapeDtypeStruct((6, 3, 8), "float32"),
            "bias": jax.ShapeDtypeStruct((6, 32), "float32"),
        },
        "table": jax.ShapeDtypeStruct((64, 6), "float32"),
    }
    specs = {
        "blocks": {"up": P("stage", None, "tensor"), "odd": P("stage"), "bias": P()},
        "table": P(("stage", "tensor")),
    }
    region = make_steps(CUT_EVERY_WAY).region
    config = dataclasses.replace(CUT_EVERY_WAY.config.zero, min_size=32)
    held = zero.build(
        config,
        region,
        shapes=shapes,
        specs=specs,
        dtype="bfloat16",
        formats=CUT_EVERY_WAY.config.precision,
        num_microbatches=2,
    )
    assert held.held(specs) == {
        "blocks": {
            "up": P("stage", "data", "tensor"),
            "odd": P("stage"),  # 24 elements
            "bias": P(None, "data"),
        },
        "table": P(("stage", "tensor"), "data"),
    }
