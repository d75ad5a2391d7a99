import dataclasses
import time

import jax
import numpy as np
import pytest

from launch import hardware

# Names as JAX reports them.
KINDS = [
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
    ("NVIDIA A100-PCIE-40GB", "float32", 156),
    ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
    ("NVIDIA H100 PCIe", "bfloat16", 756.5),
    ("NVIDIA H200", "float16", 989.4),
    ("NVIDIA GH200 480GB", "float32", 494.7),
    ("NVIDIA B200", "bfloat16", 2250),
    ("NVIDIA GB200", "bfloat16", 2500),
    ("NVIDIA L4", "bfloat16", 121),
    ("NVIDIA L40", "bfloat16", 181),
    ("NVIDIA L40S", "bfloat16", 362),
    ("NVIDIA A10", "bfloat16", 125),
    ("NVIDIA A10G", "bfloat16", 70),
    ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
    ("Tesla V100-SXM2-32GB", "float16", 125),
    ("Tesla V100-SXM2-32GB", "bfloat16", 15.7),
    ("Tesla V100-PCIE-16GB", "float16", 112),
    ("Tesla T4", "float16", 65),
]
UNKNOWN = [
    ("cpu", "float32"),
    ("NVIDIA H100 PCIe", "int8"),
    ("NVIDIA A1000", "float32"),
]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    device_kind: str
    platform: str


@pytest.mark.parametrize(("kind", "dtype", "tflops"), KINDS)
def test_datasheet_is_found_by_the_words_of_the_name(kind, dtype, tflops):
    assert hardware.datasheet_peak(kind, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(("kind", "dtype"), UNKNOWN)
def test_unknown_devices_and_dtypes_have_no_datasheet(kind, dtype):
    assert hardware.datasheet_peak(kind, dtype) is None


def test_no_row_of_the_table_hides_a_later_one():
    names = list(hardware.DATASHEETS)
    for i, name in enumerate(names):
        hidden = [
            later for later in names[i + 1 :] if set(name.split()) <= set(later.split())
        ]
        assert hidden == []


def test_known_devices_add_up():
    devices = [FakeDevice("NVIDIA H200", "gpu")] * 8
    peak = hardware.matmul_peak(devices, "bfloat16")
    assert peak.flops_per_second == pytest.approx(8 * 989.4e12)
    assert peak.source == "the datasheet of 8 x NVIDIA H200, bfloat16"


def test_virtual_devices_share_one_measured_machine(devices):
    start = time.perf_counter()
    one = hardware.matmul_peak(devices[:1], "float32")
    seconds = time.perf_counter() - start
    eight = hardware.matmul_peak(devices, "float32")
    assert one.source == "float32 matrix products measured on this machine"
    assert one.flops_per_second > 1e9
    # Neighbors disturb the clock, but not by a factor of eight.
    assert 1 / 4 < eight.flops_per_second / one.flops_per_second < 4
    assert seconds < 3


def test_measured_peak_is_at_least_what_a_matrix_product_reaches():
    product = jax.jit(lambda a: a @ a)
    a = jax.numpy.ones((1024, 1024))
    product(a).block_until_ready()
    start = time.perf_counter()
    product(a).block_until_ready()
    reached = 2 * 1024**3 / (time.perf_counter() - start)
    assert hardware.measure_matmul_peak("float32") > reached / 2


def test_peak_memory_grows_with_the_process():
    before = hardware.peak_memory_bytes()
    assert before > 50e6
    block = np.ones(200_000_000, np.uint8)
    assert hardware.peak_memory_bytes() >= min(before, before + block.nbytes)
    assert hardware.peak_memory_bytes() >= block.nbytes
