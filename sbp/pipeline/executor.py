"""Runs a schedule inside the training program: microbatches in, gradients out.

One `lax.scan` over the ticks of `tables.Tables`, interpreting its rows; the meaning of
each entry stands there. Per tick two `lax.ppermute` over ``stage`` move activations
forward and cotangents backward around the ring of stages. Idle slots are skipped.

Embedding and head are either on all stages at once, which pays when their vocabulary is
split over ``stage``, or on the first and the last stage alone. In both cases the value
that counts is the one on the first or last stage: the others' cotangent is zero, so the
sum over ``stage`` of the gradients is right however much of the work is shared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.pipeline.layers import Stack
from sbp.pipeline.parts import Parts, Tree
from sbp.pipeline.region import ManualRegion
from sbp.pipeline.tables import StageRows, Tables, TickRows


class Buffers(NamedTuple):
    """What a stage carries from tick to tick; see `tables` for the first three.

    Attributes:
        activations: ``(slots, ...)``, of the shape of a layer's input.
        saved: Residuals of a piece's layers, each ``(slots, layers, ...)``.
        cotangents: ``(slots, ...)``, like ``activations``.
        block_grads: Sums so far, in the form of the stage's block weights.
        outer_grads: Sums so far, in the form of the other parameters.
        sums: Sums so far of what the losses return besides the objective.
    """

    activations: jax.Array
    saved: list[jax.Array]
    cotangents: jax.Array
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
        run = _Run(self, parts, blocks, outer, microbatches)
        buffers, _ = jax.lax.scan(
            run.tick, run.empty_buffers(self.tables), run.rows(self.tables)
        )
        return buffers.sums, buffers.block_grads, buffers.outer_grads

    def losses(
        self, parts: Parts, blocks: Tree, outer: Tree, microbatches: Tree
    ) -> Tree:
        """See `AbstractPipeline`.

        Communication: one permutation over ``stage`` per tick, and what the parts do.
        """
        run = _Run(self, parts, blocks, outer, microbatches)
        x, sums = run.shapes()
        activations = run.zeros(x, self.forward_tables.num_activation_slots)
        start = activations, jax.tree.map(run.zeros, sums)
        return jax.lax.scan(run.forward_tick, start, run.rows(self.forward_tables))[0][
            1
        ]


class _Run:
    """One run of the executor: the arrays that no tick changes, and the tick."""

    def __init__(
        self, executor: Executor, parts: Parts, blocks: Tree, outer: Tree, data: Tree
    ):
        self.executor, self.region, self.parts = executor, executor.region, parts
        self.blocks, self.outer, self.data = blocks, outer, data
        self.num_stages, _, self.num_layers = executor.layer_indices.shape
        self.stage = self.region.varying(self.region.index("stage"))
        self.is_first = self.stage == 0
        self.is_last = self.stage == self.num_stages - 1
        self.indices = jnp.asarray(executor.layer_indices)[self.stage]

    def rows(self, tables: Tables) -> tuple[StageRows, TickRows]:
        """Returns the rows to scan: this stage's columns, and those of all."""
        own = jax.tree.map(
            lambda column: jnp.asarray(column)[:, self.stage], tables.stages
        )
        return own, jax.tree.map(jnp.asarray, tables.ticks)

    def shapes(self) -> tuple[Any, Tree]:
        """Returns the shapes of a layer's input and of what the losses return."""
        part = self.microbatch(0)
        x = jax.eval_shape(self.parts.embed, self.outer, part)
        _, sums = jax.eval_shape(
            lambda: self.parts.losses(self.outer, self.zeros(x), part)
        )
        return x, sums

    def empty_buffers(self, tables: Tables) -> Buffers:
        """Returns the buffers before the first tick."""
        x, sums = self.shapes()
        _, residuals = jax.eval_shape(
            lambda: self.piece(0).forward(
                self.zeros(x), self.parts.context(self.microbatch(0))
            )
        )
        return Buffers(
            activations=self.zeros(x, tables.num_activation_slots),
            saved=[self.zeros(leaf, tables.num_saved_slots) for leaf in residuals],
            cotangents=self.zeros(x, tables.num_cotangent_slots),
            block_grads=jax.tree.map(self.zeros, self.blocks),
            outer_grads=jax.tree.map(self.zeros, self.outer),
            sums=jax.tree.map(self.zeros, sums),
        )

    def tick(self, buffers: Buffers, rows: tuple) -> tuple[Buffers, None]:
        """Runs one row of the tables."""
        row, together = rows
        y, buffers = self.forward(buffers, row, together)
        head_cotangent, buffers = self.head(buffers, y, together)
        grad_x, buffers = self.backward(buffers, row)
        buffers = self.embedding_gradient(buffers, grad_x, together)

        arrived_x = self.send(y, 1)
        arrived_grad = self.send(grad_x, -1)
        cotangents = _store(buffers.cotangents, arrived_grad, row.cotangent_store)
        return buffers._replace(
            activations=_store(buffers.activations, arrived_x, row.activation_store),
            cotangents=_store(cotangents, head_cotangent, row.head_store),
        ), None

    def forward_tick(self, carry: tuple, rows: tuple) -> tuple[tuple, None]:
        """Runs one row of tables that have forward tasks alone."""
        activations, sums = carry
        row, together = rows
        embedded = self.embed(together.embedding_microbatch)

        def run() -> jax.Array:
            received = _read(activations, row.forward_read)
            x = jnp.where(row.forward_read < 0, embedded, received)
            context = self.parts.context(self.microbatch(row.forward_microbatch))
            return self.piece(row.forward_chunk).run(x, context)

        is_busy = row.forward_microbatch >= 0
        y = self.cond(is_busy, run, lambda: self.zeros(embedded))
        part = self.microbatch(together.head_microbatch)
        is_counted = self.is_last & (together.head_microbatch >= 0)
        found = self.at_end(is_counted, lambda: self.losses(self.outer, y, part)[1])
        sums = _add_where(is_counted, sums, found)
        activations = _store(activations, self.send(y, 1), row.activation_store)
        return (activations, sums), None

    def forward(
        self, buffers: Buffers, row: StageRows, together: TickRows
    ) -> tuple[jax.Array, Buffers]:
        """Runs the forward task, if there is one, and saves its residuals."""
        embedded = self.embed(together.embedding_microbatch)

        def run() -> tuple[jax.Array, list[jax.Array]]:
            received = _read(buffers.activations, row.forward_read)
            x = jnp.where(row.forward_read < 0, embedded, received)
            context = self.parts.context(self.microbatch(row.forward_microbatch))
            y, residuals = self.piece(row.forward_chunk).forward(x, context)
            saved = [
                _store(buffer, leaf, row.forward_save)
                for buffer, leaf in zip(buffers.saved, residuals, strict=True)
            ]
            return y, saved

        def skip() -> tuple[jax.Array, list[jax.Array]]:
            return self.zeros(embedded), buffers.saved

        y, saved = self.cond(row.forward_microbatch >= 0, run, skip)
        return y, buffers._replace(saved=saved)

    def backward(self, buffers: Buffers, row: StageRows) -> tuple[jax.Array, Buffers]:
        """Runs the backward task, if there is one, and adds its gradients."""
        cotangent = _read(buffers.cotangents, row.backward_read)

        def run() -> tuple[jax.Array, Tree]:
            residuals = [_read(leaf, row.backward_saved) for leaf in buffers.saved]
            context = self.parts.context(self.microbatch(row.backward_microbatch))
            piece = self.piece(row.backward_chunk)
            return piece.backward(
                cotangent, residuals, buffers.block_grads, cotangent, context
            )

        def skip() -> tuple[jax.Array, Tree]:
            return self.zeros(cotangent), buffers.block_grads

        grad_x, grads = self.cond(row.backward_microbatch >= 0, run, skip)
        return grad_x, buffers._replace(block_grads=grads)

    def embed(self, microbatch: jax.Array) -> jax.Array:
        """Returns the input of the first layer, of use on the first stage alone."""
        part = self.microbatch(microbatch)
        return self.at_end(
            self.is_first & (microbatch >= 0),
            lambda: self.parts.embed(self.outer, part),
        )

    def head(
        self, buffers: Buffers, y: jax.Array, together: TickRows
    ) -> tuple[jax.Array, Buffers]:
        """Computes the losses of what leaves the last piece, and their gradients."""
        part = self.microbatch(together.head_microbatch)
        is_counted = self.is_last & (together.head_microbatch >= 0)

        def run() -> tuple[jax.Array, Tree, Tree]:
            objective, vjp, sums = jax.vjp(
                lambda outer, y: self.losses(outer, y, part),
                self.outer,
                y,
                has_aux=True,
            )
            grad_outer, grad_y = vjp(is_counted.astype(objective.dtype))
            return grad_y, grad_outer, sums

        grad_y, grad_outer, sums = self.at_end(is_counted, run)
        return grad_y, buffers._replace(
            outer_grads=jax.tree.map(jnp.add, buffers.outer_grads, grad_outer),
            sums=_add_where(is_counted, buffers.sums, sums),
        )

    def losses(self, outer: Tree, y: jax.Array, part: Tree) -> tuple[jax.Array, Tree]:
        """Computes the losses of the last stage's ``y``."""
        if self.executor.is_shared:
            y = self.region.psum(jnp.where(self.is_last, y, 0), "stage")
        return self.region.varying(self.parts.losses(outer, y, part))

    def embedding_gradient(
        self, buffers: Buffers, grad_x: jax.Array, together: TickRows
    ) -> Buffers:
        """Adds the gradient of the embedding of what leaves the first piece."""
        microbatch = together.embedding_gradient_microbatch
        part = self.microbatch(microbatch)
        is_counted = self.is_first & (microbatch >= 0)

        def embed(outer: Tree) -> jax.Array:
            return self.region.varying(self.parts.embed(outer, part))

        def run() -> Tree:
            _, vjp = jax.vjp(embed, self.outer)
            return vjp(jnp.where(is_counted, grad_x, 0))[0]

        grads = self.at_end(is_counted, run)
        return buffers._replace(
            outer_grads=jax.tree.map(jnp.add, buffers.outer_grads, grads)
        )

    def send(self, value: jax.Array, distance: int) -> jax.Array:
        """Returns what the stage ``distance`` places before this one sent."""
        stages = range(self.num_stages)
        ring = [(stage, (stage + distance) % self.num_stages) for stage in stages]
        return jax.lax.ppermute(value, "stage", ring)

    def piece(self, chunk: jax.Array | int) -> Stack:
        """Returns the layers of one chunk."""
        chunk = jnp.maximum(chunk, 0)
        return Stack(
            region=self.region,
            block=self.parts.block,
            weights=self.blocks,
            first=chunk * self.num_layers,
            indices=self.indices[chunk],
            is_full=bool((self.executor.layer_indices >= 0).all()),
        )

    def microbatch(self, index: jax.Array | int) -> Tree:
        """Returns a microbatch; any one if the index is -1."""
        return jax.tree.map(lambda leaf: _read(leaf, index), self.data)

    def at_end(self, predicate: jax.Array, run: Callable[[], Tree]) -> Tree:
        """Runs embedding or head: on all stages, or where the predicate is true."""
        if self.executor.is_shared:
            return self.region.varying(run())
        shapes = jax.eval_shape(run)
        return self.cond(predicate, run, lambda: jax.tree.map(self.zeros, shapes))

    def cond(self, predicate: jax.Array, run: Callable, skip: Callable) -> Tree:
        """Runs one of two branches; both may communicate over ``tensor`` at most."""
        return jax.lax.cond(
            predicate,
            lambda: self.region.varying(run()),
            lambda: self.region.varying(skip()),
        )

    def zeros(self, like: Any, num_slots: int | None = None) -> jax.Array:
        """Returns zeros of this rank's own, with a dim of slots in front."""
        shape = like.shape if num_slots is None else (num_slots, *like.shape)
        return self.region.varying(jnp.zeros(shape, like.dtype))


def _add_where(predicate: jax.Array, total: Tree, part: Tree) -> Tree:
    return jax.tree.map(lambda t, p: t + jnp.where(predicate, p, 0), total, part)


def _read(buffer: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Returns the content of a slot; of any slot if it is -1."""
    index = jnp.maximum(slot, 0)
    return jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)


def _store(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the buffer with a slot filled; unchanged if the slot is -1."""
    kept = jnp.where(slot >= 0, value.astype(buffer.dtype), _read(buffer, slot))
    return jax.lax.dynamic_update_index_in_dim(buffer, kept, jnp.maximum(slot, 0), 0)
