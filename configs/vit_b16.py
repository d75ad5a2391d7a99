r"""ViT-B/16 (arXiv:2010.11929) on ImageNet-1k, by the recipe of arXiv:2012.12877.

    python -m launch.train --config=configs/vit_b16.py --workdir=runs/vit_b16 \
        --config.data.files=imagenet/train --config.data.validation_files=imagenet/val

Each folder holds a folder of images per class. 300 epochs of 1,281,167 images.

Hardware, time, accuracy: not measured yet.
"""

import dataclasses

import ml_collections

from configs import base
from models import vit


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.model = {"name": "vit", **dataclasses.asdict(vit.SIZES["b16"])}
    config.model.update(stochastic_depth_rate=0.1, dtype="bfloat16")
    config.data.update(
        pixel_mean=(0.485, 0.456, 0.406),
        pixel_std=(0.229, 0.224, 0.225),
        crop_area=0.08,
        flip=True,
        randaugment_layers=2,
        erasing_probability=0.25,
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        num_workers=8,
    )
    config.optim.update(
        learning_rate=1e-3,
        weight_decay=0.05,
        warmup_steps=6255,
        schedule="cosine",
        final_fraction=0.01,
    )
    config.train.update(
        num_steps=375_300, global_batch_size=1024, num_microbatches=4, log_every=100
    )
    config.eval.update(every_steps=12_510)
    config.checkpoint.update(every_steps=12_510, keep=3)
    return config
