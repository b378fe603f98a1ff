"""Dask's workers: those of this machine that are started here, or a cluster's."""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras

from keras_strategy.cluster_resolver.extras import import_extra

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
        security = distributed.Security.temporary()
        with contextlib.ExitStack() as stack:
            scheduler = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=0,
                    host="127.0.0.1",
                    protocol="tls://",
                    security=security,
                    dashboard_address=None,
                    silence_logs=logging.ERROR,
                )
            )
            self._directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="keras_strategy_coordinator_")
            )
            self._processes: list[subprocess.Popen[bytes]] = []
            stack.callback(self._end)
            self.client = stack.enter_context(
                distributed.Client(scheduler, security=security, set_as_default=False)
            )
            options = self._certificates(security)
            for index in range(count):
                self._start(index, scheduler.scheduler_address, options)
            self._stack = stack.pop_all()

    def _certificates(self, security: Any) -> list[str]:
        texts = {
            "tls-ca-file": security.tls_ca_file,
            "tls-cert": security.tls_worker_cert,
            "tls-key": security.tls_worker_key,
        }
        options = []
        for name, text in texts.items():
            # The directory is its owner's alone.
            path = Path(self._directory, name)
            path.write_text(text)
            options.append(f"--{name}={path}")
        return options

    def _start(self, index: int, scheduler: str, options: list[str]) -> None:
        # As programs of their own: `multiprocessing` would run the user's script again.
        command = [
            *(sys.executable, "-m", "distributed.cli.dask_worker", scheduler),
            *("--host=127.0.0.1", "--protocol=tls://", f"--name={index}"),
            *("--nworkers=1", "--nthreads=1", "--memory-limit=0", "--no-dashboard"),
            *("--death-timeout=60", f"--local-directory={self._directory}"),
        ]
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
        }
        self._processes.append(
            subprocess.Popen([*command, *options], env=environment, cwd=os.getcwd())
        )

    def check(self) -> None:
        """Raises `RuntimeError` if there is no worker left, nor one to be."""
        ends = [process.poll() for process in self._processes]
        if None not in ends:
            raise RuntimeError(
                f"All {len(ends)} processes that look after the coordinator's workers "
                f"have ended, with the exit statuses {ends}. Look above for what they "
                "printed, and start the program again."
            )

    def close(self) -> None:
        """Ends the workers."""
        with contextlib.suppress(Exception):
            self._stack.close()

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        until = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            try:
                process.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                # It may wait for a worker that has not begun yet, which ends with it.
                process.kill()
                process.wait()


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
            self.client = distributed.Client(address, set_as_default=False)

    def check(self) -> None:
        """Does nothing: others may start workers again."""

    def close(self) -> None:
        """Leaves the cluster."""
        if self._own:
            with contextlib.suppress(Exception):
                self.client.close()
