"""Streams a checkpoint of Hugging Face onto four devices; prints what memory it took.

The devices are virtual ones, whose arrays are in the memory of this process too: what
counts is what it took besides them. Files that are mapped are not counted, the system
drops their pages when it needs room.
"""

import json
import pathlib
import re
import sys
import threading

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from launch import job, resolve, state
from launch.resolve import DeviceCount
from models import convert
from models.published_files import open_published

FIELDS = {
    "dist.tensor_parallel_size": "2",
    "dist.pipeline_parallel_size": "2",
    "train.num_microbatches": "2",
}


def own_bytes():
    """Anonymous memory of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s*(\d+) kB", status)[1])


class Watch(threading.Thread):
    """Keeps the peak of `own_bytes`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.stopped = 0, threading.Event()

    def run(self):
        while not self.stopped.wait(0.002):
            self.peak = max(self.peak, own_bytes())


def main(directory):
    fields = FIELDS | {"init_from": directory, "model.name": "gpt2"}
    config = resolve.resolve({}, fields, DeviceCount(num_devices=4))
    devices = np.array(jax.devices()).reshape(2, 1, 2)
    mesh = Mesh(devices, ("stage", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
    steps = job.build_steps(config, mesh)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    jax.block_until_ready(jax.numpy.zeros(1) + 1)

    before, watch = own_bytes(), Watch()
    watch.start()
    params = convert.load(
        "gpt2",
        config.model,
        open_published(directory),
        abstract=abstract.params,
        layer_order=steps.model.layer_order,
    )
    jax.block_until_ready(params)
    watch.stopped.set()
    watch.join()

    shards = [s for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards]
    on_devices = sum(shard.data.nbytes for shard in shards)
    result = {
        "on_devices": on_devices,
        "besides": max(watch.peak, own_bytes()) - before - on_devices,
        "largest_part": max(shard.data.nbytes for shard in shards),
        "checkpoint": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
