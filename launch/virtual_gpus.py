"""GPUs that are not there, to compile programs for: real XLA, real NCCL collectives.

A mesh over them can be used with ``jit(...).lower(...).compile()`` and says what a
program needs and communicates; nothing can be run on them. Needs JAX's CUDA plugin, not
CUDA: ``pip install -e '.[plan]'``, and ``JAX_PLATFORMS=cpu`` on a machine without GPUs.
"""

import difflib
import importlib.util
from collections.abc import Sequence
from importlib import resources

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from launch.distributed import AXIS_NAMES, mesh_shape
from launch.run_config import DistConfig
from sbp._compat import virtual_devices

PLUGIN = "jax_plugins.xla_cuda13"
GPUS_PER_HOST = 8  # at most, of the clusters of `create_mesh`


def has_plugin() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    try:
        return importlib.util.find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def kinds() -> list[str]:
    """Returns the kinds of GPU that are known.

    Example:
        >>> kinds()
        ['a100-80g', 'b200-180g', 'h100-80g', 'h200-141g']
    """
    files = resources.files("launch.gpu_targets").iterdir()
    names = (file.name for file in files)
    return sorted(n.removesuffix(".txtpb") for n in names if n.endswith(".txtpb"))


def create_mesh(dist: DistConfig, kind: str) -> Mesh:
    """Returns the mesh of a run on hosts of eight GPUs, or on one of fewer.

    Args:
        dist: Its sizes.
        kind: See `virtual_gpus`, as for the errors.
    """
    num = dist.num_devices
    gpus = virtual_gpus(
        kind,
        num_hosts=-(-num // GPUS_PER_HOST),
        gpus_per_host=min(GPUS_PER_HOST, num),
    )
    devices = np.array(gpus)[:num].reshape(mesh_shape(dist))
    axis_types = (AxisType.Auto,) * len(AXIS_NAMES)
    return Mesh(devices, AXIS_NAMES, axis_types=axis_types)


def virtual_gpus(
    kind: str, *, num_hosts: int, gpus_per_host: int
) -> Sequence[jax.Device]:
    """Returns the GPUs of a cluster that is not there, host after host.

    Args:
        kind: One of `kinds`.
        num_hosts: Hosts of the cluster.
        gpus_per_host: GPUs of each, connected by NVLink.

    Raises:
        ValueError: If the kind is unknown or a number is less than 1.
        ImportError: If the plugin is not installed.
    """
    if kind not in kinds():
        near = difflib.get_close_matches(kind, kinds(), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        known = ", ".join(map(repr, kinds()))
        raise ValueError(f"There is no GPU {kind!r}; there are {known}. {hint}")
    for name, number in {
        "num_hosts": num_hosts,
        "gpus_per_host": gpus_per_host,
    }.items():
        if number < 1:
            raise ValueError(f"{name}={number} is less than 1. Give a positive number.")
    if not has_plugin():
        raise ImportError(
            f"Compiling for {kind!r} needs JAX's CUDA plugin, and there is no module"
            f" {PLUGIN}. Run pip install -e '.[plan]'."
        )
    target = resources.files("launch.gpu_targets").joinpath(f"{kind}.txtpb")
    return virtual_devices(target.read_text(), (num_hosts, gpus_per_host))
