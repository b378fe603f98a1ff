"""Where all backends extend Keras. Installed when the first strategy is made.

Each hook below says which function of Keras it replaces and why. Outside a strategy's
scope, and with one replica, every one of them calls the original and nothing else.
`hooks.hook` refuses a Keras whose functions changed their signatures; the
equality tests notice one that changed their meaning.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.core.registry import get_engine
from keras_strategy.hooks import entry_scope, hook, layers, saving
from keras_strategy.hooks.hook import Hook, home_of, model_hook
from keras_strategy.input import seeds, splitting
from keras_strategy.input.sources import ReadOnce, as_array
from keras_strategy.rules import losses, mirror_check, normalization
from keras_strategy.rules.aggregation import adds_up, assigned
from keras_strategy.rules.ownership import (
    adopt_variables,
    belongs_to,
    strategy_of_model,
)
from keras_strategy.values.distributed import ReduceOp

keras_losses = home_of("reduce_weighted_values", "keras.src.losses.loss")
keras_masking = home_of(
    "get_keras_mask set_keras_mask", "keras.src.backend.common.masking"
)
GeneratorDataAdapter: Any = home_of(
    "GeneratorDataAdapter",
    "keras.src.trainers.data_adapters.generator_data_adapter",
).GeneratorDataAdapter
ArrayDataAdapter: Any = home_of(
    "ArrayDataAdapter", "keras.src.trainers.data_adapters.array_data_adapter"
).ArrayDataAdapter


@functools.cache
def install_once() -> None:
    """Installs the hooks of all backends and those of the backend in use."""
    backend = get_engine()
    hook.install(_hooks())
    backend.install_hooks()


def counts_of_arrays(adapter: Any) -> list[Any] | None:
    """What is known of a `fit`'s batches before it reads them, if they are arrays.

    Args:
        adapter: Keras's adapter of the data.

    Returns:
        How many batches there are, their rows, and those of a last partial one.
    """
    if not isinstance(adapter, ArrayDataAdapter):
        return None
    return [adapter.num_batches, adapter.batch_size, adapter.partial_batch_size]


# --- which strategy a model and its variables belong to


def _layer_new(original: Callable) -> Callable:
    """`Layer.__new__`: a model belongs to the scope that it is made in.

    Every way to make a model ends here: Sequential, functional, subclass,
    from_config, load_model and clone_model. And a layer may be trained as a model is,
    if its class is one of Keras's trainers too.
    """

    def __new__(cls, *args, **kwargs):
        layer = original(cls, *args, **kwargs)
        strategy = context.current_scope()
        if strategy is not None:
            vars(layer)["_ks_strategy"] = strategy
        return layer

    return __new__


def _variable_init(original: Callable) -> Callable:
    """`Variable.__init__`: a variable belongs to the scope that it is made in."""

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        strategy = context.current_scope()
        if strategy is not None:
            belongs_to(self, strategy)

    return __init__


def _in_scope(original: Callable) -> Callable:
    """`Model.fit` and its like: work in the scope of the model's strategy."""
    name = original.__name__

    def entry_point(self, *args, **kwargs):
        strategy = strategy_of_model(self)
        args = [_data_for_keras(x, strategy, name) for x in args]
        kwargs = {k: _data_for_keras(x, strategy, name) for k, x in kwargs.items()}
        with entry_scope.left_for(strategy):
            return in_scope(self, strategy, args, kwargs)

    def in_scope(self, strategy, args, kwargs):
        if strategy is None:
            current = context.current_scope()
            if current is None:
                return original(self, *args, **kwargs)
            raise ValueError(
                f"`{name}` was called in the scope of {current!r} on the model "
                f"'{self.name}', which was made outside of it. Make the model inside "
                f"`with strategy.scope():`, or call `{name}` outside the scope to "
                "work on one device."
            )
        context.require_cross_replica(strategy, name)
        with entry_scope.entered(strategy):
            adopt_variables(strategy, self)
            cluster = strategy.extended.cluster
            if cluster is None and not mirror_check.enabled:
                return original(self, *args, **kwargs)
            call = inspect.signature(original).bind(self, *args, **kwargs)
            if cluster is not None and name != "compile":
                seeds.take_chiefs(cluster)
                if name in ("fit", "evaluate", "predict"):
                    lead = functools.partial(_chiefs_lead, strategy)
                    saving.worker_arguments(name, call.arguments, cluster, lead)
            if mirror_check.enabled and name == "fit":
                callbacks = call.arguments.get("callbacks")
                if not isinstance(callbacks, keras.callbacks.CallbackList):
                    call.arguments["callbacks"] = [
                        *keras.tree.flatten(callbacks or []),
                        mirror_check.MirrorCheck(strategy),
                    ]
            result = original(*call.args, **call.kwargs)
            if mirror_check.enabled:
                mirror_check.check(strategy, name)
            return result

    return entry_point


def _chiefs_lead(strategy: Any, every_batch: bool) -> saving.ChiefsLead:
    def give_variables(model):
        variables = [*model.variables, *model.optimizer.variables]
        strategy.extended.group.take_first(
            [variable for variable in variables if variable._value is not None]
        )

    def set_epoch(model, epoch):
        model._initial_epoch = epoch

    return saving.ChiefsLead(
        strategy.extended.cluster,
        give_variables,
        lambda model: model._initial_epoch,
        set_epoch,
        every_batch,
    )


def _data_for_keras(argument: Any, strategy: Any, method: str) -> Any:
    data = splitting.for_keras(argument, strategy, method)
    return _Batches(data) if isinstance(data, splitting.GlobalBatches) else data


class _Batches(GeneratorDataAdapter):
    """Lets Keras's loop read the global batches of a distributed dataset.

    Args:
        data: The batches; every epoch starts to read them anew.
    """

    def __init__(self, data: splitting.GlobalBatches):
        def batches():
            for batch in data.start():
                batch = tree.map_structure(lambda leaf: as_array(leaf, "it"), batch)
                batch = tuple(batch) if isinstance(batch, list) else batch
                yield batch if isinstance(batch, tuple) else (batch,)

        super().__init__(batches())
        self._number = data.number
        if not isinstance(data.start, ReadOnce):
            self.generator = batches

    @property
    def num_batches(self):
        return self._number


def _symbolic_build(original: Callable) -> Callable:
    """`Model._symbolic_build`: what fit builds may hold metrics from outside."""

    def _symbolic_build(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        strategy = context.current_scope()
        if strategy is not None:
            adopt_variables(strategy, self)
        return result

    return _symbolic_build


# --- variables


def _assign(original: Callable) -> Callable:
    """`Variable.assign`: what replicas assign is brought together.

    Inside `optimizer.apply` nothing is: all replicas compute on equal inputs.
    """

    def assign(self, value):
        replica = distributed_replica()
        if replica is None or replica.step.applying:
            return original(self, value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        return original(self, assigned(replica, self, value))

    return assign


def _assign_add(original: Callable, assign: Callable, sign: int) -> Callable:
    """`Variable.assign_add`, `assign_sub`: the increments are brought together.

    Keras assigns `self + value`, of which the sum over the replicas would count the
    variable once for each of them.
    """

    def assign_add(self, value):
        replica = distributed_replica()
        if replica is None or replica.step.applying or not adds_up(self):
            return original(self, value)
        increment = self._convert_to_tensor(value, dtype=self._dtype)
        op = ReduceOp.parse(self.aggregation)
        increment = replica.all_reduce(op, increment)
        return assign(self, ops.add(self.value, ops.multiply(increment, sign)))

    return assign_add


# --- optimizers


def _apply(original: Callable) -> Callable:
    """`Optimizer.apply`: first sum the gradients over the replicas, once.

    Then Keras's own code clips, accumulates, scales and applies on every replica, on
    equal inputs. The outermost optimizer does it: LossScaleOptimizer calls another.
    """

    def apply(self, grads, trainable_variables=None):
        replica = distributed_replica()
        if replica is None or replica.step.applying:
            return original(self, grads, trainable_variables)
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built and trainable_variables is not None:

            def build():
                if not self.built:
                    self.build(trainable_variables)
                    self.built = True

            replica.once(build)
        present = [grad for grad in grads if grad is not None]
        summed = iter(replica.weighted_sum(present, replica.step.row_weight))
        grads = [None if grad is None else next(summed) for grad in grads]
        replica.step.applying = True
        try:
            return original(self, grads, trainable_variables)
        finally:
            replica.step.applying = False

    return apply


# --- losses


def _loss_call(original: Callable) -> Callable:
    """`Loss.__call__`: a loss that gives one number is computed on all rows.

    What it does with the rows is not known: Dice divides sums over all of them. Of the
    replicas' numbers no mean would be what one device computes.
    """

    def __call__(self, y_true, y_pred, sample_weight=None):
        replica = distributed_replica()
        if replica is None:
            return original(self, y_true, y_pred, sample_weight)
        step = replica.step
        if step.row_weight is None or step.has_all_rows:
            return original(self, y_true, y_pred, sample_weight)
        step.loss_is_scalar = False
        loss = original(self, y_true, y_pred, sample_weight)
        if not step.loss_is_scalar:
            return loss
        mask = keras_masking.get_keras_mask(y_pred)
        y_true, y_pred, sample_weight, mask = losses.rows_of_all(
            replica, (y_true, y_pred, sample_weight, mask)
        )
        if mask is not None:
            keras_masking.set_keras_mask(y_pred, mask)
        step.has_all_rows = True
        try:
            return original(self, y_true, y_pred, sample_weight)
        finally:
            step.has_all_rows = False

    return __call__


def _reduce_weighted_values(original: Callable) -> Callable:
    """`reduce_weighted_values`: notes what kind of loss `Loss.__call__` has."""

    def reduce_weighted_values(values, *args, **kwargs):
        replica = distributed_replica()
        if replica is not None:
            replica.step.loss_is_scalar = len(ops.shape(values)) == 0
        return original(values, *args, **kwargs)

    return reduce_weighted_values


def _reduce_values(original: Callable) -> Callable:
    """`reduce_values`: a replica's loss has the denominator of all rows."""

    def reduce_values(values, sample_weight=None, reduction="sum_over_batch_size"):
        replica = distributed_replica()
        if replica is None or replica.step.has_all_rows:
            return original(values, sample_weight, reduction)
        return losses.reduce_values(replica, values, sample_weight, reduction)

    return reduce_values


def _apply_mask(original: Callable) -> Callable:
    """`apply_mask`: valid entries are counted over all rows."""

    def apply_mask(sample_weight, mask, dtype, reduction):
        replica = distributed_replica()
        if replica is None or replica.step.has_all_rows:
            return original(sample_weight, mask, dtype, reduction)
        return losses.apply_mask(
            replica, original, sample_weight, mask, dtype, reduction
        )

    return apply_mask


def _unscaled(original: Callable) -> Callable:
    """`(un)scale_loss_for_distribution`: rows weight the replicas, not 1 / N."""

    def scale(value):
        return original(value) if distributed_replica() is None else value

    return scale


# --- normalization


def _batch_normalization_init(original: Callable) -> Callable:
    """`BatchNormalization.__init__`: in a scope `synchronized` works everywhere.

    Keras refuses it on JAX and torch, where it has nothing to synchronize with.
    """

    def __init__(self, *args, synchronized=False, **kwargs):
        if not synchronized or context.current_scope() is None:
            return original(self, *args, synchronized=synchronized, **kwargs)
        original(self, *args, **kwargs)
        self.synchronized = True

    return __init__


def _moments(original: Callable) -> Callable:
    """`moments`: those of all replicas, if synchronized.

    Outside of replicas all rows are there: one device, or JAX's global program.
    """

    def moments(x, axes, keepdims=False, synchronized=False):
        replica = distributed_replica()
        if synchronized and replica is not None:
            return normalization.moments(replica, x, axes, keepdims)
        if context.current_scope() is not None:
            synchronized = False
        return original(x, axes, keepdims=keepdims, synchronized=synchronized)

    return moments


def _masked_moments(original: Callable) -> Callable:
    """`BatchNormalization._moments`: with a mask, Keras synchronizes nothing."""

    def _moments(self, inputs, mask):
        replica = distributed_replica()
        if replica is None or mask is None or not self.synchronized:
            return original(self, inputs, mask)
        return normalization.masked_moments(replica, inputs, mask, self._reduction_axes)

    return _moments


# --- metrics


def _mean_update_state(original: Callable) -> Callable:
    """`Mean.update_state`: a scalar stands for this replica's rows.

    Keras counts a scalar once for each batch, and the batch is all replicas'.
    """

    def update_state(self, values, sample_weight=None):
        replica = distributed_replica()
        if (
            replica is not None
            and replica.step.row_weight is not None
            and sample_weight is None
            and not isinstance(values, keras.KerasTensor)
            and len(getattr(values, "shape", ())) == 0  # a Python number has none
        ):
            sample_weight = replica.step.row_weight
        return original(self, values, sample_weight)

    return update_state


# --- random numbers


def _next_seed(original: Callable) -> Callable:
    """`SeedGenerator.next`: every replica draws its own numbers.

    Only the drawn seed differs; the stored state advances as on one device.
    """

    def next(self, ordered=True):
        seed = original(self, ordered)
        replica = distributed_replica()
        if replica is None:
            return seed
        # A large prime keeps the replicas' seeds apart from each other and from
        # those of other generators, which users number 0, 1, 2...
        offset = ops.cast(ops.multiply(replica.id, 1000003), seed.dtype)
        return seed + ops.stack([offset, ops.zeros_like(offset)])

    return next


def _hooks() -> list[Any]:
    backend = f"keras.src.backend.{keras.backend.backend()}"
    # Under `ops` from Keras 3.16 on.
    keras_nn = home_of("moments", f"{backend}.nn", f"{backend}.ops.nn")
    variable = keras.Variable
    assign = variable.assign  # the original: increments are aggregated only once
    entry_points = (
        "compile",
        "fit",
        "evaluate",
        "predict",
        "train_on_batch",
        "test_on_batch",
        "predict_on_batch",
    )
    return [
        Hook(keras.Layer, "__new__", "(cls, *args, **kwargs)", _layer_new),
        *layers.hooks(),
        *(model_hook(name, (), _in_scope) for name in entry_points),
        *saving.hooks(),
        model_hook(
            "_symbolic_build",
            "(self, iterator=None, data_batch=None)",
            _symbolic_build,
        ),
        Hook(
            variable,
            "__init__",
            (),
            _variable_init,
        ),
        Hook(variable, "assign", "(self, value)", _assign),
        Hook(
            variable,
            "assign_add",
            "(self, value)",
            lambda original: _assign_add(original, assign, 1),
        ),
        Hook(
            variable,
            "assign_sub",
            "(self, value)",
            lambda original: _assign_add(original, assign, -1),
        ),
        Hook(
            keras.optimizers.Optimizer,
            "apply",
            "(self, grads, trainable_variables=None)",
            _apply,
        ),
        Hook(
            keras.optimizers.LossScaleOptimizer,
            "apply",
            "(self, grads, trainable_variables=None)",
            _apply,
        ),
        Hook(
            keras.losses.Loss,
            "__call__",
            "(self, y_true, y_pred, sample_weight=None)",
            _loss_call,
        ),
        Hook(
            keras_losses,
            "reduce_weighted_values",
            ("values",),
            _reduce_weighted_values,
        ),
        Hook(
            keras_losses,
            "reduce_values",
            "(values, sample_weight=None, reduction='sum_over_batch_size')",
            _reduce_values,
        ),
        Hook(
            keras_losses,
            "apply_mask",
            "(sample_weight, mask, dtype, reduction)",
            _apply_mask,
        ),
        Hook(keras_losses, "scale_loss_for_distribution", "(value)", _unscaled),
        Hook(keras_losses, "unscale_loss_for_distribution", "(value)", _unscaled),
        Hook(
            keras.layers.BatchNormalization,
            "__init__",
            ("synchronized",),
            _batch_normalization_init,
        ),
        Hook(
            keras.layers.BatchNormalization,
            "_moments",
            "(self, inputs, mask)",
            _masked_moments,
        ),
        Hook(
            keras_nn,
            "moments",
            "(x, axes, keepdims=False, synchronized=False)",
            _moments,
        ),
        Hook(
            keras.metrics.Mean,
            "update_state",
            "(self, values, sample_weight=None)",
            _mean_update_state,
        ),
        Hook(keras.random.SeedGenerator, "next", "(self, ordered=True)", _next_seed),
    ]
