"""ZeRO in the programs of eight H100, none of which is here.

    pytest -m slow -s tests/gpu_programs/test_zero_on_gpus.py

prints what each stage needs, for docs/zero.md. Needs the extra ``plan``.
"""

import functools
import math

import jax
import pytest

from launch import zero
from tests import hlo
from tests.gpu_programs import programs

NUM_GPUS, NUM_LAYERS = 8, 24
FIELDS = {
    "dist.data_parallel_size": NUM_GPUS,
    "train.global_batch_size": 4 * NUM_GPUS,
    "train.num_microbatches": 1,
    "data.seq_length": 1024,
    "remat": "selective",
    "model.dtype": "bfloat16",
    "model.attention": "plain",
}

pytestmark = programs.MARKS


@functools.cache
def compile_for_gpus(stage):
    """The step of GPT-2 355M, what it was built from, and its program."""
    lowered = programs.lower_step("gpt2_355m", FIELDS | {"zero.stage": stage})
    return lowered.steps, lowered.program.compile(), lowered.batch


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_gpu_holds_its_part_of_the_state(stage, capsys):
    steps, program, batch = compile_for_gpus(stage)
    memory = program.memory_analysis()
    with capsys.disabled():
        print(f"\nstage {stage}: {programs.describe(memory)}")

    def bytes_of(shape, cut):
        return 4 * math.prod(shape.shape) // (NUM_GPUS if cut.dim >= 0 else 1)

    sizes = jax.tree.map(bytes_of, steps.model.shapes, steps.zero.cuts)
    expected = 3 * sum(jax.tree.leaves(sizes))  # parameters and both moments
    expected += sum(math.prod(b.shape) * 4 for b in batch.values()) // NUM_GPUS
    assert memory.argument_size_in_bytes == pytest.approx(expected, rel=1e-4)


def test_stage_3_holds_an_eighth_of_the_state_and_two_layers():
    steps, whole, _ = compile_for_gpus(0)
    _, by_layer, _ = compile_for_gpus(3)

    def num_bytes(program):
        memory = program.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    shapes = steps.model.shapes
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    # Parameters, two moments and gradients. The table is larger than two layers: while
    # it is used, it and its gradient are what is whole.
    state, table = 16 * num_params, 4 * math.prod(shapes["token"]["embedding"].shape)
    saved = num_bytes(whole) - num_bytes(by_layer)
    assert saved >= state * (NUM_GPUS - 1) / NUM_GPUS - 2 * table


def test_what_is_communicated_once_is_combined_into_few_collectives():
    steps, program, _ = compile_for_gpus(1)
    found = [c for c in hlo.collectives(program.as_text()) if c.num_bytes > 1000]
    assert [c for c in found if c.loops] == []
    num_cut = sum(cut.dim != zero.WHOLE for cut in jax.tree.leaves(steps.zero.cuts))
    for name in ("all-gather", "reduce-scatter"):
        assert 1 <= len([c for c in found if c.name == name]) <= num_cut


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_layer_is_computed_while_the_next_one_is_gathered(direction):
    _, program, _ = compile_for_gpus(3)
    text = program.as_text()
    bodies = dict.fromkeys(
        c.loops[-1].body
        for c in hlo.collectives(text)
        if c.loops and c.loops[-1].trips == NUM_LAYERS and c.name == "all-gather"
    )
    forward, backward = bodies
    body = {"forward": forward, "backward": backward}[direction]
    names = ["all-gather"] + ["reduce-scatter"] * (direction == "backward")
    lines = hlo.computation(text, body)
    for name in names:
        (start,) = [i for i, line in enumerate(lines) if f" {name}-start(" in line]
        (done,) = [i for i, line in enumerate(lines) if f" {name}-done(" in line]
        fusions = [line for line in lines[start:done] if " fusion(" in line]
        assert len([line for line in fusions if "gemm" in line]) >= 2
