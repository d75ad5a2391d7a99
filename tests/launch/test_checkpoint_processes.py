import os
import socket
import subprocess
import sys
import textwrap

import pytest

PROCESS = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from launch.checkpoint import Checkpointer

    index, address, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, 2, index)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    w = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)

    def put(spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(w.shape, sharding, lambda i: w[i])

    with Checkpointer(directory, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        state = {"both": put(P("data", "tensor")), "one": put(P(None, "tensor"))}
        for step in (1, 2, 3):
            checkpointer.save(step, state, extra={"x": step}, metrics={"loss": step})
        wanted = {
            name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=put(spec).sharding)
            for name, spec in {"both": P("tensor", "data"), "one": P("data")}.items()
        }
        restored = checkpointer.restore(wanted)
        for array in restored.values():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, w[shard.index])
        print(checkpointer.steps(), checkpointer.best_step(), checkpointer.read_extra())
"""


@pytest.mark.slow
def test_several_processes_write_and_read_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    code = textwrap.dedent(PROCESS)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(index), address, str(tmp_path / "c")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.strip().endswith("[1, 2, 3] 1 {'x': 3}")
