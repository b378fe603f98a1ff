"""How a process ends: by an exception, at its exit, or because another one failed."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

_FLUSH_SECONDS = 3.0


class Ending(Protocol):
    """Who is to know how this process ends."""

    def raised(self, error: BaseException, trace: str) -> None:
        """An exception that nobody caught has been printed."""

    def leave(self) -> None:
        """The interpreter is about to exit."""

    def forget(self) -> None:
        """This is a forked child, which has no part in what its parent does."""


_told: list[Ending] = []
# The hook that ours is over; None while ours is not installed.
_hook_below: Callable[..., Any] | None = None


def register(one: Ending) -> None:
    """Tells `one` from now on when this process ends."""
    global _hook_below
    if not _told:
        atexit.register(_at_exit)
    if _hook_below is None:
        _hook_below, sys.excepthook = sys.excepthook, _excepthook
    _told.append(one)


def unregister(one: Ending) -> None:
    """Undoes `register`."""
    if one in _told:
        _told.remove(one)
        if not _told:
            _restore()


def exit_now(text: str = "") -> NoReturn:
    """Ends this process with status 1, without the interpreter's own exit.

    That one would wait for the engine's, whose barriers wait for workers that may
    be gone.
    """
    # Nobody may be reading any more: then a full pipe blocks for good.
    writer = threading.Thread(target=_write, args=(text,), daemon=True)
    writer.start()
    writer.join(_FLUSH_SECONDS)
    os._exit(1)


def _write(text: str) -> None:
    if text:
        print(text, file=sys.stderr)
    for stream in (sys.stderr, sys.stdout):
        stream.flush()


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if _hook_below is not None:
        _hook_below(kind, error, trace)
    text = "".join(traceback.format_exception(kind, error, trace))
    for one in list(_told):
        one.raised(error, text)


def _at_exit() -> None:
    for one in list(_told):
        one.leave()


def _in_child() -> None:
    for one in _told:
        one.forget()
    if _told:
        _told.clear()
        _restore()


def _restore() -> None:
    global _hook_below
    atexit.unregister(_at_exit)
    # Somebody may have put a hook of theirs over ours, which then stays below it.
    if _hook_below is not None and sys.excepthook is _excepthook:
        sys.excepthook, _hook_below = _hook_below, None


os.register_at_fork(after_in_child=_in_child)
