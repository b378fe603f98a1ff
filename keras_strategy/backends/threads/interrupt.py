"""Ctrl-C, which Python tells the main thread alone."""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterable, Iterator


def interrupt(threads: Iterable[threading.Thread]) -> None:
    """Raises KeyboardInterrupt in threads, where they next run Python."""
    for thread in threads:
        identifier = ctypes.c_ulong(thread.ident or 0)
        interrupt = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, interrupt)


@contextlib.contextmanager
def propagate_interrupts(threads: Iterable[threading.Thread]) -> Iterator[None]:
    """Lets Ctrl-C interrupt threads too that the main thread will wait for.

    Args:
        threads: The threads, asked for when it comes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else looks after it
        return

    def interrupt_all(number, frame):
        interrupt(threads)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt_all)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
