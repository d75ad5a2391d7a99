"""What a schedule costs: time, bubble and memory.

Two clocks are compared. With the *dataflow* clock a stage starts a task as soon as its
inputs are there and the task before is done, which is how schedules are analyzed in the
literature. With the *lockstep* clock all stages end a tick together, so a tick lasts as
long as its busiest stage: that is how one XLA program runs a schedule. The named
schedules are laid out so that both agree.
"""

import collections
import dataclasses
from collections.abc import Iterable

from sbp.pipeline.lifetimes import Lifetime, lifetimes
from sbp.pipeline.schedule import Kind, Schedule, Task
from sbp.pipeline.validation import sources


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of a task on all layers of one stage, in any unit.

    A task on one of several chunks takes its share. A backward task that recomputes
    the forward pass costs that much more.

    Attributes:
        forward: A forward task.
        backward: A full backward task.
        backward_input: The input gradient alone.
        backward_weight: The weight gradient alone.

    Raises:
        ValueError: If a cost is not positive.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def __post_init__(self) -> None:
        for kind, cost in dataclasses.asdict(self).items():
            if not cost > 0:
                raise ValueError(
                    f"The cost of a {kind} task is {cost}, but every task takes time. "
                    "Give a positive number."
                )

    def of(self, task: Task) -> float:
        """Returns the cost of the task on a whole stage."""
        match task.kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD:
                return self.backward
            case Kind.BACKWARD_INPUT:
                return self.backward_input
            case Kind.BACKWARD_WEIGHT:
                return self.backward_weight


RESIDUALS_KEPT = Costs()
"""Nothing is computed twice: forward, input and weight gradient cost the same."""

STAGE_RECOMPUTED = Costs(backward=3.0, backward_input=2.0)
"""The backward task first repeats the forward task, and puts aside what it found."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Time in the units of :class:`Costs`, memory in pieces' inputs.

    Attributes:
        work_time: Time a stage is busy, the mean over the stages.
        dataflow_time: Time of the step if stages wait for their inputs alone.
        lockstep_time: Time of the step if all stages end each tick together.
        peak_saved: Per stage, the most inputs (or residuals) of pieces that are alive
            at once.
        peak_aside: Per stage, the most weight gradients that wait at once.
    """

    work_time: float
    dataflow_time: float
    lockstep_time: float
    peak_saved: tuple[int, ...]
    peak_aside: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """Part of the step that a stage is idle, by the dataflow clock."""
        return 1 - self.work_time / self.dataflow_time

    @property
    def lockstep_bubble_fraction(self) -> float:
        """Part of the step that a stage is idle, by the lockstep clock."""
        return 1 - self.work_time / self.lockstep_time


def measure(schedule: Schedule, costs: Costs = RESIDUALS_KEPT) -> Report:
    """Returns time, bubble and peak memory of a schedule that `validate` accepts.

    Args:
        schedule: What to measure.
        costs: Time of each kind of task; transport costs nothing.

    Example:
        >>> from sbp.pipeline.builders import build
        >>> report = measure(build("1f1b", num_stages=4, num_microbatches=8))
        >>> report.lockstep_time, report.peak_saved
        (33.0, (7, 5, 3, 1))
        >>> f"{report.bubble_fraction:.4f} = {3 / (8 + 3):.4f}"
        '0.2727 = 0.2727'
    """
    work = sum(costs.of(task) for _, task in schedule.tasks())
    buffers = lifetimes(schedule)
    return Report(
        work_time=work / schedule.num_pieces,
        dataflow_time=_dataflow_time(schedule, costs),
        lockstep_time=sum(_whole_ticks(schedule, costs)) / schedule.num_chunks,
        peak_saved=_peaks(schedule, buffers.saved),
        peak_aside=_peaks(schedule, buffers.aside),
    )


def tick_times(schedule: Schedule, costs: Costs = RESIDUALS_KEPT) -> list[float]:
    """Returns how long each tick lasts: as long as its busiest stage.

    Example:
        >>> from sbp.pipeline.builders import build
        >>> tick_times(build("1f1b", num_stages=2, num_microbatches=3))
        [1.0, 3.0, 3.0, 3.0, 2.0]
    """
    return [time / schedule.num_chunks for time in _whole_ticks(schedule, costs)]


def _whole_ticks(schedule: Schedule, costs: Costs) -> list[float]:
    """Times if every task ran on all layers of a stage: no rounding by the chunks."""
    return [
        max(sum(costs.of(task) for task in cell) for cell in row)
        for row in schedule.ticks
    ]


def _dataflow_time(schedule: Schedule, costs: Costs) -> float:
    """Ends each task as early as its inputs and its stage's order of tasks allow."""
    end: dict[Task, float] = {}
    free = [0.0] * schedule.num_stages
    for _, task in schedule.tasks():
        ready = [end[source] for source, _ in sources(schedule, task) if source in end]
        start = max(free[task.stage], *ready, 0.0)
        end[task] = start + costs.of(task)
        free[task.stage] = end[task]
    return max(end.values()) / schedule.num_chunks


def _peaks(schedule: Schedule, spans: Iterable[Lifetime]) -> tuple[int, ...]:
    """Counts the lifetimes that overlap, stage by stage."""
    peaks = []
    changes = [collections.Counter[int]() for _ in range(schedule.num_stages)]
    for span in spans:
        changes[span.stage][span.first] += 1
        changes[span.stage][span.last + 1] -= 1
    for change in changes:
        alive = peak = 0
        for tick in sorted(change):
            alive += change[tick]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)
