"""One use, or several, of every primitive that the table of rules has."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

RNG = np.random.default_rng(0)


def f32(*shape):
    """Floats between 0.1 and 0.9, where every function is defined."""
    return RNG.uniform(0.1, 0.9, shape).astype(np.float32)


def i32(*shape, low=0, high=5):
    return RNG.integers(low, high, shape).astype(np.int32)


def bits(*shape):
    return RNG.integers(0, 2, shape).astype(bool)


def c64(*shape):
    return (f32(*shape) + 1j * f32(*shape)).astype(np.complex64)


X, Y = f32(4, 8), f32(4, 8)
N, M = i32(4, 8), i32(4, 8, low=1)

FLOATS = {
    "abs": lax.abs, "acos": lax.acos, "asin": lax.asin, "asinh": lax.asinh,
    "atan": lax.atan, "atanh": lax.atanh, "cbrt": lax.cbrt, "ceil": lax.ceil,
    "cos": lax.cos, "cosh": lax.cosh, "erf": lax.erf, "erfc": lax.erfc,
    "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor,
    "is_finite": lax.is_finite, "log": lax.log, "log1p": lax.log1p,
    "logistic": lax.logistic, "neg": lax.neg, "round": lax.round,
    "rsqrt": lax.rsqrt, "sign": lax.sign, "sin": lax.sin, "sinh": lax.sinh,
    "sqrt": lax.sqrt, "square": lax.square, "tan": lax.tan, "tanh": lax.tanh,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.float16),
}  # fmt: skip

PAIRS = {
    "add": lax.add, "atan2": lax.atan2, "complex": lax.complex, "div": lax.div,
    "eq": lax.eq, "ge": lax.ge, "gt": lax.gt, "le": lax.le, "lt": lax.lt,
    "max": lax.max, "min": lax.min, "mul": lax.mul, "ne": lax.ne,
    "nextafter": lax.nextafter, "pow": lax.pow, "rem": lax.rem, "sub": lax.sub,
}  # fmt: skip

INTEGERS = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    "shift_left": lax.shift_left, "div": lax.div, "mul": lax.mul, "add": lax.add,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
}  # fmt: skip

PRIMITIVES = {p.name: p for p in vars(primitives).values() if hasattr(p, "name")}
WORDS = [i32(4, 8, high=9999).astype(np.uint32) for _ in range(4)]

ELEMENTWISE = [
    *((name, function, [X]) for name, function in FLOATS.items()),
    *((name, function, [X, Y]) for name, function in PAIRS.items()),
    *((f"{name} of ints", function, [N, M]) for name, function in INTEGERS.items()),
    *((name, function, [c64(4, 8)]) for name, function in {
        "conj": lax.conj, "imag": lax.imag, "real": lax.real}.items()),
    *((name, PRIMITIVES[name].bind, [X, Y])
      for name in ("add_any", "eq_to", "le_to", "lt_to")),
    ("threefry2x32", PRIMITIVES["threefry2x32"].bind, WORDS),
    ("acosh", lax.acosh, [1 + X]),
    ("copy", lambda x: jnp.array(x, copy=True), [X]),
    ("add sizes of 1", lax.add, [f32(4, 1), f32(1, 8)]),
    ("mul by a scalar", lambda x: lax.mul(x, np.float32(2)), [X]),
    ("clamp", lax.clamp, [np.float32(0.2), X, np.float32(0.7)]),
    ("clz", lax.clz, [N]),
    ("not", lax.bitwise_not, [bits(4, 8)]),
    ("population_count", lax.population_count, [N]),
    ("convert ints", lambda x: lax.convert_element_type(x, jnp.int8), [N]),
    ("convert floats to ints", lambda x: lax.convert_element_type(x, jnp.int32),
     [8 * X]),
    ("convert to wider", lambda x: lax.convert_element_type(x, jnp.int32),
     [N.astype(np.int8)]),
    ("select_n", lax.select_n, [bits(4, 8), X, Y]),
    ("select_n by a scalar", lax.select_n, [np.bool_(True), X, Y]),
    ("select_n of bools", lax.select_n, [bits(4, 8), bits(4, 8), bits(4, 8)]),
]  # fmt: skip

# They compile to loops, which takes long.
SPECIAL = [
    ("bessel_i0e", lax.bessel_i0e, [X]),
    ("bessel_i1e", lax.bessel_i1e, [X]),
    ("digamma", lax.digamma, [X]),
    ("erf_inv", lax.erf_inv, [X]),
    ("igamma", lax.igamma, [X, Y]),
    ("igamma_grad_a", lax.igamma_grad_a, [X, Y]),
    ("igammac", lax.igammac, [X, Y]),
    ("lgamma", lax.lgamma, [X]),
    ("polygamma", lax.polygamma, [1 + i32(4, 8).astype(np.float32), X]),
    ("regularized_incomplete_beta", lax.betainc, [X, Y, f32(4, 8)]),
    ("zeta", lax.zeta, [2 + X, Y]),
]

CONVOLVE = functools.partial(
    lax.conv_general_dilated, window_strides=(1, 1), padding="SAME"
)

PRODUCTS = [
    ("dot_general", lax.dot, [f32(4, 6), f32(6, 8)]),
    ("dot_general batched",
     lambda x, y: lax.dot_general(x, y, (([3], [1]), ([0, 2], [0, 2]))),
     [f32(4, 3, 2, 6), f32(4, 6, 2, 8)]),
    ("dot_general of two dims",
     lambda x, y: lax.dot_general(x, y, (([1, 2], [0, 1]), ([], []))),
     [f32(4, 2, 6), f32(2, 6, 8)]),
    ("conv_general_dilated", CONVOLVE, [f32(4, 2, 5, 5), f32(6, 2, 3, 3)]),
    ("conv_general_dilated grouped",
     functools.partial(CONVOLVE, feature_group_count=2),
     [f32(4, 4, 5, 5), f32(6, 2, 3, 3)]),
]  # fmt: skip


REDUCTIONS = [
    *((name, functools.partial(function, axes=(1,)), [X]) for name, function in {
        "reduce_sum": lax.reduce_sum, "reduce_max": lax.reduce_max,
        "reduce_min": lax.reduce_min, "reduce_prod": lax.reduce_prod}.items()),
    *((name, functools.partial(function, axes=(0,)), [bits(4, 8)])
      for name, function in {
        "reduce_and": lax.reduce_and, "reduce_or": lax.reduce_or,
        "reduce_xor": lax.reduce_xor}.items()),
    ("reduce_or of ints", functools.partial(lax.reduce_or, axes=(0,)), [N]),
    ("reduce_sum of all", functools.partial(lax.reduce_sum, axes=(0, 1)), [N]),
    ("reduce_sum of none", functools.partial(lax.reduce_sum, axes=(0, 1)),
     [f32(0, 4)]),
    ("reduce", lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.float32(1)),
        lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)), [X, Y]),
    ("argmax", lambda x: lax.argmax(x, 1, jnp.int32), [X]),
    ("argmin", lambda x: lax.argmin(x, 0, jnp.int32), [X]),
    ("cumsum", functools.partial(lax.cumsum, axis=1), [X]),
    ("cumprod", functools.partial(lax.cumprod, axis=0), [X]),
    ("cummax", functools.partial(lax.cummax, axis=1), [X]),
    ("cummin", functools.partial(lax.cummin, axis=1), [X]),
    ("cumlogsumexp", functools.partial(lax.cumlogsumexp, axis=1), [X]),
    ("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), [X, Y]),
    ("top_k", lambda x: lax.top_k(x, 2), [X]),
    ("reduce_window_sum", lambda x: lax.reduce_window(
        x, np.float32(0), lax.add, (1, 2), (1, 2), "VALID"), [X]),
    ("reduce_window_max", lambda x: lax.reduce_window(
        x, -np.float32(np.inf), lax.max, (1, 2), (1, 2), "VALID"), [X]),
    ("reduce_window_min", lambda x: lax.reduce_window(
        x, np.float32(np.inf), lax.min, (1, 2), (1, 2), "VALID"), [X]),
]  # fmt: skip

SHAPES = [
    *((f"reshape {a} to {b}", functools.partial(lax.reshape, new_sizes=b), [f32(*a)])
      for a, b in [
          ((8, 4), (2, 4, 4)), ((4, 8), (32,)), ((32,), (4, 8)),
          ((8, 1, 4), (4, 2, 4)), ((2, 4, 6), (8, 6)), ((12,), (2, 2, 3)),
          ((8, 2), (2, 4, 2)), ((0, 4), (4, 0)),
          ((9, 9, 8), (81, 8)), ((1, 8), (8, 1, 1))]),
    ("reshape ints", functools.partial(lax.reshape, new_sizes=(2, 2, 8)), [N]),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (3, 4, 8), (1, 2)), [X]),
    ("broadcast_in_dim from 1", lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)),
     [f32(4, 1)]),
    ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), [f32(2, 4, 6)]),
    ("squeeze", lambda x: lax.squeeze(x, (1,)), [f32(4, 1, 8)]),
    ("rev", lambda x: lax.rev(x, (1,)), [X]),
    ("concatenate", lambda x, y: lax.concatenate((x, y), 0), [X, Y]),
    ("concatenate bools", lambda x, y: lax.concatenate((x, y), 0),
     [bits(4, 8), bits(4, 8)]),
    ("split", lambda x: lax.split(x, (2, 6), axis=1), [X]),
    ("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 1))), [X, np.float32(3)]),
    ("slice", lambda x: lax.slice(x, (0, 2), (4, 8)), [X]),
    ("slice with strides", lambda x: lax.slice(x, (0, 1), (4, 8), (1, 3)), [X]),
    ("dynamic_slice", lambda x, i, j: lax.dynamic_slice(x, (i, j), (4, 3)),
     [X, np.int32(0), np.int32(2)]),
    ("dynamic_update_slice", lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
     [X, f32(4, 2), np.int32(0), np.int32(3)]),
    ("iota", lambda: lax.iota(jnp.int32, 8), []),
]  # fmt: skip

ROWS = np.array([[1], [7], [3], [0]], np.int32)
OUTSIDE = np.array([[1], [9], [-1], [0]], np.int32)
TABLE = f32(8, 4)
CLIP, FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


def _take(table, indices, mode=FILL, **kwargs):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(table, indices, numbers, (1, 4), mode=mode, **kwargs)


def _take_along(table, indices):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(table, indices, numbers, (1, 1), mode=CLIP)


def _take_points(table, indices):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
    )
    return lax.gather(table, indices, numbers, (1, 1), mode=FILL)


def _put(operation, mode=FILL):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return lambda x, i, u: operation(x, i, u, numbers, mode=mode)


def _put_points(x, indices, updates):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(0, 1),
        scatter_dims_to_operand_dims=(0, 1),
    )
    return lax.scatter_add(x, indices, updates, numbers, mode=CLIP)


def _put_along(x, indices, updates):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    return lax.scatter_add(x, indices, updates, numbers, mode=CLIP)


POINTS = np.array([[1, 1], [7, 3], [8, 0], [0, 2]], np.int32)

INDEXING = [
    ("gather", _take, [TABLE, ROWS]),
    ("gather with a fill", _take, [TABLE, OUTSIDE]),
    ("gather with a fill of ints", _take, [i32(8, 4), OUTSIDE]),
    ("gather clipped", functools.partial(_take, mode=CLIP), [TABLE, OUTSIDE]),
    ("gather by small ints", _take, [TABLE, ROWS.astype(np.uint8)]),
    ("gather of bools", functools.partial(_take, mode=CLIP), [bits(8, 4), ROWS]),
    ("gather along", _take_along, [f32(4, 8), ROWS]),
    ("gather points", _take_points, [TABLE, POINTS]),
    *((name, _put(function), [TABLE, ROWS, f32(4, 4)]) for name, function in {
        "scatter": lax.scatter, "scatter-add": lax.scatter_add,
        "scatter-max": lax.scatter_max, "scatter-min": lax.scatter_min,
        "scatter-mul": lax.scatter_mul}.items()),
    ("scatter-add outside", _put(lax.scatter_add), [TABLE, OUTSIDE, f32(4, 4)]),
    ("scatter-add clipped", _put(lax.scatter_add, CLIP), [TABLE, OUTSIDE, f32(4, 4)]),
    ("scatter-add points", _put_points, [TABLE, POINTS, f32(4)]),
    ("scatter-add along", _put_along, [f32(4, 8), ROWS, f32(4)]),
]  # fmt: skip

GROUPS = {
    "elementwise": ELEMENTWISE,
    "special": SPECIAL,
    "products": PRODUCTS,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "indexing": INDEXING,
}
