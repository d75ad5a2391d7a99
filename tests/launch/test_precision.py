"""Which number formats the training step computes and communicates in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import families, job, resolve, state, step
from launch.resolve import DeviceCount
from tests.launch import cases
from tests.launch.cases import Case

# No size is another one, or a part of it.
SMALL = (("model.num_layers", 2), ("model.num_heads", 2), ("model.mlp_dim", 48))
HALF = (*SMALL, ("model.dtype", "bfloat16"))
# Sums that only ever have one term that is not zero, or that a tensor-parallel layer
# makes of activations, are in the dtype of these.
REDUCTIONS = ("reduce_sum", "scatter-add", "psum", "psum_invariant", "reduce_scatter")
IN_SINGLE = ("exp2", "log", "rsqrt", "reduce_max", "pmax")


def equations(jaxpr):
    """Yields the equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)


def trace(case):
    """The training step's jaxpr, and the shapes of a rank's parameters."""
    steps = cases.make_steps(case)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    program = step.build_train_step(steps)
    traced = program.trace(abstract, cases.make_batch(case.config))
    shapes = set()
    for leaf, sharding in zip(
        jax.tree.leaves(steps.model.shapes),
        jax.tree.leaves(steps.shardings.params),
        strict=True,
    ):
        spec = [e for e in (*sharding.spec, *[None] * leaf.ndim)][: leaf.ndim]
        names = [e if isinstance(e, tuple) else (e,) for e in spec]
        local = tuple(
            size // (case.stage if "stage" in axes else 1)
            for size, axes in zip(leaf.shape, names, strict=True)
        )
        shapes |= {local, local[1:]}  # of a stack, or of one layer
    return list(equations(traced.jaxpr.jaxpr)), shapes


@pytest.fixture(
    scope="module",
    params=[Case(2, 2, 1, fields=HALF), Case(1, 1, 2, fields=HALF)],
    ids=["2x2x1", "1x1x2"],
)
def half(request):
    return request.param, *trace(request.param)


def types(equation):
    return [v.aval.dtype for v in (*equation.invars, *equation.outvars)]


def test_products_of_blocks_are_in_half_precision(half):
    _, found, _ = half
    config = half[0].config.model
    sizes = {config.model_dim, config.mlp_dim}

    products = [e for e in found if e.primitive.name == "dot_general"]

    kernels = [
        e
        for e in products
        if e.invars[1].aval.shape[-1] in sizes and len(e.invars[1].aval.shape) == 2
    ]
    assert len(kernels) >= 4
    for equation in products:
        # Scores and logits are single; their gradients mix both.
        kinds = {v.aval.dtype for v in equation.invars}
        assert jnp.dtype("bfloat16") in kinds
        if kinds == {jnp.dtype("bfloat16")}:
            assert equation.outvars[0].aval.dtype in ("bfloat16", "float32")


def test_scores_and_logits_come_in_single_precision(half):
    case, found, _ = half
    length, config = case.config.data.seq_length, case.config.model
    rows = config.padded_vocab_size // case.stage

    outputs = [e.outvars[0].aval for e in found if e.primitive.name == "dot_general"]

    scores = [x for x in outputs if x.shape[-2:] == (length, length)]
    logits = [x for x in outputs if x.shape[-1] == rows]
    assert scores
    assert logits
    assert {x.dtype for x in logits} == {jnp.dtype("float32")}
    assert scores[0].dtype == jnp.float32


def test_norms_softmax_and_losses_are_in_single_precision(half):
    _, found, _ = half

    special = [e for e in found if e.primitive.name in IN_SINGLE]

    assert {"log", "rsqrt", "reduce_max"} <= {e.primitive.name for e in special}
    for equation in special:
        assert jnp.dtype("bfloat16") not in types(equation)


def test_gradients_of_parameters_are_summed_in_single_precision(half):
    _, found, shapes = half

    sums = [
        e.outvars[0].aval
        for e in found
        if e.primitive.name in REDUCTIONS and e.outvars[0].aval.shape in shapes
    ]

    assert len(sums) > 20
    assert {x.dtype for x in sums} == {jnp.dtype("float32")}


def test_parameters_and_moments_stay_in_single_precision(half):
    steps = cases.make_steps(half[0])

    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)

    dtypes = {leaf.dtype for leaf in jax.tree.leaves(abstract.params)}
    assert dtypes == {jnp.dtype("float32")}
    moments = [x for x in jax.tree.leaves(abstract.opt_state) if x.ndim]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_are_sent_in_the_dtype_that_was_chosen(dtype):
    case = Case(2, 1, 1, fields=(*SMALL, ("precision.gradient_dtype", dtype)))

    found, shapes = trace(case)

    sent = [
        v.aval.dtype
        for e in found
        if e.primitive.name in ("psum", "psum_invariant")
        for v in e.invars
        if v.aval.shape in shapes and v.aval.shape
    ]
    assert len(sent) > 20
    assert set(sent) == {jnp.dtype(dtype)}


def test_gradients_sent_in_half_precision_are_close_to_the_others():
    half = Case(2, 1, 1, fields=(*SMALL, ("precision.gradient_dtype", "bfloat16")))
    single = Case(2, 1, 1, fields=SMALL)

    found, expected = (cases.train(case, 1).gradients for case in (half, single))

    def compare(ours, theirs):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=scale / 64)
        return np.abs(ours - theirs).max() / scale

    errors = jax.tree.leaves(jax.tree.map(compare, found, expected))
    assert max(errors) > 1e-4


EXCEPTIONS = {  # family -> pattern, and the sizes of kernels that become single
    "bert": ("blocks/*/mlp", {(16, 48), (48, 16)}),
    "gpt2": ("blocks/*/attention", {(16, 3, 2, 8), (2, 8, 16)}),
    "vit": ("patches", {(4, 4, 1, 16)}),
}


def make_tiny(name, **precision):
    """The training step of a tiny model in bfloat16, traced."""
    sizes = dict(num_layers=2, model_dim=16, num_heads=2, mlp_dim=48)
    if name == "vit":
        sizes |= dict(image_size=16, patch_size=4, num_channels=1, num_classes=3)
    else:
        sizes |= dict(vocab_size=60, vocab_multiple=64, max_len=12)
    values = {
        "model": {"name": name, **sizes, "dtype": "bfloat16"},
        "data": {} if name == "vit" else {"seq_length": 12},
        "train": {"global_batch_size": 8},
        "precision": precision,
    }
    config = resolve.resolve(values, {}, DeviceCount(num_devices=1))
    steps = job.build_steps(config, Case().mesh)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    batch = families.batch_shapes(config)
    return equations(step.build_train_step(steps).trace(abstract, batch).jaxpr.jaxpr)


def kernels(found):
    """Shapes of what is cast to half precision from single."""
    return {
        e.outvars[0].aval.shape
        for e in found
        if e.primitive.name == "convert_element_type"
        and e.invars[0].aval.dtype == jnp.float32
        and e.outvars[0].aval.dtype == jnp.bfloat16
    }


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_modules_of_a_pattern_compute_in_single_precision(name):
    pattern, sizes = EXCEPTIONS[name]

    plain = kernels(make_tiny(name))
    special = kernels(make_tiny(name, float32=(pattern,)))

    assert sizes <= plain
    assert not sizes & special
    assert (16, 48) in special or "mlp" in pattern  # the others are cast as before


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "blocks/*/mpl",
            "no module of the model that computes. Did you mean 'blocks/*",
        ),
        ("blocks/0/mlp", "picks out one block, but blocks are all alike. Write 'bl"),
        ("xyz", "of the model that computes. There are 'blocks/*'"),
    ],
)
def test_pattern_that_fits_nothing_is_an_error(pattern, message):
    with pytest.raises(resolve.ConfigError) as error:
        make_tiny("gpt2", float32=(pattern,))

    assert f"precision.float32: {pattern!r}" in str(error.value)
    assert message in str(error.value)


def test_all_modules_in_single_precision_is_single_precision():
    patterns = ("embeddings", "blocks/*", "pooler", "masked_lm", "next_sentence")
    half = Case(fields=(*HALF, ("precision.float32", patterns)))

    found, expected = cases.train(half, 2), cases.train(Case(fields=SMALL), 2)

    # The residual stream is in half precision still.
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-3)
    assert not np.array_equal(found.losses, expected.losses)


def test_kernels_are_gathered_as_they_are_used():
    fields = (*HALF, ("zero.stage", 3), ("zero.min_size", 1))
    case = Case(2, fields=(*fields, ("precision.float32", ("blocks/*/mlp",))))

    found, _ = trace(case)

    gathered = {
        (e.outvars[0].aval.shape, str(e.outvars[0].aval.dtype))
        for e in found
        if e.primitive.name.startswith("all_gather")
    }
    assert ((16, 48), "float32") in gathered  # an exception
    assert ((16, 3, 2, 8), "bfloat16") in gathered
    assert ((64, 16), "float32") in gathered  # the table: its gradient adds up


FP8 = (
    ("model.num_layers", 2),
    ("model.model_dim", 32),
    ("model.num_heads", 2),
    ("model.mlp_dim", 64),
    ("model.dtype", "bfloat16"),
)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_training_in_eight_bits_stays_close_to_sixteen(sizes):
    matmul = ("precision.matmul", "fp8")

    found = cases.train(Case(*sizes, fields=(*FP8, matmul)), 6)

    expected = cases.train(Case(fields=FP8), 6)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0.01)
    assert not np.array_equal(found.losses, expected.losses)


def test_only_linear_maps_of_blocks_multiply_in_eight_bits():
    sizes = (*FP8, ("precision.float32", ("blocks/*/mlp/down",)))
    found, _ = trace(Case(fields=(*sizes, ("precision.matmul", "fp8"))))

    products = [e for e in found if e.primitive.name == "dot_general"]
    small = {
        tuple(str(v.aval.dtype) for v in e.invars)
        for e in products
        if any("float8" in str(v.aval.dtype) for v in e.invars)
    }
    assert small == {
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e5m2"),
    }
    eight = {
        v.aval.shape
        for e in products
        for v in e.invars
        if "float8" in str(v.aval.dtype)
    }
    assert (32, 64) in eight  # up
    assert (64, 32) not in eight  # down, an exception
    assert (64, 16) not in eight  # the vocabulary


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_dim": 40, "num_heads": 4},
            "model.model_dim=40 is split into 1. Use a",
        ),
        (
            {"mlp_dim": 80},
            "multiples of 16 on each device, but model.mlp_dim=80 is spl",
        ),
    ],
)
def test_sizes_that_eight_bits_cannot_have_are_an_error(fields, message):
    values = {
        "model": {"name": "gpt2", "model_dim": 32, "mlp_dim": 64, **fields},
        "dist": {"tensor_parallel_size": 2},
        "precision": {"matmul": "fp8"},
    }

    with pytest.raises(resolve.ConfigError) as error:
        resolve.resolve(values, {}, DeviceCount(num_devices=2))

    assert "precision.matmul='fp8' needs sizes" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_kernels_are_cast_once_for_all_microbatches(num_microbatches):
    case = Case(fields=HALF, num_microbatches=num_microbatches)

    cast = kernels(trace(case)[0])

    stacked, one_layer = (2, 16, 48), (16, 48)
    assert (stacked in cast) == (num_microbatches > 1)
    assert (one_layer in cast) == (num_microbatches == 1)


def test_gradients_of_half_precision_parameters_add_up_in_single():
    case = Case(2, fields=(*HALF, ("model.param_dtype", "bfloat16")))

    found, _ = trace(case)

    carried = {
        (v.aval.shape, str(v.aval.dtype))
        for e in found
        if e.primitive.name == "scan"
        for v in e.outvars
    }
    assert ((2, 16, 48), "float32") in carried
    assert ((2, 16, 48), "bfloat16") not in carried
