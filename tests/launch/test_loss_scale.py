"""float16 with a scaled loss: the rule, the training step, whole runs."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import loss_scale
from launch.loss_scale import LossScaling
from launch.precision import PrecisionConfig
from tests.launch import cases, tiny_runs
from tests.launch.cases import Case

# Two good steps, then a scale at which float16 overflows, then the first scale again.
OVERFLOWING = {
    "precision.initial_loss_scale": 2.0**12,
    "precision.loss_scale_interval": 2,
    "precision.loss_scale_growth": 2.0**20,
    "precision.loss_scale_backoff": 2.0**-20,
}
SKIPPED = (2, 5)  # of the steps from 0 on
FIELDS = tuple(
    (
        {"model.dtype": "float16", "model.num_layers": 2, "model.num_heads": 2}
        | OVERFLOWING
    ).items()
)
LAYOUTS = (
    Case(1, 1, 1, fields=FIELDS),
    Case(2, 2, 1, fields=FIELDS),
    Case(1, 1, 2, fields=FIELDS),
)


def run_rule(scaling, finite):
    state, found = scaling.init(), []
    for is_finite in finite:
        state = scaling.update(state, jnp.array(is_finite))
        found.append((float(state.scale), int(state.num_good_steps)))
    return found, state


def test_scale_grows_after_good_steps_and_falls_with_an_overflow():
    scaling = LossScaling(initial=4.0, growth=2.0, interval=2, backoff=0.25, minimum=2)

    found, state = run_rule(scaling, [True, True, True, False, False])

    assert found == [(4.0, 1), (8.0, 0), (8.0, 1), (2.0, 0), (2.0, 0)]
    assert int(state.num_skipped) == 2


def test_scale_never_grows_out_of_float32():
    found, _ = run_rule(LossScaling(initial=2.0**127, interval=1), [True])

    assert found[0][0] == 2.0**127


def test_static_scale_stays_and_no_overflow_is_forgiven():
    scaling = LossScaling.static(64.0)

    found, state = run_rule(scaling, [True, False, True])

    assert {scale for scale, _ in found} == {64.0}
    assert not scaling.is_skipped(state, jnp.array(False))


def test_dynamic_scale_forgives_an_overflow_above_the_minimum():
    scaling = LossScaling(initial=4.0, minimum=2.0)
    state = scaling.init()
    forgiven = []
    for is_finite in (False, False, True):
        forgiven.append(bool(scaling.is_skipped(state, jnp.array(is_finite))))
        state = scaling.update(state, jnp.array(is_finite))

    assert forgiven == [True, False, False]


def test_saved_scale_goes_on_unless_the_rule_is_static():
    saved = dataclasses.replace(LossScaling(initial=512.0).init(), num_skipped=3)

    dynamic = LossScaling(initial=4.0).resume(saved)
    static = LossScaling.static(4.0).resume(saved)

    assert (float(dynamic.scale), float(static.scale)) == (512.0, 4.0)
    assert dynamic.num_skipped == static.num_skipped == 3
    assert float(LossScaling(initial=4.0).resume(None).scale) == 4.0


def test_abstract_state_is_that_of_the_real_one():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = loss_scale.abstract(sharding)

    real = LossScaling(initial=1.0).init()
    assert jax.tree.structure(found) == jax.tree.structure(real)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(real), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.sharding == sharding


@pytest.mark.parametrize(
    ("fields", "dtype", "kind"),
    [
        ({}, "float32", "off"),
        ({}, "bfloat16", "off"),
        ({}, "float16", "dynamic"),
        ({"loss_scaling": "off"}, "float16", "off"),
        ({"loss_scaling": "static"}, "bfloat16", "static"),
    ],
)
def test_loss_is_scaled_by_default_for_float16_alone(fields, dtype, kind):
    section = PrecisionConfig(**fields)

    assert section.resolved(dtype).loss_scaling == kind
    assert (section.scaling(dtype) is None) == (kind == "off")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradient_dtype": "int8"}, "gradient_dtype='int8' is not one of 'float32'"),
        ({"loss_scaling": "on"}, "loss_scaling='on' is not one of 'off', 'static'"),
        ({"initial_loss_scale": 0.0}, "initial_loss_scale=0.0 must be above 0"),
        ({"min_loss_scale": float("inf")}, "min_loss_scale=inf must be above 0 and"),
        ({"loss_scale_backoff": 1.0}, "loss_scale_backoff=1.0 must be above 0 and"),
        ({"loss_scale_growth": 0.5}, "loss_scale_growth=0.5 must be at least 1"),
        ({"loss_scale_interval": 0}, "loss_scale_interval=0 must be at least 1"),
        (
            {"min_loss_scale": 8.0, "initial_loss_scale": 4.0},
            "min_loss_scale=8.0 is above initial_loss_scale=4.0. Lower it.",
        ),
    ],
)
def test_broken_rule_names_value_and_remedy(fields, message):
    (problem,) = PrecisionConfig(**fields).broken_rules()
    assert problem.startswith(message)


def states_of(case, batches, start=None):
    """The state before the first step and after each, on the host, and metrics."""
    program = cases.compile_step(case)
    state = cases.create_state(case) if start is None else start
    states, found = [jax.device_get(state)], []
    for number in batches:
        state, metrics = program(state, cases.make_batch(case.config, number))
        states.append(jax.device_get(state))
        found.append(jax.device_get(metrics))
    return states, found


@pytest.fixture(
    scope="module",
    params=LAYOUTS,
    ids=lambda case: f"{case.data}x{case.tensor}x{case.stage}",
)
def overflowed(request):
    """Seven steps, of which the third and the sixth overflow."""
    return request.param, *states_of(request.param, [0, 1, 0, 1, 0, 1, 0])


def test_overflow_skips_exactly_that_step(overflowed):
    _, states, metrics = overflowed

    assert [m["is_skipped"] for m in metrics] == [n in SKIPPED for n in range(7)]
    assert [m["skipped_steps"] for m in metrics] == [0, 0, 1, 1, 1, 2, 2]
    assert [m["loss_scale"] for m in metrics] == [
        2.0 ** (32 if n in SKIPPED else 12) for n in range(7)
    ]
    for number, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        kept = jax.tree.map(
            np.array_equal,
            (before.params, before.opt_state),
            (after.params, after.opt_state),
        )
        assert all(jax.tree.leaves(kept)) == (number in SKIPPED)
        assert after.step == number + 1
        # The rate is that of the updates done.
        done = number - before.loss_scale.num_skipped
        assert metrics[number]["learning_rate"] == pytest.approx(
            1e-2 * min(done / 2, 1) * (1 - max(done, 2) / 20)
        )


def test_run_goes_on_as_if_the_overflow_had_not_been(overflowed):
    case, states, metrics = overflowed
    saved = states[2]
    unharmed = dataclasses.replace(
        saved, loss_scale=dataclasses.replace(saved.loss_scale, scale=np.float32(2**12))
    )
    start = jax.device_put(unharmed, cases.make_steps(case).shardings, may_alias=False)

    others, other_metrics = states_of(case, [1], start)

    jax.tree.map(np.testing.assert_array_equal, others[1].params, states[4].params)
    assert other_metrics[0]["loss"] == metrics[3]["loss"]
    losses = [m["loss"] for n, m in enumerate(metrics) if n not in SKIPPED]
    assert losses[-1] < losses[0]


def test_run_from_before_the_overflow_is_bitwise_the_same(overflowed):
    case, states, _ = overflowed
    shardings = cases.make_steps(case).shardings
    start = jax.device_put(states[2], shardings, may_alias=False)

    again, _ = states_of(case, [0, 1], start)

    jax.tree.map(np.testing.assert_array_equal, again[-1], states[4])


def test_scaled_gradients_are_those_of_single_precision(overflowed):
    case, states, metrics = overflowed
    fields = tuple((k, v) for k, v in FIELDS if "precision" not in k)
    single = dataclasses.replace(
        case, fields=tuple((k, v) for k, v in fields if k != "model.dtype")
    )
    expected = cases.train(
        dataclasses.replace(single, data=1, tensor=1, stage=1, num_microbatches=1), 1
    )

    np.testing.assert_allclose(metrics[0]["loss"], expected.losses[0], rtol=2e-3)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(expected.gradients)))
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=5e-3)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the command line on a small text and returns the exit code."""
    fields = {"model.dtype": "float16", "dist.data_parallel_size": 8, **OVERFLOWING}
    return tiny_runs.launcher(tmp_path_factory.mktemp("corpus"), **fields)


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    """The workdir of a run that skipped two steps."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    assert launch(workdir) == 0
    return workdir


def test_run_goes_on_after_an_overflow_and_reports_it(finished):
    records = [r for r in tiny_runs.numbers_of(finished) if "loss" in r]

    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1, 2]
    assert [r["grad_norm"] is None for r in records] == [n in SKIPPED for n in range(6)]


def test_run_resumed_from_before_the_overflow_is_the_same(launch, finished, tmp_path):
    tiny_runs.check_resumed(launch, finished, tmp_path / "resumed")


def test_overflow_at_the_lowest_scale_ends_the_run(launch, tmp_path, capfd):
    fields = {"precision.min_loss_scale": 2.0**30}
    fields |= {"precision.initial_loss_scale": 2.0**32}

    assert launch(tmp_path / "run", **fields) == 1

    message = capfd.readouterr().err
    assert "diverged at step 2: loss " in message
    assert "at the lowest loss scale 1.07374e+09" in message


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_run_may_change_between_scaled_and_not(launch, finished, tmp_path, dtype):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    kind = {"precision.loss_scaling": "off"} if dtype == "float32" else {}
    other = {"model.dtype": "float32", "precision.loss_scaling": "off"}
    if dtype == "float16":  # from a checkpoint without a scale
        assert launch(workdir, "--resume", **other, **{"train.num_steps": 7}) == 0

    fields = {"model.dtype": dtype, "train.num_steps": 8, **kind}
    assert launch(workdir, "--resume", **fields) == 0

    last = [r for r in tiny_runs.numbers_of(workdir) if "loss" in r][-1]
    assert last.get("loss_scale") == (None if dtype == "float32" else 2.0**12)
