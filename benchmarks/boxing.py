"""What does a change of signature take, against JAX's own reshard?

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m benchmarks.boxing

First the latency of calls that move nothing; then conversions of one tensor on a 2x4
placement: inside jit by this package, inside jit by ``jax.sharding.reshard``, and the
eager call. Pairs on which JAX ends the process are left to this package.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import sbp
from benchmarks import harness
from sbp import boxing
from sbp.signature import Signature, short
from sbp.spec import to_sharding

PAIRS = (
    ("S(0),B", "B,B"),
    ("S(0),P", "S(0),B"),
    ("S(0),P", "S(0),S(0)"),
    ("B,S(0)", "B,S(1)"),
    ("S(0),S(1)", "S(1),S(0)"),
    ("S(0),S(0)", "S(1),S(0)"),
    ("S(0),B", "B,S(0)"),
    ("S(0),P", "P,S(0)"),
)
CALLS = 1000  # per run, of calls that take microseconds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.boxing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", type=harness.positive, default=2048, help="of both dims"
    )
    parser.add_argument("--num_runs", type=harness.positive, default=20)
    options = parser.parse_args()
    if options.size % 8:
        parser.error(
            f"--size {options.size} is not divisible by the 8 devices that cut it. Use"
            f" {options.size + -options.size % 8}."
        )
    num_devices = len(jax.devices("cpu"))
    if num_devices != 8:
        parser.error(
            f"The placement is 2x4, but there are {num_devices} CPU devices. Run with"
            " JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8."
        )
    placement = sbp.placement.all("cpu", (2, 4))
    value = np.ones((options.size, options.size), np.float32)
    rows: dict[str, str] = {}
    record: dict[str, Any] = {"benchmark": "boxing", "size": options.size}
    for name, timing in time_calls(placement, value, options.num_runs).items():
        rows[name] = f"{timing.median / CALLS * 1e6:.1f} us"
        record |= timing.to_json(f"{name} x{CALLS}")
    for names in PAIRS:
        source, target = map(sbp.parse, names)
        plan = sbp.plan(source, target, value.shape, value.dtype, placement)
        works = conversions(placement, value, source, target)
        timings = harness.time_in_turns(works, num_runs=options.num_runs)
        pair = f"{short(source)} -> {short(target)}"
        rows[pair] = ", ".join(
            [f"{plan.num_bytes / 2**20:.2f} MiB"]
            + [f"{name} {t.median * 1e3:.2f} ms" for name, t in timings.items()]
        )
        for name, timing in timings.items():
            record |= timing.to_json(f"{pair} {name}")
    harness.report(rows, record, title=f"Changes of signature, {value.shape} on 2x4")


def time_calls(
    placement: sbp.Placement, value: np.ndarray, num_runs: int
) -> dict[str, harness.Timing]:
    """Times calls that move nothing."""
    signature = sbp.parse("S(0),P")
    x = sbp.to_global(value, placement, signature)
    there = sbp.parse("B,S(1)")

    def plan_cold() -> None:
        boxing.route.cache_clear()
        sbp.plan(signature, there, value.shape, value.dtype, placement)

    calls: dict[str, Callable[[], Any]] = {
        "to_global of a matching tensor": lambda: sbp.to_global(
            x, placement, signature
        ),
        "plan, seen before": lambda: sbp.plan(
            signature, there, value.shape, value.dtype, placement
        ),
        "plan, new": plan_cold,
    }

    def repeat(call: Callable[[], Any]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(CALLS):
                call()

        return work

    works = {name: repeat(call) for name, call in calls.items()}
    return harness.time_in_turns(works, num_warmup=1, num_runs=min(num_runs, 5))


def conversions(
    placement: sbp.Placement, value: np.ndarray, source: Signature, target: Signature
) -> dict[str, Callable[[], jax.Array]]:
    """Returns the ways to convert one tensor, by name."""
    x = sbp.to_global(value, placement, source)
    ours = jax.jit(lambda x: sbp.to_global(x, sbp=target))
    works: dict[str, Callable[[], jax.Array]] = {
        "sbp in jit": lambda: ours(x),
        "sbp": lambda: sbp.to_global(x, sbp=target),
    }
    leaves, enters = (
        {i for i, c in enumerate(s) if c == sbp.partial_sum} for s in (source, target)
    )
    if not (leaves - enters and enters - leaves):  # JAX aborts on these
        sharding = to_sharding(placement, target)
        theirs = jax.jit(lambda x: jax.sharding.reshard(x, sharding))
        works["jax in jit"] = lambda: theirs(x)
    return works


if __name__ == "__main__":
    main()
