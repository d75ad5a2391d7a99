r"""How fast is attention, and how much memory does it take?

    python -m benchmarks.attention

Times the implementations of `models.attention` in turns with that of JAX,
`jax.nn.dot_product_attention`: forward, and forward and back. Temporary memory is read
off the compiled programs. On a GPU ``cudnn`` is among them, in bfloat16.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import harness
from models.attention import CORES
from models.masks import AttentionMask

REFERENCE = "jax.nn"
NUM_HEADS, HEAD_DIM = 12, 64


def main(arguments: Sequence[str]) -> None:
    """Prints a table and a line of JSON for each length and mask."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", allow_abbrev=False
    )
    parser.add_argument(
        "--lengths", type=harness.positive, nargs="+", default=[256, 512, 1024]
    )
    parser.add_argument(
        "--num_samples", type=harness.positive, default=4, help="of 12 heads of 64"
    )
    parser.add_argument(
        "--num_runs", type=harness.positive, default=10, help="of each program"
    )
    options = parser.parse_args(arguments)
    for length in options.lengths:
        for is_causal in (False, True):
            compare(
                (options.num_samples, length, NUM_HEADS, HEAD_DIM),
                is_causal=is_causal,
                num_runs=options.num_runs,
            )


def compare(
    shape: tuple[int, int, int, int], *, is_causal: bool, num_runs: int
) -> None:
    """Prints the table and the line of one length.

    Args:
        shape: Of queries, keys and values, ``(B, L, H, K)``.
        is_causal: Whether a query sees no later key.
        num_runs: Of each program.
    """
    is_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if is_cpu else "bfloat16"
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (jax.random.normal(key, shape, dtype) for key in keys)
    programs: dict[tuple[str, str], Any] = {}
    works: dict[str, Callable[[], Any]] = {}
    for name, core in cores(is_causal=is_causal, has_cudnn=not is_cpu).items():
        for direction, run, given in (
            ("forward", core, (q, k, v)),
            ("both", functools.partial(both_ways, core), (q, k, v, grad)),
        ):
            program = jax.jit(run).lower(*given).compile()
            programs[name, direction] = program
            works[f"{name} {direction}"] = functools.partial(program, *given)
    timings = harness.time_in_turns(works, num_runs=num_runs, runs_per_turn=2)
    rows: dict[str, str] = {}
    record: dict[str, Any] = {}
    for (name, direction), program in programs.items():
        seconds = timings[f"{name} {direction}"].median
        ratio = timings[f"{REFERENCE} {direction}"].median / seconds
        num_bytes = program.memory_analysis().temp_size_in_bytes
        rows[f"{name}, {direction}"] = (
            f"{seconds * 1e3:8.1f} ms  {ratio:5.2f} x  {num_bytes / 1e6:8.1f} MB"
        )
        key = f"{name}_{direction}"
        record[f"{key}_speedup"] = ratio
        record[f"{key}_temporary_bytes"] = num_bytes
        record |= timings[f"{name} {direction}"].to_json(key)
    num_samples, length, num_heads, head_dim = shape
    record |= dict(num_samples=num_samples, seq_length=length, num_heads=num_heads)
    record |= dict(head_dim=head_dim, is_causal=is_causal, dtype=dtype)
    title = f"{length} positions" + (", causal" if is_causal else "")
    harness.report(rows, {"benchmark": "attention", **record}, title=title)


def cores(
    *, is_causal: bool, has_cudnn: bool
) -> Mapping[str, Callable[..., jax.Array]]:
    """Returns the implementations by name, functions of queries, keys and values.

    Args:
        is_causal: Whether a query sees no later key.
        has_cudnn: Whether cuDNN's is among them.
    """
    mask = AttentionMask(is_causal=is_causal)
    found: dict[str, Any] = {
        REFERENCE: functools.partial(
            jax.nn.dot_product_attention, is_causal=is_causal, implementation="xla"
        )
    }
    for name, core in CORES.items():
        if has_cudnn or name != "cudnn":
            found[name] = functools.partial(core, mask=mask)
    return found


def both_ways(
    core: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the values and the gradients of queries, keys and values."""
    values, vjp = jax.vjp(lambda q, k, v: jnp.asarray(core(q, k, v)), q, k, v)
    return values, *vjp(grad)


if __name__ == "__main__":
    main(sys.argv[1:])
