r"""BERT-large (arXiv:1810.04805) at sequence length 512.

    python -m launch.train --config=configs/bert_large.py --workdir=runs/bert_large \
        --config.data.files="corpus/*.jsonl" --config.dist.tensor_parallel_size=2

The paper's batch, rates and schedule. ``--fast_dev_run`` takes two small steps of the
whole model on any machine.

Hardware, time, loss: not measured yet.
"""

import dataclasses

import ml_collections

from configs import base
from models import bert


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.model.update(dataclasses.asdict(bert.SIZES["large"]))
    config.model.update(dropout_rate=0.1, attention_dropout_rate=0.1, dtype="bfloat16")
    config.data.update(seq_length=512)
    config.optim.update(
        learning_rate=1e-4, warmup_steps=10_000, epsilon=1e-6, grad_clip_norm=1.0
    )
    config.train.update(
        num_steps=1_000_000,
        global_batch_size=256,
        num_microbatches=4,
        log_every=100,
    )
    config.eval.update(every_steps=10_000, num_batches=100)
    config.checkpoint.update(every_steps=10_000, keep=3)
    config.remat = "selective"
    return config
