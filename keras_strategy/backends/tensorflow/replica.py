"""One replica while a function runs on it, in a thread of native tf.distribute."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow.collectives import (
    TensorFlowWorkers,
    Verify,
    sum_over_workers,
)
from keras_strategy.backends.tensorflow.cross_device_ops import (
    check_same_layout,
    concat_values,
    divide,
    sum_values,
)
from keras_strategy.backends.tensorflow.random import SeedGenerators
from keras_strategy.backends.tensorflow.sharding import (
    attach_shard,
    gather_shards,
    local_shard,
    reduce_scatter_shares,
)
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import ReplicaAttributes
from keras_strategy.core.step_state import StepState
from keras_strategy.devices import ReplicaTopology
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.training import row_weights
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.training.sharding import FlatShards, flat_shards_of
from keras_strategy.values import ReduceOp, regroup, select_replica

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


@dataclasses.dataclass
class GroupState:
    """State that all replicas of a strategy share.

    Attributes:
        seeds: The seed generators for functions without a seed.
        builds: How often a replica has created or built something.
    """

    strategy: "Strategy"
    native: tf.distribute.Strategy
    topology: ReplicaTopology
    workers: TensorFlowWorkers | None
    seeds: SeedGenerators = dataclasses.field(init=False)
    builds: int = 0

    def __post_init__(self):
        self.seeds = SeedGenerators(self.call_outside, self.workers)

    def call_outside(self, fn: Callable[[], Any], in_scope: bool = True) -> Any:
        """Call `fn` eagerly in cross-replica context while the replicas wait.

        A variable that one replica's thread creates would have to be created by all
        threads together. Here it exists on all devices when the first replica
        continues, and the other replicas find it.
        """
        policy = keras.config.dtype_policy()

        def call():
            keras.config.set_dtype_policy(policy)
            no_scope = context.cross_replica_scope(None)
            with self.strategy.scope() if in_scope else no_scope:
                return fn()

        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(call).result()


@dataclasses.dataclass
class RunState:
    """State that the replicas of one run share. They take turns, replica 0 first.

    Attributes:
        merge_values: For each replica, its argument of a merge; then the result.
        generator: Keras's global seed generator in the thread that called `run`.
        attributes: For each replica, the attributes that it sets on layers.
        has_drawn: Whether a replica has drawn from the global seed generator.
    """

    merge_values: list[Any]
    generator: Any
    attributes: list[ReplicaAttributes]
    has_drawn: bool = False


def regroup_outputs(outputs: Sequence[Any]) -> Any:
    """Combine the outputs of the local replicas."""
    return regroup(outputs, tf.is_tensor, always_distributed=True)


def _to_component(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


def _weighted(tensor: Any, weight: Any) -> Any:
    """Weight a tensor as `row_weights.weighted` does; for floats in one operation."""
    if weight is None or not tensor.dtype.is_floating:
        return row_weights.apply_row_weight(tensor, weight)
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


class TensorFlowReplica:
    """One replica, see `keras_strategy.core.protocols.Replica`."""

    def __init__(self, group_state: GroupState, run_state: RunState):
        self.group_state = group_state
        self._run_state = run_state
        self._has_drawn = False
        self._write_condition: Any = None
        self.step = StepState()
        self._native = tf.distribute.get_replica_context()
        # TensorFlow gives a constant tensor while it traces.
        self.id = int(tf.get_static_value(self._native.replica_id_in_sync_group))
        self.index = self.id - group_state.topology.first_local_replica
        self.devices = (group_state.topology.devices[self.index],)
        self.attributes = run_state.attributes[self.index]
        self._swap_attributes_in_merge_calls()

    def _swap_attributes_in_merge_calls(self) -> None:
        """Wrap the native `merge_call`, in which the replica's turn ends."""
        attributes, native_merge_call = self.attributes, self._native.merge_call

        def merge_call(*args, **kwargs):
            attributes.swap_out()
            result = native_merge_call(*args, **kwargs)
            attributes.swap_in()
            return result

        self._native.merge_call = merge_call

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            total = self._sum([value], "all_reduce")[0]
        else:
            total = self._differentiable_sum(cast_for_sum(value))
        if reduce_op is ReduceOp.SUM:
            return total
        return divide(total, self.group_state.topology.num_replicas)

    def all_gather(self, value: Any, axis: int) -> Any:
        ragged: Any = tf.RaggedTensor  # TensorFlow's annotations lack its methods
        if isinstance(value, ragged) and axis == 0:
            return ragged.from_nested_row_lengths(
                self.all_gather(value.flat_values, 0),
                [self.all_gather(n, 0) for n in value.nested_row_lengths()],
            )
        sum_gradients = self._gradient_of_sum("gradient of all_gather")
        workers = self.group_state.workers
        replicas = self.group_state.topology.num_replicas

        @tf.custom_gradient
        def gather(x):
            def merge(*parts):
                result = concat_values(parts, axis)
                sizes = tf.stack([tf.shape(part)[axis] for part in parts])
                if workers is not None:
                    result, _ = workers.gather("all_gather", result, axis)
                    sizes, _ = workers.gather("all_gather", sizes, 0)
                return result, sizes

            result, sizes = self._merge(merge, x)

            def gradient(upstream):
                total = sum_gradients(upstream)
                return tf.split(total, sizes, axis, replicas)[self.id]

            return result, gradient

        return gather(tf.convert_to_tensor(value))

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        strategy = self.group_state.strategy

        def merge(*parts):
            args, kwargs = regroup_outputs(parts)
            with context.cross_replica_scope(strategy):
                return merge_fn(strategy, *args, **kwargs)

        # In the replica a variable reads as its component, in `merge_fn` as all.
        merged = self._merge(merge, tree.map_structure(_to_component, (args, kwargs)))
        replicas = len(self.group_state.topology.devices)
        return select_replica(merged, self.index, replicas, "merge_call")

    def once(self, fn: Callable[[], Any]) -> Any:
        self.group_state.builds += 1
        return self.group_state.call_outside(fn)

    def seed_generator(self) -> Any:
        """Return the replica's stand-in for Keras's global seed generator."""
        seeds = self.group_state.seeds
        if not self._run_state.has_drawn:
            self._run_state.has_drawn = True
            seeds.start(self._run_state.generator)
        if not self._has_drawn:
            self._has_drawn = True
            self.write(seeds.replicas.state, stored_value(seeds.process.state))
        return seeds.replicas

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        def apply_weight(tensor):
            if isinstance(tensor, tf.IndexedSlices):
                values = _weighted(tensor.values, weight)
                return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
            return _weighted(tf.convert_to_tensor(tensor), weight)

        terms, name = [apply_weight(tensor) for tensor in tensors], "optimizer.apply"
        workers, shares = self.group_state.workers, None
        if len(self.group_state.topology.devices) == 1:
            shares = reduce_scatter_shares(self.step, terms, workers)
        if workers is None or shares is None:
            return self._sum(terms, name, Verify.INLINE)
        shards = self._merge(
            lambda terms: workers.reduce_scatter(name, terms, shares), terms
        )
        return [
            attach_shard(term, shard, one, self.id)
            for term, shard, one in zip(terms, shards, shares, strict=True)
        ]

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        return draw()

    def write(self, variable: Any, value: Any) -> None:
        shares = flat_shards_of(variable)
        self.write_component(
            variable, value if shares is None else local_shard(value, shares, self.id)
        )

    def write_component(self, variable: Any, value: Any) -> None:
        """Write what this replica stores of a variable: its component or shard."""
        component = self.component(stored_value(variable))
        value = tf.cast(value, component.dtype)
        if self._write_condition is not None:
            value = tf.where(self._write_condition, value, component)
        component.assign(value)

    @property
    def writes_unconditionally(self) -> bool:
        """True outside `write_where`."""
        return self._write_condition is None

    @contextlib.contextmanager
    def write_where(self, condition: Any) -> Iterator[None]:
        """Context manager in which writes keep the old value unless `condition` holds.

        Takes the place of `tf.cond`, in which replicas cannot run collectives.
        """
        self._write_condition = condition
        try:
            yield
        finally:
            self._write_condition = None

    def gather_shards(
        self, shards: Sequence[Any], shares: Sequence[FlatShards]
    ) -> list[Any]:
        """Return full tensors from the replicas' shards."""
        workers = self.group_state.workers

        def merge(*replicas):
            return gather_shards(replicas, shares, workers, "optimizer.apply")

        return list(self._merge(merge, list(shards)))

    def full_value(self, variable: Any, shares: FlatShards) -> Any:
        """Return the value of a sharded variable; all replicas must call it."""
        shard = tf.convert_to_tensor(self.component(stored_value(variable)))
        return self.gather_shards([shard], [shares])[0]

    def component(self, variable: Any) -> Any:
        """Return this replica's component of a native variable."""
        components = self.group_state.native.experimental_local_results(variable)
        if len(components) != len(self.group_state.topology.devices):
            raise ValueError(
                f"The variable '{variable.name}' was created outside the scope of "
                f"{self.group_state.strategy!r} and is assigned in `strategy.run`. "
                "Create it inside `with strategy.scope():`."
            )
        return components[self.index]

    def _differentiable_sum(self, tensor: Any) -> Any:
        sum_gradients = self._gradient_of_sum("gradient of all_reduce")

        @tf.custom_gradient
        def total(x):
            return self._sum([x], "all_reduce")[0], sum_gradients

        return total(tensor)

    def _gradient_of_sum(self, name: str) -> Callable[[Any], Any]:
        """Return the gradient of a sum: the sum of the replicas' gradients.

        In a training step the optimizer weights this replica's gradients later. So
        they are weighted and summed here, then divided by this replica's weight.
        """
        weight = self.step.row_weight

        def sum_gradients(upstream):
            if weight is None:
                return self._differentiable_sum(upstream)
            total = self._sum([_weighted(upstream, weight)], name)[0]
            return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

        return sum_gradients

    def _sum(
        self, tensors: Sequence[Any], name: str, verify: Verify = Verify.BEFORE
    ) -> list[Any]:
        """Sum over the replicas; over local ones as native tf.distribute does."""
        workers = self.group_state.workers

        def merge_over_workers(*parts):
            assert workers is not None
            totals = []
            for values in zip(*parts, strict=True):
                check_same_layout(values)
                totals.append(sum_values(values))
            return sum_over_workers(workers, name, totals, verify)

        def merge_natively(native, *values):
            for value in values:
                check_same_layout(native.experimental_local_results(value))
            totals: list[Any] = list(values)
            # Native tf.distribute must get each int32, which is on the host, alone.
            alone = [i for i, tensor in enumerate(terms) if tensor.dtype == tf.int32]
            together = [i for i in range(len(terms)) if i not in alone]
            for batch in (together, *([i] for i in alone)):
                pairs = [(values[i], values[i]) for i in batch]
                reduced = native.extended.batch_reduce_to("SUM", pairs) if pairs else ()
                for i, total in zip(batch, reduced, strict=True):
                    totals[i] = total
            return totals

        if not tensors:
            return []
        # A tensor that all replicas got from outside would count once, so copy it.
        terms = [
            t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in tensors
        ]
        if workers is not None:
            return list(self._merge(merge_over_workers, terms))
        return list(self._native.merge_call(merge_natively, args=tuple(terms)))

    def _merge(self, merge: Callable[..., Any], value: Any) -> Any:
        """Call `merge` once with every replica's value; return its result to all."""
        state = self._run_state
        state.merge_values[self.index] = value

        def merge_all(native):
            # Native tf.distribute calls the first replica's function only.
            results = [merge(*state.merge_values)] * len(state.merge_values)
            state.merge_values = results

        self._native.merge_call(merge_all)
        return state.merge_values[self.index]
