"""Metrics of a run: to the screen, to ``metrics.jsonl`` and to TensorBoard.

``metrics.jsonl`` has a JSON object per logged step, with ``step`` and the metrics of
training, and one per evaluation, whose metrics begin with ``eval_``. A number that is
not finite is null there, as JSON has no word for it.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from launch import hardware
from launch.progress import FORMATS, Progress

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step handles, to turn its seconds into rates.

    Attributes:
        num_samples: Global batch size.
        num_tokens: Of the global batch, padding included.
        model_flops: See `launch.flops`.
        peak: Of all devices together.
    """

    num_samples: int
    num_tokens: int
    model_flops: int
    peak: hardware.Peak

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Returns the rates of all devices together, by the names of the metrics.

        ``utilization`` is the share of the peak.

        Example:
            >>> peak = hardware.Peak(4e12, "an example")
            >>> cost = StepCost(
            ...     num_samples=8, num_tokens=1024, model_flops=10**12, peak=peak
            ... )
            >>> for name, value in cost.rates(0.5).items():
            ...     print(name, value)
            step_seconds 0.5
            tokens_per_second 2048.0
            samples_per_second 16.0
            model_tflops_per_second 2.0
            utilization 0.5
        """
        flops_per_second = self.model_flops / step_seconds
        return {
            "step_seconds": step_seconds,
            "tokens_per_second": self.num_tokens / step_seconds,
            "samples_per_second": self.num_samples / step_seconds,
            "model_tflops_per_second": flops_per_second / 1e12,
            "utilization": flops_per_second / self.peak.flops_per_second,
        }


class StepTimer:
    """Wall-clock seconds per step, over the steps since the last lap.

    The host waits for the devices at the end of a lap and at the beginning of a pause,
    and nowhere else. Start it after compilation.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._paused = 0.0

    def start(self) -> None:
        """Begins a lap now."""
        self._start = self._clock()
        self._paused = 0.0

    def lap(self, num_steps: int, *, after: Any = None) -> float:
        """Returns the seconds per step since the last lap, and begins the next.

        Args:
            num_steps: Steps in between, at least 1.
            after: Arrays of the last step, to wait for.
        """
        jax.block_until_ready(after)
        seconds = self._clock() - self._start - self._paused
        self.start()
        return seconds / num_steps

    @contextlib.contextmanager
    def paused(self, *, after: Any = None) -> Iterator[None]:
        """Does not count what happens in the block: evaluation, checkpoints.

        Args:
            after: Arrays of the last step, to wait for first: the step counts.
        """
        jax.block_until_ready(after)
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin


class MetricLogger:
    """Shows and writes metrics; with several processes, on the first one only.

    Use it in a ``with`` block. If the run resumes after some step, what was written of
    later steps goes, as these will be done again.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        num_steps: int,
        resumed_step: int = 0,
        progress: Progress | None = None,
    ):
        """Opens the files.

        Args:
            workdir: An existing directory.
            num_steps: Of the whole run.
            resumed_step: Last step that is already done, 0 for none.
            progress: Where to show metrics. None for the terminal, or for lines if
                there is none.

        Raises:
            OSError: If a file cannot be written; so do the other methods.
        """
        self._is_first = jax.process_index() == 0
        self.path = pathlib.Path(workdir) / METRICS_FILE
        self._progress = progress or Progress(num_steps, is_shown=self._is_first)
        self._progress.advance(resumed_step)
        self._lines: Any = None
        self._events: EventsWriter | None = None
        if self._is_first:
            with _name_file(self.path):
                _drop_later_steps(self.path, resumed_step)
                # Unbuffered: what did not fit on the disk is not tried again.
                self._lines = self.path.open("ab", buffering=0)
            self._open_events(pathlib.Path(workdir) / TENSORBOARD_DIRECTORY)
            self._write_event(
                Event(
                    step=resumed_step + 1,
                    session_log=SessionLog(status=SessionLog.START),
                )
            )

    def __enter__(self) -> "MetricLogger":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # A disk that was full is so still: the first error is the one to report.
        with contextlib.suppress(*[OSError] if kind else []):
            self.close()

    def tick(self, step: int) -> None:
        """Moves the progress bar; touches no device."""
        self._progress.advance(step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows and writes the metrics of a training step.

        Args:
            step: Steps done.
            values: Numbers or arrays of one number, by name. Waits for them.
        """
        numbers = _to_numbers(values)
        self._progress.show(step, numbers)
        self._write_all(step, numbers, prefix="", tag="train")

    def write_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows and writes the metrics of an evaluation after a step, see `write`."""
        numbers = _to_numbers(values)
        self._progress.show_eval(step, numbers)
        self._write_all(step, numbers, prefix="eval_", tag="eval")

    def print(self, text: str) -> None:
        """Shows a text above the progress bar."""
        self._progress.print(text)

    def close(self) -> None:
        """Closes the files and leaves the last line on the screen."""
        self._progress.stop()
        if self._lines is not None:
            self._lines.close()
        if self._events is not None:
            with _name_file(self.path.parent / TENSORBOARD_DIRECTORY):
                self._events.close()

    def _write_all(
        self, step: int, numbers: dict[str, float], *, prefix: str, tag: str
    ) -> None:
        if self._lines is None:
            return
        named = {f"{prefix}{name}": _or_null(x) for name, x in numbers.items()}
        line = json.dumps({"step": step} | named) + "\n"
        with _name_file(self.path):
            self._lines.write(line.encode())
        values = [
            Summary.Value(tag=f"{tag}/{name}", simple_value=x)
            for name, x in numbers.items()
        ]
        self._write_event(Event(step=step, summary=Summary(value=values)))

    def _open_events(self, directory: pathlib.Path) -> None:
        # Not SummaryWriter: if its thread fails, on a full disk, the next write hangs.
        with _name_file(directory):
            directory.mkdir(exist_ok=True)
            # Its own name has seconds only, and it replaces a file of the same name.
            self._events = EventsWriter(
                str(directory / "events"), filename_suffix=f".{time.time_ns()}"
            )

    def _write_event(self, event: Event) -> None:
        assert self._events is not None
        event.wall_time = time.time()
        with _name_file(self.path.parent / TENSORBOARD_DIRECTORY):
            self._events.write_event(event)
            self._events.flush()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of a ``metrics.jsonl``, without a last line that was cut off.

    Args:
        path: Of the file; one that does not exist has no metrics.
    """
    file = pathlib.Path(path)
    if not file.exists():
        return []
    text = file.read_text()
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def _drop_later_steps(path: pathlib.Path, step: int) -> None:
    """Rewrites the file without what follows ``step``, all at once."""
    if path.exists():
        kept = [entry for entry in read_metrics(path) if entry["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        temporary.replace(path)


def _to_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Fetches all values at once, in the order shown; whole numbers stay whole."""
    names = [name for name in FORMATS if name in values]
    names += [name for name in values if name not in FORMATS]
    fetched = jax.device_get([values[name] for name in names])
    return {
        name: value if isinstance(value, int) else float(value)
        for name, value in zip(names, fetched, strict=True)
    }


def _or_null(number: float) -> float | None:
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def _name_file(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to errors of writing, which name only their reason."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno, f"Writing the metrics failed: {error.strerror}", str(path)
        ) from error
