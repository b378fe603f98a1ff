"""One replica while a function runs on it, in a thread of native tf.distribute."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers, Verify
from keras_strategy.backends.tensorflow.compile_cache import require
from keras_strategy.backends.tensorflow.tensors import (
    check_same_layout,
    concat_values,
    divide,
    join_lookups,
    split_lookups,
    sum_values,
)
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import ReplicaAttributes
from keras_strategy.core.protocols import Replica
from keras_strategy.core.step_state import StepState
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.training import row_weights
from keras_strategy.training.ownership import strategy_of_variable
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.training.sharding import (
    OPTIMIZER_SHARDING,
    FlatShards,
    flat_shards_of,
    gradient_shards,
)
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import ReduceOp, regroup, select_replica

# The attribute of a gradient that holds the replica's shard of its sum.
SHARD = "_ks_shard"


_CONDITIONS_DIFFER = (
    "`{name}` was called in a branch whose condition is not equal on all replicas: the "
    "tensor '{condition}', at {place}. Make it equal, for example by "
    "`keras_strategy.get_replica_context().all_reduce` of what it depends on."
)


@dataclass
class RunState:
    """State that the replicas of one run share. They take turns, replica 0 first."""

    merge_values: list[Any]  # each replica's argument of a merge; then the results
    generator: Any  # Keras's global seed generator in the thread that called `run`
    attributes: list[ReplicaAttributes]  # what each replica sets on layers
    has_drawn: bool = False  # from the global seed generator


def local_shard(full: Any, shares: FlatShards, replica: int) -> Any:
    """Return a replica's shard of a tensor or of `tf.IndexedSlices`."""
    begin, end = shares.bounds[replica]
    if not isinstance(full, tf.IndexedSlices):
        flat = tf.reshape(full, [-1])[begin:end]
        return tf.reshape(flat, shares.shape_of(replica))
    if shares.shape_of(replica) == shares.shape:
        return full
    # Repeated rows are not added up, because Keras's optimizers square each of them.
    width = math.prod(shares.shape[1:])
    rows = tf.cast(full.indices, tf.int64)[:, None]
    elements = tf.reshape(rows * width + tf.range(width, dtype=tf.int64), [-1])
    is_local = (begin <= elements) & (elements < end)
    return tf.IndexedSlices(
        tf.boolean_mask(tf.reshape(full.values, [-1]), is_local),
        tf.boolean_mask(elements, is_local) - begin,
        tf.constant([end - begin], tf.int64),
    )


def gather_shards(
    shards: Sequence[Sequence[Any]],
    shares: Sequence[FlatShards],
    workers: TensorFlowWorkers | None,
    name: str,
) -> list[Any]:
    """Return full tensors from each local replica's shard of each tensor."""
    flat = [[tf.reshape(shard, [-1]) for shard in replica] for replica in shards]
    by_tensor: list[Any] = list(zip(*flat, strict=True))
    if workers is not None:
        replicas = range(len(shares[0].bounds))
        # One collective per dtype.
        for dtype in dict.fromkeys(shard.dtype for shard in flat[0]):
            indices = [i for i, shard in enumerate(flat[0]) if shard.dtype == dtype]
            local = tf.concat([replica[i] for replica in flat for i in indices], 0)
            gathered, _ = workers.gather(name, local, 0)
            sizes = [shares[i].size_of(rank) for rank in replicas for i in indices]
            pieces = tf.split(gathered, sizes)
            for place, i in enumerate(indices):
                by_tensor[i] = pieces[place :: len(indices)]
    return [
        tf.reshape(tf.concat(pieces, 0), one.shape)
        for pieces, one in zip(by_tensor, shares, strict=True)
    ]


def _weighted(tensor: Any, weight: Any) -> Any:
    """Return `apply_row_weight`; for floats in one operation."""
    if weight is None or not tensor.dtype.is_floating:
        return row_weights.apply_row_weight(tensor, weight)
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))


class TensorFlowReplica(Replica):
    def __init__(self, group: Any, run_state: RunState):
        self.group = group
        self._run_state = run_state
        self._has_drawn = False
        # A scalar tensor: if it is false, writes keep the old value. None: always
        # write. It replaces a tf.cond, in which replicas cannot run collectives.
        self.write_condition: Any = None
        # The conditions of the branches that are traced, with their file and line.
        self.conditions: list[tuple[Any, str]] = []
        self._graph = tf.compat.v1.get_default_graph()
        self.step = StepState()
        self._native = tf.distribute.get_replica_context()
        # TensorFlow gives a constant tensor while it traces.
        self.id = int(tf.get_static_value(self._native.replica_id_in_sync_group))
        self.index = self.id - group.topology.local_replicas.start
        self.devices = (group.devices[self.index],)
        attributes = run_state.attributes[self.index]
        native_merge_call = self._native.merge_call

        def merge_call(*args, **kwargs):
            if not self._is_in_step_graph():
                raise self._in_branch_error("merge_call")
            attributes.swap_out()  # the replica's turn ends here
            result = native_merge_call(*args, **kwargs)
            attributes.swap_in()
            return result

        self._native.merge_call = merge_call

    @contextlib.contextmanager
    def _outside_branches(self, name: str, tensors: Sequence[Any]) -> Iterator[None]:
        """Leave the branch of a `tf.cond`, in which replicas cannot communicate."""
        # What is computed here is computed in any case, and before the condition.
        if self._is_in_step_graph():
            yield
            return
        used = tf.nest.flatten([*tensors, *self.conditions], expand_composites=True)
        if any(isinstance(x, tf.Tensor) and not self._is_of_step(x) for x in used):
            raise self._in_branch_error(name)
        replicas = self.group.topology.num_replicas
        with self._graph.as_default():
            checks = []
            for condition, place in self.conditions:
                true = self._sum([tf.cast(tf.cast(condition, "bool"), "int32")], name)
                is_equal = (true[0] == 0) | (true[0] == replicas)
                message = _CONDITIONS_DIFFER.format(
                    name=name, condition=condition.name, place=place
                )
                checks.append(require(is_equal, message))
            with tf.control_dependencies(checks):
                yield

    def _in_branch_error(self, name: str) -> RuntimeError:
        places = [place for _, place in self.conditions] or ["of a loop"]
        return RuntimeError(
            f"`{name}` was called in a branch ({', '.join(places)}), with tensors that "
            "are computed in it. Replicas exchange values outside of `tf.cond`, "
            "`tf.while_loop` and Python's `if` and `while` on tensors. Compute the "
            f"gradients and the condition before the branch, and call `{name}` in it; "
            "or call it in each step, with gradients times the condition."
        )

    def _is_in_step_graph(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph

    def _is_of_step(self, tensor: Any) -> bool:
        is_eager = isinstance(tensor, tf.__internal__.EagerTensor)
        return is_eager or tensor.graph is self._graph

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        with self._outside_branches("all_reduce", [value]):
            if isinstance(value, tf.IndexedSlices):
                total = self._sum([value], "all_reduce")[0]
            else:
                total = self._differentiable_sum(cast_for_sum(value))
            if reduce_op is ReduceOp.SUM:
                return total
            return divide(total, self.group.topology.num_replicas)

    def all_gather(self, value: Any, axis: int) -> Any:
        ragged: Any = tf.RaggedTensor  # TensorFlow's annotations lack its methods
        if isinstance(value, ragged) and axis == 0:
            return ragged.from_nested_row_lengths(
                self.all_gather(value.flat_values, 0),
                [self.all_gather(n, 0) for n in value.nested_row_lengths()],
            )
        sum_gradients = self._gradient_of_sum("gradient of all_gather")
        workers = self.group.workers
        replicas = self.group.topology.num_replicas

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
        strategy = self.group.strategy

        def merge(*parts):
            args, kwargs = regroup(parts, tf.is_tensor, always_distributed=True)
            with context.cross_replica_scope(strategy):
                return merge_fn(strategy, *args, **kwargs)

        # In the replica a variable reads as its component, in `merge_fn` as all.
        components = tree.map_structure(
            lambda x: tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x,
            (args, kwargs),
        )
        merged = self._merge(merge, components)
        replicas = len(self.group.devices)
        return select_replica(merged, self.index, replicas, "merge_call")

    def once(self, fn: Callable[[], Any]) -> Any:
        self.group.builds += 1
        return self.group.call_outside(fn)

    def seed_generator(self) -> Any:
        """Return the replica's stand-in for Keras's global seed generator."""
        seeds = self.group.seeds
        if not self._run_state.has_drawn:
            self._run_state.has_drawn = True
            seeds.start(self._run_state.generator)
        if not self._has_drawn:
            self._has_drawn = True
            self.write(seeds.replicas.state, stored_value(seeds.process.state))
        return seeds.replicas

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        with self._outside_branches(self.step.reduction, [*tensors, weight]):
            lookups = [split_lookups(tensor) for tensor in tensors]
            terms = [part for parts in lookups for part, _ in parts]
            totals = iter(self._weighted_sum(terms, weight))
            replicas = self.group.topology.num_replicas
            return [join_lookups(parts, totals, replicas) for parts in lookups]

    def _weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        terms: list[Any] = []
        for tensor in tensors:
            if isinstance(tensor, tf.IndexedSlices):
                values = _weighted(tensor.values, weight)
                parts = values, tensor.indices, tensor.dense_shape
                terms.append(tf.IndexedSlices(*parts))
            else:
                terms.append(_weighted(tf.convert_to_tensor(tensor), weight))
        name, workers = self.step.reduction, self.group.workers
        shares = None if workers is None else self._gradient_shares(terms, workers)
        if workers is None or shares is None:
            return self._sum(terms, name, Verify.INLINE)
        shards = self._merge(
            lambda terms: workers.reduce_scatter(name, terms, shares), terms
        )
        totals = []
        for term, shard, one in zip(terms, shards, shares, strict=True):
            # Only the shard is known; code that reads the full gradient finds NaN.
            total = tf.fill(term.shape, tf.constant(math.nan, term.dtype))
            setattr(total, SHARD, tf.reshape(shard, one.shape_of(self.id)))
            totals.append(total)
        return totals

    def _gradient_shares(
        self, gradients: Sequence[Any], workers: TensorFlowWorkers
    ) -> list[FlatShards] | None:
        """Return the elements of each gradient that each worker's one replica needs."""
        # None if gradients must be summed in full on each replica.
        optimizer = self.step.optimizer
        if optimizer is None or len(self.group.devices) > 1:
            return None
        if workers.uses_accelerators:  # not measured there
            return None
        sharding = vars(optimizer).get(OPTIMIZER_SHARDING)
        # An all-to-all sends chunks of equal size, so shards must be even.
        if sharding is None or not sharding.elementwise:
            return None
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            return None
        if not all(workers.can_verify([gradient]) for gradient in gradients):
            return None
        return gradient_shards(optimizer, gradients, self.step.reducing_gradients_of)

    def write(self, variable: Any, value: Any) -> None:
        shares = flat_shards_of(variable)
        if shares is not None:
            value = local_shard(value, shares, self.id)
        self.write_component(variable, value)

    def write_component(self, variable: Any, value: Any) -> None:
        """Write what this replica stores of a variable: its component or shard."""
        is_foreign = (
            is_sync_on_read(variable) and strategy_of_variable(variable) is None
        )
        component = self.component(stored_value(variable), is_foreign)
        value = tf.cast(value, component.dtype)
        if self.write_condition is not None:
            value = tf.where(self.write_condition, value, component)
        component.assign(value)

    def gather_shards(
        self, shards: Sequence[Any], shares: Sequence[FlatShards]
    ) -> list[Any]:
        workers = self.group.workers

        def merge(*replicas):
            return gather_shards(replicas, shares, workers, "optimizer.apply")

        return list(self._merge(merge, list(shards)))

    def full_value(self, variable: Any) -> Any:
        """Return the value of a sharded variable; all replicas must call it."""
        shares: Any = flat_shards_of(variable)
        shard = tf.convert_to_tensor(self.component(stored_value(variable)))
        return self.gather_shards([shard], [shares])[0]

    def component(self, variable: Any, is_foreign: bool = False) -> Any:
        components = self.group.native.experimental_local_results(variable)
        if is_foreign or len(components) != len(self.group.devices):
            raise ValueError(
                f"The variable '{variable.name}' was created outside the scope of "
                f"{self.group.strategy!r} and is assigned in `strategy.run`. "
                "Create it inside `with strategy.scope():`."
            )
        return components[self.index]

    def _differentiable_sum(self, tensor: Any) -> Any:
        sum_gradients = self._gradient_of_sum("gradient of all_reduce")
        # In a training step, the shapes follow from the model.
        verify = Verify.BEFORE if self.step.row_weight is None else Verify.INLINE

        @tf.custom_gradient
        def total(x):
            return self._sum([x], "all_reduce", verify)[0], sum_gradients

        return total(tensor)

    def _gradient_of_sum(self, name: str) -> Callable[[Any], Any]:
        """Return the gradient of a sum: the sum of the replicas' gradients."""
        # In a training step the optimizer weights this replica's gradients later. So
        # they are weighted and summed here, then divided by this replica's weight.
        weight = self.step.row_weight

        def sum_gradients(upstream):
            if weight is None:
                return self._differentiable_sum(upstream)
            total = self._sum([_weighted(upstream, weight)], name, Verify.INLINE)[0]
            return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

        return sum_gradients

    def _sum(
        self, tensors: Sequence[Any], name: str, verify: Verify = Verify.BEFORE
    ) -> list[Any]:
        """Sum over the replicas; over local ones as native tf.distribute does."""
        workers = self.group.workers

        def merge_over_workers(*parts):
            assert workers is not None
            totals = []
            for values in zip(*parts, strict=True):
                check_same_layout(values)
                totals.append(sum_values(values))
            return workers.sum_all(name, totals, verify)

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
