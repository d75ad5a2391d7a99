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
# Ranks that wait for one that failed will hardly end well, however long one waits.
FAILURE_GRACE_SECONDS = 5.0
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

    @property
    def forwarded(self) -> int:
        """The signal that the other ranks get, if this one failed."""
        return signal.SIGTERM

    def describe(self) -> str:
        """Says how the rank ended."""
        names = {128 + number: number.name for number in signal.Signals}
        if self.code not in names:
            return f"rank {self.rank} ended with exit code {self.code}"
        hint = " (out of memory?)" if self.code == 128 + signal.SIGKILL else ""
        return f"rank {self.rank} was ended by {names[self.code]}{hint}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Stop:
    """The job has to end because of a signal to this process.

    Attributes:
        number: The signal; SIGPIPE when nobody reads the output any more.
    """

    number: int

    @property
    def code(self) -> int:
        """The exit code of the job."""
        return 128 + self.number

    @property
    def forwarded(self) -> int:
        """The signal that the ranks get; Python programs ignore SIGPIPE."""
        return signal.SIGTERM if self.number == signal.SIGPIPE else self.number

    def describe(self) -> str:
        """Says why the job ends."""
        if self.number == signal.SIGPIPE:
            return "nobody reads the output any more"
        return f"{signal.Signals(self.number).name} (once more to kill at once)"


_Events = queue.SimpleQueue[_Ended | _Stop]


def run_all(commands: Sequence[Command], *, grace_seconds: float) -> int:
    """Runs all commands at once until they end, or until the first one fails.

    When one fails, the others get SIGTERM, and after some seconds SIGKILL. SIGINT,
    SIGTERM and SIGHUP to this process go to all of them. Who is still there after
    ``grace_seconds``, or when a second signal comes, gets SIGKILL.

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
            streams = (sys.stdout.buffer, sys.stderr.buffer)
            outputs = [_Output(stream, events) for stream in streams]
            for command in commands:
                process = _start(command)
                groups[command.rank] = process.pid
                guard.write(f"{process.pid}\n".encode())
                _watch(command.rank, process, outputs, events)
            trouble = _wait(groups, events)
            if trouble is None:
                return 0
            _say(f"{trouble.describe()}{_ending(len(groups))}")
            if isinstance(trouble, _Ended):
                grace_seconds = min(grace_seconds, FAILURE_GRACE_SECONDS)
            num_others = len(groups)
            _end(groups, events, trouble.forwarded, grace_seconds)
            if isinstance(trouble, _Ended) and num_others:
                # What the others say in dying may fill screens.
                first = trouble.rank
                _say(f"rank {first} was the first to fail; its lines begin [{first}].")
            return trouble.code
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


def _wait(groups: dict[int, int], events: _Events) -> _Ended | _Stop | None:
    """Waits until the first failure or signal, or until all ranks have succeeded."""
    while groups:
        event = events.get()
        if isinstance(event, _Stop):
            return event
        del groups[event.rank]
        if event.code:
            return event
    return None


def _end(
    groups: dict[int, int], events: _Events, number: int, grace_seconds: float
) -> None:
    """Sends a signal to all groups, later SIGKILL, and waits until they are gone."""
    _send(number, groups)
    deadline = time.monotonic() + grace_seconds
    while groups:
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            event = _Stop(signal.SIGKILL)
        if isinstance(event, _Ended):
            del groups[event.rank]
        elif event.number != signal.SIGPIPE:
            _send(signal.SIGKILL, groups)
            deadline = time.monotonic() + 1.0


def _send(number: int, groups: Mapping[int, int]) -> None:
    for group in groups.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _ending(num_others: int) -> str:
    if not num_others:
        return "."
    return f"; ending {num_others} rank{'s' if num_others > 1 else ''}."


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"launch.run: {text}", file=sys.stderr, flush=True)


class _Output:
    """A stream that all ranks write to, line by line."""

    def __init__(self, stream: BinaryIO, events: _Events):
        self._stream = stream
        self._events = events
        self._lock = threading.Lock()
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Writes whole lines; drops them when nobody reads the stream any more."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._stream.write(data)
                self._stream.flush()
            except (OSError, ValueError):
                self._is_open = False
                self._events.put(_Stop(signal.SIGPIPE))


def _watch(
    rank: int,
    process: subprocess.Popen[bytes],
    outputs: Sequence[_Output],
    events: _Events,
) -> None:
    """Copies the output of a rank and reports its end, in threads."""
    assert process.stdout is not None  # both are pipes
    assert process.stderr is not None
    pairs = zip((process.stdout, process.stderr), outputs, strict=True)
    copiers = [
        threading.Thread(target=_copy_lines, args=(source, output, rank), daemon=True)
        for source, output in pairs
    ]

    def report_end() -> None:
        status = process.wait()
        _send(signal.SIGKILL, {rank: process.pid})  # what it started and left behind
        for copier in copiers:
            copier.join(timeout=1.0)
        events.put(_Ended(rank, status if status >= 0 else 128 - status))

    for thread in (*copiers, threading.Thread(target=report_end, daemon=True)):
        thread.start()


def _copy_lines(source: IO[bytes], output: _Output, rank: int) -> None:
    """Copies whole lines, each after ``[rank]``, until the source ends."""
    prefix = f"[{rank}] ".encode()
    rest = b""
    while chunk := os.read(source.fileno(), MAX_LINE_BYTES):
        lines = (rest + chunk).splitlines(keepends=True)
        is_partial = not lines[-1].endswith(b"\n")
        rest = lines.pop() if is_partial and len(lines[-1]) < MAX_LINE_BYTES else b""
        kept = (line for line in lines if not line.startswith(DROPPED))
        output.write(b"".join(prefix + line for line in kept))
    if rest:
        output.write(prefix + rest + b"\n")


@contextlib.contextmanager
def _forwarding(events: _Events) -> Iterator[None]:
    """Turns the signals into events; one that is ignored (nohup) stays so."""

    def report(number: int, frame: types.FrameType | None) -> None:
        del frame
        events.put(_Stop(number))

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
