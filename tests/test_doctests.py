"""Every example in a docstring prints what it says."""

import doctest
import importlib
import pathlib
import pkgutil

import jax.numpy as jnp
import numpy as np
import pytest

import sbp

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("sbp", "models", "configs", "launch", "benchmarks")


def _modules():
    for package in PACKAGES:
        yield package
        found = pkgutil.walk_packages([str(ROOT / package)], prefix=f"{package}.")
        yield from (info.name for info in found if info.name != f"{package}.__main__")


@pytest.mark.parametrize("name", list(_modules()))
def test_examples_of_module_print_what_they_say(name):
    module = importlib.import_module(name)
    globs = {**vars(module), "sbp": sbp, "jnp": jnp, "np": np}
    results = doctest.testmod(
        module, globs=globs, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert results.failed == 0, f"{results.failed} examples of {name} fail"
