"""Ctrl-C asks; twice insists."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is only noted in `received`; the next does what it always did.

    A training step is thus never cut in half by a first Ctrl-C, and a second one still stops anything at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
