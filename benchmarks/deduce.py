"""How long does it take to deduce the signatures of a whole model?

    JAX_PLATFORMS=cpu python -m benchmarks.deduce

24 blocks of BERT-large, one after another, under Megatron's table on 4 x 8 devices
that need not be there. Traced by JAX and deduced with empty caches, forward and with
gradients.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import harness
from models import layers
from models.block import Block
from models.sharding import BLOCK, match_rows
from sbp import boxing
from sbp.deduction.local import ADD_UP
from sbp.deduction.program import deduce_program
from sbp.deduction.region import Region, trace
from sbp.rules import admissible_rules
from sbp.signature import Signature, split
from sbp.spec import signature_by_axis

AXES = (("data", 4), ("tensor", 8))
CONFIG = layers.BlockConfig(
    num_layers=24, num_heads=16, model_dim=1024, mlp_dim=4096, dtype="bfloat16"
)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--num_layers", type=harness.positive, default=CONFIG.num_layers
    )
    parser.add_argument("--num_runs", type=harness.positive, default=5)
    options = parser.parse_args()
    model, leaves, signatures = stack(options.num_layers)

    def loss(*leaves: jax.Array) -> jax.Array:
        return jnp.mean(model(*leaves) ** 2)

    gradient = jax.grad(loss, argnums=tuple(range(len(leaves))))
    regions: dict[str, Region] = {}
    works: dict[str, Callable[[], Any]] = {}
    for name, function in {"forward": model, "gradient": gradient}.items():
        regions[name], _ = trace(function, *leaves)
        works[f"{name}_trace"] = functools.partial(trace_cold, function, leaves)
        works[f"{name}_deduce"] = functools.partial(
            deduce_cold, regions[name], signatures
        )
    timings = harness.time_in_turns(works, num_warmup=1, num_runs=options.num_runs)
    sizes = {name: len(region.operations) for name, region in regions.items()}
    report(options.num_layers, timings, sizes)


def stack(
    num_layers: int,
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct], list[Signature]]:
    """Returns blocks as a function of leaves, the leaves' shapes and signatures."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(CONFIG, rngs=nnx.Rngs(0))))
    paths, params = zip(*nnx.to_flat_state(state), strict=True)
    shapes = [param.get_value() for param in params]
    names = ["blocks/0/" + "/".join(map(str, path)) for path in paths]
    rows = match_rows(BLOCK, names)
    axis_names = [name for name, _ in AXES]
    of_block = [signature_by_axis(rows[name], axis_names) for name in names]

    def model(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        for layer in range(num_layers):
            own = leaves[layer * len(paths) : (layer + 1) * len(paths)]
            flat = [(p, nnx.Param(v)) for p, v in zip(paths, own, strict=True)]
            block = nnx.merge(graph, nnx.from_flat_state(flat))
            x = block(x, None, None, layer=layer)
        return x

    x = jax.ShapeDtypeStruct((32, 512, CONFIG.model_dim), jnp.bfloat16)
    of_x = signature_by_axis({"data": split(0)}, axis_names)
    return model, [x, *shapes * num_layers], [of_x, *of_block * num_layers]


def trace_cold(function: Callable[..., Any], leaves: list) -> None:
    """Traces as far as JAX does not remember it."""
    trace(function, *leaves)


def deduce_cold(region: Region, signatures: list[Signature]) -> None:
    """Deduces as the first time: nothing is remembered."""
    admissible_rules.cache_clear()
    boxing.route.cache_clear()
    wanted = [[ADD_UP] * len(region.outputs)] * len(AXES)
    deduce_program(region, AXES, signatures, wanted)


def report(
    num_layers: int, timings: dict[str, harness.Timing], sizes: dict[str, int]
) -> None:
    """Prints the table and the line."""
    rows: dict[str, str] = {}
    record: dict[str, Any] = {"benchmark": "deduce", "num_layers": num_layers}
    for name, size in sizes.items():
        record[f"{name}_num_operations"] = size
        rows[f"{name}: operations"] = f"{size:,}"
        for part in ("trace", "deduce"):
            timing = timings[f"{name}_{part}"]
            rows[f"{name}: {part}"] = f"{timing.median:.2f} s"
            record |= timing.to_json(f"{name}_{part}")
    harness.report(rows, record, title=f"Deducing {num_layers} blocks of BERT-large")


if __name__ == "__main__":
    main()
