"""Turns Ctrl-C and SIGTERM into a request to stop after the step that is running."""

import os
import signal
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Catches the first SIGINT or SIGTERM inside a ``with`` block.

    The loop asks between steps whether it shall stop. A second signal does what it
    would have done without this class, and so do all signals after the block. Only the
    main thread can enter the block, a rule of Python.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.is_requested, stop.exit_code
        (True, 143)
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    @property
    def is_requested(self) -> bool:
        """Whether this process received a signal."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What a shell reports of the signal: 130 for SIGINT, 143 for SIGTERM; else 0.

        Processes that stop on the signal of another one have 0.
        """
        return 0 if self._received is None else 128 + self._received

    def is_requested_anywhere(self) -> bool:
        """Returns whether any process received a signal, the same on all.

        Every process calls this after the same step, and so all stop there.
        Communication: with several processes, one all-gather of a flag.
        """
        if jax.process_count() == 1:
            return self.is_requested
        flags = multihost_utils.process_allgather(np.array(self.is_requested))
        return bool(flags.any())

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self._received = signal.Signals(number)
        self._restore()
        # Not print: the signal may interrupt a print, which does not nest.
        message = (
            f"\n{self._received.name}: stopping after this step, with a checkpoint. "
            "Once more to stop at once.\n"
        )
        os.write(2, message.encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
