"""What a block keeps for its backward pass, and what it computes again.

A policy is one of these words, or says of each named tensor what becomes of it:

==============  ======================================================================
``none``        everything that the backward pass reads is kept
``selective``   the tensors of `NAMES` are kept; the attention core between them is
                computed again, and what follows from them number by number
                (arXiv:2205.05198, section 5)
``full``        the input of the block is kept (arXiv:1604.06174)
==============  ======================================================================
"""

import difflib
from collections.abc import Callable, Iterator, Mapping

import jax

Policy = str | Mapping[str, str]

POLICIES = ("none", "selective", "full")
ACTIONS = ("save", "offload", "recompute")

NAMES: Mapping[str, str] = {
    "attention_norm": "output of the norm of the attention half",
    "qkv": "queries, keys and values",
    "attention_values": "output of the attention core",
    "attention_lse": "its normalizers, unless all scores are computed at once",
    "attention_out": "output of the attention half, before dropout",
    "mlp_norm": "output of the norm of the MLP half",
    "mlp_up": "hidden values of the MLP, before the activation",
    "mlp_activation": "the same after it",
    "mlp_down": "output of the MLP half, before dropout",
    "dropout_mask": "which of the outputs of the halves are dropped",
}
"""The tensors of a block that a policy may name.

One that the backward pass does not read is not kept, whatever a policy says.
"""


def with_remat(block: Callable, policy: Policy) -> Callable:
    """Returns the block, whose backward pass computes again what is not kept.

    Args:
        block: Its tensors are named by `jax.ad_checkpoint.checkpoint_name`.
        policy: One of `POLICIES`, or action by name; a name left out is computed
            again. ``"offload"`` keeps a tensor in the memory of the host.
    """
    if policy == "none":
        return block
    if policy == "full":
        return jax.checkpoint(block)
    actions = dict.fromkeys(NAMES, "save") if isinstance(policy, str) else policy
    policies = jax.checkpoint_policies
    return jax.checkpoint(
        block,
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=_names(actions, "save"),
            names_which_can_be_offloaded=_names(actions, "offload"),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )


def broken_rules(policy: Policy) -> Iterator[str]:
    """Yields one sentence per broken rule.

    Example:
        >>> list(broken_rules({"qkv": "keep"}))
        ["remat['qkv']='keep' is not one of 'save', 'offload', 'recompute'."]
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            yield (
                f"remat={policy!r} is not one of {known}, or an action by name such as"
                " {'qkv': 'save'}."
            )
        return
    for name, action in policy.items():
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {_known()}."
            yield f"remat[{name!r}]: no tensor of a block has this name. {hint}"
        if action not in ACTIONS:
            known = ", ".join(map(repr, ACTIONS))
            yield f"remat[{name!r}]={action!r} is not one of {known}."


def _names(actions: Mapping[str, str], wanted: str) -> list[str]:
    return [name for name, action in actions.items() if action == wanted]


def _known() -> str:
    return ", ".join(NAMES)
