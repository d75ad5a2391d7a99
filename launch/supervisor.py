"""Starts the processes of a job on this machine, and ends them: none outlives it.

Each process leads a group of its own, so that what it starts ends with it. Whatever
happens (an exit, a signal, a closed output) becomes an event in one queue, and one
loop decides what follows.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, BinaryIO

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_LINE_BYTES = 65536  # what is longer goes out in pieces
# Gloo prints a line for each group of CPU devices that communicate, on every rank.
DROPPED = b"[Gloo] Rank "
# Kills the groups it was told of when its input ends, which it does when this process
# is gone, be it by SIGKILL.
GUARD = 'while read g; do gs="$gs -$g"; done; [ -z "$gs" ] || kill -s KILL -- $gs'


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """What one rank runs.

    Attributes:
        rank: Its number in the whole job; it stands before each line of output.
        arguments: The program and its arguments.
        environment: All of its environment.
    """

    rank: int
    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """A rank is gone, with its group, and its output is through."""

    rank: int
    code: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stop:
    """The job has to end because of a signal to this process.

    Attributes:
        number: The signal.
        sent: What the ranks get for it.
    """

    number: int
    sent: int


_Events = queue.SimpleQueue[_Ended | _Stop]


def run_all(commands: Sequence[Command], *, grace_seconds: float) -> int:
    """Runs all commands at once until they end, or until the first one fails.

    When one fails, the others get SIGTERM. SIGINT, SIGTERM and SIGHUP to this process
    go to all of them, and again at once SIGKILL. Who is still there after
    ``grace_seconds`` gets SIGKILL.

    Args:
        commands: One per rank.
        grace_seconds: Time to end in, for example to save a checkpoint.

    Returns:
        0 if all succeeded; the exit code of the first that failed, 128 + n if signal n
        ended it; 128 + n if signal n came to this process.
    """
    events: _Events = queue.SimpleQueue()
    groups: dict[int, int] = {}
    with _forwarding(events), _guarding() as guard:
        try:
            lock = threading.Lock()
            for command in commands:
                process = _start(command)
                groups[command.rank] = process.pid
                guard.write(f"{process.pid}\n".encode())
                _watch(command.rank, process, events, lock)
            return _wait_for(groups, events, grace_seconds)
        finally:
            _send(signal.SIGKILL, groups)


def _start(command: Command) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.arguments,
        env=dict(command.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _wait_for(groups: dict[int, int], events: _Events, grace_seconds: float) -> int:
    """Handles events until no group is left; returns the exit code of the job."""
    code = 0
    deadline: float | None = None
    while groups:
        try:
            event = events.get(timeout=_seconds_until(deadline))
        except queue.Empty:
            _send(signal.SIGKILL, groups)
            deadline = None
            continue
        if isinstance(event, _Ended):
            del groups[event.rank]
        if isinstance(event, _Ended) and event.code and not code:
            code = event.code
            _say(f"{_describe(event)}{_ending(len(groups))}")
            _send(signal.SIGTERM, groups)
            deadline = time.monotonic() + grace_seconds
        elif isinstance(event, _Stop) and code:
            _send(signal.SIGKILL, groups)
        elif isinstance(event, _Stop):
            code = 128 + event.number
            name = signal.Signals(event.number).name
            _say(f"{name}{_ending(len(groups))} Once more kills them at once.")
            _send(event.sent, groups)
            deadline = time.monotonic() + grace_seconds
    return code


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _send(number: int, groups: Mapping[int, int]) -> None:
    for group in groups.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _describe(event: _Ended) -> str:
    if event.code <= 128:
        return f"rank {event.rank} ended with exit code {event.code}"
    try:
        name = signal.Signals(event.code - 128).name
    except ValueError:
        return f"rank {event.rank} ended with exit code {event.code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"rank {event.rank} was ended by {name}{hint}"


def _ending(num_others: int) -> str:
    if not num_others:
        return "."
    return f"; ending {num_others} rank{'s' if num_others > 1 else ''}."


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launch.run: {text}", file=sys.stderr, flush=True)


def _watch(
    rank: int, process: subprocess.Popen[bytes], events: _Events, lock: threading.Lock
) -> None:
    """Copies the output of a rank and reports its end, in threads."""
    assert process.stdout is not None  # both are pipes
    assert process.stderr is not None
    pairs = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
    copiers = [
        threading.Thread(
            target=_copy_lines, args=(source, sink, rank, events, lock), daemon=True
        )
        for source, sink in pairs
    ]

    def report_end() -> None:
        status = process.wait()
        _send(signal.SIGKILL, {rank: process.pid})  # what it started and left behind
        for copier in copiers:
            copier.join(timeout=1.0)
        events.put(_Ended(rank, status if status >= 0 else 128 - status))

    for thread in (*copiers, threading.Thread(target=report_end, daemon=True)):
        thread.start()


def _copy_lines(
    source: IO[bytes],
    sink: BinaryIO,
    rank: int,
    events: _Events,
    lock: threading.Lock,
) -> None:
    """Copies whole lines, each after ``[rank]``, until the source ends."""
    prefix = f"[{rank}] ".encode()
    rest = b""
    try:
        while chunk := os.read(source.fileno(), MAX_LINE_BYTES):
            lines = (rest + chunk).splitlines(keepends=True)
            is_partial = not lines[-1].endswith(b"\n")
            rest = (
                lines.pop() if is_partial and len(lines[-1]) < MAX_LINE_BYTES else b""
            )
            kept = (line for line in lines if not line.startswith(DROPPED))
            _write(sink, b"".join(prefix + line for line in kept), lock)
        _write(sink, prefix + rest + b"\n" if rest else b"", lock)
    except (OSError, ValueError):
        # Nobody reads our output any more. Python ignores SIGPIPE itself.
        events.put(_Stop(signal.SIGPIPE, sent=signal.SIGTERM))


def _write(sink: BinaryIO, data: bytes, lock: threading.Lock) -> None:
    with lock:
        sink.write(data)
        sink.flush()


@contextlib.contextmanager
def _forwarding(events: _Events) -> Iterator[None]:
    """Turns the signals into events; one that is ignored (nohup) stays so."""

    def report(number: int, frame: types.FrameType | None) -> None:
        del frame
        events.put(_Stop(number, sent=number))

    numbers = [n for n in FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, report) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _guarding() -> Iterator[IO[bytes]]:
    """Gives the input of a process that kills groups if this one cannot."""
    process = subprocess.Popen(
        ("/bin/sh", "-c", GUARD),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None  # it is a pipe
    try:
        yield process.stdin
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
