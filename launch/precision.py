"""The section ``precision``: in which number formats a run computes and communicates.

The format of most of the computation is ``model.dtype``, that of the weights
``model.param_dtype``. What is summed, such as gradients over microbatches, losses and
the statistics of norms and softmax, is in float32 in any case.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from launch.loss_scale import LossScaling
from models.layers import DTYPES
from models.rules import at_least, one_of

LOSS_SCALINGS = ("off", "static", "dynamic")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats; `configs.base` says what each field means."""

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
