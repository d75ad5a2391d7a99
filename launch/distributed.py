"""Which devices a run has, and how they are arranged."""

import glob
import importlib.util
import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sbp
from launch.resolve import DeviceCount
from launch.run_config import DistConfig

AXIS_NAMES = ("stage", "data", "context", "tensor")
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
CPU_FLAGS = {
    # A collective whose peers come 40 s apart aborts the process, and virtual devices
    # on few cores do that.
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1800,
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    # XLA 0.10 aborts where it widens sums of bfloat16 inside a region that is manual
    # over some axes alone. It can add them as they are.
    "--xla_disable_hlo_passes": "all-reduce-promotion",
}


def count_devices() -> DeviceCount:
    """Returns how many devices a run may have; call it before JAX is used.

    Where there are no GPUs, and nobody has said how many CPU devices there are, as many
    virtual ones can be made as a run asks for: `create_mesh` makes them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"{flag}={v}" for flag, v in CPU_FLAGS.items() if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    is_count_given = (
        "xla_force_host_platform_device_count" in flags
        or jax.config.jax_num_cpu_devices > 0  # type: ignore[attr-defined]  # JAX sets it at run time
        or jax.distributed.is_initialized()
    )
    has_plugin = any(importlib.util.find_spec(name) for name in CUDA_PLUGINS)
    if is_count_given or (_has_gpu() and has_plugin):
        remedy = ", or hide some with CUDA_VISIBLE_DEVICES" if _has_gpu() else ""
        platform = jax.devices()[0].platform
        return DeviceCount(
            num_devices=jax.device_count(), remedy=remedy, platform=platform
        )
    reason = (
        "JAX has no plugin for the GPU: pip install -e '.[gpu]'"
        if _has_gpu()
        else "there is no GPU"
    )
    return DeviceCount(num_devices=None, reason=reason)


def create_mesh(dist: DistConfig, devices: DeviceCount) -> Mesh:
    """Returns the mesh of a run, of Auto axes with the names `AXIS_NAMES`.

    The device at ``(stage, data, context, tensor)`` has rank
    ``((stage * dp + data) * cp + context) * tp + tensor`` in `jax.devices()`, so that
    the ranks of a tensor-parallel group, which communicate most, are next to each
    other, and those of a ring after them.

    Args:
        dist: The sizes.
        devices: What `count_devices` returned, before ``dist`` was resolved with it.
    """
    if devices.num_devices is None:
        jax.config.update("jax_num_cpu_devices", dist.num_devices)
    ranks = np.arange(dist.num_devices).reshape(mesh_shape(dist))
    platform = jax.devices()[0].platform
    placement = sbp.placement(platform, ranks, axis_names=AXIS_NAMES)
    return placement.mesh_with(AxisType.Auto)


def mesh_shape(dist: DistConfig) -> tuple[int, ...]:
    """Returns the size of each of the `AXIS_NAMES`."""
    return (
        dist.pipeline_parallel_size,
        dist.data_parallel_size,
        dist.context_parallel_size,
        dist.tensor_parallel_size,
    )


def manual_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which the programs of a run are written per rank."""
    return tuple(name for name in mesh.axis_names if name != "tensor")


def process_rows(mesh: Mesh, global_batch_size: int) -> slice:
    """Returns the rows of a global batch that this process feeds.

    They are those that its devices hold; several processes may share rows, when the
    devices of one data-parallel rank belong to several.
    """
    sharding = NamedSharding(mesh, P("data"))
    shape = (global_batch_size,)
    held = sharding.addressable_devices_indices_map(shape).values()
    rows = [index[0].indices(global_batch_size)[:2] for index in held if index]
    return slice(min(start for start, _ in rows), max(stop for _, stop in rows))


def _has_gpu() -> bool:
    wanted = os.environ.get("JAX_PLATFORMS", "cuda")
    return "cuda" in wanted and bool(glob.glob("/dev/nvidia[0-9]*"))
