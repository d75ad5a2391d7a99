"""Every schedule gives the gradients of one device."""

import jax
import jax.numpy as jnp
import pytest

from sbp import pipeline
from sbp.pipeline import Kind, Task
from sbp.pipeline.layers import Stack
from tests import hlo
from tests.sbp.pipeline import toy


def make_pipelined(name, layers, num_microbatches, num_chunks=1, *, is_shared=True):
    num_stages = len(layers) // num_chunks
    return toy.Pipelined(
        pipeline.build(name, num_stages, num_microbatches, num_chunks, head_delay=1),
        pipeline.assign_layers(
            layers,
            num_layers=sum(layers),
            num_stages=num_stages,
            num_chunks=num_chunks,
        ),
        is_shared,
    )


def one_by_one(num_stages, num_microbatches, *, is_split):
    """One microbatch at a time; all weight gradients at the end, if they are split."""
    tick_of, per_microbatch = {}, 2 * num_stages
    for m in range(num_microbatches):
        for s in range(num_stages):
            start = m * per_microbatch
            tick_of[Task(Kind.FORWARD, s, m)] = start + s
            backward = Kind.BACKWARD_INPUT if is_split else Kind.BACKWARD
            tick_of[Task(backward, s, m)] = start + per_microbatch - 1 - s
            if is_split:
                last = num_microbatches * per_microbatch
                tick_of[Task(Kind.BACKWARD_WEIGHT, s, m)] = last + m
    return pipeline.from_ticks(
        "one_by_one",
        tick_of,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        head_delay=1,
    )


CASES = {
    "gpipe_with_few_microbatches": make_pipelined("gpipe", (1, 1, 1), 2),
    "1f1b": make_pipelined("1f1b", (2, 2, 2, 2), 8),
    "1f1b_head_on_last_stage": make_pipelined("1f1b", (1, 2), 4, is_shared=False),
    "1f1b_uneven": make_pipelined("1f1b", (1, 3, 2), 3),
    "interleaved": make_pipelined("interleaved_1f1b", (1, 1, 1, 1), 4, 2),
    "interleaved_uneven": make_pipelined("interleaved_1f1b", (1, 2, 2, 1, 2, 1), 2, 3),
    "zero_bubble": make_pipelined("zero_bubble", (2, 2, 2, 2), 9),
    "zero_bubble_uneven": make_pipelined("zero_bubble", (1, 3, 2), 5),
    "own": toy.Pipelined(
        one_by_one(2, 3, is_split=False), pipeline.assign_balanced(2, 2)
    ),
    "own_split": toy.Pipelined(
        one_by_one(2, 3, is_split=True), pipeline.assign_balanced(2, 2)
    ),
}


@pytest.mark.parametrize("pipelined", CASES.values(), ids=CASES)
def test_gradients_are_those_of_one_device(pipelined):
    sizes = pipelined.assignment.num_layers, pipelined.schedule.num_microbatches
    arguments = toy.make(*sizes)
    found = pipelined.gradients(*arguments)
    toy.assert_close(found, toy.gradients_of_one_device(*arguments))


@pytest.mark.parametrize("name", ["1f1b_uneven", "interleaved", "own_split"])
def test_losses_without_backward_pass_are_those_of_one_device(name):
    pipelined = CASES[name]
    sizes = pipelined.assignment.num_layers, pipelined.schedule.num_microbatches
    arguments = toy.make(*sizes)
    expected, _, _ = toy.gradients_of_one_device(*arguments)
    toy.assert_close(pipelined.losses(*arguments), expected)


def head(outer, x, microbatch):
    scores = x @ outer["table"].T
    return {"scores": scores, "best": scores.argmax(-1), "mask": microbatch["mask"]}


@pytest.mark.parametrize("name", ["1f1b_head_on_last_stage", "interleaved_uneven"])
def test_outputs_are_those_of_one_device_by_microbatch(name):
    pipelined = CASES[name]
    sizes = pipelined.assignment.num_layers, pipelined.schedule.num_microbatches
    blocks, outer, microbatches = toy.make(*sizes)
    found = pipelined.outputs(blocks, outer, microbatches, head)
    expected = jax.vmap(
        lambda part: head(outer, toy.encode(blocks, outer, part), part)
    )(microbatches)
    toy.assert_close(found["scores"], expected["scores"])
    assert found["best"].dtype == expected["best"].dtype
    assert jnp.array_equal(found["best"], expected["best"])
    assert jnp.array_equal(found["mask"], microbatches["mask"])


def lower(pipelined, microbatch_size=2):
    sizes = pipelined.assignment.num_layers, pipelined.schedule.num_microbatches
    blocks, outer, microbatches = toy.make(*sizes, microbatch_size)
    return pipelined.gradients_program().lower(
        pipelined.arrange(blocks), outer, microbatches
    )


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble"])
def test_two_permutations_per_tick_and_nothing_else_over_stages(name):
    pipelined = CASES[name]
    found = hlo.collectives(lower(pipelined).compile().as_text())
    [tick_loop] = {c.loops for c in found if c.name == "collective-permute"}
    assert [loop.trips for loop in tick_loop] == [pipelined.schedule.num_ticks]
    in_loop = [c for c in found if c.loops]
    permutes = [c for c in in_loop if c.name == "collective-permute"]
    assert len(permutes) == 2
    assert all(c.conditionals == 0 for c in permutes)
    # Of the head: its input and that one's gradient, in ticks that have a head.
    sums = [c for c in in_loop if c.name == "all-reduce"]
    assert len(sums) == len(in_loop) - 2
    assert all(c.conditionals == 1 for c in sums)


def test_weight_tasks_leave_no_code_where_a_schedule_has_none(monkeypatch):
    def unexpected(*_):
        raise AssertionError("traced a task that the schedule does not have")

    monkeypatch.setattr(Stack, "backward_input", unexpected)
    monkeypatch.setattr(Stack, "backward_weight", unexpected)
    lower(CASES["1f1b_uneven"])
    with pytest.raises(AssertionError, match="does not have"):
        lower(CASES["zero_bubble_uneven"])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble"])
def test_buffers_are_changed_in_place(name):
    microbatch_size = 128
    text = lower(CASES[name], microbatch_size).compile().as_text()
    sizes = [num_bytes for num_bytes, loops in hlo.copies(text) if loops]
    num_layers = CASES[name].assignment.max_layers_per_piece
    one_slot = 4 * num_layers * microbatch_size * max(toy.D, toy.F)
    assert max(sizes) <= one_slot


def test_memory_depends_on_the_schedule_but_under_1f1b_not_on_microbatches():
    few, many, gpipe = (
        lower(make_pipelined(name, (2, 2), number), microbatch_size=512)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for name, number in [("1f1b", 4), ("1f1b", 32), ("gpipe", 32)]
    )
    assert many == pytest.approx(few, rel=0.02)
    assert many < gpipe / 2
