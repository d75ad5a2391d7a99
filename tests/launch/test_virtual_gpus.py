"""What is asked of GPUs that are not there is checked before JAX is asked."""

import pytest

from launch import virtual_gpus


def test_unknown_kind_is_named_with_the_nearest_one():
    with pytest.raises(ValueError, match="no GPU 'h100'.*Did you mean 'h100-80g'"):
        virtual_gpus.virtual_gpus("h100", num_hosts=1, gpus_per_host=8)


@pytest.mark.parametrize("sizes", [(0, 8), (1, -1)])
def test_numbers_are_positive(sizes):
    with pytest.raises(ValueError, match="=(0|-1) is less than 1. Give a positive"):
        virtual_gpus.virtual_gpus(
            "a100-80g", num_hosts=sizes[0], gpus_per_host=sizes[1]
        )


@pytest.mark.parametrize("name", ["jax_plugins_of_nobody.cuda", "json.no_such_plugin"])
def test_missing_plugin_is_named_with_the_extra(monkeypatch, name):
    monkeypatch.setattr(virtual_gpus, "PLUGIN", name)
    with pytest.raises(ImportError, match=rf"{name}. Run pip install -e '.\[plan\]'"):
        virtual_gpus.virtual_gpus("h200-141g", num_hosts=1, gpus_per_host=1)


@pytest.mark.skipif(not virtual_gpus.has_plugin(), reason="needs the extra 'plan'")
def test_gpus_are_those_of_the_kind():
    gpus = virtual_gpus.virtual_gpus("a100-80g", num_hosts=2, gpus_per_host=4)
    assert len(gpus) == 8
    assert {gpu.device_kind for gpu in gpus} == {"NVIDIA A100-SXM4-80GB"}
