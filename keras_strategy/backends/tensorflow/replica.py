"""One replica while a function runs on it, in a thread of native tf.distribute."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow import combine, sharing
from keras_strategy.backends.tensorflow.across import sum_of_workers
from keras_strategy.backends.tensorflow.seeds import Seeds
from keras_strategy.backends.tensorflow.sharing import part_of
from keras_strategy.backends.tensorflow.workers import Compare, TensorFlowWorkers
from keras_strategy.core import context
from keras_strategy.core.own_attributes import OwnAttributes
from keras_strategy.core.step_state import StepState
from keras_strategy.hooks.variables import stored
from keras_strategy.rules import row_weights
from keras_strategy.rules.reduction import addable
from keras_strategy.rules.sharding import Shares, shares_of
from keras_strategy.values.distributed import ReduceOp, regroup, select_replica
from keras_strategy.values.topology import Topology

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


@dataclasses.dataclass
class Peers:
    """All replicas of a strategy, as one of them knows them.

    Attributes:
        strategy: The strategy.
        native: The native strategy underneath.
        topology: Where they are.
        workers: The processes that they belong to, or None for this one alone.
        seeds: What they draw from that have no seed of their own.
        made: How often a replica has made or built something.
    """

    strategy: "Strategy"
    native: tf.distribute.Strategy
    topology: Topology
    workers: TensorFlowWorkers | None
    seeds: Seeds = dataclasses.field(init=False)
    made: int = 0

    def __post_init__(self):
        self.seeds = Seeds(self.beside_them, self.workers)

    def beside_them(self, fn: Callable[[], Any], in_scope: bool = True) -> Any:
        """Calls `fn` eagerly in the strategy's scope while the replicas wait.

        A variable that one replica's thread made there and then would have to be
        made by all of them at once. Here it exists on all devices when the first
        replica goes on, and the others find it.

        Args:
            fn: A function without arguments.
            in_scope: Whether it is called there, or in no scope.

        Returns:
            What `fn` returns.
        """
        policy = keras.config.dtype_policy()

        def work():
            keras.config.set_dtype_policy(policy)
            none = context.strategy_in_charge(None)
            with self.strategy.scope() if in_scope else none:
                return fn()

        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(work).result()


def regrouped(outputs: Sequence[Any]) -> Any:
    """Joins what the local replicas returned."""
    return regroup(outputs, tf.is_tensor, one_of_many=True)


def _component(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


@dataclasses.dataclass
class Meeting:
    """What the replicas of one run share. They take turns, replica 0 first.

    Attributes:
        brought: For each replica, what it brings to a merge; then what came of it.
        generator: The seed generator that Keras has for the thread that called `run`.
        own: For each replica, what it sets on layers.
        drew: Whether a replica drew from the process's own seed generator.
    """

    brought: list[Any]
    generator: Any
    own: list[OwnAttributes]
    drew: bool = False


def weighted(tensor: Any, weight: Any) -> Any:
    """As `row_weights.weighted`, for floats in one operation: NaN times 0 is 0."""
    if weight is None or not tensor.dtype.is_floating:
        return row_weights.weighted(tensor, weight)
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


class TensorFlowReplica:
    """See `keras_strategy.core.protocol.Replica`.

    Args:
        peers: All replicas of the strategy.
        meeting: What those of this run share.
    """

    def __init__(self, peers: Peers, meeting: Meeting):
        self.peers = peers
        self._meeting = meeting
        self._drew = False
        self._only_where: Any = None
        self.step = StepState()
        self._native = tf.distribute.get_replica_context()
        # TensorFlow gives a constant tensor while it traces.
        self.id = int(tf.get_static_value(self._native.replica_id_in_sync_group))
        self.index = self.id - peers.topology.first
        self.devices = (peers.topology.devices[self.index],)
        self.attributes = meeting.own[self.index]
        self._keep_attributes_in_turns()

    def _keep_attributes_in_turns(self) -> None:
        """Native tf.distribute ends a turn in `merge_call`, whoever calls it."""
        own, merge_call = self.attributes, self._native.merge_call

        def merge_call_of_its_own(*args, **kwargs):
            own.set_aside()
            result = merge_call(*args, **kwargs)
            own.put_back()
            return result

        self._native.merge_call = merge_call_of_its_own

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            total = self._sum([value], "all_reduce")[0]
        else:
            total = self._differentiable_sum(addable(value))
        if reduce_op is ReduceOp.SUM:
            return total
        return combine.divide(total, self.peers.topology.num_replicas)

    def all_gather(self, value: Any, axis: int) -> Any:
        ragged: Any = tf.RaggedTensor  # TensorFlow's annotations lack its methods
        if isinstance(value, ragged) and axis == 0:
            return ragged.from_nested_row_lengths(
                self.all_gather(value.flat_values, 0),
                [self.all_gather(n, 0) for n in value.nested_row_lengths()],
            )
        back = self._backward("gradient of all_gather")
        workers, replicas = self.peers.workers, self.peers.topology.num_replicas

        @tf.custom_gradient
        def gather(x):
            def merge(*parts):
                joined = combine.gather(parts, axis)
                sizes = tf.stack([tf.shape(part)[axis] for part in parts])
                if workers is not None:
                    joined, _ = workers.gather("all_gather", joined, axis)
                    sizes, _ = workers.gather("all_gather", sizes, 0)
                return joined, sizes

            joined, sizes = self._merge(merge, x)

            def gradient(upstream):
                return tf.split(back(upstream), sizes, axis, replicas)[self.id]

            return joined, gradient

        return gather(tf.convert_to_tensor(value))

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        strategy = self.peers.strategy

        def merge(*parts):
            args, kwargs = regrouped(parts)
            with context.strategy_in_charge(strategy):
                return merge_fn(strategy, *args, **kwargs)

        # What a variable holds is the replica's here, and all replicas' out there.
        merged = self._merge(merge, tree.map_structure(_component, (args, kwargs)))
        replicas = len(self.peers.topology.devices)
        return select_replica(merged, self.index, replicas, "merge_call")

    def once(self, fn: Callable[[], Any]) -> Any:
        self.peers.made += 1
        return self.peers.beside_them(fn)

    def seed_generator(self) -> Any:
        """What stands for the process's own seed generator in this replica."""
        seeds = self.peers.seeds
        if not self._meeting.drew:
            self._meeting.drew = True
            seeds.take(self._meeting.generator)
        if not self._drew:
            self._drew = True
            self.write(seeds.replicas.state, stored(seeds.process.state))
        return seeds.replicas

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        def share(tensor):
            if isinstance(tensor, tf.IndexedSlices):
                values = weighted(tensor.values, weight)
                return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
            return weighted(tf.convert_to_tensor(tensor), weight)

        own, name = [share(tensor) for tensor in tensors], "optimizer.apply"
        workers, shares = self.peers.workers, None
        if len(self.peers.topology.devices) == 1:
            shares = sharing.shares_to_add_up(self.step, own, workers)
        if workers is None or shares is None:
            return self._sum(own, name, Compare.ALONG)
        parts = self._merge(lambda own: workers.sum_shares(name, own, shares), own)
        return [
            sharing.with_own_part(tensor, part, one, self.id)
            for tensor, part, one in zip(own, parts, shares, strict=True)
        ]

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        return draw()

    def write(self, variable: Any, value: Any) -> None:
        shares = shares_of(variable)
        self.write_held(
            variable, value if shares is None else part_of(value, shares, self.id)
        )

    def write_held(self, variable: Any, value: Any) -> None:
        """Sets what this replica holds of a variable."""
        component = self.own(stored(variable))
        value = tf.cast(value, component.dtype)
        if self._only_where is not None:
            value = tf.where(self._only_where, value, component)
        component.assign(value)

    @property
    def writes_always(self) -> bool:
        """Whether what it writes is written under no condition."""
        return self._only_where is None

    @contextlib.contextmanager
    def writing_where(self, condition: Any) -> Iterator[None]:
        """Surrounds what is written where a condition holds, and else is as it was.

        In place of a `tf.cond`, in which replicas could not meet.
        """
        self._only_where = condition
        try:
            yield
        finally:
            self._only_where = None

    def together(self, parts: Sequence[Any], shares: Sequence[Shares]) -> list[Any]:
        """Whole tensors, of what the replicas keep of them.

        Args:
            parts: What this replica keeps of each.
            shares: Of each, which elements each replica keeps.
        """
        workers = self.peers.workers

        def merge(*of_replicas):
            return sharing.together(of_replicas, shares, workers, "optimizer.apply")

        return list(self._merge(merge, list(parts)))

    def whole_of(self, variable: Any, shares: Shares) -> Any:
        """The value of a variable that the replicas share; all of them ask for it."""
        own = tf.convert_to_tensor(self.own(stored(variable)))
        return self.together([own], [shares])[0]

    def own(self, variable: Any) -> Any:
        """This replica's component of a native variable.

        Raises:
            ValueError: If it is not mirrored.
        """
        components = self.peers.native.experimental_local_results(variable)
        if len(components) != len(self.peers.topology.devices):
            raise ValueError(
                f"The variable '{variable.name}' was made outside the scope of "
                f"{self.peers.strategy!r} and is assigned in `strategy.run`. Make it "
                "inside `with strategy.scope():`."
            )
        return components[self.index]

    def _differentiable_sum(self, tensor: Any) -> Any:
        back = self._backward("gradient of all_reduce")

        @tf.custom_gradient
        def total(x):
            return self._sum([x], "all_reduce")[0], back

        return total(tensor)

    def _backward(self, name: str) -> Callable[[Any], Any]:
        """The gradient of a sum over the replicas is the sum of their gradients.

        In a training step the optimizer will weight this replica's gradients, so
        they are weighted and summed here, and divided by this replica's weight.
        """
        weight = self.step.row_weight

        def back(upstream):
            if weight is None:
                return self._differentiable_sum(upstream)
            total = self._sum([weighted(upstream, weight)], name)[0]
            return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

        return back

    def _sum(
        self, tensors: Sequence[Any], name: str, compare: Compare = Compare.BEFORE
    ) -> list[Any]:
        """Sums over the replicas; local ones as native tf.distribute does."""
        workers = self.peers.workers

        def merge_of_workers(*parts):
            assert workers is not None
            totals = []
            for values in zip(*parts, strict=True):
                combine.check_alike(values)
                totals.append(combine.add(values))
            return sum_of_workers(workers, name, totals, compare)

        def merge(native, *values):
            for value in values:
                combine.check_alike(native.experimental_local_results(value))
            totals: list[Any] = list(values)
            # Native tf.distribute takes an int32, which is in the host's memory, alone.
            alone = [i for i, tensor in enumerate(own) if tensor.dtype == tf.int32]
            others = [i for i in range(len(own)) if i not in alone]
            for batch in (others, *([i] for i in alone)):
                pairs = [(values[i], values[i]) for i in batch]
                reduced = native.extended.batch_reduce_to("SUM", pairs) if pairs else ()
                for i, total in zip(batch, reduced, strict=True):
                    totals[i] = total
            return totals

        if not tensors:
            return []
        # A tensor that all replicas got from outside would count once, so each
        # brings its own.
        own = [
            t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in tensors
        ]
        if workers is not None:
            return list(self._merge(merge_of_workers, own))
        return list(self._native.merge_call(merge, args=tuple(own)))

    def _merge(self, merge: Callable[..., Any], brought: Any) -> Any:
        """Calls `merge` once with what every replica brought.

        Args:
            merge: Gets one argument for each replica.
            brought: This replica's argument.

        Returns:
            What `merge` returned, on every replica.
        """
        at = self._meeting
        at.brought[self.index] = brought

        def merge_all(native):
            # Native tf.distribute calls the first replica's function, once.
            at.brought = [merge(*at.brought)] * len(at.brought)

        self._native.merge_call(merge_all)
        return at.brought[self.index]
