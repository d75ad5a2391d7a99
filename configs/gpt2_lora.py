r"""Adapters of a pre-trained GPT-2, LoRA (arXiv:2106.09685).

    python -m launch.train --config=configs/gpt2_lora.py --workdir=runs/adapted \
        --config.init_from=gpt2 --config.data.files="texts/*.jsonl"
    python -m launch.merge_lora runs/adapted runs/merged

The sizes of the model and its tokenizer are those of ``init_from``, a directory of
Hugging Face or the workdir of a run; see docs/fine_tuning.md.

Hardware, time, result: not measured yet.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.init_from = "gpt2"
    config.model = {"name": "gpt2"}
    config.lora.update(rank=8, alpha=16.0)
    config.optim.update(learning_rate=2e-4, warmup_steps=100, grad_clip_norm=1.0)
    config.train.update(num_steps=1000, global_batch_size=32)
    config.eval.update(every_steps=250)
    return config
