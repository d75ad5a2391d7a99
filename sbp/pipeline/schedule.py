"""Pipeline schedules as data: which stage runs which task at which tick.

Time is counted in *ticks*. In one tick a stage runs at most one forward task, then
at most one backward task, then at most one weight-gradient task; at its end every
stage hands its activation to the next stage and its cotangent to the one before.
What is sent in a tick can be used in the next one, never earlier.

With ``num_chunks`` > 1 the layers are cut into ``num_stages * num_chunks`` pieces.
Piece ``depth`` is chunk ``depth // num_stages`` of stage ``depth % num_stages``, so a
microbatch goes round the ring of stages once per chunk.

A schedule is a value. `builders.py` has the named ones, `validation.py` checks the
rules above on any schedule, `tables.py` turns one into the integers an executor
indexes, `report.py` measures it, `draw.py` draws it. ``docs/pipeline_schedules.md`` has
the pictures.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Kind(enum.StrEnum):
    """What a task computes, in the order in which a tick runs the kinds.

    Attributes:
        FORWARD: Output of the piece from its input.
        BACKWARD: Gradient of the input and of the weights.
        BACKWARD_INPUT: Gradient of the input alone; what the weight gradient needs is
            put aside.
        BACKWARD_WEIGHT: Gradient of the weights alone, from what was put aside.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


class Task(NamedTuple):
    """One microbatch's pass through one piece of the model, in one direction.

    Attributes:
        kind: What is computed.
        stage: Stage that computes it, 0 ... ``num_stages - 1``.
        microbatch: Microbatch it is computed for, 0 ... ``num_microbatches - 1``.
        chunk: Which of the stage's pieces it uses, 0 ... ``num_chunks - 1``.
    """

    kind: Kind
    stage: int
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kind} of microbatch {self.microbatch} "
            f"on stage {self.stage}, chunk {self.chunk}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The tasks of one step, tick by tick and stage by stage.

    Attributes:
        name: Name for messages and pictures.
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Pieces of the model that each stage holds.
        head_delay: Ticks from the forward task of the last piece to its backward task,
            at least: 0 if that backward task computes head and loss itself, 1 if all
            stages compute them together in between.
        ticks: ``ticks[tick][stage]`` holds the tasks in the order they run. An empty
            tuple is an idle stage.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    head_delay: int = 0
    ticks: tuple[tuple[tuple[Task, ...], ...], ...]

    @property
    def num_ticks(self) -> int:
        """Ticks from the first task to the last."""
        return len(self.ticks)

    @property
    def num_pieces(self) -> int:
        """Pieces the layers are cut into: ``num_stages * num_chunks``."""
        return self.num_stages * self.num_chunks

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of task that occur; an executor needs code for these alone."""
        return frozenset(task.kind for _, task in self.tasks())

    def depth(self, task: Task) -> int:
        """Returns the position of the task's piece in the model, 0 at the input."""
        return task.chunk * self.num_stages + task.stage

    def at_depth(self, task: Task, depth: int) -> Task:
        """Returns the same task of another piece of the model."""
        chunk, stage = divmod(depth, self.num_stages)
        return task._replace(stage=stage, chunk=chunk)

    def tasks(self) -> Iterator[tuple[int, Task]]:
        """Yields ``(tick, task)`` in the order of execution."""
        for tick, row in enumerate(self.ticks):
            for task in itertools.chain.from_iterable(row):
                yield tick, task


def from_ticks(
    name: str,
    tick_of: Mapping[Task, int],
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    head_delay: int = 0,
) -> Schedule:
    """Lays out tasks whose ticks are known; the way to write a schedule of one's own.

    Nothing but the range of ticks and stages is checked here, since a caller may want
    to draw what `validate` rejects.

    Args:
        name: Name for messages and pictures.
        tick_of: The tick of every task.
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Pieces per stage.
        head_delay: See :class:`Schedule`.

    Raises:
        ValueError: If a tick is negative or a stage does not exist.

    Example:
        >>> tick_of = {Task(Kind.FORWARD, 0, 0): 0, Task(Kind.FORWARD, 1, 0): 1}
        >>> schedule = from_ticks("mine", tick_of, num_stages=2, num_microbatches=1)
        >>> schedule.num_ticks
        2
        >>> print(schedule.ticks[1][1][0])
        forward of microbatch 0 on stage 1, chunk 0
    """
    num_ticks = 1 + max(tick_of.values(), default=-1)
    grid: list[list[list[Task]]] = [
        [[] for _ in range(num_stages)] for _ in range(num_ticks)
    ]
    for task, tick in tick_of.items():
        if tick < 0 or not 0 <= task.stage < num_stages:
            raise ValueError(
                f"Schedule '{name}' puts the {task} at tick {tick}, but ticks start "
                f"at 0 and the stages are 0 to {num_stages - 1}. Shift the ticks, or "
                f"raise num_stages={num_stages}."
            )
        grid[tick][task.stage].append(task)
    order = list(Kind)
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        head_delay=head_delay,
        ticks=tuple(
            tuple(
                tuple(sorted(cell, key=lambda t: order.index(t.kind))) for cell in row
            )
            for row in grid
        ),
    )
