"""How a process ends: by an exception, at its exit, or because another one failed."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
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
# The outermost code of the program. While its frame is there, the program runs.
_program: CodeType | None = None
# The hook that ours is over; None while ours is not installed.
_hook_below: Callable[..., Any] | None = None


def register(one: Ending) -> None:
    """Tells `one` from now on when this process ends."""
    global _hook_below, _program
    if not _told:
        atexit.register(_at_exit)
        _program = _outermost()
    if _hook_below is None:
        _hook_below, sys.excepthook = sys.excepthook, _excepthook
    _told.append(one)


def unregister(one: Ending) -> None:
    """Undoes `register`."""
    if one in _told:
        _told.remove(one)
        if not _told:
            _restore()


def exit_now(text: str, status: int) -> NoReturn:
    """Ends this process without the interpreter's own exit.

    That one would wait for the engine's, whose barriers wait for workers that may
    be gone.

    Args:
        text: What to say, if anything.
        status: The exit code.
    """
    # Nobody may be reading any more: then a full pipe blocks for good.
    writer = threading.Thread(target=_write, args=(text,), daemon=True)
    writer.start()
    writer.join(_FLUSH_SECONDS)
    os._exit(status)


class EndsWith:
    """Gives the process an exit code if a certain exception ends it.

    Args:
        error: The exception.
        status: The exit code.
    """

    def __init__(self, error: BaseException, status: int):
        self._error, self._status = error, status

    def raised(self, error: BaseException, trace: str) -> None:
        """Ends the process, if this is the exception."""
        if error is self._error:
            exit_now("", self._status)

    def leave(self) -> None:
        """Python ends the process as it is."""
        unregister(self)

    def forget(self) -> None:
        """In a fork nobody raises it."""


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
    if not _ends_process():
        return
    text = "".join(traceback.format_exception(kind, error, trace))
    for one in list(_told):
        one.raised(error, text)


def _ends_process() -> bool:
    """Whether what `sys.excepthook` was called with ends the process.

    C code calls it too, with an exception that it has dealt with: what PyErr_PrintEx
    prints in a callback or in a destructor. Then the program's own frames are there;
    when Python calls it for the last time, they are gone.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and _outermost() is not _program


def _outermost() -> CodeType | None:
    """The code of the outermost frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return None if frame is None else frame.f_code


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
