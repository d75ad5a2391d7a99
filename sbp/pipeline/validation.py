"""Checks a schedule against the rules of `schedule.py`, and names every broken one."""

import collections

from sbp.pipeline.schedule import Kind, Schedule, Task

# A schedule that is wrong is often wrong everywhere: the first few say what is amiss.
_MAX_MESSAGES = 8

# The slot of a tick in which a kind runs; each slot holds one task.
_SLOT = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "weight-gradient",
}


def validate(schedule: Schedule) -> None:
    """Accepts a schedule that an executor can run; every task once, in a sound order.

    * Each microbatch passes forward through each piece once. It passes backward
      through all pieces once, by a full task or by an input and a weight task, or
      through none (forward only).
    * A task that uses what another stage sends runs at least one tick later. The last
      piece's backward task follows its forward task by at least ``head_delay`` ticks,
      a weight task its input task by any number, 0 included.
    * In a tick a stage runs at most one forward, one backward and one weight task.

    Raises:
        ValueError: With all broken rules, the first eight in full.

    Example:
        >>> from sbp.pipeline.schedule import from_ticks
        >>> tick_of = {Task(Kind.FORWARD, 0, 0): 0, Task(Kind.FORWARD, 1, 0): 0}
        >>> mine = from_ticks("mine", tick_of, num_stages=2, num_microbatches=1)
        >>> validate(mine)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: Schedule 'mine' breaks 1 rule:
          The forward of microbatch 0 on stage 1, chunk 0 runs at tick 0, ...
    """
    ticks: dict[Task, int] = {}
    broken = []
    if schedule.head_delay not in (0, 1):
        broken.append(
            f"head_delay={schedule.head_delay} is neither 0 nor 1. Use 0 if the last "
            "stage computes the head, 1 if all stages compute it together."
        )
    for tick, task in schedule.tasks():
        if task in ticks:
            broken.append(
                f"The {task} runs at tick {ticks[task]} and again at tick {tick}. "
                "Run it once."
            )
        ticks[task] = tick
    broken += _missing_or_unknown(schedule, ticks)
    broken += _out_of_order(schedule, ticks)
    broken += _crowded(schedule)
    if broken:
        rules = "1 rule" if len(broken) == 1 else f"{len(broken)} rules"
        more = len(broken) - _MAX_MESSAGES
        lines = broken[:_MAX_MESSAGES] + ([f"... and {more} more."] if more > 0 else [])
        raise ValueError(
            f"Schedule '{schedule.name}' breaks {rules}:\n  " + "\n  ".join(lines)
        )


def _missing_or_unknown(schedule: Schedule, ticks: dict[Task, int]) -> list[str]:
    """Compares the tasks with those that the sizes ask for."""
    expected = set()
    trains = schedule.kinds != {Kind.FORWARD}
    for microbatch in range(schedule.num_microbatches):
        for piece in range(schedule.num_pieces):
            chunk, stage = divmod(piece, schedule.num_stages)
            place = (stage, microbatch, chunk)
            expected.add(Task(Kind.FORWARD, *place))
            split = {
                Task(Kind.BACKWARD_INPUT, *place),
                Task(Kind.BACKWARD_WEIGHT, *place),
            }
            if split & ticks.keys():
                expected |= split
            elif trains:
                expected.add(Task(Kind.BACKWARD, *place))
    missing = [
        f"The {task} is missing. Give it a tick." for task in expected - ticks.keys()
    ]
    unknown = [
        f"The {task} is not part of a step of {schedule.num_stages} stages, "
        f"{schedule.num_chunks} chunks and {schedule.num_microbatches} microbatches "
        "in which each gradient is computed once. Remove it, or raise the sizes."
        for task in ticks.keys() - expected
    ]
    return sorted(missing) + sorted(unknown)


def _out_of_order(schedule: Schedule, ticks: dict[Task, int]) -> list[str]:
    """Compares the ticks of each task and of the one whose result it uses."""
    broken = []
    for task, tick in ticks.items():
        for source, delay in sources(schedule, task):
            if source in ticks and tick < ticks[source] + delay:
                broken.append(
                    f"The {task} runs at tick {tick}, but it uses the result of the "
                    f"{source} at tick {ticks[source]}. Run it at tick "
                    f"{ticks[source] + delay} or later."
                )
    return broken


def sources(schedule: Schedule, task: Task) -> list[tuple[Task, int]]:
    """Returns the tasks whose results ``task`` uses, each with the delay in ticks.

    The delay is 1 where the result is sent to another stage, or to the head and back.
    A source may stand for a gradient in two forms, full and input only; the one that
    does not occur in the schedule is to be ignored.

    Example:
        >>> from sbp.pipeline.builders import build
        >>> schedule = build("gpipe", num_stages=2, num_microbatches=1)
        >>> [(source, delay)] = sources(schedule, Task(Kind.FORWARD, 1, 0))
        >>> str(source), delay
        ('forward of microbatch 0 on stage 0, chunk 0', 1)
    """
    depth = schedule.depth(task)
    if task.kind is Kind.BACKWARD_WEIGHT:
        return [(task._replace(kind=Kind.BACKWARD_INPUT), 0)]
    if task.kind is Kind.FORWARD:
        return [(schedule.at_depth(task, depth - 1), 1)] if depth else []
    if depth == schedule.num_pieces - 1:
        return [(task._replace(kind=Kind.FORWARD), schedule.head_delay)]
    behind = schedule.at_depth(task, depth + 1)
    return [
        (task._replace(kind=Kind.FORWARD), 0),
        (behind._replace(kind=Kind.BACKWARD), 1),
        (behind._replace(kind=Kind.BACKWARD_INPUT), 1),
    ]


def _crowded(schedule: Schedule) -> list[str]:
    """Finds slots that hold more than one task."""
    slots = collections.defaultdict(list)
    for tick, task in schedule.tasks():
        slots[tick, task.stage, _SLOT[task.kind]].append(task)
    return [
        f"Stage {stage} runs {len(tasks)} {slot} tasks at tick {tick}: "
        f"{', '.join(f'the {task}' for task in tasks)}. Run one in each tick."
        for (tick, stage, slot), tasks in slots.items()
        if len(tasks) > 1
    ]
