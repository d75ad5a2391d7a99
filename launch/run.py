r"""Starts N processes of a script, one per device, on one machine or on many.

    python -m launch.run --nproc 4 script.py --its=arguments
    python -m launch.run --nproc 8 -m launch.train --config=configs/bert_large.py

    # On each of two machines of eight GPUs, with --node_rank 0 and 1:
    python -m launch.run --nnodes 2 --node_rank 0 --coordinator host0:29500 \
        --nproc 8 -m launch.train --config=configs/bert_large.py

In the script, ``import sbp; sbp.init()`` joins the processes. Each line of output
begins with its rank. When one process fails, the others are ended and its exit code is
returned; Ctrl-C and SIGTERM go to all. Under SLURM, ``srun python script.py`` does the
same without this module.
"""

import argparse
import contextlib
import dataclasses
import glob
import importlib.util
import os
import pathlib
import socket
import sys
from collections.abc import Mapping, Sequence

from launch import supervisor

CHILD = str(pathlib.Path(__file__).with_name("child.py"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is started, as the command line says it.

    Attributes:
        nproc: Processes on this machine.
        nnodes: Machines.
        node_rank: Which of them this is, from 0.
        coordinator: ``host:port`` of the first process; None lets this machine choose,
            if it is the only one.
        platform: ``cpu`` or ``gpu``; None takes the GPUs where there are some.
        grace_seconds: Time to end in after a signal, before SIGKILL.
        is_module: Whether ``target`` is the name of a module.
        target: Path of the script, or name of the module.
        arguments: The rest of its command line.
    """

    nproc: int
    nnodes: int
    node_rank: int
    coordinator: str | None
    platform: str | None
    grace_seconds: float
    is_module: bool
    target: str
    arguments: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes, waits for them and returns the exit code of the job."""
    parser = _parser()
    options = Options(**vars(parser.parse_args(argv)))
    environ = dict(os.environ)
    problems = find_problems(options, environ)
    if problems:
        parser.error("\n  ".join(["", *problems]) if problems[1:] else problems[0])
    try:
        address, reservation = _reserve(options)
    except OSError as error:
        parser.error(
            f"--coordinator {options.coordinator}: this port cannot be used here"
            f" ({error.strerror}). Take another one, the same on every machine."
        )
    with reservation:
        commands = create_commands(options, environ, address)
        return supervisor.run_all(commands, grace_seconds=options.grace_seconds)


def find_problems(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Returns everything that is wrong with the options, a sentence or two each."""
    return [
        *_problems_of_counts(options),
        *_problems_of_coordinator(options),
        *_problems_of_devices(options, environ),
        *_problems_of_target(options),
    ]


def create_commands(
    options: Options, environ: Mapping[str, str], coordinator: str
) -> list[supervisor.Command]:
    """Returns what each rank of this machine runs, and in which environment.

    Args:
        options: Options without problems.
        environ: The environment to start from.
        coordinator: ``host:port`` of the first process.
    """
    kind = "module" if options.is_module else "script"
    arguments = (sys.executable, CHILD, kind, options.target, *options.arguments)
    commands = []
    for local_rank in range(options.nproc):
        rank = options.node_rank * options.nproc + local_rank
        environment = {
            **environ,
            **_device_variables(options, environ, local_rank),
            "SBP_COORDINATOR": coordinator,
            "SBP_NUM_PROCESSES": str(options.nnodes * options.nproc),
            "SBP_PROCESS_ID": str(rank),
            "PYTHONUNBUFFERED": "1",  # lines come when they are printed
        }
        commands.append(supervisor.Command(rank, arguments, environment))
    return commands


def _parser() -> argparse.ArgumentParser:
    summary, _, epilog = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m launch.run",
        usage="%(prog)s --nproc N [options] [-m] script [arguments ...]",
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", type=int, required=True, help="processes on this machine")
    add("--nnodes", type=int, default=1, help="machines (default 1)")
    add("--node_rank", type=int, default=0, help="which one this is (default 0)")
    add("--coordinator", help="host:port of the first machine; any free port there")
    add("--platform", choices=("cpu", "gpu"), help="default: gpu where there is one")
    add(
        "--grace_seconds",
        type=float,
        default=30.0,
        help="time to end in after Ctrl-C, before SIGKILL (default 30)",
    )
    add("-m", action="store_true", dest="is_module", help="script names a module")
    add("target", metavar="script", help="path of a script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _problems_of_counts(options: Options) -> list[str]:
    problems = []
    if options.nproc < 1:
        problems.append(f"--nproc {options.nproc}: start at least 1 process.")
    if options.nnodes < 1:
        problems.append(f"--nnodes {options.nnodes}: a job has at least 1 machine.")
    elif not 0 <= options.node_rank < options.nnodes:
        last = options.nnodes - 1
        valid = f"0 to {last}" if last else "0 (or raise --nnodes)"
        problems.append(
            f"--node_rank {options.node_rank}: with --nnodes {options.nnodes} it is"
            f" {valid}."
        )
    if options.grace_seconds < 0:
        problems.append(f"--grace_seconds {options.grace_seconds}: at least 0.")
    return problems


def _problems_of_coordinator(options: Options) -> list[str]:
    if options.coordinator is None:
        if options.nnodes < 2:
            return []
        return [
            f"--nnodes {options.nnodes} needs --coordinator host:port, the machine of"
            " --node_rank 0 and a free port there, the same on every machine."
        ]
    host, _, port = options.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return [
            f"--coordinator {options.coordinator}: write host:port, with a port from 1"
            " to 65535, for example host0:29500."
        ]
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        return [f"--coordinator {options.coordinator}: {error.strerror} ({host})."]
    return []


def _problems_of_devices(options: Options, environ: Mapping[str, str]) -> list[str]:
    if _platform(options, environ) == "cpu":
        return []
    gpus = _visible_gpus(environ)
    if len(gpus) >= options.nproc:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return [
        f"--nproc {options.nproc}: one GPU each, but this machine shows {len(gpus)}"
        f"{limit}. Lower --nproc, or add --platform cpu."
    ]


def _problems_of_target(options: Options) -> list[str]:
    target = options.target
    if not options.is_module:
        if os.path.exists(target):
            return []
        is_module = all(part.isidentifier() for part in target.split("."))
        is_module = is_module and not target.endswith(".py")
        hint = f" For a module, write -m {target}." if is_module else ""
        return [f"{target}: no such script in {os.getcwd()}.{hint}"]
    try:
        is_found = importlib.util.find_spec(target) is not None
    except (ImportError, ValueError):
        is_found = False
    return (
        [] if is_found else [f"-m {target}: no such module, seen from {os.getcwd()}."]
    )


def _reserve(options: Options) -> tuple[str, contextlib.AbstractContextManager[object]]:
    """Returns the coordinator's address, and its port held until the job is over.

    Raises:
        OSError: If the port is taken, on the machine of the first process.
    """
    if options.coordinator is not None and options.node_rank > 0:
        return options.coordinator, contextlib.nullcontext()
    if options.coordinator is None:
        host, port = "127.0.0.1", 0
    else:
        host, port = "", int(options.coordinator.rpartition(":")[2])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    # Bound but not listening: others stay away, and the first process, whose server
    # sets the same option, may still listen.
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host, port))
    return options.coordinator or f"{host}:{holder.getsockname()[1]}", holder


def _platform(options: Options, environ: Mapping[str, str]) -> str:
    if options.platform is not None:
        return options.platform
    named = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if named:
        return "cpu" if named == "cpu" else "gpu"
    return "gpu" if _visible_gpus(environ) else "cpu"


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs in the form of CUDA_VISIBLE_DEVICES, which limits them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def _device_variables(
    options: Options, environ: Mapping[str, str], local_rank: int
) -> dict[str, str]:
    """Returns the variables that give a process its one device."""
    if _platform(options, environ) == "gpu":
        gpu = {"CUDA_VISIBLE_DEVICES": _visible_gpus(environ)[local_rank]}
        return gpu if options.platform is None else {**gpu, "JAX_PLATFORMS": "cuda,cpu"}
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


if __name__ == "__main__":
    sys.exit(main())
