"""A checkpoint goes to the devices without being held by the host."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from models import convert, gpt2, stacked

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = gpt2.Gpt2Config(
    num_layers=16, model_dim=1024, num_heads=16, mlp_dim=4096, vocab_size=50257
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A gigabyte of a GPT-2, in several files."""
    directory = tmp_path_factory.mktemp("hf") / "gpt2"
    model = stacked.stack(lambda rngs: gpt2.Gpt2(CONFIG, rngs=rngs))
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), model.shapes
    )
    convert.save("gpt2", CONFIG, params, str(directory), max_file_bytes=200 * 2**20)
    assert len(list(directory.glob("*.safetensors"))) > 4
    return directory


@pytest.mark.slow  # writes and reads a gigabyte
def test_host_holds_about_one_tensor_in_two_forms_at_a_time(checkpoint):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}

    child = subprocess.run(
        [sys.executable, "-m", "tests.launch.streaming_script", str(checkpoint)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    largest_tensor = CONFIG.vocab_size * CONFIG.model_dim * 4
    assert found["checkpoint"] > 1e9
    # The table of tokens as it is there, padded, and what a device has of it.
    assert found["besides"] < 2.5 * largest_tensor
    assert found["besides"] < found["checkpoint"] / 1.9
