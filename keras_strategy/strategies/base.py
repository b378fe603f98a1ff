"""`strategy.scope()`: what is entered, and left again.

How a strategy distributes data: datasets, and values made for each replica.

The names of tf.distribute's strategies that are older than TensorFlow 2.

Those that are another name of something are kept, with a warning. The others belong to
sessions and iterators of TensorFlow 1, and say what to use.

Strategy: what people call.

It checks the arguments, then asks the replica group of the adapter in use.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.core.unsupported_names import UnsupportedName
from keras_strategy.data import splitting
from keras_strategy.data.distributed_dataset import DistributedDataset
from keras_strategy.devices import LogicalDevices
from keras_strategy.keras_patches import consistency
from keras_strategy.options import (
    InputContext,
    InputOptions,
    RunOptions,
    check_call,
    check_run_options,
)
from keras_strategy.strategies.inspect import Reports
from keras_strategy.training import ownership, slow_operations
from keras_strategy.training.reduction import check_same_dtype
from keras_strategy.values import (
    DistributedValues,
    PerReplica,
    ReduceOp,
    ValueContext,
    select_replica,
    sum_of_copies_error,
)

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy
    from keras_strategy.strategies.extended import StrategyExtended


class StrategyScope(contextlib.AbstractContextManager):
    """`strategy.scope()`: may be entered several times, and inside itself."""

    def __init__(self, strategy: "Strategy"):
        self._strategy = strategy
        # What the adapter enters, innermost last.
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> "Strategy":
        context.require_cross_replica(self._strategy, "scope")
        context.enter_scope(self._strategy)
        try:
            engines = self._strategy.extended.group.scope()
            engines.__enter__()
        except BaseException:
            context.leave_scope()
            raise
        self._entered.append(engines)
        return self._strategy

    def __exit__(self, *exception: Any) -> None:
        if (
            ownership.pending_values
            and context.scope_depth() == 1
            and exception[0] is None
        ):
            ownership.broadcast_pending_values()
        try:
            self._entered.pop().__exit__(*exception)
        finally:
            context.leave_scope()


class DataMethods:
    """The methods that distribute data, for `Strategy` to inherit."""

    def experimental_distribute_values_from_function(
        self: "Strategy", value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a distributed value out of one value for each replica.

        Args:
            value_fn: Called once for each local replica with a `ValueContext`.

        Returns:
            The structure that `value_fn` returned, with a `PerReplica` value in
            the place of each leaf. With one replica, what `value_fn` returned.

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
        context.require_cross_replica(
            self, "experimental_distribute_values_from_function"
        )
        replicas = self.num_replicas_in_sync
        local = self.extended.topology.local_replicas
        values = [value_fn(ValueContext(i, replicas)) for i in local]
        if replicas == 1:
            return values[0]
        return tree.map_structure(lambda *leaves: PerReplica(leaves), *values)

    def experimental_distribute_dataset(
        self: "Strategy", dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset of global batches.

        Every batch is split by rows, in order: with N replicas each gets
        ceil(rows / N) rows, the last ones fewer or none.

        Args:
            dataset: A `tf.data.Dataset`, a torch `DataLoader`, a
                `keras.utils.PyDataset`, a list, or any other iterable or iterator of
                batches. A batch is an array, or a structure of arrays of the same
                number of rows.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset`, which gives the structure of the batch with a
            `PerReplica` in the place of each array; with one replica, a tensor.

        Raises:
            TypeError: If `dataset` is no dataset, or `options` no options.
            ValueError: If the dataset was distributed before; and, when it is read, if
                its elements are not batches.
            RuntimeError: Inside a function that `run` calls, or inside another
                strategy's scope.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        batches = [(np.ones((4, 3), "float32"), np.ones((4,), "float32"))]
        for x, y in strategy.experimental_distribute_dataset(batches):
            total = strategy.reduce("SUM", y, axis=0)
        assert float(total) == 4.0
        ```
        """
        return splitting.distribute(self, dataset, options)

    def distribute_datasets_from_function(
        self: "Strategy",
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset whose batches are those of one replica each.

        Each worker calls it for a dataset of its own, which its replicas read. They
        take the batches in turn. Those that find none left at the end
        get one of 0 rows; where a `tf.data.Dataset` promises batches of one fixed
        shape, such a last round is dropped, as in tf.distribute.

        Args:
            dataset_fn: Called with an `InputContext`, returns a dataset of any kind
                that `experimental_distribute_dataset` takes. With the option
                `InputReplicationMode.PER_REPLICA` it is called for each replica, as
                one of several pipelines.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: If `dataset_fn` is not a function that returns a dataset, or
                `options` no options.
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

    def experimental_distribute_datasets_from_function(
        self: "Strategy",
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The old name of `distribute_datasets_from_function`."""
        return splitting.distribute_from_function(self, dataset_fn, options)


_SESSIONS = (
    "It sets up a session of TensorFlow 1. The Keras backend is set up by itself; "
    "leave it out."
)


class OldNames:
    """The old names, for `Strategy` to inherit."""

    extended: "StrategyExtended"
    run: Callable[..., Any]
    experimental_local_results: Callable[[Any], Any]

    configure = UnsupportedName(_SESSIONS)
    update_config_proto = UnsupportedName(_SESSIONS)
    make_dataset_iterator = UnsupportedName(
        "It makes an iterator of TensorFlow 1. Use "
        "`iter(strategy.experimental_distribute_dataset(dataset))`."
    )
    make_input_fn_iterator = UnsupportedName(
        "It makes an iterator of TensorFlow 1. Use "
        "`iter(strategy.distribute_datasets_from_function(dataset_fn))`."
    )
    group = UnsupportedName(
        "It joins operations of a graph of TensorFlow 1 into one. Operations run in "
        "the order of the program; return the values that you need."
    )

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The old name of `experimental_local_results`."""
        _warn("Strategy.unwrap", "strategy.experimental_local_results")
        return self.experimental_local_results(value)

    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """The old place of `extended.colocate_vars_with`."""
        _warn("Strategy.colocate_vars_with", "strategy.extended.colocate_vars_with")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None):
        """The old form of `run`, which takes the next element of an iterator."""
        _warn("Strategy.experimental_run", "strategy.run(fn, args=(next(iterator),))")
        args = () if input_iterator is None else (next(input_iterator),)
        return self.run(fn, args)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"tf.distribute deprecates `{old}`. Use `{new}`.",
        DeprecationWarning,
        stacklevel=3,
    )


class Strategy(DataMethods, Reports, OldNames):
    """A way to run one computation on several devices at once.

    Make one of its subclasses, such as `MirroredStrategy`. What is created in
    its `scope()` is distributed: variables have a component on each device, and
    a model that was made there trains on all of them.

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
    _logical: LogicalDevices | None = None
    _parameter_device: str | None = None

    def __init__(self, extended: "StrategyExtended"):
        self._extended = extended
        # The code of functions that have been run; what has none is not looked at.
        self._called: dict[int, Any] = {id(None): None}

    @property
    def extended(self) -> "StrategyExtended":
        """The part of the interface that library authors need."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are summed, over all workers."""
        return self._extended.num_replicas

    @property
    def batch_statistics(self) -> str | None:
        """`"global"` if `BatchNormalization` uses the statistics of the global batch.

        None if it uses what the backend computes without communication: a replica's
        rows, or in `fit` on JAX the global batch.
        """
        return self._batch_statistics

    @property
    def shard(self) -> str | None:
        """What is split over the replicas: `"optimizer"`, `"parameters"` or None."""
        return self._shard

    @property
    def logical_devices(self) -> LogicalDevices | None:
        """The devices of each replica of a `TPUStrategy`; None for other ones."""
        return self._logical

    @property
    def parameter_device(self) -> str | None:
        """The device that keeps all variables; None where each replica's does."""
        return self._parameter_device

    @property
    def cluster_resolver(self) -> Any:
        """What knows the cluster's other workers; None for one worker.

        Subclasses may override it.
        """
        return None

    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Returns a context manager that puts this strategy in charge.

        Inside it variables are mirrored and `keras_strategy.get_strategy()` is
        this strategy. `fit`, `evaluate` and `predict` of a model that was made
        inside enter the scope by themselves.

        Returns:
            A context manager that gives the strategy and may be entered again.

        Raises:
            RuntimeError: On entering, inside another strategy's scope or inside
                a function that `run` calls.

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
        """Calls `fn` once on every replica, each with its part of the arguments.

        What the replicas assign to variables is written when all of them have
        succeeded: an exception in one comes out of `run` as itself, and the
        variables are as they were.

        Args:
            fn: The function. `keras_strategy.get_replica_context()` tells it
                which replica it runs on.
            args: A tuple or list of positional arguments. `PerReplica` values
                in it give every replica its own component, everything else goes
                to every replica as it is. A variable stays a variable, which reads
                as the replica's component.
            kwargs: A dict of keyword arguments, or None; likewise.
            options: `RunOptions`, or None for the default ones.

        Returns:
            The structure that `fn` returned, with a `PerReplica` value in the
            place of each tensor; Python constants and None stay what they are.
            With one replica, what `fn` returned.

        Raises:
            ValueError: If `args` is neither a tuple nor a list, or holds a value of
                another strategy, with another number of components.
            TypeError: If `fn` cannot be called, or `options` are none.
            MirrorError: In the mode of `config.check_mirrored`, if the components of
                a mirrored variable differ afterwards.
            RuntimeError: Inside a function that `run` calls, inside `merge_call`, or
                inside another strategy's scope.

        Example:

        ```python
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        doubled = strategy.run(lambda i: i * 2, args=(ids,))
        assert [int(i) for i in strategy.experimental_local_results(doubled)] == [
            2 * i for i in range(strategy.num_replicas_in_sync)
        ]
        ```
        """
        check_call(fn, args)
        options = check_run_options(options)
        context.require_cross_replica(self, "run")
        if ownership.pending_values:
            with self.scope():
                ownership.broadcast_pending_values()
        known = id(getattr(fn, "__code__", None)) in self._called
        run = self._extended.group.run if known else self._run_first
        result = run(fn, tuple(args), dict(kwargs or {}), options, self.scope)
        if consistency.enabled:
            with self.scope():
                consistency.check(self, "strategy.run")
        return result

    def _run_first(self, fn: Callable[..., Any], *args: Any) -> Any:
        if len(self._called) > 256:  # functions that are made anew each time
            self._called = {id(None): None}
        self._called[id(fn.__code__)] = fn.__code__
        step = functools.partial(self._extended.group.run, fn)
        what = f"call of `{fn.__name__}` by strategy.run"
        return slow_operations.run_first_step(step, what, self._extended.cluster, *args)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Combines the replicas' values into one.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: A structure of `PerReplica` values, as `run` returns them, and of
                variables: one with `synchronization="on_read"` is what each replica
                holds, any other the same for all of them.
            axis: None to combine the replicas' tensors elementwise; an int or a
                tuple of ints to combine these dimensions as well. The mean over
                `axis=0` of 4 rows on one replica and 2 on the other divides by
                6.

        Returns:
            The structure, with one tensor in the place of each value.

        Raises:
            ValueError: If `reduce_op` is not one, if a value is the same for all
                replicas and was asked for its SUM over them, or if it is of another
                strategy, with another number of components.
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
            if isinstance(value, DistributedValues):  # mostly: no structure of them
                return self._reduce_one(op, value, axis)
            return tree.map_structure(lambda x: self._reduce_one(op, x, axis), value)

    def _reduce_one(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        if isinstance(value, keras.Variable):
            value = ownership.cross_replica_value(self, "reduce", value)
        if isinstance(value, DistributedValues):
            ownership.check_component_count(self._extended.topology, "reduce", value)
            reducing = self._extended.custom_reducer or self._extended.group
            return reducing.reduce(op, value, axis)
        if axis is not None and op is ReduceOp.MEAN:
            return keras.ops.mean(value, axis=axis)
        if axis is not None:  # every replica has it
            return keras.ops.sum(value, axis=axis) * self.num_replicas_in_sync
        if op is ReduceOp.MEAN or self.num_replicas_in_sync == 1:
            return value
        raise sum_of_copies_error(value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values.

        Args:
            value: A structure of `PerReplica` values, as `run` returns them, and of
                variables, of rank 1 or more. Sizes along `axis` may differ, the others
                must agree.
            axis: The dimension along which the values are joined, in the order of
                the replicas.

        Returns:
            The structure, with one tensor in the place of each distributed value.
            A value that is not distributed stays what it is.

        Raises:
            ValueError: If the values cannot be joined along `axis`, or are of another
                strategy, with another number of components.
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
            if not isinstance(x, DistributedValues):
                return x
            ownership.check_component_count(self._extended.topology, "gather", x)
            _check_gatherable(x, axis)
            return self._extended.group.gather(x.values, axis)

        with self.scope():
            return tree.map_structure(gather_one, value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value that are on this worker.

        Args:
            value: A structure of distributed values and variables.

        Returns:
            A tuple with one element for each local replica. For a value that is
            not distributed, a tuple of that value alone.

        Raises:
            ValueError: If a value is of another strategy, with another number of
                components.

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

        def distributed(x):
            if isinstance(x, keras.Variable):
                return ownership.per_replica_values(self, method, x) or x
            components = get_engine().native_components(x)
            return x if components is None else PerReplica(components)

        value = tree.map_structure(distributed, value)
        leaves = [x for x in tree.flatten(value) if isinstance(x, DistributedValues)]
        if not leaves:
            return (value,)
        for leaf in leaves:
            ownership.check_component_count(self._extended.topology, method, leaf)
        replicas = len(leaves[0].values)
        return tuple(
            select_replica(value, replica, replicas, method)
            for replica in range(replicas)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(devices={list(self._extended.worker_devices)})"

    def __deepcopy__(self, memo: dict) -> "Strategy":
        # A strategy stands for devices, of which a copy would be the same ones.
        return self


def _check_gatherable(value: DistributedValues, axis: int) -> None:
    """Raises ValueError unless the components can be joined along `axis`."""
    others = [type(x).__name__ for x in value.values if not hasattr(x, "shape")]
    if others:
        raise ValueError(
            f"`gather` joins tensors and arrays. Received: values of the types {others}"
        )
    shapes = [tuple(keras.ops.shape(component)) for component in value.values]
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    if len(ranks) == 1 and -rank <= axis < rank:
        others = {shape[: axis % rank] + shape[axis % rank + 1 :] for shape in shapes}
        if len(others) == 1:
            check_same_dtype(value.values)
            return
    raise ValueError(
        "`gather` joins values of rank 1 or more whose dimensions other than `axis` "
        f"agree. Received: axis={axis!r}, and values of the shapes {shapes} in the "
        "order of the replicas."
    )
