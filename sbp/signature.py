"""Signatures: how a tensor is laid out along each axis of a mesh. Imports no JAX.

A signature is a tuple with one component per mesh axis:

- ``split(dim)``: the devices along the axis hold consecutive parts of ``dim``.
- ``broadcast``: each device along the axis holds all of it.
- ``partial_sum``: each holds an addend; the tensor is the sum over the axis.

Components are frozen values: they compare, hash and pickle by value, and calling
one returns itself, so that ``sbp.broadcast`` and ``sbp.broadcast()`` are the same.
"""

import dataclasses
import difflib
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, SupportsIndex


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The tensor's dim ``dim`` is cut into equal parts along the mesh axis.

    Attributes:
        dim: Number of the dim. A negative one counts from the last dim and is
            resolved where the component meets a tensor.
    """

    dim: int

    def __call__(self) -> Self:
        """Returns the component itself."""
        return self

    def __repr__(self) -> str:
        return f"sbp.split({self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
    """Every device along the mesh axis holds the same values."""

    def __call__(self) -> Self:
        """Returns the component itself."""
        return self

    def __repr__(self) -> str:
        return "sbp.broadcast"

    def __str__(self) -> str:
        return "B"


@dataclasses.dataclass(frozen=True, slots=True)
class PartialSum:
    """The tensor is the sum of what the devices along the mesh axis hold."""

    def __call__(self) -> Self:
        """Returns the component itself."""
        return self

    def __repr__(self) -> str:
        return "sbp.partial_sum"

    def __str__(self) -> str:
        return "P"


Component = Split | Broadcast | PartialSum
Signature = tuple[Component, ...]
SignatureLike = Component | Sequence[Component] | Mapping[str, Component]

broadcast = Broadcast()
partial_sum = PartialSum()


def split(dim: SupportsIndex) -> Split:
    """Returns the component that cuts ``dim`` along a mesh axis.

    Args:
        dim: Number of the dim; a negative one counts from the last.

    Raises:
        TypeError: If ``dim`` is not a whole number.

    Example:
        >>> split(0)
        sbp.split(0)
        >>> print(split(-1))
        S(-1)
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(
            f"sbp.split takes the number of a dim, but got {dim!r} of type "
            f"{type(dim).__name__}. Write sbp.split(0) for the first dim, "
            "sbp.split(-1) for the last."
        )
    return Split(operator.index(dim))


def parse(text: str) -> Signature:
    """Reads a signature in its short form, as tables and configs write it.

    Args:
        text: Components separated by commas, with or without parentheses around
            them all: ``S(dim)``, ``B`` or ``P``.

    Returns:
        The signature, one component per item.

    Raises:
        ValueError: If a part is none of the three forms.

    Example:
        >>> parse("S(0),B")
        (sbp.split(0), sbp.broadcast)
        >>> parse("(P, S(-1))")
        (sbp.partial_sum, sbp.split(-1))
    """
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1].rstrip().removesuffix(",")
    return tuple(_parse_component(part.strip(), text) for part in inner.split(","))


def _parse_component(part: str, text: str) -> Component:
    if part == "B":
        return broadcast
    if part == "P":
        return partial_sum
    if match := re.fullmatch(r"S\(\s*(-?\d+)\s*\)|S(\d+)", part):
        return Split(int(match[1] or match[2]))
    raise ValueError(
        f"{text!r} is not a signature: {part!r} is none of S(dim), B and P. "
        "Write one of them per mesh axis, as in 'S(0),B'."
    )


def short(signature: Signature) -> str:
    """Returns the short form of a signature, which ``parse`` reads.

    Example:
        >>> short((split(0), partial_sum))
        '(S(0), P)'
        >>> short((broadcast,))
        'B'
    """
    parts = ", ".join(str(component) for component in signature)
    return parts if len(signature) == 1 else f"({parts})"


def resolve(
    sbp: SignatureLike, axis_names: Sequence[str], ndim: int | None = None
) -> Signature:
    """Returns what a caller gave as ``sbp=`` as a full signature.

    Args:
        sbp: One component (for one mesh axis), a sequence of one per axis, or a
            mapping from axis name to component; an axis that a mapping leaves out
            is broadcast.
        axis_names: Names of the mesh axes, in order.
        ndim: Number of dims of the tensor. None leaves negative dims as they are
            and checks no range.

    Returns:
        One component per axis, dims counted from the first if ``ndim`` is given.

    Raises:
        TypeError: If something in it is not a component.
        ValueError: If the number of components is not the number of axes, an axis
            is unknown, or a dim is out of range.

    Example:
        >>> resolve({"tensor": split(-1)}, ("data", "tensor"), ndim=2)
        (sbp.broadcast, sbp.split(1))
    """
    if isinstance(sbp, Mapping):
        components = _by_axis(sbp, axis_names)
    elif isinstance(sbp, Component):
        components = (sbp,)
    elif isinstance(sbp, Sequence) and not isinstance(sbp, str):
        components = tuple(sbp)
    else:
        raise TypeError(_not_a_component(sbp))
    for component in components:
        if not isinstance(component, Component):
            raise TypeError(_not_a_component(component))
    if len(components) != len(axis_names):
        raise ValueError(
            f"The signature {components!r} has {_count(len(components), 'component')}, "
            f"but the placement has {_count(len(axis_names), 'axis', 'axes')} "
            f"{tuple(axis_names)}. Give one component per axis: {_example(axis_names)}."
        )
    if ndim is None:
        return components
    return tuple(
        _resolve_dim(component, name, ndim)
        for component, name in zip(components, axis_names, strict=True)
    )


def _by_axis(by_name: Mapping[str, Component], axis_names: Sequence[str]) -> Signature:
    for name in by_name:
        if name not in axis_names:
            raise ValueError(
                f"Signature names mesh axis {name!r}, but the placement has axes "
                f"{tuple(axis_names)}.{did_you_mean(name, axis_names)}"
            )
    return tuple(by_name.get(name, broadcast) for name in axis_names)


def _resolve_dim(component: Component, axis_name: str, ndim: int) -> Component:
    if not isinstance(component, Split) or 0 <= component.dim < ndim:
        return component
    if -ndim <= component.dim < 0:
        return Split(component.dim + ndim)
    if ndim == 0:
        remedy = "A scalar has no dim to split: use sbp.broadcast or sbp.partial_sum."
    else:
        remedy = f"Use a dim from {-ndim} to {ndim - 1}."
    raise ValueError(
        f"{component!r} on mesh axis {axis_name!r} names a dim that a tensor of "
        f"{_count(ndim, 'dim')} does not have. {remedy}"
    )


def _not_a_component(value: object) -> str:
    hint = ""
    if isinstance(value, str):
        hint = f" To read the short form, write sbp.parse({value!r})."
    elif value is split:
        hint = " Give the dim to split: sbp.split(0)."
    return (
        f"A signature is made of sbp.split(dim), sbp.broadcast and sbp.partial_sum, "
        f"but got {value!r} of type {type(value).__name__}.{hint}"
    )


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _example(axis_names: Sequence[str]) -> str:
    components = ("sbp.split(0)", *["sbp.broadcast"] * (len(axis_names) - 1))
    return f"sbp=({', '.join(components)}{',' if len(components) == 1 else ''})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence proposing the closest known name, or an empty string.

    Example:
        >>> did_you_mean("tensr", ["data", "tensor"])
        " Did you mean 'tensor'?"
    """
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
