"""Strategy: checks arguments and delegates to the replica group of the backend."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.cluster.membership import Cluster, leave_cluster
from keras_strategy.core import context
from keras_strategy.core.registry import UnsupportedName, get_engine
from keras_strategy.data import splitting
from keras_strategy.data.distributed_dataset import (
    DistributedDataset,
    start_batch_check,
)
from keras_strategy.devices import LogicalDevices
from keras_strategy.keras_patches import consistency
from keras_strategy.options import (
    InputContext,
    InputOptions,
    RunOptions,
    check_batch_statistics,
    check_run_options,
    check_shard,
    check_virtual_replicas,
)
from keras_strategy.strategies.inspect import Reports
from keras_strategy.training import ownership, saving
from keras_strategy.training.cross_device_ops import CrossDeviceOps
from keras_strategy.training.reduction import check_gatherable
from keras_strategy.training.train_step import check_function, run_whole
from keras_strategy.values import (
    DistributedValues,
    PerReplica,
    ReduceOp,
    ValueContext,
    select_replica,
    sum_of_copies_error,
)

if TYPE_CHECKING:
    from keras_strategy.strategies.extended import StrategyExtended


class ClosedGroup:
    """The replicas of a strategy that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "This strategy was closed, so it has no replicas. Save a model before "
            "`close()`. Now only `get_weights()` works: pass its result to "
            "`set_weights` of the same model in another strategy."
        )


def close_strategies(cluster: Cluster) -> None:
    """Close all strategies of a cluster, and leave it if the backend can."""
    closed: Any = ClosedGroup()
    for strategy in cluster.strategies:
        strategy.extended.group = closed
    cluster.strategies.clear()
    if get_engine().can_disconnect:
        leave_cluster()


class StrategyScope(contextlib.AbstractContextManager):
    """`strategy.scope()`: may be entered several times, also inside itself."""

    def __init__(self, strategy: "Strategy"):
        self._strategy = strategy
        # Scopes of the backend, innermost last.
        self._backend_scopes: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> "Strategy":
        context.require_cross_replica(self._strategy, "scope")
        scopes = context.thread_state.scopes
        scopes.append(self._strategy)
        try:
            backend_scope = self._strategy.extended.group.scope()
            backend_scope.__enter__()
        except BaseException:
            scopes.pop()
            raise
        self._backend_scopes.append(backend_scope)
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        scopes = context.thread_state.scopes
        if ownership.pending_values and len(scopes) == 1 and exception[0] is None:
            ownership.broadcast_pending_values()
        try:
            self._backend_scopes.pop().__exit__(*exception)
        finally:
            scopes.pop()


_SESSIONS = (
    "It configures a session of TensorFlow 1. The Keras backend needs no "
    "configuration; remove the call."
)


class Strategy(Reports):
    """A way to run one computation on several devices at once.

    Create one of its subclasses, such as `MirroredStrategy`. Variables created in its
    `scope()` have a component on each device; a model trains on all of them.

    Args:
        extended: A `StrategyExtended`, which holds the replicas.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    ```
    """

    _batch_statistics: str | None = None
    _shard: str | None = None
    _virtual_replicas: int | None = None
    _logical: LogicalDevices | None = None
    _parameter_device: str | None = None

    def __init__(self, extended: "StrategyExtended"):
        self._extended = extended
        # Code of functions that have run; other callables are not tracked.
        self._seen_code: dict[int, Any] = {id(None): None}

    def _set_options(
        self,
        batch_statistics: str | None,
        shard: str | None,
        virtual_replicas: int | None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        """Check and keep the options of strategies with several devices."""
        self._batch_statistics = check_batch_statistics(batch_statistics)
        self._shard = check_shard(shard, get_engine(), cross_device_ops)
        self._virtual_replicas = check_virtual_replicas(
            virtual_replicas, get_engine(), shard, cross_device_ops
        )

    @property
    def extended(self) -> "StrategyExtended":
        """The part of the interface for library authors."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are summed, on all workers.

        It is 1 in steps of `fit` that have all rows: that run whole, or all on JAX.
        """
        has_all_rows = context.thread_state.device_step is self
        return 1 if has_all_rows else self._extended.num_replicas

    @property
    def batch_statistics(self) -> str | None:
        """The `batch_statistics` option: `"global"`, `"local"` or None.

        None normalizes by the global batch in `fit`, and by the local batch in `run`.
        """
        return self._batch_statistics

    @property
    def shard(self) -> str | None:
        """The `shard` option: `"optimizer"`, `"parameters"` or None."""
        return self._shard

    @property
    def virtual_replicas(self) -> int | None:
        """The `virtual_replicas` option; None for one replica on each device."""
        return self._virtual_replicas

    @property
    def logical_devices(self) -> LogicalDevices | None:
        """The devices of each replica of a `TPUStrategy`; otherwise None."""
        return self._logical

    @property
    def parameter_device(self) -> str | None:
        """The device of all variables; None if each replica has components."""
        return self._parameter_device

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster's workers; None for one worker."""
        return None

    @property
    def is_chief(self) -> bool:
        """True on the worker that writes files: the task "chief", or else worker 0.

        It is also True without other workers. What only the chief does must not call
        the strategy or its model: the other workers would wait for collectives.

        Example:

        ```python
        import pathlib
        import keras_strategy as ks

        strategy = ks.MultiWorkerMirroredStrategy()
        if strategy.is_chief:
            pathlib.Path("notes.txt").write_text("written once")
        ```
        """
        cluster = self._extended.cluster
        return cluster is None or cluster.is_chief

    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Return a context manager that makes this the current strategy.

        Inside it variables are mirrored and `keras_strategy.get_strategy()` returns
        this strategy. `fit`, `evaluate` and `predict` of a model that was created
        inside enter the scope by themselves. It may be entered again.

        Raises:
            RuntimeError: On entering, in another strategy's scope or a replica.

        Example:

        ```python
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope() as inside:
            assert inside is strategy
        ```
        """
        return StrategyScope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn` once on every replica, each with its component of the arguments.

        Assignments to variables are committed when all replicas have succeeded. An
        exception in one propagates unchanged, and the variables keep their old values.

        Args:
            fn: Called in replica context; see `keras_strategy.get_replica_context`.
            args: A tuple or list of positional arguments. Every replica gets its own
                component of the `PerReplica` values in it, and everything else
                unchanged. A variable stays one, which reads as the replica's component.
            kwargs: A dict of keyword arguments, or None; likewise.
            options: `RunOptions`, or None for the default ones.

        Returns:
            The structure that `fn` returned, with a `PerReplica` value in place of each
            tensor, not of Python constants. With one replica, the output of `fn`.

        Raises:
            ValueError: If `args` is neither a tuple nor a list, or contains a value of
                a strategy with another number of replicas.
            TypeError: If `fn` is not callable, or `options` has another type.
            MirrorError: In the mode of `config.check_mirrored`, if components differ.
            RuntimeError: Inside a function that `run` calls, `merge_call`, or another
                strategy's scope.

        Example:

        ```python
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        doubled = strategy.run(lambda i: i * 2, args=(ids,))
        assert int(strategy.experimental_local_results(doubled)[0]) == 0
        ```
        """
        check_function(fn, args)
        options = check_run_options(options)
        context.require_cross_replica(self, "run")
        compare_batches, cluster = None, self._extended.cluster
        if cluster is not None:
            inputs = (*args, *(kwargs or {}).values())
            compare_batches = start_batch_check(cluster, inputs)
        if ownership.pending_values:
            with self.scope():
                ownership.broadcast_pending_values()
        if options.whole and self.num_replicas_in_sync > 1:
            result = run_whole(self, fn, args, kwargs or {})
        else:
            seen = id(getattr(fn, "__code__", None)) in self._seen_code
            run = self._extended.group.run if seen else self._run_first
            result = run(fn, tuple(args), dict(kwargs or {}), options, self.scope)
            if self._extended.assigned_in_run or consistency.check_each_batch:
                consistency.check_after_run(self, is_first_call=not seen)
        if compare_batches is not None:
            compare_batches()
        return result

    def _run_first(self, fn: Callable[..., Any], *args: Any) -> Any:
        if len(self._seen_code) > 256:  # functions created on each call
            self._seen_code = {id(None): None}
        self._seen_code[id(fn.__code__)] = fn.__code__
        step = functools.partial(self._extended.group.run, fn)
        what = f"call of `{fn.__name__}` by strategy.run"
        return saving.run_first_step(step, what, self._extended.cluster, *args)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Combine the replicas' values into one.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: A structure of `PerReplica` values, as `run` returns them, and of
                variables. One with `synchronization="on_read"` has a value on each
                replica, any other the same value on all of them.
            axis: None to combine the replicas' tensors elementwise; an int or a
                tuple of ints to also combine these dimensions. The mean over `axis=0`
                of 4 rows on one replica and 2 on the other divides by 6.

        Returns:
            The structure, with one tensor in place of each value.

        Raises:
            ValueError: If `reduce_op` is invalid, SUM is requested for a value that is
                equal on all replicas, or a value has another number of components.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ones = strategy.run(lambda: keras.ops.ones((2,)))
        n = strategy.num_replicas_in_sync
        assert float(strategy.reduce("SUM", ones, axis=0)) == 2 * n
        ```
        """
        op = ReduceOp.parse(reduce_op)
        context.require_cross_replica(self, "reduce")
        with self.scope():
            if isinstance(value, DistributedValues):  # fast path
                return self._reduce_one(op, value, axis)
            return tree.map_structure(lambda x: self._reduce_one(op, x, axis), value)

    def _reduce_one(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        if isinstance(value, keras.Variable):
            value = ownership.cross_replica_value(self, "reduce", value)
        if not isinstance(value, DistributedValues):
            value = ownership.distribute_native(value, is_mirrored=False)
        if isinstance(value, DistributedValues):
            ownership.check_component_count(self._extended.topology, "reduce", value)
            reducing = self._extended.custom_reducer or self._extended.group
            return reducing.reduce(op, value, axis)
        # Equal on every replica; a copy of a `tf.Variable`, which changes.
        value = keras.ops.copy(value) if hasattr(value, "assign") else value
        if op is ReduceOp.MEAN:
            return value if axis is None else keras.ops.mean(value, axis=axis)
        if axis is not None:
            return keras.ops.sum(value, axis=axis) * self.num_replicas_in_sync
        if self.num_replicas_in_sync == 1:
            return value
        raise sum_of_copies_error(value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values.

        Args:
            value: A structure of `PerReplica` values, as `run` returns them, and of
                variables, of rank 1 or more. Only sizes along `axis` may differ.
            axis: The dimension along which the values are joined, in replica order.

        Returns:
            The structure, with one tensor in place of each distributed value.

        Raises:
            ValueError: If the values cannot be joined along `axis`, or belong to a
                strategy with another number of replicas.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ones = strategy.run(lambda: keras.ops.ones((2,)))
        rows = strategy.gather(ones, axis=0)
        assert rows.shape[0] == 2 * strategy.num_replicas_in_sync
        ```
        """
        context.require_cross_replica(self, "gather")

        def gather_one(x):
            if isinstance(x, keras.Variable):
                x = ownership.per_replica_values(self, "gather", x) or x.value
            x = ownership.distribute_native(x)
            if not isinstance(x, DistributedValues):
                return x
            ownership.check_component_count(self._extended.topology, "gather", x)
            check_gatherable(x.values, axis)
            return self._extended.group.gather(x.values, axis)

        with self.scope():
            return tree.map_structure(gather_one, value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value that are on this worker.

        Args:
            value: A structure of distributed values and variables.

        Returns:
            A tuple with one element for each local replica; for a single value that is
            not distributed, of only that value.

        Raises:
            ValueError: If a value is of a strategy with another number of replicas.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(1.0)
        n = strategy.num_replicas_in_sync
        assert len(strategy.experimental_local_results(v)) == n
        assert strategy.experimental_local_results(3) == (3,)
        ```
        """
        if isinstance(value, keras.Variable):
            return self._extended.local_components(value)
        method = "experimental_local_results"
        replicas = 0

        def distribute(x):
            nonlocal replicas
            if isinstance(x, keras.Variable):
                x = ownership.per_replica_values(self, method, x) or x
            x = ownership.distribute_native(x)
            if isinstance(x, DistributedValues):
                ownership.check_component_count(self._extended.topology, method, x)
                replicas = len(x.values)
            return x

        value = tree.map_structure(distribute, value)
        if not replicas:
            if not tree.is_nested(value):
                return (value,)
            replicas = len(self._extended.topology.local_replicas)
        return tuple(
            select_replica(value, replica, replicas, method)
            for replica in range(replicas)
        )

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Create a distributed value from one value for each replica.

        Args:
            value_fn: Called once for each local replica with a `ValueContext`.

        Returns:
            The structure that `value_fn` returned, with a `PerReplica` value in place
            of each leaf. With one replica, the output of `value_fn`.

        Raises:
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        n = strategy.num_replicas_in_sync
        assert strategy.experimental_local_results(ids) == tuple(range(n))
        ```
        """
        method = "experimental_distribute_values_from_function"
        context.require_cross_replica(self, method)
        replicas = self.num_replicas_in_sync
        local = self.extended.topology.local_replicas
        values = [value_fn(ValueContext(i, replicas)) for i in local]
        if replicas == 1:
            return values[0]
        return tree.map_structure(lambda *leaves: PerReplica(leaves), *values)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute a dataset of global batches.

        Every batch is split by rows, in order: with N replicas each gets
        ceil(rows / N) rows, the last ones fewer or none.

        Args:
            dataset: A `tf.data.Dataset`, a torch `DataLoader`, a
                `keras.utils.PyDataset`, or any other iterable or iterator of batches.
                A batch is an array, or a structure of arrays with as many rows.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset` of structures like the batch, with a `PerReplica` in
            place of each array; with one replica, a tensor.

        Raises:
            TypeError: If `dataset` is not a dataset, or `options` has another type.
            ValueError: If it is distributed already; on reading, if it has no batches.
            RuntimeError: Inside a function that `run` calls, or inside another
                strategy's scope.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        batches = [np.ones((4,), "float32")]
        for x in strategy.experimental_distribute_dataset(batches):
            assert float(strategy.reduce("SUM", x, axis=0)) == 4.0
        ```
        """
        return splitting.distribute(self, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distribute a dataset of local batches, each for one replica.

        Each worker calls `dataset_fn` for its own dataset, whose batches its replicas
        take in turn. At the end, replicas without a batch get one of 0 rows; where a
        `tf.data.Dataset` has batches of one fixed shape, the incomplete last round is
        dropped instead, as in tf.distribute.

        Args:
            dataset_fn: Called with an `InputContext`, returns a dataset of any type
                that `experimental_distribute_dataset` accepts. With the option
                `InputReplicationMode.PER_REPLICA` it is called for each replica.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: If an argument has another type, or a result is not a dataset.
            RuntimeError: Inside a function that `run` calls, or inside another
                strategy's scope.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        n = strategy.num_replicas_in_sync

        def dataset_fn(context):
            rows = context.get_per_replica_batch_size(4 * n)
            return [np.ones((rows, 3), "float32") for _ in range(2 * n)]

        steps = [x for x in strategy.distribute_datasets_from_function(dataset_fn)]
        assert len(steps) == 2
        ```
        """
        return splitting.distribute_from_function(self, dataset_fn, options)

    # Names that tf.distribute deprecates. Aliases work with a warning; those of
    # TensorFlow 1's sessions and iterators say what to use.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    configure = UnsupportedName(_SESSIONS)
    update_config_proto = UnsupportedName(_SESSIONS)
    make_dataset_iterator = UnsupportedName(
        "It creates an iterator of TensorFlow 1. Use "
        "`iter(strategy.experimental_distribute_dataset(dataset))`."
    )
    make_input_fn_iterator = UnsupportedName(
        "It creates an iterator of TensorFlow 1. Use "
        "`iter(strategy.distribute_datasets_from_function(dataset_fn))`."
    )
    group = UnsupportedName(
        "It joins operations of a TensorFlow 1 graph. Operations run in program "
        "order; return the values that you need."
    )

    def close(self) -> None:
        """Disconnect from the other workers, so that this process can join others.

        Each worker calls it after its last step, and saves models before. It closes all
        strategies of this process that share the connection; of models in their scopes
        only the weights can still be read. On JAX and TensorFlow, whose connections
        last as long as the process, the next strategy must have the same workers. A
        strategy without other workers stays as it is.

        A strategy that nothing refers to any more, and no model either, is closed when
        the process joins other workers.

        Raises:
            RuntimeError: Inside a function of `run`.

        Example:

        ```python
        import contextlib
        import keras_strategy as ks

        with contextlib.closing(ks.MultiWorkerMirroredStrategy()) as strategy:
            assert strategy.reduce("mean", 1.0) == 1.0
        ```
        """
        context.require_cross_replica(self, "close")
        cluster = self._extended.cluster
        if cluster is not None and self in cluster.strategies:
            close_strategies(cluster)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return `experimental_local_results(value)`; the old name.

        Args:
            value: A distributed value.
        """
        warn_deprecated("Strategy.unwrap", "strategy.experimental_local_results")
        return self.experimental_local_results(value)

    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Return `extended.colocate_vars_with(...)`; the old name.

        Args:
            colocate_with_variable: A variable of this strategy.
        """
        warn_deprecated(
            "Strategy.colocate_vars_with", "strategy.extended.colocate_vars_with"
        )
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None):
        """Return `run` with the next element of an iterator; the old name.

        Args:
            fn: The function that runs on each replica.
            input_iterator: The iterator; without one, `fn` gets no arguments.
        """
        warn_deprecated(
            "Strategy.experimental_run", "strategy.run(fn, args=(next(iterator),))"
        )
        args = () if input_iterator is None else (next(input_iterator),)
        return self.run(fn, args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={list(self._extended.worker_devices)})"

    def __reduce__(self):
        # A strategy keeps each of its arguments in an attribute of that name.
        names = inspect.signature(type(self)).parameters
        arguments = {name: getattr(self, f"_{name}") for name in names}
        return functools.partial(type(self), **arguments), ()

    def __deepcopy__(self, memo: dict) -> "Strategy":
        return self  # a copy would use the same devices


def warn_deprecated(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn of a name that tf.distribute deprecates."""
    warnings.warn(
        f"tf.distribute deprecates `{old}`. Use `{new}`.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
