# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Signatures and placements
#
# A model that is too large for one device is cut, and its pieces lie on many. The usual
# way is to write a program for the pieces. Here you write it for the whole: a *global
# tensor* has one shape and one value, and says where its pieces are. This page takes
# ten minutes, and any laptop.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # virtual ones, instead of GPUs
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import sbp
from sbp import broadcast, partial_sum, split

print(jax.device_count(), "devices")

# %% [markdown]
# ## Where: the placement
#
# Devices have ranks, counted from 0. A placement arranges some of them, in a row or, as
# here, in a table. Its sides have names, which we choose: `data` goes down, `tensor`
# goes to the right.

# %%
placement = sbp.placement("cpu", ranks=[[0, 1], [2, 3]], axis_names=("data", "tensor"))
print(placement)

# %% [markdown]
# ## How: the signature
#
# Now a tensor of 16 rows and 8 columns. Its signature has one component for each side
# of the table: down, dim 0 is cut; to the right, dim 1 is cut.

# %%
value = np.arange(128, dtype=np.float32).reshape(16, 8)
x = sbp.to_global(value, placement, (split(0), split(1)))
print(x.shape)

# %% [markdown]
# Its shape is that of the whole. Which device holds which part of it?

# %%
print(sbp.show(x))

# %% [markdown]
# Each of the four devices has a quarter, of 8 rows and 4 columns. That was the form for
# a terminal. As the last line of a notebook cell, `sbp.show` draws.

# %%
sbp.show(x)

# %% [markdown]
# ## The three components
#
# There are only three. Down is `split(0)` in all of these, to the right is another one
# each time.
#
# `broadcast`: the devices of a row hold the same, and their ranks stand side by side.

# %%
sbp.show(sbp.to_global(value, placement, (split(0), broadcast)))

# %% [markdown]
# `split(0)` once more: dim 0 is cut twice, first down, then to the right.

# %%
sbp.show(sbp.to_global(value, placement, (split(0), split(0))))

# %% [markdown]
# `partial_sum`: the devices of a row hold terms, and the value is their sum. Their
# ranks are joined by a plus sign.

# %%
sbp.show(sbp.to_global(value, placement, (split(0), partial_sum)))

# %% [markdown]
# Where does a partial sum come from? From a matrix product, for example, whose inner
# dim is cut: each device multiplies what it has, and the products are terms of the
# result. Nobody has communicated so far. Whether the terms are ever added up, and into
# what, is a choice, and half of the art of large models.

# %%
a = sbp.to_global(np.ones((4, 8), np.float32), placement, (broadcast, split(1)))
b = sbp.to_global(np.ones((8, 2), np.float32), placement, (broadcast, split(0)))
c = sbp.matmul(a, b)
print(jax.typeof(a), "@", jax.typeof(b), "=", jax.typeof(c))

for rank, term in sbp.to_local(c).items():
    print(f"rank {rank} holds {term[0, 0]}")
print("the value is", sbp.full_value(c)[0, 0])

# %% [markdown]
# ## The type says it all
#
# A global tensor is an ordinary `jax.Array`, and its type shows the signature: `8@data`
# is a dim of size 8 that is cut along `data`, `{U:tensor}` stands for a sum along
# `tensor` that is not made yet. Sizes are those of the whole.

# %%
for text in ("S(0), S(1)", "S(0), B", "B, S(0)", "S(0), S(0)", "S(0), P", "B, B"):
    y = sbp.to_global(value, placement, sbp.parse(text))
    print(f"{text:<12}", jax.typeof(y))

# %% [markdown]
# JAX's own functions work on such tensors and carry the signature on.

# %%
y = jax.numpy.tanh(x.T * 2)
print(jax.typeof(x), "becomes", jax.typeof(y))

# %% [markdown]
# ## From one to another
#
# `sbp.to_global` also changes signatures. It moves what has to be moved, and nothing
# else; `02_boxing.py` is about what that costs.

# %%
y = sbp.to_global(x, sbp=(broadcast, split(1)))
print(jax.typeof(x), "->", jax.typeof(y))
print("the same value:", np.array_equal(sbp.full_value(x), sbp.full_value(y)))

# %% [markdown]
# ## The order of the ranks
#
# A placement takes the ranks as you give them. Here they are turned around, and so are
# the pieces: rank 3 has the first.

# %%
turned = sbp.placement("cpu", ranks=[[3, 2], [1, 0]], axis_names=("data", "tensor"))
sbp.show(sbp.to_global(value, turned, (split(0), split(1))))

# %% [markdown]
# ## Tensors that are made in place
#
# A large tensor need not exist in one place first. Each device makes its piece, and
# random numbers do not depend on how they are cut.

# %%
noise = sbp.randn((16, 8), seed=0, placement=placement, sbp=(split(0), split(1)))
again = sbp.randn((16, 8), seed=0, placement=turned, sbp=(broadcast, split(0)))
print("equal:", np.array_equal(sbp.full_value(noise), sbp.full_value(again)))

# %% [markdown]
# ## When it does not fit
#
# What cannot be is said at once, with the reason and a way out.

# %%
mistakes = {
    "one component for two axes": lambda: sbp.to_global(x, sbp=split(0)),
    "a dim that is not there": lambda: sbp.to_global(x, sbp=(split(2), broadcast)),
    "7 rows for 2 devices": lambda: sbp.zeros(
        (7, 8), placement=placement, sbp=(split(0), broadcast)
    ),
    "a rank twice": lambda: sbp.placement("cpu", ranks=[0, 0]),
}
for name, call in mistakes.items():
    try:
        call()
    except ValueError as error:
        print(f"{name}:\n  {error}\n")

# %% [markdown]
# ## What to take along
#
# - A **placement** says where: devices, arranged along named axes.
# - A **signature** says how: `split(dim)`, `broadcast` or `partial_sum` for each axis.
# - `sbp.to_global` changes both. `sbp.show`, `jax.typeof`, `sbp.to_local` and
#   `sbp.full_value` look at the result.
#
# Next: `02_boxing.py`, what a change of signature costs.
