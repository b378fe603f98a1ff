"""Dask's workers: those of this machine that are started here, or a cluster's."""

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

_SECONDS_TO_END = 5


def _distributed() -> Any:
    return import_extra("distributed", "coordinator", "ClusterCoordinator")


class LocalWorkers:
    """Processes of this machine, which nobody else can reach or give work to.

    They listen on the loopback address alone, and both sides of a connection show a
    certificate that was made for this cluster. Dask starts one again that has died.

    Args:
        count: How many.
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
                    scheduler_kwargs={"dashboard_address": local_workers.PAGES_AT},
                    # What fails is raised by `join` and `fetch`. Functions that are
                    # under way when the program ends would be told as errors.
                    silence_logs=logging.CRITICAL,
                )
            stack.enter_context(cluster)
            self._directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="keras_strategy_coordinator_")
            )
            for name in local_workers.CERTIFICATES:
                # The directory is its owner's alone.
                Path(self._directory, name).write_text(getattr(security, name))
            self.client = stack.enter_context(
                distributed.Client(cluster, security=security, set_as_default=False)
            )
            self._process = self._started(cluster.scheduler_address, count)
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def _started(self, scheduler: str, count: int) -> "subprocess.Popen[bytes]":
        # As a program: `multiprocessing` would run the user's script again.
        program = [sys.executable, "-P", local_workers.__file__]
        # An engine that has looked for GPUs and found some must not be forked, nor may
        # a process of macOS that has used its frameworks.
        may_fork = sys.platform == "linux" and not get_engine().list_devices("gpu")
        of_forks = [worker.__name__] if may_fork else []
        paths = [path for path in sys.path if path]
        # What a worker leaves open that is ended in the middle of its work.
        warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
        environment = {
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONWARNINGS": ",".join(filter(None, warnings)),
            # What functions raise comes out of `join`, and is not to be told twice.
            "DASK_LOGGING__DISTRIBUTED": "critical",
            "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
        }
        return subprocess.Popen(
            [*program, scheduler, str(count), self._directory, *of_forks],
            env=environment,
            cwd=os.getcwd(),
        )

    def check(self) -> None:
        """Raises `RuntimeError` if there is no worker left, nor one to be."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(
                "The process that looks after the coordinator's workers has ended, "
                f"with the exit status {status}. Look above for what it printed, and "
                "start the program again."
            )

    def close(self) -> None:
        """Ends the workers."""
        with contextlib.suppress(Exception):
            self._stack.close()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            # It may wait for a worker that has not begun yet, which ends with it.
            self._process.kill()
            self._process.wait()


class OtherWorkers:
    """The workers of a cluster that others started, and end.

    Args:
        cluster: A `distributed.Client`, or the address of Dask's scheduler, whose
            certificates are those of Dask's configuration.

    Raises:
        ValueError: If its connections are not secured by certificates.
    """

    def __init__(self, cluster: Any):
        distributed = _distributed()
        address = cluster
        if isinstance(cluster, distributed.Client):
            address = cluster.scheduler.address
        if not str(address).startswith("tls://"):
            raise ValueError(
                "Argument `cluster` must be Dask's at an address that begins with "
                "'tls://': whoever reaches another one can run programs on it and on "
                f"this machine. Received: cluster={cluster!r}, at {address!r}. See "
                "https://distributed.dask.org/en/stable/tls.html"
            )
        self._own = isinstance(cluster, str)
        self.client: Any = cluster
        if self._own:
            known = distributed.Security().get_connection_args("client")
            if not known.get("ssl_context"):
                raise ValueError(
                    "Argument `cluster` is an address, whose certificates are to be "
                    "in Dask's configuration, and there are none. Give the client, "
                    "`distributed.Client(address, security=distributed.Security(...))`."
                    f" Received: cluster={cluster!r}"
                )
            self.client = distributed.Client(address, set_as_default=False)

    def check(self) -> None:
        """Does nothing: others may start workers again."""

    def close(self) -> None:
        """Leaves the cluster."""
        if self._own:
            with contextlib.suppress(Exception):
                self.client.close()
