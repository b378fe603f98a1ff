"""Signals that the launcher passes on instead of dying of them."""

import signal
from types import FrameType

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ReceivedSignals:
    """Remembers the signals that arrive while it is in charge.

    It is a context manager, to be used in the main thread. A SIGHUP that is ignored
    (by nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.all: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "ReceivedSignals":
        for number in _FORWARDED:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # pyright: ignore

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.all.append(number)
