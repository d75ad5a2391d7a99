r"""A pre-trained BERT, fine-tuned to tell classes of texts apart.

    python -m launch.train --config=configs/bert_fine_tune.py --workdir=runs/reviews \
        --config.init_from=bert-base-uncased --config.data.files=reviews.jsonl

The sizes of the model, its dropout and its tokenizer are those of ``init_from``, a
directory of Hugging Face or the workdir of a run; see docs/fine_tuning.md. The rate is
one of those of arXiv:1810.04805.

Hardware, time, result: not measured yet.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.init_from = "bert-base-uncased"
    config.model = {"name": "bert_classifier", "num_classes": 2}
    config.optim.update(learning_rate=3e-5, warmup_steps=100, grad_clip_norm=1.0)
    config.train.update(num_steps=1000, global_batch_size=32)
    config.eval.update(every_steps=250)
    return config
