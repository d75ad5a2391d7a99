r"""ViT-L/16 (arXiv:2010.11929) on ImageNet-1k, as trained in arXiv:2111.06377, A.2.

    python -m launch.train --config=configs/vit_l16.py --workdir=runs/vit_l16 \
        --config.data.files=imagenet/train --config.data.validation_files=imagenet/val

Each folder holds a folder of images per class. 200 epochs of 1,281,167 images.

Hardware, time, accuracy: not measured yet.
"""

import dataclasses

import ml_collections

from configs import vit_b16
from models import vit


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment: that of ViT-B, with another model and optimizer."""
    config = vit_b16.get_config()
    config.model.update(dataclasses.asdict(vit.SIZES["l16"]))
    config.model.update(stochastic_depth_rate=0.2, dtype="bfloat16")
    config.optim.update(
        learning_rate=1.6e-3, weight_decay=0.3, betas=(0.9, 0.95), warmup_steps=6260
    )
    config.train.update(
        num_steps=62_600,
        global_batch_size=4096,
        num_microbatches=8,
    )
    config.eval.update(every_steps=3130)
    config.checkpoint.update(every_steps=3130)
    config.remat = "selective"
    return config
