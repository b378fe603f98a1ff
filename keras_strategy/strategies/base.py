"""Strategy: what people call.

It checks the arguments, then asks the replica group of the adapter in use.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.hooks import mirror_check
from keras_strategy.options.run import RunOptions, check_call, check_run_options
from keras_strategy.rules import first_values, long_waits, ownership
from keras_strategy.rules.reduction import check_same_dtype
from keras_strategy.strategies.data import DataMethods
from keras_strategy.strategies.old_names import OldNames
from keras_strategy.strategies.reports import Reports
from keras_strategy.strategies.scope import StrategyScope
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
    ReduceOp,
    select_replica,
    sum_of_copies_error,
)
from keras_strategy.values.logical_devices import LogicalDevices

if TYPE_CHECKING:
    from keras_strategy.strategies.extended import StrategyExtended


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
        if first_values.pending_values:
            with self.scope():
                first_values.broadcast_pending_values()
        known = id(getattr(fn, "__code__", None)) in self._called
        run = self._extended.group.run if known else self._run_first
        result = run(fn, tuple(args), dict(kwargs or {}), options, self.scope)
        if mirror_check.enabled:
            with self.scope():
                mirror_check.check(self, "strategy.run")
        return result

    def _run_first(self, fn: Callable[..., Any], *args: Any) -> Any:
        if len(self._called) > 256:  # functions that are made anew each time
            self._called = {id(None): None}
        self._called[id(fn.__code__)] = fn.__code__
        step = functools.partial(self._extended.group.run, fn)
        what = f"call of `{fn.__name__}` by strategy.run"
        return long_waits.run_first_step(step, what, self._extended.cluster, *args)

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
