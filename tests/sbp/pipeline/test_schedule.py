"""The named schedules: sound, as fast as the literature says, and as frugal."""

import itertools
import re
from fractions import Fraction

import pytest

from sbp.pipeline import builders, rehearsal, report, schedule, tables, validation
from sbp.pipeline.schedule import Kind, Task

ONE_CHUNK = ("gpipe", "1f1b", "zero_bubble")
GRID = [
    (num_stages, factor * num_stages + rest, head_delay)
    for num_stages, factor, rest, head_delay in itertools.product(
        (1, 2, 3, 8), (1, 2, 4), (0, 1), (0, 1)
    )
]
CASES = {
    f"{name}_{num_stages}x{num_microbatches}x{num_chunks}_head{head_delay}": (
        name,
        num_stages,
        num_microbatches,
        num_chunks,
        head_delay,
    )
    for num_stages, num_microbatches, head_delay in GRID
    for name, num_chunks in [
        *((name, 1) for name in ONE_CHUNK),
        *(
            ("interleaved_1f1b", v)
            for v in (2, 3)
            if num_microbatches % num_stages == 0
        ),
        *(("forward_only", v) for v in (1, 2)),
    ]
}
# Integer costs, all different, so that no formula holds by chance. The weight gradient
# is no longer than what it may stand in for.
COSTS = report.Costs(forward=3, backward_input=4, backward_weight=2, backward=6)


def build(case):
    name, num_stages, num_microbatches, num_chunks, head_delay = case
    return builders.build(
        name, num_stages, num_microbatches, num_chunks, head_delay=head_delay
    )


def cases_of(*names, where=lambda *sizes: True):
    chosen = {
        key: case
        for key, case in CASES.items()
        if case[0] in names and where(*case[1:])
    }
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen.keys())


@cases_of(*builders.SCHEDULES)
def test_schedule_keeps_every_rule_and_its_tables_run_it(case):
    plan = build(case)
    validation.validate(plan)
    assert rehearsal.rehearse(plan, tables.to_tables(plan)) == list(plan.tasks())


@cases_of(*builders.SCHEDULES)
def test_stages_in_lockstep_lose_no_time(case):
    measured = report.measure(build(case), COSTS)
    assert measured.lockstep_time == pytest.approx(measured.dataflow_time)


def is_without_empty_places(num_stages, num_microbatches, num_chunks, head_delay):
    return num_chunks == 1 or num_microbatches % num_stages == 0


@cases_of(
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "forward_only",
    where=is_without_empty_places,
)
def test_bubble_is_the_one_of_the_literature(case):
    _, num_stages, num_microbatches, num_chunks, _ = case
    measured = report.measure(build(case), COSTS)
    idle = num_stages - 1
    bubble = Fraction(idle, num_chunks * num_microbatches + idle)
    assert measured.bubble_fraction == pytest.approx(float(bubble))
    assert measured.lockstep_bubble_fraction == pytest.approx(float(bubble))


@cases_of("gpipe", "1f1b")
def test_time_is_that_of_microbatches_and_of_filling_the_pipeline(case):
    _, num_stages, num_microbatches, _, _ = case
    time = (num_microbatches + num_stages - 1) * (COSTS.forward + COSTS.backward)
    assert report.measure(build(case), COSTS).lockstep_time == time


@cases_of("zero_bubble")
def test_zero_bubble_takes_the_time_of_the_paper(case):
    _, num_stages, num_microbatches, _, head_delay = case
    idle = num_stages - 1
    time = report.measure(build(case), COSTS).lockstep_time
    one_microbatch = COSTS.forward + COSTS.backward
    filling = COSTS.forward + COSTS.backward_input - COSTS.backward_weight
    paper = num_microbatches * one_microbatch + idle * filling
    plain = (num_microbatches + idle) * one_microbatch
    if num_microbatches >= 2 * idle + head_delay:
        assert time == paper
    else:  # too few to fill all slots that are free
        assert paper <= time <= plain
    assert num_stages == 1 or time < plain


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_zero_bubble_gains_nothing_if_the_weight_task_recomputes_everything(num_stages):
    costs = report.Costs(
        forward=1, backward=3, backward_input=2, backward_weight=3
    )  # the weight task repeats forward and input gradient
    split, plain = (
        report.measure(builders.build(name, num_stages, 4 * num_stages), costs)
        for name in ("zero_bubble", "1f1b")
    )
    assert split.lockstep_time > plain.lockstep_time


@cases_of("1f1b")
def test_1f1b_keeps_two_inputs_per_later_stage_whatever_the_microbatches(case):
    _, num_stages, num_microbatches, _, head_delay = case
    bounds = [2 * (num_stages - stage) - 1 + head_delay for stage in range(num_stages)]
    expected = tuple(min(num_microbatches, bound) for bound in bounds)
    plan = build(case)
    assert report.measure(plan).peak_saved == expected
    assert tables.to_tables(plan).num_saved_slots == expected[0]


@cases_of("gpipe")
def test_gpipe_keeps_every_microbatch(case):
    _, num_stages, num_microbatches, _, head_delay = case
    plan = build(case)
    assert report.measure(plan).peak_saved == (num_microbatches,) * num_stages
    received = num_microbatches if head_delay else min(num_stages - 1, 1)
    assert tables.to_tables(plan).num_cotangent_slots == received


@cases_of("interleaved_1f1b")
def test_interleaving_keeps_a_bounded_number_of_chunk_inputs(case):
    _, num_stages, num_microbatches, num_chunks, head_delay = case
    bounds = [
        num_chunks * num_stages + num_stages - 2 * stage - 1 + head_delay
        for stage in range(num_stages)
    ]
    expected = tuple(min(num_chunks * num_microbatches, bound) for bound in bounds)
    assert report.measure(build(case)).peak_saved == expected


@cases_of("zero_bubble")
def test_zero_bubble_keeps_the_inputs_of_1f1b_and_a_bounded_number_of_gradients(case):
    _, num_stages, num_microbatches, _, head_delay = case
    measured = report.measure(build(case))
    plain = report.measure(build(("1f1b", *case[1:])))
    assert measured.peak_saved == plain.peak_saved
    assert max(measured.peak_aside) <= 2 * (num_stages - 1)


@cases_of("forward_only")
def test_forward_only_saves_nothing_and_every_microbatch_leaves_once(case):
    _, num_stages, num_microbatches, num_chunks, _ = case
    laid_out = tables.to_tables(build(case))
    assert laid_out.num_saved_slots == laid_out.num_cotangent_slots == 0
    leaving = laid_out.ticks.head_microbatch
    assert leaving[leaving >= 0].tolist() == list(range(num_microbatches))
    assert (laid_out.stages.forward_save == -1).all()
    assert (laid_out.ticks.embedding_gradient_microbatch == -1).all()


@cases_of("1f1b", "interleaved_1f1b", "zero_bubble", "forward_only")
def test_what_is_received_is_used_in_the_next_tick(case):
    laid_out = tables.to_tables(build(case))
    assert laid_out.num_activation_slots <= 1
    assert laid_out.num_cotangent_slots <= 1


@cases_of("gpipe", "1f1b", "interleaved_1f1b")
def test_gradients_add_up_in_the_order_of_the_microbatches(case):
    plan = build(case)
    for stage, chunk in itertools.product(
        range(plan.num_stages), range(plan.num_chunks)
    ):
        order = [
            task.microbatch
            for _, task in plan.tasks()
            if task.kind is Kind.BACKWARD and (task.stage, task.chunk) == (stage, chunk)
        ]
        assert order == sorted(order)


@cases_of("1f1b")
def test_1f1b_runs_the_microbatches_of_the_formula(case):
    _, num_stages, num_microbatches, _, head_delay = case
    for tick, task in build(case).tasks():
        delay = {
            Kind.FORWARD: task.stage,
            Kind.BACKWARD: 2 * (num_stages - 1) - task.stage + head_delay,
        }
        assert task.microbatch == tick - delay[task.kind]


def test_one_stage_is_gradient_accumulation():
    plan = builders.build("1f1b", 1, 3)
    assert plan.ticks == tuple(
        ((Task(Kind.FORWARD, 0, m), Task(Kind.BACKWARD, 0, m)),) for m in range(3)
    )


def test_zero_bubble_splits_only_what_it_delays():
    plan = builders.build("zero_bubble", 4, 32)
    split = [t for _, t in plan.tasks() if t.kind is Kind.BACKWARD_WEIGHT]
    assert len(split) == 3 + 4 + 5 + 6  # on the stages 0 to 3
    assert all(len(row) < 3 for ticks in plan.ticks for row in ticks)
    assert plan.kinds == set(Kind)


def test_schedules_are_values():
    first, second = (builders.build("1f1b", 2, 4) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(AttributeError):
        first.name = "other"


@pytest.mark.parametrize("name", builders.SCHEDULES)
def test_large_schedules_are_built_in_reasonable_size(name):
    num_chunks = 4 if name == "interleaved_1f1b" else 1
    plan = builders.build(name, 16, 512, num_chunks)
    laid_out = tables.to_tables(plan)
    assert laid_out.stages.forward_microbatch.nbytes < 2**20


WRONG = {
    "unknown": (
        ("1f1", 2, 4),
        "There is no schedule '1f1'; there are gpipe, 1f1b, interleaved_1f1b, "
        "zero_bubble, forward_only. Did you mean '1f1b'?",
    ),
    "unknown_without_a_hint": (("xyz", 2, 4), "Choose one of these."),
    "no_stage": (
        ("gpipe", 0, 4),
        "Schedule 'gpipe': num_stages=0 is less than 1. Give a positive integer.",
    ),
    "no_microbatch": (("1f1b", 2, 0), "num_microbatches=0 is less than 1."),
    "no_chunk": (("interleaved_1f1b", 2, 4, 0), "num_chunks=0 is less than 1."),
    "wrong_delay": (
        ("gpipe", 2, 4, 1, 2),
        "head_delay=2 is neither 0 nor 1. Use 0 if the last stage computes the head, "
        "1 if all stages compute it together.",
    ),
    "fewer_microbatches_than_stages": (
        ("1f1b", 4, 2),
        "Schedule '1f1b': num_microbatches=2 is fewer than the 4 pipeline stages. "
        "Raise it to at least 4, lower num_stages, or use the schedule 'gpipe'.",
    ),
    "zero_bubble_with_fewer_microbatches_than_stages": (
        ("zero_bubble", 4, 3),
        "Schedule 'zero_bubble': num_microbatches=3 is fewer than the 4 pipeline",
    ),
    "microbatches_that_do_not_divide": (
        ("interleaved_1f1b", 4, 6, 2),
        "Schedule 'interleaved_1f1b': num_microbatches=6 is not divisible by the 4 "
        "pipeline stages, which pass them on in groups of 4. Use 4 or 8 microbatches, "
        "or the schedule '1f1b'.",
    ),
    "fewer_microbatches_than_a_group": (
        ("interleaved_1f1b", 4, 2, 2),
        "Use 4 microbatches, or the schedule '1f1b'.",
    ),
    "nothing_to_interleave": (
        ("interleaved_1f1b", 2, 4, 1),
        "num_chunks=1 leaves nothing to interleave. Use at least 2 chunks per stage, "
        "or the schedule '1f1b'.",
    ),
    "chunks_without_interleaving": (
        ("1f1b", 2, 4, 2),
        "num_chunks=2, but it runs one chunk per stage. Use num_chunks=1, or the "
        "schedule 'interleaved_1f1b'.",
    ),
    "two_rules_at_once": (
        ("1f1b", 4, 2, 3),
        "num_chunks=3, but it runs one chunk per stage. Use num_chunks=1, or the "
        "schedule 'interleaved_1f1b'.\n  num_microbatches=2 is fewer than",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_impossible_schedule_names_numbers_and_remedy(arguments, message):
    name, num_stages, num_microbatches, *rest = arguments
    num_chunks = rest[0] if rest else 1
    head_delay = rest[1] if rest[1:] else 0
    with pytest.raises(ValueError, match=re.escape(message)):
        builders.build(
            name, num_stages, num_microbatches, num_chunks, head_delay=head_delay
        )


@pytest.mark.parametrize(("stage", "tick"), [(2, 0), (-1, 0), (0, -1)])
def test_task_outside_of_the_grid_names_task_and_bounds(stage, tick):
    message = (
        f"Schedule 'mine' puts the forward of microbatch 0 on stage {stage}, chunk 0 "
        f"at tick {tick}, but ticks start at 0 and the stages are 0 to 1. Shift the "
        "ticks, or raise num_stages=2."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule.from_ticks(
            "mine",
            {Task(Kind.FORWARD, stage, 0): tick},
            num_stages=2,
            num_microbatches=1,
        )
