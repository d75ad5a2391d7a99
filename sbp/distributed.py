"""Joins the processes of a job into one JAX program.

A job is started by ``python -m launch.run`` or by SLURM's ``srun``. Both say in the
environment how many processes there are and which one this is, and this is the only
file of the package that reads it.
"""

import atexit
import dataclasses
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping

import jax

# What `launch.run` sets. All three, or the process was not started by it.
LAUNCH_VARIABLES = ("SBP_COORDINATOR", "SBP_NUM_PROCESSES", "SBP_PROCESS_ID")
# What `srun` sets in each task. The first is missing in a shell of `salloc`.
SLURM_VARIABLES = (
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
)
NEVER_SECONDS = 10**8


def init(*, timeout_seconds: int = 300, catch_sigterm: bool = False) -> None:
    """Joins this process to the others of its job, if it has any.

    Call it once, right after the imports. Afterwards `jax.devices()` are the devices
    of all processes, in the order of the processes, and a rank of `sbp.placement` is a
    position among them. Without a launcher and without SLURM, in a job of one process,
    and when called again, it does nothing: a script may always call it.

    Args:
        timeout_seconds: How long to wait for the other processes to come, and at the
            end for them to be done too; then the job fails.
        catch_sigterm: Whether SIGTERM becomes JAX's notice of preemption, on which a
            checkpoint manager can save. By default SIGTERM ends the process.

    Raises:
        ValueError: If the variables that the launcher sets do not fit together.
        RuntimeError: If JAX has already started the devices of this process.
        TimeoutError: If the other processes do not come in time.

    Communication: none between devices; the processes meet at the first one.

    Example:
        >>> import jax, sbp
        >>> sbp.init()  # one process: nothing to join
        >>> jax.process_count()
        1
    """
    seat = _find_seat(os.environ)
    if seat is None or seat.num_processes == 1 or jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", catch_sigterm)
    _leave_at_once_on_error()
    if seat.process_id > 0:
        _wait_for_coordinator(seat, timeout_seconds)
    _join(seat, timeout_seconds)
    _limit_exit(seat, timeout_seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """The place of this process in its job.

    Attributes:
        coordinator: ``host:port`` at which the first process listens.
        num_processes: Processes in the job.
        process_id: Which of them this is, from 0.
        local_devices: The GPUs of this machine to use; None for all visible ones.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None

    @property
    def bind_address(self) -> str | None:
        """Where the first process listens; None stands for every interface."""
        host = self.coordinator.rsplit(":", 1)[0]
        return self.coordinator if host in ("127.0.0.1", "localhost") else None


def _find_seat(environ: Mapping[str, str]) -> _Seat | None:
    """Returns what the environment says about this process; None if nothing."""
    if any(name in environ for name in LAUNCH_VARIABLES):
        return _launched_seat(environ)
    if all(name in environ for name in SLURM_VARIABLES):
        return _slurm_seat(environ)
    return None


def _launched_seat(environ: Mapping[str, str]) -> _Seat:
    found = {name: environ.get(name) for name in LAUNCH_VARIABLES}
    coordinator, num_processes, process_id = found.values()
    try:
        seat = _Seat(
            coordinator=str(coordinator),
            num_processes=int(str(num_processes)),
            process_id=int(str(process_id)),
        )
        is_valid = ":" in seat.coordinator and (
            0 <= seat.process_id < seat.num_processes
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(
            f"The launcher's variables are {values}. They have to be host:port, a"
            " number of processes, and the number of this one, counted from 0."
            " Let python -m launch.run set them, or unset all three."
        )
    return seat


def _slurm_seat(environ: Mapping[str, str]) -> _Seat:
    nodes, num_tasks, task, local_task, job = (environ[v] for v in SLURM_VARIABLES)
    # One port per job, out of the upper end of the range that is free to use.
    port = 61440 + int(job) % 4096
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return _Seat(
        coordinator=f"{_first_host(nodes)}:{port}",
        num_processes=int(num_tasks),
        process_id=int(task),
        # With --gpus-per-task=1 a task sees one GPU, whose number is 0 in each.
        local_devices=(0,) if len(visible) == 1 and visible[0] else (int(local_task),),
    )


def _first_host(nodes: str) -> str:
    """Returns the first of ``a1,b2`` or ``a[01-03,07],b2``: ``a1`` or ``a01``."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",")[0]
    numbers, _, suffix = rest.partition("]")
    return prefix + numbers.replace(",", "-").split("-")[0] + suffix.split(",")[0]


def _wait_for_coordinator(seat: _Seat, timeout_seconds: int) -> None:
    """Returns when the first process listens. JAX would abort this one instead."""
    host, port = seat.coordinator.rsplit(":", 1)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            reason = error
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Process {seat.process_id} of {seat.num_processes} waited"
                f" {timeout_seconds} s for the first one at {seat.coordinator}"
                f" ({reason}). Check that process 0 runs, that the host is its"
                " machine, and that no firewall closes the port."
            )
        time.sleep(0.1)


def _join(seat: _Seat, timeout_seconds: int) -> None:
    """Joins the other processes, in a thread: JAX's own time limit aborts."""
    errors: list[RuntimeError] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                seat.coordinator,
                seat.num_processes,
                seat.process_id,
                local_device_ids=seat.local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=NEVER_SECONDS,
                shutdown_timeout_seconds=NEVER_SECONDS,
                coordinator_bind_address=seat.bind_address,
            )
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if thread.is_alive():
        raise TimeoutError(
            f"Process {seat.process_id} of {seat.num_processes} waited"
            f" {timeout_seconds} s at {seat.coordinator} for all others to come."
            " Check that the job was started on every machine, with the same number"
            " of processes and the same coordinator."
        )
    if errors and "must be called before" in str(errors[0]):
        raise RuntimeError(
            "sbp.init() comes too late: JAX has already started the devices of this"
            f" process, which cannot join the other {seat.num_processes - 1} any more."
            " Call it right after the imports, before any array is made."
        )
    if errors:
        raise errors[0]


def _limit_exit(seat: _Seat, timeout_seconds: int) -> None:
    """Ends the process if, after its script, it waits too long for the others.

    JAX waits for all at exit. Where one is stuck, because it waits for a collective
    that not all processes have called, that would be for ever.
    """
    is_over = threading.Event()

    def watch() -> None:
        is_over.wait()
        time.sleep(timeout_seconds)
        message = (
            f"Process {seat.process_id} of {seat.num_processes} is done, but others are"
            f" not {timeout_seconds} s later. Check that every process makes the same"
            " calls in the same order, or raise sbp.init(timeout_seconds=...)."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    atexit.register(is_over.set)


def _leave_at_once_on_error() -> None:
    """Ends the process right after an exception was reported.

    Otherwise JAX waits at exit, for minutes, until the other processes end too, and
    these may be waiting for this one.
    """
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return
    report = sys.excepthook

    def report_and_leave(
        kind: type[BaseException],
        error: BaseException,
        traceback: types.TracebackType | None,
    ) -> None:
        report(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = report_and_leave
