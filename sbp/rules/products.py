"""Forms of matrix products and convolutions: bilinear, with contracted dims."""

from collections.abc import Callable, Mapping

from sbp.rules.form import Form, Use


def _dot_general(use: Use) -> Form:
    """Batch dims, then the free dims of the left and of the right operand.

    A contracted dim split in both operands leaves a partial sum.
    """
    (contract_l, contract_r), (batch_l, batch_r) = use["dimension_numbers"]
    left: list[str] = [f"m{d}" for d in range(len(use.shapes[0]))]
    right: list[str] = [f"n{d}" for d in range(len(use.shapes[1]))]
    for kind, dims_l, dims_r in (
        ("k", contract_l, contract_r),
        ("b", batch_l, batch_r),
    ):
        for i, (dim_l, dim_r) in enumerate(zip(dims_l, dims_r, strict=True)):
            left[dim_l] = right[dim_r] = f"{kind}{i}"
    result = [f"b{i}" for i in range(len(batch_l))]
    result += [label for label in left if label[0] == "m"]
    result += [label for label in right if label[0] == "n"]
    return Form(
        inputs=(tuple(left), tuple(right)),
        outputs=(tuple(result),),
        additive=((0,), (1,)),
    )


def _conv_general_dilated(use: Use) -> Form:
    """Batch and output features may be split; input features are contracted."""
    numbers = use["dimension_numbers"]
    ndim = len(use.shapes[0])
    is_grouped = use["feature_group_count"] > 1 or use["batch_group_count"] > 1
    left: list[str | None] = [None] * ndim
    right: list[str | None] = [None] * ndim
    result: list[str | None] = [None] * ndim
    if use["batch_group_count"] == 1:
        left[numbers.lhs_spec[0]] = result[numbers.out_spec[0]] = "batch"
    if not is_grouped:
        left[numbers.lhs_spec[1]] = right[numbers.rhs_spec[1]] = "in"
        right[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = "out"
    return Form(
        inputs=(tuple(left), tuple(right)),
        outputs=(tuple(result),),
        additive=((0,), (1,)),
    )


PRODUCTS: Mapping[str, Callable[[Use], Form]] = {
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
}
