"""Forms of operations that move elements: reshape, transpose, slice, pad, join."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sbp.rules.form import Form, Labels, Shape, Use


def _reshape(use: Use) -> Form:
    """Groups of dims with equal products; the first dim of a group may be split."""
    source, target = use.shapes[0], use.outputs[0]
    in_labels: list[int | None] = [None] * len(source)
    out_labels: list[int | None] = [None] * len(target)
    if use["dimensions"] is None and 0 not in source:
        for number, (i, j) in enumerate(_heads_of_groups(source, target)):
            in_labels[i] = out_labels[j] = number
    return Form(
        inputs=(tuple(in_labels),),
        outputs=(tuple(out_labels),),
        additive=_if_number(use, (0,)),
    )


def _heads_of_groups(source: Shape, target: Shape) -> list[tuple[int, int]]:
    """Pairs of dims that lead the shortest groups of equal product.

    Dims of size 1 belong to no group. Splitting the leading dims of a pair evenly
    cuts the elements at the same places.

    Example:
        >>> _heads_of_groups((6, 4, 5), (2, 3, 20))
        [(0, 0), (1, 2)]
    """
    heads: list[tuple[int, int]] = []
    i = j = 0
    while True:
        while i < len(source) and source[i] == 1:
            i += 1
        while j < len(target) and target[j] == 1:
            j += 1
        if i == len(source) or j == len(target):
            return heads
        heads.append((i, j))
        left, right = source[i], target[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1


def _broadcast_in_dim(use: Use) -> Form:
    source, target = use.shapes[0], use.outputs[0]
    dims = use["broadcast_dimensions"]
    labels = tuple(
        int(d) if size == target[d] else None
        for size, d in zip(source, dims, strict=True)
    )
    return Form(
        inputs=(labels,),
        outputs=(tuple(d if d in labels else None for d in range(len(target))),),
        additive=_if_number(use, (0,)),
    )


def _transpose(use: Use) -> Form:
    every = tuple(range(len(use.shapes[0])))
    return Form(
        inputs=(every,),
        outputs=(tuple(use["permutation"]),),
        additive=_if_number(use, (0,)),
    )


def _squeeze(use: Use) -> Form:
    every = tuple(range(len(use.shapes[0])))
    kept = tuple(d for d in every if d not in use["dimensions"])
    inputs = tuple(d if d in kept else None for d in every)
    return Form(inputs=(inputs,), outputs=(kept,), additive=_if_number(use, (0,)))


def _rev(use: Use) -> Form:
    return _whole_in(use, use["dimensions"], additive=_if_number(use, (0,)))


def _concatenate(use: Use) -> Form:
    everything = tuple(range(len(use.shapes)))
    return _whole_in(use, (use["dimension"],), additive=_if_number(use, everything))


def _split(use: Use) -> Form:
    return _whole_in(use, (use["axis"],), additive=_if_number(use, (0,)))


def _pad(use: Use) -> Form:
    padded = [d for d, sizes in enumerate(use["padding_config"]) if any(sizes)]
    form = _whole_in(use, padded, additive=_if_number(use, (0, 1)))
    return Form(
        inputs=(form.inputs[0], ()), outputs=form.outputs, additive=form.additive
    )


def _slice(use: Use) -> Form:
    """A dim that is kept whole may be split."""
    bounds = zip(
        use["start_indices"],
        use["strides"] or (1,) * len(use.shapes[0]),
        strict=True,
    )
    # Cut dims differ in size between operand and result, unless nothing is cut.
    return _selection(use, [d for d, b in enumerate(bounds) if tuple(b) != (0, 1)])


def _dynamic_slice(use: Use) -> Form:
    form = _selection(use, ())
    scalars: tuple[Labels, ...] = ((),) * (len(use.shapes) - 1)
    return Form(
        inputs=(form.inputs[0], *scalars),
        outputs=form.outputs,
        additive=form.additive,
        is_selection=True,
    )


def _dynamic_update_slice(use: Use) -> Form:
    operand, update = use.shapes[:2]
    sizes = zip(operand, update, strict=True)
    labels = tuple(d if a == b else None for d, (a, b) in enumerate(sizes))
    scalars: tuple[Labels, ...] = ((),) * (len(use.shapes) - 2)
    return Form(
        inputs=(labels, labels, *scalars),
        outputs=(labels,),
        additive=_if_number(use, (0, 1)),
    )


def _iota(use: Use) -> Form:
    return Form(inputs=(), outputs=((None,) * len(use.outputs[0]),))


def _random_bits(use: Use) -> Form:
    """A batch of keys gives a batch of bits, each key its own."""
    batch = tuple(range(len(use.shapes[0])))
    rest = (None,) * (len(use.outputs[0]) - len(batch))
    return Form(inputs=(batch,), outputs=((*batch, *rest),))


def _random_unwrap(use: Use) -> Form:
    batch = tuple(range(len(use.shapes[0])))
    return Form(inputs=(batch,), outputs=((*batch, None),))


def _random_wrap(use: Use) -> Form:
    batch = tuple(range(len(use.outputs[0])))
    return Form(inputs=((*batch, None),), outputs=(batch,))


def _selection(use: Use, cut: Sequence[int]) -> Form:
    sizes = zip(use.shapes[0], use.outputs[0], strict=True)
    whole = [d for d, (a, b) in enumerate(sizes) if a != b]
    form = _whole_in(use, [*whole, *cut], additive=_if_number(use, (0,)))
    return Form(
        inputs=form.inputs[:1],
        outputs=form.outputs,
        additive=form.additive,
        is_selection=True,
    )


def _whole_in(use: Use, dims: Sequence[int], additive: tuple) -> Form:
    """The form that keeps every dim where it is and needs ``dims`` whole."""
    labels = tuple(None if d in dims else d for d in range(len(use.shapes[0])))
    return Form(
        inputs=(labels,) * len(use.shapes),
        outputs=(labels,) * len(use.outputs),
        additive=additive,
    )


def _if_number(use: Use, operands: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Truth values and random keys cannot be summed."""
    dtype = use.dtypes[operands[0]]
    is_number = isinstance(dtype, np.dtype) and dtype != np.dtype(bool)
    return (operands,) if is_number else ()


SHAPES: Mapping[str, Callable[[Use], Form]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "pad": _pad,
    "random_bits": _random_bits,
    "random_unwrap": _random_unwrap,
    "random_wrap": _random_wrap,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
