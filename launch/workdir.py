"""The folder of a run: what may be put there, and what is written at the start."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, TextIO

import jax
from jax.experimental import multihost_utils

from launch import resolve
from launch.checkpoint import Checkpointer, CheckpointError
from launch.run_config import RunConfig
from launch.run_files import CHECKPOINTS as CHECKPOINTS
from launch.run_files import CONFIG_FILE, TOKENIZER_FILE
from models.published_files import CONFIG_FILE as PUBLISHED_CONFIG_FILE

LOSS_PLOT = "loss.png"
HLO_FILE = "train_step.hlo.txt"
TRIAL = "fast_dev_run"


def check(
    directory: str, checkpointer: Checkpointer, *, needs_checkpoint: bool
) -> None:
    """Checks that a run may begin, or go on, in a folder. Writes nothing.

    Raises:
        CheckpointError: If there is no checkpoint to go on from, or if there is one
            that a new run would bury.
    """
    latest = checkpointer.latest_step()
    if needs_checkpoint and latest is None:
        raise CheckpointError(
            f"There is no checkpoint in '{directory}' to go on from. Name the workdir"
            " of an earlier run, or start a new one without --resume and --eval_only."
        )
    if not needs_checkpoint and latest is not None:
        raise CheckpointError(
            f"'{directory}' already holds a run, with a checkpoint of step {latest}."
            " Add --resume to go on with it, or choose another --workdir."
        )


def start_trial(directory: str) -> pathlib.Path:
    """Returns the folder of a trial inside that of a run, the last trial removed.

    Raises:
        OSError: If it cannot be removed.
    """
    path = pathlib.Path(directory) / TRIAL
    if jax.process_index() == 0 and path.exists():
        shutil.rmtree(path)
    if jax.process_count() > 1:  # none may look before it is gone
        multihost_utils.sync_global_devices(TRIAL)
    return path


def origin(directory: str) -> str | None:
    """Returns the folder of a run if it has the config of one, else None."""
    return directory if (pathlib.Path(directory) / CONFIG_FILE).is_file() else None


def tokenizer(directory: str) -> str | None:
    """Returns the path of the tokenizer in the folder of a run, None if it has none."""
    path = pathlib.Path(directory) / TOKENIZER_FILE
    return str(path) if path.is_file() else None


def load_config(directory: str) -> dict[str, Any]:
    """Returns the values of the config in the folder of a run.

    Raises:
        CheckpointError: If it is no such folder.
        ConfigError: If its config cannot be read.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    if not path.is_file():
        remedy = "Name the workdir of a run."
        if (path.parent / PUBLISHED_CONFIG_FILE).is_file():
            remedy = (
                "It seems to be in the format of Hugging Face: make a workdir of it by"
                f" python -m launch.convert --from=hf --to=sbp {directory} WORKDIR."
            )
        raise CheckpointError(f"'{directory}' holds no {CONFIG_FILE}. {remedy}")
    return resolve.load(str(path))


def check_new(directory: str) -> None:
    """Checks that a folder is new or empty, so that nothing of it gets lost.

    Raises:
        FileExistsError: If it is not, or is a file.
    """
    path = pathlib.Path(directory)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"'{path}' is a file. Name a new directory.")
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"'{path}' is not empty. Name a new directory.")


def prepare(directory: str, config: RunConfig, tokenizer: Any = None) -> pathlib.Path:
    """Makes the folder of a run, from the first process alone.

    Args:
        directory: The folder.
        config: Resolved; written there.
        tokenizer: Written there too, since nobody can use the model without it; None if
            it has none.

    Returns:
        The folder.

    Raises:
        OSError: If that is not possible.
    """
    path = pathlib.Path(directory)
    if jax.process_index() == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / CONFIG_FILE, resolve.to_yaml(config))
            if tokenizer is not None:
                write_whole(path / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
        except OSError as error:
            raise OSError(
                f"--workdir={directory} cannot be written: {error.strerror}"
                f" ('{error.filename}'). Name a folder that you may make or write."
            ) from error
    return path


def copy_tokenizer(source: str, target: str) -> None:
    """Copies the tokenizer of a run into another folder, if it has one of its own."""
    file = pathlib.Path(source) / TOKENIZER_FILE
    if file.is_file():
        shutil.copy(file, target)


def check_output(path: str | None) -> None:
    """Checks that a file can be written, before the work that would be lost otherwise.

    Args:
        path: Given as ``--output``; None for the standard output.

    Raises:
        FileNotFoundError: If its folder is missing.
        IsADirectoryError: If it is a folder.
    """
    if path is None:
        return
    file = pathlib.Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"--output={path} is a folder. Name a file in it.")
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"--output={path}: there is no folder '{file.parent}'. Make it first."
        )


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file in one go: a reader sees the old text or the new one."""
    with open_whole(path) as file:
        file.write(text)


@contextlib.contextmanager
def open_whole(path: pathlib.Path) -> Iterator[TextIO]:
    """Opens a file that is there when all is written, and not after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
