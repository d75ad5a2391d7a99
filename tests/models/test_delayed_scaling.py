"""Scales from the steps before, against the recipe in NumPy on one linear map."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from models import delayed_scaling, fp8, gpt2
from models.delayed_scaling import FIRST, DelayedScaling
from models.fp8 import BACKWARD, FORWARD, SCALES, marks, round_to

DIMS = (((1,), (0,)), ((), ()))
LENGTH = 3
SCALING = DelayedScaling(paths=(("mlp", "up"),), length=LENGTH)
FORMATS = {
    "input": (ml_dtypes.float8_e4m3fn, 448.0),
    "kernel": (ml_dtypes.float8_e4m3fn, 448.0),
    "gradient": (ml_dtypes.float8_e5m2, 57344.0),
}


def draw(step):
    """Input, kernel and gradient of a step; all jump, up and down."""
    r = np.random.default_rng(step)
    jumps = [1.0, 30.0, 1e-3, 1e-3, 1e-3, 1e-3, 500.0, 0.0][step]
    shapes = dict(zip(FORMATS, [(6, 16), (16, 5), (6, 5)], strict=True))
    sizes = {"input": jumps, "kernel": 0.02, "gradient": 1e-6 * jumps}
    return {
        name: (r.normal(size=shape) * sizes[name]).astype(np.float32)
        for name, shape in shapes.items()
    }


def reference(num_steps):
    """Yields scales, product and gradients of each step, by the recipe."""
    highest = {name: [] for name in FORMATS}
    for step in range(num_steps):
        scales, rounded = {}, {}
        for name, x in draw(step).items():
            dtype, largest = FORMATS[name]
            most = max(highest[name][-LENGTH:], default=0.0)
            exponent = np.ceil(np.log2(most / largest)) if most else None
            scales[name] = 2.0**exponent if most else FIRST[name]
            scaled = np.clip(x / scales[name], -largest, largest)
            rounded[name] = scaled.astype(dtype).astype(np.float64) * scales[name]
            highest[name].append(np.abs(x).max())
        x, kernel, gradient = rounded.values()
        yield scales, (x @ kernel, gradient @ kernel.T, x.T @ gradient)


def test_steps_are_those_of_the_recipe():
    history = SCALING.init(1)
    for step, (scales, expected) in enumerate(reference(8)):
        x, kernel, gradient = map(jnp.asarray, draw(step).values())
        given = SCALING.scales(history)["mlp"]["up"][0]

        y, vjp = jax.vjp(
            lambda s, x, k: fp8.delayed_dot_general(s, x, k, DIMS), given, x, kernel
        )
        seen, grad_x, grad_kernel = vjp(gradient)
        history = SCALING.update(history, {"mlp": {"up": seen[None]}})

        assert given[:, 0].tolist() == list(scales.values())
        for ours, theirs in zip((y, grad_x, grad_kernel), expected, strict=True):
            atol = 1e-6 * np.abs(theirs).max()
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol)


def test_a_jump_is_cut_off_once_and_the_scale_falls_when_it_is_forgotten():
    found = [scales["input"] for scales, _ in reference(6)]

    assert found[1] < found[2]  # the jump of step 1 is seen by step 2 ...
    assert found[2] == found[3] == found[4]  # ... and LENGTH steps long
    assert found[5] < found[4] / 1000


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_sum_of_marks_says_the_largest(dtype):
    parts = (
        np.random.default_rng(0).normal(size=(5, 7))
        * 10.0 ** np.arange(-6, 4, 2)[:, None]
    )

    total = sum(marks(jnp.float32(np.abs(part).max()), dtype) for part in parts)

    whole = marks(jnp.float32(np.abs(parts).max()), dtype)
    (found,) = np.flatnonzero(whole)
    assert np.flatnonzero(total).max() == found
    assert total.sum() == 5
    largest = float(jnp.finfo(dtype).max)
    assert np.abs(parts).max() <= largest * SCALES[found]
    assert np.abs(parts).max() > largest * SCALES[found] / 2


def test_marks_of_what_is_tiny_huge_nothing_or_not_finite():
    def place(highest):
        return np.flatnonzero(marks(jnp.float32(highest), FORWARD)).tolist()

    assert place(1e-30) == [0]
    assert place(3e38) == [fp8.NUM_SCALES - 1]
    assert place(0.0) == place(np.inf) == place(np.nan) == []


def test_what_is_not_finite_can_be_seen():
    small = round_to(jnp.array([1.0, jnp.inf, jnp.nan]), BACKWARD, jnp.float32(1))

    assert np.isnan(np.asarray(small, np.float32)).tolist() == [False, True, True]


def test_first_gradients_are_scaled_like_the_loss():
    first = SCALING.scales(SCALING.init(2), jnp.float32(2.0**16))["mlp"]["up"]

    assert first.shape == (2, 3, fp8.NUM_SCALES)
    wanted = [FIRST["input"], FIRST["kernel"], FIRST["gradient"] * 2**16]
    assert first[1, :, 5].tolist() == wanted


def test_forward_product_needs_no_largest_element():
    scales = SCALING.scales(SCALING.init(1))["mlp"]["up"][0]
    x, kernel, _ = map(jnp.asarray, draw(0).values())

    def delayed(x, kernel):
        return fp8.delayed_dot_general(scales, x, kernel, DIMS)

    def current(x, kernel):
        return fp8.dot_general(x, kernel, DIMS)

    # What only a backward pass reads is left out of a forward pass alone.
    texts = [
        jax.jit(f).lower(x, kernel).compile().as_text() for f in (delayed, current)
    ]
    assert [" reduce(" in text for text in texts] == [False, True]


def test_history_is_of_the_maps_that_multiply_in_eight_bits():
    sizes = gpt2.Gpt2Config(num_layers=1, model_dim=16, mlp_dim=16, vocab_size=9)
    block = gpt2.Gpt2(sizes, rngs=nnx.Rngs(0)).blocks[0]
    assert delayed_scaling.of_block(block, 4) is None
    block.mlp.up.dot_general = block.attention.qkv.dot_general = fp8.dot_general

    scaling = delayed_scaling.of_block(block, 4)

    assert set(scaling.paths) == {("mlp", "up"), ("attention", "qkv")}
    history = scaling.init(5)["blocks"]
    assert history["mlp"]["up"].shape == history["attention"]["qkv"].shape == (5, 3, 4)
    delayed_scaling.attach(block, scaling.scales({"blocks": history}))
    assert block.mlp.up.dot_general is not fp8.dot_general
    assert block.mlp.down.dot_general is None
