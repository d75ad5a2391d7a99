"""What the devices could do at best, and what the run took of their memory."""

import dataclasses
import resource
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Dense matrix products of one device in TFLOP/s, from NVIDIA's datasheets: bfloat16,
# float16, float32 (as TensorFloat-32 where the device has it, JAX's default). The first
# row whose words all stand in the name of the device holds for it.
DATASHEETS = {
    "GB200": (2500, 2500, 1250),
    "B200": (2250, 2250, 1125),
    "GH200": (989.4, 989.4, 494.7),
    "H200 NVL": (835.5, 835.5, 417.5),
    "H200": (989.4, 989.4, 494.7),
    "H100 PCIe": (756.5, 756.5, 378),
    "H100 NVL": (835.5, 835.5, 417.5),
    "H100": (989.4, 989.4, 494.7),
    "H800": (989.4, 989.4, 494.7),
    "H20": (148, 148, 74),
    "A100": (312, 312, 156),
    "A800": (312, 312, 156),
    "A40": (149.7, 149.7, 74.8),
    "A30": (165, 165, 82),
    "A10G": (70, 70, 35),
    "A10": (125, 125, 62.5),
    "RTX A6000": (154.8, 154.8, 77.4),
    "RTX 6000 Ada": (364.2, 364.2, 182.1),
    "L40S": (362, 362, 183),
    "L40": (181, 181, 90.5),
    "L4": (121, 121, 60.5),
    "RTX 5090": (209.5, 209.5, 104.8),
    "RTX 4090": (165.2, 165.2, 82.6),
    "RTX 3090": (71, 71, 35.6),
    # No bfloat16 units: such products run at the speed of float32.
    "V100 PCIE": (14, 112, 14),
    "V100": (15.7, 125, 15.7),
    "T4": (8.1, 65, 8.1),
}
DTYPES = ("bfloat16", "float16", "float32")  # of the columns

MATMUL_SIZES = {"cpu": (512, 1024, 2048), "gpu": (4096, 8192)}


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The most that all devices of a run together can do.

    Attributes:
        flops_per_second: In matrix products.
        source: Where the number is from, in words.
    """

    flops_per_second: float
    source: str


def matmul_peak(devices: Sequence[jax.Device], dtype: str) -> Peak:
    """Returns the peak of these devices in matrix products.

    For known GPUs it is the datasheet's, for all else it is measured in half a second.
    Virtual CPU devices share one machine, so their number does not count.

    Args:
        devices: All devices of the run, of one kind.
        dtype: Of the products.

    Example:
        >>> peak = matmul_peak(jax.devices("cpu"), "float32")
        >>> peak.source
        'float32 matrix products measured on this machine'
    """
    kind = devices[0].device_kind
    per_device = datasheet_peak(kind, dtype)
    if per_device is not None:
        total = per_device * len(devices)
        return Peak(total, f"the datasheet of {len(devices)} x {kind}, {dtype}")
    if devices[0].platform == "cpu":
        # Processes on one machine measure at the same time: each gets its share.
        total = measure_matmul_peak(dtype) * jax.process_count()
        return Peak(total, f"{dtype} matrix products measured on this machine")
    total = measure_matmul_peak(dtype) * len(devices)
    return Peak(total, f"{dtype} matrix products measured, x {len(devices)} {kind}")


def datasheet_peak(device_kind: str, dtype: str) -> float | None:
    """Returns the peak of one device in FLOP/s, None if it is not in the table.

    Args:
        device_kind: As JAX names it.
        dtype: Of the products.

    Example:
        >>> datasheet_peak("NVIDIA A100-SXM4-80GB", "bfloat16") / 1e12
        312.0
        >>> datasheet_peak("cpu", "bfloat16") is None
        True
    """
    words = set(device_kind.replace("-", " ").split())
    for name, peaks in DATASHEETS.items():
        if words.issuperset(name.split()) and dtype in DTYPES:
            return peaks[DTYPES.index(dtype)] * 1e12
    return None


def measure_matmul_peak(dtype: str, *, seconds: float = 0.3) -> float:
    """Returns the FLOP/s of the fastest square matrix product on the first device.

    Args:
        dtype: Of factors and product.
        seconds: To measure for; compilation comes on top, a tenth of a second on CPU.
    """
    device = jax.local_devices()[0]
    sizes = MATMUL_SIZES["cpu" if device.platform == "cpu" else "gpu"]
    product = jax.jit(jnp.matmul)
    best = 0.0
    for size in sizes:
        a = jax.device_put(jnp.ones((size, size), dtype), device)
        product(a, a).block_until_ready()
        end = time.perf_counter() + seconds / len(sizes)
        while time.perf_counter() < end:
            start = time.perf_counter()
            product(a, a).block_until_ready()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def peak_memory_bytes() -> int:
    """Returns the most memory used so far, on the fullest device of this process.

    Where devices do not count, as on CPU, that of the whole process.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    name = "peak_bytes_in_use"
    peaks = [entry[name] for entry in stats if name in entry]
    if peaks:
        return max(peaks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
