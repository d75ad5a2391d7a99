"""A table and a picture of what a sweep has measured."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

Record = Mapping[str, Any]

COLORS = ("#2a6fbb", "#d9541e", "#2f8f5b", "#8a4fb0", "#b08a1e", "#5b6676")
GRID_COLOR = "#e3e6ea"
TEXT_COLOR = "#3b4252"
COLUMNS = (
    "case",
    "devices",
    "step",
    "samples/s",
    "tokens/s",
    "scaling",
    "memory/device",
    "compilation",
)


def write(workdir: pathlib.Path, records: Sequence[Record]) -> None:
    """Writes ``results.md`` and, if anything was measured, ``results.png``."""
    (workdir / "results.md").write_text(to_markdown(records))
    measured = [record for record in records if record["status"] == "ok"]
    if measured:
        draw(measured).savefig(workdir / "results.png", dpi=150)


def summary(record: Record) -> str:
    """Returns a record in a few words."""
    if record["status"] != "ok":
        return f"failed. {' '.join(record['error'].split())}"
    seconds = record["step_seconds_median"]
    return f"{record['samples_per_second']:.1f} samples/s, {seconds * 1e3:.0f} ms"


def to_markdown(records: Sequence[Record]) -> str:
    """Returns the table, with the errors of failed cases and the machine below.

    Scaling is the throughput per device relative to that of the case with the fewest
    devices among those of the same model, dtype and recomputation.
    """
    scaling = scale(records)
    rows = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)]]
    failed = []
    for record in records:
        if record["status"] == "ok":
            rows.append(_row(record, scaling[record["case"]]))
        else:
            name, num_devices = record["case"], str(record["num_devices"])
            rows.append([name, num_devices, "failed", *[""] * (len(COLUMNS) - 3)])
            failed.append(f"- `{name}`: {' '.join(record['error'].split())}")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if failed:
        lines += ["", "Failed:", "", *failed]
    machines = {describe(r["machine"]) for r in records if r["status"] == "ok"}
    lines += ["", *sorted(machines)]
    return "\n".join(lines) + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    """Returns hardware, version and date in a sentence."""
    kind = machine["device_kind"]
    if kind == "cpu":
        kind = f"virtual devices on {machine['num_cpu_cores']} cores, {machine['cpu']}"
    return f"Measured on {kind}, JAX {machine['jax']}, {machine['date']}."


def scale(records: Sequence[Record]) -> dict[str, float]:
    """Returns the scaling of each case that was measured."""
    measured = [record for record in records if record["status"] == "ok"]
    first: dict[str, Record] = {}
    for record in sorted(measured, key=lambda r: r["num_devices"]):
        first.setdefault(record["group"], record)
    return {
        record["case"]: _per_device(record) / _per_device(first[record["group"]])
        for record in measured
    }


def draw(records: Sequence[Record]) -> Figure:
    """Draws throughput by case, and throughput by number of devices."""
    groups = list(dict.fromkeys(record["group"] for record in records))
    colors = {g: COLORS[i % len(COLORS)] for i, g in enumerate(groups)}
    figure = Figure(
        figsize=(12, 1.6 + 0.32 * max(len(records), 8)), layout="constrained"
    )
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_throughput(left, records, colors)
    _draw_scaling(right, records, colors)
    title = describe(records[0]["machine"])
    figure.suptitle(title, color=TEXT_COLOR, fontsize=10, x=0.01, ha="left")
    return figure


def _row(record: Record, scaling: float) -> list[str]:
    num_bytes = (
        record["argument_bytes_per_device"] + record["temporary_bytes_per_device"]
    )
    return [
        record["case"],
        str(record["num_devices"]),
        f"{record['step_seconds_median'] * 1e3:.1f} ms",
        f"{record['samples_per_second']:.2f}",
        f"{record['tokens_per_second']:,.0f}",
        f"{scaling:.0%}",
        f"{num_bytes / 1e6:,.0f} MB",
        f"{record['compile_seconds']:.1f} s",
    ]


def _per_device(record: Record) -> float:
    return record["samples_per_second"] / record["num_devices"]


def _draw_throughput(
    axes: Axes, records: Sequence[Record], colors: Mapping[str, str]
) -> None:
    places = range(len(records))
    values = [record["samples_per_second"] for record in records]
    axes.barh(places, values, color=[colors[r["group"]] for r in records], height=0.7)
    for place, value in zip(places, values, strict=True):
        text = f" {value:.3g}"
        axes.text(value, place, text, va="center", fontsize=8, color=TEXT_COLOR)
    axes.set_yticks(places, [r["case"] for r in records], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("samples/s", color=TEXT_COLOR)
    _decorate(axes, "Throughput", grid_axis="x")


def _draw_scaling(
    axes: Axes, records: Sequence[Record], colors: Mapping[str, str]
) -> None:
    for group, color in colors.items():
        of_group = [r for r in records if r["group"] == group]
        best: dict[int, float] = {}
        for record in of_group:
            number, value = record["num_devices"], record["samples_per_second"]
            best[number] = max(value, best.get(number, 0.0))
            axes.plot(number, value, "o", color=color, alpha=0.35, markersize=5)
        numbers = sorted(best)
        axes.plot(numbers, [best[n] for n in numbers], "-", color=color, label=group)
        ideal = [best[numbers[0]] * n / numbers[0] for n in numbers]
        axes.plot(numbers, ideal, "--", color=color, alpha=0.5, linewidth=1)
    numbers = sorted({record["num_devices"] for record in records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("devices", color=TEXT_COLOR)
    axes.set_ylabel("samples/s", color=TEXT_COLOR)
    axes.legend(fontsize=8, labelcolor=TEXT_COLOR, edgecolor="white")
    _decorate(axes, "Scaling (dashed: linear)", grid_axis="both")


def _decorate(axes: Axes, title: str, *, grid_axis: Any) -> None:
    axes.set_title(title, loc="left", color=TEXT_COLOR, fontsize=11)
    axes.grid(color=GRID_COLOR, linewidth=0.8, axis=grid_axis)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT_COLOR, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)
