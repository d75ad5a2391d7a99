"""A GPT-2 of a few tokens whose random weights make the best token clearly the best."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import stacked, stopping
from models.decoding import CachedDecoder, RecomputingDecoder
from models.generation import Prompts
from models.gpt2 import Gpt2, Gpt2Config

CONFIG = Gpt2Config(
    num_layers=2,
    num_heads=4,
    model_dim=16,
    mlp_dim=32,
    vocab_size=11,
    vocab_multiple=4,
    max_len=24,
    init_scale=0.5,
)
MODEL = stacked.stack(lambda rngs: Gpt2(CONFIG, rngs=rngs))
DECODERS = {"cached": CachedDecoder(MODEL), "recomputing": RecomputingDecoder(MODEL)}
NEVER = stopping.build_table((), (), {}, num_tokens=12)


@functools.cache
def params():
    drawn = jax.jit(MODEL.init)(jax.random.key(1))
    # Or the output layer, being the embedding, would repeat the last token for ever.
    return drawn | {"position": 3 * drawn["position"]}


@functools.cache
def _forward():
    def logits(weights, tokens_BL):
        batch, weights = {"tokens": tokens_BL}, dict(weights)
        blocks = weights.pop("blocks")
        x_BLD = MODEL.embed(weights, batch, None)
        for layer in range(CONFIG.num_layers):
            block = jax.tree.map(lambda leaf, i=layer: leaf[i], blocks)
            x_BLD = MODEL.block(block, x_BLD, MODEL.context(batch, None), layer)
        return MODEL.read(weights, x_BLD, batch, lambda model, x, _: model.logits(x))

    return jax.jit(logits)


def logits_of(texts):
    """What the model as it is trained scores after each token of texts, in NumPy."""
    tokens_BL = np.zeros((8, CONFIG.max_len), np.int32)  # one shape, one program
    for row, text in zip(tokens_BL, texts, strict=False):
        row[: len(text)] = text
    return np.asarray(_forward()(params(), tokens_BL))[: len(texts)]


def make_prompts(texts, *, keys=None, padding=0, length=None):
    """The texts as a batch; what is past their ends is ``padding``."""
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = np.full((len(texts), length or lengths.max()), padding, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Prompts(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        ends=jnp.zeros(len(texts), jnp.int32),
        keys=keys,
    )


@functools.cache
def _program(kind, decoder, fields):
    algorithm = kind(decoder=DECODERS[decoder], **dict(fields))

    def run(weights, prompts, table_SV):
        state = algorithm.start(weights, prompts, table_SV)
        return algorithm.finish(weights, prompts, table_SV, state)

    return jax.jit(run)


def run(kind, prompts, table_SV=NEVER, *, decoder="cached", **fields):
    """Runs a `Generation` or a `BeamSearch` of these fields to its end."""
    program = _program(kind, decoder, tuple(sorted(fields.items())))
    return jax.device_get(program(params(), prompts, jnp.asarray(table_SV)))
