import functools

import jax
import jax.numpy as jnp
import pytest

from models import bert, gpt2, remat, stacked
from sbp.pipeline.splitting import Split
from tests.models import cases
from tests.models.cases import LAYOUT_TOLERANCE, assert_close

CASE = cases.with_config(
    cases.load("gpt2"), dropout_rate=0.1, attention_dropout_rate=0.1
)


PRODUCTS = {"qkv": "save", "mlp_up": "save", "attention_out": "recompute"}


@functools.cache
def compiled_gradients(policy):
    """Returns the compiled gradient of a model with dropout."""
    policy = PRODUCTS if policy == "products" else policy

    def loss(params, keys_B):
        change = functools.partial(remat.with_remat, policy=policy)
        return cases.stacked_objective(CASE, params, keys_B, change)[0]

    keys_B = jax.random.split(jax.random.key(0), 4)
    return jax.jit(jax.value_and_grad(loss)).lower(CASE.params, keys_B).compile()


@pytest.mark.parametrize("policy", ["selective", "full", "products"])
def test_loss_and_gradients_are_those_of_keeping_everything(policy):
    arguments = CASE.params, jax.random.split(jax.random.key(1), 4)
    actual = compiled_gradients(policy)(*arguments)
    assert_close(actual, compiled_gradients("none")(*arguments), LAYOUT_TOLERANCE)


def test_what_is_computed_again_is_not_kept():
    sizes = [
        compiled_gradients(policy).memory_analysis().temp_size_in_bytes
        for policy in ("full", "products", "selective", "none")
    ]
    assert sizes == sorted(set(sizes)), "bytes of full, products, selective, none"


def bytes_kept(model_class, config, policy, *, size, length):
    """What the backward pass of a layer is handed, besides its weights."""
    model = stacked.stack(lambda rngs: model_class(config, rngs=rngs))
    block = remat.with_remat(model.block, policy)

    def forward(given, x):
        weights, context = given
        y, vjp = jax.vjp(lambda w, x: block(w, x, context, jnp.int32(0)), weights, x)
        return y, jax.tree.leaves(vjp)

    def kept(weights, x):
        batch = {
            "tokens": jnp.zeros((size, length), int),
            "is_token": jnp.ones((size, length), bool),
        }
        keys_B = jax.random.split(jax.random.key(0), size)
        given = weights, model.context(batch, keys_B)
        return Split(forward).first(given, x)[1]

    x = jax.ShapeDtypeStruct((size, length, config.model_dim), config.dtype)
    leaves = jax.eval_shape(kept, model.block_shapes, x)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(bert.Bert, bert.BertConfig), (gpt2.Gpt2, gpt2.Gpt2Config)],
    ids=["bert", "gpt2"],
)
def test_selective_keeps_what_the_formula_says(model_class, config_class):
    config = config_class(
        model_dim=64,
        num_heads=4,
        mlp_dim=256,
        dtype="bfloat16",
        attention="plain",
        dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )
    size, length = 2, 48
    kept = {
        policy: bytes_kept(model_class, config, policy, size=size, length=length)
        for policy in remat.POLICIES
    }
    per_dim = size * length * config.model_dim
    # arXiv:2205.05198, equation 2 without the core, whose part is 5 a s / h.
    assert kept["selective"] == 34 * per_dim
    assert kept["full"] == 2 * per_dim
    core = 5 * config.num_heads * length / config.model_dim
    assert kept["none"] > (34 + core) * per_dim


def test_a_tensor_is_kept_by_name():
    config = gpt2.Gpt2Config(model_dim=16, num_heads=2, mlp_dim=64, attention="plain")

    def floats(policy):
        num_bytes = bytes_kept(gpt2.Gpt2, config, policy, size=2, length=4)
        return num_bytes / (2 * 4 * 16 * 4)

    assert floats({}) == floats("full") == 1
    assert floats({"mlp_up": "save"}) == 1 + 4
    assert floats({"qkv": "save", "mlp_up": "recompute"}) == 1 + 3


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            "all",
            "remat='all' is not one of 'none', 'selective', 'full', or an action by"
            " name such as {'qkv': 'save'}.",
        ),
        (
            {"mlp_upp": "save"},
            "remat['mlp_upp']: no tensor of a block has this name. Did you mean"
            " 'mlp_up'?",
        ),
        (
            {"q": "save"},
            "remat['q']: no tensor of a block has this name. Known: attention_norm,"
            " qkv, attention_values, attention_lse, attention_out, mlp_norm, mlp_up,"
            " mlp_activation, mlp_down, dropout_mask.",
        ),
        (
            {"qkv": "keep"},
            "remat['qkv']='keep' is not one of 'save', 'offload', 'recompute'.",
        ),
    ],
)
def test_a_broken_policy_says_what_there_is(policy, expected):
    assert list(remat.broken_rules(policy)) == [expected]
