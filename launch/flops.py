"""Model FLOPs: the arithmetic that the model needs, whatever a program does besides.

Only matrix products count, two operations for each multiply-add; norms, softmax and
the like are a percent of them. A training step takes three times a forward pass, since
the backward pass differentiates each product by both factors. What a program computes
a second time, to save memory, does not count.
"""

from models.bert import BertConfig
from models.bert_heads import BertHeadConfig
from models.gpt2 import Gpt2Config
from models.layers import BlockConfig
from models.vit import VitConfig

BACKWARD_FACTOR = 2  # of the forward pass


def bert_train_flops(
    config: BertConfig, *, seq_length: int, num_predicted: int, num_samples: int
) -> int:
    """Returns the FLOPs of a training step of BERT on a global batch.

    Args:
        config: The model.
        seq_length: Tokens of a sample.
        num_predicted: Positions of a sample that the masked-LM head runs on.
        num_samples: Global batch size.
    """
    forward = bert_forward_flops(
        config, seq_length=seq_length, num_predicted=num_predicted
    )
    return (1 + BACKWARD_FACTOR) * num_samples * forward


def bert_forward_flops(
    config: BertConfig, *, seq_length: int, num_predicted: int
) -> int:
    """Returns the FLOPs of a forward pass of BERT, both heads included, on a sample.

    Args:
        config: The model.
        seq_length: Tokens of the sample.
        num_predicted: Positions that the masked-LM head runs on.

    Example:
        >>> from models.bert import SIZES
        >>> bert_forward_flops(SIZES["large"], seq_length=512, num_predicted=77) / 1e9
        339.995267072
    """
    dim = config.model_dim
    masked_lm = num_predicted * 2 * dim * (dim + config.padded_vocab_size)
    next_sentence = 2 * dim * (dim + 2)
    blocks = config.num_layers * block_forward_flops(config, seq_length=seq_length)
    return blocks + masked_lm + next_sentence


def bert_classifier_train_flops(
    config: BertHeadConfig, *, seq_length: int, num_samples: int
) -> int:
    """Returns the FLOPs of a training step of BERT that classifies texts.

    Args:
        config: The model.
        seq_length: Tokens of a sample.
        num_samples: Global batch size.
    """
    dim = config.model_dim
    blocks = config.num_layers * block_forward_flops(config, seq_length=seq_length)
    head = 2 * dim * (dim + config.num_classes)
    return (1 + BACKWARD_FACTOR) * num_samples * (blocks + head)


def bert_tagger_train_flops(
    config: BertHeadConfig, *, seq_length: int, num_samples: int
) -> int:
    """Returns the FLOPs of a training step of BERT that classifies tokens.

    Args:
        config: The model.
        seq_length: Tokens of a sample.
        num_samples: Global batch size.
    """
    blocks = config.num_layers * block_forward_flops(config, seq_length=seq_length)
    head = seq_length * 2 * config.model_dim * config.num_classes
    return (1 + BACKWARD_FACTOR) * num_samples * (blocks + head)


def gpt2_train_flops(config: Gpt2Config, *, seq_length: int, num_samples: int) -> int:
    """Returns the FLOPs of a training step of GPT-2 on a global batch.

    The scores of what follows a token count as well, although they are masked.

    Args:
        config: The model.
        seq_length: Tokens of a sample.
        num_samples: Global batch size.

    Example:
        >>> from models.gpt2 import SIZES
        >>> gpt2_train_flops(SIZES["124m"], seq_length=1024, num_samples=1) / 1e12
        0.875166695424
    """
    blocks = config.num_layers * block_forward_flops(config, seq_length=seq_length)
    head = seq_length * 2 * config.model_dim * config.padded_vocab_size
    return (1 + BACKWARD_FACTOR) * num_samples * (blocks + head)


def vit_train_flops(config: VitConfig, *, num_samples: int) -> int:
    """Returns the FLOPs of a training step of ViT on a global batch.

    The gradient of the images is not needed: their embedding counts twice, not thrice.

    Args:
        config: The model.
        num_samples: Global batch size.

    Example:
        >>> from models.vit import SIZES
        >>> vit_train_flops(SIZES["b16"], num_samples=1) / 1e9
        105.151758336
    """
    length, dim = config.seq_length, config.model_dim
    blocks = config.num_layers * block_forward_flops(config, seq_length=length)
    patch_size = config.num_channels * config.patch_size**2
    patches = config.num_patches * 2 * patch_size * dim
    classifier = 2 * dim * config.num_classes
    forward = blocks + patches + classifier
    return num_samples * ((1 + BACKWARD_FACTOR) * forward - patches)


def block_forward_flops(config: BlockConfig, *, seq_length: int) -> int:
    """Returns the FLOPs of a forward pass of one transformer layer on a sample.

    Per token: ``4 * D * D`` multiply-adds for queries, keys, values and output, ``2 *
    D * F`` for the MLP, ``2 * L * D`` for scores and weighted values.

    Args:
        config: Sizes of the layer.
        seq_length: Tokens of the sample, each of which sees all.

    Example:
        >>> block_forward_flops(BlockConfig(model_dim=4, mlp_dim=8), seq_length=2)
        576
    """
    dim = config.model_dim
    maps = 4 * dim * dim + 2 * dim * config.mlp_dim
    attention = 2 * seq_length * dim
    return 2 * seq_length * (maps + attention)
