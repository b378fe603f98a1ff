"""`WarmStarter`: start of workers with Keras and the backend already imported."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategy.commands.processes import Process, WorkerProcess, exit_text
from keras_strategy.testing.worker_runner import base_environment, start_cold

_SERVER = str(pathlib.Path(__file__).with_name("warm_server.py"))
_NUMBER_BYTES = 16

# Prefixes of variables that Python, the C library or a backend may read at import. A
# worker for which they differ from those of the warm server starts cold.
_COLD_PREFIXES = (
    *("PYTHON", "LD_", "MALLOC_", "LANG", "LC_", "TZ", "NPROC", "KERAS_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "GRPC_"),
    *("XLA_", "JAX_", "TF_", "TORCH", "PYTORCH_", "ATEN_", "GLOO_", "NCCL_"),
    *("CUDA_", "NVIDIA_", "ROCM_", "HIP_", "TPU_", "LIBTPU_"),
)
# Exceptions: those that are read later, and those that backends set when imported,
# before or after this object was made.
_WARM_PREFIXES = (
    *("TF_CONFIG", "KERAS_STRATEGY_"),
    *("TF2_BEHAVIOR", "TF_FORCE_GPU_ALLOW_GROWTH", "TORCHINDUCTOR_CACHE_DIR"),
    "TF_CPP_MIN_LOG_LEVEL",
    *("TPU_ML_PLATFORM", "TPU_SKIP_MDS_QUERY", "KMP_DUPLICATE_LIB_OK"),
    "KMP_INIT_AT_FORK",
)


class WarmStarter(contextlib.AbstractContextManager["WarmStarter"]):
    """Starter of workers that have Keras and the backend already imported.

    One process imports them, which takes seconds, and forks itself for each worker.
    Otherwise a worker is like a fresh program: it has its own environment, arguments,
    working directory, process group and output, its own `__main__`, ends with the
    process that started it, and exits like any program. It imports `keras_strategy`
    and the test's own modules itself.

    Python and the backend read some environment variables only at import. A worker for
    which such a variable (`XLA_FLAGS`, `OMP_NUM_THREADS`, `KERAS_BACKEND`,
    `PYTHONPATH` and others) has changed since this object was made starts as a fresh
    interpreter. Two differences remain: all workers have the same `hash` of strings,
    and so the same order of a set of them; and a worker has more modules imported than
    it needs, which are not cleared when it ends. Keep a test of cold workers too.

    The process starts with this object. It ends with the thread that made it.

    Args:
        modules: Modules to import. They must start no thread and use no device.

    Example:

    ```python
    import os

    from keras_strategy.testing import WorkerRunner
    from tests.testing.warm_starter import WarmStarter

    with WarmStarter() as starter:
        for _ in range(2):
            with WorkerRunner(workers=2, starter=starter) as runner:
                assert len(set(runner.run(os.getpid))) == 2
    ```
    """

    def __init__(self, modules: Sequence[str] = ("keras",)) -> None:
        self._environment = base_environment()
        self._cold = _cold_variables(self._environment)
        # Closed by `close`.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._requests: socket.socket | None
        self._requests, remote = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with remote:
            self._server = WorkerProcess(
                "the warm starter",
                [sys.executable, "-P", _SERVER, *modules],
                self._environment,
                stdin=remote,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: Any,
        stderr: Any,
        imports_beside: bool = True,
    ) -> Process:
        """Start a script and return its process, warm if its environment allows that.

        Args:
            name: Its name in messages, such as `"worker 1"`.
            script: The path of a Python file.
            arguments: The rest of its `sys.argv`.
            environment: All of its environment.
            stdout: The file for its stdout.
            stderr: The file for its stderr.
            imports_beside: Whether it imports from its own folder, as scripts do.
        """
        if self._requests is None or _cold_variables(environment) != self._cold:
            return start_cold(
                name, script, arguments, environment, stdout, stderr, imports_beside
            )
        program = {
            "script": script,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
            "imports_beside": imports_beside,
        }
        connection, remote = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            with remote:
                message = json.dumps(program).encode()
                passed = [stdout.fileno(), stderr.fileno(), remote.fileno()]
                socket.send_fds(self._requests, [message], passed)
            reply = connection.recv(_NUMBER_BYTES)
        except ConnectionError:
            reply = b""
        if not reply:
            connection.close()
            status = self._server.kill()
            self._log.seek(0)
            output = self._log.read().decode(errors="replace")
            message = f"{self._server.name} {exit_text(status)}. Its output:\n{output}"
            raise RuntimeError(message)
        return _WarmProcess(name, int(reply), connection)

    def close(self) -> None:
        """End the warm server, and all workers that it has started."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            self._server.wait()
        self._log.close()


class _WarmProcess(Process):
    """Process that the warm server has forked."""

    def __init__(self, name: str, pid: int, connection: socket.socket) -> None:
        super().__init__(name)
        self.pid, self._connection = pid, connection
        connection.setblocking(False)

    def _ended(self) -> int | None:
        try:
            reply = self._connection.recv(_NUMBER_BYTES)
        except BlockingIOError:
            return None
        except ConnectionError:
            reply = b""
        self._connection.close()
        # It ends with the warm server.
        return int(reply) if reply else -signal.SIGKILL


def _cold_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_COLD_PREFIXES) and not name.startswith(_WARM_PREFIXES)
    }
