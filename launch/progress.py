"""Shows how a run is going: a live bar on a terminal, plain lines elsewhere."""

import datetime
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# What is shown of the metrics, in this order; then other losses and accuracies.
FORMATS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "mlm_loss": "mlm {:.4f}".format,
    "nsp_loss": "nsp {:.4f}".format,
    "mlm_accuracy": "mlm accuracy {:.1%}".format,
    "nsp_accuracy": "nsp accuracy {:.1%}".format,
    "perplexity": "perplexity {:,.4g}".format,
    "macro_f1": "macro F1 {:.1%}".format,
    "f1": "F1 {:.1%}".format,
    "learning_rate": "lr {:.2e}".format,
    "grad_norm": "grad norm {:.3g}".format,
    "global_batch_size": "batch {:g}".format,
    "loss_scale": "loss scale {:g}".format,
    "skipped_steps": "{:g} skipped".format,
    "tokens_per_second": "{:,.0f} tokens/s".format,
    "samples_per_second": "{:,.1f} samples/s".format,
    "model_tflops_per_second": "{:.4g} TFLOP/s".format,
    "utilization": "{:.1%} of peak".format,
    "peak_memory_bytes": lambda num_bytes: f"{format_bytes(num_bytes)} memory",
}


class Progress:
    """A bar and a line of metrics that stay at the bottom of a terminal.

    Where the output is no terminal, each call of `show` prints a line instead.
    """

    def __init__(
        self, num_steps: int, *, console: Console | None = None, is_shown: bool = True
    ):
        """Shows nothing before `start`.

        Args:
            num_steps: Of the whole run.
            console: Where to show it. None for the standard output.
            is_shown: False for processes that shall stay silent.
        """
        self._num_steps = num_steps
        self._step = 0
        self._step_seconds: float | None = None
        self._metrics = Text("first step ...", style="dim")
        self._console = console or Console()
        self._is_shown = is_shown
        self._live: Live | None = None
        if is_shown and self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
            )

    def start(self) -> None:
        """Begins to draw, on a terminal."""
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        """Draws for the last time and leaves that on the screen."""
        if self._live is not None:
            self._live.stop()

    def advance(self, step: int) -> None:
        """Sets the steps done; costs next to nothing."""
        self._step = step

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a training step.

        Args:
            step: Steps done.
            metrics: By name; ``step_seconds`` gives the time that is left.
        """
        self.advance(step)
        self._step_seconds = metrics.get("step_seconds", self._step_seconds)
        line = format_metrics(metrics)
        if self._live is not None:
            self._metrics = Text(line)
        else:
            self.print(f"{self._counter(step)}  eta {self._time_left()}  {line}")

    def show_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of an evaluation; they stay on the screen."""
        self.print(f"{self._counter(step)}  evaluation  {format_metrics(metrics)}")

    def print(self, text: str) -> None:
        """Prints a text, on a terminal above the bar."""
        if self._is_shown:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        bar = ProgressBar(total=self._num_steps, completed=self._step)
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            Text(self._counter(self._step)), bar, Text(f"eta {self._time_left()}")
        )
        return Group(row, self._metrics)

    def _counter(self, step: int) -> str:
        width = len(str(self._num_steps))
        return f"step {step:>{width}}/{self._num_steps}"

    def _time_left(self) -> str:
        if self._step_seconds is None:
            return "-:--:--"
        seconds = (self._num_steps - self._step) * self._step_seconds
        return str(datetime.timedelta(seconds=round(seconds)))


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Returns the metrics on one line; those that no row of the table names are left.

    Example:
        >>> format_metrics({"grad_norm": 1.5, "loss": 6.25, "step_seconds": 0.1})
        'loss 6.2500  grad norm 1.5'
        >>> format_metrics({"top1_accuracy": 0.5, "peak_memory_bytes": 1_500_000_000})
        '1.5 GB memory  top1 accuracy 50.0%'
    """
    known = [text(metrics[name]) for name, text in FORMATS.items() if name in metrics]
    other = {name: x for name, x in metrics.items() if name not in FORMATS}
    losses = [
        f"{name.removesuffix('_loss')} {x:.4f}"
        for name, x in other.items()
        if name.endswith("_loss")
    ]
    if len(losses) == 1 and "loss" in metrics:
        losses = []  # a single part is the whole
    accuracies = [
        f"{name.replace('_', ' ')} {x:.1%}"
        for name, x in other.items()
        if name.endswith("_accuracy")
    ]
    return "  ".join(known + losses + accuracies)


def format_bytes(num_bytes: float) -> str:
    """Returns a size with three digits.

    Example:
        >>> format_bytes(1_234_000), format_bytes(80e9)
        ('1.23 MB', '80 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
