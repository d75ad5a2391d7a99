"""Sequence parallelism: what lies between attention and MLP is split by positions.

Tensor parallelism alone leaves residual stream, norms and dropout whole on each rank of
``tensor``. Here each rank holds its part of the positions there (arXiv:2205.05198,
section 4.2.2). A layer communicates over ``tensor``:

===================  ================================  =================================
of                   forward                           backward
===================  ================================  =================================
``qkv`` and ``up``   all-gather of the input           reduce-scatter of its gradient,
                                                       and the all-gather again
``out`` and          reduce-scatter of the output      all-gather of its gradient
``down``
norms                nothing                           one all-reduce of the gradients
                                                       of scales and biases
===================  ================================  =================================

These take the place of all-reduces of activations, each of which moves as much as one
of both. What is saved for the backward pass is a rank's own part, hence the all-gather
again.

A sequence that does not divide is padded behind its last position. Nothing but norms,
dropout and sums sees these positions, and all of them work position by position.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import Attention
from models.block import Mlp
from models.stacked import Params, StackedModel, pure_state

SPLIT = P(None, "tensor", None)  # (B, L, D)
WHOLE = P(None, None, None)
HEADS = P(None, None, "tensor", None)  # (B, L, H, K)
QKV = P(None, None, None, "tensor", None)  # (B, L, 3, H, K)
HIDDEN = P(None, None, "tensor")  # (B, L, F)

Linear = Any  # Callable[[jax.Array], jax.Array], which stands in for a module


def over_sequence(
    model: StackedModel, mesh: Mesh, specs: Params, *, length: int
) -> StackedModel:
    """Returns the model with its residual stream split over ``tensor``.

    To be used in a `sbp.pipeline.region.ManualRegion` that leaves ``tensor`` to XLA.

    Args:
        model: The model.
        mesh: Its devices.
        specs: `PartitionSpec` of each of its parameters.
        length: Positions of a sample.
    """
    sequence = Sequence(mesh, -length % mesh.shape["tensor"])
    block_specs = jax.tree.map(
        _of_tensor_alone, specs["blocks"], is_leaf=lambda leaf: isinstance(leaf, P)
    )

    def adapt_block(block: nnx.Module) -> None:
        model.adapt_block(block)
        for path, module in list(nnx.iter_modules(block)):
            own = functools.reduce(
                lambda tree, name: tree[str(name)], path, block_specs
            )
            match module:
                case Attention():
                    module.qkv = sequence.gathering(module.qkv, own["qkv"], QKV)
                    module.out = sequence.scattering(module.out, own["out"], HEADS)
                case Mlp():
                    module.up = sequence.gathering(module.up, own["up"], HIDDEN)
                    module.down = sequence.scattering(module.down, own["down"], HIDDEN)

    return dataclasses.replace(
        model,
        adapt_block=adapt_block,
        before_blocks=sequence.enter,
        after_blocks=sequence.leave,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """Positions of a sample, split over ``tensor``.

    Attributes:
        mesh: The devices.
        num_padded: Positions to add so that they divide.
    """

    mesh: Mesh
    num_padded: int

    def enter(self, x_BLD: jax.Array) -> jax.Array:
        """Returns ``(B, L, D)``, padded and split; its gradient is made whole."""
        # Whole up to here: XLA would also split what the embedding is made of.
        whole = self.constrain(self.pad(x_BLD), WHOLE)
        # Not the constraint itself: XLA 0.10 wants the results of all branches of a
        # conditional to be constrained in the same way, if at all.
        return jax.lax.optimization_barrier(_reshard(self, SPLIT, WHOLE, whole))

    def leave(self, x_BLD: jax.Array) -> jax.Array:
        """Returns what `enter` was given, whole; its gradient is split."""
        return self.cut(_reshard(self, WHOLE, SPLIT, x_BLD))

    def gathering(self, linear: nnx.Module, specs: Params, spec: P) -> Linear:
        """Returns a linear map of the whole of its input, which is split.

        Args:
            linear: Maps ``(B, L, D)`` to what is split along another dim.
            specs: How its parameters lie over ``tensor``.
            spec: How its result does.
        """
        run, params = _pure(linear)

        def gather(x_BLD: jax.Array) -> jax.Array:
            return self.cut(self.constrain(self.constrain(x_BLD, SPLIT), WHOLE))

        @jax.custom_vjp
        def apply(params: Params, x_BLD: jax.Array) -> jax.Array:
            return run(params, gather(x_BLD))

        def forward(params: Params, x_BLD: jax.Array) -> tuple:
            return apply(params, x_BLD), (params, x_BLD)

        def backward(saved: tuple, grad: jax.Array) -> tuple:
            params, x_BLD = saved
            whole = gather(x_BLD)

            def scatter(params: Params, grad: jax.Array) -> jax.Array:
                # The map is linear: it does not matter of which input.
                varying = tuple(jax.typeof(grad).mat.varying)
                x = jnp.zeros(whole.shape, whole.dtype)
                x = jax.lax.pcast(x, varying, to="varying")
                _, vjp = jax.vjp(lambda x: run(params, x), x)
                return self.sum_and_split(*vjp(grad))

            _, vjp = jax.vjp(lambda params: run(params, whole), params)
            return *vjp(grad), self.per_rank(scatter, (specs, spec))(params, grad)

        apply.defvjp(forward, backward)
        return lambda x_BLD: apply(params, x_BLD)

    def scattering(self, linear: nnx.Module, specs: Params, spec: P) -> Linear:
        """Returns a linear map whose result is split.

        Args:
            linear: Maps to ``(B, L, D)`` what is split along another dim.
            specs: How its parameters lie over ``tensor``.
            spec: How its input does.
        """
        run, params = _pure(linear)

        def scatter(params: Params, h: jax.Array) -> jax.Array:
            return self.sum_and_split(run(_bias_once(params), h))

        @jax.custom_vjp
        def apply(params: Params, h: jax.Array) -> jax.Array:
            return self.per_rank(scatter, (specs, spec))(params, h)

        def forward(params: Params, h: jax.Array) -> tuple:
            return apply(params, h), (params, h)

        def backward(saved: tuple, grad_BLD: jax.Array) -> tuple:
            whole = self.constrain(self.constrain(grad_BLD, SPLIT), WHOLE)
            return jax.vjp(run, *saved)[1](self.cut(whole))

        apply.defvjp(forward, backward)
        return lambda h: apply(params, h)

    def sum_and_split(self, x_BLD: jax.Array) -> jax.Array:
        """Returns this rank's positions of the sum over ``tensor``.

        Communication: a reduce-scatter.
        """
        return jax.lax.psum_scatter(
            self.pad(x_BLD), "tensor", scatter_dimension=1, tiled=True
        )

    def per_rank(self, run: Callable, in_specs: tuple) -> Callable:
        """Returns ``run``, written per rank of ``tensor``, its result split."""
        return jax.shard_map(
            run,
            mesh=self.mesh_here(),
            axis_names={"tensor"},
            in_specs=in_specs,
            out_specs=SPLIT,
        )

    def pad(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the positions and zeros behind them."""
        if not self.num_padded:
            return x_BLD
        return jnp.pad(x_BLD, ((0, 0), (0, self.num_padded), (0, 0)))

    def cut(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the positions without those that `pad` added."""
        return x_BLD[:, : x_BLD.shape[1] - self.num_padded]

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns ``x``, laid out over ``tensor`` like this."""
        sharding = NamedSharding(self.mesh_here(), spec)
        return jax.lax.with_sharding_constraint(x, sharding)

    def mesh_here(self) -> Any:
        """Returns the mesh, which knows inside a region what is manual there."""
        inside = jax.sharding.get_abstract_mesh()
        return self.mesh if inside.empty else inside


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reshard(sequence: Sequence, target: P, source: P, x: jax.Array) -> jax.Array:
    """Lays ``x`` out as ``target``, and its gradient as ``source``."""
    return sequence.constrain(x, target)


def _reshard_forward(sequence: Sequence, target: P, _: P, x: jax.Array) -> tuple:
    return sequence.constrain(x, target), None


def _reshard_backward(
    sequence: Sequence, _: P, source: P, __: None, grad: jax.Array
) -> tuple:
    return (sequence.constrain(grad, source),)


_reshard.defvjp(_reshard_forward, _reshard_backward)


def _pure(linear: nnx.Module) -> tuple[Callable, Params]:
    """Returns a module as a function of its parameters, and these."""
    graph = nnx.graphdef(linear)

    def run(params: Params, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, nnx.State(params))(x)

    return run, pure_state(linear)


def _bias_once(params: Params) -> Params:
    """Returns the parameters, biases of ranks but the first being 0."""
    is_first = jax.lax.axis_index("tensor") == 0

    def mask(path: tuple, leaf: jax.Array) -> jax.Array:
        return jnp.where(is_first, leaf, 0) if path[-1].key == "bias" else leaf

    return jax.tree.map_with_path(mask, params)


def _of_tensor_alone(spec: P) -> P:
    """Returns the spec of one layer's parameter along ``tensor``."""

    def keep(entry: Any) -> str | None:
        names = entry if isinstance(entry, tuple) else (entry,)
        return "tensor" if "tensor" in names else None

    return P(*(keep(entry) for entry in tuple(spec)[1:]))
