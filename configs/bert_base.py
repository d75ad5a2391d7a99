r"""BERT-base (arXiv:1810.04805) at sequence length 512.

    python -m launch.train --config=configs/bert_base.py --workdir=runs/bert_base \
        --config.data.files="corpus/*.jsonl"

Hardware, time, loss: not measured yet.
"""

import dataclasses

import ml_collections

from configs import bert_large
from models import bert


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment: BERT-large's, with the smaller model."""
    config = bert_large.get_config()
    config.model.update(dataclasses.asdict(bert.SIZES["base"]))
    config.model.update(dropout_rate=0.1, attention_dropout_rate=0.1, dtype="bfloat16")
    return config
