"""Exit codes of workers, and handlers for the ways in which a process can end.

An exception in the user's program gives Python's 1 and a signal the shell's 128 plus
its number. The other codes are those of sysexits.h with the nearest meaning.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NoReturn

from keras_strategy.errors import ClusterError

# The cluster was not formed.
EXIT_CLUSTER_NOT_FORMED = 69
# The worker was asked to stop and saved its state: start it again.
EXIT_PREEMPTED = 75
# Another worker failed, or all workers wait for each other.
EXIT_OTHER_WORKER_FAILED = 76
# SIGINT, Ctrl-C: as in a shell.
EXIT_INTERRUPTED = 130

_FLUSH_SECONDS = 3.0


class ExitHandler:
    """Callbacks for the ways in which this process can end."""

    def on_exception(self, error: BaseException, trace: str) -> None:
        """Handle an uncaught exception, which has been printed."""
        if isinstance(error, ClusterError):
            exit_now("", EXIT_CLUSTER_NOT_FORMED)

    def leave(self) -> None:
        """Handle the exit of the interpreter."""

    def on_fork(self) -> None:
        """Detach from the parent's resources in a forked child."""


_handlers: list[ExitHandler] = []
# Outermost code object of the program: the program runs while its frame exists.
_program: CodeType | None = None
# The excepthook that ours wraps; None while ours is not installed.
_wrapped_hook: Callable[..., Any] | None = None


def register(handler: ExitHandler) -> None:
    """Call `handler` from now on when this process ends or forks."""
    global _wrapped_hook, _program
    if not _handlers:
        atexit.register(_at_exit)
        _program = _outermost_code()
    if _wrapped_hook is None:
        _wrapped_hook, sys.excepthook = sys.excepthook, _excepthook
    _handlers.append(handler)


def unregister(handler: ExitHandler) -> None:
    global _wrapped_hook
    _handlers.remove(handler)
    if _handlers:
        return
    atexit.unregister(_at_exit)
    # If other code has wrapped our hook, ours stays below it.
    if _wrapped_hook is not None and sys.excepthook is _excepthook:
        sys.excepthook, _wrapped_hook = _wrapped_hook, None


def exit_now(text: str, status: int) -> NoReturn:
    """Print `text` and end this process without the interpreter's own exit."""
    # That would run the backend's, whose barriers wait for workers that may be gone.

    def write() -> None:
        if text:
            print(text, file=sys.stderr)
        for stream in (sys.stderr, sys.stdout):
            stream.flush()

    # If nobody reads the pipe any more, writing to it blocks forever.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_FLUSH_SECONDS)
    os._exit(status)


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if _wrapped_hook is not None:
        _wrapped_hook(kind, error, trace)
    # C code also calls the hook, with exceptions that it has handled: PyErr_PrintEx in
    # a callback or a destructor. The program's own frames still exist then; when Python
    # itself calls the hook for the exception that ends the process, they are gone.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and _outermost_code() is not _program:
        text = "".join(traceback.format_exception(kind, error, trace))
        for handler in list(_handlers):
            handler.on_exception(error, text)


def _outermost_code() -> CodeType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _at_exit() -> None:
    for handler in list(_handlers):
        handler.leave()


def _after_fork() -> None:
    for handler in list(_handlers):
        handler.on_fork()
        unregister(handler)


os.register_at_fork(after_in_child=_after_fork)
