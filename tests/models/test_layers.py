import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import layers
from models.attention import Attention
from models.block import Block
from models.layers import BlockConfig
from models.vocabulary import Vocabulary

CONFIG = BlockConfig(model_dim=8, num_heads=2, mlp_dim=16, num_layers=3)


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(0), 64)


def create(module, *args, **kwargs):
    """Returns the module, its weights made by one program."""

    def build():
        return module(*args, **kwargs, rngs=nnx.Rngs(0))

    state = jax.jit(lambda: nnx.state(build()))()
    return nnx.merge(nnx.graphdef(nnx.eval_shape(build)), state)


def test_dropout_of_a_sample_depends_on_its_key_alone(keys):
    x = jnp.ones((64, 5, 8))
    both = layers.dropout(x, 0.5, keys)
    alone = layers.dropout(x[7:9], 0.5, keys[7:9])
    np.testing.assert_array_equal(both[7:9], alone)
    assert (both[7] != both[8]).any()


def test_dropout_zeroes_its_share_and_scales_the_rest(keys):
    y = np.asarray(layers.dropout(jnp.ones((64, 20, 20)), 0.25, keys))
    assert set(np.unique(y).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.01)


def test_dropout_without_keys_or_rate_returns_its_input(keys):
    x = jnp.ones((64, 3))
    assert layers.dropout(x, 0.5, None) is x
    assert layers.dropout(x, 0.0, keys) is x


def test_stochastic_depth_drops_whole_samples(keys):
    y = np.asarray(layers.stochastic_depth(jnp.ones((64, 4, 8)), 0.5, keys))
    per_sample = y.reshape(64, -1)
    assert (per_sample == per_sample[:, :1]).all()
    assert set(np.unique(y).tolist()) == {0.0, 2.0}
    assert 16 <= (per_sample[:, 0] == 0).sum() <= 48


def test_share_of_dropped_samples_grows_linearly_with_the_layer(keys):
    config = dataclasses.replace(
        CONFIG, stochastic_depth_rate=0.999, norm_position="pre"
    )
    assert [layers.depth_rate(config, layer) for layer in range(3)] == pytest.approx(
        [0, 0.4995, 0.999]
    )
    block = create(Block, config)
    x = jax.random.normal(jax.random.key(1), (64, 4, 8))
    run = jax.jit(lambda keys, layer: block(x, None, keys, layer))
    np.testing.assert_allclose(run(keys, 0), run(None, 0), atol=1e-6)
    is_skipped_B = np.asarray(run(keys, 2) == x).all((1, 2))
    assert is_skipped_B.mean() > 0.95


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_block_norms_before_each_half_or_after_each_sum(norm_position):
    config = dataclasses.replace(CONFIG, norm_position=norm_position)
    block = create(Block, config)
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))

    def expected(x):
        if norm_position == "pre":
            x = x + block.attention(block.attention_norm(x), None, None)
            return x + block.mlp(block.mlp_norm(x))
        x = block.attention_norm(x + block.attention(x, None, None))
        return block.mlp_norm(x + block.mlp(x))

    actual, wanted = jax.jit(lambda x: (block(x, None, None, 0), expected(x)))(x)
    np.testing.assert_allclose(actual, wanted, atol=1e-6)


def test_maps_into_the_residual_stream_of_a_pre_norm_model_start_smaller():
    def scale_of(norm_position):
        config = BlockConfig(norm_position=norm_position, num_layers=8)
        block = create(Block, config)
        return np.std(block.mlp.down.kernel), np.std(block.attention.out.kernel)

    assert scale_of("post") == pytest.approx([0.02, 0.02], rel=0.05)
    assert scale_of("pre") == pytest.approx([0.005, 0.005], rel=0.05)


def test_attention_is_the_weighted_mean_of_what_the_mask_shows():
    attention = create(Attention, CONFIG, out_scale=0.5)
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (2, 1, 4, 4))
    mask |= jnp.eye(4, dtype=bool)[None, None]
    actual = jax.jit(lambda x: attention(x, mask, None))(x)

    weights, bias = np.asarray(attention.qkv.kernel), np.asarray(attention.qkv.bias)
    out, shift = np.asarray(attention.out.kernel), np.asarray(attention.out.bias)
    for sample, query in np.ndindex(2, 4):
        total = shift.astype(np.float64)
        for head in range(2):
            q, k, v = (
                np.asarray(x[sample], np.float64) @ weights[:, part, head]
                + bias[part, head]
                for part in range(3)
            )
            seen = np.asarray(mask[sample, 0, query])
            scores = np.exp(k[seen] @ q[query] / 2)
            total = total + (scores / scores.sum()) @ v[seen] @ out[head]
        np.testing.assert_allclose(actual[sample, query], total, atol=1e-6)


def test_block_of_bfloat16_stays_near_the_one_of_float32():
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))
    block = create(Block, CONFIG)
    low = create(Block, dataclasses.replace(CONFIG, dtype="bfloat16"))
    exact, y = jax.jit(
        lambda x: (block(x, None, None, 0), low(x.astype(jnp.bfloat16), None, None, 0))
    )(x)
    assert y.dtype == jnp.bfloat16
    assert low.mlp.up.kernel.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.05)


def test_rows_of_the_vocabulary_past_its_tokens_take_no_probability():
    vocabulary = create(Vocabulary, 5, 8, CONFIG)
    h_BND = jax.random.normal(jax.random.key(1), (1, 2, 8))
    bias_V = jnp.full(8, 100.0)
    logits = vocabulary.logits(h_BND, bias_V)
    assert jax.nn.softmax(logits)[..., 5:].max() == 0
    np.testing.assert_allclose(
        logits[..., :5] - 100, vocabulary.logits(h_BND)[..., :5], atol=1e-4
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1."),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0 must be between 0 and 0.999."),
        (
            {"stochastic_depth_rate": -0.1},
            "stochastic_depth_rate=-0.1 must be between 0 and 0.999.",
        ),
        (
            {"norm_position": "both"},
            "norm_position='both' is not one of 'post', 'pre'.",
        ),
        ({"activation": "relu"}, "'relu' is not one of 'gelu', 'gelu_tanh'."),
        ({"dtype": "int8"}, "dtype='int8' is not one of 'float32', "),
        (
            {"num_heads": 3},
            "model_dim=8 is not divisible by num_heads=3. Use a number of heads",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_rule_of_a_block_gives_the_values(fields, rule):
    (sentence,) = dataclasses.replace(CONFIG, **fields).broken_rules()
    assert rule in sentence


def test_gradients_of_long_sums_are_whole_in_half_precision():
    # In bfloat16 a sum of ones stops at 256.
    config = BlockConfig(model_dim=4, dtype="bfloat16")
    table = Vocabulary(8, 8, config, rngs=nnx.Rngs(0))
    module = layers.linear(config, 4, rngs=nnx.Rngs(0))
    x_BLD = jnp.ones((2, 1024, 4), jnp.bfloat16)

    def of_table(table):
        embedded = table.embed(jnp.zeros((2, 1024), jnp.int32))
        return embedded.astype(jnp.float32).sum()

    def of_bias(module):
        return module(x_BLD).astype(jnp.float32).sum()

    embedding = nnx.grad(of_table)(table)["embedding"][...]
    bias = nnx.grad(of_bias)(module)["bias"][...]
    np.testing.assert_array_equal(embedding[0], np.full(4, 2048.0))
    np.testing.assert_array_equal(bias, np.full(4, 2048.0))


@pytest.mark.parametrize(("in_dims", "out_dims"), [(None, (3, 2)), ((2, 2), 5)])
def test_linear_map_of_several_dims_is_an_einsum(in_dims, out_dims):
    config = BlockConfig(model_dim=4)
    module = layers.linear(config, out_dims, in_dims=in_dims, rngs=nnx.Rngs(0))
    shape = (2, 3, *(in_dims or (4,)))
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    module.bias[...] = jnp.arange(module.bias.size, dtype=jnp.float32).reshape(
        module.bias.shape
    )

    found = module(x)

    letters = "ij"[: len(shape) - 2], "mn"[: module.bias.ndim]
    rule = f"bl{letters[0]},{letters[0]}{letters[1]}->bl{letters[1]}"
    wanted = np.einsum(rule, x, module.kernel[...]) + np.asarray(module.bias[...])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
