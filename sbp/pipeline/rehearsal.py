"""Runs the tables of a schedule on labels: what an executor does, without a device.

The interpreter below knows nothing of schedules. It moves labels through the buffers as
an executor moves arrays, and finds any table that would hand a task a wrong value.
"""

from typing import NamedTuple

from sbp.pipeline.lifetimes import BACKWARD_KINDS
from sbp.pipeline.schedule import Kind, Schedule, Task
from sbp.pipeline.tables import StageRows, Tables


class Label(NamedTuple):
    """Stands for an array.

    Attributes:
        what: 'activation', 'saved', 'cotangent' or 'aside'.
        depth: Piece of the model that uses it.
        microbatch: Microbatch it belongs to.
    """

    what: str
    depth: int
    microbatch: int


class _Stage:
    """The buffers of one stage, and what it sends at the end of a tick."""

    def __init__(self, tables: Tables):
        self.activations: list[Label | None] = [None] * tables.num_activation_slots
        self.saved: list[Label | None] = [None] * tables.num_saved_slots
        self.cotangents: list[Label | None] = [None] * tables.num_cotangent_slots
        self.aside: list[Label | None] = [None] * tables.num_aside_slots
        self.sent_forward: Label | None = None
        self.sent_backward: Label | None = None


def rehearse(schedule: Schedule, tables: Tables) -> list[tuple[int, Task]]:
    """Interprets ``tables`` and checks every value that a task reads.

    Args:
        schedule: Where the sizes come from; its ticks are not looked at.
        tables: The tables to try, usually ``to_tables(schedule)``.

    Returns:
        The tasks that were run, as ``(tick, task)`` in the order of execution: equal to
        ``list(schedule.tasks())`` if the tables stand for that schedule.

    Raises:
        ValueError: If a task would read a slot that holds something else.

    Example:
        >>> from sbp.pipeline.builders import build
        >>> from sbp.pipeline.tables import to_tables
        >>> schedule = build("1f1b", num_stages=2, num_microbatches=4)
        >>> rehearse(schedule, to_tables(schedule)) == list(schedule.tasks())
        True
    """
    stages = [_Stage(tables) for _ in range(schedule.num_stages)]
    done: list[tuple[int, Task]] = []
    for tick in range(schedule.num_ticks):
        heads: list[Label | None] = [None] * schedule.num_stages
        for index, stage in enumerate(stages):
            row = _row(tables, tick, index)
            tasks = [
                _forward(schedule, row, index, stage),
                _backward(schedule, row, index, stage),
                _weight(schedule, row, index, stage),
            ]
            done += [(tick, task) for task in tasks if task is not None]
        if schedule.head_delay and tables.ticks.head_microbatch[tick] >= 0:
            leaving = int(tables.ticks.head_microbatch[tick])
            heads[-1] = Label("cotangent", schedule.num_pieces - 1, leaving)
        _transport(tables, tick, stages, heads)
    return done


def _forward(
    schedule: Schedule, row: StageRows[int], index: int, stage: _Stage
) -> Task | None:
    stage.sent_forward = None
    if row.forward_microbatch < 0:
        return None
    task = Task(Kind.FORWARD, index, row.forward_microbatch, row.forward_chunk)
    depth = schedule.depth(task)
    if depth:
        wanted = Label("activation", depth, task.microbatch)
        _expect(task, stage.activations, row.forward_read, wanted)
    if row.forward_save >= 0:
        stage.saved[row.forward_save] = Label("saved", depth, task.microbatch)
    stage.sent_forward = Label("activation", depth + 1, task.microbatch)
    return task


def _backward(
    schedule: Schedule, row: StageRows[int], index: int, stage: _Stage
) -> Task | None:
    stage.sent_backward = None
    if row.backward_microbatch < 0:
        return None
    kind = BACKWARD_KINDS[row.backward_kind]
    task = Task(kind, index, row.backward_microbatch, row.backward_chunk)
    depth = schedule.depth(task)
    wanted = Label("saved", depth, task.microbatch)
    _expect(task, stage.saved, row.backward_saved, wanted)
    if depth < schedule.num_pieces - 1 or schedule.head_delay:
        wanted = Label("cotangent", depth, task.microbatch)
        _expect(task, stage.cotangents, row.backward_read, wanted)
    if kind is Kind.BACKWARD_INPUT:
        label = Label("aside", depth, task.microbatch)
        stage.aside[row.backward_put_aside] = label
    stage.sent_backward = Label("cotangent", depth - 1, task.microbatch)
    return task


def _weight(
    schedule: Schedule, row: StageRows[int], index: int, stage: _Stage
) -> Task | None:
    if row.weight_microbatch < 0:
        return None
    task = Task(Kind.BACKWARD_WEIGHT, index, row.weight_microbatch, row.weight_chunk)
    wanted = Label("aside", schedule.depth(task), task.microbatch)
    _expect(task, stage.aside, row.weight_read, wanted)
    return task


def _transport(
    tables: Tables, tick: int, stages: list[_Stage], heads: list[Label | None]
) -> None:
    """Moves activations one stage on and cotangents one stage back, round the ring."""
    for index, stage in enumerate(stages):
        row = _row(tables, tick, index)
        if row.activation_store >= 0:
            received = stages[index - 1].sent_forward
            stage.activations[row.activation_store] = received
        if row.cotangent_store >= 0:
            received = stages[(index + 1) % len(stages)].sent_backward
            stage.cotangents[row.cotangent_store] = received
        if row.head_store >= 0:
            stage.cotangents[row.head_store] = heads[index]


def _row(tables: Tables, tick: int, stage: int) -> StageRows[int]:
    return StageRows(*(int(column[tick, stage]) for column in tables.stages))


def _expect(task: Task, buffer: list[Label | None], slot: int, wanted: Label) -> None:
    found = buffer[slot] if 0 <= slot < len(buffer) else None
    if found != wanted:
        raise ValueError(
            f"The {task} reads slot {slot} of {len(buffer)} and finds {found}, but "
            f"it needs {wanted}. Store that value there, or keep it from being "
            "overwritten."
        )
