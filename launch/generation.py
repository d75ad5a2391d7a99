"""Continues texts with a trained model, on a mesh, in batches.

One program reads the prompts of a batch and continues them in a loop. The heads of the
cache are split over ``tensor`` and the texts over ``data``, where each rank's loop ends
with its own last text. What is drawn for a text depends on the seed and the number of
the text alone, not on the batch it is in.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch import text_batches
from launch.trained import Trained
from models.beam_search import BeamSearch
from models.decoding import AbstractDecoder, CachedDecoder
from models.generation import Generation, Prompts
from models.rules import at_least, between
from models.sampling import SamplingConfig
from models.stacked import Params, StackedModel

FAMILIES = ("gpt2",)  # whose blocks are causal

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How to continue texts.

    Attributes:
        max_new_tokens: That a text may get.
        sampling: How each is chosen.
        num_samples: Continuations of each prompt: so many draws, or beams.
        num_beams: Unfinished texts of a beam search; 1 for none.
        length_penalty: See `models.beam_search`.
        seed: Of what is drawn.
        global_batch_size: Texts at once, at most.
    """

    max_new_tokens: int = 100
    sampling: SamplingConfig = SamplingConfig()
    num_samples: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    seed: int = 0
    global_batch_size: int = 16

    @property
    def num_draws(self) -> int:
        """Texts to be drawn of each prompt; beams are no draws."""
        return self.num_samples if self.num_beams == 1 else 1

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(
            self,
            max_new_tokens=1,
            num_samples=1,
            num_beams=1,
            length_penalty=0,
            global_batch_size=1,
        )
        yield from between(self, seed=(0, 2**32 - 1))
        yield from self.sampling.broken_rules()
        if self.num_beams > 1 and self.sampling.is_random:
            yield (
                f"num_beams={self.num_beams} looks for the most probable text, and"
                f" temperature={self.sampling.temperature} draws one. Leave one of them"
                " out."
            )
        if self.num_beams > 1 and self.num_samples > self.num_beams:
            yield (
                f"num_samples={self.num_samples} is more than the texts that"
                f" num_beams={self.num_beams} finds. Use as many beams."
            )
        if self.num_beams == 1 and self.length_penalty != 1:
            yield (
                f"length_penalty={self.length_penalty} has no meaning without a beam"
                " search. Set num_beams, such as 4."
            )
        if (self.num_beams == 1 and not self.sampling.is_random) and (
            self.num_samples > 1
        ):
            yield (
                f"num_samples={self.num_samples} are all the same at temperature=0,"
                " which takes the best token. Set a temperature, such as 1.0, or"
                " num_beams."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        tokens: Without the prompt, with the token that ends the text.
        has_ended: Whether a stop rule ended it, not the number of tokens.
        score: Of a beam search, see `models.beam_search.Finished`; None without.
    """

    tokens: tuple[int, ...]
    has_ended: bool
    score: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Continues texts in a given way; `build` makes it.

    Attributes:
        trained: The model.
        config: How to continue.
        table: When a text ends, int32 ``(S, V)``, from `models.stopping`.
        program: From `build_program`; compiled once for each shape of a batch.
    """

    trained: Trained
    config: GenerationConfig
    table: np.ndarray
    program: Callable[[Params, Arrays, Arrays], Arrays]

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[Continuation]]:
        """Returns the continuations of each prompt, ``num_samples`` of them.

        Args:
            prompts: Tokens of each.

        Raises:
            ValueError: If a prompt is empty or too long; all of them are listed.

        Communication: in each step that of the tensor-parallel layers, and of the
            scores of the next token, over ``tensor``; nothing over ``data``.
        """
        _raise(_broken_prompt_rules(self.config, self.trained.config.model, prompts))
        seed = np.uint32(self.config.seed)
        shared = {"table": jnp.asarray(self.table), "seed": seed}
        num_texts = self.config.num_samples // self.config.num_draws
        found: list[list[Continuation]] = [[] for _ in prompts]
        for numbers, batch in _batches(
            prompts, self.config, self.trained, end=len(self.table) - 1
        ):
            outputs = self.program(self.trained.params, batch, shared)
            outputs = jax.device_get(outputs)
            for row, prompt in enumerate(numbers):
                found[prompt] += _read(outputs, row, self.table)[:num_texts]
        return found


def build(
    trained: Trained, config: GenerationConfig, table_SV: np.ndarray
) -> Generator:
    """Returns what continues texts with a model.

    Args:
        trained: The model.
        config: How to continue.
        table_SV: When a text ends, from `models.stopping`, for all tokens of the model,
            padding included.

    Raises:
        ValueError: If the model does not continue texts, or the config breaks rules;
            all of them are listed.
    """
    check_family(trained.config.model_name)
    _raise([*config.broken_rules(), *_broken_model_rules(config, trained)])
    program = build_program(trained, config)
    return Generator(trained=trained, config=config, table=table_SV, program=program)


def check_family(model_name: str) -> None:
    """Checks that a model continues texts.

    Raises:
        ValueError: If it does not.
    """
    if model_name not in FAMILIES:
        raise ValueError(
            f"model.name={model_name!r} does not continue texts. Use the"
            f" workdir of a {' or '.join(FAMILIES)}."
        )


def build_program(
    trained: Trained,
    config: GenerationConfig,
    decoder: Callable[[StackedModel], AbstractDecoder] = CachedDecoder,
) -> Callable[[Params, Arrays, Arrays], Arrays]:
    """Returns the jitted ``(params, batch, shared) -> outputs``.

    A batch has ``tokens`` ``(B, L)`` and, all of them ``(B,)``, ``lengths`` and
    ``ends`` as in `models.generation.Prompts`, and the numbers ``prompt`` and
    ``sample`` of what is to be drawn. ``shared`` has the ``table`` of stop rules and
    the ``seed``. Outputs are ``tokens`` ``(B, W, N)``, ``num_new`` and ``scores``
    ``(B, W)``, W being 1 without a beam search; scores are then 0.
    """
    region = trained.steps.region
    algorithm = _algorithm(config, decoder(trained.steps.model), trained.mesh)

    def run(params: Params, batch: Arrays, shared: Arrays) -> Arrays:
        params, shared = region.varying((params, shared))
        keys_B = None
        if config.sampling.is_random:
            keys_B = _keys(shared["seed"], batch["prompt"], batch["sample"])
        prompts = Prompts(
            tokens=batch["tokens"],
            lengths=batch["lengths"],
            ends=batch["ends"],
            keys=keys_B,
        )
        table_SV = shared["table"]
        state = region.varying(algorithm.start(params, prompts, table_SV))
        final = algorithm.finish(params, prompts, table_SV, state)
        if config.num_beams > 1:
            return {
                "tokens": final.tokens,
                "num_new": final.num_new,
                "scores": final.scores,
            }
        num_new_B1 = final.num_new[:, None]
        scores_B1 = jnp.zeros_like(num_new_B1, jnp.float32)
        tokens_B1N = final.tokens[:, None]
        return {"tokens": tokens_B1N, "num_new": num_new_B1, "scores": scores_B1}

    program = region.run(
        run, in_specs=(trained.steps.specs, P("data"), P()), out_specs=P("data")
    )
    over_data, everywhere = (
        NamedSharding(trained.mesh, P("data")),
        NamedSharding(trained.mesh, P()),
    )
    return jax.jit(
        program,
        in_shardings=(trained.steps.shardings.params, over_data, everywhere),
        out_shardings=over_data,
    )


def _raise(problems: Iterable[str]) -> None:
    """Raises a ValueError that lists the problems, if there are any."""
    lines = [f"\n  {problem}" for problem in problems]
    if lines:
        count = "1 rule" if len(lines) == 1 else f"{len(lines)} rules"
        raise ValueError(f"The request breaks {count}:{''.join(lines)}")


def _broken_model_rules(config: GenerationConfig, trained: Trained) -> Iterator[str]:
    """Yields one sentence per rule between the request and the model."""
    top_k, vocab_size = config.sampling.top_k, trained.config.model.vocab_size
    if top_k is not None and top_k > vocab_size:
        yield (
            f"top_k={top_k} is more than the {vocab_size} tokens of the model. Leave it"
            " out to draw from all."
        )
    if config.global_batch_size % trained.data_parallel_size:
        yield (
            f"global_batch_size={config.global_batch_size} is not divisible by"
            f" data_parallel_size={trained.data_parallel_size}. Use a multiple of it."
        )


def _broken_prompt_rules(
    config: GenerationConfig, model: Any, prompts: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Yields one sentence per prompt that cannot be continued."""
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            yield (
                f"Prompt {number} is empty, and there is nothing to continue. Begin it"
                " with a word, or with <|endoftext|> for a new text."
            )
        elif len(prompt) + config.max_new_tokens > model.max_len:
            room = model.max_len - len(prompt)
            remedy = f"max_new_tokens={room}, or " if room > 0 else ""
            yield (
                f"Prompt {number} has {len(prompt)} tokens, and"
                f" max_new_tokens={config.max_new_tokens} more are longer than the"
                f" {model.max_len} positions of model.max_len. Use {remedy}a shorter"
                " prompt."
            )


def _algorithm(config: GenerationConfig, decoder: AbstractDecoder, mesh: Mesh) -> Any:
    def gather(logits_BV: jax.Array) -> jax.Array:
        # The best token is found part by part. Sorting and drawing would communicate
        # at every turn instead.
        if config.num_beams == 1 and not config.sampling.is_random:
            return logits_BV
        inside = jax.sharding.get_abstract_mesh()
        whole = NamedSharding(mesh if inside.empty else inside, P())
        return jax.lax.with_sharding_constraint(logits_BV, whole)

    if config.num_beams == 1:
        return Generation(
            decoder=decoder,
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            gather=gather,
        )
    return BeamSearch(
        decoder=decoder,
        num_beams=config.num_beams,
        max_new_tokens=config.max_new_tokens,
        length_penalty=config.length_penalty,
        repetition_penalty=config.sampling.repetition_penalty,
        gather=gather,
    )


def _keys(seed: jax.Array, prompt_B: jax.Array, sample_B: jax.Array) -> jax.Array:
    """Returns a key per text, made of its numbers."""
    key = jax.random.key(seed)

    def of_text(prompt: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, prompt), sample)

    return jax.vmap(of_text)(prompt_B, sample_B)


def _batches(
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    trained: Trained,
    *,
    end: int,
) -> Iterator[tuple[list[int], Arrays]]:
    """Yields batches, each with the number of the prompt in each of its rows.

    A row without a text is one that has ended, in state ``end``.
    """
    draws = range(config.num_draws)
    texts = [(prompt, draw) for prompt in range(len(prompts)) for draw in draws]
    for rows in text_batches.by_length(
        [len(prompts[prompt]) for prompt, _ in texts],
        longest=trained.config.model.max_len - config.max_new_tokens,
        global_batch_size=config.global_batch_size,
        data_parallel_size=trained.data_parallel_size,
    ):
        batch: Arrays = {
            "tokens": np.zeros((rows.num_rows, rows.length), np.int32),
            "lengths": np.ones(rows.num_rows, np.int32),
            "ends": np.full(rows.num_rows, end, np.int32),
            "prompt": np.zeros(rows.num_rows, np.int32),
            "sample": np.zeros(rows.num_rows, np.int32),
        }
        chosen = [texts[text] for text in rows.texts]
        for row, (prompt, draw) in enumerate(chosen):
            tokens = prompts[prompt]
            batch["tokens"][row, : len(tokens)] = tokens
            batch["lengths"][row] = len(tokens)
            batch["ends"][row] = 0
            batch["prompt"][row], batch["sample"][row] = prompt, draw
        yield [prompt for prompt, _ in chosen], batch


def _read(outputs: Arrays, row: int, table_SV: np.ndarray) -> list[Continuation]:
    """Returns the texts of a row, the best one first."""
    found = []
    is_search = outputs["tokens"].shape[1] > 1
    for tokens, num_new, score in zip(
        *(outputs[name][row] for name in ("tokens", "num_new", "scores")), strict=True
    ):
        text = tuple(tokens[:num_new].tolist())
        state = 0
        for token in text:
            state = table_SV[state, token]
        found.append(
            Continuation(
                tokens=text,
                has_ended=bool(state == len(table_SV) - 1),
                score=float(score) if is_search else None,
            )
        )
    return found
