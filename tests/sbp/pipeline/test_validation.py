"""The validator finds every kind of mistake, and the rehearsal every wrong slot."""

import dataclasses
import re

import numpy as np
import pytest

from sbp.pipeline import builders, rehearsal, tables, validation
from sbp.pipeline.schedule import Kind, Task, from_ticks

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
GOOD = {
    Task(FORWARD, 0, 0): 0,
    Task(FORWARD, 1, 0): 1,
    Task(FORWARD, 0, 1): 2,
    Task(FORWARD, 1, 1): 4,
    Task(BACKWARD, 1, 0): 1,
    Task(BACKWARD, 0, 0): 5,
    Task(SPLIT[0], 1, 1): 4,
    Task(SPLIT[1], 1, 1): 7,
    Task(SPLIT[0], 0, 1): 6,
    Task(SPLIT[1], 0, 1): 6,
}


def lay_out(tick_of, **changes):
    sizes = {"num_stages": 2, "num_microbatches": 2, "head_delay": 0} | changes
    return from_ticks("mine", tick_of, **sizes)


def test_irregular_schedule_with_waits_and_split_gradients_runs():
    plan = lay_out(GOOD)
    laid_out = tables.to_tables(plan)
    assert rehearsal.rehearse(plan, laid_out) == list(plan.tasks())
    assert laid_out.num_saved_slots == 2
    assert laid_out.num_activation_slots == 1
    assert laid_out.num_cotangent_slots == 2  # one waits while the next arrives
    assert laid_out.num_aside_slots == 1


def without(task):
    return {key: tick for key, tick in GOOD.items() if key != task}


WRONG = {
    "missing": (
        lay_out(without(Task(FORWARD, 1, 1))),
        "The forward of microbatch 1 on stage 1, chunk 0 is missing. Give it a tick.",
    ),
    "missing_weight_gradient": (
        lay_out(without(Task(SPLIT[1], 0, 1))),
        "The backward_weight of microbatch 1 on stage 0, chunk 0 is missing.",
    ),
    "gradient_computed_twice": (
        lay_out(GOOD | {Task(BACKWARD, 0, 1): 8}),
        "The backward of microbatch 1 on stage 0, chunk 0 is not part of a step of 2 "
        "stages, 1 chunks and 2 microbatches in which each gradient is computed once. "
        "Remove it, or raise the sizes.",
    ),
    "unknown_microbatch": (
        lay_out(GOOD | {Task(FORWARD, 0, 2): 7}),
        "The forward of microbatch 2 on stage 0, chunk 0 is not part of a step",
    ),
    "used_in_the_tick_it_is_sent": (
        lay_out(GOOD | {Task(FORWARD, 1, 1): 2}),
        "The forward of microbatch 1 on stage 1, chunk 0 runs at tick 2, but it uses "
        "the result of the forward of microbatch 1 on stage 0, chunk 0 at tick 2. Run "
        "it at tick 3 or later.",
    ),
    "backward_before_forward": (
        lay_out(GOOD | {Task(BACKWARD, 1, 0): 0}),
        "The backward of microbatch 0 on stage 1, chunk 0 runs at tick 0, but it uses "
        "the result of the forward of microbatch 0 on stage 1, chunk 0 at tick 1. Run "
        "it at tick 1 or later.",
    ),
    "backward_in_the_tick_of_the_head": (
        lay_out(GOOD, head_delay=1),
        "The backward of microbatch 0 on stage 1, chunk 0 runs at tick 1, but it uses "
        "the result of the forward of microbatch 0 on stage 1, chunk 0 at tick 1. Run "
        "it at tick 2 or later.",
    ),
    "cotangent_used_in_the_tick_it_is_sent": (
        lay_out(GOOD | {Task(SPLIT[0], 0, 1): 4}),
        "The backward_input of microbatch 1 on stage 0, chunk 0 runs at tick 4, but "
        "it uses the result of the backward_input of microbatch 1 on stage 1, chunk 0",
    ),
    "weight_before_input": (
        lay_out(GOOD | {Task(SPLIT[1], 0, 1): 5}),
        "The backward_weight of microbatch 1 on stage 0, chunk 0 runs at tick 5, but "
        "it uses the result of the backward_input",
    ),
    "unknown_head_delay": (
        lay_out(GOOD, head_delay=-1),
        "head_delay=-1 is neither 0 nor 1. Use 0 if the last stage computes the head, "
        "1 if all stages compute it together.",
    ),
    "two_forward_tasks_at_once": (
        lay_out(GOOD | {Task(FORWARD, 0, 1): 0, Task(FORWARD, 0, 0): 0}),
        "Stage 0 runs 2 forward tasks at tick 0: the forward of microbatch 0 on stage "
        "0, chunk 0, the forward of microbatch 1 on stage 0, chunk 0. Run one in each "
        "tick.",
    ),
    "two_backward_tasks_at_once": (
        lay_out(GOOD | {Task(BACKWARD, 0, 0): 6}),
        "Stage 0 runs 2 backward tasks at tick 6: the backward of microbatch 0",
    ),
}


@pytest.mark.parametrize(("plan", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_schedule_names_tasks_ticks_and_remedy(plan, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        validation.validate(plan)
    assert str(error.value).startswith("Schedule 'mine' breaks ")
    with pytest.raises(ValueError, match=re.escape(message)):
        tables.to_tables(plan)


def test_task_in_two_ticks_is_found():
    plan = lay_out(GOOD)
    twice = dataclasses.replace(plan, ticks=(*plan.ticks, plan.ticks[0]))
    message = (
        "The forward of microbatch 0 on stage 0, chunk 0 runs at tick 0 and again at "
        "tick 8. Run it once."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.validate(twice)


def test_many_broken_rules_are_counted_and_the_first_listed():
    plan = builders.build("1f1b", 4, 8)
    emptied = dataclasses.replace(plan, ticks=plan.ticks[:3])
    with pytest.raises(ValueError, match=re.escape("... and ")) as error:
        validation.validate(emptied)
    first, *listed = str(error.value).splitlines()
    missing = len(list(plan.tasks())) - len(list(emptied.tasks()))
    forward_only = 4 * 8  # without a backward task the step counts as an evaluation
    assert first == f"Schedule '1f1b' breaks {missing - forward_only} rules:"
    assert len(listed) == 9


def change(laid_out, column, at, value):
    array = np.array(getattr(laid_out.stages, column))
    array[at] = value
    return dataclasses.replace(
        laid_out, stages=laid_out.stages._replace(**{column: array})
    )


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("forward_save", (1, 0), 0, "finds Label(what='saved', depth=0, microbatch=1)"),
        ("forward_read", (1, 1), -1, "reads slot -1 of 1 and finds None"),
        ("activation_store", (1, 1), -1, "needs Label(what='activation', depth=1"),
        ("cotangent_store", (1, 0), -1, "needs Label(what='cotangent', depth=0"),
        ("backward_saved", (2, 0), 2, "but it needs Label(what='saved', depth=0"),
        ("backward_put_aside", (4, 1), 0, "needs Label(what='aside', depth=1"),
    ],
)
def test_rehearsal_finds_a_wrong_slot(column, at, value, message):
    plan = builders.build("zero_bubble", 2, 4)
    broken = change(tables.to_tables(plan), column, at, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        rehearsal.rehearse(plan, broken)


def test_rehearsal_finds_a_head_whose_gradient_is_not_stored():
    plan = builders.build("gpipe", 2, 4, head_delay=1)
    laid_out = tables.to_tables(plan)
    assert laid_out.stages.head_store[:, 1].tolist() == [-1, 0, 1, 2, 3] + [-1] * 5
    broken = change(laid_out, "head_store", (2, 1), 0)
    with pytest.raises(ValueError, match="needs Label"):
        rehearsal.rehearse(plan, broken)


def test_tables_cannot_be_written():
    laid_out = tables.to_tables(builders.build("1f1b", 2, 4))
    with pytest.raises(ValueError, match="read-only"):
        laid_out.stages.forward_microbatch[0, 0] = 3
