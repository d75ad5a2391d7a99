"""Global tensors for JAX: write the program for one device, say where tensors lie.

A *global tensor* is an ordinary ``jax.Array`` with one shape and one value, whose
pieces lie on many devices. Two things describe it.

**Placement**: on which devices, arranged along named axes. Devices are named by their
*rank*, their position in ``jax.devices()``; the order given is kept.

    >>> import jax, numpy as np, sbp
    >>> devices = sbp.placement("cpu", [[0, 1], [2, 3]], ("data", "tensor"))

(On one machine, ``jax.config.update("jax_num_cpu_devices", 8)`` before anything else
gives eight CPU devices to play with; ``JAX_NUM_CPU_DEVICES=8`` does so from outside.)

**Signature**: how it lies, one component per axis of the placement.

- ``sbp.split(dim)``, short ``S(dim)``: the devices along the axis hold parts of a dim.
- ``sbp.broadcast``, short ``B``: they all hold the same.
- ``sbp.partial_sum``, short ``P``: they hold addends; the value is their sum.

``sbp.to_global(value, placement, signature)`` makes a tensor, and its type tells how it
lies: a dim of size 16 cut along ``data`` is written ``16@data``, a sum that is still to
be made along ``tensor`` is ``{U:tensor}``.

    >>> value = np.arange(128, dtype=np.float32).reshape(16, 8)
    >>> x = sbp.to_global(value, devices, (sbp.split(0), sbp.split(1)))
    >>> print(jax.typeof(x))
    float32[16@data,8@tensor]
    >>> print(sbp.show(x))
    float32[16@data,8@tensor]: (S(0), S(1)) on cpu [[0, 1], [2, 3]]
    <BLANKLINE>
           0:4   4:8
         +-----+-----+
     0:8 |  0  |  1  |
         +-----+-----+
    8:16 |  2  |  3  |
         +-----+-----+
    <BLANKLINE>
    rank   0  part [0:8, 0:4]   local shape (8, 4)
    rank   1  part [0:8, 4:8]   local shape (8, 4)
    rank   2  part [8:16, 0:4]  local shape (8, 4)
    rank   3  part [8:16, 4:8]  local shape (8, 4)

The same function changes signature and placement later, inside ``jax.jit`` too. A
signature may name axes; those left out are broadcast. ``sbp.plan`` tells beforehand
which collectives that takes, and how many bytes the busiest device receives.

    >>> y = sbp.to_global(x, sbp={"tensor": sbp.split(0)})
    >>> sbp.signature_of(y)
    (sbp.broadcast, sbp.split(0))
    >>> there = sbp.placement("cpu", [7, 5])
    >>> print(jax.typeof(sbp.to_global(x, there, sbp.split(1))))
    float32[16,8@x]
    >>> ends = sbp.parse("S(0),P"), sbp.parse("S(0),B")
    >>> print(sbp.plan(*ends, (16, 8), "int8", devices))
    int8[16, 8]: (S(0), P) -> (S(0), B), 64 bytes per device
      all-reduce          tensor        -> S(0) on data                          64

To look inside: ``sbp.to_local`` gives the shards by rank (and ``sbp.from_local`` takes
them back), ``sbp.full_value`` the whole as NumPy, partial sums added up.

    >>> z = sbp.to_global(value, devices, (sbp.split(0), sbp.partial_sum))
    >>> sorted(sbp.to_local(z)), sbp.to_local(z)[3].shape
    ([0, 1, 2, 3], (8, 8))
    >>> np.array_equal(sbp.full_value(z), value)
    True

JAX's own functions take global tensors. Those of this package also choose signatures:
a product whose inner dim is cut stays a partial sum, without communication, and
``sbp.jit`` does the same for a whole function; ``sbp.explain`` lists what it inserts.

    >>> w = sbp.ones((8, 4), placement=devices, sbp={"tensor": sbp.split(0)})
    >>> print(jax.typeof(x), "@", jax.typeof(w), "=", jax.typeof(sbp.matmul(x, w)))
    float32[16@data,8@tensor] @ float32[8@tensor,4] = float32[16@data,4]{U:tensor}

What there is (``help(sbp.name)`` has arguments, errors and examples):

- Where and how: ``placement``, ``placement.all``, ``split``, ``broadcast``,
  ``partial_sum``, ``parse``.
- Tensors: ``to_global``, ``tensor``, ``from_local``; ``zeros``, ``ones``, ``full``,
  ``empty``, ``arange``, ``linspace``, ``logspace``, ``eye``, ``hann_window``, and
  ``zeros_like`` etc.; ``rand``, ``randn``, ``normal``, ``randint``, ``randperm``, whose
  values do not depend on the layout.
- Questions: ``show``, ``placement_of``, ``signature_of``, ``is_global``, ``to_local``,
  ``full_value``, ``plan``.
- Sizes that do not divide: ``pad_to``, ``unpad``, ``padding_mask``, ``padded_shape``,
  ``balanced_sizes``, ``balanced_slices``.
- Computing: ``matmul``, ``einsum``, ``add``, ``sum``, ``reshape``, ``softmax``,
  ``layer_norm``, ``embedding`` and others; ``jit``, ``explain``; ``constrain`` for
  model code.
- Several processes: ``init``, first thing in a script that ``python -m launch.run
  --nproc N script.py`` starts. All processes run the same calls.

``jax.grad`` goes through all of it. Under ``jax.jit`` it just works; outside, JAX wants
to know the mesh: ``with jax.set_mesh(devices.mesh): jax.grad(loss)(x)``.
"""

from sbp.creation import arange as arange
from sbp.creation import empty as empty
from sbp.creation import empty_like as empty_like
from sbp.creation import eye as eye
from sbp.creation import full as full
from sbp.creation import full_like as full_like
from sbp.creation import hann_window as hann_window
from sbp.creation import linspace as linspace
from sbp.creation import logspace as logspace
from sbp.creation import ones as ones
from sbp.creation import ones_like as ones_like
from sbp.creation import tensor as tensor
from sbp.creation import zeros as zeros
from sbp.creation import zeros_like as zeros_like
from sbp.distributed import init as init
from sbp.explain import Explanation as Explanation
from sbp.explain import explain as explain
from sbp.global_tensor import constrain as constrain
from sbp.global_tensor import is_global as is_global
from sbp.global_tensor import placement_of as placement_of
from sbp.global_tensor import signature_of as signature_of
from sbp.global_tensor import to_global as to_global
from sbp.infer import FallbackWarning as FallbackWarning
from sbp.infer import jit as jit
from sbp.local import from_local as from_local
from sbp.local import full_value as full_value
from sbp.local import to_local as to_local
from sbp.operators import add as add
from sbp.operators import astype as astype
from sbp.operators import concatenate as concatenate
from sbp.operators import divide as divide
from sbp.operators import einsum as einsum
from sbp.operators import embedding as embedding
from sbp.operators import exp as exp
from sbp.operators import expand_dims as expand_dims
from sbp.operators import gelu as gelu
from sbp.operators import getitem as getitem
from sbp.operators import layer_norm as layer_norm
from sbp.operators import log_softmax as log_softmax
from sbp.operators import matmul as matmul
from sbp.operators import max as max
from sbp.operators import mean as mean
from sbp.operators import min as min
from sbp.operators import multiply as multiply
from sbp.operators import negative as negative
from sbp.operators import relu as relu
from sbp.operators import reshape as reshape
from sbp.operators import softmax as softmax
from sbp.operators import squeeze as squeeze
from sbp.operators import subtract as subtract
from sbp.operators import sum as sum
from sbp.operators import tanh as tanh
from sbp.operators import transpose as transpose
from sbp.operators import where as where
from sbp.placement import Placement as Placement
from sbp.placement import placement as placement
from sbp.plan import Plan as Plan
from sbp.plan import plan as plan
from sbp.sampling import normal as normal
from sbp.sampling import rand as rand
from sbp.sampling import randint as randint
from sbp.sampling import randn as randn
from sbp.sampling import randperm as randperm
from sbp.show import show as show
from sbp.signature import Component as Component
from sbp.signature import Signature as Signature
from sbp.signature import broadcast as broadcast
from sbp.signature import parse as parse
from sbp.signature import partial_sum as partial_sum
from sbp.signature import split as split
from sbp.uneven import balanced_sizes as balanced_sizes
from sbp.uneven import balanced_slices as balanced_slices
from sbp.uneven import pad_to as pad_to
from sbp.uneven import padded_shape as padded_shape
from sbp.uneven import padding_mask as padding_mask
from sbp.uneven import unpad as unpad
