r"""A BERT that trains in a minute on two CPU cores, for tests and first steps.

python -m launch.train --config=configs/bert_tiny.py --workdir=runs/bert_tiny
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    # Four heads, so that up to four devices can share them.
    config.model.update(num_heads=4, vocab_size=8192, max_len=128)
    config.optim.update(learning_rate=1e-3, warmup_steps=20, grad_clip_norm=1.0)
    config.train.update(num_steps=200, global_batch_size=32, log_every=10)
    config.eval.update(every_steps=100, num_batches=8)
    return config
