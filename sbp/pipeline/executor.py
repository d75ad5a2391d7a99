"""Runs a schedule inside the training program: microbatches in, gradients out.

One `lax.scan` over the ticks of `tables.Tables`, interpreting its rows; the meaning of
each entry stands there. Per tick two `lax.ppermute` over ``stage`` move activations
forward and cotangents backward around the ring of stages. Idle slots are skipped.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.pipeline import slots
from sbp.pipeline.ends import Ends
from sbp.pipeline.layers import Stack
from sbp.pipeline.lifetimes import BACKWARD_KINDS
from sbp.pipeline.parts import Head, Parts, Tree
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.schedule import Kind
from sbp.pipeline.tables import StageRows, Tables, TickRows


class Buffers(NamedTuple):
    """What a stage carries from tick to tick; see `tables` for the first four.

    Attributes:
        activations: ``(slots, ...)``, of the shape of a layer's input.
        saved: Residuals of a piece's layers, each ``(slots, layers, ...)``.
        cotangents: ``(slots, ...)``, like ``activations``.
        aside: What weight gradients need, each ``(slots, layers, ...)``; empty if the
            schedule splits none off.
        block_grads: Sums so far, in the form of the stage's block weights.
        outer_grads: Sums so far, in the form of the other parameters.
        sums: Sums so far of what the losses return besides the objective.
    """

    activations: jax.Array
    saved: list[jax.Array]
    cotangents: jax.Array
    aside: list[jax.Array]
    block_grads: Tree
    outer_grads: Tree
    sums: Tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """The pipeline of several stages.

    Attributes:
        region: Manual over ``stage`` and whatever else the parts are written for.
        tables: The schedule, with ``head_delay`` 1.
        forward_tables: That of `losses`, forward tasks alone.
        layer_indices: int32 ``(stages, chunks, layers)``, -1 where there is none; from
            `StageAssignment.layer_indices`. A stage's block weights are stacked in this
            order.
        is_shared: Whether all stages compute embedding and head together. The parts
            then may communicate over ``stage``.
    """

    region: ManualRegion
    tables: Tables
    forward_tables: Tables
    layer_indices: np.ndarray
    is_shared: bool

    def gradients(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """See `AbstractPipeline`.

        Communication: two permutations over ``stage`` per tick, and what the parts do.
        """
        run = self._run(self.tables, parts, blocks, outer, microbatches)
        buffers, _ = jax.lax.scan(run.tick, run.empty_buffers(), run.rows())
        return buffers.sums, buffers.block_grads, buffers.outer_grads

    def losses(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> Tree:
        """See `AbstractPipeline`.

        Communication: one permutation over ``stage`` per tick, and what the parts do.
        """
        run = self._run(self.forward_tables, parts, blocks, outer, microbatches)
        start = jax.tree.map(self.region.zeros, run.ends.sums_shapes())
        return run.forward_alone(run.ends.losses, start)

    def outputs(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree, head: Head
    ) -> Tree:
        """See `AbstractPipeline`.

        Communication: one permutation over ``stage`` per tick, and what the parts do.
        """
        run = self._run(self.forward_tables, parts, blocks, outer, microbatches)
        x, part = run.ends.input_shape(), run.ends.microbatch(0)
        shapes = jax.eval_shape(lambda: head(outer, self.region.zeros(x), part))
        num_microbatches = jax.tree.leaves(microbatches)[0].shape[0]
        start = jax.tree.map(lambda leaf: run.empty(leaf, num_microbatches), shapes)
        return run.forward_alone(functools.partial(run.ends.outputs, head), start)

    def _run(
        self, tables: Tables, parts: Parts, blocks: Tree, outer: Tree, data: Tree
    ) -> "_Run":
        ends = Ends(
            self.region,
            parts,
            outer=outer,
            microbatches=data,
            is_shared=self.is_shared,
        )
        return _Run(self.region, tables, self.layer_indices, ends, blocks)


class _Run:
    """One run of the executor: the arrays that no tick changes, and the tick."""

    def __init__(
        self,
        region: ManualRegion,
        tables: Tables,
        layer_indices: np.ndarray,
        ends: Ends,
        blocks: Tree,
    ):
        self.region, self.tables, self.ends = region, tables, ends
        self.parts, self.blocks = ends.parts, blocks
        self.num_stages, _, self.num_layers = layer_indices.shape
        self.is_full = bool((layer_indices >= 0).all())
        self.stage = region.varying(region.index("stage"))
        self.indices = jnp.asarray(layer_indices)[self.stage]

    def rows(self) -> tuple[StageRows, TickRows]:
        """Returns the rows to scan: this stage's columns, and those of all."""
        own = jax.tree.map(
            lambda column: jnp.asarray(column)[:, self.stage], self.tables.stages
        )
        return own, jax.tree.map(jnp.asarray, self.tables.ticks)

    def empty_buffers(self) -> Buffers:
        """Returns the buffers before the first tick."""
        tables, zeros = self.tables, self.region.zeros
        x, sums = self.ends.input_shape(), self.ends.sums_shapes()
        piece, context = self.piece(0), self.context(0)
        saved = piece.saved_shapes(x, context)
        has_aside = tables.num_aside_slots > 0
        aside = piece.aside_shapes(x, context, saved) if has_aside else []
        num_saved = tables.num_saved_slots, self.num_layers
        num_aside = tables.num_aside_slots, self.num_layers
        return Buffers(
            activations=self.empty(x, tables.num_activation_slots),
            saved=[self.empty(shape, *num_saved) for shape in saved],
            cotangents=self.empty(x, tables.num_cotangent_slots),
            aside=[self.empty(shape, *num_aside) for shape in aside],
            block_grads=jax.tree.map(zeros, piece.gradient_shapes()),
            outer_grads=jax.tree.map(zeros, self.ends.gradient_shapes()),
            sums=jax.tree.map(zeros, sums),
        )

    def empty(self, like: Any, *sizes: int) -> jax.Array:
        """Returns an empty buffer for values like the one given."""
        return self.region.zeros(like, *sizes)

    def tick(self, buffers: Buffers, rows: tuple) -> tuple[Buffers, None]:
        """Runs one row of the tables."""
        row, together = rows
        y, buffers = self.forward(buffers, row, together)
        head_cotangent, outer_grads, sums = self.ends.head(
            buffers.outer_grads, buffers.sums, y, together.head_microbatch
        )
        grad_x, buffers = self.backward(buffers, row)
        outer_grads = self.ends.embedding_gradient(
            outer_grads, grad_x, together.embedding_gradient_microbatch
        )

        arrived_x = self.send(y, 1)
        arrived_grad = self.send(grad_x, -1)
        cotangents = slots.put_if(buffers.cotangents, arrived_grad, row.cotangent_store)
        return buffers._replace(
            activations=slots.put_if(
                buffers.activations, arrived_x, row.activation_store
            ),
            cotangents=slots.put_if(cotangents, head_cotangent, row.head_store),
            outer_grads=outer_grads,
            sums=sums,
        ), None

    def forward_alone(self, collect: Callable[..., Tree], total: Tree) -> Tree:
        """Runs tables that have forward tasks alone.

        Args:
            collect: ``collect(total, y, microbatch)``, for what leaves the last piece.
            total: Before the first tick.
        """

        def tick(carry: tuple, rows: tuple) -> tuple[tuple, None]:
            activations, total = carry
            row, together = rows
            embedded = self.ends.embed(together.embedding_microbatch)

            def run() -> jax.Array:
                received = slots.read(activations, row.forward_read)
                x = jnp.where(row.forward_read < 0, embedded, received)
                context = self.context(row.forward_microbatch)
                return self.piece(row.forward_chunk).run(x, context)

            y = self.region.cond(
                row.forward_microbatch >= 0, run, lambda: jnp.zeros_like(embedded)
            )
            total = collect(total, y, together.head_microbatch)
            arrived = self.send(y, 1)
            activations = slots.put_if(activations, arrived, row.activation_store)
            return (activations, total), None

        activations = self.empty(
            self.ends.input_shape(), self.tables.num_activation_slots
        )
        return jax.lax.scan(tick, (activations, total), self.rows())[0][1]

    def forward(
        self, buffers: Buffers, row: StageRows, together: TickRows
    ) -> tuple[jax.Array, Buffers]:
        """Runs the forward task, if there is one, and saves its residuals."""
        embedded = self.ends.embed(together.embedding_microbatch)

        def run() -> tuple:
            received = slots.read(buffers.activations, row.forward_read)
            x = jnp.where(row.forward_read < 0, embedded, received)
            context = self.context(row.forward_microbatch)
            piece = self.piece(row.forward_chunk)
            return piece.forward(x, context, buffers.saved, row.forward_save)

        def skip() -> tuple:
            return jnp.zeros_like(embedded), buffers.saved

        y, saved = self.region.cond(row.forward_microbatch >= 0, run, skip)
        return y, buffers._replace(saved=saved)

    def backward(self, buffers: Buffers, row: StageRows) -> tuple[jax.Array, Buffers]:
        """Runs the backward task, if there is one, full or of the input alone."""
        cotangent = slots.read(buffers.cotangents, row.backward_read)

        def run() -> tuple[jax.Array, Tree]:
            return self.piece(row.backward_chunk).backward(
                cotangent,
                self.context(row.backward_microbatch),
                buffers.saved,
                row.backward_saved,
                buffers.block_grads,
            )

        def skip() -> tuple[jax.Array, Tree]:
            return jnp.zeros_like(cotangent), buffers.block_grads

        is_full = row.backward_kind == BACKWARD_KINDS.index(Kind.BACKWARD)
        grad_x, grads = self.region.cond(is_full, run, skip)
        buffers = buffers._replace(block_grads=grads)
        if not self.tables.num_aside_slots:
            return grad_x, buffers
        grad_x, aside = self.backward_input(buffers, row, cotangent, grad_x)
        buffers = buffers._replace(aside=aside)
        return grad_x, buffers._replace(block_grads=self.backward_weight(buffers, row))

    def backward_input(
        self, buffers: Buffers, row: StageRows, cotangent: jax.Array, grad_x: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Runs the input task, if there is one, and returns what it puts aside.

        A branch of its own: in one of three that leave different buffers alone, XLA
        would copy them all.
        """

        def run() -> tuple[jax.Array, list[jax.Array]]:
            return self.piece(row.backward_chunk).backward_input(
                cotangent,
                self.context(row.backward_microbatch),
                buffers.saved,
                row.backward_saved,
                buffers.aside,
                row.backward_put_aside,
            )

        return self.region.cond(
            row.backward_kind == BACKWARD_KINDS.index(Kind.BACKWARD_INPUT),
            run,
            lambda: (grad_x, buffers.aside),
        )

    def backward_weight(self, buffers: Buffers, row: StageRows) -> Tree:
        """Runs the weight task, if there is one, and returns the sums of gradients."""

        def run() -> Tree:
            saved = slots.read_all(buffers.saved, 0, 0)
            return self.piece(row.weight_chunk).backward_weight(
                self.context(row.weight_microbatch),
                buffers.aside,
                row.weight_read,
                buffers.block_grads,
                (saved, slots.read(buffers.cotangents, 0)),
            )

        return self.region.cond(
            row.weight_microbatch >= 0, run, lambda: buffers.block_grads
        )

    def send(self, value: jax.Array, distance: int) -> jax.Array:
        """Returns what the stage ``distance`` places before this one sent."""
        stages = range(self.num_stages)
        ring = [(stage, (stage + distance) % self.num_stages) for stage in stages]
        return jax.lax.ppermute(value, "stage", ring)

    def context(self, microbatch: jax.Array | int) -> Tree:
        """Returns what the layers are given besides their input."""
        return self.parts.context(self.ends.microbatch(microbatch))

    def piece(self, chunk: jax.Array | int) -> Stack:
        """Returns the layers of one chunk."""
        chunk = jnp.maximum(chunk, 0)
        return Stack(
            region=self.region,
            block=self.parts.block,
            weights=self.blocks,
            first=chunk * self.num_layers,
            indices=self.indices[chunk],
            is_full=self.is_full,
            gather=self.parts.gather,
            scatter=self.parts.scatter,
            sum_dtype=self.parts.sum_dtype,
        )
