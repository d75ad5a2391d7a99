"""Eight virtual CPU devices, one compilation cache, one mesh per shape."""

import os
import pathlib

import pytest

XLA_FLAGS = (
    # XLA aborts the process when the peers of a CPU collective come more than 40 s
    # apart, which loaded machines do.
    "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    # Sums of bfloat16, see launch.distributed.
    "--xla_disable_hlo_passes=all-reduce-promotion",
    # The programs of the tests are tiny: compiling them is what takes time.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
CACHE_DIR = pathlib.Path(__file__).parent.parent / ".jax_cache"


def pytest_addoption(parser):
    parser.addoption(
        "--platform", default="cpu", help="JAX platform to test on: cpu or cuda"
    )


def pytest_configure(config):
    # Child processes inherit the environment.
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS])
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE_DIR))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

    import jax  # after the environment is set

    platform = config.getoption("--platform")
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def devices():
    import jax

    return jax.devices()
