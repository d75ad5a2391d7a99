# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A column- and row-parallel MLP, by hand
#
# Two matrix products with something nonlinear between them: how should the weights be
# cut, so that the devices talk least? We find the answer of Megatron-LM
# (arXiv:1909.08053) step by step, then let `sbp.jit` do the steps, and train. It takes
# fifteen minutes, and needs the words of `01_signatures.py`.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # virtual ones, instead of GPUs
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp import broadcast, split

placement = sbp.placement("cpu", [[0, 1], [2, 3]], axis_names=("data", "tensor"))
rng = np.random.default_rng(0)
x = rng.normal(size=(8, 16)).astype(np.float32)
up = rng.normal(size=(16, 64)).astype(np.float32) / 4
down = rng.normal(size=(64, 16)).astype(np.float32) / 8

# %% [markdown]
# ## One product
#
# Operators on global tensors deduce the signature of their result. Along one axis, a
# product of matrices can be computed in pieces in three ways, and passes a partial sum
# of one operand on:
#
# | `x` | `w` | `x @ w` | |
# | --- | --- | --- | --- |
# | `split(0)` | `broadcast` | `split(0)` | each device has some rows of `x` |
# | `broadcast` | `split(1)` | `split(1)` | each has some columns of `w` |
# | `split(1)` | `split(0)` | `partial_sum` | each has some terms of the sum |
# | `partial_sum` | `broadcast` | `partial_sum` | |
#
# The rows of the batch are cut along `data`, which is the first line. Along `tensor`
# we cut the columns of the first weight, which is the second.

# %%
x_global = sbp.to_global(x, placement, {"data": split(0)})
up_global = sbp.to_global(up, placement, {"tensor": split(1)})

hidden = sbp.gelu(sbp.matmul(x_global, up_global))
print(jax.typeof(hidden))

# %% [markdown]
# `[8@data,64@tensor]`: the rows are cut along `data` and the columns along `tensor`.
# Nothing was communicated, and `gelu` works on each element, so it does not mind.
#
# Now `hidden` is cut by columns, which is the third line of the table, if we cut the
# *rows* of the second weight.

# %%
down_global = sbp.to_global(down, placement, {"tensor": split(0)})

terms = sbp.matmul(hidden, down_global)
print(jax.typeof(terms))

# %% [markdown]
# `{U:tensor}` is JAX's way to write `partial_sum`: "unreduced". Each device holds a
# term of the sum. Still nothing was communicated. It has to be once, for the next layer
# will need the values:

# %%
wanted = (split(0), broadcast)
print(sbp.plan(sbp.signature_of(terms), wanted, terms.shape, terms.dtype, placement))
y = sbp.to_global(terms, sbp=wanted)
print(jax.typeof(y))

dense = np.asarray(jax.nn.gelu(x @ up)) @ down
print("as on one device:", np.allclose(y, dense, atol=1e-4))

# %% [markdown]
# ## What the other choices cost
#
# The rule for every operation is the same: if the operands fit a line of its table, it
# is computed at once. If not, the cheapest line is taken, and operands are converted.
# `sbp.explain` says what that would be, without computing anything. Here both weights
# are cut by columns.


# %%
def mlp(x, up, down):
    hidden = jax.nn.gelu(x @ up)
    return hidden @ down


columns = sbp.to_global(down, placement, {"tensor": split(1)})
print(sbp.explain(mlp, x_global, up_global, columns).communicating())

# %% [markdown]
# The first product leaves its columns cut, and the second needs its rows of terms
# whole, so that something larger than the result has to be moved. With rows in the
# second weight it is the one all-reduce from above:

# %%
explained = sbp.explain(mlp, x_global, up_global, down_global)
print(explained.communicating())
print(explained.collectives)

# %% [markdown]
# ## The whole function at once
#
# `mlp` above is written for plain arrays, and knows nothing of devices. `sbp.jit`
# walks through its operations, deduces all signatures, and compiles one program that
# communicates just what `explain` lists.

# %%
fast_mlp = sbp.jit(mlp)
print(jax.typeof(fast_mlp(x_global, up_global, down_global)))

compiled = fast_mlp.lower(x_global, up_global, down_global).compile().as_text()
print("all-reduces in the compiled program:", compiled.count(" all-reduce("))

# %% [markdown]
# The result was added up, since a program's results should be complete. Ask for another
# signature, and the program ends with another collective: a split of a sum is a
# reduce-scatter, half as much.

# %%
scattered = sbp.jit(mlp, out_sbp={"data": split(0), "tensor": split(1)})
print(sbp.explain(scattered, x_global, up_global, down_global).communicating())

# %% [markdown]
# ## Gradients
#
# The gradient of a split weight is split the same way. The gradient of a weight that is
# broadcast along `data`, where every device saw other samples, is a sum over `data`.
# Deduction finds all that, as the derivative is a function like any other.


# %%
def loss(params, x, target):
    return jnp.mean((mlp(x, *params) - target) ** 2)


target = sbp.to_global(np.tanh(x), placement, {"data": split(0)})
step = sbp.jit(jax.value_and_grad(loss))
value, grads = step((up_global, down_global), x_global, target)
print("gradients:", *map(jax.typeof, grads))

explained = sbp.explain(step, (up_global, down_global), x_global, target)
print(explained.communicating())

# %% [markdown]
# Along `tensor` there is one all-reduce, that of the forward pass: `x` needs no
# gradient, or it would be two. Along `data` there is one for each weight, and a small
# one for the loss.
#
# Partial sums are not added up where they arise, but where it is cheapest on their way
# to an operation that needs the value: the program looks for the *minimum cut* between
# the two.
#
# ## Training
#
# What is left is gradient descent.


# %%
def update(params, grads):
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)


descend = sbp.jit(update)
params = (up_global, down_global)
losses = []
for _ in range(30):
    value, grads = step(params, x_global, target)
    params = descend(params, grads)
    losses.append(float(value))
print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
print("weights:", *map(jax.typeof, params))

# %% [markdown]
# ## In one paragraph
#
# Cut the first weight by columns (`split(1)`) and the second by rows (`split(0)`). What
# is between them stays cut, and their product is a `partial_sum`, which costs one
# all-reduce forward, and one backward. Say it by placing the weights, once; the
# functions stay as they are.
#
# Next: `04_explain_block.py`, the same for a whole transformer block.
