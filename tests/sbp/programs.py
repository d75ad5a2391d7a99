"""A transformer block under Megatron's table, and what programs communicate."""

import collections
import re

import jax
import numpy as np
from flax import nnx
from sharded import place

import sbp
from models import bert, layers, sharding
from models.block import Block
from sbp.spec import signature_by_axis

COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)

# Parameter -> component on the axis "tensor": columns first, then rows.
MEGATRON = {
    "attention/qkv/kernel": sbp.split(2),  # (D, 3, H, K)
    "attention/qkv/bias": sbp.split(1),  # (3, H, K)
    "attention/out/kernel": sbp.split(0),  # (H, K, D)
    "mlp/up/kernel": sbp.split(1),  # (D, F)
    "mlp/up/bias": sbp.split(0),  # (F,)
    "mlp/down/kernel": sbp.split(0),  # (F, D)
}


def compiled_collectives(lowered):
    """Returns how many collectives of each name the compiled program has."""
    return dict(collections.Counter(COLLECTIVE.findall(lowered.compile().as_text())))


def block(norm_position="post"):
    """Returns a block as a function, and its parameters as a dict of NumPy arrays."""
    config = layers.BlockConfig(
        num_layers=1,
        num_heads=4,
        model_dim=16,
        mlp_dim=32,
        norm_position=norm_position,
        init_scale=0.2,
    )
    graph, state = nnx.split(Block(config, rngs=nnx.Rngs(0)))
    params = {
        "/".join(map(str, path)): np.asarray(param[...])
        for path, param in nnx.to_flat_state(state)
    }

    def apply(params, x_BLD):
        flat = [(tuple(k.split("/")), nnx.Param(v)) for k, v in params.items()]
        return nnx.merge(graph, nnx.from_flat_state(flat))(x_BLD, None, None, layer=0)

    return apply, params


def place_block(params, placement):
    """Returns the parameters as global tensors, split as Megatron does."""
    names = placement.axis_names
    return {
        path: place(
            value,
            placement,
            signature_by_axis(
                {"tensor": MEGATRON[path]} if path in MEGATRON else {}, names
            ),
        )
        for path, value in params.items()
    }


def struct(shape, placement, signature, dtype=np.float32):
    """Returns what stands for a global tensor without being one."""
    spec = sbp.spec.to_partition_spec(signature, placement.axis_names)
    sharding = jax.sharding.NamedSharding(placement.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def bert_loss():
    """Returns BERT's loss as a function, its parameters, their rows and a batch."""
    config = bert.BertConfig(
        num_layers=1, num_heads=4, model_dim=16, mlp_dim=32, vocab_size=32, max_len=8
    )
    graph, state = nnx.split(bert.Bert(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(state)
    params = {path: np.asarray(param[...]) for path, param in flat}
    names = {path: "/".join(map(str, path)) for path in params}
    table = sharding.without_axis(sharding.bert_rows(config), "stage")
    rows = sharding.match_rows(table, list(names.values()))

    def loss(params, batch):
        flat = [(path, nnx.Param(value)) for path, value in params.items()]
        model = nnx.merge(graph, nnx.from_flat_state(flat))
        sums = model.losses(model.encode(batch), batch)
        counts = model.counts(batch)
        return sum(sums[k] / counts[k] for k in ("mlm_loss", "nsp_loss"))

    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 32, (4, 8)),
        "segments": rng.integers(0, 2, (4, 8)),
        "is_token": rng.random((4, 8)) < 0.9,
        "positions": rng.integers(0, 8, (4, 2)),
        "targets": rng.integers(0, 32, (4, 2)),
        "weights": np.ones((4, 2), np.float32),
        "is_random_next": rng.integers(0, 2, 4),
        "sample_weights": np.ones(4, np.float32),
    }
    batch = {k: v.astype(np.int32) if v.dtype == int else v for k, v in batch.items()}
    return loss, params, {path: rows[name] for path, name in names.items()}, batch
