"""cuDNN's attention in the training program of eight H100 that are not here.

    pytest -m slow tests/gpu_programs/test_cudnn_attention.py

Needs the extra ``plan``.
"""

import collections
import functools
import re

import pytest

from sbp._compat import has_cudnn
from tests import hlo
from tests.gpu_programs import programs

FIELDS = {
    "dist.data_parallel_size": 2,
    "dist.tensor_parallel_size": 2,
    "dist.pipeline_parallel_size": 2,
    "train.num_microbatches": 4,
    "train.global_batch_size": 16,
    "data.seq_length": 512,
    "model.max_len": 512,
    "model.num_layers": 2,
    "model.model_dim": 128,
    "model.mlp_dim": 128,
    "model.num_heads": 4,
    "model.dtype": "bfloat16",
    "model.attention_dropout_rate": 0.0,
    "remat": "selective",
}

pytestmark = programs.MARKS


@functools.cache
def compiled(model, attention):
    """A training step and its mesh."""
    lowered = programs.lower_step(model, FIELDS | {"model.attention": attention})
    if not has_cudnn():
        pytest.skip("needs cuDNN: pip install -e '.[plan]'")
    return lowered.program.compile().as_text(), lowered.mesh


def over_tensor(text, mesh):
    """The collectives of layers over tensor, by kind."""
    return collections.Counter(
        found.name
        for found in hlo.collectives(text)
        if found.axes(mesh.shape) == ("tensor",) and len(found.loops) == 2
    )


@pytest.mark.parametrize("model", ["gpt2_tiny", "bert_tiny"])
def test_cudnn_is_in_the_program_of_every_kind_of_layout(model):
    text, _ = compiled(model, "auto")
    calls = collections.Counter(
        re.findall(r'custom_call_target="__cudnn\$(fmha\w+)"', text)
    )
    # Neither recomputation nor the backward pass goes forward again.
    assert sorted("Backward" in name for name in calls.elements()) == [False, True]
    assert re.search(r"f32\[\d+,2,512,512\]", text) is None, "scores of all pairs"


def test_cudnn_communicates_no_more_over_tensor_than_plain():
    counts = [over_tensor(*compiled("gpt2_tiny", name)) for name in ("plain", "auto")]
    assert counts[0] == counts[1]
    assert set(counts[0]) == {"all-reduce"}
