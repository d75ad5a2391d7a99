"""Trains a model.

    python -m launch.train --config=configs/bert_tiny.py --workdir=runs/bert_tiny

``--config.SECTION.FIELD=VALUE`` overrides a field of the config; `configs.base` lists
them. The workdir gets ``config.yaml``, ``metrics.jsonl``, TensorBoard events,
checkpoints and, at the end, a picture of the losses.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

import jax

import sbp
from launch import (
    command_line,
    distributed,
    hardware,
    job,
    loop,
    metrics,
    plots,
    progress,
    report,
    resolve,
    workdir,
)
from launch.checkpoint import Checkpointer, CheckpointError
from launch.metrics import MetricLogger
from launch.programs import Programs
from launch.signals import StopRequest
from launch.state import TrainState

# What a user can cause. The message says what to do, so no stack trace is shown.
EXPECTED = (
    CheckpointError,
    loop.DivergenceError,
    OSError,
    resolve.ConfigError,
    job.DataError,
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = command_line.parse(arguments)
    try:
        return run(options)
    except EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: command_line.Options) -> int:
    """Trains or evaluates as the options say, and returns the exit code."""
    sbp.init()
    devices = distributed.count_devices()
    is_continued = options.resume or options.eval_only
    config = resolve.resolve(
        resolve.load(options.config),
        options.overrides,
        devices,
        origin=workdir.origin(options.workdir) if is_continued else None,
    )
    if options.fast_dev_run:
        config = resolve.shorten(config)
    mesh = distributed.create_mesh(config.dist, devices)
    if options.fast_dev_run and not options.eval_only:
        trial = workdir.start_trial(options.workdir)
        options = dataclasses.replace(options, workdir=str(trial))
    folder = pathlib.Path(options.workdir) / workdir.CHECKPOINTS
    with Checkpointer(folder, keep=config.checkpoint.keep) as checkpointer:
        workdir.check(options.workdir, checkpointer, needs_checkpoint=is_continued)
        tokenizer = workdir.tokenizer(options.workdir) if is_continued else None
        built = job.build(config, mesh, tokenizer=tokenizer)
        say(*report.describe_config(built.config), built.data.summary())
        say(report.describe_devices(built, devices), report.describe_attention(built))
        if is_continued:
            say(*report.describe_changes(built, checkpointer))
        state = built.restore(checkpointer) if is_continued else built.create_state(say)
        if options.eval_only:
            evaluate(built, state)
            return 0
        # Not before: a run that cannot go on leaves the config of the one that could.
        workdir.prepare(options.workdir, built.config, built.data.tokenizer)
        if int(state.step) >= config.train.num_steps:
            say(report.describe_end(built, int(state.step)))
            return 0
        return train(built, state, checkpointer, options)


def train(
    built: job.Job,
    state: TrainState,
    checkpointer: Checkpointer,
    options: command_line.Options,
) -> int:
    """Compiles, trains, evaluates, draws the losses, and returns the exit code."""
    config, directory = built.config, pathlib.Path(options.workdir)
    peak = hardware.matmul_peak(list(built.mesh.devices.flat), config.model.dtype)
    programs, first = Programs(built, peak), int(state.step)
    start = time.perf_counter()
    train_step = programs.at(first + 1).run
    seconds = time.perf_counter() - start
    say(report.describe_program(built, train_step, seconds, peak))
    if options.dump_hlo:
        workdir.write_whole(directory / workdir.HLO_FILE, train_step.as_text())
    with (
        StopRequest() as stop,
        MetricLogger(
            directory, num_steps=config.train.num_steps, resumed_step=first
        ) as logger,
    ):
        steps = loop.Loop(
            job=built,
            programs=programs,
            eval_step=built.compile_eval_step(),
            checkpointer=checkpointer,
            logger=logger,
            stop=stop,
        )
        state = steps.run(state)
        logger.print(f"saved step {int(state.step)} in {options.workdir}")
    if jax.process_index() == 0:
        plots.save_loss_curves(
            metrics.read_metrics(logger.path),
            directory / workdir.LOSS_PLOT,
            title=f"{config.model_name}, {config.dist.layout}",
        )
    return stop.exit_code


def evaluate(built: job.Job, state: TrainState) -> None:
    """Prints the losses and accuracies on the held-out split."""
    means = loop.evaluate(built, built.compile_eval_step(), state)
    say(f"step {int(state.step)}  evaluation  {progress.format_metrics(means)}")


def say(*lines: str) -> None:
    """Prints lines, from the first process alone."""
    if jax.process_index() == 0:
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
