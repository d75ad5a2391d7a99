"""ZeRO (arXiv:1910.02054): the training state in parts over the ranks of ``data``.

From stage 1 on each rank holds its part of every parameter and of the optimizer state
that belongs to it, and updates that alone. What differs is when parameters are whole,
and when gradients:

=====  ==========================================  =====================================
stage  parameters                                  gradients
=====  ==========================================  =====================================
0      always whole                                all-reduced after the last microbatch
1      gathered once, at the start of a step       reduce-scattered after the last one
2      as in 1                                     as in 1; layer by layer, where there
                                                   is one microbatch and one stage
3      each layer gathered just before its use,    reduce-scattered layer by layer, by
       forward and backward                        microbatch
=====  ==========================================  =====================================

A parameter is gathered in the dtype of the computation. Gradients are summed in float32
over microbatches, in ``precision.gradient_dtype`` over ranks. Small parameters, and
those of which no dim divides, are left whole.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from launch.precision import PrecisionConfig, is_within
from launch.run_config import ZeroConfig
from models.stacked import Params, path_of, split_blocks
from sbp.pipeline.parts import Parts
from sbp.pipeline.region import ManualRegion

# Of the mesh of `in_groups`: a rank has a part of what the ranks of its group hold
# together, and the same part as one rank in each other group.
REPLICA, SHARD = "data/replica", "data/shard"
WHOLE = -1
SUM_DTYPE = "float32"  # of gradients over microbatches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one parameter is held.

    Attributes:
        dim: Cut into parts over ``data``; `WHOLE` if there is none.
        dtype: Of the parameter.
        gathered_dtype: In which its parts are put together.
    """

    dim: int
    dtype: Any
    gathered_dtype: Any

    @property
    def of_layer(self) -> "Cut":
        """The same of one layer, which has no dim in front."""
        return dataclasses.replace(self, dim=max(self.dim - 1, WHOLE))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """When the parameters of a run are whole; all methods run in its region.

    Attributes:
        region: Of the run.
        axis: Over which parameters are cut: ``data``, or the part `SHARD` of it.
        stage: 0 to 3.
        cuts: A `Cut` for each parameter, blocks stacked.
        scatters_layers: Whether the gradients of a layer are scattered at once.
        casts_once: Whether parameters that are held whole are cast before the loop over
            microbatches, rather than by each of them.
        gradient_dtype: In which gradients are sent.
    """

    region: ManualRegion
    axis: str
    stage: int
    cuts: Params
    scatters_layers: bool
    casts_once: bool
    gradient_dtype: str

    def held(self, specs: Params) -> Params:
        """Returns how parameters lie, from how they do without ZeRO."""

        def add(spec: P, cut: Cut) -> P:
            if cut.dim == WHOLE:
                return spec
            entries = [*spec, *[None] * (cut.dim + 1 - len(spec))]
            names = entries[cut.dim]
            before = names if isinstance(names, tuple) else (names,) if names else ()
            entries[cut.dim] = (*before, self.axis) if before else self.axis
            return P(*entries)

        return jax.tree.map(add, specs, self.cuts)

    def gather_once(self, params: Params) -> Params:
        """Returns the parameters as a pipeline is given them.

        Communication: in stages 1 and 2 an all-gather of each over ``data``.
        """
        if self.casts_once:
            return jax.tree.map(
                lambda leaf, cut: leaf.astype(cut.gathered_dtype), params, self.cuts
            )
        if self.stage not in (1, 2):
            return params
        return jax.tree.map(self._gather, params, self.cuts)

    def gather_outer(self, outer: Params, after: Any) -> Params:
        """Returns the parameters without blocks, whole, for one use of them.

        Args:
            outer: As they are held.
            after: Any arrays that the use needs as well. Only when they are there is
                anything gathered, and so not once for all microbatches.

        Communication: in stage 3 an all-gather of each over ``data``, and where they
        are differentiated a reduce-scatter of its gradient.
        """
        if self.stage < 3:
            return outer

        def whole(part: jax.Array, cut: Cut) -> jax.Array:
            @jax.custom_vjp
            def gather(part: jax.Array) -> jax.Array:
                return self._gather(part, cut)

            gather.defvjp(
                lambda part: (gather(part), None),
                lambda _, cotangent: (self._scatter(cotangent, cut),),
            )
            return gather(part)

        outer, _ = jax.lax.optimization_barrier((outer, after))
        return jax.tree.map(whole, outer, split_blocks(self.cuts)[1])

    def over_data(self, parts: Parts) -> Parts:
        """Returns the parts of a model for parameters as a pipeline is given them."""
        if self.stage == 0:
            return dataclasses.replace(parts, sum_dtype=SUM_DTYPE)
        layer = jax.tree.map(lambda cut: cut.of_layer, self.cuts["blocks"])

        def gather(weights: Params) -> Params:
            return jax.tree.map(self._gather, weights, layer)

        def scatter(gradients: Params) -> Params:
            return jax.tree.map(self._scatter, gradients, layer)

        def embed(outer: Params, microbatch: Any) -> Any:
            return parts.embed(self.gather_outer(outer, microbatch), microbatch)

        def losses(outer: Params, x: jax.Array, microbatch: Any) -> Any:
            return parts.losses(self.gather_outer(outer, x), x, microbatch)

        return dataclasses.replace(
            parts,
            embed=embed,
            losses=losses,
            gather=gather if self.stage == 3 else None,
            scatter=scatter if self.scatters_layers else None,
            sum_dtype=SUM_DTYPE,
        )

    def sum_gradients(self, grads: Params, specs: Params) -> Params:
        """Sums gradients over the ranks that hold the same parameter.

        Communication: one reduction over ``data`` of all that was not scattered before.
        Parts that other ranks have too, since they are of another group or have other
        positions of the same samples, are summed after they are cut.
        """
        blocks, outer = split_blocks(grads)
        block_cuts, outer_cuts = split_blocks(self.cuts)
        if self.stage > 0 and not self.scatters_layers:
            blocks = jax.tree.map(self._scatter, blocks, block_cuts)
        if self.stage in (1, 2):
            outer = jax.tree.map(self._scatter, outer, outer_cuts)
        leaves, structure = jax.tree.flatten({"blocks": blocks, **outer})
        is_shared = ["stage" not in axes_of(spec) for spec in jax.tree.leaves(specs)]
        leaves = self._psum(leaves, is_shared, "stage")
        is_cut = [cut.dim != WHOLE for cut in jax.tree.leaves(self.cuts)]
        leaves = self._psum(leaves, is_cut, REPLICA, "context")
        is_whole = [not cut for cut in is_cut]
        leaves = self._psum(leaves, is_whole, "data", "context")
        return jax.tree.unflatten(structure, leaves)

    def _psum(
        self, leaves: Sequence[jax.Array], chosen: Sequence[bool], *axis_names: str
    ) -> list[jax.Array]:
        """Sums the chosen ones, all at once rather than one after another."""
        if not self.region.members(*axis_names):
            return list(leaves)
        dtype = None if "stage" in axis_names else self.gradient_dtype
        some = [x.astype(dtype or x.dtype) for x in itertools.compress(leaves, chosen)]
        sums = iter(self.region.psum(some, *axis_names))
        return [
            next(sums).astype(x.dtype) if is_chosen else x
            for x, is_chosen in zip(leaves, chosen, strict=True)
        ]

    def _gather(self, part: jax.Array, cut: Cut) -> jax.Array:
        if cut.dim == WHOLE:
            return part
        part = part.astype(cut.gathered_dtype)
        return self.region.all_gather(part, self.axis, dim=cut.dim)

    def _scatter(self, gradient: jax.Array, cut: Cut) -> jax.Array:
        if cut.dim != WHOLE:
            sent = gradient.astype(self.gradient_dtype)
            gradient = self.region.psum_scatter(sent, self.axis, dim=cut.dim)
        return gradient.astype(cut.dtype)


def in_groups(mesh: Mesh, config: ZeroConfig) -> Mesh:
    """Returns the mesh of a run in which groups of ranks share the state.

    Args:
        mesh: The mesh of the run; its own devices, in the same order, are returned.
        config: The section ``zero``. Without groups the mesh stays as it is.

    Example:
        >>> import numpy as np
        >>> ranks = np.array(jax.devices()[:8]).reshape(2, 4, 1)
        >>> mesh = Mesh(ranks, ("stage", "data", "tensor"))
        >>> in_groups(mesh, ZeroConfig(stage=3, group_size=2)).shape_tuple
        (('stage', 2), ('data/replica', 2), ('data/shard', 2), ('tensor', 1))
    """
    if config.group_size is None:
        return mesh
    sizes: list[tuple[str, int]] = []
    for name, size in mesh.shape_tuple:
        if name == "data":
            num_groups = size // config.group_size
            sizes += [(REPLICA, num_groups), (SHARD, config.group_size)]
        else:
            sizes.append((name, size))
    devices = mesh.devices.reshape([size for _, size in sizes])
    axis_types = (AxisType.Auto,) * len(sizes)
    return Mesh(devices, [name for name, _ in sizes], axis_types=axis_types)


def build(
    config: ZeroConfig,
    region: ManualRegion,
    *,
    shapes: Params,
    specs: Params,
    dtype: str,
    formats: PrecisionConfig,
    num_microbatches: int,
) -> Zero:
    """Returns how a run holds its parameters.

    Args:
        config: The section ``zero``.
        region: Of the run.
        shapes: Shapes and dtypes of the parameters, blocks stacked.
        specs: How they lie on the mesh without ZeRO.
        dtype: Of the computation.
        formats: The section ``precision``.
        num_microbatches: Of each data-parallel rank.
    """
    axis = SHARD if SHARD in region.mesh.shape else "data"
    num_parts = region.mesh.shape[axis]
    stage = config.stage if num_parts > 1 else 0

    def choose(path: tuple, leaf: Any, spec: P) -> Cut:
        is_block = path[0].key == "blocks"
        shape = leaf.shape[is_block:]
        is_cut = stage > 0 and math.prod(shape) >= config.min_size
        # Dim 0 of the blocks is the layers: a part of it would be some layers whole.
        dims = range(int(is_block), leaf.ndim) if is_cut else ()
        divisors = (_divisor(spec, d, region.mesh) for d in dims)
        fitting = (
            d
            for d, divisor in zip(dims, divisors, strict=True)
            if divisor and leaf.shape[d] % (divisor * num_parts) == 0
        )
        narrow = jnp.dtype(dtype)
        is_narrowed = _is_cast(path_of(path), formats) and (
            narrow.itemsize < leaf.dtype.itemsize
        )
        return Cut(
            dim=next(fitting, WHOLE),
            dtype=leaf.dtype,
            gathered_dtype=narrow if is_narrowed else leaf.dtype,
        )

    is_alone = num_microbatches == 1 and region.mesh.shape["stage"] == 1
    return Zero(
        region=region,
        axis=axis,
        stage=stage,
        cuts=jax.tree.map_with_path(choose, shapes, specs),
        scatters_layers=stage == 3 or (stage == 2 and is_alone),
        # One microbatch would cast each parameter once as well, and keep no copy.
        casts_once=stage == 0 and num_microbatches > 1,
        gradient_dtype=formats.gradient_dtype,
    )


def _is_cast(path: str, formats: PrecisionConfig) -> bool:
    """Whether a parameter is cast to the dtype of the computation where it is used.

    Tables are not: gradients of what is looked up in them add up in their dtype.
    """
    names = path.split("/")
    is_exact = any(is_within(pattern, names) for pattern in formats.float32)
    return names[-1] == "kernel" and not is_exact


def axes_of(spec: P) -> set[str]:
    """Returns the mesh axes that a spec names.

    Example:
        >>> sorted(axes_of(P(("stage", "tensor"), None, "data")))
        ['data', 'stage', 'tensor']
    """
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return {name for entry in entries for name in entry if name is not None}


def _divisor(spec: P, dim: int, mesh: Mesh) -> int:
    """Returns into how many parts a dim is cut already; 0 if no more are possible."""
    names = axes_of(P(spec[dim])) if dim < len(spec) else set()
    # Parts of a part over an axis that XLA manages would not lie side by side.
    if mesh.shape["tensor"] > 1 and "tensor" in names:
        return 0
    return math.prod(mesh.shape[name] for name in names)
