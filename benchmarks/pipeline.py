r"""What does a pipeline cost against one device that does the same work?

    python -m benchmarks.pipeline --config=configs/bert_tiny.py \
        --config.dist.pipeline_parallel_size=4 --config.train.num_microbatches=16

Times the training step of the config, once for each of ``--schedules``, against the
step of a single stage on the same batch and microbatches, in turns. The bound is what
a schedule allows, by `sbp.pipeline.measure`: on devices of their own, stages that wait
for each other make a step longer by the bubble. ``--config.SECTION.FIELD=VALUE``
overrides a field.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.train_step import Stepper, make_framework_step
from launch import distributed, job, resolve
from launch.resolve import DeviceCount
from launch.run_config import RunConfig
from sbp import pipeline

SINGLE = "1 stage"


def main(arguments: Sequence[str]) -> None:
    """Prints a table and a line of JSON."""
    parser = harness.config_parser("python -m benchmarks.pipeline")
    parser.add_argument(
        "--num_runs", type=harness.positive, default=20, help="of each step"
    )
    parser.add_argument("--schedules", help="by commas; the config's by default")
    options, overrides = harness.parse_config(parser, arguments)
    names = options.schedules.split(",") if options.schedules else [None]

    devices = distributed.count_devices()
    try:
        values = resolve.load(options.config)
        configs = [
            resolve.resolve(values, overrides | _choose(name, overrides), devices)
            for name in names
        ]
    except resolve.ConfigError as error:
        parser.error(str(error))
    steppers = make_steppers(configs, devices)
    timings = harness.time_in_turns(steppers, num_runs=options.num_runs)
    bounds = {c.dist.pipeline_schedule: bound(c) for c in configs}
    report(configs[0], timings, bounds, title=f"{options.config}, pipeline")


def _choose(schedule: str | None, overrides: Mapping[str, str]) -> dict[str, str]:
    if schedule is None:
        return {}
    chosen = {"dist.pipeline_schedule": schedule}
    if schedule == "interleaved_1f1b":
        default = overrides.get("dist.pipeline_num_chunks", "2")
        return chosen | {"dist.pipeline_num_chunks": default}
    return chosen | {"dist.pipeline_num_chunks": "1"}


def make_steppers(
    configs: Sequence[RunConfig], devices: DeviceCount
) -> dict[str, Stepper]:
    """Returns the step of one stage, and those of the configs by schedule."""
    mesh = distributed.create_mesh(configs[0].dist, devices)
    built = job.build(configs[0], mesh)
    batch = next(built.data.train_batches())
    one = dataclasses.replace(configs[0].dist, pipeline_parallel_size=1)
    count = DeviceCount(num_devices=mesh.devices.size)
    jobs = {SINGLE: (one, distributed.create_mesh(one, count))} | {
        config.dist.pipeline_schedule: (config.dist, mesh) for config in configs
    }
    steppers = {}
    for name, (dist, devices_of_it) in jobs.items():
        config = dataclasses.replace(configs[0], dist=dist)
        steps = job.build_steps(config, devices_of_it)
        of_it = dataclasses.replace(
            built, config=config, mesh=devices_of_it, steps=steps
        )
        steppers[name], _ = make_framework_step(of_it, batch)
    return steppers


def bound(config: RunConfig) -> float:
    """Returns how much longer a step takes, if tasks take time and nothing else does.

    Forward, input gradient and weight gradient are taken to last equally long.
    """
    dist = config.dist
    schedule = pipeline.build(
        dist.pipeline_schedule,
        dist.pipeline_parallel_size,
        config.train.num_microbatches,
        dist.pipeline_num_chunks,
        head_delay=1,
    )
    report = pipeline.measure(schedule)
    return 1 / (1 - report.lockstep_bubble_fraction)


def report(
    config: RunConfig,
    timings: Mapping[str, harness.Timing],
    bounds: Mapping[str, float],
    *,
    title: str,
) -> None:
    """Prints the table and the line."""
    single = timings[SINGLE].median
    rows, results = {}, {}
    for name, timing in timings.items():
        low, high = timing.quartiles
        ratio = timing.median / single
        rows[name] = (
            f"{timing.median * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"
        )
        if name in bounds:
            rows[f"{name} / {SINGLE}"] = f"{ratio:.3f} (bubble: {bounds[name]:.3f})"
            results[name] = {
                **timing.to_json("step"),
                "step_over_single_stage": ratio,
                "bubble_bound": bounds[name],
            }
    record = {
        "benchmark": "pipeline",
        "model": config.model_name,
        "layout": config.dist.layout,
        "num_microbatches": config.train.num_microbatches,
        "global_batch_size": config.train.global_batch_size,
        "remat": config.root.remat,
        **timings[SINGLE].to_json("single_stage_step"),
        "schedules": results,
    }
    harness.report(rows, record, title=title)


if __name__ == "__main__":
    main(sys.argv[1:])
