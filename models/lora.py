"""Low-rank adapters of linear layers, LoRA (arXiv:2106.09685).

The kernel W of a layer stays as it is, and the layer computes ``x W + s (x A) B`` with
trained A and B of a small rank r and ``s = alpha / r``. B begins with zeros, so that
training begins with the model as it was. A layer keeps the paths of its parameters and
gets two more, ``lora_a`` and ``lora_b``.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import normal
from models.rules import at_least
from models.sharding import Rows, adapter_rows, is_match
from models.stacked import Params, path_of

ADAPTERS = ("lora_a", "lora_b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which layers have adapters, and of what size.

    Attributes:
        rank: Columns of A and rows of B; None for no adapters at all.
        alpha: The adapters count ``alpha / rank`` times.
        targets: Path patterns of linear layers, ``*`` standing for one segment.
        train_also: Path patterns of parameters that are trained besides the adapters.
            None for those of the heads.
    """

    rank: int | None = None
    alpha: float = 16.0
    targets: tuple[str, ...] = ("blocks/*/attention/qkv", "blocks/*/attention/out")
    train_also: tuple[str, ...] | None = None

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank is not None

    @property
    def scale(self) -> float:
        """What the product of the two maps of an adapter is multiplied by."""
        return self.alpha / (self.rank or 1)

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from at_least(self, rank=1)
        if not self.alpha > 0:
            yield f"alpha={self.alpha} must be above 0. Twice the rank is common."
        if self.is_on and not self.targets:
            yield (
                f"targets=() leaves rank={self.rank} without a layer. Name layers, such"
                " as 'blocks/*/attention/qkv'."
            )
        for pattern in self.targets:
            if pattern.startswith("blocks/") and pattern.split("/")[1] != "*":
                yield (
                    f"targets: {pattern!r} picks out one block, but blocks are all"
                    " alike. Write 'blocks/*/...'."
                )


class LoraLinear(nnx.Module):
    """A linear layer and its adapter.

    Attributes:
        kernel: ``(*in, *out)``, as it was.
        bias: As it was; None if there is none.
        lora_a: ``(*in, rank)``.
        lora_b: ``(rank, *out)``.
    """

    def __init__(self, layer: Any, *, rank: int, alpha: float, rngs: nnx.Rngs):
        """Takes the parameters over.

        Args:
            layer: ``nnx.Linear``, or ``nnx.LinearGeneral`` over the last dims.
            rank: Of the adapter.
            alpha: See `LoraConfig`.
            rngs: Of ``lora_a``.

        Raises:
            ValueError: If the layer maps other dims than the last ones.
        """
        self.layer_def = nnx.graphdef(layer)
        self.kernel, self.bias = layer.kernel, layer.bias
        self.dtype, self.promote_dtype = layer.dtype, layer.promote_dtype
        self.num_in = _num_in(layer)
        self.scale = alpha / rank
        in_dims = layer.kernel.shape[: self.num_in]
        out_dims = layer.kernel.shape[self.num_in :]
        init = normal(1 / math.sqrt(math.prod(in_dims)))
        a = init(rngs.params(), (*in_dims, rank), layer.param_dtype)
        self.lora_a = nnx.Param(a)
        self.lora_b = nnx.Param(jnp.zeros((rank, *out_dims), layer.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps the last dims, ``(..., *in)`` to ``(..., *out)``."""
        values = {"kernel": self.kernel, "bias": self.bias}
        given = {name: v for name, v in values.items() if v is not None}
        layer = nnx.merge(self.layer_def, nnx.State(given))
        x, a, b = self.promote_dtype(
            (x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype
        )
        low = jnp.tensordot(x, a, self.num_in) * self.scale
        return layer(x) + jnp.tensordot(low, b, 1)


def adapt(model: Any, config: LoraConfig, *, rngs: nnx.Rngs) -> Any:
    """Gives the chosen layers of a model their adapters, in place; returns the model.

    Args:
        model: A model in the form that `models` describes.
        config: Patterns that match linear layers alone, see `problems`.
        rngs: Of the adapters.

    Example:
        >>> from models import gpt2
        >>> sizes = gpt2.Gpt2Config(num_layers=1, model_dim=8, mlp_dim=8, vocab_size=9)
        >>> model = gpt2.Gpt2(sizes, rngs=nnx.Rngs(0))
        >>> config = LoraConfig(rank=2, targets=("blocks/*/mlp/up",))
        >>> up = adapt(model, config, rngs=nnx.Rngs(1)).blocks[0].mlp.up
        >>> up.kernel.shape, up.lora_a.shape, up.lora_b.shape
        ((8, 8), (8, 2), (2, 8))
    """
    if config.rank is None:
        return model
    modules: dict[str, Any] = {_join(path): m for path, m in nnx.iter_modules(model)}
    for path, module in modules.items():
        if any(is_match(pattern, path) for pattern in config.targets):
            holder, _, name = path.rpartition("/")
            adapter = LoraLinear(
                module, rank=config.rank, alpha=config.alpha, rngs=rngs
            )
            setattr(modules[holder], name, adapter)
    return model


def problems(model: Any, config: LoraConfig, heads: frozenset[str]) -> Iterator[str]:
    """Yields a sentence for each pattern that does not fit a model.

    Args:
        model: The model without adapters, or the shapes of one; a single block will do.
        config: The patterns.
        heads: See `models.ModelFamily`.
    """
    if not config.is_on:
        return
    modules = {_join(path): module for path, module in nnx.iter_modules(model)}
    linear = [path for path, module in modules.items() if _is_adaptable(module)]
    known = ", ".join(dict.fromkeys(_pattern_of(path) for path in linear))
    for pattern in config.targets:
        found = [path for path in modules if is_match(pattern, path)]
        others = [path for path in found if path not in linear]
        if not found:
            yield f"targets: {pattern!r} matches no layer. Linear layers: {known}."
        elif others:
            kind = type(modules[others[0]]).__name__
            yield (
                f"targets: {pattern!r} matches '{_pattern_of(others[0])}', a {kind}."
                f" Adapters are for linear layers: {known}."
            )
    paths = _parameter_paths(model)
    for pattern in config.train_also or ():
        if not any(is_match(pattern, path) for path in paths):
            near = ", ".join(path for path in paths if path.split("/")[0] in heads)
            hint = f" Heads have: {near}." if near else " This model has no heads."
            yield f"train_also: {pattern!r} matches no parameter.{hint}"


def is_adapter(path: str) -> bool:
    """Whether a parameter is one of an adapter, by its path."""
    return path.rpartition("/")[2] in ADAPTERS


def is_trained(path: str, config: LoraConfig, heads: frozenset[str]) -> bool:
    """Whether a parameter is trained: an adapter, or one that is trained besides.

    Without adapters every parameter is.

    Args:
        path: Of the parameter.
        config: Of the adapters.
        heads: See `models.ModelFamily`.

    Example:
        >>> config = LoraConfig(rank=4)
        >>> heads = frozenset({"classifier"})
        >>> [is_trained(path, config, heads) for path in ("classifier/bias", "token")]
        [True, False]
    """
    if not config.is_on or is_adapter(path):
        return True
    if config.train_also is None:
        return path.split("/")[0] in heads
    return any(is_match(pattern, path) for pattern in config.train_also)


def with_rows(rows: Rows, shapes: Params) -> Rows:
    """Returns a sharding table with rows for adapters.

    Where the output of a layer is split, B is, and A is whole; where the input is
    split, it is the other way round. Both add little to what is communicated: at most
    sums of ``(..., rank)``.

    Args:
        rows: Table of the model without adapters.
        shapes: Parameters of the model with them, blocks stacked.
    """
    added = {}
    for key_path, _ in jax.tree_util.tree_leaves_with_path(shapes):
        path = path_of(key_path)
        base, _, name = path.rpartition("/")
        # A row such as 'pooler/*', broadcast everywhere, is theirs too.
        if name in ADAPTERS and not any(is_match(pattern, path) for pattern in rows):
            (row,) = (rows[p] for p in rows if is_match(p, f"{base}/kernel"))
            of_a, of_b = adapter_rows(row, num_in=_num_dims_in(shapes, key_path))
            added[path] = of_a if name == "lora_a" else of_b
    return {**rows, **added}


def merge(params: Params, scale: float) -> Params:
    """Returns parameters of the model without adapters, which computes the same.

    Each kernel becomes ``W + scale * A B``, in its dtype.

    Args:
        params: Blocks stacked or not, as nested dicts.
        scale: ``alpha / rank``.
    """
    if not isinstance(params, Mapping):
        return params
    kept = {name: merge(x, scale) for name, x in params.items() if name not in ADAPTERS}
    if ADAPTERS[0] in params:
        kernel, a, b = (params[name] for name in ("kernel", *ADAPTERS))
        num_stacked = a.ndim + b.ndim - 2 - kernel.ndim
        product = _product if num_stacked == 0 else jax.vmap(_product)
        wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
        kept["kernel"] = (wide + scale * product(a, b)).astype(kernel.dtype)
    return kept


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.tensordot(a.astype(wide), b.astype(wide), 1, precision="highest")


def _num_in(layer: Any) -> int:
    """Returns how many of the last dims a linear layer maps."""
    if isinstance(layer, nnx.Linear):
        return 1
    if not _is_adaptable(layer):
        raise ValueError(
            f"This {type(layer).__name__} maps the dims {layer.axis}, batch dims"
            f" {tuple(layer.batch_axis)}. Adapters are for layers that map the last"
            " dims."
        )
    return len(layer.axis)


def _is_adaptable(module: Any) -> bool:
    if isinstance(module, nnx.LinearGeneral):
        return module.axis == tuple(range(-len(module.axis), 0)) and not (
            module.batch_axis
        )
    return isinstance(module, nnx.Linear)


def _num_dims_in(shapes: Params, key_path: tuple) -> int:
    """Returns how many dims of a kernel are those of the input, by its adapter."""
    layer: Any = shapes
    for key in key_path[:-1]:
        layer = layer[key.key]
    is_block = key_path[0].key == "blocks"
    return layer["lora_a"].ndim - 1 - is_block


def _parameter_paths(model: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    paths = [_join(tuple(key.key for key in path)) for path, _ in leaves]
    return list(dict.fromkeys(_pattern_of(path) for path in paths))


def _join(path: tuple) -> str:
    return "/".join(map(str, path))


def _pattern_of(path: str) -> str:
    """Returns the path with ``*`` for the index of a block."""
    first, *rest = path.split("/")
    return "/".join([first, "*", *rest[1:]] if first == "blocks" and rest else [path])
