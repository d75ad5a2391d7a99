import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.sbp import numpy_model
from tests.sbp.conversion import assert_is, to_signature

SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]])
LINE = sbp.placement("cpu", [5, 4])
MAKERS = {
    "zeros": (lambda **k: sbp.zeros((8, 4), **k), np.zeros((8, 4), np.float32)),
    "ones": (lambda **k: sbp.ones((8, 4), **k), np.ones((8, 4), np.float32)),
    "empty": (lambda **k: sbp.empty((8, 4), **k), np.zeros((8, 4), np.float32)),
    "full": (lambda **k: sbp.full((8, 4), 7, **k), np.full((8, 4), 7, np.int32)),
    "eye": (lambda **k: sbp.eye(8, 4, **k), np.eye(8, 4, dtype=np.float32)),
    "tensor": (
        lambda **k: sbp.tensor([[1, 2, 3, 4]] * 4, **k),
        np.array([[1, 2, 3, 4]] * 4, np.int32),
    ),
}
LINES = {
    "arange": (lambda **k: sbp.arange(8, **k), np.arange(8, dtype=np.int32)),
    "arange from": (
        lambda **k: sbp.arange(1, 3, 0.5, **k),
        np.array([1, 1.5, 2, 2.5], np.float32),
    ),
    "linspace": (
        lambda **k: sbp.linspace(0, 1, 4, **k),
        np.linspace(0, 1, 4).astype(np.float32),
    ),
    "logspace": (
        lambda **k: sbp.logspace(0, 3, 4, **k),
        np.array([1, 10, 100, 1000], np.float32),
    ),
    "hann_window": (
        lambda **k: sbp.hann_window(4, **k),
        np.array([0, 0.5, 1, 0.5], np.float32),
    ),
    "hann_window, symmetric": (
        lambda **k: sbp.hann_window(5, periodic=False, **k)[:4],
        np.array([0, 0.5, 1, 0.5], np.float32),
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_matrices_have_their_value_in_every_signature(name):
    make, value = MAKERS[name]
    for signature in numpy_model.signatures(2):
        x = make(placement=SQUARE, sbp=to_signature(signature))
        assert_is(x, value, SQUARE, signature)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("signature", ["S(0)", "B", "P"])
def test_lines_have_their_value(name, signature):
    if "symmetric" in name:
        signature = "B"
    make, value = LINES[name]
    x = make(placement=LINE, sbp=sbp.parse(signature))
    assert x.dtype == value.dtype
    np.testing.assert_allclose(sbp.full_value(x), value, atol=1e-7)


def test_dtype_can_be_chosen_and_64_bits_are_only_on_request():
    made = {"placement": LINE, "sbp": sbp.split(0)}
    assert sbp.zeros(4, dtype=jnp.bfloat16, **made).dtype == jnp.bfloat16
    assert sbp.arange(4, dtype="float16", **made).dtype == jnp.float16
    assert sbp.full(4, 1.5, **made).dtype == jnp.float32
    assert sbp.full(4, True, **made).dtype == bool
    assert sbp.tensor(np.ones(4), **made).dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "value"),
    [(sbp.zeros_like, 0), (sbp.ones_like, 1), (sbp.empty_like, 0)],
)
def test_like_takes_shape_dtype_placement_and_signature(make, value):
    x = sbp.full((4, 2), 3, placement=SQUARE, sbp=sbp.parse("S(0),P"))
    y = make(x)
    assert (y.sharding, y.dtype) == (x.sharding, x.dtype)
    assert (sbp.full_value(y) == value).all()
    assert sbp.full_value(sbp.full_like(x, 5, dtype="float32")).dtype == np.float32


RANDOM = {
    "rand": lambda **k: sbp.rand((8, 4), **k),
    "randn": lambda **k: sbp.randn((8, 4), **k),
    "normal": lambda **k: sbp.normal(5, 0.1, (8, 4), **k),
    "randint": lambda **k: sbp.randint(0, 100, (8, 4), **k),
    "randperm": lambda **k: sbp.randperm(16, **k),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_do_not_depend_on_the_layout(name):
    make = RANDOM[name]
    one = make(seed=3, placement=sbp.placement("cpu", [0]), sbp=sbp.broadcast)
    for placement, signature in [(SQUARE, "S(0),S(0)"), (LINE, "B"), (LINE, "S(0)")]:
        x = make(seed=3, placement=placement, sbp=sbp.parse(signature))
        assert sbp.signature_of(x) == sbp.parse(signature)
        np.testing.assert_array_equal(sbp.full_value(x), sbp.full_value(one))
    other = make(seed=4, placement=LINE, sbp=sbp.split(0))
    assert (sbp.full_value(other) != sbp.full_value(one)).any()


def test_random_values_are_those_of_jax():
    x = sbp.randn((8, 4), seed=7, placement=LINE, sbp=sbp.split(0))
    expected = jax.random.normal(jax.random.key(7), (8, 4))
    np.testing.assert_array_equal(x, expected)
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        y = sbp.randn((8, 4), seed=key, placement=LINE, sbp=sbp.split(0))
        np.testing.assert_array_equal(y, expected)


def test_ranges_of_random_values():
    made = {"seed": 0, "placement": SQUARE, "sbp": sbp.parse("S(0),B")}
    uniform = sbp.full_value(sbp.rand(4096, **made))
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    normal = sbp.full_value(sbp.normal(5, 0.1, 4096, **made))
    assert abs(normal.mean() - 5) < 0.01
    assert abs(normal.std() - 0.1) < 0.01
    whole = sbp.full_value(sbp.randint(2, 5, 4096, **made))
    assert set(whole.tolist()) == {2, 3, 4}
    order = sbp.full_value(sbp.randperm(64, **made))
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()


def test_creation_inside_jit():
    @jax.jit
    def make():
        made = {"placement": LINE, "sbp": sbp.split(0)}
        return sbp.ones(4, **made), sbp.eye(4, **made), sbp.randn(4, seed=7, **made)

    ones, eye, noise = make()
    assert str(jax.typeof(ones)) == "float32[4@x]"
    np.testing.assert_array_equal(eye, np.eye(4))
    np.testing.assert_allclose(noise, jax.random.normal(jax.random.key(7), 4), 1e-6)


def test_random_partial_sums_are_an_error():
    with pytest.raises(ValueError, match=r"signature \(S\(0\), P\): a sum of random"):
        sbp.randn((4, 4), seed=0, placement=SQUARE, sbp=sbp.parse("S(0),P"))


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((4, 2.0), TypeError, r"holds 2.0 of type float"),
        ("44", TypeError, r"holds '4' of type str"),
        ((4, -1), ValueError, r"holds -1, but sizes count from 0"),
        ((4, True), TypeError, r"holds True of type bool"),
    ],
)
def test_bad_shapes_are_errors(shape, error, message):
    with pytest.raises(error, match=message):
        sbp.zeros(shape, placement=SQUARE, sbp=sbp.parse("B,B"))


def test_booleans_do_not_add_up():
    with pytest.raises(TypeError, match="booleans do not add up"):
        sbp.full((4, 4), True, placement=SQUARE, sbp=sbp.parse("P,B"))
    x = sbp.full((4, 4), True, placement=SQUARE, sbp=sbp.parse("B,B"))
    with pytest.raises(TypeError, match="booleans do not add up"):
        sbp.to_global(x, sbp=sbp.parse("P,B"))
