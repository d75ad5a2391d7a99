"""Number formats and places of training steps compiled for one H100.

    pytest -m slow -s tests/gpu_programs

Needs the extra ``plan``.
"""

import pytest

from tests.gpu_programs import programs

FIELDS = {
    "dist.data_parallel_size": 1,
    "train.global_batch_size": 8,
    "data.seq_length": 1024,
    "remat": "selective",
    "model.dtype": "bfloat16",
    "model.attention": "plain",
}

pytestmark = programs.MARKS


def lower_step(**fields):
    """The training step of GPT-2 124M with some fields, for one GPU."""
    return programs.lower_step("gpt2_124m", FIELDS | fields).program


def compile_step(**fields):
    return lower_step(**fields).compile()


@pytest.fixture(scope="module")
def plain():
    return compile_step()


def test_offloaded_moments_are_arguments_in_the_memory_of_the_host(plain):
    before, after = (
        program.memory_analysis()
        for program in (plain, compile_step(**{"optim.offload": True}))
    )

    moments = 2 * 4 * 124.5e6
    assert before.host_argument_size_in_bytes == 0
    assert after.host_argument_size_in_bytes == pytest.approx(moments, rel=0.01)
    saved = before.argument_size_in_bytes - after.argument_size_in_bytes
    assert saved == after.host_argument_size_in_bytes
    # They pass through the device in pieces.
    assert after.temp_size_in_bytes < 1.01 * before.temp_size_in_bytes


def test_gradients_of_biases_and_tables_are_not_added_up_in_half_precision(plain):
    lines = plain.as_text().splitlines()
    sums = [line for line in lines if " reduce(" in line or " scatter(" in line]

    assert len(sums) > 10
    assert [line for line in sums if "= bf16[" in line] == []


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_linear_maps_multiply_in_eight_bits_where_it_is_asked_for(scaling):
    # Triton, which is chosen by measuring where there is a GPU, hides the products.
    options = {"xla_gpu_enable_triton_gemm": False}
    fields = {"precision.matmul": "fp8", "precision.fp8_scaling": scaling}
    lowered = lower_step(**fields)
    text = lowered.compile(compiler_options=options).as_text()

    products = [line for line in text.splitlines() if "lt$matmul$f8" in line]
    # Four maps: forward, and two products backward each. With selective recomputation
    # the forward ones are not computed again.
    assert len(products) == 12
