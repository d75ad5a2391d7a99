"""GPT-2 355M on samples of 32768 tokens, spread over H100 that are not here.

    pytest -m slow -s tests/gpu_programs/test_long_context.py

prints what a GPU needs, for docs/long_context.md, and what it sends. Needs the extra
``plan``; cuDNN is used where it is installed.
"""

import collections
import functools
import math
import re

import jax

from sbp._compat import has_cudnn
from tests import hlo
from tests.gpu_programs import programs

LENGTH, NUM_LAYERS = 32768, 24
FIELDS = {
    "dist.data_parallel_size": 1,
    "train.global_batch_size": 1,
    "train.num_microbatches": 1,
    "data.seq_length": LENGTH,
    "model.max_len": LENGTH,
    "model.dropout_rate": 0.0,
    "model.attention_dropout_rate": 0.0,
    "model.dtype": "bfloat16",
    "remat": "selective",
}
PRODUCTS = re.compile(r'custom_call_target="__cu(dnn|blas)|gemm_fusion')

pytestmark = programs.MARKS


@functools.cache
def compile_for_gpus(size):
    """The program of the step, its parameters and its mesh."""
    attention = "cudnn" if has_cudnn() else "plain"
    fields = {"dist.context_parallel_size": size, "model.attention": attention}
    lowered = programs.lower_step("gpt2_355m", FIELDS | fields)
    compiled = lowered.program.compile()
    memory = programs.describe(compiled.memory_analysis())
    print(f"\n{size} GPUs, attention {attention}: {memory}")
    return compiled, lowered.steps.model.shapes, lowered.mesh


def activation_bytes(size):
    """What the step needs besides its state and a gradient of each parameter."""
    compiled, shapes, _ = compile_for_gpus(size)
    gradients = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    return compiled.memory_analysis().temp_size_in_bytes - gradients


def test_activations_are_divided_by_the_ranks():
    # The scores of plain attention even by the square of the ranks.
    assert activation_bytes(4) / activation_bytes(8) > 1.8


def test_an_arrival_is_one_permutation_of_keys_and_what_belongs_to_them():
    compiled, _, mesh = compile_for_gpus(8)
    found = [
        c
        for c in hlo.collectives(compiled.as_text())
        if "context" in c.axes(mesh.shape)
    ]
    assert {c.name for c in found if c.loops} == {"collective-permute"}
    # Two of the loops over layers have an inner one, over all arrivals but the last.
    arrivals = [c for c in found if len(c.loops) == 2]
    assert [[loop.trips for loop in c.loops] for c in arrivals] == [[NUM_LAYERS, 6]] * 2
    once = collections.Counter(c.name for c in found if not c.loops)
    assert set(once) == {"all-reduce"}  # of gradients, and of the losses


def test_permutations_are_under_way_while_products_are_computed():
    text = compile_for_gpus(8)[0].as_text()
    assert not re.search(r" collective-permute\(", text)  # all in two halves
    overlapped = []
    for body in text.split("\n\n"):
        lines = body.splitlines()
        for number, line in enumerate(lines):
            if match := re.search(r"%([\w.\-]+) = .* collective-permute-start\(", line):
                rest = lines[number:]
                end = next(i for i, x in enumerate(rest) if f"-done(%{match[1]})" in x)
                overlapped.append(any(PRODUCTS.search(x) for x in rest[1:end]))
    # But for the gradients of the last arrival, which have nothing left to hide behind.
    assert sum(overlapped) >= len(overlapped) - 3
