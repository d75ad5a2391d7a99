# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A module that lies on four devices
#
# A parameter may be cut like any other tensor. Here a small Flax module holds a (16, 8)
# tensor of noise, of which each of four devices has a (8, 4) corner, and adds it to its
# input. This page is also a script, and it runs in two ways:
#
#     python docs/tutorials/05_noise.py
#     python -m launch.run --nproc 4 docs/tutorials/05_noise.py
#
# First as one process with four devices, as in this notebook; then as four processes
# with one device each, as on a machine with four GPUs. The program is the same.

# %%
import os

# Virtual devices, for a machine without GPUs. A launcher has set its own number.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from flax import nnx

import sbp

sbp.init()  # joins the processes, if there are several

# %% [markdown]
# The placement says where: four devices in two rows of two. The signature says how: dim
# 0 is cut along the first axis of the placement, dim 1 along the second.

# %%
placement = sbp.placement("cpu", ranks=[[0, 1], [2, 3]], axis_names=("data", "tensor"))
signature = (sbp.split(0), sbp.split(1))


# %% [markdown]
# The module is the one you would write for a single device. Only the line that makes
# the tensor says that it lies on several.


# %%
class Noise(nnx.Module):
    """Adds a fixed tensor of noise to its input."""

    def __init__(self, shape: tuple[int, ...], *, seed: int):
        noise = sbp.randn(shape, placement=placement, sbp=signature, seed=seed)
        self.noise = nnx.Param(noise)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns ``x`` plus the noise; shape and signature stay."""
        return x + self.noise[...]


# %% [markdown]
# An input of the same layout meets the noise without any communication: each device
# adds its two corners.

# %%
model = Noise((16, 8), seed=0)
x = sbp.zeros((16, 8), placement=placement, sbp=signature)
y = model(x)
print(jax.typeof(y))

# %% [markdown]
# Each process sees the whole tensor's shape, signature and placement, and the pieces of
# its own devices. In the notebook these are all four; under the launcher each rank
# prints one line.

# %%
for rank, piece in sbp.to_local(y).items():
    print(
        f"rank {rank}: global shape {y.shape}, sbp {sbp.signature_of(y)},"
        f" placement {sbp.placement_of(y)}, local shape {piece.shape}"
    )

# %% [markdown]
# The noise does not depend on the layout: cut otherwise, or on one device, it is the
# same sixteen rows.

# %%
same = sbp.randn(
    (16, 8), placement=placement, sbp=(sbp.broadcast, sbp.split(0)), seed=0
)
print("largest difference:", abs(sbp.full_value(y) - sbp.full_value(same)).max())
