"""`ClusterCoordinator` on JAX and torch: tf.distribute's API on Dask workers."""

import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Self

import keras

from keras_strategy.coordinator import worker
from keras_strategy.coordinator.dask_cluster import LocalWorkers, OtherWorkers
from keras_strategy.coordinator.values import PerWorkerDataset, RemoteValue, Scheduled
from keras_strategy.strategies.base import Strategy

if TYPE_CHECKING:
    from types import ModuleType

_DEFAULT_WORKERS = 2
_coordinators: "weakref.WeakKeyDictionary[Strategy, ClusterCoordinator]" = (
    weakref.WeakKeyDictionary()
)


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

    _strategy: Strategy
    _cluster: Any

    def __new__(cls, strategy: Strategy, cluster: Any = None) -> Self:
        """Return the strategy's coordinator, or create it."""
        _check_strategy(strategy)
        existing = _coordinators.get(strategy)
        if existing is None:
            cluster = _DEFAULT_WORKERS if cluster is None else cluster
            _check_cluster(cluster)
            created = super().__new__(cls)
            created._initialize(strategy, cluster)
            _coordinators[strategy] = created
            return created
        if cluster is not None and existing._cluster != cluster:
            raise ValueError(
                "Argument `cluster` must be omitted or equal that of the strategy's "
                f"existing coordinator, {existing._cluster!r}. Received: "
                f"cluster={cluster!r}"
            )
        return existing  # pyright: ignore[reportReturnType]

    def __init__(self, strategy: Strategy, cluster: Any = None):
        """Do nothing: `__new__` initializes the coordinator once per strategy."""

    def _initialize(self, strategy: Strategy, cluster: Any) -> None:
        local = isinstance(cluster, int)
        self._workers = LocalWorkers(cluster) if local else OtherWorkers(cluster)
        self._strategy = strategy
        self._cluster = cluster
        self._condition = threading.Condition()
        self._running: dict[str, tuple[Scheduled, Any]] = {}
        self._error: BaseException | None = None
        weakref.finalize(self, self._workers.close)

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
        serialization = _serialization()
        arguments = serialization.replace_variables(
            (list(args or ()), dict(kwargs or {}))
        )
        call_data = serialization.serialize(name, (fn, *arguments))
        value = Scheduled(name)
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
        return PerWorkerDataset(_serialization().serialize(name, dataset_fn))

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
                value.set_result(result)
            else:
                value.set_error(error)
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
            value.set_error(
                CancelledError(
                    f"{value.name} was cancelled because another function failed. "
                    "Schedule it again."
                )
            )
        raise error


def _serialization() -> "ModuleType":
    # Lazily: it needs the optional extra.
    from keras_strategy.coordinator import serialization

    return serialization


def _check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "Argument `strategy` must be a strategy of this package. Received: "
            f"strategy={strategy!r} of type {type(strategy).__name__}"
        )
    cluster = strategy.extended.topology.cluster
    if cluster is not None and cluster.size > 1:
        raise ValueError(
            "Argument `strategy` must have one process: a coordinator has its own "
            f"workers. Received: strategy={strategy!r} with {cluster.size} workers"
        )


def _check_cluster(cluster: Any) -> None:
    is_count = isinstance(cluster, int) and not isinstance(cluster, bool)
    if is_count and cluster < 1:
        raise ValueError(
            "Argument `cluster` must be at least 1 worker, or a Dask cluster. "
            f"Received: cluster={cluster!r}"
        )
    if isinstance(cluster, bool):
        raise TypeError(
            "Argument `cluster` must be a number of workers, the address of Dask's "
            f"scheduler or a `distributed.Client`. Received: cluster={cluster!r}"
        )
