"""Forms of gather and scatter: embedding tables split by rows or by columns.

The rows of a table may be split: each device looks up the indices that fall into its
rows and gives zeros for the rest, so that the result is a partial sum. Looking up
split indices, or splitting what is read per index, needs no communication at all.
"""

from collections.abc import Callable, Mapping

import numpy as np

from sbp.rules.form import Form, Use, is_inexact

# How a new value meets the old one, and whether the result is additive in both.
SCATTERS = {
    "scatter": False,
    "scatter-add": True,
    "scatter-max": False,
    "scatter-min": False,
    "scatter-mul": False,
}


def _gather(use: Use) -> Form:
    numbers = use["dimension_numbers"]
    operand, read = use.shapes[0], use.outputs[0]
    is_number = use.dtypes[0] != np.dtype(bool)
    labels: list[str | None] = [None] * len(operand)
    result: list[str | None] = [None] * len(read)
    batch = _batch_labels(use, numbers, labels, numbers.start_indices_batching_dims)
    window = _window_dims(len(operand), numbers.collapsed_slice_dims, numbers)
    for out_dim, d in zip(sorted(numbers.offset_dims), window, strict=True):
        if read[out_dim] == operand[d] and d not in numbers.start_index_map:
            labels[d] = result[out_dim] = f"window{d}"
    for d in numbers.collapsed_slice_dims:
        if is_number and d in numbers.start_index_map:
            labels[d] = f"rows{d}"
    rest = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for out_dim, label in zip(rest, batch, strict=True):
        result[out_dim] = label
    return Form(
        inputs=(tuple(labels), (*batch, None)),
        outputs=(tuple(result),),
        additive=((0,),) if is_number and _fills_with_nan_or_nothing(use) else (),
    )


def _scatter(use: Use) -> Form:
    numbers = use["dimension_numbers"]
    operand, _, updates = use.shapes
    is_sum = SCATTERS[use.name]
    labels: list[str | None] = [None] * len(operand)
    update_labels: list[str | None] = [None] * len(updates)
    batch = _batch_labels(use, numbers, labels, numbers.scatter_indices_batching_dims)
    window = _window_dims(len(operand), numbers.inserted_window_dims, numbers)
    for dim, d in zip(sorted(numbers.update_window_dims), window, strict=True):
        is_indexed = d in numbers.scatter_dims_to_operand_dims
        if updates[dim] == operand[d] and not is_indexed:
            labels[d] = update_labels[dim] = f"window{d}"
    for d in numbers.inserted_window_dims:
        if d in numbers.scatter_dims_to_operand_dims:
            labels[d] = f"rows{d}"
    rest = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    # Only sums can be scattered apart and added up later.
    kept = [label if is_sum or label in labels else None for label in batch]
    for dim, label in zip(rest, kept, strict=True):
        update_labels[dim] = label
    return Form(
        inputs=(tuple(labels), (*kept, None), tuple(update_labels)),
        outputs=(tuple(labels),),
        additive=((0, 2),) if is_sum else (),
        addends=(0,) if is_sum else (),
    )


def _batch_labels(
    use: Use, numbers: object, labels: list[str | None], indices_batching: tuple
) -> list[str]:
    """Labels the dims of the indices; those paired with operand dims there too."""
    batch = [f"batch{d}" for d in range(len(use.shapes[1]) - 1)]
    pairs = zip(numbers.operand_batching_dims, indices_batching, strict=True)  # type: ignore[attr-defined] # a gather's or a scatter's numbers
    for operand_dim, indices_dim in pairs:
        labels[operand_dim] = batch[indices_dim]
    return batch


def _window_dims(ndim: int, removed: tuple, numbers: object) -> list[int]:
    batching = numbers.operand_batching_dims  # type: ignore[attr-defined] # as above
    return [d for d in range(ndim) if d not in removed and d not in batching]


def _fills_with_nan_or_nothing(use: Use) -> bool:
    """Whether the fill for indices out of bounds survives being summed."""
    is_fill = "FILL" in str(use["mode"])
    return not is_fill or (is_inexact(use.dtypes[0]) and _is_nan(use["fill_value"]))


def _is_nan(value: float | None) -> bool:
    return value is None or bool(np.isnan(value))


INDEXING: Mapping[str, Callable[[Use], Form]] = {
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
