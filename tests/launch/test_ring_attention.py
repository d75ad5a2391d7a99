"""A ring of devices finds what one device finds with the whole sequence."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from launch import ring_attention
from launch.partial_attention import BLOCKED, PLAIN
from launch.passing import GATHER, PASS_ON
from launch.ring import Ring
from models import weight_dropout
from models.attention import attend
from models.masks import AttentionMask
from tests import hlo

B, L, H, K = 2, 32, 2, 4
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (B, L)), axis=1)
IS_KEY = np.arange(L)[None] < np.array([[L], [L // 2 - 3]])
CAUSAL, PACKED = "causal", "causal-documents"
PADDED, PADDED_PACKED = "padding", "padding-documents"
MASKS = {
    CAUSAL: AttentionMask(is_causal=True),
    PACKED: AttentionMask(is_causal=True, documents=DOCUMENTS),
    "none": AttentionMask(),
    PADDED: AttentionMask(is_key=IS_KEY),
    PADDED_PACKED: AttentionMask(is_key=IS_KEY, documents=DOCUMENTS),
}
RATE, FLOAT = 0.3, jnp.float32


def inputs():
    """Queries, keys, values and the gradient of the result."""
    return list(jax.random.normal(jax.random.key(0), (4, B, L, H, K)))


def sample_keys():
    return jax.random.split(jax.random.key(3), B)


@dataclasses.dataclass(frozen=True)
class Program:
    """Result and gradients of a ring; inputs and mask are in the order of the ring."""

    program: Callable
    arguments: tuple
    order: np.ndarray


@functools.cache
def make_ring(size, mask_name, attention=PLAIN, rate=0.0, passing=PASS_ON, dtype=FLOAT):
    ring = Ring(axis_name="context", size=size, attention=attention, passing=passing)
    devices = np.array(jax.devices()[:size])
    mesh = Mesh(devices, ("context",), axis_types=(AxisType.Auto,))
    spec = P(None, "context")

    def run(arrays, mask, keys_B):
        *of_ring, grad = arrays
        dropout = weight_dropout.make(rate, keys_B, num_queries=L, num_keys=L)
        out, vjp = jax.vjp(
            lambda *x: ring_attention.attend(ring, *x, mask, dropout), *of_ring
        )
        return out, *vjp(grad)

    program = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, P()), out_specs=spec)
    mask = MASKS[mask_name]
    parts = ring.part_order(is_causal=mask.is_causal)
    order = np.arange(L).reshape(len(parts), -1)[parts].ravel()
    arrays = [x[:, order].astype(dtype) for x in inputs()]
    in_order = jax.tree.map(lambda x: x[:, order], mask)
    return Program(program, (arrays, in_order, sample_keys()), order)


@functools.cache
def compile_ring(*options):
    ring = make_ring(*options)
    return jax.jit(ring.program).lower(*ring.arguments).compile()


def check(size, mask_name, attention=PLAIN, rate=0.0, passing=PASS_ON):
    options = size, mask_name, attention, rate, passing
    ring = make_ring(*options)
    mask, (arrays, *others) = MASKS[mask_name], ring.arguments
    # What a query gets that sees no key is not agreed upon.
    visible = mask.visible(L, L)
    visible = jnp.ones((L, L)) if visible is None else visible
    sees_BL11 = jnp.broadcast_to(visible, (B, L, L)).any(-1)[:, :, None, None]
    *of_device, grad = inputs()
    out, vjp = jax.vjp(
        lambda *x: attend(*x, mask, rate=rate, keys_B=sample_keys()), *of_device
    )
    expected = out * sees_BL11, *vjp(grad * sees_BL11)
    sees_BL11 = sees_BL11[:, ring.order]
    arrays = [*arrays[:3], arrays[3] * sees_BL11]
    out, *grads = compile_ring(*options)(arrays, *others)
    found = out * sees_BL11, *grads
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, expected, strict=True):
        worst = np.abs(ours - theirs[:, ring.order]).max() / np.abs(theirs).max()
        assert worst < 2e-6, name


@pytest.mark.parametrize("mask_name", MASKS)
def test_ring_of_two_equals_one_device(mask_name):
    check(2, mask_name)


@pytest.mark.parametrize("mask_name", [PACKED, PADDED_PACKED])
def test_ring_of_four_equals_one_device(mask_name):
    check(4, mask_name)


@pytest.mark.parametrize("mask_name", [PACKED, PADDED])
def test_what_is_dropped_is_the_same_as_on_one_device(mask_name):
    check(2, mask_name, rate=RATE)


@pytest.mark.parametrize("mask_name", [PACKED, PADDED])
def test_keys_that_are_gathered_do_as_well(mask_name):
    check(4, mask_name, passing=GATHER)


@pytest.mark.slow
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("attention", [PLAIN, BLOCKED], ids=["plain", "blocked"])
def test_ring_of_any_size_equals_one_device(attention, size, mask_name):
    check(size, mask_name, attention=attention, rate=RATE)


def equations(jaxpr, times=1):
    """(equation, how often it runs) of a program without anything that depends."""
    for eqn in jaxpr.eqns:
        assert eqn.primitive.name not in ("cond", "while")
        yield eqn, times
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, times * eqn.params.get("length", 1))


def multiply_adds(eqn):
    ((summed, _), _), left = eqn.params["dimension_numbers"], eqn.invars[0].aval
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(
        left.shape[i] for i in summed
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_devices_have_equal_work_half_of_what_a_square_of_scores_takes(size):
    ring = make_ring(size, PACKED)
    found = equations(jax.make_jaxpr(ring.program)(*ring.arguments).jaxpr)
    products = [(e, n) for e, n in found if e.primitive.name == "dot_general"]
    # Two products forward and five back, for pairs of parts.
    part, num_pairs = L // (2 * size), 2 * size + 1
    counted = sum(n * multiply_adds(e) for e, n in products)
    assert counted == 7 * num_pairs * part**2 * B * H * K
    assert num_pairs * part**2 <= (1 / 2 + 1 / (4 * size)) * L**2 / size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_keys_go_around_once_forward_and_once_back_with_their_gradients(size):
    ring = make_ring(size, CAUSAL)
    found = equations(jax.make_jaxpr(ring.program)(*ring.arguments).jaxpr)
    sent = [n for eqn, n in found if eqn.primitive.name == "ppermute"]
    # Gradients travel one time more, to come home.
    forward, back, gradients = size - 1, size - 1, size
    assert sum(sent) == 2 * (forward + back + gradients)


def test_nothing_is_gathered():
    found = hlo.collectives(compile_ring(4, PACKED).as_text())
    to_next = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert {(c.name, c.groups) for c in found} == {("collective-permute", to_next)}
    assert max(c.num_bytes for c in found) == B * L // 4 * H * K * 4


def test_gradients_travel_in_float32_and_the_rest_in_half_precision():
    ring = make_ring(2, PADDED, dtype=jnp.bfloat16)
    text = jax.jit(ring.program).lower(*ring.arguments).as_text()
    sent = re.findall(r"collective_permute.*-> tensor<([\dx]*\w+)>", text)
    shape = f"1x{B}x{L // 2}x{H}x{K}x"
    assert collections.Counter(sent) == {
        f"{shape}bf16": 4,  # keys and values, forward and back
        f"{shape}f32": 4,  # gradients of both, to the next and home
        f"1x{B}x{L // 2}xi1": 2,  # what is padding
    }
