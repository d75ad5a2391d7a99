"""From plain values to the annotated fields of a dataclass; nothing is rewritten."""

import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any


def build(config_type: Any, given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Returns the dataclass, or None, and what is wrong with the fields given."""
    hints = typing.get_type_hints(config_type)
    problems = unknown("field", given, hints)
    fields = {}
    for name, value in given.items():
        if name not in hints:
            continue
        try:
            fields[name] = _convert(value, hints[name])
        except TypeError:
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            if isinstance(hints[name], types.GenericAlias | types.UnionType):
                wanted = str(hints[name])
            example = config_type.__dataclass_fields__[name].default
            problems.append(
                f"{name}={value!r} is not of type {wanted}. Give one like {example!r}."
            )
    return (None if problems else config_type(**fields)), problems


def unknown(kind: str, given: Any, known: Any, prefix: str = "") -> list[str]:
    """Returns a sentence for each given name that is not known."""
    problems = []
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = (
                f"Did you mean {close[0]!r}?"
                if close
                else f"Known: {', '.join(known)}."
            )
            problems.append(f"{prefix}{name}: no such {kind}. {hint}")
    return problems


def _convert(value: Any, wanted: Any) -> Any:
    """Returns ``value`` as the annotated type; TypeError if that would change it."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType:
        return _convert_to_any(value, args)
    if origin is tuple and isinstance(value, list | tuple):
        items = [args[0]] * len(value) if args[-1] is ... else args
        if len(items) != len(value):
            raise TypeError
        return tuple(_convert(v, a) for v, a in zip(value, items, strict=True))
    if origin is dict and isinstance(value, dict):
        return {_convert(k, args[0]): _convert(v, args[1]) for k, v in value.items()}
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise TypeError
    return value


def _convert_to_any(value: Any, wanted: tuple[Any, ...]) -> Any:
    for one in wanted:
        try:
            return _convert(value, one)
        except TypeError:
            continue
    raise TypeError
