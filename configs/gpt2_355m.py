r"""GPT-2 355M (Radford et al., 2019) at sequence length 1024.

    python -m launch.train --config=configs/gpt2_355m.py --workdir=runs/gpt2_355m \
        --config.data.files="corpus/*.jsonl" --config.dist.tensor_parallel_size=2

Hardware, time, loss: not measured yet.
"""

import dataclasses

import ml_collections

from configs import gpt2_124m
from models import gpt2


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment: that of 124M, with the larger model and half the rate."""
    config = gpt2_124m.get_config()
    config.model.update(dataclasses.asdict(gpt2.SIZES["355m"]))
    config.model.update(dtype="bfloat16", loss_chunk_size=1024)
    config.optim.update(learning_rate=3e-4)
    return config
