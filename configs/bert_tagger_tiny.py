r"""A BERT that says of words of Python source which kind of token each is part of.

python -m launch.train --config=configs/bert_tagger_tiny.py --workdir=runs/tokens

The words of strings and comments are among them, and only what stands around them tells
them from names and keywords. Two cores of an AMD EPYC, shared with other work,
2026-11-29: of the held-out words 89.9 % are right after 200 steps, macro F1 88.1 %.
"""

import dataclasses

import ml_collections

from configs import base
from models import bert, bert_heads


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    model = bert_heads.BertHeadConfig(**dataclasses.asdict(bert.SIZES["tiny"]))
    config.model = {"name": "bert_tagger", **dataclasses.asdict(model)}
    config.model.update(num_heads=4, vocab_size=8192, max_len=128, num_classes=6)
    config.optim.update(learning_rate=1e-3, warmup_steps=20, grad_clip_norm=1.0)
    config.train.update(num_steps=200, global_batch_size=32, log_every=10)
    config.eval.update(every_steps=100)
    return config
