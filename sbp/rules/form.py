"""Forms: what an operation does to the dims of its operands, as data.

A form reads like the subscripts of an einsum. Each dim of each operand and result
has a *label*, or None where the operation needs the dim whole. One label gives one
rule: the dims that carry it are split, operands without it are broadcast. A label
that no result carries is *reduced*: the devices' results are parts of a sum.

Next to the labels a form says in which operands the operation is *additive*,
``f(a + b) = f(a) + f(b)``: a partial sum passes through there.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from sbp.signature import Component, PartialSum, Split, broadcast, partial_sum

Labels = tuple[Hashable | None, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a primitive: all that its rules depend on. Hashable.

    Attributes:
        name: Name of the primitive.
        shapes: Shapes of the operands, already cut by the axes decided before.
        dtypes: Their dtypes.
        outputs: Shapes of the results, cut likewise.
        params: The primitive's parameters, as sorted pairs.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[Any, ...]
    outputs: tuple[Shape, ...]
    params: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, param: str) -> Any:
        return dict(self.params)[param]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an operation does to dims and to sums.

    Attributes:
        inputs: Labels of the dims of each operand.
        outputs: Labels of the dims of each result.
        additive: Sets of operands; the operation is additive in the operands of one
            set jointly, while all others are broadcast.
        combine: How results over a reduced label combine: ``"sum"`` leaves a partial
            sum, ``"max"``, ``"min"``, ``"any"`` and ``"all"`` need a collective
            inside the operation.
        addends: Operands that are added to the result as they are. Where a label is
            reduced they must be partial sums as well, to be counted once.
        is_selection: Whether the results are a selection of an operand's elements.
            It is then worth reading the operand's shards as parts of a sum.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    additive: tuple[tuple[int, ...], ...] = ()
    combine: str = "sum"
    addends: tuple[int, ...] = ()
    is_selection: bool = False

    @classmethod
    def opaque(cls, use: Use) -> "Form":
        """Returns the form of an operation that needs all of every operand."""
        return cls(
            inputs=tuple((None,) * len(shape) for shape in use.shapes),
            outputs=tuple((None,) * len(shape) for shape in use.outputs),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One way to compute an operation on one mesh axis.

    Attributes:
        inputs: Component that each operand must have.
        outputs: Component that each result then has.
        combine: Collective inside the operation: ``"max"``, ``"min"``, ``"any"``,
            ``"all"``, or empty for none.
        is_selection: See `Form`.
    """

    inputs: tuple[Component, ...]
    outputs: tuple[Component, ...]
    combine: str = ""
    is_selection: bool = False

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return " -> ".join(sides) + (f" by {self.combine}" if self.combine else "")

    @property
    def makes_partial(self) -> bool:
        """Whether a result is a partial sum."""
        return any(isinstance(c, PartialSum) for c in self.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one use.

    Attributes:
        rules: In order of preference at equal cost; the last broadcasts everything.
        exact: The rule to take when the operands have these components already.
    """

    rules: tuple[Rule, ...]
    exact: dict[tuple[Component, ...], Rule]


def is_inexact(dtype: Any) -> bool:
    """Returns whether a dtype is of floating or complex numbers."""
    # bfloat16 and the eight-bit floats are of NumPy's kind V.
    return isinstance(dtype, np.dtype) and dtype.kind in "fcV" and dtype.names is None


def expand(form: Form, use: Use, num_shards: int) -> RuleSet:
    """Returns the rules of a form on an axis of ``num_shards`` devices."""
    whole = Rule((broadcast,) * len(form.inputs), (broadcast,) * len(form.outputs))
    rules = [
        _split_rule(form, label)
        for label in _labels(form)
        if _divides(form, use, label, num_shards)
    ]
    rules += [_partial_rule(form, operands) for operands in form.additive]
    rules.append(whole)
    exact = {whole.inputs: whole}
    for rule in rules:
        exact.setdefault(rule.inputs, rule)
    return RuleSet(tuple(rules), exact)


def _labels(form: Form) -> list[Hashable]:
    """Labels of operands, those of results first, in the order of their dims."""
    of_inputs = dict.fromkeys(label for labels in form.inputs for label in labels)
    of_outputs = dict.fromkeys(label for labels in form.outputs for label in labels)
    ordered = [label for label in of_outputs if label in of_inputs]
    ordered += [label for label in of_inputs if label not in of_outputs]
    return [label for label in ordered if label is not None]


def _divides(form: Form, use: Use, label: Hashable, num_shards: int) -> bool:
    pairs = zip(form.inputs + form.outputs, use.shapes + use.outputs, strict=True)
    return all(
        size % num_shards == 0
        for labels, shape in pairs
        for own, size in zip(labels, shape, strict=True)
        if own == label
    )


def _split_rule(form: Form, label: Hashable) -> Rule:
    is_reduced = not any(label in labels for labels in form.outputs)
    inputs: list[Component] = [
        _split_at(labels.index(label)) if label in labels else broadcast
        for labels in form.inputs
    ]
    if not is_reduced:
        outputs = [
            _split_at(labels.index(label)) if label in labels else broadcast
            for labels in form.outputs
        ]
        return Rule(tuple(inputs), tuple(outputs))
    if form.combine != "sum":
        whole = (broadcast,) * len(form.outputs)
        return Rule(tuple(inputs), whole, form.combine)
    for operand in form.addends:
        inputs[operand] = partial_sum
    return Rule(tuple(inputs), (partial_sum,) * len(form.outputs))


def _partial_rule(form: Form, operands: Sequence[int]) -> Rule:
    inputs = [
        partial_sum if operand in operands else broadcast
        for operand in range(len(form.inputs))
    ]
    outputs = (partial_sum,) * len(form.outputs)
    return Rule(tuple(inputs), outputs, is_selection=form.is_selection)


@functools.lru_cache(maxsize=64)
def _split_at(dim: int) -> Component:
    """One object per dim: equal components are then found to be so at once."""
    return Split(dim)
