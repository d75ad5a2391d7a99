r"""GPT-2 124M (Radford et al., 2019) at sequence length 1024.

    python -m launch.train --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m \
        --config.data.files="corpus/*.jsonl"

The published vocabulary is ``--config.data.tokenizer=tokenizer.json`` of such a
checkpoint. Batch, rate and betas are those of arXiv:2005.14165 for this size.

Hardware, time, loss: not measured yet.
"""

import dataclasses

import ml_collections

from configs import base
from models import gpt2


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.model = {"name": "gpt2", **dataclasses.asdict(gpt2.SIZES["124m"])}
    # A chunk reads and writes the gradient of the whole table: on GPUs few large ones.
    config.model.update(dtype="bfloat16", loss_chunk_size=1024)
    config.data.update(seq_length=1024, validation_fraction=0.005)
    config.optim.update(
        learning_rate=6e-4,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        grad_clip_norm=1.0,
        warmup_steps=700,
        schedule="cosine",
        final_fraction=0.1,
    )
    # Half a million tokens a step, 10 billion in all.
    config.train.update(
        num_steps=20_000,
        global_batch_size=512,
        num_microbatches=8,
        log_every=100,
    )
    config.eval.update(every_steps=1000, num_batches=20)
    config.checkpoint.update(every_steps=1000, keep=3)
    config.remat = "selective"
    return config
