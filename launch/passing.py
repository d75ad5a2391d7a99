"""How keys and values get to all devices of a ring, and their gradients back.

=========  =============================================================================
`PASS_ON`  from each device to the next, one arrival at a time, while it works on the
           last one (arXiv:2310.01889)
`GATHER`   all at once, by all-gather and reduce-scatter: for programs in which not all
           devices of the mesh attend at the same time, as in a pipeline. A permutation
           waits there for devices that do something else: it has no groups
=========  =============================================================================

Both run ``start`` on what a device holds itself and ``step`` on each arrival, the
``number``-th being from the rank ``number`` places before this one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sbp.pipeline import slots

Tree = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """A way to pass trees around the ranks of a manual mesh axis, two or more.

    Attributes:
        forward: ``forward(axis_name, size, held, start, step)`` returns what has become
            of the state that ``start(held)`` and ``step(held, state, number)`` return.
        backward: The same with something to return to those who held it: ``start(held)
            -> (state, returned)``, ``step(held, state, returned, number) -> (state,
            returned)``, which adds to it. The result is the last state, and the sum of
            what all ranks return to this one.
    """

    forward: Callable[..., Tree]
    backward: Callable[..., tuple[Tree, Tree]]


def pass_on_forward(
    axis_name: str, size: int, held: Tree, start: Callable, step: Callable
) -> Tree:
    """Returns the last state; see `Passing`.

    Communication: ``size - 1`` collective-permutes of what is held.
    """

    def arrive(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        held, state = carry
        # Sent before the work on it, and not waited for.
        arriving = _send(held, axis_name, size)
        return (arriving, step(held, state, number)), None

    carry = _send(held, axis_name, size), start(held)
    (held, state), _ = jax.lax.scan(arrive, carry, jnp.arange(1, size - 1))
    return step(held, state, size - 1)


def pass_on_backward(
    axis_name: str, size: int, held: Tree, start: Callable, step: Callable
) -> tuple[Tree, Tree]:
    """Returns the last state and what has come home; see `Passing`.

    Communication: ``size - 1`` collective-permutes of what is held, ``size`` of what is
    returned, which travels along.
    """

    def arrive(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        held, state, returned = carry
        arriving = _send(held, axis_name, size)
        returned = _send(returned, axis_name, size)
        return (arriving, *step(held, state, returned, number)), None

    carry = _send(held, axis_name, size), *start(held)
    (held, state, returned), _ = jax.lax.scan(arrive, carry, jnp.arange(1, size - 1))
    returned = _send(returned, axis_name, size)
    state, returned = step(held, state, returned, size - 1)
    return state, _send(returned, axis_name, size)


def gather_forward(
    axis_name: str, size: int, held: Tree, start: Callable, step: Callable
) -> Tree:
    """Returns the last state; see `Passing`.

    Communication: an all-gather of what is held.
    """
    everything = _gather(held, axis_name)

    def arrive(state: Tree, number: jax.Array) -> tuple[Tree, None]:
        source = (jax.lax.axis_index(axis_name) - number) % size
        return step(slots.read_all(everything, source), state, number), None

    return jax.lax.scan(arrive, start(held), jnp.arange(1, size))[0]


def gather_backward(
    axis_name: str, size: int, held: Tree, start: Callable, step: Callable
) -> tuple[Tree, Tree]:
    """Returns the last state and the sum of what is returned; see `Passing`.

    Communication: an all-gather of what is held, a reduce-scatter of what is returned.
    """
    everything, rank = _gather(held, axis_name), jax.lax.axis_index(axis_name)

    def arrive(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        state, returned = carry
        source = (rank - number) % size
        state, new = step(
            slots.read_all(everything, source),
            state,
            slots.read_all(returned, source),
            number,
        )
        return (state, slots.put_all(returned, new, source)), None

    state, own = start(held)
    returned = slots.put_all(jax.tree.map(lambda x: _zeros(x, size), own), own, rank)
    carry, _ = jax.lax.scan(arrive, (state, returned), jnp.arange(1, size))
    state, returned = carry
    return state, jax.tree.map(lambda x: jax.lax.psum_scatter(x, axis_name), returned)


PASS_ON = Passing(forward=pass_on_forward, backward=pass_on_backward)
GATHER = Passing(forward=gather_forward, backward=gather_backward)


def _send(tree: Tree, axis_name: str, size: int) -> Tree:
    """Returns what the rank before this one has."""
    to_next = [(rank, (rank + 1) % size) for rank in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, to_next), tree)


def _gather(tree: Tree, axis_name: str) -> Tree:
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name), tree)


def _zeros(like: jax.Array, size: int) -> jax.Array:
    """Returns zeros with a dim in front, each rank's own as those it is like."""
    zeros = jnp.zeros((size, *like.shape), like.dtype)
    return jax.lax.pcast(zeros, tuple(jax.typeof(like).mat.varying), to="varying")
