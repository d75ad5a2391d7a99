"""Answers what evaluation harnesses ask of a language model, from a trained workdir.

The questions are those of lm-evaluation-harness: the log-probability of a text after
another, that of a whole text, and what follows a text. `to_lm` makes its model of the
answers; nothing else here needs that package.
"""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from launch import generation, scoring, stop_rules
from launch.data.whole_texts import END_OF_TEXT
from launch.generation import GenerationConfig
from launch.scoring import Scorer
from launch.trained import Trained
from models.sampling import SamplingConfig

MAX_NEW_TOKENS = 256  # of a continuation whose question names no number
# What a question about a continuation may say besides how to draw.
FIELDS = ("until", "max_gen_toks", "do_sample")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A model of the next token that is asked in texts; `build` makes it.

    Attributes:
        trained: The model.
        tokenizer: Its tokenizer.
        prefix: Token before a text.
        scorer: Scores pieces of texts.
    """

    trained: Trained
    tokenizer: tokenizers.Tokenizer
    prefix: int
    scorer: Scorer

    def loglikelihood(
        self, questions: Sequence[tuple[str, str]]
    ) -> list[tuple[float, bool]]:
        """Returns log-probability, and whether all its tokens are the best ones.

        Args:
            questions: A context, which may be empty, and the text after it.
        """
        pieces = [self._encode_pair(*question) for question in questions]
        scores = self.scorer.score(pieces)
        return [(score.log_prob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-probability of each whole text, however long it is."""
        tokens = [self._encode(text) for text in texts]
        return self.scorer.score_texts(tokens, self.prefix)

    def generate_until(
        self, questions: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[str]:
        """Returns what follows each context, without the string that ended it.

        A context is cut at its beginning where the model has no positions for it.

        Args:
            questions: A context, and how to continue it: ``until``, a string or several
                that end the text; ``max_gen_toks``; ``do_sample``, False for the best
                token every time; and, if it is True, ``temperature``, ``top_k`` and
                ``top_p``.

        Raises:
            ValueError: If something else is said, or breaks rules.
        """
        alike: dict[str, list[int]] = collections.defaultdict(list)
        for number, (_, fields) in enumerate(questions):
            alike[json.dumps(dict(fields), sort_keys=True)].append(number)
        texts = [""] * len(questions)
        for numbers in alike.values():
            contexts = [questions[number][0] for number in numbers]
            found = self._continue(contexts, questions[numbers[0]][1])
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def _continue(
        self, contexts: Sequence[str], fields: Mapping[str, Any]
    ) -> list[str]:
        until = fields.get("until") or []
        strings = [until] if isinstance(until, str) else until
        config = GenerationConfig(
            max_new_tokens=fields.get("max_gen_toks", MAX_NEW_TOKENS),
            sampling=_sampling(fields),
            global_batch_size=self.scorer.global_batch_size,
        )
        model = self.trained.config.model
        room = model.max_len - config.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={config.max_new_tokens} leaves no position of"
                f" model.max_len={model.max_len} for a context. Ask for at most"
                f" {model.max_len - 1}."
            )
        rules = stop_rules.of_tokenizer(self.tokenizer, strings)
        table_SV = rules.table(self.tokenizer, model.padded_vocab_size)
        generator = generation.build(self.trained, config, table_SV)
        prompts = [(self._encode(text) or [self.prefix])[-room:] for text in contexts]
        return [
            rules.text_of(self.tokenizer, text.tokens)
            for (text,) in generator.generate(prompts)
        ]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_pair(self, context: str, text: str) -> scoring.Piece:
        """Returns the tokens of both; a token that spans them belongs to the text."""
        if not context:
            return [self.prefix], self._encode(text)
        # A space at the end of a context belongs to the next word.
        stripped = context.rstrip()
        text = context[len(stripped) :] + text
        if not stripped:
            return [self.prefix], self._encode(text)
        before, whole = self._encode(stripped), self._encode(stripped + text)
        return whole[: len(before)], whole[len(before) :]


def build(trained: Trained, *, global_batch_size: int = 16) -> Answers:
    """Returns what answers with a model.

    Args:
        trained: The model.
        global_batch_size: Texts at once, at most.

    Raises:
        ValueError: If the model is none of the next token, has no tokenizer or no token
            for the end of a text, or the batch size does not fit the layout.
    """
    scorer = scoring.build(trained, global_batch_size=global_batch_size)
    tokenizer = trained.need_tokenizer()
    prefix = tokenizer.token_to_id(END_OF_TEXT)
    if prefix is None:
        raise ValueError(
            f"The tokenizer has no {END_OF_TEXT}, which stands before every text. Add"
            " it to the tokenizer.json of the run."
        )
    return Answers(trained=trained, tokenizer=tokenizer, prefix=prefix, scorer=scorer)


def to_lm(answers: Answers) -> Any:
    """Returns the model of lm-evaluation-harness that gives the answers.

    Raises:
        ImportError: If the package is missing.
    """
    from lm_eval.api.model import LM

    class TrainedLm(LM):
        """A trained workdir."""

        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            texts = [request.args[0] for request in requests]
            return answers.loglikelihood_rolling(texts)

        def generate_until(self, requests: list) -> list[str]:
            return answers.generate_until([request.args for request in requests])

    return TrainedLm()


def _sampling(fields: Mapping[str, Any]) -> SamplingConfig:
    """Returns how a question asks to draw."""
    known = ("temperature", "top_k", "top_p")
    if unknown := sorted(set(fields) - {*FIELDS, *known}):
        raise ValueError(
            f"A continuation is asked for with {', '.join(unknown)}, but what can be"
            f" said is {', '.join((*FIELDS, *known))}. Leave the others out."
        )
    if not fields.get("do_sample", False):
        return SamplingConfig()
    given = {name: fields[name] for name in known if fields.get(name) is not None}
    return SamplingConfig(**{"temperature": 1.0, **given})
