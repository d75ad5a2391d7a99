"""A schedule as a picture: time to the right, a row per stage, a box per task."""

import pathlib
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sbp.pipeline import appearance
from sbp.pipeline.report import RESIDUALS_KEPT, Costs, Report, measure, tick_times
from sbp.pipeline.schedule import Schedule

SUFFIXES = (".svg", ".png", ".pdf")
"""Endings of the files that can be written."""

_INK, _FAINT, _IDLE = "#222222", "#6B6B6B", "#F1F1EF"
_MAX_WIDTH = 24.0  # inches
_MIN_LABEL_WIDTH = 0.13  # inches, of a cell whose number can still be read


def to_figure(schedule: Schedule, costs: Costs = RESIDUALS_KEPT) -> Figure:
    """Returns the schedule as a picture, over the time it takes in lockstep.

    Args:
        schedule: What to draw.
        costs: Time of each kind of task.
    """
    times = tick_times(schedule, costs)
    total = sum(times)
    labels = [appearance.label(schedule, task) for _, task in schedule.tasks()]
    shortest = min(costs.of(task) for _, task in schedule.tasks())
    per_unit = (0.12 + 0.07 * max(map(len, labels))) * schedule.num_chunks / shortest
    left, right, above, below = 0.85, 1.1, 0.85, 0.55
    inner = min(max(total * per_unit, 5.0), _MAX_WIDTH - left - right)
    height = 0.36 * schedule.num_stages
    size = (left + inner + right, above + height + below)
    figure = Figure(figsize=size, facecolor="white")
    axes = figure.add_axes(
        (left / size[0], below / size[1], inner / size[0], height / size[1])
    )
    _draw_grid(axes, schedule, times)
    _draw_tasks(axes, schedule, costs, times, inches=inner / total)
    report = measure(schedule, costs)
    _draw_peaks(axes, schedule, report)
    axes.set_xlabel("time (ticks are separated by lines)", color=_FAINT, fontsize=8)
    figure.text(
        left / size[0],
        1 - 0.3 / size[1],
        appearance.title(schedule),
        fontsize=11,
        fontweight="bold",
        color=_INK,
    )
    figure.text(
        left / size[0],
        1 - 0.53 / size[1],
        appearance.figures(schedule, report),
        fontsize=8.5,
        color=_FAINT,
    )
    _draw_legend(axes, schedule)
    return figure


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a picture as SVG, PNG or PDF, the same bytes for the same schedule.

    Raises:
        ValueError: If the file name ends otherwise.
    """
    suffix = pathlib.Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(
            f"The picture's file name '{path}' ends in '{suffix}', but pictures are "
            f"written as {', '.join(SUFFIXES)}. Choose one of these endings."
        )
    # Neither date nor version of the library: only a change of the drawing shows.
    unnamed = {
        ".svg": {"Date": None, "Creator": None},
        ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        ".png": {"Software": None},
    }
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sbp"}):
        figure.savefig(path, dpi=160, metadata=unnamed[suffix])


def _draw_grid(axes: Axes, schedule: Schedule, times: Sequence[float]) -> None:
    """Axes, idle background and the ends of the ticks."""
    total = sum(times)
    axes.set_xlim(0, total)
    axes.set_ylim(schedule.num_stages, 0)
    for stage in range(schedule.num_stages):
        axes.add_patch(Rectangle((0, stage + 0.08), total, 0.84, color=_IDLE, lw=0))
    end = 0.0
    for time in times[:-1]:
        end += time
        axes.axvline(end, color="white", lw=0.8, zorder=1)
    axes.set_yticks(
        [stage + 0.5 for stage in range(schedule.num_stages)],
        [f"stage {stage}" for stage in range(schedule.num_stages)],
        fontsize=9,
        color=_INK,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color=_FAINT, labelcolor=_FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#C8C8C8")


def _draw_tasks(
    axes: Axes,
    schedule: Schedule,
    costs: Costs,
    times: Sequence[float],
    inches: float,
) -> None:
    """One box per task; ``inches`` is the width of a unit of time."""
    start = 0.0
    for row, time in zip(schedule.ticks, times, strict=True):
        for stage, cell in enumerate(row):
            left = start
            for task in cell:
                width = costs.of(task) / schedule.num_chunks
                box = Rectangle(
                    (left, stage + 0.08),
                    width,
                    0.84,
                    facecolor=appearance.color(schedule, task),
                    edgecolor="white",
                    lw=0.7,
                    zorder=2,
                )
                axes.add_patch(box)
                if width * inches >= _MIN_LABEL_WIDTH:
                    axes.text(
                        left + width / 2,
                        stage + 0.51,
                        appearance.label(schedule, task),
                        ha="center",
                        va="center",
                        fontsize=min(8.5, 44 * width * inches),
                        color=_INK,
                        zorder=4,
                    )
                left += width
        start += time


def _draw_peaks(axes: Axes, schedule: Schedule, report: Report) -> None:
    """Memory of each stage, at the right edge."""
    if not any(report.peak_saved):
        return
    heading = "kept + waiting" if any(report.peak_aside) else "kept"
    axes.text(1.01, 1.02, heading, transform=axes.transAxes, fontsize=8, color=_FAINT)
    for stage, saved in enumerate(report.peak_saved):
        aside = report.peak_aside[stage]
        note = f"{saved} + {aside}" if any(report.peak_aside) else f"{saved}"
        axes.text(
            1.01,
            1 - (stage + 0.5) / schedule.num_stages,
            note,
            transform=axes.transAxes,
            va="center",
            fontsize=8.5,
            color=_INK,
        )


def _draw_legend(axes: Axes, schedule: Schedule) -> None:
    """Colors and marks, right above the drawing."""
    handles = [
        Patch(color=color, label=name)
        for kind, (color, name) in appearance.KINDS.items()
        if kind in schedule.kinds
    ]
    axes.legend(
        handles=[*handles, Patch(color=_IDLE, label="idle")],
        loc="lower right",
        bbox_to_anchor=(1, 1.0),
        ncols=len(handles) + 1,
        frameon=False,
        fontsize=8,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        borderaxespad=0.3,
    )
