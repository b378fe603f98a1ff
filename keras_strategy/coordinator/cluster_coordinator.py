"""`ClusterCoordinator` on JAX and torch: tf.distribute's API on Dask workers."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Self

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.coordinator import worker
from keras_strategy.core.registry import get_engine
from keras_strategy.strategies.base import Strategy

# Classes with variables: changes to a worker's copy would be lost silently.
_STATEFUL_TYPES = (
    keras.Variable,
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
)
_SECONDS_TO_JOIN, _SECONDS_TO_STOP = 60, 5
# Options of `dask worker`, and the attributes of `distributed.Security`.
_CERTIFICATES = {
    "tls-ca-file": "tls_ca_file",
    "tls-cert": "tls_worker_cert",
    "tls-key": "tls_worker_key",
}
# Dask always serves status pages without certificates: empty ones on the loopback.
_DASHBOARD_ADDRESS = "127.0.0.1:0"
_coordinators: "weakref.WeakKeyDictionary[Strategy, ClusterCoordinator]" = (
    weakref.WeakKeyDictionary()
)


class RemoteValue:
    """Future result of a function passed to `ClusterCoordinator.schedule`.

    Example:

    ```python
    import keras_strategy as ks

    def first(value: ks.coordinator.RemoteValue):
        return value.fetch()
    ```
    """

    # Set by `ClusterCoordinator.schedule`.
    _function_name: str
    _future: Future[Any]

    def fetch(self) -> Any:
        """Wait for the function and return its result, with arrays for tensors.

        Raises:
            CancelledError: If the function was cancelled because another one failed.
            Exception: The exception that the function raised.
        """
        return self._future.result()

    def get(self) -> Any:
        """Wait for the function and return its result, with tensors for arrays.

        Raises:
            CancelledError: If the function was cancelled because another one failed.
            Exception: The exception that the function raised.
        """
        return worker.to_tensors(self.fetch())


class ClusterCoordinator:
    """Schedules functions on workers asynchronously.

    On JAX and torch the workers are processes of Dask's `distributed`, which the extra
    `coordinator` installs. A free worker receives copies of the function and its
    arguments and runs it alone: variables stay with the coordinator, which also
    processes the results. If a worker dies, its function runs on another one, so each
    runs at least once. On TensorFlow this is tf.distribute's class, whose workers are
    TensorFlow servers.

    A strategy has one coordinator: creating another returns the same one.

    Args:
        strategy: The strategy of the coordinator's variables, with one process.
        cluster: The number of workers to start on this machine (default: 2); or the
            address of Dask's scheduler, which must begin with `"tls://"`, or a
            `distributed.Client`.

    Raises:
        ImportError: If the extra `coordinator` is not installed.
        TypeError: If `strategy` is not a strategy of this package.
        ValueError: If it has several workers, the cluster is not secured, or the
            strategy has a coordinator with another cluster.

    Example:

    ```python
    import keras_strategy as ks

    def train(rows, rate=0.1):
        strategy = ks.MirroredStrategy()
        coordinator = ks.coordinator.ClusterCoordinator(strategy, cluster=4)
        values = [coordinator.schedule(sum, args=(part,)) for part in rows]
        coordinator.join()
        return rate * sum(coordinator.fetch(values))
    ```
    """

    def __new__(cls, strategy: Strategy, cluster: Any = None) -> Self:
        """Return the strategy's coordinator, or create it."""
        if not isinstance(strategy, Strategy):
            raise TypeError(
                "Argument `strategy` must be a strategy of this package. Received: "
                f"strategy={strategy!r} of type {type(strategy).__name__}"
            )
        workers = strategy.extended.topology.cluster
        if workers is not None and workers.size > 1:
            raise ValueError(
                "Argument `strategy` must have one process: a coordinator has its own "
                f"workers. Received: strategy={strategy!r} with {workers.size} workers"
            )
        existing: Any = _coordinators.get(strategy)
        if existing is None:
            return super().__new__(cls)
        if cluster is not None and existing._cluster != cluster:
            raise ValueError(
                "Argument `cluster` must be omitted or equal that of the strategy's "
                f"existing coordinator, {existing._cluster!r}. Received: "
                f"cluster={cluster!r}"
            )
        return existing

    def __init__(self, strategy: Strategy, cluster: Any = None):
        """Start or find the workers, once per strategy."""
        if strategy in _coordinators:
            return
        self._strategy, self._cluster = strategy, 2 if cluster is None else cluster
        self._workers = DaskWorkers(self._cluster)
        self._condition = threading.Condition()
        self._running: dict[str, tuple[RemoteValue, Any]] = {}
        self._error: BaseException | None = None
        weakref.finalize(self, self._workers.close)
        _coordinators[strategy] = self

    @property
    def strategy(self) -> Strategy:
        """The strategy of this coordinator."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule a function on a worker and return immediately.

        Args:
            fn: A function. It may use names of its module, but no variables or models:
                pass their values as arguments and return the values to assign.
            args: The positional arguments. Variables are passed as their values and
                tensors as tensors. Each worker gets its own per-worker values, datasets
                and iterators.
            kwargs: The keyword arguments.

        Returns:
            A `RemoteValue`.

        Raises:
            TypeError: If `fn` is not callable, or an object cannot be pickled.
            ValueError: If an argument is a `RemoteValue` without a value.
            Exception: The exception of an earlier function; this one is not scheduled.
        """
        if not callable(fn):
            raise TypeError(
                "Argument `fn` must be a function. Received: "
                f"fn={fn!r} of type {type(fn).__name__}"
            )
        if not isinstance(args, list | tuple | None) or not isinstance(
            kwargs, Mapping | None
        ):
            raise TypeError(
                "Argument `args` must be a list or tuple, and `kwargs` a dict. "
                f"Received: args={args!r}, kwargs={kwargs!r}"
            )
        self._raise_first_error()
        name = getattr(fn, "__name__", type(fn).__name__)
        arguments = keras.tree.map_structure(
            lambda x: x.value if isinstance(x, keras.Variable) else x,
            (list(args or ()), dict(kwargs or {})),
        )
        call_data = _serialize(name, (fn, *arguments))
        value = RemoteValue()
        value._function_name, value._future = name, Future()
        with self._condition:
            future = self._workers.client.submit(
                worker.call,
                *(name, call_data, keras.backend.backend()),
                key=f"{name}-{uuid.uuid4().hex}",
                pure=False,
            )
            # Dask computes it only while its future exists.
            self._running[future.key] = value, future
        future.add_done_callback(self._on_done)
        return value

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Raises:
            Exception: The first exception of a function, once. Functions that have not
                ended are cancelled then and must be scheduled again.
        """
        with self._condition:
            while self._running and self._error is None:
                if not self._condition.wait(1.0):
                    self._workers.check()
        self._raise_first_error()

    def done(self) -> bool:
        """Return True if all scheduled functions have ended.

        Raises:
            Exception: As `join` does.
        """
        self._raise_first_error()
        with self._condition:
            return not self._running

    def fetch(self, val: Any) -> Any:
        """Wait for results.

        Args:
            val: A structure that contains `RemoteValue`s.

        Returns:
            The structure with results in their place, and arrays for tensors.

        Raises:
            Exception: The exception of one of the functions.
        """
        return keras.tree.map_structure(
            lambda x: x.fetch() if isinstance(x, RemoteValue) else x, val
        )

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> Any:
        """Create a dataset on each worker, when it first needs it.

        Args:
            dataset_fn: A function without arguments that returns an iterable.
                `experimental_get_current_worker_index` returns its worker's index. The
                result stays on its worker, so it may also hold a model.

        Returns:
            An object whose `iter` gives an iterator that is local to each worker. Pass
            either as an argument of `schedule`.

        Raises:
            TypeError: If `dataset_fn` is not callable, or cannot be pickled.
        """
        if not callable(dataset_fn):
            raise TypeError(
                "Argument `dataset_fn` must be a function that returns a dataset, "
                "because each worker creates its own. Received: "
                f"dataset_fn={dataset_fn!r} of type {type(dataset_fn).__name__}"
            )
        name = getattr(dataset_fn, "__name__", type(dataset_fn).__name__)
        return worker.PerWorkerDataset(_serialize(name, dataset_fn))

    def _on_done(self, future: Any) -> None:
        """Record the end of a function; Dask calls this."""
        result, error = None, None
        try:
            result = future.result()
        except BaseException as raised:  # whatever the function did
            error = raised
        with self._condition:
            value, _ = self._running.pop(future.key, (None, None))
            if value is None:  # cancelled before
                return
            if error is None:
                value._future.set_result(result)
            else:
                value._future.set_exception(error)
                self._error = self._error or error
            self._condition.notify_all()
        # Let Dask drop the result, which it would compute again if the worker dies.
        future.release()

    def _raise_first_error(self) -> None:
        """Raise the first error of a function, and cancel the others."""
        with self._condition:
            error, self._error = self._error, None
            if error is None:
                return
            cancelled, self._running = self._running, {}
        if cancelled:
            self._workers.client.cancel([future for _, future in cancelled.values()])
        for value, _ in cancelled.values():
            value._future.set_exception(
                CancelledError(
                    f"{value._function_name} was cancelled because another function "
                    "failed. Schedule it again."
                )
            )
        raise error


def _serialize(name: str, content: Any) -> bytes:
    """Serialize what function `name` needs, or raise an error that names it."""
    cloudpickle = import_extra("cloudpickle", "coordinator", "ClusterCoordinator")
    refusal: Exception | None = None

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            nonlocal refusal
            if isinstance(obj, _STATEFUL_TYPES):
                what = f"{type(obj).__name__} {getattr(obj, 'name', '')!r}"
                refusal = TypeError(
                    f"{name} uses {what} of the coordinator. Workers get copies, "
                    "whose changes would be lost. Pass the values as arguments (a "
                    "variable, or `model.get_weights()`), create the workers' "
                    "models in the function of `create_per_worker_dataset`, and "
                    "assign the returned values on the coordinator."
                )
                raise refusal
            if isinstance(obj, RemoteValue):
                if not obj._future.done() or obj._future.exception():
                    refusal = ValueError(
                        f"{name} received a `RemoteValue` that has no value yet. "
                        "Call `join` or its `fetch` first."
                    )
                    raise refusal
                return worker.to_tensors, (obj.fetch(),)
            if get_engine().is_tensor(obj):
                dtype = keras.backend.standardize_dtype(obj.dtype)
                array = keras.ops.convert_to_numpy(obj)
                return keras.ops.convert_to_tensor, (array, dtype)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file).dump(content)
    except Exception as error:
        if error is refusal:
            raise
        raise TypeError(
            f"The function or arguments of {name} cannot be sent to a worker: "
            f"{type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


class DaskWorkers:
    """Workers that are started here, by their number, or those of a Dask cluster.

    No other user can reach workers of this machine: they listen on the loopback address
    only, and both sides of a connection present a certificate that was created for
    this cluster. Dask restarts a dead worker.
    """

    def __init__(self, cluster: Any):
        if isinstance(cluster, bool):
            raise TypeError(
                "Argument `cluster` must be a number of workers, the address of Dask's "
                f"scheduler or a `distributed.Client`. Received: cluster={cluster!r}"
            )
        if isinstance(cluster, int) and cluster < 1:
            raise ValueError(
                "Argument `cluster` must be at least 1 worker, or a Dask cluster. "
                f"Received: cluster={cluster!r}"
            )
        distributed = import_extra("distributed", "coordinator", "ClusterCoordinator")
        self._supervisor: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as stack:
            connect = self._start if isinstance(cluster, int) else self._find
            self.client: Any = connect(distributed, cluster, stack)
            self._stack = stack.pop_all()

    def check(self) -> None:
        """Raise `RuntimeError` if the process that supervises the workers has ended."""
        status = None if self._supervisor is None else self._supervisor.poll()
        if status is not None:
            raise RuntimeError(
                "The process that supervises the coordinator's workers has ended with "
                f"exit status {status}. See its output above, and restart the program."
            )

    def close(self) -> None:
        """Stop the workers and close the client, if they were started here."""
        with contextlib.suppress(Exception):
            self._stack.close()

    def _find(self, distributed: Any, cluster: Any, stack: Any) -> Any:
        """Return a client of an existing cluster, given it or a scheduler's address."""
        address = cluster
        if isinstance(cluster, distributed.Client):
            address = cluster.scheduler.address
        if not str(address).startswith("tls://"):
            raise ValueError(
                "Argument `cluster` must be a Dask cluster at an address that starts "
                "with 'tls://': anyone who can reach another one can run programs on "
                f"it and on this machine. Received: cluster={cluster!r}, at "
                f"{address!r}. See https://distributed.dask.org/en/stable/tls.html"
            )
        if not isinstance(cluster, str):
            return cluster
        arguments = distributed.Security().get_connection_args("client")
        if not arguments.get("ssl_context"):
            raise ValueError(
                "Argument `cluster` is an address, so Dask's configuration must "
                "have its certificates, but has none. Or pass the client, "
                "`distributed.Client(address, security=distributed.Security(...))`."
                f" Received: cluster={cluster!r}"
            )
        client = distributed.Client(address, set_as_default=False)
        stack.callback(client.close)
        return client

    def _start(self, distributed: Any, count: int, stack: Any) -> Any:
        dask = import_extra("dask", "coordinator", "ClusterCoordinator")
        security = distributed.Security.temporary()
        with dask.config.set({"distributed.scheduler.http.routes": []}):
            cluster = distributed.LocalCluster(
                n_workers=0,
                host="127.0.0.1",
                protocol="tls://",
                security=security,
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": _DASHBOARD_ADDRESS},
                # `join` and `fetch` raise errors. Functions that still run when the
                # program ends would be logged as errors.
                silence_logs=logging.CRITICAL,
            )
        stack.enter_context(cluster)
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="keras_strategy_coordinator_")
        )
        # Only the owner can read the directory.
        files = {option: Path(directory, option) for option in _CERTIFICATES}
        for option, file in files.items():
            file.write_text(getattr(security, _CERTIFICATES[option]))
        client = stack.enter_context(
            distributed.Client(cluster, security=security, set_as_default=False)
        )
        # A program, because `multiprocessing` would run the user's script again. The
        # workers' names are the index, after "0-" if there are several.
        program = [sys.executable, "-P", "-m", "distributed.cli.dask_worker"]
        options = {
            "nworkers": count,
            "name": 0,
            "nthreads": 1,
            "memory-limit": 0,
            "host": "127.0.0.1",
            "protocol": "tls",
            "death-timeout": _SECONDS_TO_JOIN,
            "local-directory": directory,
            "dashboard-address": _DASHBOARD_ADDRESS,
            **files,
        }
        # Resources that a worker leaves open when it is stopped.
        warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]
        environment = {
            **os.environ,
            "KERAS_BACKEND": keras.backend.backend(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONWARNINGS": ",".join(filter(None, warnings)),
            # `join` raises the errors of functions, so do not log them, too.
            "DASK_LOGGING__DISTRIBUTED": "critical",
            "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
            "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._supervisor = subprocess.Popen(
            [*program, cluster.scheduler_address, "--no-dashboard", *arguments],
            env=environment,
        )
        stack.callback(_stop, self._supervisor)
        return client


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        # It may wait for a worker that has not started yet and ends with it.
        process.kill()
        process.wait()
