"""Rules: which signatures an operation admits, one mesh axis at a time.

One table, primitive -> `Form`, serves the operators on global tensors and the walk
over the jaxpr of a whole function. A form says of each dim of each operand what
becomes of it; `admissible_rules` expands it into rules, which are plain data.
"""

import functools
from collections.abc import Callable, Mapping

from sbp.rules.elementwise import ELEMENTWISE
from sbp.rules.form import Form, RuleSet, Use, expand
from sbp.rules.indexing import INDEXING
from sbp.rules.products import PRODUCTS
from sbp.rules.reductions import REDUCTIONS
from sbp.rules.shapes import SHAPES

FORMS: Mapping[str, Callable[[Use], Form]] = {
    **ELEMENTWISE,
    **PRODUCTS,
    **REDUCTIONS,
    **SHAPES,
    **INDEXING,
}


def has_form(primitive: str) -> bool:
    """Returns whether the table has a row for a primitive.

    Example:
        >>> has_form("dot_general"), has_form("cholesky")
        (True, False)
    """
    return primitive in FORMS


@functools.lru_cache(maxsize=16384)
def admissible_rules(use: Use, num_shards: int) -> RuleSet:
    """Returns the rules of one use of a primitive on an axis of ``num_shards``.

    A rule that splits a dim which ``num_shards`` does not divide is left out. The last
    rule is always the one that computes everything on every device; a primitive that
    the table lacks has no other.

    Args:
        use: The primitive, its parameters, and the shapes that it sees.
        num_shards: Devices along the axis.

    Example:
        >>> import jax.numpy as jnp
        >>> f32 = jnp.dtype("float32")
        >>> use = Use(name="tanh", shapes=((8, 6),), dtypes=(f32,), outputs=((8, 6),))
        >>> for rule in admissible_rules(use, 4).rules:
        ...     print(rule)
        S(0) -> S(0)
        B -> B
    """
    if use.name not in FORMS:
        nothing = Form.opaque(use)
        return expand(nothing, use, num_shards)
    return expand(FORMS[use.name](use), use, num_shards)
