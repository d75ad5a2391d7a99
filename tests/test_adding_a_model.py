"""The model of docs/adding_a_model.md trains as that page says."""

import pathlib
import re

import numpy as np

from launch.run_config import DistConfig

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "adding_a_model.md"


def load_code():
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return code


def test_new_model_has_less_than_a_hundred_lines():
    lines = [line for line in load_code().splitlines() if line.strip()]
    assert len(lines) < 100


def test_new_model_trains_on_2x2x2_as_on_one_device():
    names = {"__name__": "sorter"}
    exec(compile(load_code(), str(PAGE), "exec"), names)
    sizes = dict(data_parallel_size=2, tensor_parallel_size=2)
    losses = names["train"](DistConfig(**sizes, pipeline_parallel_size=2), 60)
    assert losses[-1] < losses[0] / 2
    on_one = names["train"](DistConfig(), 10)
    np.testing.assert_allclose(losses[:10], on_one, rtol=1e-5)
