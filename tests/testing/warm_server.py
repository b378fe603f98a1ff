"""Server that forks programs with Keras already imported: `warm_server.py MODULE...`.

`WarmStarter` runs it by its path, with a socket as its stdin. Each message there
requests one program and passes three descriptors: the program's stdout and stderr, and
a socket that reports its process id, then its exit status.

A program is a fork of this process. It returns from `serve` and runs where this
file ends, so that Python ends it like any program: with `sys.excepthook`, the functions
of `atexit` and its exit status.
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
import select
import signal
import socket
import sys
import threading
import types
import warnings

_ROOT = pathlib.Path(__file__).parents[2]
_STARTER = _ROOT / "keras_strategy" / "commands" / "starter.py"
_exit_with_parent = runpy.run_path(str(_STARTER))["exit_with_parent"]
_MESSAGE_BYTES = 1 << 20
# As often as the other end looks for the end of a program.
_POLL_SECONDS = 0.01


def load(names: list[str]) -> None:
    """Import modules, and check that a fork of this process can use them."""
    modules = _uncleared_modules()
    for name in names:
        importlib.import_module(name)
    if "keras_strategy" in sys.modules:
        sys.exit(
            f"One of the modules {names} imports keras_strategy. Workers must do that "
            "themselves, since it reads KERAS_STRATEGY_LOGICAL_CPUS."
        )
    # Exclude the modules from garbage collection: a program that scans them, as each
    # does when it ends, would copy all their pages.
    gc.collect()
    gc.freeze()
    modules.update(sys.modules)
    count = threading.active_count()
    # A library that supports forks (OpenBLAS) ends its threads before one. Others would
    # be missing in every program.
    if not (child := _fork()):
        os._exit(0)
    os.waitpid(child, 0)
    if sys.platform == "linux":
        count = len(os.listdir("/proc/self/task"))
    if count > 1:
        sys.exit(
            f"Importing the modules {names} started threads, which a fork lacks. "
            "Expected modules that start none, and use no device of a backend."
        )


def _uncleared_modules() -> dict[str, types.ModuleType]:
    """Return a dict of modules that programs do not clear when they end."""
    # Python empties each module then, which would copy these pages as well. The modules
    # that a program itself imports end as usual.
    modules: dict[str, types.ModuleType] = {}
    # An extra reference keeps the dict alive until the process has ended.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))

    def forget() -> None:
        for name in modules.keys() - {"__main__", *sys.builtin_module_names}:
            sys.modules.pop(name, None)

    # Registered before the modules' own functions, so it runs after them.
    atexit.register(forget)
    return modules


def _fork() -> int:
    with warnings.catch_warnings():
        # Backends and Python warn about threads; `load` has counted them.
        warnings.simplefilter("ignore")
        return os.fork()


def serve() -> dict:
    """Start programs and report their ends; return a request, in its program only."""
    requests = socket.socket(fileno=os.dup(0))
    # Programs have no input, and do not keep the socket open.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    programs: dict[int, socket.socket] = {}
    while True:
        timeout = _POLL_SECONDS if programs else None
        is_requested, _, _ = select.select([requests], [], [], timeout)
        if is_requested and (program := _start(requests, programs)) is not None:
            return program
        _report_ends(programs)


def _start(requests: socket.socket, programs: dict[int, socket.socket]) -> dict | None:
    message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
    if not message:
        # The starter has closed its end. The programs end with this process.
        for pid in programs:
            _signal_group(pid, signal.SIGKILL)
        os._exit(0)
    stdout, stderr, connection = descriptors
    parent = os.getpid()
    program = socket.socket(fileno=connection)
    if not (pid := _fork()):
        os.setpgid(0, 0)
        _exit_with_parent(parent)
        for own_socket in (requests, program, *programs.values()):
            own_socket.close()
        for source, target in (stdout, 1), (stderr, 2):
            os.dup2(source, target)
            os.close(source)
        return json.loads(message)
    # Parent and child do this, since either may run first.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    os.close(stdout)
    os.close(stderr)
    programs[pid] = program
    _send_number(program, pid)
    return None


def _report_ends(programs: dict[int, socket.socket]) -> None:
    # Leave the process a zombie until its end is known, so that no other process can
    # get its id, which is also the group's.
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    for pid in list(programs):
        if (end := os.waitid(os.P_PID, pid, options)) is None:
            continue
        _signal_group(pid, signal.SIGKILL)
        is_exit = end.si_code == os.CLD_EXITED
        with programs.pop(pid) as connection:
            _send_number(connection, end.si_status if is_exit else -end.si_status)
        os.waitpid(pid, 0)


def _send_number(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.send(b"%d" % number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def prepare(program: dict) -> tuple[types.CodeType, dict]:
    """Make this process look as if Python had been started with a script."""
    # The result is the code of the script, and the namespace of its `__main__`.
    script = program["script"]
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = [script, *program["arguments"]]
    if program["imports_beside"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    if "numpy" in sys.modules:
        # Otherwise all forks draw the same numbers. Python's own `random` reseeds.
        sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    return compile(pathlib.Path(script).read_bytes(), script, "exec"), vars(main)


if __name__ == "__main__":
    load(sys.argv[1:])
    code, names = prepare(serve())
    # Outside any function, so that nothing catches its exceptions.
    exec(code, names)
