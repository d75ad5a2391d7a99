"""Full-size models compiled for four hosts of eight H100, none of which is here.

    pytest -m slow -s tests/gpu_programs

prints the memory per GPU and the collectives. Needs the extra ``plan``.
"""

import collections
import time

import numpy as np
import pytest

from tests import hlo
from tests.gpu_programs import programs

GPU_BYTES = 80e9
NUM_LAYERS = 24 // 4  # of a stage
LAYOUT = {
    "dist.data_parallel_size": 4,
    "dist.tensor_parallel_size": 2,
    "dist.pipeline_parallel_size": 4,
    "train.num_microbatches": 16,
    "train.global_batch_size": 4 * 16 * 4,
    "remat": "selective",
    "model.dtype": "bfloat16",
}
EXPERIMENTS = {
    "gpt2_355m": {"data.seq_length": 1024},
    "bert_large": {"data.seq_length": 512},
    "gpt2_355m-zero_bubble": {
        "data.seq_length": 1024,
        "dist.pipeline_schedule": "zero_bubble",
    },
}

pytestmark = programs.MARKS


@pytest.fixture(scope="module", params=EXPERIMENTS)
def compiled(request):
    """A training step, its mesh, and the seconds that it took to build."""
    start = time.perf_counter()
    experiment = request.param.partition("-")[0]
    lowered = programs.lower_step(experiment, LAYOUT | EXPERIMENTS[request.param])
    program = lowered.program.compile()
    return request.param, program, lowered.mesh, time.perf_counter() - start


def test_step_fits_and_communicates_as_on_cpu(compiled, capsys):
    name, program, mesh, seconds = compiled
    memory = program.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    found = hlo.collectives(program.as_text())
    with capsys.disabled():
        print(f"\n{name}: {seconds:.1f} s, {num_bytes / 1e9:.2f} GB per GPU, of which")
        print(f"  state and batch {memory.argument_size_in_bytes / 1e9:.2f} GB")
        print(f"  temporary {memory.temp_size_in_bytes / 1e9:.2f} GB")
        print_collectives(found, mesh)
    assert seconds < 60
    assert 0.5e9 < num_bytes < GPU_BYTES
    axes = [(c, c.axes(mesh.shape)) for c in found]
    permutes = [c for c, _ in axes if c.name == "collective-permute"]
    assert len(permutes) == 2
    assert permutes[0].loops == permutes[1].loops != ()
    assert [c for c, over in axes if "data" in over and c.loops] == []
    over_stage = [
        c for c, over in axes if "stage" in over and c.loops and c not in permutes
    ]
    assert {c.conditionals for c in over_stage} == {1}
    in_layers = [  # and not in the chunks of the loss
        c
        for c, over in axes
        if over == ("tensor",) and len(c.loops) == 2 and c.loops[1].trips == NUM_LAYERS
    ]
    per_layer = collections.Counter(c.loops[1].body for c in in_layers)
    directions = 3 if "zero_bubble" in name else 2  # the input's gradient alone
    assert list(per_layer.values()) == [2] * directions


def test_buffers_are_changed_in_place(compiled):
    _, program, _, _ = compiled
    sizes = [size for size, loops in hlo.copies(program.as_text()) if loops]
    # A microbatch's activations, 4 samples of 1024 x 1024, of which the loss has the
    # gradients in float32; a buffer has as many for each slot and layer.
    assert max(sizes) <= 4 * 1024 * 1024 * 4


def print_collectives(found, mesh):
    """Prints a line for each kind: its size, and how often it runs at most."""
    lines = collections.Counter()
    for c in found:
        runs = int(np.prod([loop.trips or 1 for loop in c.loops]))
        place = ["once", "per tick", "per layer"][len(c.loops)]
        lines[c.name, "+".join(c.axes(mesh.shape)), place, c.num_bytes] += runs
    for (name, over, place, num_bytes), runs in sorted(lines.items()):
        size = f"{num_bytes / 1e6:.3f} MB"
        print(f"  {name:20}{over:14}{place:10}{size:>14}  x {runs}")
