"""Draws the loss curves of a run from its ``metrics.jsonl``."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TRAINING_COLOR = "#2a6fbb"
VALIDATION_COLOR = "#d9541e"
GRID_COLOR = "#e3e6ea"
TEXT_COLOR = "#3b4252"

TITLES = {
    "loss": "Loss",
    "mlm_loss": "Masked language model",
    "nsp_loss": "Next sentence",
}
SMOOTHED_FROM = 40  # points; fewer are drawn as they are


def save_loss_curves(
    records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str
) -> None:
    """Draws all losses by step, of training and validation, into a PNG.

    The large panel is the whole loss, the small ones are its parts, if it has several.

    Args:
        records: As `launch.metrics.read_metrics` returns them.
        path: Of the PNG; it is replaced.
        title: Of the picture.

    Raises:
        ValueError: If no record has a loss.
    """
    names = {name: None for record in records for name in record}
    losses = [name for name in names if name == "loss" or name.endswith("_loss")]
    trained = [name for name in losses if not name.startswith("eval_")]
    if not trained:
        raise ValueError(
            f"None of the {len(records)} records has a loss to draw. "
            "Draw after the first logged step."
        )
    whole = "loss" if "loss" in trained else trained[0]
    parts = [name for name in trained if name != whole]
    figure = Figure(figsize=(11 if len(parts) > 1 else 7, 5), layout="constrained")
    if len(parts) > 1:
        rows: list[Any] = [[whole, part] for part in parts]
        panels = figure.subplot_mosaic(rows, width_ratios=[2, 1])
    else:  # a single part is the whole
        panels = {whole: figure.subplots()}
    for name, axes in panels.items():
        _draw_loss(axes, name, records)
    panels[whole].legend(labelcolor=TEXT_COLOR, edgecolor="white", framealpha=1)
    figure.suptitle(title, color=TEXT_COLOR, fontsize=13, fontweight="bold")
    figure.savefig(path, dpi=150)


def _draw_loss(axes: Axes, name: str, records: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _series(records, name)
    many = len(values) > SMOOTHED_FROM
    smooth = _smooth(values) if many else values
    if many:
        axes.plot(steps, values, color=TRAINING_COLOR, alpha=0.25, linewidth=1)
    label = "training, smoothed" if many else "training"
    axes.plot(
        steps,
        smooth,
        color=TRAINING_COLOR,
        linewidth=1.8,
        marker="." if len(values) < 3 else None,  # too few to see a line
        label=label,
    )
    steps, values = _series(records, f"eval_{name}")
    if values:
        axes.plot(
            steps,
            values,
            color=VALIDATION_COLOR,
            linewidth=1.4,
            marker="o",
            markersize=5,
            label=f"validation, {values[-1]:.3f} at the end",
        )
    _decorate(axes, TITLES.get(name, name.removesuffix("_loss")))


def _decorate(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=TEXT_COLOR, fontsize=11)
    axes.set_xlabel("step", color=TEXT_COLOR)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.grid(color=GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT_COLOR, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)


def _series(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric, without those that are not finite."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of a window around each value, narrower at both ends."""
    radius = max(1, len(values) // 40)
    windows = [
        values[max(0, i - reach) : i + reach + 1]
        for i in range(len(values))
        for reach in [min(radius, i, len(values) - 1 - i)]
    ]
    return [sum(window) / len(window) for window in windows]
