"""A schedule as dense integer tables, which an executor indexes tick by tick.

An executor that interprets these tables runs every schedule. Each stage keeps four
buffers, whose slots are given out here so that nothing is overwritten while it is still
needed, and so that there are as few as the schedule allows:

==============  =========================  ==================  ======================
buffer          holds                      written             read
==============  =========================  ==================  ======================
activations     outputs received           at the end of the   by the forward task
                                           tick that sent it
saved           what the backward task     by the forward      by the backward task
                needs: the piece's input,  task
                or its residuals
cotangents      gradients received, from   at the end of the   by the backward task
                the next piece or the      tick that sent it
                head
put aside       what the weight gradient   by the              by the
                needs                      backward_input      backward_weight task
                                           task
==============  =========================  ==================  ======================

One tick of stage ``s``, with ``row`` the entries of that tick::

    if row.forward_microbatch >= 0:
        x = embedding if row.forward_read < 0 else activations[row.forward_read]
        y = forward(x), with the weights of chunk row.forward_chunk
        if row.forward_save >= 0: saved[row.forward_save] = x
    if head_delay: the head of head_microbatch, on all stages, gives its cotangent
    if row.backward_microbatch >= 0:
        backward, full or input only (row.backward_kind), from
        saved[row.backward_saved] and cotangents[row.backward_read]
        (row.backward_read < 0: computes the head itself)
        if row.backward_put_aside >= 0: aside[row.backward_put_aside] = ...
    if row.weight_microbatch >= 0: from aside[row.weight_read]
    received = y of the stage before (ring)
    if row.activation_store >= 0: activations[row.activation_store] = received
    received = gradient of the stage behind (ring)
    if row.cotangent_store >= 0: cotangents[row.cotangent_store] = received
    if row.head_store >= 0: cotangents[row.head_store] = cotangent of the head

`rehearsal.py` is this interpreter in Python, on labels instead of arrays.
"""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from sbp.pipeline.lifetimes import BACKWARD_KINDS, Lifetime, assign_slots, lifetimes
from sbp.pipeline.schedule import Kind, Schedule
from sbp.pipeline.validation import validate

Entry = TypeVar("Entry")
"""int32 array, whole or indexed, or an int."""


class StageRows(NamedTuple, Generic[Entry]):
    """What each stage does in each tick: int32 arrays of shape (num_ticks, num_stages).

    -1 means none, everywhere. A NamedTuple of arrays is a pytree, so that
    ``jax.tree.map(lambda column: column[:, stage], rows)`` gives a stage's own rows and
    `lax.scan` walks through them.

    Attributes:
        forward_microbatch: Microbatch of the forward task.
        forward_chunk: Chunk of the forward task.
        forward_read: Slot of ``activations`` with its input; none if the input comes
            from the embedding.
        forward_save: Slot of ``saved`` it fills; none if nothing goes backward.
        backward_kind: Index into :data:`BACKWARD_KINDS`.
        backward_microbatch: Microbatch of the backward task.
        backward_chunk: Chunk of the backward task.
        backward_saved: Slot of ``saved`` it reads.
        backward_read: Slot of ``cotangents`` it reads; none if it computes the head.
        backward_put_aside: Slot it fills for the weight task; none if it is full.
        weight_microbatch: Microbatch of the weight task.
        weight_chunk: Chunk of the weight task.
        weight_read: Slot of what was put aside for it.
        activation_store: Slot of ``activations`` for the output that arrives at the
            end of this tick; none if what arrives is of no use.
        cotangent_store: Slot of ``cotangents`` for the gradient that arrives from the
            stage behind at the end of this tick.
        head_store: Slot of ``cotangents`` for the gradient that the head computes in
            this tick; only ever on the last stage, and none if ``head_delay`` is 0.
    """

    forward_microbatch: Entry
    forward_chunk: Entry
    forward_read: Entry
    forward_save: Entry
    backward_kind: Entry
    backward_microbatch: Entry
    backward_chunk: Entry
    backward_saved: Entry
    backward_read: Entry
    backward_put_aside: Entry
    weight_microbatch: Entry
    weight_chunk: Entry
    weight_read: Entry
    activation_store: Entry
    cotangent_store: Entry
    head_store: Entry


class TickRows(NamedTuple, Generic[Entry]):
    """What all stages do together in each tick: int32 arrays of shape (num_ticks,).

    For a vocabulary that is split over the stages. -1 means none.

    Attributes:
        embedding_microbatch: Microbatch that enters the first piece in this tick.
        head_microbatch: Microbatch that leaves the last piece in this tick, whose head
            can be computed as soon as its forward task is done.
        embedding_gradient_microbatch: Microbatch whose gradient leaves the first piece
            in this tick.
    """

    embedding_microbatch: Entry
    head_microbatch: Entry
    embedding_gradient_microbatch: Entry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A schedule in the form an executor runs.

    Attributes:
        stages: Per tick and stage.
        ticks: Per tick.
        num_activation_slots: Slots of ``activations`` that the busiest stage needs.
        num_saved_slots: The same of ``saved``; 0 if nothing goes backward.
        num_cotangent_slots: The same of ``cotangents``.
        num_aside_slots: The same of what is put aside; 0 if no gradient is split.
    """

    stages: StageRows[np.ndarray]
    ticks: TickRows[np.ndarray]
    num_activation_slots: int
    num_saved_slots: int
    num_cotangent_slots: int
    num_aside_slots: int


def to_tables(schedule: Schedule) -> Tables:
    """Turns a schedule into tables.

    Raises:
        ValueError: If the schedule breaks a rule, see `validate`.

    Example:
        >>> from sbp.pipeline.builders import build
        >>> tables = to_tables(build("1f1b", num_stages=2, num_microbatches=4))
        >>> tables.num_saved_slots
        3
        >>> tables.stages.forward_microbatch.T
        array([[ 0,  1,  2,  3, -1, -1],
               [-1,  0,  1,  2,  3, -1]], dtype=int32)
        >>> tables.stages.backward_microbatch.T
        array([[-1, -1,  0,  1,  2,  3],
               [-1,  0,  1,  2,  3, -1]], dtype=int32)
    """
    validate(schedule)
    stages = StageRows(
        *(
            np.full((schedule.num_ticks, schedule.num_stages), -1, np.int32)
            for _ in StageRows._fields
        )
    )
    ticks = TickRows(
        *(np.full(schedule.num_ticks, -1, np.int32) for _ in TickRows._fields)
    )
    _fill_tasks(schedule, stages, ticks)
    buffers = lifetimes(schedule)
    tables = Tables(
        stages=stages,
        ticks=ticks,
        num_activation_slots=_fill_activations(stages, buffers.activations),
        num_saved_slots=_fill_saved(stages, buffers.saved),
        num_cotangent_slots=_fill_cotangents(stages, buffers.cotangents),
        num_aside_slots=_fill_aside(stages, buffers.aside),
    )
    for column in (*stages, *ticks):
        column.setflags(write=False)
    return tables


def _fill_tasks(
    schedule: Schedule, rows: StageRows[np.ndarray], ticks: TickRows[np.ndarray]
) -> None:
    """Writes which task runs when."""
    last = schedule.num_pieces - 1
    for tick, task in schedule.tasks():
        at, depth = (tick, task.stage), schedule.depth(task)
        if task.kind is Kind.FORWARD:
            rows.forward_microbatch[at] = task.microbatch
            rows.forward_chunk[at] = task.chunk
            if depth == 0:
                ticks.embedding_microbatch[tick] = task.microbatch
            if depth == last:
                ticks.head_microbatch[tick] = task.microbatch
        elif task.kind is Kind.BACKWARD_WEIGHT:
            rows.weight_microbatch[at] = task.microbatch
            rows.weight_chunk[at] = task.chunk
        else:
            rows.backward_kind[at] = BACKWARD_KINDS.index(task.kind)
            rows.backward_microbatch[at] = task.microbatch
            rows.backward_chunk[at] = task.chunk
            if depth == 0:
                ticks.embedding_gradient_microbatch[tick] = task.microbatch


def _fill_activations(rows: StageRows[np.ndarray], spans: list[Lifetime]) -> int:
    slots, num_slots = assign_slots(spans)
    for span, slot in slots.items():
        rows.activation_store[span.first - 1, span.stage] = slot
        rows.forward_read[span.last, span.stage] = slot
    return num_slots


def _fill_saved(rows: StageRows[np.ndarray], spans: list[Lifetime]) -> int:
    slots, num_slots = assign_slots(spans)
    for span, slot in slots.items():
        rows.forward_save[span.first, span.stage] = slot
        rows.backward_saved[span.last, span.stage] = slot
    return num_slots


def _fill_cotangents(rows: StageRows[np.ndarray], spans: list[Lifetime]) -> int:
    slots, num_slots = assign_slots(spans)
    for span, slot in slots.items():
        from_head = span.written.kind is Kind.FORWARD
        store = rows.head_store if from_head else rows.cotangent_store
        store[span.first - 1, span.stage] = slot
        rows.backward_read[span.last, span.stage] = slot
    return num_slots


def _fill_aside(rows: StageRows[np.ndarray], spans: list[Lifetime]) -> int:
    slots, num_slots = assign_slots(spans)
    for span, slot in slots.items():
        rows.backward_put_aside[span.first, span.stage] = slot
        rows.weight_read[span.last, span.stage] = slot
    return num_slots
