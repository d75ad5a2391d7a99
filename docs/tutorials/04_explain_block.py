# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Explain a transformer block
#
# A block of BERT is a hundred operations. Which of them communicate, depends on how its
# parameters are cut. This page lets `sbp.explain` answer that for the layout of
# Megatron-LM, then for others, without a single number being computed. It takes ten
# minutes, and needs `03_parallel_mlp.py`.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # virtual ones, instead of GPUs
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sbp
from models import layers
from models.block import Block
from models.sharding import BLOCK, match_rows
from sbp import split
from sbp.spec import to_sharding

placement = sbp.placement("cpu", [[0, 1], [2, 3]], axis_names=("data", "tensor"))

# %% [markdown]
# ## A block, as written for one device
#
# `models.block.Block` is plain Flax: attention and an MLP, each with its residual sum
# and norm. Here it has the sizes of BERT-large. `eval_shape` makes the shapes of its
# parameters without the parameters, and `block` is a function of them.

# %%
config = layers.BlockConfig(num_heads=16, model_dim=1024, mlp_dim=4096)
graph, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
shapes = {path: param.get_value() for path, param in nnx.to_flat_state(state)}


def block(params, x):
    flat = [(path, nnx.Param(value)) for path, value in params.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))(x, None, None, layer=0)


for path, value in shapes.items():
    print(f"{'/'.join(path):<28}{value.shape}")

# %% [markdown]
# ## Megatron's table
#
# `models.sharding` says how each parameter is cut along `tensor`. What it does not
# mention is broadcast. In attention the heads are cut: a device computes some heads,
# from beginning to end. In the MLP it is as in the last tutorial, columns and then
# rows.

# %%
names = {path: "blocks/0/" + "/".join(path) for path in shapes}
rows = match_rows(BLOCK, list(names.values()))
table = {path: rows[name] for path, name in names.items()}
for path, row in table.items():
    print(f"{'/'.join(path):<28}{row}")

# %% [markdown]
# ## Explain it
#
# `sbp.explain` takes global tensors, or shapes that stand for them: nothing has to fit
# into any memory. `to_sharding` makes the second half of such a shape.


# %%
def stand_in(shape, row):
    sharding = to_sharding(placement, row)
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def stand_ins(table):
    return {path: stand_in(value.shape, table[path]) for path, value in shapes.items()}


def batch(num_samples):
    return stand_in((num_samples, 512, 1024), {"data": split(0)})


explained = sbp.explain(block, stand_ins(table), batch(8))
print(explained)

# %% [markdown]
# Each line is an operation: where it stands in the program, the signatures of its
# operands, the type of its result, and what was communicated for it. Follow the heads
# (`16@tensor`) through attention: nothing is needed for the scores nor for the softmax,
# because each head is whole on one device. The product that maps back to the model's
# width sums over heads, so its result is a partial sum, `{U:tensor}`. Bias and residual
# are added to it as they are: adding is linear. Only the norm needs the values.
#
# So there are two collectives, one for each half of the block:

# %%
print(explained.communicating())
assert explained.collectives == {"all-reduce": 2}

# %% [markdown]
# Backward there are two more. The gradient of a norm is linear in what comes in, so
# that a partial sum *could* travel on through it; but then the gradients of scale and
# shift would have to be added up on their own. The program takes the cheaper place.


# %%
def loss(params, x):
    return jnp.mean(block(params, x) ** 2)


gradient = sbp.explain(jax.grad(loss, argnums=(0, 1)), stand_ins(table), batch(8))
for record in gradient.communicating():
    for collective in record.collectives:
        print(f"{collective!s:<24}{collective.num_bytes:>11,} bytes  {record.types[0]}")
over_tensor = [r for r in gradient for c in r.collectives if c.axes == ("tensor",)]
assert len(over_tensor) == 4

# %% [markdown]
# Those over `tensor` are four: two forward, two backward. The rest are the gradients of
# the parameters, summed over `data`.
#
# ## Other tables
#
# What if a row of the table is wrong? Here the second weight of the MLP is cut by
# columns, like the first.

# %%
wrong = {**table, ("mlp", "down", "kernel"): {"tensor": split(1)}}
explained = sbp.explain(block, stand_ins(wrong), batch(8))
print(explained.communicating())

# %% [markdown]
# The block still computes the right thing, and the list shows what the mistake costs.
#
# Or cut every parameter along `data`, by its largest dim, and nothing along `tensor`.
# That is how fully sharded data parallelism stores them.


# %%
def largest_dim(shape):
    return max(range(len(shape)), key=lambda dim: shape[dim])


sharded = {
    path: {"data": split(largest_dim(value.shape))} for path, value in shapes.items()
}
explained = sbp.explain(block, stand_ins(sharded), batch(8))
print(explained.collectives, f"{explained.num_bytes:,} bytes")

# %% [markdown]
# Each parameter is gathered before it is used. That grows with the model, while the
# all-reduces of Megatron's table grow with the batch. Which is less, is a question of
# sizes, and `explain` answers it in milliseconds. (With two samples, it is less to move
# some activations to the large weights than the weights to them; so that is done.)

# %%
print(f"{'samples':>8}{'Megatron':>16}{'fully sharded':>16}")
for num_samples in (2, 8, 32):
    costs = [
        sbp.explain(block, stand_ins(choice), batch(num_samples)).num_bytes
        for choice in (table, sharded)
    ]
    print(f"{num_samples:>8}{costs[0]:>16,}{costs[1]:>16,}")

# %% [markdown]
# ## What you get is what was explained
#
# The list is not an estimate. `sbp.jit` runs the very program that was explained, as
# the compiled text shows. For that we need numbers, and a smaller block.

# %%
small = layers.BlockConfig(num_heads=4, model_dim=64, mlp_dim=256)
graph, state = nnx.split(Block(small, rngs=nnx.Rngs(0)))
params = {path: param[...] for path, param in nnx.to_flat_state(state)}
placed = {
    path: sbp.to_global(value, placement, table[path]) for path, value in params.items()
}
x = np.random.default_rng(0).normal(size=(8, 16, 64)).astype(np.float32)
x_global = sbp.to_global(x, placement, {"data": split(0)})

fast_block = sbp.jit(block)
y = fast_block(placed, x_global)
text = fast_block.lower(placed, x_global).compile().as_text()
print(jax.typeof(y), "with", text.count(" all-reduce("), "all-reduces")
print("as on one device:", np.allclose(y, block(params, x), atol=1e-4))

# %% [markdown]
# ## In one paragraph
#
# Write the model for one device, cut its parameters by a table, and read what that
# means. `sbp.explain(function, *shapes)` lists each operation with its line, its
# signatures, its collective and the bytes; `.communicating()` leaves those that
# communicate; `.collectives` and `.num_bytes` are the totals; `.to_dicts()` is for a
# data frame.
