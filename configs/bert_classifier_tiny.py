r"""A BERT that tells packages of Python's standard library apart by ten lines.

python -m launch.train --config=configs/bert_classifier_tiny.py --workdir=runs/packages

Two cores of an AMD EPYC, shared with other work, 2026-11-29: of 1,016 held-out pieces,
all of modules it has not seen, 37.8 % are right after 400 steps, 88.5 % among the five
highest, macro F1 38.4 %. Of the pieces it has seen about nine in ten are.
"""

import dataclasses

import ml_collections

from configs import base
from models import bert, bert_heads


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    model = bert_heads.BertHeadConfig(**dataclasses.asdict(bert.SIZES["tiny"]))
    config.model = {"name": "bert_classifier", **dataclasses.asdict(model)}
    config.model.update(
        num_heads=4, vocab_size=8192, max_len=128, num_classes=10, dropout_rate=0.1
    )
    config.optim.update(learning_rate=1e-3, warmup_steps=20, grad_clip_norm=1.0)
    config.train.update(num_steps=400, global_batch_size=32, log_every=20)
    config.eval.update(every_steps=200)
    return config
