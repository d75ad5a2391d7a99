"""Forms of reductions, cumulative operations, sorting and windows.

A sum over a split dim leaves a partial sum. Largest and smallest, "any" and "all" over
a split dim are combined by a collective on the reduced values, which is far smaller
than gathering the operand.
"""

from collections.abc import Callable, Mapping, Sequence

from sbp.rules.form import Form, Labels, Use

COMBINES = {
    "reduce_and": "all",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "any",
    "reduce_sum": "sum",
}


def _reduce(use: Use) -> Form:
    """Reductions that combine across devices."""
    combine = COMBINES[use.name]
    is_bits = combine in ("all", "any") and use.dtypes[0].kind != "b"
    if is_bits:  # bitwise, on integers: no collective does that
        return _reduce_whole(use)
    every = tuple(range(len(use.shapes[0])))
    return Form(
        inputs=(every,),
        outputs=(_without(every, use["axes"]),),
        additive=((0,),) if combine == "sum" else (),
        combine=combine,
    )


def _reduce_whole(use: Use) -> Form:
    """Reductions that need the reduced dims whole; results may be several."""
    axes = use["dimensions"] if use.name == "reduce" else use["axes"]
    every = tuple(range(len(use.shapes[0])))
    kept = tuple(None if d in axes else d for d in every)
    return Form(
        inputs=tuple(kept if len(shape) == len(kept) else () for shape in use.shapes),
        outputs=(_without(every, axes),) * len(use.outputs),
    )


def _along(param: str, additive: tuple = ()) -> Callable[[Use], Form]:
    """Operations that keep the shape and need one dim whole."""

    def form(use: Use) -> Form:
        dim = use[param]
        labels = tuple(None if d == dim else d for d in range(len(use.shapes[0])))
        return Form(
            inputs=(labels,) * len(use.shapes),
            outputs=(labels,) * len(use.outputs),
            additive=additive,
        )

    return form


def _windows(additive: tuple = ()) -> Callable[[Use], Form]:
    """Windows over dims: a dim that is not windowed may be split."""

    def form(use: Use) -> Form:
        plain = zip(
            use["window_dimensions"],
            use["window_strides"],
            use["padding"],
            use["base_dilation"],
            use["window_dilation"],
            strict=True,
        )
        whole = (1, 1, (0, 0), 1, 1)
        labels = tuple(
            d if (*window[:2], tuple(window[2]), *window[3:]) == whole else None
            for d, window in enumerate(plain)
        )
        return Form(inputs=(labels,), outputs=(labels,), additive=additive)

    return form


def _without(labels: Labels, dims: Sequence[int]) -> Labels:
    return tuple(label for d, label in enumerate(labels) if d not in dims)


REDUCTIONS: Mapping[str, Callable[[Use], Form]] = {
    **dict.fromkeys(COMBINES, _reduce),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce", "reduce_prod", "reduce_xor"), _reduce_whole
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod"), _along("axis")),
    "cumsum": _along("axis", ((0,),)),
    "reduce_window_max": _windows(),
    "reduce_window_min": _windows(),
    "reduce_window_sum": _windows(((0,),)),
    "sort": _along("dimension"),
    "top_k": _along("axis"),
}
