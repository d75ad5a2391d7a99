"""Rules on the fields of a config, each broken one a sentence.

A field that is None has nothing to obey.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any


def at_least(config: Any, **bounds: float) -> Iterator[str]:
    """Yields a sentence for each field below its bound.

    Example:
        >>> from launch.run_config import EvalConfig
        >>> list(at_least(EvalConfig(every_steps=0), every_steps=1, num_batches=1))
        ['every_steps=0 must be at least 1.']
    """
    values = dataclasses.asdict(config)
    for field, bound in bounds.items():
        if values[field] is not None and not values[field] >= bound:
            yield f"{field}={values[field]} must be at least {bound}."


def between(config: Any, **bounds: tuple[float, float]) -> Iterator[str]:
    """Yields a sentence for each field outside its two bounds."""
    values = dataclasses.asdict(config)
    for field, (low, high) in bounds.items():
        if values[field] is not None and not low <= values[field] <= high:
            yield f"{field}={values[field]} must be between {low} and {high}."


def one_of(config: Any, **choices: tuple[Any, ...]) -> Iterator[str]:
    """Yields a sentence for each field that is none of its choices."""
    values = dataclasses.asdict(config)
    for field, names in choices.items():
        if values[field] is not None and values[field] not in names:
            known = ", ".join(map(repr, names))
            yield f"{field}={values[field]!r} is not one of {known}."
