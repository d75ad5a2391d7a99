"""Bad pipelines are refused with the config; good ones are cut as asked."""

import dataclasses

import pytest

from launch import pipelines, resolve
from launch.run_config import DistConfig
from models.bert import SIZES, BertConfig

EIGHT_LAYERS = dataclasses.replace(SIZES["tiny"], num_layers=8)


def resolve_with(**overrides):
    values = {
        "model.num_layers": 8,
        "model.num_heads": 4,
        "train.num_microbatches": 4,
        "dist.pipeline_parallel_size": 2,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    return resolve.resolve(
        resolve.load("configs/bert_tiny.py"),
        {name: str(value) for name, value in values.items()},
        resolve.DeviceCount(num_devices=None),
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            dict(train__num_microbatches=2, dist__pipeline_parallel_size=4),
            "dist: Schedule '1f1b': num_microbatches=2 is fewer than the 4 pipeline"
            " stages. Raise it to at least 4, lower num_stages, or use the schedule"
            " 'gpipe'.",
        ),
        (
            dict(
                dist__pipeline_schedule="zero_bubble",
                train__num_microbatches=1,
            ),
            "dist: Schedule 'zero_bubble': num_microbatches=1 is fewer than the 2"
            " pipeline stages.",
        ),
        (
            dict(
                dist__pipeline_schedule="interleaved_1f1b",
                dist__pipeline_num_chunks=2,
                train__num_microbatches=5,
                train__global_batch_size=30,
            ),
            "dist: Schedule 'interleaved_1f1b': num_microbatches=5 is not divisible by"
            " the 2 pipeline stages, which pass them on in groups of 2. Use 4 or 6"
            " microbatches, or the schedule '1f1b'.",
        ),
        (
            dict(dist__pipeline_schedule="interleaved_1f1b"),
            "dist: Schedule 'interleaved_1f1b': num_chunks=1 leaves nothing to"
            " interleave. Use at least 2 chunks per stage, or the schedule '1f1b'.",
        ),
        (
            dict(dist__pipeline_num_chunks=2),
            "dist: Schedule '1f1b': num_chunks=2, but it runs one chunk per stage. Use"
            " num_chunks=1, or the schedule 'interleaved_1f1b'.",
        ),
        (
            dict(dist__pipeline_parallel_size=16, train__num_microbatches=16),
            "dist: num_layers=8 is fewer than the 16 pieces of 16 stages x 1 chunks,"
            " and every piece holds at least one layer. Use at most 8 pieces, or more"
            " layers.",
        ),
        (
            dict(
                dist__pipeline_schedule="interleaved_1f1b", dist__pipeline_num_chunks=5
            ),
            "dist: num_layers=8 is fewer than the 10 pieces of 2 stages x 5 chunks,",
        ),
        (
            dict(dist__pipeline_stage_layers=(3, 4)),
            "dist: pipeline_stage_layers=(3, 4) adds up to 7 layers, but the model has"
            " 8. Add 1 more.",
        ),
        (
            dict(dist__pipeline_stage_layers=(3, 4, 1)),
            "dist: pipeline_stage_layers=(3, 4, 1) lists 3 numbers, but there are 2"
            " pieces: 2 stages x 1 chunks. List one number for each.",
        ),
        (
            dict(dist__pipeline_stage_layers="even"),
            "dist: pipeline_stage_layers='even' is neither 'libai' nor a list of"
            " numbers. Use None to balance the stages.",
        ),
        (
            dict(
                dist__pipeline_stage_layers="libai",
                dist__pipeline_schedule="interleaved_1f1b",
                dist__pipeline_num_chunks=2,
            ),
            "dist: pipeline_stage_layers='libai' gives every stage one piece, but"
            " pipeline_num_chunks=2. Use one chunk, or list the layers of each piece.",
        ),
        (
            dict(dist__pipeline_parallel_size=3, dist__tensor_parallel_size=2),
            "model.padded_vocab_size=8192 is not divisible by"
            " dist.pipeline_parallel_size=3 x dist.tensor_parallel_size=2, over which"
            " dist.pipeline_vocabulary='all_stages' spreads it. Set"
            " model.vocab_multiple=384, or use 'first_and_last_stage'.",
        ),
        (
            dict(dist__pipeline_schedule="1f2b"),
            "dist.pipeline_schedule='1f2b' is not one of",
        ),
        (
            dict(train__num_microbatches=3),
            "train.global_batch_size=32 is not divisible by dist.data_parallel_size=1 x"
            " train.num_microbatches=3. Use 30 or 33, or fewer microbatches.",
        ),
    ],
)
def test_broken_rule_is_named_with_values_and_remedy(overrides, message):
    with pytest.raises(resolve.ConfigError) as raised:
        resolve_with(**overrides)
    assert "breaks 1 rule:" in str(raised.value)
    assert message in str(raised.value)


def test_all_broken_rules_are_listed_at_once():
    with pytest.raises(resolve.ConfigError, match="breaks 4 rules") as raised:
        resolve_with(
            dist__pipeline_parallel_size=3,
            dist__pipeline_stage_layers=(8,),
            dist__pipeline_schedule="1f1b",
            train__num_microbatches=2,
            train__global_batch_size=5,
        )
    for part in ("global_batch_size=5", "stage_layers=(8,)", "num_mic", "vocab"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        dict(dist__pipeline_stage_layers="libai"),
        dict(dist__pipeline_stage_layers=(5, 3)),
        dict(dist__pipeline_schedule="gpipe", train__num_microbatches=1),
        dict(
            dist__pipeline_schedule="interleaved_1f1b",
            dist__pipeline_num_chunks=3,
            dist__pipeline_stage_layers=(1, 1, 2, 1, 2, 1),
        ),
        dict(
            dist__pipeline_parallel_size=3,
            dist__pipeline_vocabulary="first_and_last_stage",
        ),
    ],
)
def test_sound_pipelines_are_accepted(overrides):
    assert resolve_with(**overrides).dist.pipeline_num_layers == 8


@pytest.mark.parametrize(
    ("dist", "layers"),
    [
        (dict(pipeline_parallel_size=4), (2, 2, 2, 2)),
        (dict(pipeline_parallel_size=3), (2, 3, 3)),
        (dict(pipeline_parallel_size=4, pipeline_stage_layers="libai"), (2, 2, 3, 1)),
        (dict(pipeline_parallel_size=2, pipeline_stage_layers=(7, 1)), (7, 1)),
        # A stage's chunks follow each other if there is one stage.
        (dict(pipeline_num_chunks=3), (8,)),
        (dict(pipeline_num_chunks=2, pipeline_stage_layers=(1, 7)), (8,)),
        (dict(pipeline_parallel_size=2, pipeline_num_chunks=2), (2, 2, 2, 2)),
    ],
)
def test_layers_are_assigned_as_asked(dist, layers):
    assigned = pipelines.assign(DistConfig(**dist), EIGHT_LAYERS)
    assert assigned.layers_per_piece == layers


def test_last_stage_gets_fewer_layers_where_it_has_the_head_alone():
    model = BertConfig(num_layers=24, model_dim=1024, mlp_dim=4096)
    counts = {
        place: pipelines.assign(
            DistConfig(pipeline_parallel_size=4, pipeline_vocabulary=place), model
        ).layers_per_piece
        for place in ("all_stages", "first_and_last_stage")
    }
    assert counts["all_stages"] == (6, 6, 6, 6)
    assert counts["first_and_last_stage"] == (6, 7, 7, 4)
