"""How tasks look in every drawing of a schedule: their colors and labels."""

import string

from sbp.pipeline.report import Report
from sbp.pipeline.schedule import Kind, Schedule, Task

# Okabe and Ito's palette, which color-blind readers can tell apart.
KINDS = {
    Kind.FORWARD: ("#56B4E9", "forward"),
    Kind.BACKWARD: ("#E69F00", "backward"),
    Kind.BACKWARD_INPUT: ("#F0E442", "input gradient"),
    Kind.BACKWARD_WEIGHT: ("#3DB28A", "weight gradient"),
}
"""Color of each kind of task, and its name in a legend."""


def title(schedule: Schedule) -> str:
    """Returns name and sizes."""
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages{chunks}, "
        f"{schedule.num_microbatches} microbatches"
    )


def figures(schedule: Schedule, report: Report) -> str:
    """Returns how long the schedule takes, in one line."""
    return (
        f"{schedule.num_ticks} ticks, time {report.lockstep_time:g}, "
        f"idle {report.lockstep_bubble_fraction:.1%}"
    )


def label(schedule: Schedule, task: Task) -> str:
    """Returns microbatch and chunk; a prime marks an input gradient alone."""
    chunk = chunk_name(task.chunk) if schedule.num_chunks > 1 else ""
    mark = "'" if task.kind is Kind.BACKWARD_INPUT else ""
    return f"{task.microbatch}{chunk}{mark}"


def chunk_name(chunk: int) -> str:
    """Returns a letter."""
    return string.ascii_letters[chunk % len(string.ascii_letters)]


def color(schedule: Schedule, task: Task) -> str:
    """Returns the kind's color, lighter for later chunks."""
    base, _ = KINDS[task.kind]
    share = 0.6 * task.chunk / schedule.num_chunks
    channels = [int(base[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(value + (255 - value) * share) for value in channels]
    return "#" + "".join(f"{value:02X}" for value in mixed)
