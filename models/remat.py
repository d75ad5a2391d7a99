"""What a block keeps for its backward pass, and what it computes again.

==============  ======================================================================
``none``        everything is kept
``selective``   the outputs of matrix products with weights are kept; norms,
                activation, dropout and the attention core are computed again
                (after arXiv:2205.05198)
``full``        the input of the block is kept (arXiv:1604.06174)
==============  ======================================================================
"""

from collections.abc import Callable, Mapping

import jax

KEPT_NAMES = ("qkv", "attention_values", "attention_out", "mlp_up", "mlp_down")

REMAT: Mapping[str, Callable[[Callable], Callable]] = {
    "none": lambda block: block,
    "selective": lambda block: jax.checkpoint(
        block, policy=jax.checkpoint_policies.save_only_these_names(*KEPT_NAMES)
    ),
    "full": jax.checkpoint,
}
