"""Merges adapters into the weights of a run.

    python -m launch.merge_lora runs/adapted runs/merged

What is written is the workdir of a run without adapters, at step 0, whose model
computes the same up to rounding: every tool takes it, and ``config.init_from`` too.
``python -m launch.convert --from=sbp`` merges on its own.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from launch import command_line, convert, workdir
from launch.run_config import RunConfig
from models import lora
from models.lora import LoraConfig


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.merge_lora",
        description="Merges the adapters of a run into its weights.",
        allow_abbrev=False,
    )
    parser.add_argument("source", help="workdir of a run with adapters")
    parser.add_argument("target", help="workdir to write, new or empty")
    parser.add_argument("--step", type=int, help="of the checkpoint, if not the newest")
    options = parser.parse_args(arguments)
    return command_line.exit_code(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Merges as the options say, and prints what there is now."""
    config, num_params = merge_run(options.source, options.target, options.step)
    print(
        f"{options.target}: {config.model_name} of {num_params:,} parameters, adapters"
        f" of rank {config.lora.rank} merged, from {options.source}"
    )


def merge_run(source: str, target: str, step: int | None) -> tuple[RunConfig, int]:
    """Writes the workdir of a run without adapters.

    Args:
        source: Workdir of a run with adapters.
        target: To make, or an empty directory.
        step: Of the checkpoint. None for the newest.

    Returns:
        The config of the source, and the number of parameters of the target.

    Raises:
        ValueError: If there are no adapters.
        CheckpointError: If the source cannot be read, or the target not be written.
        FileExistsError: If there is something in the target.
    """
    workdir.check_new(target)
    config, adapted = convert.read_run(pathlib.Path(source), step)
    if not config.lora.is_on:
        raise ValueError(
            f"'{source}' has no adapters, lora.rank=None. There is nothing to merge."
        )
    params = lora.merge(adapted, config.lora.scale)
    num_params = convert.count_parameters(params)
    plain = dataclasses.replace(config, lora=LoraConfig())
    convert.write_run(target, plain, convert.build_steps(plain), params)
    workdir.copy_tokenizer(source, target)
    return config, num_params


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
