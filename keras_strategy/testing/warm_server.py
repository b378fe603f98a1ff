"""Forks programs that start with Keras imported: `warm_server.py MODULE...`.

`WarmStarter` runs it by its path, with a socket as its stdin. Each message there asks
for one program and brings three descriptors: the program's stdout and stderr, and a
socket that says its process id, then its exit status, and takes signals for it. When
the other end of that socket is closed, the program is killed.

A program is a fork of this process. It returns from `_Server.serve` and runs where this
file ends, so that Python ends it as it ends any: with `sys.excepthook`, the functions
of `atexit` and the exit status that it asks for.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import types
import warnings

_STARTER = pathlib.Path(__file__).parents[1] / "launch" / "starter.py"
_NUMBER = struct.Struct("i")
_MESSAGE_BYTES = 1 << 20


def load(names: list[str]) -> None:
    """Imports modules, and makes sure that a fork of this process can use them."""
    kept = _kept()
    for name in names:
        importlib.import_module(name)
    if "keras_strategy" in sys.modules:
        sys.exit(
            f"One of the modules {names} imports keras_strategy. Workers must do that "
            "themselves, since it reads KERAS_STRATEGY_LOGICAL_CPUS."
        )
    # What is imported stays. A program that looks through it for garbage, as each does
    # when it ends, would copy every page of it.
    gc.collect()
    gc.freeze()
    kept.update(sys.modules)
    count = threading.active_count()
    # A library that can live with a fork (OpenBLAS) ends its threads before one. What
    # is left would be missing in every program.
    if not (child := _fork()):
        os._exit(0)
    os.waitpid(child, 0)
    if sys.platform == "linux":
        count = len(os.listdir("/proc/self/task"))
    if count > 1:
        sys.exit(
            f"Importing the modules {names} started threads, which a fork lacks. "
            "Expected modules that start none, and use no device of an engine."
        )


def _kept() -> dict[str, types.ModuleType]:
    """Modules that programs do not clear when they end.

    Python empties each module then, which would copy these pages, too. What a program
    imports by itself ends as always.
    """
    kept: dict[str, types.ModuleType] = {}
    # One reference more than Python drops: what it holds outlives the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def forget() -> None:
        for name in kept.keys() - {"__main__", *sys.builtin_module_names}:
            sys.modules.pop(name, None)

    # Before those of the modules, so that it comes after them.
    atexit.register(forget)
    return kept


def _fork() -> int:
    with warnings.catch_warnings():
        # Engines and Python warn of their threads here; `load` has counted them.
        warnings.simplefilter("ignore")
        return os.fork()


class _Server:
    """Starts programs, passes on signals to them, and tells how they ended."""

    def __init__(self) -> None:
        self._die_with = runpy.run_path(str(_STARTER))["die_with"]
        self._requests = socket.socket(fileno=os.dup(0))
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._programs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # The handler does nothing, but without one no byte is written.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno())

    def serve(self) -> dict:
        """Returns in a new program alone, with what was asked for."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._tell_ends()
                elif key.fileobj is not self._requests:
                    self._pass_on_signal(key.data)
                elif (program := self._start()) is not None:
                    return program

    def _start(self) -> dict | None:
        message, descriptors, _, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, 3)
        if not message:
            # Nobody can ask any more. The programs end with this process.
            for pid in self._programs:
                _signal_group(pid, signal.SIGKILL)
            os._exit(0)
        stdout, stderr, connection = descriptors
        parent = os.getpid()
        program = socket.socket(fileno=connection)
        if not (pid := _fork()):
            self._become_a_program(parent, stdout, stderr)
            program.close()
            return json.loads(message)
        # Both do it, since either may come first.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        os.close(stdout)
        os.close(stderr)
        self._programs[pid] = program
        self._selector.register(program, selectors.EVENT_READ, pid)
        _tell(program, pid)
        return None

    def _become_a_program(self, parent: int, stdout: int, stderr: int) -> None:
        os.setpgid(0, 0)
        self._die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for mine in (self._requests, self._woken, self._wakes):
            mine.close()
        for others in self._programs.values():
            others.close()
        for source, target in (stdout, 1), (stderr, 2):
            os.dup2(source, target)
            os.close(source)

    def _pass_on_signal(self, pid: int) -> None:
        connection = self._programs.get(pid)
        if connection is None:
            return  # its end was told in this round
        try:
            message = connection.recv(_NUMBER.size)
        except ConnectionError:
            message = b""
        if message:
            _signal_group(pid, *_NUMBER.unpack(message))
        else:
            # Nobody waits for it any more; its end comes as that of any other.
            self._selector.unregister(connection)
            _signal_group(pid, signal.SIGKILL)

    def _tell_ends(self) -> None:
        # A process stays a zombie until its group is killed, so that its id, which is
        # the group's as well, cannot have become somebody else's.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for pid in list(self._programs):
            if os.waitid(os.P_PID, pid, options) is None:
                continue
            _signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            connection = self._programs.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            _tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.send(_NUMBER.pack(number))


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def prepare(program: dict) -> tuple[types.CodeType, dict]:
    """Makes this process look as if Python had been started with a script.

    Returns:
        The code of the script, and the names of its `__main__`.
    """
    script = program["script"]
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = [script, *program["arguments"]]
    if program["imports_beside"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    if "numpy" in sys.modules:
        # All forks would draw the same numbers. Python's own do not.
        sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    return compile(pathlib.Path(script).read_bytes(), script, "exec"), vars(main)


if __name__ == "__main__":
    load(sys.argv[1:])
    server = _Server()
    # Programs get no input, and do not hold the socket open.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    code, names = prepare(server.serve())
    # Here is nothing around it that could catch its exceptions.
    exec(code, names)
