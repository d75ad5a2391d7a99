"""Reads a text token by token: for each text the scores of its next token.

Texts of different lengths lie in one array, each from its first column on. So slot
``t`` of a text always holds its position ``t``, and what is past the end of a text is
never seen by it: positions and masks need no offsets, and each text is read as it
would be alone.

A decoder keeps what it has read in a *memory*. `CachedDecoder` keeps keys and values,
so that a step costs one token; `RecomputingDecoder` keeps the tokens and reads them all
again, which is slow and is how the model was trained.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attend
from models.stacked import Params, StackedModel

Memory = Any
# From queries, keys and values of new positions to values, and what to keep of them.
Mix = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class AbstractDecoder(Protocol):
    """Reads texts with a model whose blocks are causal, such as `models.gpt2`."""

    def prefill(
        self, params: Params, tokens_BL: jax.Array, lengths_B: jax.Array, num_slots: int
    ) -> tuple[Memory, jax.Array]:
        """Reads the beginnings of texts.

        Args:
            params: Parameters, blocks stacked.
            tokens_BL: The texts, int32; what is past their ends has no meaning.
            lengths_B: Tokens of each, at least 1.
            num_slots: Tokens that a text may grow to, at least ``L``.

        Returns:
            The memory, and the scores of the next token, float32 ``(B, V)``.
        """

    def step(
        self,
        params: Params,
        memory: Memory,
        tokens_B: jax.Array,
        positions_B: jax.Array,
    ) -> tuple[Memory, jax.Array]:
        """Reads one more token of each text.

        Args:
            params: Parameters, blocks stacked.
            memory: Of all positions before.
            tokens_B: The tokens, int32.
            positions_B: Where they stand in their texts, int32.

        Returns:
            As `prefill`.
        """

    def gather(self, memory: Memory, rows_B: jax.Array) -> Memory:
        """Returns the memory of the given texts, which may repeat."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What attention has seen.

    Attributes:
        keys: ``(layers, B, T, H, K)``, slot ``t`` of a text being its position ``t``.
        values: Likewise.
    """

    keys: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class CachedDecoder:
    """Reads each token once, see `AbstractDecoder`.

    Under tensor parallelism the cache is split by heads, as the blocks are.
    """

    model: StackedModel

    def prefill(
        self, params: Params, tokens_BL: jax.Array, lengths_B: jax.Array, num_slots: int
    ) -> tuple[Cache, jax.Array]:
        """Reads the beginnings of texts, all positions at once."""
        batch = {"tokens": tokens_BL}
        mask = self.model.model_class.attention_mask(batch)

        def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            return attend(q, k, v, mask), (k, v)

        def run(x_BLD: jax.Array, block: Params, layer: jax.Array) -> tuple:
            return _run_block(self.model, block, x_BLD, layer, mix)

        x_BLD = self.model.embed(_outer(params), batch, None)
        x_BLD, kept = _scan_layers(run, x_BLD, params["blocks"])
        more = [(0, 0), (0, 0), (0, num_slots - tokens_BL.shape[1]), (0, 0), (0, 0)]
        keys, values = (jnp.pad(x, more) for x in kept)
        logits_BV = _logits_at(self.model, params, x_BLD, lengths_B - 1)
        return Cache(keys=keys, values=values), logits_BV

    def step(
        self,
        params: Params,
        memory: Cache,
        tokens_B: jax.Array,
        positions_B: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """Reads one more token of each text."""
        slots = jnp.arange(memory.keys.shape[2])[None, :]
        is_new_BT11 = (slots == positions_B[:, None])[..., None, None]
        mask_B11T = (slots <= positions_B[:, None])[:, None, None]

        def run(x_B1D: jax.Array, of_layer: tuple, layer: jax.Array) -> tuple:
            block, k_BTHK, v_BTHK = of_layer

            def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                # The cache is written below, once for all layers: the loop over layers
                # would copy it.
                k_all = jnp.where(is_new_BT11, k, k_BTHK)
                v_all = jnp.where(is_new_BT11, v, v_BTHK)
                return attend(q, k_all, v_all, mask_B11T), (k[:, 0], v[:, 0])

            return _run_block(self.model, block, x_B1D, layer, mix)

        batch = {
            "tokens": tokens_B[:, None],
            "token_positions": positions_B[:, None],
        }
        x_B1D = self.model.embed(_outer(params), batch, None)
        layers = params["blocks"], memory.keys, memory.values
        x_B1D, kept = _scan_layers(run, x_B1D, layers)
        rows_B = jnp.arange(len(tokens_B))
        cache = Cache(
            keys=memory.keys.at[:, rows_B, positions_B].set(kept[0]),
            values=memory.values.at[:, rows_B, positions_B].set(kept[1]),
        )
        return cache, _logits_at(self.model, params, x_B1D, jnp.zeros_like(positions_B))

    def gather(self, memory: Cache, rows_B: jax.Array) -> Cache:
        """Returns the cache of the given texts, which may repeat."""
        # Indices in both of the first dims: by the second alone, XLA makes the result
        # in another order of dims on GPUs and copies it once more.
        layers = jnp.arange(memory.keys.shape[0])[:, None]
        return jax.tree.map(lambda x: x[layers, rows_B[None]], memory)


@dataclasses.dataclass(frozen=True, slots=True)
class RecomputingDecoder:
    """Reads every text from its beginning at each step, see `AbstractDecoder`.

    Its memory is the texts, int32 ``(B, T)``.
    """

    model: StackedModel

    def prefill(
        self, params: Params, tokens_BL: jax.Array, lengths_B: jax.Array, num_slots: int
    ) -> tuple[jax.Array, jax.Array]:
        """Reads the beginnings of texts."""
        more = [(0, 0), (0, num_slots - tokens_BL.shape[1])]
        tokens_BT = jnp.pad(tokens_BL, more)
        return tokens_BT, self._logits(params, tokens_BT, lengths_B - 1)

    def step(
        self,
        params: Params,
        memory: jax.Array,
        tokens_B: jax.Array,
        positions_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Reads the texts again, with one more token each."""
        rows_B = jnp.arange(len(tokens_B))
        tokens_BT = memory.at[rows_B, positions_B].set(tokens_B)
        return tokens_BT, self._logits(params, tokens_BT, positions_B)

    def gather(self, memory: jax.Array, rows_B: jax.Array) -> jax.Array:
        """Returns the given texts, which may repeat."""
        return jnp.take(memory, rows_B, axis=0)

    def _logits(
        self, params: Params, tokens_BT: jax.Array, positions_B: jax.Array
    ) -> jax.Array:
        batch = {"tokens": tokens_BT}
        context = self.model.context(batch, None)

        def run(x_BTD: jax.Array, block: Params, layer: jax.Array) -> tuple:
            return self.model.block(block, x_BTD, context, layer), None

        x_BTD = self.model.embed(_outer(params), batch, None)
        x_BTD, _ = _scan_layers(run, x_BTD, params["blocks"])
        return _logits_at(self.model, params, x_BTD, positions_B)


def _outer(params: Params) -> Params:
    return {name: value for name, value in params.items() if name != "blocks"}


def _scan_layers(
    run: Callable[[jax.Array, Any, jax.Array], tuple], x: jax.Array, layers: Any
) -> tuple[jax.Array, Any]:
    """Runs ``run(x, of_layer, index)`` layer after layer; stacks what they keep."""

    def advance(carry: tuple, of_layer: Any) -> tuple:
        x, kept = run(carry[0], of_layer, carry[1])
        return (x, carry[1] + 1), kept

    found: tuple = jax.lax.scan(advance, (x, jnp.int32(0)), layers)
    return found[0][0], found[1]


def _run_block(
    model: StackedModel, block: Params, x_BLD: jax.Array, layer: jax.Array, mix: Mix
) -> tuple[jax.Array, Any]:
    """Runs a block with another attention; returns what that keeps, too."""
    module = nnx.merge(model.block_def, nnx.State(block))
    model.adapt_block(module)
    kept = []

    def mix_positions(h_BLD: jax.Array) -> jax.Array:
        values_BLHK, keep = mix(*module.attention.project(h_BLD))
        kept.append(keep)
        return module.attention.out(values_BLHK)

    x_BLD = module.run(x_BLD, mix_positions, None, layer)
    (keep,) = kept
    return x_BLD, keep


def _logits_at(
    model: StackedModel, params: Params, x_BLD: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Returns the scores of the token after each of the positions, ``(B, V)``."""
    x_B1D = jnp.take_along_axis(x_BLD, positions_B[:, None, None], axis=1)
    outer = _outer(params)
    return model.read(outer, x_B1D, {}, lambda module, x, _: module.logits(x))[:, 0]
