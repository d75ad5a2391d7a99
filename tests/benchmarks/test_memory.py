"""What a layer adds to the bytes of a step is what the formulas say.

Those of arXiv:2205.05198, equations 2 and 4 without the attention core, are for two
bytes per number: 10 and 24 bytes per sample, position and channel between and inside
what is split by tensor parallelism. 2 of the 10 are masks of dropout. On CPU XLA keeps
bfloat16 as float32, so that the rest is twice as much there.
"""

import dataclasses
import functools

import pytest

from benchmarks import memory
from launch import resolve, virtual_gpus

SIZE, LENGTH, DIM = 8, 512, 512  # with fewer channels XLA keeps more on GPUs
NUM_PARAMS = 12 * DIM**2  # of a layer, about
H100 = "h100-80g"
TARGETS = [
    memory.CPU,
    pytest.param(
        H100,
        marks=pytest.mark.skipif(
            not virtual_gpus.has_plugin(),
            reason="needs JAX's CUDA plugin: pip install -e '.[plan]'",
        ),
    ),
]
DTYPES = {memory.CPU: "float32", H100: "bfloat16"}
BETWEEN = {memory.CPU: 18, H100: 10}
INSIDE = {memory.CPU: 48, H100: 24}
FIELDS = {
    "model.model_dim": DIM,
    "model.num_heads": 4,
    "model.mlp_dim": 4 * DIM,
    "model.max_len": LENGTH,
    "model.vocab_size": 256,
    "model.attention": "plain",
    "model.dropout_rate": 0.1,
    "model.attention_dropout_rate": 0.1,
    "data.seq_length": LENGTH,
    "remat": "selective",
    "train.num_microbatches": 1,
}


@dataclasses.dataclass(frozen=True)
class Growth:
    """Bytes per layer."""

    state: float
    activations: float


@functools.cache
def growth(target, *, data=1, tensor=1, gradients=1.0, **fields):
    """What a layer adds; ``gradients`` is the part of a layer's that a device sums."""
    found = []
    for num_layers in (4, 8):
        changed = FIELDS | {
            "model.num_layers": num_layers,
            "model.dtype": DTYPES[target],
            "train.global_batch_size": SIZE * data,
            memory.DATA: data,
            memory.TENSOR: tensor,
            **{name.replace("__", "."): value for name, value in fields.items()},
        }
        config = resolve.resolve(
            resolve.load("configs/bert_tiny.py"),
            {name: str(value) for name, value in changed.items()},
            resolve.DeviceCount(num_devices=data * tensor),
        )
        found.append(memory.measure(config, target))
    few, many = found
    return Growth(
        state=(many.arguments - few.arguments) / 4,
        activations=(many.temporary - few.temporary) / 4 - 4 * NUM_PARAMS * gradients,
    )


def per_channel(found):
    """Bytes of activations per sample, position and channel."""
    return found.activations / (SIZE * LENGTH * DIM)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_selective_recomputation_keeps_what_the_formula_says(target):
    expected = BETWEEN[target] + INSIDE[target]
    assert per_channel(growth(target)) == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_sequence_parallelism_divides_all_activations_by_the_ranks(target):
    by_tensor = growth(target, tensor=2, gradients=1 / 2)
    split = growth(target, tensor=2, gradients=1 / 2, dist__sequence_parallel=True)
    between, inside = BETWEEN[target], INSIDE[target]
    assert per_channel(by_tensor) == pytest.approx(between + inside / 2, rel=0.1)
    assert per_channel(split) == pytest.approx((between + inside) / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_zero_3_keeps_an_eighth_of_a_layer(target):
    whole = growth(target, data=8)
    parts = growth(target, data=8, gradients=1 / 8, zero__stage=3, zero__min_size=64)
    assert whole.state == pytest.approx(3 * 4 * NUM_PARAMS, rel=0.01)
    assert parts.state == pytest.approx(whole.state / 8, rel=0.01)
    # Nothing else of a layer stays, in particular not what is gathered.
    assert parts.activations == pytest.approx(whole.activations, rel=0.02)


def test_a_place_in_a_page_is_filled_and_a_missing_one_is_named():
    page = "a <!-- begin x -->\nold\n<!-- end x --> b"
    assert memory.put_between(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no place for 'y'. Add <!-- begin y --> and"):
        memory.put_between(page, "y", "new")


@pytest.mark.parametrize("name", memory.TABLES)
def test_every_row_of_a_table_is_a_config(name):
    table = memory.TABLES[name]
    for row in table.rows:
        if table.target != memory.CPU or "cuDNN" not in row:
            assert memory.resolve_row(table, row).dist.num_devices == 8


def test_an_unknown_table_is_refused(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--tables=gpt3"])
    expected = "--tables=gpt3: choose from gpt2-h100, bert-h100, bert-cpu."
    assert expected in capsys.readouterr().err
