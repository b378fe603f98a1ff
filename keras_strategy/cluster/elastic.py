"""Elastic training: the launcher replaces the cluster when workers fail or join.

Each worker has a channel to the launcher, on which lines of JSON are sent:

- a worker sends `"ready"` when it is in no cluster;
- the launcher sends `{"cluster": n, "variables": {...}}`, the environment variables
  with which the worker joins cluster n, once all that are to be in it are ready;
- the launcher sends `{"ends": n}` when workers have to leave cluster n.
"""

import json
import os
import queue
import socket
import threading
from typing import Any

from keras_strategy.errors import ClusterError

# The descriptor of the worker's end of the channel.
CHANNEL_VARIABLE = "KERAS_STRATEGY_ELASTIC_CHANNEL"


class WorkersChangedError(BaseException):
    """All workers leave their cluster, after a save, to form another one."""

    # Like SystemExit no Exception, so that a callback's `except` does not stop it.


class ElasticWorker:
    """A worker whose cluster the launcher replaces."""

    def __init__(self, descriptor: int):
        self._channel = socket.socket(fileno=descriptor)
        self._channel.set_inheritable(False)
        self._assigned: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cluster = self._ended = 0  # the last ones, 0 for none
        threading.Thread(
            target=self._receive, name="keras_strategy elastic", daemon=True
        ).start()

    @property
    def must_leave(self) -> bool:
        """True if the workers have to leave this worker's cluster."""
        return self._ended >= self.cluster

    def wait_for_cluster(self) -> None:
        """Wait for the next cluster, and set its environment variables."""
        self._channel.sendall(b'"ready"\n')
        assigned = self._assigned.get()
        self.cluster = assigned["cluster"]
        os.environ.update(assigned["variables"])

    def _receive(self) -> None:
        # The launcher's end also ends this process.
        for line in self._channel.makefile("rb"):
            message = json.loads(line)
            if "ends" in message:
                self._ended = message["ends"]
            else:
                self._assigned.put(message)


_worker: ElasticWorker | None = None


def elastic_worker() -> ElasticWorker | None:
    """Return this process as an elastic worker; None if it was not started as one."""
    global _worker
    descriptor = os.environ.get(CHANNEL_VARIABLE)
    if _worker is None and descriptor is not None:
        _worker = ElasticWorker(int(descriptor))
    return _worker


def must_leave_cluster() -> bool:
    return _worker is not None and _worker.must_leave


def check_has_joined() -> None:
    """Raise ClusterError in an elastic worker that trains outside `run_elastic`."""
    if CHANNEL_VARIABLE in os.environ and not (_worker and _worker.cluster):
        raise ClusterError(
            "This worker was started with `--min-workers`, so its cluster may change. "
            "Create the strategy and the model in a function, and pass this to "
            "`keras_strategy.run_elastic`; or start the program without "
            "`--min-workers`."
        )
