r"""How many tokens per second does GPT-2 write, and what does its cache save?

    python -m benchmarks.token_rate --config=configs/gpt2_tiny.py

Times the program of `launch.generate`, on the layout of the config and with random
weights, in turns with one that reads the whole text again for each token, and with that
of ``transformers`` if ``--transformers`` is given. Each takes the best token every time
and never ends early. ``--config.SECTION.FIELD=VALUE`` overrides a field.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from launch import distributed, generation, job, resolve
from launch.generation import GenerationConfig
from launch.run_config import RunConfig
from launch.trained import Trained
from models import stopping
from models.decoding import AbstractDecoder, CachedDecoder, RecomputingDecoder
from models.stacked import StackedModel

DECODERS: dict[str, Callable[[StackedModel], AbstractDecoder]] = {
    "cached": CachedDecoder,
    "recomputing": RecomputingDecoder,
}


def main(arguments: Sequence[str]) -> None:
    """Prints a table and a line of JSON."""
    parser = harness.config_parser("python -m benchmarks.token_rate")
    add = parser.add_argument
    add("--num_texts", type=harness.positive, default=8, help="at once")
    add("--prompt_length", type=harness.positive, default=16, help="tokens")
    add("--max_new_tokens", type=harness.positive, default=100, help="of each text")
    add("--num_runs", type=harness.positive, default=5, help="of each program")
    add("--transformers", action="store_true", help="time that package, too")
    options, overrides = harness.parse_config(parser, arguments)
    devices = distributed.count_devices()
    try:
        config = resolve.resolve(resolve.load(options.config), overrides, devices)
        generation.check_family(config.model_name)
        trained = untrained(config, devices)
        works = make_works(trained, options)
    except ValueError as error:
        parser.error(str(error))
    timings = harness.time_in_turns(works, num_warmup=1, num_runs=options.num_runs)
    report(config, options, timings)


def untrained(config: RunConfig, devices: resolve.DeviceCount) -> Trained:
    """Returns a model with random weights, for use."""
    # As in use, each rank has a vocabulary of its own.
    dist = dataclasses.replace(config.dist, pipeline_vocabulary="first_and_last_stage")
    config = dataclasses.replace(config, dist=dist)
    mesh = distributed.create_mesh(config.dist, devices)
    steps = job.build_steps(config, mesh)
    init = jax.jit(steps.model.init, out_shardings=steps.shardings.params)
    return Trained(
        directory="",
        config=config,
        mesh=mesh,
        steps=steps,
        params=init(jax.random.key(config.train.seed)),
        tokenizer=None,
        step=0,
    )


def make_works(
    trained: Trained, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Returns what to time.

    Raises:
        ValueError: If the model has no room for the texts.
    """
    model = trained.config.model
    length = options.prompt_length + options.max_new_tokens
    if length > model.max_len:
        raise ValueError(
            f"prompt_length={options.prompt_length} and max_new_tokens="
            f"{options.max_new_tokens} are more than model.max_len={model.max_len}."
            " Shorten one of them."
        )
    config = GenerationConfig(max_new_tokens=options.max_new_tokens)
    shape = options.num_texts, options.prompt_length
    random = np.random.default_rng(0)
    none_B = np.zeros(options.num_texts, np.int32)
    batch = {
        "tokens": random.integers(0, model.vocab_size, shape, np.int32),
        "lengths": none_B + options.prompt_length,
        **{name: none_B for name in ("ends", "prompt", "sample")},
    }
    table = stopping.build_table((), (), {}, num_tokens=model.padded_vocab_size)
    shared = {"table": table, "seed": np.uint32(0)}
    works: dict[str, Callable[[], Any]] = {}
    for name, decoder in DECODERS.items():
        program = generation.build_program(trained, config, decoder)
        works[name] = functools.partial(program, trained.params, batch, shared)
    if options.transformers:
        works["transformers"] = make_other(model, batch["tokens"], config)
    return works


def make_other(
    model: Any, tokens_BL: np.ndarray, config: GenerationConfig
) -> Callable[[], Any]:
    """Returns what continues the texts with ``transformers``, on the CPU."""
    import torch
    import transformers

    sizes = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_len,
        n_embd=model.model_dim,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.mlp_dim,
        bos_token_id=None,
        eos_token_id=None,
    )
    other = transformers.GPT2LMHeadModel(sizes).eval()
    texts = torch.from_numpy(tokens_BL.astype(np.int64))
    how = dict(
        max_new_tokens=config.max_new_tokens,
        do_sample=False,
        attention_mask=torch.ones_like(texts),
    )

    def run() -> None:
        with torch.no_grad():
            found = other.generate(texts, **how)
        assert found.shape[1] == tokens_BL.shape[1] + config.max_new_tokens

    return run


def report(
    config: RunConfig,
    options: argparse.Namespace,
    timings: dict[str, harness.Timing],
) -> None:
    """Prints tokens per second of each program, and how they compare."""
    num_tokens = options.num_texts * options.max_new_tokens
    rates = {name: num_tokens / timing.median for name, timing in timings.items()}
    ratios = {
        name: timings[name].median / timings["cached"].median
        for name in timings
        if name != "cached"
    }
    rows = {f"{name}, tokens/s": f"{rate:,.0f}" for name, rate in rates.items()}
    rows |= {f"{name} / cached": f"{ratio:.2f} x" for name, ratio in ratios.items()}
    record: dict[str, Any] = {
        "layout": config.dist.layout,
        "num_texts": options.num_texts,
        "prompt_length": options.prompt_length,
        "max_new_tokens": options.max_new_tokens,
    }
    for name, timing in timings.items():
        record |= timing.to_json(name)
        record[f"{name}_tokens_per_second"] = rates[name]
    record |= {f"{name}_over_cached": ratio for name, ratio in ratios.items()}
    title = f"{options.config}, {config.dist.layout}, {options.num_texts} texts"
    harness.report(rows, record, title=title)


if __name__ == "__main__":
    main(sys.argv[1:])
