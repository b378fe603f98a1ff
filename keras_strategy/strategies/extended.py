"""StrategyExtended: the part of a strategy's interface for library authors."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.core import context
from keras_strategy.core.protocols import ReplicaGroup
from keras_strategy.core.registry import get_engine
from keras_strategy.core.variable_components import VariableComponent
from keras_strategy.devices import ReplicaTopology, resolve_devices
from keras_strategy.keras_patches.installation import install_for
from keras_strategy.options import check_call, check_communication_options
from keras_strategy.training import ownership
from keras_strategy.training.cross_device_ops import CustomReducer, check_pairs
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    ReduceOp,
    select_replica,
    sum_of_copies_error,
)

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster
    from keras_strategy.core.protocols import Strategy
    from keras_strategy.training.cross_device_ops import CrossDeviceOps


logger = logging.getLogger("keras_strategy")


class StrategyExtended:
    """The part of a strategy's interface for library authors.

    Get it as `strategy.extended`.

    Args:
        container_strategy: The strategy that this belongs to.
        devices: Canonical names of the local devices, one replica each.
        cross_device_ops: How values are combined, or None.
        cluster: The workers, each with as many devices; None for a single process.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.OneDeviceStrategy("cpu:0")
    assert strategy.extended.worker_devices == ("cpu:0",)
    ```
    """

    # Calls of `run` after one that assigned variables without an aggregation.
    checked_runs = 0
    has_warned_drift = False

    def __init__(
        self,
        container_strategy: "Strategy",
        devices: Iterable[str],
        cross_device_ops: "CrossDeviceOps | None" = None,
        cluster: "Cluster | None" = None,
    ):
        self._strategy = container_strategy
        self.cluster = cluster
        is_virtual = container_strategy.virtual_replicas is not None
        self.topology = ReplicaTopology(tuple(devices), cluster, is_virtual)
        local = self.topology.devices
        logical = container_strategy.logical_devices
        is_single = self.num_replicas == 1 and logical is None
        install_for(1 if is_single else max(2, self.num_replicas))
        # By id, since variables have no `==`.
        self.variables: weakref.WeakValueDictionary[int, keras.Variable] = (
            weakref.WeakValueDictionary()
        )
        # Those that functions of `run` assigned without an aggregation.
        self.assigned_in_run: weakref.WeakValueDictionary[int, keras.Variable] = (
            weakref.WeakValueDictionary()
        )
        # Variables by the `id` of their components, while these exist.
        self._containers: dict[int, weakref.ref[keras.Variable]] = {}
        self.custom_reducer: CustomReducer | None = None
        self.group: ReplicaGroup
        if is_single:
            self.group = SingleReplicaGroup(container_strategy, local)
            if cross_device_ops is not None:
                cross_device_ops.log_no_effect("one device")
        else:
            if cross_device_ops is not None and cross_device_ops.has_custom_reduce:
                self.custom_reducer = CustomReducer(cross_device_ops)
                cross_device_ops = None
            self.group = get_engine().create_group(
                container_strategy, local, cross_device_ops, cluster
            )
        if cluster is not None:
            cluster.strategies.add(container_strategy)
        if cluster is None or cluster.is_chief:
            logger.info(
                "%s: %d replica(s), on %s%s with the Keras backend '%s'",
                type(container_strategy).__name__,
                self.num_replicas,
                ", ".join(local),
                "" if cluster is None else f" of each of {cluster.size} workers",
                keras.backend.backend(),
            )

    @property
    def num_replicas(self) -> int:
        """The number of replicas on all workers."""
        return self.topology.num_replicas

    @property
    def local_replicas(self) -> range:
        """Indices of this worker's replicas among all replicas."""
        return self.topology.local_replicas

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this worker's replicas, such as `"gpu:0"`."""
        return self.topology.devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of the variables' components."""
        central = self._strategy.parameter_device
        return self.worker_devices if central is None else (central,)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Always False: a backend that compiles for shapes compiles once for each."""
        return False

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Return True if a variable belongs to this strategy.

        Args:
            v: A variable.

        Raises:
            TypeError: If `v` is not a `keras.Variable`.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        outside = keras.Variable(1.0)
        with strategy.scope():
            inside = keras.Variable(1.0)
        assert strategy.extended.variable_created_in_scope(inside)
        assert not strategy.extended.variable_created_in_scope(outside)
        ```
        """
        is_ours = self.group.owns_native(v)
        if is_ours is not None:
            return is_ours
        check_variable("v", v)
        owner = ownership.strategy_of_variable(v) or context.default_strategy()
        return owner is self._strategy

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Combine the replicas' values elementwise, on given devices.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: A `PerReplica` value, or a variable with `synchronization="on_read"`.
                With `"mean"`, or one replica, also a value that all replicas have.
            destinations: A variable or a distributed value, whose devices get the
                result, or a device's name.
            options: A `CommunicationOptions`, or None.

        Returns:
            A `Mirrored` value, as `update` takes it; a tensor for a single device.

        Raises:
            ValueError: If `reduce_op` is invalid, the device does not exist, or the
                value cannot be reduced, as of another number of replicas.
            TypeError: If `destinations` has another type.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(0.0)
        ones = strategy.run(lambda: keras.ops.ones(()))
        total = strategy.extended.reduce_to("sum", ones, destinations=v)
        strategy.extended.update(v, lambda c, x: c.assign(x), args=(total,))
        assert int(v) == strategy.num_replicas_in_sync
        ```
        """
        op = ReduceOp.parse(reduce_op)
        check_communication_options(options)
        strategy = self._strategy
        context.require_cross_replica(strategy, "reduce_to")
        place = self._destination_fn(destinations)
        with strategy.scope():
            if isinstance(value, keras.Variable):
                value = ownership.cross_replica_value(strategy, "reduce_to", value)
            value = ownership.distribute_native(value, is_mirrored=False)
            for item in (value, destinations):
                if isinstance(item, DistributedValues):
                    ownership.check_component_count(self.topology, "reduce_to", item)
            if _may_differ(value):
                value = (self.custom_reducer or self.group).reduce(op, value, None)
            elif op is ReduceOp.SUM and strategy.num_replicas_in_sync > 1:
                raise sum_of_copies_error(value)
            elif isinstance(value, Mirrored):
                value = value.values[0]
            return place(value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Combine several values, each as `reduce_to` does.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value_destination_pairs: Pairs of a value and its destinations.
            options: A `CommunicationOptions`, or None.

        Returns:
            A list with the result for each pair.

        Raises:
            ValueError: If these are not pairs; or as `reduce_to` does.
            TypeError: As `reduce_to` does.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ones = strategy.run(lambda: keras.ops.ones(()))
        pairs = [(ones, ones), (ones, strategy.extended.worker_devices[0])]
        mirrored, tensor = strategy.extended.batch_reduce_to("mean", pairs)
        assert float(tensor) == 1.0
        ```
        """
        context.require_cross_replica(self._strategy, "batch_reduce_to")
        return [
            self.reduce_to(reduce_op, value, destinations, options)
            for value, destinations in check_pairs(value_destination_pairs)
        ]

    def _destination_fn(self, destinations: Any) -> Callable[[Any], Any]:
        """Return the function that copies a reduced value to `destinations`."""
        engine = get_engine()
        destinations = ownership.distribute_native(destinations)
        if isinstance(destinations, str):
            (device,) = resolve_local_devices([destinations])
            return lambda value: engine.copy_to(value, device)
        is_variable = isinstance(destinations, keras.Variable)
        is_distributed = isinstance(destinations, DistributedValues) or (
            is_variable and self.variable_created_in_scope(destinations)
        )
        if is_distributed and self.num_replicas > 1:
            return self.group.mirror
        if is_distributed or is_variable or engine.is_tensor(destinations):
            return keras.ops.convert_to_tensor
        raise TypeError(
            "Argument `destinations` must be a variable, a distributed value, a tensor "
            f"or a device's name. Received: destinations={destinations!r} of type "
            f"{type(destinations).__name__}"
        )

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Change a variable outside the replicas, one component at a time.

        Call it in cross-replica context, such as in the function that `merge_call`
        calls. Assigned values are written when `fn` has succeeded for all components.

        Args:
            var: A variable that was created in the scope, also a `tf.Variable`, which
                is updated as in tf.distribute.
            fn: Called as `fn(component, *args, **kwargs)` for the component on each
                device; inside `merge_call` on JAX once, for the program of all
                replicas. The component has `value`, `assign`, `assign_add`,
                `assign_sub`, `shape`, `dtype`, `name`, `path` and `device`.
            args: Positional arguments. Each component gets its component of a
                `Mirrored` value and of a variable, and everything else unchanged. Only
                if `var` has `synchronization="on_read"` may values differ between
                replicas: `PerReplica` values and variables like that.
            kwargs: A dict of keyword arguments, or None; likewise.
            group: True to join the outputs of `fn`.

        Returns:
            With `group=True` the structure that `fn` returned, with a `Mirrored`
            value in place of each tensor, or with one replica unchanged. With
            `group=False` a tuple with the output for each local replica.

        Raises:
            TypeError: If `var` is not a variable, or `fn` is not callable.
            ValueError: If `var` was created outside the scope, or an argument would
                make the components of a mirrored variable differ or belongs to a
                strategy with another number of replicas.
            RuntimeError: Inside another strategy's scope.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(1.0)
        strategy.extended.update(v, lambda c, x: c.assign_add(x), args=(2.0,))
        assert float(v) == 3.0
        ```
        """
        is_native = self.group.owns_native(var) is not None
        if not is_native:
            check_variable("var", var)
        check_call(fn, args)
        if isinstance(var, VariableComponent) or not self.variable_created_in_scope(
            var
        ):
            raise ValueError(
                "Argument `var` of `update` must be a variable that was created in the "
                f"scope of {self._strategy!r}: one created outside the scope has no "
                "components. Create it inside `with strategy.scope():`, or use its "
                f"`assign`. Received: var={var if is_native else var.path!r}"
            )
        args, kwargs = tuple(args), dict(kwargs or {})
        replica = context.current_replica()
        if replica is not None and replica.strategy is self._strategy:
            return replica.merge_call(
                lambda strategy, *args, **kwargs: strategy.extended.update(
                    var, fn, args, kwargs, group
                ),
                args,
                kwargs,
            )
        context.require_cross_replica(self._strategy, "update")
        with self._strategy.scope():
            if not is_native:
                args, kwargs = tree.map_structure(
                    lambda leaf: self._update_argument(var, leaf), (args, kwargs)
                )
            result = self.group.update(var, fn, tuple(args), kwargs)
            if group:
                return result
            replicas = len(self.worker_devices)
            return tuple(
                select_replica(result, replica, replicas, "update")
                for replica in range(replicas)
            )

    def _update_argument(self, var: keras.Variable, argument: Any) -> Any:
        """Return an argument's value, unless it is a variable of this strategy."""
        value, may_differ = argument, False
        if isinstance(argument, keras.Variable):
            is_local = ownership.strategy_of_variable(argument) is self._strategy
            may_differ = is_local and is_sync_on_read(argument)
            if isinstance(argument, VariableComponent):
                value = argument.value
            elif not is_local:
                value = ownership.cross_replica_value(
                    self._strategy, "update", argument
                )
        if (may_differ or _may_differ(value)) and not is_sync_on_read(var):
            raise ValueError(
                f"`update` of the mirrored variable '{var.path}' needs values that are "
                "equal on all replicas; one that may differ would make its components "
                "differ. Reduce it first: strategy.extended.reduce_to('sum', value, "
                f"destinations=var). Received: {argument!r}"
            )
        if isinstance(value, DistributedValues):
            ownership.check_component_count(self.topology, "update", value)
        return value

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> Iterator[None]:
        """Return a context manager that places new variables like another one.

        All variables of a strategy are on the same devices: it only checks the other.

        Args:
            colocate_with_variable: A variable that was created in the scope.

        Raises:
            TypeError: If it is not a variable.
            ValueError: If it was created outside the scope.
            RuntimeError: Outside the scope.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(1.0)
            with strategy.extended.colocate_vars_with(v):
                slot = keras.Variable(0.0)
        ```
        """
        if context.get_strategy() is not self._strategy:
            raise RuntimeError(
                "`colocate_vars_with` is for variables that are created inside `with "
                f"strategy.scope():`. The current strategy is "
                f"{context.get_strategy()!r}, not {self._strategy!r}."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "Argument `colocate_with_variable` must be a variable that was "
                f"created in the scope of {self._strategy!r}. Received: "
                f"colocate_with_variable={colocate_with_variable.path!r}"
            )
        yield

    def value_container(self, value: Any) -> Any:
        """Return the variable that a component belongs to.

        Args:
            value: A component, of `experimental_local_results(variable)` or `update`.

        Returns:
            The variable; `value` itself if it is not a component of an existing one.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(1.0)
        component = strategy.experimental_local_results(v)[0]
        assert strategy.extended.value_container(component) is v
        ```
        """
        if isinstance(value, VariableComponent):
            return value.container
        reference = self._containers.get(id(value))
        variable = None if reference is None else reference()
        return value if variable is None else variable

    def local_components(self, variable: keras.Variable) -> tuple[Any, ...]:
        """Return a variable's component on each local replica.

        Args:
            variable: The variable. Without a strategy it has one component, its value.

        Raises:
            ValueError: If it belongs to a strategy with another number of replicas.
        """
        parts = ownership.per_replica_values(
            self._strategy, "experimental_local_results", variable
        )
        components = (variable.value,) if parts is None else parts.values
        for component in components:
            key = id(component)
            if key not in self._containers:
                forget = weakref.finalize(component, self._containers.pop, key, None)
                forget.atexit = False
            self._containers[key] = weakref.ref(variable)
        return components


def resolve_local_devices(devices: Iterable[str] | None) -> tuple[str, ...]:
    """Return the canonical names of local devices; None means all accelerators."""
    accelerators = get_engine().list_devices()
    if devices is None:
        return tuple(accelerators)
    available = dict.fromkeys([*accelerators, *get_engine().list_devices("cpu")])
    return resolve_devices(devices, list(available))


def check_variable(argument: str, value: Any) -> None:
    """Raise `TypeError` unless an argument is a `keras.Variable`."""
    if not isinstance(value, keras.Variable):
        raise TypeError(
            f"Argument `{argument}` must be a `keras.Variable`. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )


def _may_differ(value: Any) -> bool:
    return isinstance(value, DistributedValues) and not isinstance(value, Mirrored)
