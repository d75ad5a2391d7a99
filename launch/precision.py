"""The section ``precision``: in which number formats a run computes and communicates.

The format of most of the computation is ``model.dtype``, that of the weights
``model.param_dtype``. What is summed, such as gradients over microbatches, losses and
the statistics of norms and softmax, is in float32 in any case.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from launch.loss_scale import LossScaling
from models import ModelFamily, delayed_scaling, fp8
from models.layers import DTYPES, BlockConfig, Linear
from models.rules import at_least, one_of
from models.sharding import is_match
from models.stacked import StackedModel

LOSS_SCALINGS = ("off", "static", "dynamic")
# How the linear maps of blocks multiply; None: in the dtype of their module.
PRODUCTS = {"fp8": fp8.dot_general}
FP8_SCALINGS = ("current", "delayed")
Problems = Iterator[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats; `configs.base` says what each field means."""

    matmul: str | None = None
    fp8_scaling: str = "current"
    fp8_history: int = 16
    float32: tuple[str, ...] = ()
    gradient_dtype: str = "float32"
    loss_scaling: str | None = None
    initial_loss_scale: float = 2.0**16
    loss_scale_growth: float = 2.0
    loss_scale_interval: int = 2000
    loss_scale_backoff: float = 0.5
    min_loss_scale: float = 1.0

    def broken_rules(self) -> Iterator[str]:
        """Yields one sentence per broken rule."""
        yield from one_of(self, gradient_dtype=DTYPES, loss_scaling=LOSS_SCALINGS)
        yield from one_of(self, matmul=tuple(PRODUCTS), fp8_scaling=FP8_SCALINGS)
        yield from at_least(self, fp8_history=1)
        if self.fp8_scaling == "delayed" and self.matmul is None:
            yield (
                "fp8_scaling='delayed' is about products in eight bits, but"
                " matmul=None. Set matmul='fp8', or leave fp8_scaling='current'."
            )
        yield from at_least(self, loss_scale_growth=1, loss_scale_interval=1)
        for field in ("initial_loss_scale", "min_loss_scale"):
            if not 0 < getattr(self, field) < float("inf"):
                yield f"{field}={getattr(self, field)} must be above 0 and finite."
        if not 0 < self.loss_scale_backoff < 1:
            yield (
                f"loss_scale_backoff={self.loss_scale_backoff} must be above 0 and"
                " below 1: an overflow lowers the scale. Use 0.5."
            )
        if 0 < self.initial_loss_scale < self.min_loss_scale < float("inf"):
            yield (
                f"min_loss_scale={self.min_loss_scale} is above"
                f" initial_loss_scale={self.initial_loss_scale}. Lower it."
            )

    def resolved(self, dtype: str) -> "PrecisionConfig":
        """Returns the section for a model that computes in ``dtype``, nothing None."""
        if self.loss_scaling is not None:
            return self
        kind = "dynamic" if dtype == "float16" else "off"
        return dataclasses.replace(self, loss_scaling=kind)

    def scaling(self, dtype: str) -> LossScaling | None:
        """Returns how the loss of a model that computes in ``dtype`` is scaled."""
        kind = self.resolved(dtype).loss_scaling
        if kind == "off":
            return None
        if kind == "static":
            return LossScaling.static(self.initial_loss_scale)
        return LossScaling(
            initial=self.initial_loss_scale,
            growth=self.loss_scale_growth,
            interval=self.loss_scale_interval,
            backoff=self.loss_scale_backoff,
            minimum=self.min_loss_scale,
        )


def is_loss_scaled(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether the loss was scaled in a run, of which this is the config.

    Args:
        config: As in a checkpoint; one without the section scaled nothing.
    """
    return config.get("precision", {}).get("loss_scaling", "off") != "off"


def history_of(config: Mapping[str, Mapping[str, Any]]) -> Any:
    """Returns what a history of products in eight bits depends on, None without one.

    Args:
        config: As in a checkpoint; one without the section had none.
    """
    values = config.get("precision", {})
    if values.get("fp8_scaling", "current") == "current":
        return None
    return values["fp8_history"], tuple(values["float32"])


def with_history(model: StackedModel, formats: PrecisionConfig) -> StackedModel:
    """Returns the model, whose products in eight bits have a history if asked for."""
    if formats.fp8_scaling == "current":
        return model
    block = nnx.merge(model.block_def, nnx.State(model.block_shapes))
    scaling = delayed_scaling.of_block(block, formats.fp8_history)
    return dataclasses.replace(model, fp8_scaling=scaling)


def with_formats(family: ModelFamily, formats: PrecisionConfig) -> ModelFamily:
    """Returns the model, of which some modules compute in another format.

    Args:
        family: The model.
        formats: Its ``float32`` are paths of modules, which stand for all within them,
            ``*`` for one segment; see `broken_patterns`. Its ``matmul`` is of the
            other linear maps of the blocks.

    Example:
        >>> from models import MODELS, gpt2
        >>> formats = PrecisionConfig(float32=("blocks/*/mlp",))
        >>> family = with_formats(MODELS["gpt2"], formats)
        >>> sizes = gpt2.Gpt2Config(num_layers=1, dtype="bfloat16")
        >>> model = nnx.eval_shape(lambda: family.module(sizes, rngs=nnx.Rngs(0)))
        >>> model.blocks[0].mlp.up.dtype, model.blocks[0].attention.qkv.dtype
        ('float32', 'bfloat16')
    """

    def adapt(path: Sequence[Any], module: nnx.Module) -> None:
        if any(is_within(pattern, path) for pattern in formats.float32):
            for name, value in _formats(module).items():
                setattr(module, name, value)
        elif formats.matmul and path[:1] == ("blocks",) and isinstance(module, Linear):
            module.dot_general = PRODUCTS[formats.matmul]

    def build(config: Any, *, rngs: nnx.Rngs) -> Any:
        model = family.module(config, rngs=rngs)
        for path, module in nnx.iter_modules(model):
            adapt(path, module)
        return model

    is_changed = formats.float32 or formats.matmul
    return dataclasses.replace(family, module=build) if is_changed else family


def broken_sizes(model: BlockConfig, formats: PrecisionConfig, tensor: int) -> Problems:
    """Yields one sentence per size that products in eight bits cannot have.

    Args:
        model: Its config.
        formats: The section.
        tensor: Devices over which linear maps are split.
    """
    if formats.matmul is None:
        return
    sizes = {
        "model_dim": (model.model_dim, 1),
        "mlp_dim": (model.mlp_dim, tensor),
        "num_heads x head_dim": (model.num_heads * model.head_dim, tensor),
    }
    for name, (size, parts) in sizes.items():
        if size % (parts * fp8.MULTIPLE):
            yield (
                f"precision.matmul={formats.matmul!r} needs sizes that are multiples of"
                f" {fp8.MULTIPLE} on each device, but model.{name}={size} is split into"
                f" {parts}. Use a multiple of {parts * fp8.MULTIPLE}, or"
                " precision.matmul=None."
            )


def broken_patterns(
    family: ModelFamily, config: Any, patterns: Sequence[str]
) -> Iterator[str]:
    """Yields one sentence per pattern that does not fit the model.

    Args:
        family: The model.
        config: Its config.
        patterns: See `with_formats`.
    """
    if not patterns:
        return
    sizes = dataclasses.replace(config, num_layers=1)
    model = nnx.eval_shape(lambda: family.module(sizes, rngs=nnx.Rngs(0)))
    paths = [path for path, module in nnx.iter_modules(model) if _formats(module)]
    known = dict.fromkeys(
        "/".join(_names(path)[:end])
        for path in paths
        for end in range(1, 1 + len(path))
    )
    known.pop("blocks", None)  # it has no format of its own, nor is it one module
    for pattern in patterns:
        if pattern.startswith("blocks/") and pattern.split("/")[1] != "*":
            yield (
                f"float32: {pattern!r} picks out one block, but blocks are all alike."
                " Write 'blocks/*/...'."
            )
        elif not any(is_within(pattern, path) for path in paths):
            close = difflib.get_close_matches(pattern, list(known), n=1)
            hint = f"Did you mean {close[0]!r}?" if close else ""
            names = ", ".join(map(repr, known))
            yield (
                f"float32: {pattern!r} is no module of the model that computes."
                f" {hint or f'There are {names}.'}"
            )


def is_within(pattern: str, path: Sequence[Any]) -> bool:
    """Whether a module or parameter is, or lies in, what a pattern names.

    Example:
        >>> is_within("blocks/*/mlp", ("blocks", 3, "mlp", "up"))
        True
        >>> is_within("blocks/*/mlp", ("blocks", "*", "mlp_norm"))
        False
    """
    names = _names(path)
    return is_match(pattern, "/".join(names[: pattern.count("/") + 1]))


def _names(path: Sequence[Any]) -> list[str]:
    names = [str(name) for name in path]
    return ["blocks", "*", *names[2:]] if names[:1] == ["blocks"] else names


def _formats(module: nnx.Module) -> dict[str, Any]:
    """Returns what to set for a module to compute in float32, {} if it does not."""
    found = vars(module)
    changes: dict[str, Any] = {"dtype": "float32"} if "dtype" in found else {}
    if isinstance(found.get("config"), BlockConfig):
        changes["config"] = dataclasses.replace(found["config"], dtype="float32")
    return changes
