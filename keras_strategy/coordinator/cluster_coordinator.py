"""`ClusterCoordinator` on JAX and torch: tf.distribute's, with Dask's workers."""

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

_WORKERS = 2
_coordinators: "weakref.WeakKeyDictionary[Strategy, ClusterCoordinator]" = (
    weakref.WeakKeyDictionary()
)


class ClusterCoordinator:
    """Gives functions to workers, and does not wait for them.

    On JAX and torch the workers are processes of Dask's `distributed`, which the extra
    `coordinator` installs. A function travels to whichever worker is free, with copies
    of its arguments, and runs there by itself: variables stay with the coordinator, as
    does what is done with results. A function whose worker dies is given to another
    one, so that each runs at least once. On TensorFlow this is tf.distribute's own
    class, whose workers are its servers.

    A strategy has one coordinator: to make another is to get the same one.

    Args:
        strategy: The strategy of the coordinator's own variables, of one process.
        cluster: How many workers to start on this machine, 2 if it is left out; or the
            address of Dask's scheduler, which must begin with `"tls://"`, or a
            `distributed.Client`.

    Raises:
        ImportError: If the extra `coordinator` is not installed.
        TypeError: If `strategy` is no strategy of this package.
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
        """The strategy's coordinator, or a new one."""
        _check_strategy(strategy)
        found = _coordinators.get(strategy)
        if found is None:
            cluster = _WORKERS if cluster is None else cluster
            _check_cluster(cluster)
            made = super().__new__(cls)
            made._set_up(strategy, cluster)
            _coordinators[strategy] = made
            return made
        if cluster is not None and found._cluster != cluster:
            raise ValueError(
                "Argument `cluster` must be that of the coordinator which the strategy "
                f"has already, {found._cluster!r}, or be left out. Received: "
                f"cluster={cluster!r}"
            )
        return found  # pyright: ignore[reportReturnType]

    def __init__(self, strategy: Strategy, cluster: Any = None):
        """See the class. `__new__` has done it, once for a strategy."""

    def _set_up(self, strategy: Strategy, cluster: Any) -> None:
        local = isinstance(cluster, int)
        self._workers = LocalWorkers(cluster) if local else OtherWorkers(cluster)
        self._strategy = strategy
        self._cluster = cluster
        self._changed = threading.Condition()
        self._open: dict[str, tuple[Scheduled, Any]] = {}
        self._error: BaseException | None = None
        weakref.finalize(self, self._workers.close)

    @property
    def strategy(self) -> Strategy:
        """The strategy that this coordinator was made for."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Gives a function to a worker, and returns at once.

        Args:
            fn: A function. It may use what it finds where it was written, but no
                variables or models: it is given their values as arguments, and what is
                to be assigned it returns.
            args: Its positional arguments. Variables are given as their values,
                tensors as tensors, and each worker gets its own of per-worker values,
                datasets and iterators.
            kwargs: Its other arguments.

        Returns:
            A `RemoteValue`.

        Raises:
            TypeError: If `fn` is no function, or something cannot travel.
            ValueError: If an argument is a `RemoteValue` without a value by now.
            Exception: What an earlier function raised; this one is not scheduled.
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
        self._raise_once()
        name = getattr(fn, "__name__", type(fn).__name__)
        parcels = _parcels()
        given = parcels.without_variables((list(args or ()), dict(kwargs or {})))
        parcel = parcels.packed(name, (fn, *given))
        value = Scheduled(name)
        with self._changed:
            future = self._workers.client.submit(
                worker.call,
                *(name, parcel, keras.backend.backend()),
                key=f"{name}-{uuid.uuid4().hex}",
                pure=False,
            )
            # Dask computes it only while it is kept.
            self._open[future.key] = value, future
        future.add_done_callback(self._ended)
        return value

    def join(self) -> None:
        """Waits until all functions that were scheduled have ended.

        Raises:
            Exception: What a function raised, once. Those that had not ended are
                cancelled then, to be scheduled anew.
        """
        with self._changed:
            while self._open and self._error is None:
                if not self._changed.wait(1.0):
                    self._workers.check()
        self._raise_once()

    def done(self) -> bool:
        """Returns whether all functions that were scheduled have ended.

        Raises:
            Exception: As `join` does.
        """
        self._raise_once()
        with self._changed:
            return not self._open

    def fetch(self, val: Any) -> Any:
        """Waits for results.

        Args:
            val: A structure with `RemoteValue`s in it.

        Returns:
            The structure with their results in their place, arrays for tensors.

        Raises:
            Exception: What one of the functions raised.
        """
        return keras.tree.map_structure(
            lambda x: x.fetch() if isinstance(x, RemoteValue) else x, val
        )

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> Any:
        """Has each worker make a dataset for itself, when it first needs it.

        Args:
            dataset_fn: A function without arguments that returns something to iterate
                over. `experimental_get_current_worker_index` tells it where it is. What
                comes of it stays in its worker: a model may be there too.

        Returns:
            What gives an iterator to `iter`, of which each worker has its own.
            A function gets it, or the dataset, as an argument of `schedule`.

        Raises:
            TypeError: If `dataset_fn` is no function, or cannot travel.
        """
        if not callable(dataset_fn):
            raise TypeError(
                "Argument `dataset_fn` must be a function that returns a dataset, "
                "since each worker makes its own. Received: "
                f"dataset_fn={dataset_fn!r} of type {type(dataset_fn).__name__}"
            )
        name = getattr(dataset_fn, "__name__", type(dataset_fn).__name__)
        return PerWorkerDataset(_parcels().packed(name, dataset_fn))

    def _ended(self, future: Any) -> None:
        """What Dask calls when a function has ended."""
        result, error = None, None
        try:
            result = future.result()
        except BaseException as raised:  # whatever the function did
            error = raised
        with self._changed:
            value, _ = self._open.pop(future.key, (None, None))
            if value is None:  # cancelled before
                return
            if error is None:
                value.set_result(result)
            else:
                value.set_error(error)
                self._error = self._error or error
            self._changed.notify_all()
        # Dask need not keep it on the worker, to compute it again if that dies.
        future.release()

    def _raise_once(self) -> None:
        """Raises the first error of a function, and cancels what is under way."""
        with self._changed:
            error, self._error = self._error, None
            if error is None:
                return
            left, self._open = self._open, {}
        if left:
            self._workers.client.cancel([future for _, future in left.values()])
        for value, _ in left.values():
            value.set_error(
                CancelledError(
                    f"{value.name} was cancelled, since another function failed. "
                    "Schedule it again."
                )
            )
        raise error


def _parcels() -> "ModuleType":
    # Only with the extra there is what it needs.
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
            "Argument `strategy` must be of one process: a coordinator gives work to "
            f"workers of its own. Received: strategy={strategy!r} of {cluster.size} "
            "workers"
        )


def _check_cluster(cluster: Any) -> None:
    number = isinstance(cluster, int) and not isinstance(cluster, bool)
    if number and cluster < 1:
        raise ValueError(
            "Argument `cluster` must be 1 worker or more, or Dask's cluster. Received: "
            f"cluster={cluster!r}"
        )
    if isinstance(cluster, bool):
        raise TypeError(
            "Argument `cluster` must be a number of workers, the address of Dask's "
            f"scheduler or a `distributed.Client`. Received: cluster={cluster!r}"
        )
