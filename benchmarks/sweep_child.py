"""Measures one case of a sweep in a process of its own; see `benchmarks.sweep`."""

import json
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from benchmarks.train_step import Stepper
from launch import distributed, families, hardware, job, metrics, resolve, state, step
from launch.run_config import RunConfig


def main(arguments: list[str]) -> None:
    """Reads the case, ``{"config", "fields", "num_runs"}``; prints a line of JSON."""
    case = json.loads(arguments[0])
    devices = distributed.count_devices()
    overrides = {name: str(value) for name, value in case["fields"].items()}
    try:
        config = resolve.resolve(resolve.load(case["config"]), overrides, devices)
    except resolve.ConfigError as error:
        sys.exit(str(error))
    mesh = distributed.create_mesh(config.dist, devices)
    steps = job.build_steps(config, mesh)
    rng = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda leaf: jax.device_put(
            np.asarray(rng.integers(0, 2, leaf.shape)).astype(leaf.dtype),
            NamedSharding(mesh, P("data")),
        ),
        families.batch_shapes(config),
    )
    start = time.perf_counter()
    train_state = state.create_state(
        steps.model,
        steps.optimizer,
        seed=0,
        shardings=steps.shardings,
        loss_scaling=steps.loss_scaling,
    )
    program: Any = step.build_train_step(steps)
    compiled = program.lower(train_state, batch).compile()
    compile_seconds = time.perf_counter() - start
    stepper = Stepper(compiled, train_state, batch)
    timings = harness.time_in_turns(
        {"step": stepper}, num_warmup=2, num_runs=case["num_runs"]
    )
    memory = compiled.memory_analysis()
    record = {
        **timings["step"].to_json("step"),
        **rates(config, timings["step"].median, list(mesh.devices.flat)),
        "argument_bytes_per_device": memory.argument_size_in_bytes,
        "temporary_bytes_per_device": memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
        "machine": harness.describe_machine(),
    }
    print(json.dumps(record))


def rates(
    config: RunConfig, seconds: float, devices: list[jax.Device]
) -> dict[str, float]:
    """Returns samples, tokens and FLOP per second, and the share of the peak."""
    family = families.FAMILIES[config.model_name]
    size = config.train.global_batch_size
    cost = metrics.StepCost(
        num_samples=size,
        num_tokens=size * family.num_tokens(config),
        model_flops=family.train_flops(config),
        peak=hardware.matmul_peak(devices, config.model.dtype),
    )
    return cost.rates(seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
