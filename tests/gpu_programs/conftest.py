"""No cache of compiled programs: those for GPUs that are not there cannot be read."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="module")
def without_cache():
    """JAX looks once at whether there is a cache, and again when that is reset."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
