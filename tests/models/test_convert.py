import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from models import convert, stacked
from models.published import PUBLISHED
from models.published_files import open_published
from tests.models import cases
from tests.models.cases import FAMILIES


def abstract(case, sharding=None):
    """Returns the parameters as shapes, each on the first device unless told."""
    if sharding is None:
        device = SingleDeviceSharding(jax.devices()[0])
        sharding = lambda path, leaf: device  # noqa: E731 - a default
    return jax.tree.map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding(path, leaf)
        ),
        case.params,
    )


def load(case, directory, **options):
    options = {"abstract": abstract(case), **options}
    return convert.load(case.name, case.config, open_published(directory), **options)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A published checkpoint of each family, as `transformers` has written it."""
    found = {}
    for name in FAMILIES:
        golden = cases.load(name).golden
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(golden.config))
        save_file(golden.weights, found[name] / "model.safetensors", {"format": "pt"})
    return found


@pytest.fixture
def directory(directories, tmp_path):
    """A checkpoint of GPT-2, to be changed."""
    return shutil.copytree(directories["gpt2"], tmp_path / "changed")


def change(directory, **tensors):
    """Sets tensors of a checkpoint; None removes them."""
    file = directory / "model.safetensors"
    found = load_file(file) | {
        name.replace("__", "."): x for name, x in tensors.items()
    }
    save_file({name: x for name, x in found.items() if x is not None}, file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_the_same_bit_by_bit(name, dtype, directories, tmp_path):
    weights = load_file(directories[name] / "model.safetensors")
    weights = {key: value.astype(jnp.dtype(dtype)) for key, value in weights.items()}
    (tmp_path / "config.json").write_bytes(
        (directories[name] / "config.json").read_bytes()
    )
    save_file(weights, tmp_path / "model.safetensors")

    found, config = convert.read_config(open_published(tmp_path))
    model = cases.stack(found, config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    case = dataclasses.replace(cases.load(name), config=config, params=shapes)
    params = load(case, tmp_path)
    convert.save(name, config, params, tmp_path / "out", max_file_bytes=8_000)

    assert found == name
    assert config.param_dtype == dtype
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    written = open_published(tmp_path / "out")
    again = {key: tensor.read() for key, tensor in written.tensors.items()}
    assert again.keys() == weights.keys() == index["weight_map"].keys()
    for key, value in weights.items():
        assert again[key].dtype == value.dtype
        assert again[key].tobytes() == value.tobytes()
    assert convert.read_config(written) == (name, config)


def test_small_checkpoint_is_one_file(tmp_path):
    case = cases.load("vit")
    convert.save("vit", case.config, case.params, tmp_path / "new")
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_each_device_reads_its_part_in_the_order_of_the_layout(directories):
    case = cases.load("gpt2")
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "tensor")
    )
    order = (3, 1, -1, 0, 2, -1)

    def sharding(path, leaf):
        if stacked.path_of(path) == "blocks/*/mlp/up/kernel":
            return NamedSharding(mesh, P("stage", None, "tensor"))
        return NamedSharding(mesh, P())

    shapes = jax.tree.map_with_path(
        lambda path, leaf: (
            jax.ShapeDtypeStruct((6, *leaf.shape[1:]), leaf.dtype)
            if stacked.path_of(path).startswith("blocks/")
            else leaf
        ),
        case.params,
    )
    wide = dataclasses.replace(case, params=shapes)
    params = load(
        case, directories["gpt2"], abstract=abstract(wide, sharding), layer_order=order
    )

    kernel = params["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 16, 16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["blocks"]):
        expected = np.asarray(
            dict(jax.tree_util.tree_leaves_with_path(case.params["blocks"]))[path]
        )
        for place, layer in enumerate(order):
            wanted = expected[layer] if layer >= 0 else 0 * expected[0]
            np.testing.assert_array_equal(leaf[place], wanted)


def test_padding_of_the_vocabulary_is_zero_and_is_not_written_back(directories):
    case = cases.load("gpt2")
    table = load(case, directories["gpt2"])["token"]["embedding"]
    assert table.shape == (96, 16)
    assert (table[90:] == 0).all()


def test_file_without_heads_or_with_old_names_is_the_same_model(directories, tmp_path):
    case = cases.load("bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in load_file(directories["bert"] / "model.safetensors").items()
    }
    bare = {
        name.removeprefix("bert."): value
        for name, value in old.items()
        if name.startswith("bert.")
    }
    bare["embeddings.position_ids"] = np.arange(12)[None]
    shutil.copy(directories["bert"] / "config.json", tmp_path)
    save_file(bare, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match="7 missing:\n    cls.predictions.transform"):
        load(case, tmp_path)
    initial = jax.tree.map(jnp.zeros_like, case.params)
    params = load(case, tmp_path, initial=initial)

    assert (params["masked_lm"]["transform"]["kernel"] == 0).all()
    for part in ("blocks", "embeddings", "pooler"):
        jax.tree.map(np.testing.assert_array_equal, params[part], case.params[part])


def test_everything_that_does_not_fit_is_named_at_once(directory):
    change(
        directory,
        transformer__ln_f__bias=None,
        transformer__h__2__mlp__c_fc__bias=None,
        transformer__extra=np.zeros(3, np.float32),
        transformer__wpe__weight=np.zeros((11, 16), np.float32),
    )
    with pytest.raises(ValueError, match="does not fit this gpt2") as error:
        load(cases.load("gpt2"), directory)
    message = str(error.value)
    assert (
        "2 missing:\n    transformer.h.2.mlp.c_fc.bias\n    transformer.ln_f.bias"
        in (message)
    )
    assert "1 unexpected:\n    transformer.extra" in message
    assert (
        "transformer.wpe.weight has shape (11, 16), but the model needs (12, 16)."
        in message
    )


def test_what_is_unexpected_may_be_allowed_but_not_another_shape(directory):
    case = cases.load("gpt2")
    change(directory, transformer__extra=np.zeros(3, np.float32))
    params = load(case, directory, allow_unexpected=True)
    jax.tree.map(np.testing.assert_array_equal, params, case.params)
    change(directory, transformer__ln_f__bias=np.zeros(3, np.float32))
    initial = jax.tree.map(jnp.zeros_like, case.params)
    with pytest.raises(ValueError, match="transformer.ln_f.bias has shape \\(3,\\)"):
        load(case, directory, initial=initial, allow_unexpected=True)


def test_tensors_of_two_dtypes_are_an_error(directory):
    change(directory, transformer__ln_f__bias=np.zeros(16, np.float16))
    with pytest.raises(ValueError, match="are of float16, float32. Use a checkpoint"):
        convert.read_config(open_published(directory))


def remove(name):
    return lambda directory: (directory / name).unlink()


def write(name, text):
    return lambda directory: (directory / name).write_text(text)


def rename_weights(directory):
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({}, directory / "model-2.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), FileNotFoundError, "holds no config.json"),
        (write("config.json", "{"), ValueError, "config.json' is not JSON"),
        (write("config.json", "[]"), ValueError, "is not a JSON object"),
        (remove("model.safetensors"), FileNotFoundError, "holds no weights: none of"),
        (write("model.safetensors", "x" * 99), ValueError, "is damaged: "),
        (rename_weights, FileNotFoundError, "are not there: model-1.safetensors."),
    ],
)
def test_directory_that_cannot_be_read_is_an_error(damage, error, message, directory):
    damage(directory)
    with pytest.raises(error, match=message):
        open_published(directory)


def test_directory_with_something_in_it_is_not_written_to(directory):
    case = cases.load("gpt2")
    with pytest.raises(FileExistsError, match="is not empty. Name a new directory"):
        convert.save("gpt2", case.config, case.params, directory)


def test_every_table_has_an_entry_for_each_parameter():
    assert PUBLISHED.keys() == set(FAMILIES)
    for name in FAMILIES:
        case = cases.load(name)
        leaves = jax.tree_util.tree_leaves_with_path(case.params)
        assert {stacked.path_of(path) for path, _ in leaves} == case.table.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_is_written_and_torch_files_are_read(name, tmp_path):
    torch = pytest.importorskip("torch", reason="the comparison runs PyTorch")
    transformers = pytest.importorskip("transformers", reason="it loads the result")
    case = cases.load(name)
    convert.save(name, case.config, case.params, tmp_path / "hf")

    architecture = json.loads((tmp_path / "hf" / "config.json").read_text())[
        "architectures"
    ][0]
    model, info = getattr(transformers, architecture).from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    num_labels = {"vit": 7, "bert_classifier": 7, "bert_tagger": 3}
    assert model.config.num_labels == num_labels.get(name, 2)
    shutil.copytree(tmp_path / "hf", tmp_path / "torch")
    tensors = load_file(tmp_path / "torch" / "model.safetensors")
    (tmp_path / "torch" / "model.safetensors").unlink()
    torch.save(
        {key: torch.tensor(value).bfloat16() for key, value in tensors.items()},
        tmp_path / "torch" / "pytorch_model.bin",
    )
    files = open_published(tmp_path / "torch")
    assert convert.read_config(files)[1].param_dtype == "bfloat16"
    for key, tensor in files.tensors.items():
        expected = tensors[key].astype(jnp.bfloat16)
        assert tensor.shape == expected.shape
        np.testing.assert_array_equal(tensor.read(), expected)
