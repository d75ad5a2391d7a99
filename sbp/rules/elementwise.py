"""Forms of elementwise operations: every dim of the result may be split.

An operand may have fewer dims than the result (a scalar), or size 1 where the result
is larger; it is broadcast there.
"""

from collections.abc import Callable, Mapping

import numpy as np

from sbp.rules.form import Form, Labels, Shape, Use, is_inexact

Additive = tuple[tuple[int, ...], ...]

ALONE: Additive = ((0,),)
TOGETHER: Additive = ((0, 1),)
EITHER: Additive = ((0,), (1,))

# Additive in these operands for every dtype, integers that wrap around included.
ADDITIVE: Mapping[str, Additive] = {
    "add": TOGETHER,
    "add_any": TOGETHER,
    "complex": TOGETHER,
    "conj": ALONE,
    "copy": ALONE,
    "imag": ALONE,
    "mul": EITHER,
    "neg": ALONE,
    "real": ALONE,
    "sub": TOGETHER,
}

NOT_ADDITIVE = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min ne nextafter not or polygamma population_count pow
    random_fold_in reduce_precision regularized_incomplete_beta rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    tan tanh threefry2x32 xor zeta
""".split()


def elementwise(use: Use, additive: Additive = ()) -> Form:
    """Returns the form of an operation that maps elements at equal positions."""
    result = use.outputs[0]
    every = tuple(range(len(result)))
    return Form(
        inputs=tuple(_labels(shape, result) for shape in use.shapes),
        outputs=(every,) * len(use.outputs),
        additive=additive,
    )


def _labels(shape: Shape, result: Shape) -> Labels:
    if len(shape) != len(result):  # a scalar
        return (None,) * len(shape)
    sizes = zip(shape, result, strict=True)
    return tuple(d if own == size else None for d, (own, size) in enumerate(sizes))


def _fixed(additive: Additive) -> Callable[[Use], Form]:
    return lambda use: elementwise(use, additive)


def _div(use: Use) -> Form:
    # Integers are cut off: 1/2 + 1/2 is 0.
    return elementwise(use, ALONE if is_inexact(use.dtypes[0]) else ())


def _convert(use: Use) -> Form:
    return elementwise(use, ALONE if _keeps_sums(use) else ())


def _keeps_sums(use: Use) -> bool:
    """Between floats, and between integers unless a wrapped sum would be widened."""
    source, target = use.dtypes[0], np.dtype(use["new_dtype"])
    if is_inexact(source):
        return is_inexact(target)
    are_integers = source.kind in "iu" and target.kind in "iu"
    return are_integers and target.itemsize <= source.itemsize


def _bitcast(use: Use) -> Form:
    if use.shapes != use.outputs:
        return Form.opaque(use)
    return elementwise(use)


def _select(use: Use) -> Form:
    # The cases, between which the predicate chooses.
    is_number = use.dtypes[1] != np.dtype(bool)
    cases = tuple(range(1, len(use.shapes)))
    return elementwise(use, (cases,) if is_number else ())


ELEMENTWISE: Mapping[str, Callable[[Use], Form]] = {
    **{name: _fixed(()) for name in NOT_ADDITIVE},
    **{name: _fixed(additive) for name, additive in ADDITIVE.items()},
    "bitcast_convert_type": _bitcast,
    "convert_element_type": _convert,
    "div": _div,
    "select_n": _select,
}
