"""`WorkerRunner`: real worker processes for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import operator
import os
import pathlib
import pickle
import signal
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from keras_strategy.commands.local_cluster import (
    PORT_IN_USE,
    LocalCluster,
    shared_variables,
)
from keras_strategy.commands.processes import (
    Process,
    ProcessWatch,
    WorkerProcess,
    exit_text,
)

_PACKAGE_ROOT = str(pathlib.Path(__file__).parents[2])
_CALL = str(pathlib.Path(__file__).with_name("worker_call.py"))
_TAIL_LINES = 40
# The stacks of a backend's many threads are longer.
_STACK_LINES = 400
_DUMP_SECONDS = 5.0
_PORT_ATTEMPTS = 4


@dataclasses.dataclass(frozen=True)
class WorkerEnd:
    """End of a worker.

    Attributes:
        name: Its task, such as `"worker 1"`.
        exit_status: 0 for success; minus the signal that killed it.
        seconds: Time from its start until its end was noticed.
        output: All that it wrote to stdout and stderr.

    Example:

    ```python
    from keras_strategy.testing import WorkerEnd

    end = WorkerEnd("worker 1", exit_status=-9, seconds=0.5, output="Epoch 1/5")
    assert end.exit_status == -9  # SIGKILL
    ```
    """

    name: str
    exit_status: int
    seconds: float
    output: str


class WorkerFailed(RuntimeError):
    """A worker ended with an error; the message has its last output.

    Attributes:
        rank: The worker that failed first.
        ends: A `WorkerEnd` for every worker, by rank.
        error: The exception that its function raised, with its traceback as a note;
            None if there is none that pickles.

    Example:

    ```python
    from keras_strategy.testing import WorkerFailed, WorkerRunner

    try:
        with WorkerRunner(workers=2, timeout_seconds=60) as runner:
            runner.run(int, "x")
    except WorkerFailed as failure:
        assert isinstance(failure.error, ValueError)
    ```
    """

    def __init__(
        self,
        message: str,
        rank: int,
        ends: list[WorkerEnd],
        error: Exception | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ends = ends
        self.error = error


class WorkerTimeout(WorkerFailed):
    """The time limit passed; the message has the Python stacks of running workers.

    Example:

    ```python
    import time

    from keras_strategy.testing import WorkerRunner, WorkerTimeout

    try:
        with WorkerRunner(workers=1, timeout_seconds=1) as runner:
            runner.run(time.sleep, 100)
    except WorkerTimeout as timeout:
        assert timeout.rank == 0
    ```
    """


class WorkerRunner(contextlib.AbstractContextManager["WorkerRunner"]):
    """Runner of real worker processes on this machine.

    Each worker is a fresh Python interpreter with the environment of a cluster's
    worker: TF_CONFIG, KERAS_STRATEGY_PORT (one port, the same for all), NPROC, and
    KERAS_STRATEGY_LOGICAL_CPUS. It uses the Keras backend of this process.

    No worker survives the `with` block or this process. On Linux the workers end with
    the thread that started them, so start them in a thread that outlives them, best
    the main one.

    Args:
        workers: The number of workers.
        devices_per_worker: The number of logical CPU devices of each; None keeps the
            environment's, or the backend's own.
        timeout_seconds: Time limit for the workers of one `start` or `run`. When it
            passes, the Python stacks of running workers are printed, and all are
            killed.
        environment: More environment variables for the workers, or a list with those
            of each worker, by rank; None as a value removes one.
        chief: Whether the first worker is the task "chief" instead of "worker".
        grace_seconds: Time that `run` gives the other workers after one has failed.
        starter: An object that starts the workers: its method `start` takes what
            `keras_strategy.testing.worker_runner.start_cold` takes. None starts a fresh
            interpreter for each.
        streams: Whether the first worker's output is printed as it arrives.

    Example:

    ```python
    import json
    import os

    from keras_strategy.testing import WorkerRunner

    with WorkerRunner(workers=2) as runner:
        configs = runner.run(os.getenv, "TF_CONFIG")
    assert json.loads(configs[1])["task"] == {"type": "worker", "index": 1}
    ```

    As a fixture of pytest:

    ```python
    import pytest

    from keras_strategy.testing import WorkerRunner

    @pytest.fixture
    def two_workers():
        with WorkerRunner(workers=2, timeout_seconds=60) as runner:
            yield runner
    ```
    """

    def __init__(
        self,
        workers: int = 2,
        devices_per_worker: int | None = 1,
        timeout_seconds: float = 120,
        environment: Mapping[str, str | None]
        | Sequence[Mapping[str, str | None]]
        | None = None,
        chief: bool = False,
        grace_seconds: float = 5,
        starter: Any = None,
        streams: bool = False,
    ) -> None:
        counts = {"workers": workers}
        if devices_per_worker is not None:
            counts["devices_per_worker"] = devices_per_worker
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Argument `{name}` must be a positive integer. "
                    f"Received: {name}={value!r}"
                )
        if not timeout_seconds > 0:
            raise ValueError(
                "Argument `timeout_seconds` must be greater than 0. "
                f"Received: timeout_seconds={timeout_seconds!r}"
            )
        self._workers, self._chief = workers, chief
        self._devices_per_worker = devices_per_worker
        self._timeout_seconds, self._grace_seconds = timeout_seconds, grace_seconds
        if environment is None or isinstance(environment, Mapping):
            environment = [environment or {}] * workers
        self._environments, self._streams = list(environment), streams
        self._start_script = start_cold if starter is None else starter.start
        self._processes: list[Process] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._deadline = 0.0

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def processes(self) -> tuple[Process, ...]:
        """The workers of the last start, by rank; each has a `pid`."""
        return tuple(self._processes)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function in every worker and wait for all results.

        When a worker fails, the others have `grace_seconds` to end before they are
        killed, since their output may help. If a port is taken, all workers are started
        again on other ports.

        Args:
            function: A function. A worker imports it by name, with the `sys.path` of
                this process. Functions of the main program and functions in functions
                are sent by cloudpickle, with the values that they name.
            *args: Its arguments, which must pickle.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            The results by rank. Return numbers, strings, NumPy arrays, and lists and
            dicts of them: a tensor would import its backend into this process.

        Raises:
            WorkerFailed: If a worker failed.
            WorkerTimeout: If the time limit passed.
        """
        for attempt in range(_PORT_ATTEMPTS):
            self.start(function, *args, **kwargs)
            failed = self._wait(stop_when_one_fails=True)
            ends = self._ends()
            if failed is None:
                return [self._result(rank, ends) for rank in range(self._workers)]
            taken = any(PORT_IN_USE.search(end.output) for end in ends)
            if not taken or attempt == _PORT_ATTEMPTS - 1:
                error = self._error(failed)
                raise WorkerFailed(_failure(failed, ends), failed, ends, error)
        raise AssertionError("unreachable")

    def start(
        self, target: Callable[..., Any] | str | os.PathLike, *args: Any, **kwargs: Any
    ) -> None:
        """Start the workers and return at once; `wait` waits for them.

        It kills workers that were started before.

        Args:
            target: A function, as in `run`, or the path of a Python script.
            *args: Its arguments. Those of a script are converted to strings.
            **kwargs: Keyword arguments, for a function only.
        """
        call = b""
        if callable(target):
            try:
                file = io.BytesIO()
                _Pickler(file).dump((_portable(target), args, kwargs))
                call = file.getvalue()
            except Exception as error:
                raise ValueError(
                    "Expected a function, arguments and enclosed values that can be "
                    f"pickled for other processes. Received: {target!r}, with "
                    f"args={args!r} and kwargs={kwargs!r}"
                ) from error
        elif kwargs:
            raise ValueError(f"A script has no keyword arguments. Received: {kwargs}")
        elif not os.path.isfile(target):
            raise FileNotFoundError(
                "Argument `target` must be a function or the path of a script. "
                f"Received: target={target!r}"
            )
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="keras_strategy_")
        with open(self._path("call"), "wb") as file:
            pickle.dump(sys.path, file)
            file.write(call)
        cluster = LocalCluster.on_free_ports(
            self._workers, self._chief, self._devices_per_worker
        )
        self._deadline = time.monotonic() + self._timeout_seconds
        for rank in range(self._workers):
            if callable(target):
                script = _CALL
                names = "call", f"result{rank}", f"error{rank}"
                arguments = [self._path(name) for name in names]
            else:
                script, arguments = os.fspath(target), list(map(str, args))
            variables = {
                **base_environment(),
                **cluster.variables(rank),
                **self._environments[rank],
            }
            with open(self._path(f"output{rank}"), "wb") as output:
                process = self._start_script(
                    cluster.name(rank),
                    script,
                    arguments,
                    {name: v for name, v in variables.items() if v is not None},
                    stdout=output,
                    stderr=output,
                    # A function must not import from this file's folder.
                    imports_beside=not callable(target),
                )
            self._processes.append(process)

    def wait(self) -> list[WorkerEnd]:
        """Wait until every worker has ended, with or without an error.

        Returns:
            A `WorkerEnd` for each, by rank.

        Raises:
            WorkerTimeout: If the time limit passed first.
        """
        self._wait(stop_when_one_fails=False)
        return self._ends()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker and to the processes that it started.

        Args:
            rank: The worker.
            number: The signal.
        """
        self._processes[rank].signal(number)

    def output(self, rank: int) -> str:
        """Return what a worker has written so far to stdout and stderr.

        Args:
            rank: The worker's rank.
        """
        with open(self._path(f"output{rank}"), "rb") as file:
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Kill running workers and delete the output; leaving `with` does it."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _wait(self, stop_when_one_fails: bool) -> int | None:
        """Wait for all workers; return the first that failed, or None."""
        watch = ProcessWatch(self._processes)
        with open(self._path("output0"), errors="replace", newline="") as output:
            while watch.running:
                time.sleep(0.01)
                if watch.poll() is not None and stop_when_one_fails:
                    watch.let_end(self._grace_seconds)
                if self._streams:
                    print(output.read(), end="", flush=True)
                if watch.running and time.monotonic() >= self._deadline:
                    self._raise_timeout(sorted(watch.running), watch.failed)
        return watch.failed

    def _raise_timeout(self, running: list[int], failed: int | None) -> None:
        processes = [self._processes[rank] for rank in running]
        for process in processes:
            # Without a core file from SIGABRT. Only Linux has prlimit.
            with contextlib.suppress(ImportError, AttributeError, OSError):
                import resource

                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            # PYTHONFAULTHANDLER makes Python write its stacks. A worker that a test has
            # stopped must continue for that.
            process.signal(signal.SIGABRT)
            process.signal(signal.SIGCONT)
        until = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < until and any(p.poll() is None for p in processes):
            time.sleep(0.01)
        for process in self._processes:
            process.kill()
        ends = self._ends()
        names = ", ".join(ends[rank].name for rank in running)
        parts = [f"The time limit of {self._timeout_seconds} s passed with {names}."]
        for rank, end in enumerate(ends):
            if rank not in running:
                parts.append(f"{end.name} {exit_text(end.exit_status)}.")
                if end.exit_status == 0:
                    continue
            parts.append(_tail(end, _STACK_LINES if rank in running else _TAIL_LINES))
        first = running[0] if failed is None else failed
        raise WorkerTimeout("\n".join(parts), first, ends)

    def _ends(self) -> list[WorkerEnd]:
        return [
            WorkerEnd(p.name, p.wait(), p.seconds or 0.0, self.output(rank))
            for rank, p in enumerate(self._processes)
        ]

    def _result(self, rank: int, ends: list[WorkerEnd]) -> Any:
        try:
            with open(self._path(f"result{rank}"), "rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            message = f"No result of {ends[rank].name}. {_failure(rank, ends)}"
            raise WorkerFailed(message, rank, ends) from None

    def _error(self, rank: int) -> Exception | None:
        with contextlib.suppress(Exception):
            return pickle.loads(pathlib.Path(self._path(f"error{rank}")).read_bytes())
        return None

    def _path(self, name: str) -> str:
        if self._folder is None:
            raise RuntimeError("No workers were started, or they were closed.")
        return os.path.join(self._folder.name, name)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # cloudpickle 3.1.3 drops the name of the file, whose lines a traceback shows.
        if isinstance(obj, types.CodeType) and obj.co_filename:
            name = obj.co_filename
            restore = functools.partial(types.CodeType.replace, co_filename=name)
            return restore, (obj.replace(co_filename=""),)
        return super().reducer_override(obj)


def _portable(function: Callable[..., Any]) -> Any:
    """Return a function's module and name if workers can import it, else itself."""
    module = str(getattr(function, "__module__", ""))
    qualname = str(getattr(function, "__qualname__", ""))
    is_bound = inspect.ismethod(function) and not isinstance(function.__self__, type)
    try:
        # It may be another object: a decorator's, which pickle rejects.
        operator.attrgetter(qualname)(sys.modules[module])
    except (AttributeError, KeyError, TypeError):
        return function
    return function if is_bound or module == "__main__" else (module, qualname)


def _failure(failed: int, ends: list[WorkerEnd]) -> str:
    end = ends[failed]
    listed = [end, *ends[:failed], *ends[failed + 1 :]]
    lines = [f"{each.name} {exit_text(each.exit_status)}." for each in listed]
    return "\n".join([*lines, _tail(end)])


def _tail(end: WorkerEnd, count: int = _TAIL_LINES) -> str:
    lines = end.output.splitlines()[-count:]
    return "\n".join([f"The last output of {end.name}:", *lines])


def start_cold(
    name: str,
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: Any,
    stderr: Any,
    imports_beside: bool = True,
) -> Process:
    """Start a script in a fresh interpreter, and return its process."""
    options = [] if imports_beside else ["-P"]
    command = [sys.executable, *options, script, *arguments]
    return WorkerProcess(name, command, environment, stdout=stdout, stderr=stderr)


def base_environment() -> dict[str, str]:
    """Return the environment variables of workers that do not depend on their task."""
    variables = {
        # Workers of tests share the cores.
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **shared_variables(),
        "PYTHONFAULTHANDLER": "1",
    }
    if "keras" in sys.modules:
        # The choice may come from keras.json or from this program.
        variables["KERAS_BACKEND"] = sys.modules["keras"].backend.backend()
    if sysconfig.get_path("purelib") != _PACKAGE_ROOT:
        # A script in another folder finds the checkout that this process uses.
        old = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (_PACKAGE_ROOT, old)))
    return variables
