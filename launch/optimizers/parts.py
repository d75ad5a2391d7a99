"""Update rules for parts of the parameters: of each layer, of chosen paths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from models.stacked import combine, select


def per_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a rule without state to each layer of the stack on its own."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def apply(updates: Any, params: Any) -> Any:
            return rule.update(updates, state, params)[0]

        found = {}
        for name, value in updates.items():
            run = jax.vmap(apply) if name == "blocks" else apply
            found[name] = run(value, value if params is None else params[name])
        return found, state

    return optax.GradientTransformation(rule.init, update)


class SplitState(NamedTuple):
    """State of `split`.

    Attributes:
        chosen: Of the rule for the chosen parameters.
        others: Of the rule for the others.
    """

    chosen: Any
    others: Any


def split(
    is_chosen: Callable[[str], bool],
    chosen: optax.GradientTransformation,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Applies one rule to the chosen parameters and another one to the others.

    Args:
        is_chosen: Says it of a path as sharding tables write it.
        chosen: The one rule.
        others: The other one.
    """

    def is_other(path: str) -> bool:
        return not is_chosen(path)

    def init(params: Any) -> SplitState:
        return SplitState(
            chosen.init(select(params, is_chosen)),
            others.init(select(params, is_other)),
        )

    def update(updates: Any, state: SplitState, params: Any = None) -> tuple[Any, Any]:
        first, chosen_state = chosen.update(
            select(updates, is_chosen), state.chosen, select(params, is_chosen)
        )
        second, others_state = others.update(
            select(updates, is_other), state.others, select(params, is_other)
        )
        return combine(first, second), SplitState(chosen_state, others_state)

    return optax.GradientTransformation(init, update)
