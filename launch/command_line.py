"""The command line of the programs: a few flags, all else is a field of the config."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

from launch.checkpoint import CheckpointError

# What a user of a trained model can cause; training has a list of its own.
EXPECTED = (CheckpointError, OSError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line says.

    Attributes:
        config: Config file, ``.py`` or ``.yaml``.
        overrides: Texts by dotted field, in the order given.
        workdir: Folder of the run.
        resume: Go on from the newest checkpoint in ``workdir``.
        eval_only: Evaluate the newest checkpoint in ``workdir``, train nothing.
        fast_dev_run: Two small steps through everything, in a folder of their own.
        dump_hlo: Write the optimized program of the step to ``workdir``.
    """

    config: str
    overrides: dict[str, str]
    workdir: str
    resume: bool = False
    eval_only: bool = False
    fast_dev_run: bool = False
    dump_hlo: bool = False


FLAGS = {
    "--resume": "go on from the newest checkpoint in the workdir, on any layout",
    "--eval_only": "evaluate the newest checkpoint in the workdir, train nothing",
    "--fast_dev_run": "try a config: two small steps, an evaluation, a checkpoint, all"
    " in a folder of the workdir that the next trial replaces",
    "--dump_hlo": "write the optimized program of the step to the workdir",
}


def parse(arguments: Sequence[str]) -> Options:
    """Returns what the command line says; argparse ends the program if it is wrong.

    Example:
        >>> parse(["--config=a.py", "--workdir=w", "--config.dist.x=2"]).overrides
        {'dist.x': '2'}
    """
    parser = argparse.ArgumentParser(
        prog="python -m launch.train",
        description="Trains a model.",
        epilog="--config.SECTION.FIELD=VALUE overrides a field of the config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="config file, .py or .yaml")
    parser.add_argument(
        "--workdir", type=_folder, required=True, help="folder of the run"
    )
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)

    rest, overrides = [], {}
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        field, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals and not pending:
            parser.error(f"{argument} has no value. Write {argument}=VALUE.")
        overrides[field] = text if equals else pending.pop(0)
    options = Options(overrides=overrides, **vars(parser.parse_args(rest)))
    if options.fast_dev_run and options.resume:
        parser.error(
            "--fast_dev_run starts anew, with --resume there is nothing to try. Leave"
            " one of them out."
        )
    return options


def add_trained(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which trained model to use, and on which layout."""
    add = parser.add_argument
    add("--workdir", required=True, help="folder of a run, or made by launch.convert")
    add("--step", type=int, help="of the checkpoint, if not the newest")
    for name, text in (
        ("data_parallel_size", "replicas of the model"),
        ("tensor_parallel_size", "devices of each replica"),
    ):
        add(f"--{name}", type=int, default=1, help=f"{text} (default: 1)")


def exit_code(work: Callable[[], object]) -> int:
    """Does the work of a command and returns its exit code.

    For what a user can cause the message says what to do, without a stack trace.
    """
    try:
        work()
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _folder(text: str) -> str:
    """Returns a folder's name as it is, but not an empty one: the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty. Write --workdir=runs/NAME.")
    return text
