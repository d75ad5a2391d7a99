"""Global tensors for JAX: placements, signatures and the conversions between them."""

from sbp.distributed import init as init
from sbp.global_tensor import is_global as is_global
from sbp.global_tensor import placement_of as placement_of
from sbp.global_tensor import signature_of as signature_of
from sbp.global_tensor import to_global as to_global
from sbp.placement import Placement as Placement
from sbp.placement import placement as placement
from sbp.plan import Plan as Plan
from sbp.plan import plan as plan
from sbp.signature import Component as Component
from sbp.signature import Signature as Signature
from sbp.signature import broadcast as broadcast
from sbp.signature import parse as parse
from sbp.signature import partial_sum as partial_sum
from sbp.signature import split as split
