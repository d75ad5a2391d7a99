"""Context parallelism: the tokens of a sample are spread over the ranks of ``context``.

What a model does token by token each rank does for its own; attention goes around the
ring (`launch.ring_attention`). Parameters are the same on all ranks, and their
gradients are summed over ``context`` as over ``data``, once per step.

Every rank is given whole samples, a few integers per token, and cuts out its own:

============  =========================================================================
tokens        the parts of the sequence that are the rank's in the ring, with their
              positions in the whole
predictions   BERT predicts some tokens of a sample. Each rank predicts as many of them,
              wherever they are; the ranks that have their activations send these
samples       what there is one of per sample, such as BERT's next sentence, is read off
              the first token, and counts on the rank that has it
============  =========================================================================
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from launch import ring_attention
from launch.attention import choose
from launch.partial_attention import IMPLEMENTATIONS
from launch.passing import GATHER, PASS_ON
from launch.ring import Ring, num_parts
from launch.run_config import RunConfig
from models import packing, weight_dropout
from models.bert import Embeddings, MaskedLmHead
from models.gpt2 import Gpt2
from models.masks import AttentionMask
from models.stacked import Batch, StackedModel
from sbp.pipeline.region import ManualRegion

AXIS = "context"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which arrays of a model's batches belong to tokens, and how these are spread.

    Attributes:
        is_causal: Whether a token sees nothing that follows it: a rank then has an
            early and a late part of the sequence, else one.
        of_tokens: Arrays ``(B, L)`` with an entry per token.
        of_predictions: Arrays ``(B, N)`` with an entry per predicted token.
        positions: Arrays ``(B, N)`` that say which these are.
        sample_weights: Weights ``(B,)`` of samples.
    """

    is_causal: bool
    of_tokens: tuple[str, ...]
    of_predictions: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    sample_weights: tuple[str, ...] = ()


SEQUENCES: Mapping[str, Sequences] = {
    "bert": Sequences(
        is_causal=False,
        of_tokens=("tokens", "segments", "is_token", "documents"),
        of_predictions=("targets", "weights"),
        positions=("positions",),
        sample_weights=("sample_weights",),
    ),
    "bert_classifier": Sequences(
        is_causal=False,
        of_tokens=("tokens", "segments", "is_token", "documents"),
        sample_weights=("weights",),
    ),
    "bert_tagger": Sequences(
        is_causal=False,
        of_tokens=("tokens", "segments", "is_token", "documents", "targets", "weights"),
    ),
    "gpt2": Sequences(
        is_causal=True, of_tokens=("tokens", "targets", "weights", "documents")
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One rank's part of every sample; all methods run in its region.

    Attributes:
        region: Manual over ``context``.
        ring: The ranks.
        sequences: What is spread.
    """

    region: ManualRegion
    ring: Ring
    sequences: Sequences

    @property
    def options(self) -> dict[str, str] | None:
        """What XLA is told about programs in which keys go around a ring."""
        if self.region.mesh.devices.flat[0].platform == "cpu":
            return None
        # On GPUs one permutation is under way at a time: what is sent at once is to be
        # one, however large, so that none waits for another.
        return {"xla_gpu_collective_permute_combine_threshold_bytes": str(2**30)}

    def own(self, batch: Batch) -> Batch:
        """Returns this rank's part of whole samples.

        ``token_positions`` says where its tokens are in their documents.
        """
        whole = batch | {"token_positions": packing.token_positions(batch)}
        kinds: Mapping[Callable, tuple[str, ...]] = {
            self._own_tokens: ("token_positions", *self.sequences.of_tokens),
            self._own_predictions: self.sequences.of_predictions,
            self._fill: self.sequences.positions,
            self._on_first: self.sequences.sample_weights,
        }
        cuts = {name: cut for cut, names in kinds.items() for name in names}
        return {name: cuts.get(name, lambda x: x)(x) for name, x in whole.items()}

    def adapt(self, model: Any) -> None:
        """Has a model without its blocks work on this rank's tokens."""
        for _, module in list(nnx.iter_modules(model)):
            match module:
                case MaskedLmHead():
                    module.take = self.take
                case Embeddings() | Gpt2():
                    module.drop = self.drop

    def adapt_block(self, block: Any) -> None:
        """Has a block attend to the tokens of all ranks."""
        block.attention.core, block.drop = self.attend, self.drop

    def attend(
        self,
        q_BLHK: jax.Array,
        k_BLHK: jax.Array,
        v_BLHK: jax.Array,
        mask: AttentionMask | None,
        *,
        rate: float = 0.0,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns what `models.attention.attend` finds for this rank's queries.

        Communication: that of `ring_attention.attend`.
        """
        length = self.ring.size * q_BLHK.shape[1]
        sizes = dict(num_queries=length, num_keys=length)
        drops = weight_dropout.make(rate, keys_B, **sizes)
        mask = mask or AttentionMask()
        return ring_attention.attend(self.ring, q_BLHK, k_BLHK, v_BLHK, mask, drops)

    def drop(
        self, x: jax.Array, rate: float, keys_B: jax.Array | None, *, name: str = ""
    ) -> jax.Array:
        """Returns what `models.layers.dropout` leaves of this rank's ``(B, L, D)``."""
        # The mask of a whole sample is a matrix, of which these are some rows.
        length = self.ring.size * x.shape[1]
        sizes = dict(num_queries=length, num_keys=x.shape[2])
        drops = weight_dropout.make(rate, keys_B, **sizes)
        if drops is None:
            return x
        shape = self._part_length(x), x.shape[2]

        def keep(words: jax.Array) -> jax.Array:
            places = [part * shape[0] for part in self._parts]
            parts = [drops.of_head(words, 0)(place, 0, shape) for place in places]
            return jnp.concatenate(parts)

        mask_BLD = jax.vmap(keep)(drops.words)
        mask_BLD = checkpoint_name(mask_BLD, name) if name else mask_BLD
        return jnp.where(mask_BLD, x / (1 - rate), jnp.zeros_like(x))

    def take(self, x_BLD: jax.Array, positions_BN: jax.Array) -> jax.Array:
        """Returns this rank's share of the activations at positions of the sequence.

        Args:
            x_BLD: Those of this rank's tokens, which are consecutive.
            positions_BN: In the whole sequence; all ranks have the same ones.

        Returns:
            ``(B, N / size, D)``.

        Communication: a reduce-scatter of ``(B, N, D)`` over ``context``.
        """
        length = x_BLD.shape[1]
        places_BN = positions_BN - self._rank * length
        is_own_BN = (places_BN >= 0) & (places_BN < length)
        places_BN1 = jnp.clip(places_BN, 0, length - 1)[..., None]
        own_BND = jnp.take_along_axis(x_BLD, places_BN1, axis=1)
        own_BND = jnp.where(is_own_BN[..., None], own_BND, 0)
        return self.region.psum_scatter(own_BND, AXIS, dim=1)

    @property
    def _rank(self) -> jax.Array:
        return self.region.index(AXIS)

    @property
    def _parts(self) -> list[jax.Array]:
        """The parts of the sequence that this rank has."""
        numbers = range(num_parts(is_causal=self.sequences.is_causal))
        return [self.ring.part(self._rank, number) for number in numbers]

    def _part_length(self, x_BL: jax.Array) -> int:
        return x_BL.shape[1] // num_parts(is_causal=self.sequences.is_causal)

    def _own_tokens(self, x_BL: jax.Array) -> jax.Array:
        length = self._part_length(x_BL) // self.ring.size

        def cut(part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x_BL, part * length, length, axis=1)

        return jnp.concatenate([cut(part) for part in self._parts], axis=1)

    def _own_predictions(self, x_BN: jax.Array) -> jax.Array:
        x_BN = self._fill(x_BN)
        num = x_BN.shape[1] // self.ring.size
        return jax.lax.dynamic_slice_in_dim(x_BN, self._rank * num, num, axis=1)

    def _on_first(self, x_B: jax.Array) -> jax.Array:
        return jnp.where(self._rank == 0, x_B, 0)

    def _fill(self, x_BN: jax.Array) -> jax.Array:
        """Returns predictions and others of no weight, so that they divide."""
        more = -x_BN.shape[1] % self.ring.size
        return jnp.pad(x_BN, ((0, 0), (0, more)))


def build(
    config: RunConfig, region: ManualRegion, *, has_cudnn: bool
) -> Context | None:
    """Returns how a run spreads its sequences; None if it does not.

    Args:
        config: Of the run.
        region: Of the run.
        has_cudnn: See `launch.attention.choose`.
    """
    size = config.dist.context_parallel_size
    if size == 1:
        return None
    attention = choose(
        config.model,
        platform=region.mesh.devices.flat[0].platform,
        length=part_length(config, config.data.seq_length),
        has_cudnn=has_cudnn,
    )
    dist = config.dist
    # cuDNN is to be called where XLA has nothing left to split.
    is_per_head = dist.tensor_parallel_size > 1 or attention == "cudnn"
    ring = Ring(
        axis_name=AXIS,
        size=size,
        attention=IMPLEMENTATIONS[attention],
        # Stages attend at different times.
        passing=GATHER if dist.pipeline_parallel_size > 1 else PASS_ON,
        head_axis="tensor" if is_per_head else None,
    )
    return Context(region=region, ring=ring, sequences=SEQUENCES[config.model_name])


def part_length(config: RunConfig, length: int) -> int:
    """Returns how many tokens attend, and are attended to, at once.

    Args:
        config: Of the run.
        length: Tokens of a sample.
    """
    size = config.dist.context_parallel_size
    if size == 1 or config.model_name not in SEQUENCES:
        return length
    return length // (size * _num_parts(config))


def over_context(model: StackedModel, context: Context) -> StackedModel:
    """Returns the model for one rank's part of its samples."""

    def both(first: Callable, second: Callable) -> Callable[[Any], None]:
        def adapt(module: Any) -> None:
            first(module)
            second(module)

        return adapt

    return dataclasses.replace(
        model,
        adapt=both(model.adapt, context.adapt),
        adapt_block=both(model.adapt_block, context.adapt_block),
    )


def broken_rules(config: RunConfig) -> Iterator[str]:
    """Yields one sentence per broken rule on ``dist.context_parallel_size``."""
    size = config.dist.context_parallel_size
    if size == 1:
        return
    asked = f"dist.context_parallel_size={size}"
    if config.model_name not in SEQUENCES:
        known = ", ".join(map(repr, SEQUENCES))
        yield (
            f"{asked} splits the tokens of a sample, which is for the long sequences of"
            f" {known}, not for model.name={config.model_name!r}. Use 1, and"
            " dist.data_parallel_size or dist.tensor_parallel_size instead."
        )
        return
    length, parts = config.data.seq_length, _num_parts(config)
    if length % (parts * size):
        step = parts * size
        near = [n for n in (length // step * step, -(-length // step) * step) if n]
        each = "an early and a late part of the sequence" if parts == 2 else "a part"
        yield (
            f"{asked} gives each rank {each}, {step} parts in all, but"
            f" data.seq_length={length} is not divisible by {step}. Use"
            f" {' or '.join(map(str, near))}, or another number of ranks."
        )


def _num_parts(config: RunConfig) -> int:
    return num_parts(is_causal=SEQUENCES[config.model_name].is_causal)
