r"""Draws a schedule in the terminal and as a picture.

    python -m sbp.pipeline.draw --schedule=1f1b --stages=4 --microbatches=8

In the terminal each stage has a lane per kind of task and a column per tick. In the
picture time runs to the right: a tick is as wide as its busiest stage takes. Colors are
those of Okabe and Ito, which color-blind readers can tell apart; numbers are
microbatches, letters after them chunks.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterable, Sequence, Set

from rich.console import Console
from rich.text import Text

from sbp.pipeline import appearance
from sbp.pipeline.builders import SCHEDULES, build
from sbp.pipeline.picture import SUFFIXES, save, to_figure
from sbp.pipeline.report import RESIDUALS_KEPT, Costs, Report, measure
from sbp.pipeline.schedule import Kind, Schedule

_LANES = {
    "F": {Kind.FORWARD},
    "B": {Kind.BACKWARD, Kind.BACKWARD_INPUT},
    "W": {Kind.BACKWARD_WEIGHT},
}
_MARKS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "'",
    Kind.BACKWARD_WEIGHT: "W",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a schedule and writes its picture; ``--help`` lists the options."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = build(
            args.schedule,
            args.stages,
            args.microbatches,
            args.chunks,
            head_delay=args.head_delay,
        )
        costs = _costs(*args.costs)
    except ValueError as error:
        parser.error(str(error))
    console = Console(highlight=False, soft_wrap=True)
    console.print(to_text(schedule, costs, width=console.width))
    if not args.text_only:
        output = args.output or f"{args.schedule}_{args.stages}x{args.microbatches}.svg"
        try:
            save(to_figure(schedule, costs), output)
        except OSError as error:
            parser.error(
                f"'{output}' cannot be written: {error.strerror}. Name another file by"
                " --output, or add --text_only."
            )
        console.print(f"\nwrote {output}")


def to_text(
    schedule: Schedule, costs: Costs = RESIDUALS_KEPT, *, width: int = 100
) -> Text:
    r"""Returns the schedule as colored text, and what it costs.

    Args:
        schedule: What to draw.
        costs: Time of each kind of task, for the figures below the drawing.
        width: Columns of the terminal; ticks that do not fit go into further blocks.

    Returns:
        Text for a `rich` console; ``.plain`` is a string.

    Example:
        >>> from sbp.pipeline import build
        >>> text = to_text(build("1f1b", num_stages=2, num_microbatches=3))
        >>> print("\n".join(text.plain.splitlines()[2:9]))
        tick        0 1 2 3 4
        <BLANKLINE>
        stage 0  F  0 1 2 · ·
                 B  · · 0 1 2
        <BLANKLINE>
        stage 1  F  · 0 1 2 ·
                 B  · 0 1 2 ·
    """
    labels = [appearance.label(schedule, task) for _, task in schedule.tasks()]
    cell = max(len(str(schedule.num_ticks - 1)), *map(len, labels))
    margin = len(_name(schedule, 0, "F"))
    per_block = max(1, (width - margin + 1) // (cell + 1))
    text = Text(f"{appearance.title(schedule)}\n\n")
    text.stylize("bold")
    for first in range(0, schedule.num_ticks, per_block):
        ticks = range(first, min(first + per_block, schedule.num_ticks))
        numbers = " ".join(f"{tick:>{cell}}" for tick in ticks)
        text.append(f"{'tick':{margin}}{numbers}\n\n", style="dim")
        for stage in range(schedule.num_stages):
            for lane, kinds in _LANES.items():
                if schedule.kinds & kinds:
                    text.append(_name(schedule, stage, lane))
                    text.append(_lane(schedule, stage, kinds, ticks, cell))
            text.append("\n")
    text.append(_legend(schedule))
    return text.append(_summary(schedule, measure(schedule, costs)))


def _name(schedule: Schedule, stage: int, lane: str) -> str:
    """The margin of a lane; the stage is named at its first."""
    name = f"stage {stage}" if lane == "F" else ""
    return f"{name:{len(f'stage {schedule.num_stages - 1}')}}  {lane}  "


def _lane(
    schedule: Schedule, stage: int, kinds: Set[Kind], ticks: range, cell: int
) -> Text:
    """One line of the drawing, without its name."""
    cells = []
    for tick in ticks:
        tasks = [task for task in schedule.ticks[tick][stage] if task.kind in kinds]
        if tasks:
            label = f"{appearance.label(schedule, tasks[0]):>{cell}}"
            style = f"#000000 on {appearance.color(schedule, tasks[0])}"
            cells.append(Text(label, style=style))
        else:
            cells.append(Text(f"{'·':>{cell}}", style="dim"))
    return Text(" ").join(cells).append("\n")


def _legend(schedule: Schedule) -> Text:
    """Which color and mark stands for what."""
    legend = Text()
    for kind, (color, name) in appearance.KINDS.items():
        if kind in schedule.kinds:
            legend.append(f" {_MARKS[kind]} ", style=f"#000000 on {color}")
            legend.append(f" {name}  ")
    legend.append("· idle")
    if schedule.num_chunks > 1:
        legend.append(
            f"  a-{appearance.chunk_name(schedule.num_chunks - 1)} chunk of the stage"
        )
    return legend.append("\n")


def _summary(schedule: Schedule, report: Report) -> str:
    """The figures below the text."""
    lines = [f"\n{appearance.figures(schedule, report)}"]
    if any(report.peak_saved):
        lines.append(f"inputs kept per stage: {_numbers(report.peak_saved)}")
    if any(report.peak_aside):
        lines.append(f"weight gradients waiting: {_numbers(report.peak_aside)}")
    return "\n".join(lines)


def _numbers(peaks: Iterable[int]) -> str:
    return ", ".join(map(str, peaks))


def _costs(forward: float, backward_input: float, backward_weight: float) -> Costs:
    """Costs whose full backward task is the sum of its parts."""
    return Costs(
        forward=forward,
        backward=backward_input + backward_weight,
        backward_input=backward_input,
        backward_weight=backward_weight,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sbp.pipeline.draw",
        description="Prints a pipeline schedule and writes a picture of it.",
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1, help="pieces per stage")
    parser.add_argument(
        "--head_delay",
        type=int,
        default=0,
        help="1 if all stages compute the head together, one tick before the backward",
    )
    parser.add_argument(
        "--costs",
        type=float,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar=("F", "B", "W"),
        help="time of forward, input gradient and weight gradient of a stage",
    )
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--output",
        type=_picture_path,
        metavar="FILE",
        help=f"where to write the picture ({', '.join(SUFFIXES)}); by default an SVG "
        "in this folder, named after schedule and sizes",
    )
    picture.add_argument("--text_only", action="store_true", help="write no picture")
    return parser


def _picture_path(path: str) -> pathlib.Path:
    if pathlib.Path(path).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"'{path}' does not end in {', '.join(SUFFIXES)}"
        )
    return pathlib.Path(path)


if __name__ == "__main__":
    main(sys.argv[1:])
