"""Training steps of small models on many layouts, from the same weights and data."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from launch import distributed, job, optimizer, resolve, state, step
from launch.resolve import DeviceCount
from models import MODELS, stacked
from tests.launch import batches

NUM_LAYERS = 8  # one for each of two chunks of four stages
BATCH_SIZE = 16
FIELDS = {
    "model.num_layers": NUM_LAYERS,
    "model.model_dim": 16,
    "model.num_heads": 8,
    "model.mlp_dim": 32,
    "train.global_batch_size": BATCH_SIZE,
    "optim.learning_rate": 1e-2,
    "optim.warmup_steps": 2,
    "train.num_steps": 20,
}
# Programs kept: of too many, a process runs out of places to map their code to.
FEW = 8
TEXT = {
    "model.vocab_size": batches.VOCAB_SIZE,
    "model.vocab_multiple": 64,
    "model.max_len": 12,
    "data.seq_length": 12,
}
IMAGES = {
    "model.image_size": 8,
    "model.patch_size": 2,
    "model.pooling": "class_token",  # an odd number of positions
}
OF_MODEL = {"bert": TEXT, "gpt2": TEXT, "vit": IMAGES}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout (data x tensor x stage x context), and what is not by default."""

    data: int = 1
    tensor: int = 1
    stage: int = 1
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    fields: tuple[tuple[str, object], ...] = ()
    model: str = "bert"
    context: int = 1
    weights_seed: int = 0

    def __str__(self):
        changed = [str(value) for _, value in self.fields]
        sizes = f"{self.data}x{self.tensor}x{self.stage}"
        sizes += f"x{self.context}" if self.context > 1 else ""
        name = [] if self.model == "bert" else [self.model]
        return "-".join([*name, sizes, self.schedule, *changed]).replace(" ", "")

    @property
    def config(self):
        # As few as every schedule can do with.
        num_microbatches = self.num_microbatches or max(self.stage, 2)
        fields = (
            FIELDS
            | OF_MODEL[self.model]
            | {
                "dist.data_parallel_size": self.data,
                "dist.tensor_parallel_size": self.tensor,
                "dist.pipeline_parallel_size": self.stage,
                "dist.context_parallel_size": self.context,
                "dist.pipeline_schedule": self.schedule,
                "dist.pipeline_num_chunks": 1 + (self.schedule == "interleaved_1f1b"),
                "train.num_microbatches": num_microbatches,
                **dict(self.fields),
            }
        )
        return resolve.resolve(
            resolve.load(f"configs/{self.model}_tiny.py"),
            {name: str(value) for name, value in fields.items()},
            DeviceCount(num_devices=math.prod(self._sizes)),
        )

    @property
    def mesh(self):
        sizes = self._sizes
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        axes = distributed.AXIS_NAMES
        return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))

    @property
    def _sizes(self):
        return self.stage, self.data, self.context, self.tensor


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a few steps gave: gradients of the first one, the loss of each."""

    gradients: dict
    losses: np.ndarray


@functools.lru_cache(maxsize=FEW)
def make_steps(case):
    """The step's config; its optimizer also keeps the last gradients."""
    config, mesh = case.config, case.mesh
    steps = job.build_steps(config, mesh)
    rule = optax.chain(
        optax.trace(decay=0.0),
        optimizer.build(config.optim, num_steps=config.train.num_steps),
    )
    shardings = state.state_shardings(
        steps.model,
        rule,
        specs=steps.specs,
        mesh=steps.mesh,
        loss_scaling=steps.loss_scaling,
    )
    return dataclasses.replace(steps, optimizer=rule, shardings=shardings)


@functools.lru_cache(maxsize=FEW)
def compile_step(case):
    """The compiled training step."""
    steps = make_steps(case)
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    program = step.build_train_step(steps)
    return program.lower(abstract, make_batch(case.config)).compile()


@functools.cache
def train(case, num_steps):
    """Runs the steps, on two batches in turns."""
    steps, program = make_steps(case), compile_step(case)
    train_state = create_state(case)
    losses, gradients = [], None
    for number in range(num_steps):
        batch = make_batch(case.config, number % 2)  # few enough to learn
        train_state, metrics = program(train_state, batch)
        losses.append(float(metrics["loss"]))
        if number == 0:
            gradients = jax.device_get(train_state.opt_state[0].trace)
    order = steps.model.layer_order
    places = np.array([order.index(layer) for layer in range(steps.model.num_layers)])
    gradients["blocks"] = jax.tree.map(lambda x: x[places], gradients["blocks"])
    return Trained(gradients, np.array(losses))


def create_state(case):
    """The state at step 0, with the weights that one device would have."""
    steps = make_steps(case)
    params = dict(initial_params(case.model, case.config.model, case.weights_seed))
    order = np.array(steps.model.layer_order)
    params["blocks"] = jax.tree.map(
        lambda x: np.where(order.reshape(-1, *[1] * (x.ndim - 1)) >= 0, x[order], 0),
        params["blocks"],
    )
    abstract = state.abstract_state(steps.model, steps.optimizer, steps.shardings)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    scaling = steps.loss_scaling
    scale = None if scaling is None else jax.device_get(scaling.init())
    start = dataclasses.replace(zeros, params=params, loss_scale=scale)
    return jax.device_put(start, steps.shardings, may_alias=False)


@functools.cache
def initial_params(name, model_config, seed=0):
    """Random weights, none of which is 0 or 1 as they would be at the start."""
    r = np.random.default_rng(seed)
    model = stacked.stack(lambda rngs: MODELS[name].module(model_config, rngs=rngs))

    def draw(path, leaf):
        is_scale = path[-1].key == "scale"
        noise = r.standard_normal(leaf.shape) * 0.05
        return (noise + is_scale).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, model.shapes)


def make_batch(config, seed=0):
    """A random batch, in which samples differ in how much they hold."""
    return batches.make(config.model_name, config, seed)
