"""What holds for the data and the costs of every model."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from launch import families, flops, resolve, run_config
from launch.families import FAMILIES
from launch.resolve import ConfigError, DeviceCount
from models import MODELS, bert_heads, gpt2, vit

BATCH_SIZE = 8
SIZES = {"num_layers": 2, "model_dim": 32, "num_heads": 4, "mlp_dim": 64}
TEXT = {"vocab_size": 320, "max_len": 32, **SIZES}
IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 1, "num_classes": 10}
HEAD = {**TEXT, "num_classes": 7}
MODEL_FIELDS = {
    "bert": TEXT,
    "bert_classifier": HEAD,
    "bert_tagger": HEAD,
    "gpt2": TEXT,
    "vit": {**IMAGE, **SIZES},
}
DATA_FIELDS = {
    "bert": {"seq_length": 32},
    "bert_classifier": {"seq_length": 32, "label_smoothing": 0.1},
    "bert_tagger": {"seq_length": 32},
    "gpt2": {"seq_length": 32},
    "vit": {"crop_area": 0.5, "mixup_alpha": 0.2, "cutmix_alpha": 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text with documents of several sentences."""
    folder = tmp_path_factory.mktemp("families")
    random = np.random.default_rng(0)
    words = "the cat dog tree house sees likes has a red green old small big".split()

    def document():
        sentences = [" ".join(random.choice(words, size=8)) for _ in range(6)]
        return "\n".join(f"{sentence.capitalize()}." for sentence in sentences)

    lines = [json.dumps({"text": document()}) for _ in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    words = [document().split() for _ in range(40)]
    labelled = {
        "classified": [{"text": " ".join(w), "label": len(w[0])} for w in words],
        "tagged": [{"words": w, "labels": list(map(len, w))} for w in words],
    }
    for name, records in labelled.items():
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


FILES = {
    "bert": "texts",
    "bert_classifier": "classified",
    "bert_tagger": "tagged",
    "gpt2": "texts",
}


def make_config(name, folder, *, size=BATCH_SIZE, **fields):
    given = {"cache_dir": str(folder / "cache"), "validation_fraction": 0.2}
    if name in FILES:  # or the digits
        given["files"] = (str(folder / f"{FILES[name]}.jsonl"),)
    values = {
        "model": {"name": name, **MODEL_FIELDS[name]},
        "data": {**given, **DATA_FIELDS[name], **fields},
        "train": {"global_batch_size": size, "seed": 5},
    }
    return resolve.resolve(values, {}, DeviceCount(num_devices=1))


def take(batches, num):
    parts = list(itertools.islice(batches, num))
    batches.close()
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_there_is_a_row_for_every_model():
    assert FAMILIES.keys() == MODELS.keys()


def test_every_field_of_the_data_has_a_use():
    fields = {field.name for field in dataclasses.fields(run_config.DataConfig)}

    assert set().union(*(family.data_fields for family in FAMILIES.values())) == fields


@pytest.mark.parametrize("name", FAMILIES)
def test_batch_has_the_announced_arrays(folder, name):
    config = make_config(name, folder)
    pipeline = families.build(config)
    batch = take(pipeline.train_batches(), 1)

    found = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}

    assert found == pipeline.batch_shapes == families.batch_shapes(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_what_the_model_takes(folder, name):
    config = make_config(name, folder)
    batch = families.batch_shapes(config)

    @nnx.eval_shape
    def means():
        model = MODELS[name].module(config.model, rngs=nnx.Rngs(0))
        arrays = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), batch)
        x = model.encode(arrays)
        sums, counts = model.losses(x, arrays), model.counts(arrays)
        tally = FAMILIES[name].tally(model, x, arrays)
        return {name: sums[name] / counts[name] for name in sums}, tally

    means, tally = means
    assert all(mean.shape == () for mean in means.values())
    ones = {key: np.ones(value.shape) for key, value in tally.items()}
    extra = FAMILIES[name].scores(dict.fromkeys(means, 2.0), ones)
    ones = {"macro_f1": 1.0, "micro_f1": 1.0}
    scores = {"bert": {}, "gpt2": {"perplexity": np.exp(2.0)}}
    assert extra == scores.get(name, ones)


@pytest.mark.parametrize("name", FAMILIES)
def test_stream_depends_on_neither_batch_size_nor_processes_nor_start(folder, name):
    expected = take(families.build(make_config(name, folder)).train_batches(), 3)

    larger = families.build(make_config(name, folder, size=12))
    assert_equal(take(larger.train_batches(), 2), expected)

    parts = [
        families.build(make_config(name, folder), rows=slice(first, first + 4))
        for first in (0, 4)
    ]
    halves = [take(part.train_batches(1), 2) for part in parts]
    for key, array in expected.items():
        pieces = [half[key].reshape(2, 4, *array.shape[1:]) for half in halves]
        joined = np.concatenate(pieces, axis=1).reshape(16, *array.shape[1:])
        np.testing.assert_array_equal(joined, array[8:], err_msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_far_step_is_there_at_once(folder, name):
    batches = families.build(make_config(name, folder)).train_batches(10**12)

    assert len(take(batches, 1)["weights"]) == BATCH_SIZE


@pytest.mark.parametrize("name", FAMILIES)
def test_validation_is_every_sample_once_and_nothing_twice(folder, name):
    pipeline = families.build(make_config(name, folder, size=7))
    single = families.build(make_config(name, folder, size=1))
    num = pipeline.num_validation_samples

    found = take(pipeline.validation_batches(), None)

    expected = take(single.validation_batches(), None)
    assert len(expected["weights"]) == num
    assert len(found["weights"]) == -(-num // 7) * 7
    assert_equal({key: array[:num] for key, array in found.items()}, expected)
    for key, array in found.items():
        assert not key.endswith("weights") or (array[num:] == 0).all()


@pytest.mark.parametrize("name", ["bert_tagger", "gpt2", "vit"])
def test_worker_processes_give_the_same_batches(folder, name):
    expected = take(families.build(make_config(name, folder)).train_batches(2), 3)

    pipeline = families.build(make_config(name, folder, num_workers=1))

    assert_equal(take(pipeline.train_batches(2), 3), expected)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "gpt2",
            {"masking": "ngram", "flip": True},
            "data.masking='ngram' has no meaning for model.name='gpt2'. Leave it at"
            " 'whole_word'.\n  data.flip=True has no meaning",
        ),
        ("bert", {"mixup_alpha": 0.5}, "data.mixup_alpha=0.5 has no meaning for model"),
        ("vit", {"seq_length": 64}, "data.seq_length=64 has no meaning for model"),
        ("gpt2", {"seq_length": 33}, "data.seq_length=33 is longer than the 32 posit"),
        ("vit", {"pixel_std": (1.0, 1.0)}, "data.pixel_std=(1.0, 1.0) has 2 values"),
        ("vit", {"pixel_std": (0.0,)}, "data.pixel_std=(0.0,) must all be above 0."),
        ("vit", {"crop_area": 0.0}, "data.crop_area=0.0 must be between 0.01 and 1."),
        (
            "vit",
            {"validation_files": ("val",)},
            "data.validation_fraction=0.2 has no meaning beside data.validation_files=",
        ),
        ("vit", {"cutmix_alpha": -1.0}, "data.cutmix_alpha=-1.0 must be at least 0."),
        ("vit", {"label_smoothing": 1.5}, "data.label_smoothing=1.5 must be between 0"),
        (
            "bert_tagger",
            {"label_smoothing": 0.1},
            "data.label_smoothing=0.1 has no meaning for model.name='bert_tagger'",
        ),
        ("bert", {"classes": ("a",)}, "data.classes=('a',) has no meaning for model"),
        ("bert_tagger", {"seq_length": 33}, "data.seq_length=33 is longer than the 32"),
        (
            "bert_classifier",
            {"validation_files": ("val.jsonl",)},
            "data.validation_fraction=0.2 has no meaning beside data.validation_files=",
        ),
        (
            "bert_classifier",
            {"classes": tuple("abcdefgh")},
            "data.classes names 8 classes, more than model.num_classes=7. Set model.num"
            "_classes=8.",
        ),
    ],
)
def test_fields_that_do_not_fit_the_model_are_an_error(folder, name, fields, message):
    with pytest.raises(ConfigError) as error:
        make_config(name, folder, **fields)

    assert message in str(error.value)


def test_channels_that_no_image_has_are_an_error():
    values = {"model": {"name": "vit", **MODEL_FIELDS["vit"], "num_channels": 2}}

    with pytest.raises(ConfigError, match="model.num_channels=2, but images are read"):
        resolve.resolve(values, {}, DeviceCount(num_devices=1))


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_that_tensor_parallelism_cannot_split_are_an_error(name):
    values = {"model": {"name": name, **MODEL_FIELDS[name], "mlp_dim": 60}}
    overrides = {"dist.tensor_parallel_size": "8"}

    with pytest.raises(ConfigError) as error:
        resolve.resolve(values, overrides, DeviceCount(num_devices=8))

    assert "model.num_heads=4 is not divisible by dist.tensor" in str(error.value)
    assert "model.mlp_dim=60 is not divisible by dist.tensor" in str(error.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", 32),
        ("bert_classifier", 32),
        ("bert_tagger", 32),
        ("gpt2", 32),
        ("vit", 1 + 4),
    ],
)
def test_tokens_of_a_sample(folder, name, expected):
    assert FAMILIES[name].num_tokens(make_config(name, folder)) == expected


# Wide enough for the matrix products to outweigh the rest, which we do not count.
WIDE = {"num_layers": 1, "model_dim": 256, "num_heads": 2, "mlp_dim": 1024}
FLOAT, INT = np.float32, np.int32
ROW = {"tokens": ((64,), INT), "segments": ((64,), INT), "is_token": ((64,), bool)}
COUNTED = {
    "bert_classifier": (
        bert_heads.BertHeadConfig(vocab_size=400, max_len=64, **WIDE),
        {**ROW, "targets": ((2,), FLOAT), "weights": ((), FLOAT)},
        lambda config: flops.bert_classifier_train_flops(
            config, seq_length=64, num_samples=2
        ),
    ),
    "bert_tagger": (
        bert_heads.BertHeadConfig(vocab_size=400, max_len=64, num_classes=400, **WIDE),
        {**ROW, "targets": ((64,), INT), "weights": ((64,), FLOAT)},
        lambda config: flops.bert_tagger_train_flops(
            config, seq_length=64, num_samples=2
        ),
    ),
    "gpt2": (
        gpt2.Gpt2Config(vocab_size=4000, max_len=64, **WIDE),
        {"tokens": ((64,), INT), "targets": ((64,), INT), "weights": ((64,), FLOAT)},
        lambda config: flops.gpt2_train_flops(config, seq_length=64, num_samples=2),
    ),
    "vit": (
        vit.VitConfig(image_size=64, patch_size=8, **WIDE),
        {"images": ((64, 64, 3), FLOAT), "targets": ((1000,), FLOAT)}
        | {"weights": ((), FLOAT)},
        lambda config: flops.vit_train_flops(config, num_samples=2),
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_xla_counts(name):
    config, shapes, count = COUNTED[name]
    batch = {
        key: jax.ShapeDtypeStruct((2, *shape), dtype)
        for key, (shape, dtype) in shapes.items()
    }
    module = MODELS[name].module
    graph, params = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))

    def loss(params, batch):
        model = nnx.merge(graph, params)
        losses = model.losses(model.encode(batch), batch)
        return next(x for key, x in losses.items() if key.endswith("_loss"))

    compiled = jax.jit(jax.grad(loss)).lower(params, batch).compile()

    assert count(config) < compiled.cost_analysis()["flops"] < 1.05 * count(config)
