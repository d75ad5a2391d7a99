"""The folder of a run: what may be put there, and what is written at the start."""

import os
import pathlib
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils

from launch import resolve
from launch.checkpoint import Checkpointer, CheckpointError
from launch.run_config import RunConfig
from launch.run_files import CHECKPOINTS as CHECKPOINTS
from launch.run_files import CONFIG_FILE, TOKENIZER_FILE

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


def load_config(directory: str) -> dict[str, Any]:
    """Returns the values of the config in the folder of a run.

    Raises:
        CheckpointError: If it is no such folder.
        ConfigError: If its config cannot be read.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"'{directory}' holds no {CONFIG_FILE}. Name the workdir of a run."
        )
    return resolve.load(str(path))


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


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file in one go: a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
