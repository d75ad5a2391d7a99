"""Times what JAX computes, fairly: warm, finished, taking turns, with the spread."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that repeated runs of the same work took.

    Attributes:
        seconds: Of each run, in the order they were made.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, in seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the runs lie between these two, in seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        low, high = self.quartiles
        return (high - low) / self.median

    def to_json(self, prefix: str) -> dict[str, float | int]:
        """Returns median, quartiles and number of runs, named with a prefix.

        Example:
            >>> Timing((1.0, 2.0, 3.0)).to_json("step")["step_seconds_median"]
            2.0
        """
        low, high = self.quartiles
        return {
            f"{prefix}_seconds_median": self.median,
            f"{prefix}_seconds_quartile_low": low,
            f"{prefix}_seconds_quartile_high": high,
            f"{prefix}_num_runs": len(self.seconds),
        }


def config_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark of a config; see `parse_config`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        epilog="--config.SECTION.FIELD=VALUE overrides a field of the config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="config file, .py or .yaml")
    return parser


def parse_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Returns the options of a command line, and the texts of overridden fields.

    The parser ends the program if something else is given.

    Example:
        >>> parser = config_parser("benchmark")
        >>> parse_config(parser, ["--config=a.py", "--config.dist.x=2"])
        (Namespace(config='a.py'), {'dist.x': '2'})
    """
    options, rest = parser.parse_known_args(arguments)
    fields = dict(text.partition("=")[::2] for text in rest)
    if not all(name.startswith("--config.") for name in fields):
        parser.error(f"{' '.join(rest)}: expected --config.SECTION.FIELD=VALUE")
    return options, {k.removeprefix("--config."): v for k, v in fields.items()}


def positive(text: str) -> int:
    """Returns a count from the command line; argparse reports what it raises.

    Example:
        >>> positive("3")
        3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on.")
    return int(text)


def time_in_turns(
    works: Mapping[str, Callable[[], Any]],
    *,
    num_warmup: int = 3,
    num_runs: int = 20,
    runs_per_turn: int = 1,
) -> dict[str, Timing]:
    """Times several works run after run in turns, so that all see the same machine.

    Args:
        works: By name; each returns arrays, and is over once these are computed.
        num_warmup: Runs of each that do not count: the first ones compile.
        num_runs: Runs of each that count.
        runs_per_turn: Of which the last counts. With more than one a short work finds
            memory and caches as it left them, and not as the work before it did.

    Example:
        >>> x = jax.numpy.ones(8)
        >>> timings = time_in_turns({"add": lambda: x + x, "mul": lambda: x * x})
        >>> len(timings["add"].seconds)
        20
    """
    for work in works.values():
        for _ in range(num_warmup):
            jax.block_until_ready(work())
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_runs):
        for name, work in works.items():
            for _ in range(runs_per_turn - 1):
                jax.block_until_ready(work())
            start = time.perf_counter()
            jax.block_until_ready(work())
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def describe_machine() -> dict[str, Any]:
    """Returns hardware, versions, date and command, for the record of a result."""
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "cpu": _cpu_name(),
        "num_cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def report(rows: Mapping[str, str], record: Mapping[str, Any], *, title: str) -> None:
    """Prints a table and, below it, the record with the machine as a line of JSON.

    Args:
        rows: What the table says, value by name.
        record: What the line holds.
        title: Of the table.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    print(json.dumps({**record, "machine": describe_machine()}))


def _cpu_name() -> str:
    """Returns the name of the CPU; Python only knows its architecture on Linux."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
