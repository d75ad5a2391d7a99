import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import fp8
from models.fp8 import BACKWARD, FORWARD, quantize

DIMS = (((2,), (0,)), ((), ()))


def draw(*shape, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize(("dtype", "bits"), [(FORWARD, 4), (BACKWARD, 3)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_large_elements_are_rounded_to_the_bits_of_the_format(dtype, bits, scale):
    x = draw(1000, scale=scale)

    small, found_scale = quantize(x, dtype)

    assert small.dtype == dtype
    back = np.asarray(small, np.float32) * float(found_scale)
    large = np.abs(x) > np.abs(x).max() / 64
    errors = np.abs(back / x - 1)[large]
    assert errors.max() <= 2.0**-bits * 1.001
    assert errors.max() > 2.0**-bits / 2
    highest = np.abs(np.asarray(small, np.float32)).max()
    assert highest == float(jnp.finfo(dtype).max)


def test_zeros_stay_and_what_is_not_finite_can_be_seen():
    small, scale = quantize(jnp.zeros(4), FORWARD)
    assert float(scale) == 1.0
    np.testing.assert_array_equal(np.asarray(small, np.float32), 0)

    for bad in (jnp.inf, jnp.nan):
        small, _ = quantize(jnp.array([1.0, bad]), BACKWARD)
        assert np.isnan(np.asarray(small, np.float32)).any()


def test_powers_of_two_are_multiplied_exactly():
    x = jnp.asarray(2.0 ** np.random.default_rng(0).integers(-3, 3, (2, 5, 8)))
    kernel = jnp.asarray(2.0 ** np.random.default_rng(1).integers(-3, 3, (8, 3, 4)))
    # 448 is no power of two, but 1.75 of one: it makes the scale a power of two.
    x = x.at[0, 0, 0].set(14.0)
    kernel = kernel.at[0, 0, 0].set(7.0)

    found = fp8.dot_general(x, kernel, DIMS)

    np.testing.assert_array_equal(found, np.einsum("bli,imn->blmn", x, kernel))


def test_product_and_gradients_are_close_to_exact_ones():
    x, kernel = draw(4, 64, 32), draw(32, 3, 8, seed=1)
    cotangent = draw(4, 64, 3, 8, seed=2, scale=1e-9)

    def run(product, x, kernel):
        y, vjp = jax.vjp(lambda x, kernel: product(x, kernel, DIMS), x, kernel)
        return y, *vjp(cotangent)

    found = run(fp8.dot_general, x, kernel)
    exact = run(jax.lax.dot_general, x, kernel)

    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == jnp.float32
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert 0.005 < error < 0.06


def test_several_inner_dims_and_half_precision():
    x, kernel = draw(2, 3, 4, 8), draw(4, 8, 5, seed=1)
    dims = (((2, 3), (0, 1)), ((), ()))

    found = fp8.dot_general(x.astype("bfloat16"), kernel.astype("bfloat16"), dims)

    assert found.dtype == jnp.bfloat16
    exact = np.einsum("blij,ijo->blo", x, kernel)
    np.testing.assert_allclose(found, exact, atol=0.1 * np.abs(exact).max())


def test_forward_has_more_bits_and_gradients_have_more_range():
    def loss(x, kernel):
        return fp8.dot_general(x, kernel, DIMS).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(draw(2, 3, 4), draw(4, 5)))

    products = [line for line in text.splitlines() if "dot_general[" in line]
    assert len(products) == 3
    assert text.count("f8_e5m2") >= 1
    assert text.count("f8_e4m3fn") >= 2
