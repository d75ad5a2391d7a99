r"""How long does a training step take, and what does the framework add to it?

    python -m benchmarks.train_step --config=configs/bert_tiny.py

Times the step that `launch.train` runs, on the layout of the config, in turns with a
bare one and with a matrix product. The bare one is the same model, optimizer and batch,
written below in a few lines of Flax and Optax for a single device; the matrix product
is what the machine can do at that time. ``--config.SECTION.FIELD=VALUE`` overrides a
field.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import harness
from launch import distributed, hardware, job, metrics, optimizer, resolve, step
from launch.run_config import RunConfig
from models import MODELS

OPTIMIZERS = {"adamw": optax.adamw, "lamb": optax.lamb}


@dataclasses.dataclass
class Stepper:
    """Runs a compiled step again and again, each on the state that the last one left.

    Attributes:
        step: Donates its state: ``(state, batch) -> (state, metrics)``.
        state: Before the next step.
        batch: The same for all steps.
    """

    step: Any
    state: Any
    batch: Any

    def __call__(self) -> Any:
        """Runs a step and returns its metrics."""
        self.state, values = self.step(self.state, self.batch)
        return values, self.state


def main(arguments: Sequence[str]) -> None:
    """Prints a table and a line of JSON."""
    parser = harness.config_parser("python -m benchmarks.train_step")
    parser.add_argument(
        "--num_runs", type=harness.positive, default=20, help="of each step"
    )
    options, overrides = harness.parse_config(parser, arguments)

    devices = distributed.count_devices()
    try:
        config = resolve.resolve(resolve.load(options.config), overrides, devices)
    except resolve.ConfigError as error:
        parser.error(str(error))
    mesh = distributed.create_mesh(config.dist, devices)
    built = job.build(config, mesh)
    batch = next(built.data.train_batches())
    ours, compile_seconds = make_framework_step(built, batch)
    bare = make_bare_step(config, batch)
    product, product_flops = make_product(mesh, config.model.dtype)
    works: dict[str, Callable[[], Any]] = {
        "step": ours,
        "bare_step": bare,
        "product": product,
    }
    timings = harness.time_in_turns(works, num_runs=options.num_runs)
    peak = hardware.Peak(
        product_flops / timings["product"].median,
        f"{config.model.dtype} matrix product in turns with the steps",
    )
    report(
        config,
        timings,
        cost=built.cost(peak),
        compile_seconds=compile_seconds,
        title=f"{options.config}, {config.dist.layout}",
    )


def make_framework_step(
    built: job.Job, batch: dict[str, np.ndarray]
) -> tuple[Stepper, float]:
    """Returns the step of `launch.train` on its mesh, and what compiling it took."""
    state, on_devices = built.create_state(), built.to_device(batch)
    program: Any = step.build_train_step(built.steps)
    start = time.perf_counter()
    compiled = program.lower(state, on_devices).compile()
    seconds = time.perf_counter() - start
    return Stepper(compiled, state, on_devices), seconds


def make_bare_step(config: RunConfig, batch: dict[str, np.ndarray]) -> Stepper:
    """Returns the step as one would write it for a single device without a framework.

    No mesh, no microbatches, no stacked blocks, no rematerialization.
    """
    module = MODELS[config.model_name].module
    model = module(config.model, rngs=nnx.Rngs(config.train.seed))
    graph, params = nnx.split(model)
    optim = config.optim
    update_rule = optax.chain(
        optax.clip_by_global_norm(optim.grad_clip_norm or float("inf")),
        OPTIMIZERS[optim.name](
            optimizer.learning_rate_schedule(optim, num_steps=config.train.num_steps),
            *optim.betas,
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )
    num_samples = config.train.global_batch_size

    def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params)
        keys_B = jax.random.split(key, num_samples) if config.model.is_random else None
        sums, counts = (
            model.losses(model.encode(batch, keys_B), batch),
            model.counts(batch),
        )
        means = {name: sums[name] / counts[name] for name in sums}
        return sum(x for name, x in means.items() if name.endswith("_loss")), means

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, key = state
        key, step_key = jax.random.split(key)
        grads, means = jax.grad(loss, has_aux=True)(params, batch, step_key)
        updates, opt_state = update_rule.update(grads, opt_state, params)
        means["grad_norm"] = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), opt_state, key), means

    state = (params, update_rule.init(params), jax.random.key(config.train.seed))
    return Stepper(
        jax.jit(train_step, donate_argnums=0), state, jax.tree.map(jnp.asarray, batch)
    )


def make_product(
    mesh: jax.sharding.Mesh, dtype: str
) -> tuple[Callable[[], jax.Array], int]:
    """Returns a large matrix product and its FLOPs, as if all devices did one.

    Virtual CPU devices are one machine, and one product keeps it busy.
    """
    device = mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    size = 1024 if is_cpu else 8192
    factor = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(jnp.matmul)
    num_products = 1 if is_cpu else mesh.size
    return lambda: product(factor, factor), num_products * 2 * size**3


def report(
    config: RunConfig,
    timings: dict[str, harness.Timing],
    *,
    cost: metrics.StepCost,
    compile_seconds: float,
    title: str,
) -> None:
    """Prints the table and the line."""
    ours, bare = timings["step"], timings["bare_step"]
    rates = cost.rates(ours.median)
    bare_rates = cost.rates(bare.median)
    rows = {
        "step, median": f"{ours.median * 1e3:.1f} ms",
        "half of the steps": f"{ours.quartiles[0] * 1e3:.1f} to "
        f"{ours.quartiles[1] * 1e3:.1f} ms",
        "tokens/s": f"{rates['tokens_per_second']:,.0f}",
        "samples/s": f"{rates['samples_per_second']:,.1f}",
        "model FLOP/s": f"{rates['model_tflops_per_second'] * 1e12:.3g}",
        "FLOP/s of a matrix product": f"{cost.peak.flops_per_second:.3g}",
        "share of that": f"{rates['utilization']:.1%}",
        "bare step, median": f"{bare.median * 1e3:.1f} ms",
        "bare step, share of that": f"{bare_rates['utilization']:.1%}",
        "step / bare step": f"{ours.median / bare.median:.3f}",
        "compilation": f"{compile_seconds:.1f} s",
    }
    record = {
        "benchmark": "train_step",
        "model": config.model_name,
        "layout": config.dist.layout,
        "global_batch_size": config.train.global_batch_size,
        "seq_length": config.data.seq_length,
        "dtype": config.model.dtype,
        **ours.to_json("step"),
        **bare.to_json("bare_step"),
        **timings["product"].to_json("product"),
        "step_over_bare_step": ours.median / bare.median,
        **{name: rates[name] for name in rates if name != "step_seconds"},
        "model_flops": cost.model_flops,
        "peak_flops_per_second": cost.peak.flops_per_second,
        "peak_source": cost.peak.source,
        "compile_seconds": compile_seconds,
    }
    harness.report(rows, record, title=title)


if __name__ == "__main__":
    main(sys.argv[1:])
