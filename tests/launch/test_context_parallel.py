"""Samples whose tokens are spread over ranks are trained as on one device."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from launch import context_parallel, distributed, resolve, step
from launch.context_parallel import SEQUENCES, Context
from launch.resolve import ConfigError, DeviceCount
from launch.ring import Ring
from sbp.pipeline.region import ManualRegion
from tests import hlo
from tests.launch import batches
from tests.launch.cases import Case, compile_step, make_steps
from tests.launch.test_equivalence import DROPOUT, FULL, SELECTIVE, check

NUM_STEPS = 10
TWO_LAYERS = ("model.num_layers", 2)
PLAIN, BLOCKED = (("model.attention", name) for name in ("plain", "blocked"))
SIXTEEN = (("data.seq_length", 16), ("model.max_len", 16))
SEQUENCE_PARALLEL = ("dist.sequence_parallel", True)


def spread(model, data=1, tensor=1, stage=1, context=2, fields=(PLAIN, *SIXTEEN)):
    """A case of two layers; packed documents or padding are in every batch."""
    fields = (TWO_LAYERS, *fields)
    return Case(data, tensor, stage, model=model, context=context, fields=fields)


# Every axis beside ``context``, with and without what is dropped.
GPT2_OVER_DATA = spread("gpt2", data=2, fields=(PLAIN, *SIXTEEN, *DROPOUT))
BERT_OVER_TENSOR = spread("bert", tensor=2, fields=(PLAIN, *SIXTEEN, *DROPOUT))
GPT2_OVER_STAGES = spread("gpt2", stage=2, fields=(PLAIN, *SIXTEEN, *DROPOUT))
BERT_OVER_FOUR = spread("bert", context=4, fields=(PLAIN, *SIXTEEN, *DROPOUT))
BERT_OVER_STAGES = spread("bert", stage=2)
SOME = [GPT2_OVER_DATA, BERT_OVER_TENSOR, GPT2_OVER_STAGES, BERT_OVER_FOUR]
EVERY = [
    spread(model, **{axis: 2}) if axis else spread(model, context=4)
    for model, axis in itertools.product(
        ("bert", "gpt2"), ("data", "tensor", "stage", None)
    )
]
IN_PARTS = ("zero.min_size", 1)
OTHERS = [
    spread("gpt2", data=2, fields=(PLAIN, *SIXTEEN, ("zero.stage", 1), IN_PARTS)),
    spread("bert", data=2, fields=(PLAIN, *SIXTEEN, ("zero.stage", 2), IN_PARTS)),
    spread("gpt2", data=2, fields=(PLAIN, *SIXTEEN, ("zero.stage", 3), IN_PARTS)),
    spread("gpt2", tensor=2, stage=2, fields=(BLOCKED, *SIXTEEN, *DROPOUT, SELECTIVE)),
    spread("gpt2", tensor=2, fields=(BLOCKED, *SIXTEEN, *DROPOUT)),
    spread("gpt2", tensor=2, fields=(PLAIN, *SIXTEEN, SEQUENCE_PARALLEL)),
    spread("bert", data=2, tensor=2, fields=(BLOCKED, *SIXTEEN, FULL)),
    spread("gpt2", context=8, fields=(PLAIN, *SIXTEEN, *DROPOUT)),
    dataclasses.replace(BERT_OVER_STAGES, schedule="zero_bubble", num_microbatches=4),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_step_equals_that_of_one_device(case):
    check(case, NUM_STEPS, least_drop=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY + OTHERS, ids=str)
def test_step_equals_that_of_one_device_in_every_case(case):
    check(case, NUM_STEPS, least_drop=0.05)


def collectives_of(case):
    found = hlo.collectives(compile_step(case).as_text())
    return [(c, c.axes(case.mesh.shape)) for c in found]


def test_keys_and_values_go_around_and_no_sequence_is_gathered():
    found = [c for c, axes in collectives_of(GPT2_OVER_DATA) if axes == ("context",)]
    assert {c.name for c in found} == {"collective-permute"}
    # In the loop over layers: keys and values, and once more back; their gradients go
    # to the next rank and come home. Documents are the same in all layers.
    in_layers = [c for c in found if len(c.loops) == 2]
    assert [c.num_bytes for c in in_layers] == [8 * 2 * 8 * 16] * (2 + 2 + 4)
    assert [c.shapes for c in found if len(c.loops) == 1] == [("s32[2,4,4]",)]


def test_gradients_are_summed_over_data_and_context_at_once():
    sums = [
        c
        for c, axes in collectives_of(GPT2_OVER_DATA)
        if c.name == "all-reduce" and c.num_bytes > 1000
    ]
    assert [c.axes(GPT2_OVER_DATA.mesh.shape) for c in sums] == [("data", "context")]
    assert sums[0].loops == ()


def test_stages_attend_without_waiting_for_each_other():
    found = [c for c, axes in collectives_of(GPT2_OVER_STAGES) if "context" in axes]
    inside = collections.Counter(c.name for c in found if c.conditionals)
    # Of keys, values and documents forward and back; of two gradients.
    assert inside == {"all-gather": 6, "reduce-scatter": 2}
    assert {c.name for c in found if not c.conditionals} == {"all-reduce"}


def test_each_rank_predicts_as_many_tokens():
    found = [c for c, axes in collectives_of(BERT_OVER_FOUR) if axes == ("context",)]
    # Three predictions of each of 8 samples and one that only fills up, 16 channels.
    moved = {c.name: c.num_bytes for c in found if len(c.loops) == 1}
    assert moved["reduce-scatter"] == 8 * 1 * 16 * 4
    assert moved["all-gather"] == 8 * 4 * 16 * 4  # back, their gradients


def temporary_bytes(context):
    sizes = {
        "model.model_dim": 64,
        "model.num_heads": 2,
        "model.mlp_dim": 256,
        "model.max_len": 1024,
        "data.seq_length": 1024,
        "train.global_batch_size": 2,
        "train.num_microbatches": 1,
    }
    case = spread("gpt2", context=context, fields=(BLOCKED, *sizes.items()))
    return compile_step(case).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_a_rank_is_its_part_of_the_activations():
    one, four = temporary_bytes(1), temporary_bytes(4)
    print(f"{one} bytes on one rank, {four} on each of four")
    assert four < 0.3 * one


def own_parts(model, size, batch):
    """What each rank cuts out of a batch, one rank after another along dim 1."""
    axes = ("stage", "data", "context", "tensor")
    devices = np.array(jax.devices()[:size]).reshape(1, 1, size, 1)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 4)
    region = ManualRegion(mesh, distributed.manual_axes(mesh))
    ring = Ring(axis_name="context", size=size)
    context = Context(region=region, ring=ring, sequences=SEQUENCES[model])

    def own(batch):
        return jax.tree.map(lambda x: x[None], region.varying(context.own(batch)))

    cut = region.run(own, in_specs=P(), out_specs=P("context"))
    return jax.device_get(jax.jit(cut)(batch))


def test_causal_parts_are_an_early_and_a_late_one_with_places_in_their_documents():
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    found = own_parts("gpt2", 2, {"tokens": np.arange(8)[None], "documents": documents})
    assert found["tokens"][:, 0].tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert found["documents"][:, 0].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert found["token_positions"][:, 0].tolist() == [[0, 1, 3, 4], [2, 0, 1, 2]]


def test_bert_has_predictions_dealt_out_and_samples_counted_once():
    config = Case(fields=SIXTEEN).config
    batch = batches.make("bert", config, 0)
    found = own_parts("bert", 2, batch)
    assert found["tokens"][1].tolist() == batch["tokens"][:, 8:].tolist()
    # Three predictions of a sample, and one that only fills up.
    assert found["positions"].shape == (2, 16, 4)
    assert found["weights"].shape == found["targets"].shape == (2, 16, 2)
    dealt = np.concatenate(list(found["weights"]), axis=1)
    assert dealt.tolist() == np.pad(batch["weights"], ((0, 0), (0, 1))).tolist()
    sample_weights = found["sample_weights"].tolist()
    assert sample_weights == [batch["sample_weights"].tolist(), [0] * 16]


def problems(**fields):
    fields = {"dist.context_parallel_size": 2, "dist.data_parallel_size": 1} | {
        name.replace("__", "."): value for name, value in fields.items()
    }
    name = fields.pop("name", "gpt2")
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(
            resolve.load(f"configs/{name}_tiny.py"),
            {field: str(value) for field, value in fields.items()},
            DeviceCount(num_devices=fields["dist.context_parallel_size"]),
        )
    return str(caught.value)


def test_causal_sequence_must_divide_into_two_parts_per_rank():
    assert (
        "dist.context_parallel_size=2 gives each rank an early and a late part of the"
        " sequence, 4 parts in all, but data.seq_length=126 is not divisible by 4. Use"
        " 124 or 128, or another number of ranks." in problems(data__seq_length=126)
    )


def test_sequence_of_bert_must_divide_into_a_part_per_rank():
    assert (
        "dist.context_parallel_size=3 gives each rank a part, 3 parts in all, but"
        " data.seq_length=128 is not divisible by 3. Use 126 or 129, or another number"
        " of ranks." in problems(name="bert", dist__context_parallel_size=3)
    )


def test_images_are_not_spread():
    assert (
        "dist.context_parallel_size=2 splits the tokens of a sample, which is for the"
        " long sequences of 'bert', 'bert_classifier', 'bert_tagger', 'gpt2', not"
        " for model.name='vit'. Use 1, and dist.data_parallel_size or"
        " dist.tensor_parallel_size instead." in problems(name="vit")
    )


def test_too_many_ranks_for_the_devices_are_named():
    config = {"dist": {"context_parallel_size": 4, "data_parallel_size": 2}}
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(
            resolve.load("configs/gpt2_tiny.py") | config,
            {},
            DeviceCount(num_devices=4),
        )
    assert (
        "dist: stage 1 x data 2 x context 4 x tensor 1 needs 8 devices, but there are"
        " 4. Choose sizes whose product is 4." in str(caught.value)
    )


def test_sizes_are_at_least_one():
    text = problems(dist__context_parallel_size=0)
    assert "dist.context_parallel_size=0 must be at least 1." in text


def test_layout_is_named_with_its_context():
    config = GPT2_OVER_DATA.config
    assert config.dist.layout == "dp2_tp1_pp1_cp2"
    assert config.dist.sizes == "stage 1 x data 2 x context 2 x tensor 1"


def test_outputs_of_parts_of_samples_are_refused():
    message = "An output step reads whole samples, but 2 ranks share the tokens of each"
    with pytest.raises(ValueError, match=message):
        step.build_output_step(make_steps(GPT2_OVER_DATA), lambda *_: None)


def test_what_attends_at_once_is_a_part():
    assert context_parallel.part_length(GPT2_OVER_DATA.config, 16) == 4
    assert context_parallel.part_length(BERT_OVER_FOUR.config, 16) == 4
    assert context_parallel.part_length(Case().config, 16) == 16
