# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What a change of signature costs
#
# A signature is changed by communication between devices. This page shows how to see
# which, and how many bytes, before anything is moved. It takes ten minutes, and needs
# the words of `01_signatures.py`.

# %%
import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # virtual ones, instead of GPUs
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re

import jax
import numpy as np

import sbp
from sbp import broadcast, partial_sum, split

# %% [markdown]
# ## One call changes everything
#
# Four devices in a line. A (16, 8) tensor of float32, 512 bytes in all, is cut by its
# rows, so that each device holds 128 bytes. `sbp.to_global` makes it whole everywhere.

# %%
line = sbp.placement("cpu", ranks=[0, 1, 2, 3], axis_names=("data",))
value = np.arange(128, dtype=np.float32).reshape(16, 8)

cut = sbp.to_global(value, line, split(0))
whole = sbp.to_global(cut, sbp=broadcast)
print(jax.typeof(cut), "->", jax.typeof(whole))

# %% [markdown]
# Each device lacked the 384 bytes of the three others and received them. `sbp.plan`
# says so beforehand; it needs no tensor, only a shape and a dtype.

# %%
print(sbp.plan(split(0), broadcast, (16, 8), np.float32, line))

# %% [markdown]
# ## All of them at once
#
# There are four components to start from and four to end at. Each cell says which
# collective runs and how many of the tensor's 512 bytes each device receives.

# %%
components = (split(0), split(1), broadcast, partial_sum)
short = ("S(0)", "S(1)", "B", "P")

print(f"{'from':<6}" + "".join(f"{'to ' + name:<22}" for name in short))
for name, source in zip(short, components, strict=True):
    row = f"{name:<6}"
    for target in components:
        plan = sbp.plan(source, target, (16, 8), np.float32, line)
        what = plan.steps[0].collective if plan.steps else "-"
        row += f"{what:<16}{plan.num_bytes:>4}  "
    print(row.rstrip())

# %% [markdown]
# Three things are worth remembering:
#
# - **From broadcast everything is free.** Each device has it all and keeps its part;
#   for a partial sum, all but one put zeros in the place of their copy.
# - **To a partial sum everything is free** too: a piece, with zeros around it, is a
#   term of the sum.
# - **An all-reduce costs as much as a reduce-scatter and an all-gather.** That is what
#   it is made of. A program that can go on with pieces of a sum stops half-way, and
#   that is the whole idea of ZeRO and of sequence parallelism.

# %%
reduce_scatter = sbp.plan(partial_sum, split(0), (16, 8), np.float32, line).num_bytes
all_gather = sbp.plan(split(0), broadcast, (16, 8), np.float32, line).num_bytes
all_reduce = sbp.plan(partial_sum, broadcast, (16, 8), np.float32, line).num_bytes
assert reduce_scatter + all_gather == all_reduce
print(f"{reduce_scatter} + {all_gather} = {all_reduce} bytes")

# %% [markdown]
# ## More devices, more bytes?
#
# Hardly. What a device receives for an all-reduce approaches twice the tensor's size,
# however many devices take part. This is why data parallelism scales.

# %%
for num_devices in (2, 4, 8):
    ranks = range(num_devices)
    devices = sbp.placement("cpu", ranks, axis_names=("data",))
    plan = sbp.plan(partial_sum, broadcast, (16, 8), np.float32, devices)
    print(f"{num_devices} devices: {plan.num_bytes} bytes each")

# %% [markdown]
# ## Two axes
#
# On a table of devices each axis has its component, and a conversion may take several
# steps. Their order matters: gathering along `data` first moves less, since the pieces
# are still cut along `tensor`. The planner compares the routes and takes the cheapest.

# %%
table = sbp.placement("cpu", [[0, 1], [2, 3]], axis_names=("data", "tensor"))


def show_plan(source: str, target: str) -> None:
    """Prints what a conversion of a (16, 8) tensor on the table would do."""
    signatures = sbp.parse(source), sbp.parse(target)
    print(sbp.plan(*signatures, (16, 8), np.float32, table), end="\n\n")


show_plan("S(0), S(1)", "B, B")

# %% [markdown]
# A sum over `tensor` whose result is cut along `data` and `tensor`: one reduce-scatter,
# and only between the two devices of a row.

# %%
show_plan("S(0), P", "S(0), S(1)")

# %% [markdown]
# A split that moves from one axis to the other need not be made whole in between. Each
# device gets what it lacks from the device that has it:

# %%
show_plan("S(0), B", "B, S(0)")
show_plan("S(0), S(1)", "S(1), S(0)")

# %% [markdown]
# One axis leaves the partial sum while the other enters it:

# %%
show_plan("P, S(0)", "S(0), P")

# %% [markdown]
# ## The plan is what runs
#
# A plan would be worth little if the compiler did something else. Here is the compiled
# program of one conversion, searched for its collectives.

# %%
source, target = sbp.parse("P, S(0)"), sbp.parse("S(0), P")
x = sbp.to_global(value, table, source)
program = jax.jit(lambda x: sbp.to_global(x, sbp=target)).lower(x).compile().as_text()

collective = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\("
compiled = re.findall(collective, program)
planned = sbp.plan(source, target, value.shape, value.dtype, table).collectives
print("planned:", list(planned), " compiled:", compiled)
assert list(planned) == compiled

# %% [markdown]
# ## To other devices
#
# A placement can be changed as well: to fewer devices, to more, to others, to another
# arrangement. Here a tensor that is cut over a line goes to a table of four other
# devices.

# %%
others = sbp.placement("cpu", [[4, 5], [6, 7]], axis_names=("data", "tensor"))
moved = sbp.to_global(cut, others, (split(0), split(1)))
print(jax.typeof(moved))
print(sbp.placement_of(moved))
assert np.array_equal(sbp.full_value(moved), value)

# %% [markdown]
# ## What to take along
#
# - `sbp.plan(source, target, shape, dtype, placement)` is free: ask before you move.
# - Split and partial sum are cheap to stay in. Broadcast is what costs.
# - Where a result is a partial sum, look whether the next operation can use it as it
#   is, or in pieces.
#
# `03_parallel_mlp.py` puts this to work: a layer pair of a transformer that
# communicates once.
