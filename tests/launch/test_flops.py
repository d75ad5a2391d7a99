import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from launch import flops
from models import bert, vocabulary_loss

# Wide enough for the matrix products to outweigh the rest, which we do not count.
CONFIGS = {
    "short": (dict(num_layers=2, model_dim=256, num_heads=4, mlp_dim=1024), 64, 10),
    "long": (dict(num_layers=1, model_dim=256, num_heads=2, mlp_dim=512), 512, 76),
    "wide": (dict(num_layers=1, model_dim=512, num_heads=8, mlp_dim=2048), 128, 20),
}
NUM_SAMPLES = 2


def make(name):
    sizes, length, num_predicted = CONFIGS[name]
    # XLA counts the body of a loop once: no loop over chunks of the loss.
    config = bert.BertConfig(
        vocab_size=8000, max_len=length, loss_chunk_size=None, **sizes
    )
    i32, f32 = jnp.int32, jnp.float32
    shapes = {
        "tokens": ((length,), i32),
        "segments": ((length,), i32),
        "is_token": ((length,), jnp.bool_),
        "positions": ((num_predicted,), i32),
        "targets": ((num_predicted,), i32),
        "weights": ((num_predicted,), f32),
        "is_random_next": ((), i32),
        "sample_weights": ((), f32),
    }
    batch = {
        key: jax.ShapeDtypeStruct((NUM_SAMPLES, *shape), dtype)
        for key, (shape, dtype) in shapes.items()
    }
    return config, batch, {"seq_length": length, "num_predicted": num_predicted}


def compiled_flops(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def loss_and_params(config):
    abstract = nnx.eval_shape(lambda: bert.Bert(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(abstract)

    def loss(params, batch):
        model = nnx.merge(graph, params)
        losses = model.losses(model.encode(batch), batch)
        return losses["mlm_loss"] + losses["nsp_loss"]

    return loss, params


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_flops_are_those_xla_counts(name):
    config, batch, lengths = make(name)
    loss, params = loss_and_params(config)
    expected = NUM_SAMPLES * flops.bert_forward_flops(config, **lengths)
    assert expected < compiled_flops(loss, params, batch) < 1.05 * expected


def test_training_takes_three_times_the_forward_pass(monkeypatch):
    # Nor over columns of the table's gradient.
    monkeypatch.setattr(vocabulary_loss, "COLUMNS", 512)
    config, batch, lengths = make("wide")
    loss, params = loss_and_params(config)
    expected = flops.bert_train_flops(config, num_samples=NUM_SAMPLES, **lengths)
    assert expected < compiled_flops(jax.grad(loss), params, batch) < 1.02 * expected


def test_pad_rows_of_the_vocabulary_count_as_computed():
    config, _, lengths = make("short")
    padded = dataclasses.replace(config, vocab_size=config.padded_vocab_size)
    assert config.vocab_size != config.padded_vocab_size
    assert flops.bert_forward_flops(config, **lengths) == flops.bert_forward_flops(
        padded, **lengths
    )


def test_published_sizes():
    # The usual rule of thumb: 6 * parameters * tokens, to which attention is added.
    for name, num_params in {"base": 110e6, "large": 340e6}.items():
        counted = flops.bert_train_flops(
            bert.SIZES[name], seq_length=512, num_predicted=512, num_samples=1
        )
        assert counted == pytest.approx(6 * num_params * 512, rel=0.1)
