"""Dask workers: processes that are started on this machine, or an existing cluster."""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.coordinator import local_workers, worker
from keras_strategy.core.registry import get_engine

_SECONDS_TO_STOP = 5


def _distributed() -> Any:
    return import_extra("distributed", "coordinator", "ClusterCoordinator")


class LocalWorkers:
    """Worker processes of this machine that no other user can reach.

    They listen on the loopback address only, and both sides of a connection present a
    certificate that was created for this cluster. Dask restarts a dead worker.
    """

    def __init__(self, count: int):
        distributed = _distributed()
        dask = import_extra("dask", "coordinator", "ClusterCoordinator")
        security = distributed.Security.temporary()
        with contextlib.ExitStack() as stack:
            with dask.config.set({"distributed.scheduler.http.routes": []}):
                cluster = distributed.LocalCluster(
                    n_workers=0,
                    host="127.0.0.1",
                    protocol="tls://",
                    security=security,
                    dashboard_address=None,
                    scheduler_kwargs={
                        "dashboard_address": local_workers.DASHBOARD_ADDRESS
                    },
                    # `join` and `fetch` raise errors. Functions that still run when the
                    # program ends would be logged as errors.
                    silence_logs=logging.CRITICAL,
                )
            stack.enter_context(cluster)
            self._directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="keras_strategy_coordinator_")
            )
            for name in local_workers.CERTIFICATES:
                # Only the owner can read the directory.
                Path(self._directory, name).write_text(getattr(security, name))
            self.client = stack.enter_context(
                distributed.Client(cluster, security=security, set_as_default=False)
            )
            self._process = self._start(cluster.scheduler_address, count)
            stack.callback(self._stop)
            self._stack = stack.pop_all()

    def _start(self, scheduler: str, count: int) -> "subprocess.Popen[bytes]":
        # A program, because `multiprocessing` would run the user's script again.
        program = [sys.executable, "-P", local_workers.__file__]
        # A process must not be forked after a backend has initialized GPUs, nor on
        # macOS after it has used its frameworks.
        may_fork = sys.platform == "linux" and not get_engine().list_devices("gpu")
        preloaded = [worker.__name__] if may_fork else []
        paths = [path for path in sys.path if path]
        # Resources that a worker leaves open when it is stopped.
        warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
        environment = {
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONWARNINGS": ",".join(filter(None, warnings)),
            # `join` raises the errors of functions, so do not log them, too.
            "DASK_LOGGING__DISTRIBUTED": "critical",
            "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
        }
        return subprocess.Popen(
            [*program, scheduler, str(count), self._directory, *preloaded],
            env=environment,
            cwd=os.getcwd(),
        )

    def check(self) -> None:
        """Raise `RuntimeError` if the process that supervises the workers has ended."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(
                "The process that supervises the coordinator's workers has ended "
                f"with exit status {status}. See its output above, and restart the "
                "program."
            )

    def close(self) -> None:
        """Stop the workers."""
        with contextlib.suppress(Exception):
            self._stack.close()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            # It may wait for a worker that has not started yet and ends with it.
            self._process.kill()
            self._process.wait()


class OtherWorkers:
    """Workers of an existing Dask cluster.

    Args:
        cluster: A `distributed.Client`, or the address of Dask's scheduler, with the
            certificates in Dask's configuration.

    Raises:
        ValueError: If the connections are not secured by certificates.
    """

    def __init__(self, cluster: Any):
        distributed = _distributed()
        address = cluster
        if isinstance(cluster, distributed.Client):
            address = cluster.scheduler.address
        if not str(address).startswith("tls://"):
            raise ValueError(
                "Argument `cluster` must be a Dask cluster at an address that starts "
                "with 'tls://': anyone who can reach another one can run programs on "
                f"it and on this machine. Received: cluster={cluster!r}, at "
                f"{address!r}. See "
                "https://distributed.dask.org/en/stable/tls.html"
            )
        self._owns_client = isinstance(cluster, str)
        self.client: Any = cluster
        if self._owns_client:
            arguments = distributed.Security().get_connection_args("client")
            if not arguments.get("ssl_context"):
                raise ValueError(
                    "Argument `cluster` is an address, so Dask's configuration must "
                    "have its certificates, but has none. Or pass the client, "
                    "`distributed.Client(address, security=distributed.Security(...))`."
                    f" Received: cluster={cluster!r}"
                )
            self.client = distributed.Client(address, set_as_default=False)

    def check(self) -> None:
        """Do nothing: workers may be restarted elsewhere."""

    def close(self) -> None:
        """Close the client if it was created here."""
        if self._owns_client:
            with contextlib.suppress(Exception):
                self.client.close()
