"""Cuts a computation in two, with little to keep in between.

A function is traced, its calls are inlined, and its equations are dealt out. First
comes what the first results need. Whatever only the other results need comes first too,
but for the primitives that are to be deferred, and for what uses them.

Kept in between are the values that cross over, before they were transposed, reshaped,
broadcast or widened, and unless they are given to both parts: nothing but these cheap
operations is done twice. Two cuts are made of a layer:

* **forward | backward**. What the backward pass needs of the forward pass is kept, but
  no copies of weights, and nothing twice in two forms.
* **input gradient | weight gradients**. Nobody waits for the gradients of weights, and
  the matrix products that they alone need are deferred. Sums for biases and norms are
  not, since they are smaller than what they are made of.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from sbp._compat import run_equation
from sbp.deduction.region import CALLS

Tree = Any

# Free enough to be done again, from an operand that is no larger.
CHEAP = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "pvary",
    "reshape",
    "squeeze",
    "stop_gradient",
    "transpose",
)
PRODUCTS = ("conv_general_dilated", "dot_general", "ragged_dot_general")


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A function in two parts.

    Attributes:
        function: ``function(given, passing) -> (first, later)``, four trees. Both parts
            are given the same ``given``; ``passing`` exists in the first part alone.
        deferred: Names of the primitives to leave for the second part.
    """

    function: Callable[[Tree, Tree], tuple[Tree, Tree]]
    deferred: tuple[str, ...] = ()

    def first(self, given: Tree, passing: Tree) -> tuple[Tree, list[jax.Array]]:
        """Returns the first results, and what has to be kept for the others."""
        program = self._trace(given, passing)
        values = program.start(given, passing)
        program.run(values, later=False)
        results = [program.read(values, name) for name in program.first]
        return (
            jax.tree.unflatten(program.first_structure, results),
            [values[name] for name in program.kept],
        )

    def later(self, given: Tree, passing: Tree, kept: list[jax.Array]) -> Tree:
        """Returns the other results.

        Args:
            given: As in the first part.
            passing: Anything of the types that the first part had; not looked at.
            kept: From the first part.
        """
        program = self._trace(given, passing)
        values = program.start(given, ())
        values.update(zip(program.kept, kept, strict=True))
        program.run(values, later=True)
        results = [program.read(values, name) for name in program.last]
        return jax.tree.unflatten(program.last_structure, results)

    def _trace(self, given: Tree, passing: Tree) -> "_Program":
        traced = jax.make_jaxpr(self.function, return_shape=True)(given, passing)
        closed, shapes = traced
        first_leaves, first_structure = jax.tree.flatten(shapes[0])
        flat = _Flat()
        names = [flat.name(var.aval) for var in closed.jaxpr.invars]
        results = flat.inline(closed.jaxpr, closed.consts, names)
        first, last = results[: len(first_leaves)], results[len(first_leaves) :]
        at_hand = set(range(len(jax.tree.leaves(given)))) | flat.consts.keys()
        deal = _deal(flat, first, last, at_hand, self.deferred)
        return _Program(
            steps=flat.steps,
            is_first=deal.is_first,
            is_later=deal.is_later,
            consts=flat.consts,
            first=first,
            last=last,
            kept=deal.kept,
            first_structure=first_structure,
            last_structure=jax.tree.structure(shapes[1]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """An equation; operands are names, or literals."""

    eqn: core.JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A traced function with its calls inlined, and the deal.

    Attributes:
        steps: All equations.
        is_first: For each whether it is computed in the first part.
        is_later: For each whether it is computed in the second part, or again there.
        consts: Values that the function closes over. Names are numbers, and those of
            the arguments come first.
        first: Names of the first results.
        last: Names of the others.
        kept: Names of the values kept in between.
        first_structure: Of the first results.
        last_structure: Of the others.
    """

    steps: Sequence[_Step]
    is_first: Sequence[bool]
    is_later: Sequence[bool]
    consts: Mapping[int, Any]
    first: Sequence[Any]
    last: Sequence[Any]
    kept: Sequence[int]
    first_structure: Any
    last_structure: Any

    def start(self, given: Tree, passing: Tree) -> dict[int, Any]:
        leaves = jax.tree.leaves((given, passing))
        return dict(enumerate(leaves)) | dict(self.consts)

    def run(self, values: dict[int, Any], *, later: bool) -> None:
        """Adds to ``values`` what the steps of one part compute."""
        wanted = self.is_later if later else self.is_first
        for step in itertools.compress(self.steps, wanted):
            operands = [self.read(values, operand) for operand in step.operands]
            found = run_equation(step.eqn, operands)
            values.update(zip(step.results, found, strict=True))

    @staticmethod
    def read(values: Mapping[int, Any], operand: Any) -> Any:
        return operand.val if isinstance(operand, core.Literal) else values[operand]


class _Flat:
    """Collects equations while calls are inlined; values are named by numbers."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.consts: dict[int, Any] = {}
        self.sizes: list[int] = []

    def name(self, aval: Any) -> int:
        """Returns a new name, for a value of this type."""
        itemsize = aval.dtype.itemsize if isinstance(aval.dtype, np.dtype) else 8
        self.sizes.append(math.prod(aval.shape) * itemsize)
        return len(self.sizes) - 1

    def inline(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], operands: Sequence[Any]
    ) -> list[Any]:
        """Appends the equations; returns the names of the results, or literals."""
        names = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = self.name(var.aval)
            self.consts[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            callee = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
            if callee is None:
                results = [self.name(var.aval) for var in eqn.outvars]
                self.steps.append(_Step(eqn, tuple(operands), tuple(results)))
            elif isinstance(callee, core.ClosedJaxpr):
                results = self.inline(callee.jaxpr, callee.consts, operands)
            else:
                results = self.inline(callee, (), operands)
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


class _Deal(NamedTuple):
    is_first: list[bool]
    is_later: list[bool]
    kept: list[int]


def _deal(
    flat: "_Flat",
    first: Sequence,
    last: Sequence,
    at_hand: set[int],
    deferred: Sequence[str],
) -> _Deal:
    """Deals the steps out, and finds what has to be kept in between."""
    steps = flat.steps
    needed_first, needed_last = _needed(steps, first), _needed(steps, last)
    is_later = [False] * len(steps)
    late: set[int] = set()
    for number, step in enumerate(steps):
        if needed_last[number] and not needed_first[number]:
            uses_late = any(name in late for name in _variables(step.operands))
            is_later[number] = uses_late or _has(step.eqn, deferred)
            late.update(step.results if is_later[number] else ())
    maker = {name: i for i, step in enumerate(steps) for name in step.results}
    # Dicts rather than sets: the order must be the same each time.
    crossing = dict.fromkeys(
        name
        for names in (*(s.operands for s in itertools.compress(steps, is_later)), last)
        for name in _variables(names)
        if name not in late
    )
    kept: dict[int, None] = {}
    again = list(is_later)
    for name in crossing:
        source, numbers = _smallest_source(flat, maker, name, at_hand)
        for number in numbers:
            again[number] = True
        if source is not None:
            kept[source] = None
    return _Deal(_needed(steps, [*first, *kept]), again, list(kept))


def _needed(steps: Sequence[_Step], results: Sequence) -> list[bool]:
    """Returns which steps are needed for some results."""
    wanted = set(_variables(results))
    needed = [False] * len(steps)
    for number in reversed(range(len(steps))):
        if not wanted.isdisjoint(steps[number].results):
            needed[number] = True
            wanted.update(_variables(steps[number].operands))
    return needed


def _smallest_source(
    flat: "_Flat", maker: Mapping[int, int], name: int, at_hand: set[int]
) -> tuple[int | None, list[int]]:
    """Returns the smallest value that a value can be made of at no cost.

    Returns:
        Its name, or None if nothing has to be kept; and the numbers of the steps.
    """
    best, num_needed = name, 0
    numbers: list[int] = []
    while name not in at_hand:
        if flat.sizes[name] < flat.sizes[best]:
            best, num_needed = name, len(numbers)
        step = flat.steps[maker[name]] if name in maker else None
        operands = list(_variables(step.operands)) if step else []
        is_cheap = step is not None and step.eqn.primitive.name in CHEAP
        if not is_cheap or len(operands) > 1:
            return best, numbers[:num_needed]
        numbers.append(maker[name])
        if not operands:  # a constant
            break
        name = operands[0]
    return None, numbers


def _has(eqn: core.JaxprEqn, names: Sequence[str]) -> bool:
    """Returns whether an equation is one of these primitives, or has one inside."""
    return eqn.primitive.name in names or any(
        _has(inner, names) for inner in _inner_equations(eqn)
    )


def _inner_equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if isinstance(value, core.ClosedJaxpr):
            yield from value.jaxpr.eqns
        elif isinstance(value, core.Jaxpr):
            yield from value.eqns


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def _variables(names: Sequence) -> Iterator[int]:
    return (name for name in names if not isinstance(name, core.Literal))
