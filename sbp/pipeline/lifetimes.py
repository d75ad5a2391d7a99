"""How long each stage must keep what, and in how few slots of a buffer that goes.

The buffers are those of `tables.py`.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from sbp.pipeline.schedule import Kind, Schedule, Task

BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The kinds that send a gradient to the piece before; one of them runs per piece."""


class Lifetime(NamedTuple):
    """The ticks during which a task's result occupies a slot, both included.

    Attributes:
        first: Tick from which the slot is taken.
        last: Tick of the task that reads it.
        stage: Stage whose buffer it is.
        written: Task that computes it.
        read: Task that reads it.
    """

    first: int
    last: int
    stage: int
    written: Task
    read: Task


class Lifetimes(NamedTuple):
    """The lifetimes in each of the four buffers."""

    activations: list[Lifetime]
    saved: list[Lifetime]
    cotangents: list[Lifetime]
    aside: list[Lifetime]


def lifetimes(schedule: Schedule) -> Lifetimes:
    """Returns when each buffer of each stage is occupied, and by what.

    What is received lies in its slot from the tick after it was sent until the tick of
    its reader. What is saved or put aside lies there from the tick of its writer, since
    a tick runs the forward task before the backward and the weight task.
    """
    tick_of = {task: tick for tick, task in schedule.tasks()}
    last = schedule.num_pieces - 1
    found = Lifetimes([], [], [], [])

    def record(where: list[Lifetime], written: Task, read: Task, delay: int) -> None:
        span = (tick_of[written] + delay, tick_of[read])
        where.append(Lifetime(*span, read.stage, written, read))

    for task in tick_of:
        depth = schedule.depth(task)
        if task.kind is Kind.FORWARD and depth:
            source = schedule.at_depth(task, depth - 1)
            record(found.activations, source, task, 1)
        elif task.kind is Kind.BACKWARD_WEIGHT:
            record(found.aside, task._replace(kind=Kind.BACKWARD_INPUT), task, 0)
        elif task.kind in BACKWARD_KINDS:
            forward = task._replace(kind=Kind.FORWARD)
            record(found.saved, forward, task, 0)
            if depth < last:
                behind = schedule.at_depth(task, depth + 1)
                candidates = (behind._replace(kind=kind) for kind in BACKWARD_KINDS)
                source = next(c for c in candidates if c in tick_of)
                record(found.cotangents, source, task, 1)
            elif schedule.head_delay:
                record(found.cotangents, forward, task, 1)
    return found


def assign_slots(spans: Iterable[Lifetime]) -> tuple[dict[Lifetime, int], int]:
    """Gives overlapping lifetimes of one stage different slots, as few as possible.

    Returns:
        The slot of each lifetime, and the number of slots of the busiest stage.

    Example:
        >>> task = Task(Kind.FORWARD, 0, 0)
        >>> spans = [Lifetime(first, first + 1, 0, task, task) for first in range(3)]
        >>> slots, num_slots = assign_slots(spans)
        >>> list(slots.values()), num_slots
        ([0, 1, 0], 2)
    """
    slots: dict[Lifetime, int] = {}
    busy: dict[int, list[tuple[int, int]]] = {}  # stage -> heap of (last tick, slot)
    free: dict[int, list[int]] = {}
    num_slots = 0
    for span in sorted(spans):
        taken, unused = busy.setdefault(span.stage, []), free.setdefault(span.stage, [])
        while taken and taken[0][0] < span.first:
            heapq.heappush(unused, heapq.heappop(taken)[1])
        slot = heapq.heappop(unused) if unused else len(taken)
        heapq.heappush(taken, (span.last, slot))
        slots[span] = slot
        num_slots = max(num_slots, slot + 1)
    return slots, num_slots
