"""Ctrl-C asks; twice insists."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is only noted in `received`; each later one is a KeyboardInterrupt.

    A training step is thus never cut in half by a first Ctrl-C, and a second one still stops anything at once. Once
    `at_once` is set there is nothing to wait for, and the first one stops too. A signal that was ignored stays so:
    whoever started the process with nohup, or in the background, meant it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self.at_once = False
        self.announce: Callable[[], None] = lambda: None
        self.before: dict[int, Any] = {}

    @property
    def status(self) -> int:
        """The exit status of a process stopped like this."""
        return 128 + (self.received or signal.SIGINT)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = number
        if self.at_once or not first:
            raise KeyboardInterrupt
        self.announce()

    def __enter__(self) -> "StopSignals":
        for number in self.SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
