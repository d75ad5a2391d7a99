"""A small model in the parts of a pipeline, and its gradients without one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sbp import pipeline
from sbp.pipeline.executor import Executor
from sbp.pipeline.parts import Parts
from sbp.pipeline.region import ManualRegion

D, F = 4, 6
TOLERANCE = 2e-6  # of float32 sums in another order


def block(weights, x, mask, layer):
    """Depends on weights, input, context and its place, so that no mix-up is hidden."""
    h = jnp.tanh(x @ weights["up"] + weights["bias"][None])
    return x + (1 + 0.1 * layer.astype(x.dtype)) * mask[:, None] * (h @ weights["down"])


def losses(outer, x, microbatch):
    error = x @ outer["table"].T - microbatch["target"]
    return 0.5 * (error**2).sum(), {"error": jnp.abs(error).sum()}


PARTS = Parts(
    embed=lambda outer, microbatch: microbatch["input"] @ outer["table"],
    context=lambda microbatch: microbatch["mask"],
    block=block,
    losses=losses,
)


def make(num_layers, num_microbatches, microbatch_size=2):
    """Returns blocks, outer parameters (a tied table) and microbatches."""
    r = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.3 * r.standard_normal(shape), jnp.float32)

    blocks = {
        "up": normal(num_layers, D, F),
        "bias": normal(num_layers, F),
        "down": normal(num_layers, F, D),
    }
    outer = {"table": normal(D, D)}
    sizes = num_microbatches, microbatch_size
    microbatches = {
        "input": normal(*sizes, D),
        "target": normal(*sizes, D),
        "mask": jnp.asarray(r.integers(1, 3, sizes), jnp.float32),
    }
    return blocks, outer, microbatches


def encode(blocks, outer, part):
    """The output of the last layer for a microbatch."""

    def step(x, layer):
        weights = jax.tree.map(lambda leaf: leaf[layer], blocks)
        return block(weights, x, part["mask"], layer), None

    layers = jnp.arange(len(blocks["up"]))
    return jax.lax.scan(step, PARTS.embed(outer, part), layers)[0]


@jax.jit
def gradients_of_one_device(blocks, outer, microbatches):
    """Sums over microbatches of errors and of the gradients of blocks and outer."""

    def objective(params):
        found = jax.vmap(lambda part: losses(params[1], encode(*params, part), part))
        return jax.tree.map(lambda leaf: leaf.sum(0), found(microbatches))

    (_, sums), grads = jax.value_and_grad(objective, has_aux=True)((blocks, outer))
    return sums, *grads


def assert_close(found, expected):
    """Compares each array relative to its largest element."""
    for (path, ours), wanted in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(ours - wanted).max() / np.abs(wanted).max()
        assert error < TOLERANCE, f"{jax.tree_util.keystr(path)}: {error}"


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """The model on a pipeline: each argument as on one device, and so each result."""

    schedule: pipeline.Schedule
    assignment: pipeline.StageAssignment
    is_shared: bool = True

    @property
    def num_stages(self):
        return self.schedule.num_stages

    @property
    def executor(self):
        forward = pipeline.build(
            "forward_only",
            self.num_stages,
            self.schedule.num_microbatches,
            self.schedule.num_chunks,
            head_delay=1,
        )
        return Executor(
            region=self.region,
            tables=pipeline.to_tables(self.schedule),
            forward_tables=pipeline.to_tables(forward),
            layer_indices=self.assignment.layer_indices,
            is_shared=self.is_shared,
        )

    @property
    def region(self):
        devices = np.array(jax.devices()[: self.num_stages]).reshape(-1, 1)
        mesh = Mesh(devices, ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
        return ManualRegion(mesh, ("stage", "data"))

    @property
    def order(self):
        return self.assignment.layer_indices.ravel()

    def gradients_program(self):
        region, executor = self.region, self.executor

        def run(blocks, outer, microbatches):
            blocks, outer = region.varying((blocks, outer))
            sums, block_grads, outer_grads = executor.gradients(
                PARTS, blocks, outer, microbatches
            )
            return (
                region.psum(sums, "stage"),
                block_grads,
                region.psum(outer_grads, "stage"),
            )

        return self._program(run, out_specs=(P(), P("stage"), P()))

    def gradients(self, blocks, outer, microbatches):
        sums, block_grads, outer_grads = self.gradients_program()(
            self.arrange(blocks), outer, microbatches
        )
        places = [self.order.tolist().index(i) for i in range(len(blocks["up"]))]
        return (
            sums,
            jax.tree.map(lambda leaf: leaf[np.array(places)], block_grads),
            outer_grads,
        )

    def losses(self, blocks, outer, microbatches):
        region, executor = self.region, self.executor

        def run(blocks, outer, microbatches):
            blocks, outer = region.varying((blocks, outer))
            sums = executor.losses(PARTS, blocks, outer, microbatches)
            return region.psum(sums, "stage")

        program = self._program(run, out_specs=P())
        return program(self.arrange(blocks), outer, microbatches)

    def outputs(self, blocks, outer, microbatches, head):
        region, executor = self.region, self.executor

        def run(blocks, outer, microbatches):
            blocks, outer = region.varying((blocks, outer))
            found = executor.outputs(PARTS, blocks, outer, microbatches, head)
            return region.psum(found, "stage")

        program = self._program(run, out_specs=P())
        return program(self.arrange(blocks), outer, microbatches)

    def arrange(self, blocks):
        """The blocks in the order of the stages; NaN where a stage has none."""
        is_used = self.order >= 0

        def place(leaf):
            shape = (-1, *[1] * (leaf.ndim - 1))
            return jnp.where(is_used.reshape(shape), leaf[self.order], jnp.nan)

        return jax.tree.map(place, blocks)

    def _program(self, run, *, out_specs):
        in_specs = (P("stage"), P(), P())
        return jax.jit(self.region.run(run, in_specs=in_specs, out_specs=out_specs))
