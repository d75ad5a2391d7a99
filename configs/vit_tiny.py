r"""A ViT that learns handwritten digits in minutes on two CPU cores.

python -m launch.train --config=configs/vit_tiny.py --workdir=runs/vit_tiny

The images are those that scikit-learn carries (``pip install -e '.[vision]'``), 8 by 8
pixels scaled to 32 by 32; a fifth of them is held out.
"""

import dataclasses

import ml_collections

from configs import base
from models import vit

MODEL = vit.VitConfig(
    image_size=32,
    patch_size=8,
    num_channels=1,
    num_classes=10,
    num_layers=4,
    model_dim=64,
    num_heads=4,
    mlp_dim=256,
)


def get_config() -> ml_collections.ConfigDict:
    """Returns the experiment."""
    config = base.get_config()
    config.model = {"name": "vit", **dataclasses.asdict(MODEL)}
    # Digits must not be flipped.
    config.data.update(validation_fraction=0.2, crop_area=0.7)
    config.optim.update(
        learning_rate=2e-3, warmup_steps=50, schedule="cosine", grad_clip_norm=1.0
    )
    config.train.update(num_steps=600, global_batch_size=64, log_every=20)
    config.eval.update(every_steps=200)
    return config
