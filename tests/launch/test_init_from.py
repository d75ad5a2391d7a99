"""Beginning with a pre-trained model: from a run or a published checkpoint."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file

from launch import convert, job, resolve
from launch.checkpoint import CheckpointError
from launch.resolve import ConfigError, DeviceCount
from models import convert as model_convert
from models import published
from models.stacked import path_of
from tests.launch.batches import NO_DATA
from tests.models import cases

# One line each of what a config of a fine-tuning says.
FIELDS = {
    "model.name": "bert_classifier",
    "model.num_classes": "3",
    "data.seq_length": "12",
    "train.global_batch_size": "4",
}
LAYOUTS = {
    "1x1x1": {},
    "2x2x1": {"data": 2, "tensor": 2},
    "1x2x2": {"tensor": 2, "pipeline": 2},
}
VOCABULARY = "embeddings/token/embedding"


@pytest.fixture(scope="module")
def published_bert(tmp_path_factory):
    """A BERT with pre-training heads as `transformers` has written it."""
    directory = tmp_path_factory.mktemp("hf") / "bert"
    directory.mkdir()
    golden = cases.load("bert").golden
    (directory / "config.json").write_text(json.dumps(golden.config))
    (directory / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    save_file(golden.weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def run(published_bert, tmp_path_factory):
    """The workdir of a run with the same weights."""
    directory = tmp_path_factory.mktemp("runs") / "bert"
    arguments = ["--from=hf", "--to=sbp", str(published_bert), str(directory)]
    assert convert.main(arguments) == 0
    return directory


def configure(directory, layout="1x1x1", **fields):
    """The config of a fine-tuning on a layout."""
    sizes = LAYOUTS[layout]
    fields = FIELDS | {name.replace("__", "."): str(v) for name, v in fields.items()}
    fields |= {f"dist.{k}_parallel_size": str(v) for k, v in sizes.items()}
    if "pipeline" in sizes:
        fields["dist.pipeline_stage_layers"] = "(3, 1)"
        fields["train.num_microbatches"] = "2"
    num_devices = int(np.prod([*sizes.values(), 1]))
    return resolve.resolve(
        {},
        {"init_from": str(directory), **fields},
        DeviceCount(num_devices=num_devices),
    )


def build(config):
    """The job of a config, without data."""
    dist = config.dist
    sizes = (
        dist.pipeline_parallel_size,
        dist.data_parallel_size,
        dist.tensor_parallel_size,
    )
    devices = np.array(jax.devices()[: dist.num_devices]).reshape(sizes)
    mesh = Mesh(devices, ("stage", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
    steps = job.build_steps(config, mesh)
    return job.Job(config=config, mesh=mesh, data=NO_DATA, steps=steps)


def begin(config):
    """The state that a config begins with, as it is saved, and the log."""
    built, lines = build(config), []
    state = built.create_state(lambda *more: lines.extend(more))
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(built.steps.shardings), strict=True
    ):
        assert leaf.sharding == sharding
    return jax.device_get(built.saved_form.to_saved(state)), lines


def by_path(params):
    leaves = jax.tree.leaves_with_path(params)
    return {path_of(path): np.asarray(leaf) for path, leaf in leaves}


def expected_params(config):
    """What the published weights are here, without what is new."""
    table = published.PUBLISHED["bert_classifier"].table(config.model)
    shapes = cases.stack("bert_classifier", config.model).shapes
    del shapes["classifier"]
    weights = cases.load("bert").golden.weights
    return by_path(model_convert.to_params(table, weights.__getitem__, shapes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("origin", ["published_bert", "run"])
def test_parameters_are_those_of_the_directory(origin, layout, request):
    config = configure(request.getfixturevalue(origin), layout)

    state, lines = begin(config)

    found, expected = by_path(state.params), expected_params(config)
    new = {"classifier/kernel", "classifier/bias"}
    assert found.keys() == expected.keys() | new
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert 0.01 < np.std(found["classifier/kernel"]) < 0.03
    assert int(state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    num_all = len(found)
    assert f"{num_all - 2} of {num_all} parameters" in lines[0]
    assert lines[1] == "  new: classifier/bias, classifier/kernel"
    assert lines[2].startswith("  not used: ")
    assert ("next_sentence/bias" if origin == "run" else "cls.seq_rel") in lines[2]


def test_new_parameters_are_what_they_are_without_a_directory(published_bert):
    config = configure(published_bert)
    fresh = dataclasses.replace(
        config, root=dataclasses.replace(config.root, init_from=None)
    )

    state, _ = begin(config)
    expected, _ = begin(fresh)

    np.testing.assert_array_equal(
        state.params["classifier"]["kernel"], expected.params["classifier"]["kernel"]
    )


def test_padding_and_dtype_are_those_of_the_run(run):
    config = configure(run, model__vocab_multiple=8, model__param_dtype="bfloat16")

    state, _ = begin(config)

    found, expected = by_path(state.params), expected_params(config)
    num_rows = config.model.padded_vocab_size
    assert found[VOCABULARY].shape[0] == num_rows != 128
    for path, value in expected.items():
        assert found[path].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(found[path], value.astype(jax.numpy.bfloat16))


def test_sizes_and_tokenizer_are_those_of_the_directory(published_bert, run):
    config = configure(published_bert)

    assert config.model.num_layers == 4
    assert config.model.model_dim == 16
    assert config.model.num_classes == 3
    assert config.model.dropout_rate == 0.1
    assert config.model.param_dtype == "float32"
    assert config.data.tokenizer == str(published_bert / "vocab.txt")
    assert configure(run).model == config.model
    assert configure(run, model__num_layers=None).model == config.model
    assert configure(run, model__dropout_rate=0.0).model.dropout_rate == 0.0
    assert configure(run, data__tokenizer="a.json").data.tokenizer == "a.json"


def test_how_it_was_computed_is_not_taken_over(run, tmp_path):
    source = tmp_path / "run"
    shutil.copytree(run, source)
    values = yaml.safe_load((source / "config.yaml").read_text())
    values["model"] |= {"attention": "blocked", "dtype": "bfloat16"}
    (source / "config.yaml").write_text(yaml.safe_dump(values))

    model = configure(source).model

    assert (model.attention, model.dtype) == ("auto", "float32")
    assert configure(source, model__dtype="float16").model.dtype == "float16"


def test_checkpoint_of_a_run_can_be_chosen(run):
    _, lines = begin(configure(run / "checkpoints" / "0"))

    assert f"the bert in '{run}', step 0: " in lines[0]
    with pytest.raises(CheckpointError, match="has no checkpoint of step 7"):
        begin(configure(run / "checkpoints" / "7"))


def test_classes_that_are_others_make_a_new_head(tmp_path):
    golden = cases.load("vit").golden
    (tmp_path / "config.json").write_text(json.dumps(golden.config))
    save_file(golden.weights, tmp_path / "model.safetensors", {"format": "pt"})
    vit = {"model.name": "vit"}
    num_classes = cases.load("vit").config.num_classes

    def describe(number):
        fields = {"init_from": str(tmp_path), "model.num_classes": str(number)}
        devices = DeviceCount(num_devices=1)
        return begin(resolve.resolve({}, fields | vit, devices))[1]

    assert len(describe(num_classes)) == 1
    assert describe(num_classes + 1)[1] == "  new: classifier/bias, classifier/kernel"


def test_adapters_begin_anew_beside_pretrained_weights(run):
    config = configure(run, lora__rank=2, lora__targets="blocks/*/mlp/up")

    state, lines = begin(config)

    found = by_path(state.params)
    assert not found["blocks/*/mlp/up/lora_b"].any()
    assert found["blocks/*/mlp/up/lora_a"].all()
    assert "blocks/*/mlp/up/lora_a, blocks/*/mlp/up/lora_b" in lines[1]
    trained = {"mlp", "pooler", "classifier"}
    moments = [p for p in tree_paths(state.opt_state) if "/mu/" in p]
    assert moments
    assert all(trained & set(path.split("/")) for path in moments)


def tree_paths(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model__num_layers": 3, "model__norm_position": "pre"},
            "model.num_layers=3, but the model in '{run}' has 4. Set that, or leave it"
            " out (None) to take what the model has.\n"
            "  model.norm_position='pre', but the model in '{run}' has 'post'.",
        ),
        (
            {"model__name": "gpt2", "model__num_classes": None},
            "init_from: '{run}' holds a bert, which a gpt2 cannot begin with. Name"
            " another directory, or set model.name to 'bert' or 'bert_classifier' or",
        ),
    ],
)
def test_config_that_does_not_fit_is_an_error(fields, message, run):
    with pytest.raises(ConfigError) as failure:
        configure(run, **fields)
    assert message.format(run=run) in str(failure.value)


def test_directory_that_holds_no_model_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"holds neither config.yaml nor config.json"):
        configure(tmp_path)
    with pytest.raises(ConfigError, match=r"absent' is no directory. Name the workdir"):
        configure(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json' is not JSON"):
        configure(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {name: bert, num_layer: 2}")
    with pytest.raises(ConfigError, match=r"num_layer: no such field. Did you mean"):
        configure(tmp_path)


def test_missing_and_misshapen_weights_are_one_error(published_bert, tmp_path):
    source = tmp_path / "damaged"
    shutil.copytree(published_bert, source)
    weights = load_file(source / "model.safetensors")
    del weights["bert.embeddings.LayerNorm.bias"]
    name = "bert.encoder.layer.1.output.dense.weight"
    weights[name] = weights[name][:, :5]
    save_file(weights, source / "model.safetensors")

    with pytest.raises(CheckpointError) as failure:
        begin(configure(source))

    message = str(failure.value)
    assert f"the bert in '{source}' does not fit this bert_classifier:" in message
    assert (
        "  embeddings/norm/bias is missing: there is no bert.embeddings.LayerNorm.bias."
    ) in message
    assert (
        f"  blocks/*/mlp/down/kernel is of another shape: {name} has (16, 5), but the"
        " model needs (16, 32)."
    ) in message
    assert "Only heads (classifier, pooler) and adapters may begin anew." in message


def test_adapters_of_the_directory_are_not_forgotten(run, tmp_path):
    source = tmp_path / "adapted"
    shutil.copytree(run, source)
    values = yaml.safe_load((source / "config.yaml").read_text())
    values["lora"]["rank"] = 4
    (source / "config.yaml").write_text(yaml.safe_dump(values))

    with pytest.raises(
        CheckpointError, match=r"holds adapters, lora.rank=4 alpha=16.0"
    ):
        begin(configure(source))
