"""Where the torch adapter extends Keras, beside `keras_strategy/hooks`.

On torch, Keras writes to the variables as it goes. What belongs to one replica must be
kept apart from what belongs to the others; see `backends/threads/hooks.py` for
what does not depend on torch. Outside of replicas each hook calls the original.
"""

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.nn.parallel import DistributedDataParallel

from keras_strategy.backends.threads import hooks as thread_hooks
from keras_strategy.backends.threads.hooks import keras_seeds
from keras_strategy.backends.torch import components
from keras_strategy.backends.torch.batch_logs import BatchLogs, may_read
from keras_strategy.backends.torch.run import process_generator
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import Hook, changed, home_of, model_hook
from keras_strategy.hooks.trainer import counts_of_arrays
from keras_strategy.input.agreement import AgreedBatches
from keras_strategy.rules.ownership import strategy_of_model

keras_random = home_of("dropout gamma beta binomial", "keras.src.backend.torch.random")
TorchEpochIterator: Any = home_of(
    "TorchEpochIterator", "keras.src.backend.torch.trainer"
).TorchEpochIterator

# --- random numbers


def _dropout(original: Callable) -> Callable:
    """`keras.random.dropout`: without a seed it draws from the process's generator.

    Also for a `SeedGenerator` without one, whose state it leaves as it is.
    """

    def dropout(inputs, rate, noise_shape=None, seed=None):
        replica: Any = distributed_replica()
        seeded = seed is not None and getattr(seed, "_initial_seed", seed) is not None
        if (
            replica is None
            or seeded
            or noise_shape is not None
            or inputs.device.type == "meta"
            or not 0 < rate < 1
        ):
            return original(inputs, rate, noise_shape, seed)
        keep = 1.0 - rate
        generator = replica.generator(inputs.device)
        mask = torch.empty_like(inputs, requires_grad=False)
        return inputs * mask.bernoulli_(keep, generator=generator).div_(keep)

    return dropout


def _one_at_a_time(original: Callable) -> Callable:
    """`keras.random.gamma` and its like: they seed the process's generator.

    torch samples these distributions from no other; Keras puts its state back.
    """

    def draw(*args, **kwargs):
        if distributed_replica() is None:
            return original(*args, **kwargs)
        if kwargs.get("seed") is None:
            # The replicas meet to make it, which they could not while one has the lock.
            kwargs["seed"] = keras_seeds.global_seed_generator()
        with process_generator:
            return original(*args, **kwargs)

    return draw


# --- variables


def _variable_value(original: property) -> property:
    """`Variable.value`: outside of replicas an on_read variable is aggregated.

    With no replica's scope in the thread, Keras would read the first component.
    """
    get = original.fget
    assert get is not None

    def value(self):
        # Read very often, and few variables are on_read: that is seen first.
        own = self.__dict__.get(components.ATTRIBUTE)
        if own is None or not own.on_read or thread_hooks.keras_scope() is not None:
            return get(self)
        own = components.find(self)
        if own is None:
            return get(self)
        return self._maybe_autocast(own.aggregated(self))

    return property(value, original.fset, original.fdel, original.__doc__)


def _initialize(original: Callable) -> Callable:
    """`Variable._initialize`: the first value is the chief's on every worker."""

    def _initialize(self, value):
        original(self, value)
        strategy = context.current_scope()
        if strategy is not None and strategy.extended.cluster is not None:
            strategy.extended.group.take_first([self])

    return _initialize


def _direct_assign(original: Callable) -> Callable:
    """`Variable._direct_assign`: outside of replicas all components are written."""

    def _direct_assign(self, value):
        own = components.find(self)
        if own is None:
            return original(self, value)
        return own.assign(self, value)

    return _direct_assign


# --- layers


def _zero_grad(original: Callable) -> Callable:
    """`zero_grad`, which Keras's train_step calls: this replica's gradients.

    torch would clear those of the first replica, from every replica's thread.
    """

    def zero_grad(self, set_to_none=True):
        if distributed_replica() is None:
            return original(self, set_to_none)
        for variable in self.variables:
            variable.value.grad = None

    return zero_grad


# --- the trainer


def _make_function(kind: str) -> Callable[[Callable], Callable]:
    """`Model.make_train_function` and its like: a batch is `strategy.run`."""
    attribute = f"{kind}_function"

    def replace(original: Callable) -> Callable:
        def make(self, force=False):
            from keras_strategy.backends.torch.training import distributed_function

            before = getattr(self, attribute)
            original(self, force)
            logs = BatchLogs.of(before)
            if logs is not None:
                logs.reset()  # until a loop with callbacks begins
            strategy = strategy_of_model(self)
            if strategy is None:
                return
            _require_unwrapped(self)
            if strategy.num_replicas_in_sync == 1:
                return
            if getattr(self, attribute) is not before:
                function = distributed_function(self, kind, strategy)
                setattr(self, attribute, function)

        return make

    return replace


def _on_begin(kind: str, loop: str) -> Callable[[Callable], Callable]:
    """`CallbackList.on_train_begin` and its like: who reads the logs of batches?

    Where nobody does, on any worker, they need not be brought together. A loop that is
    not Keras's may.
    """

    def replace(original: Callable) -> Callable:
        def on_begin(self, logs=None):
            result = original(self, logs)
            model = getattr(self, "model", None)
            batch_logs = BatchLogs.of(getattr(model, f"{kind}_function", None))
            if batch_logs is not None:
                own_loop = getattr(type(model), loop) is not getattr(keras.Model, loop)
                read = own_loop or any(may_read(c, kind) for c in self.callbacks)
                strategy: Any = context.current_scope()
                if strategy is not None and strategy.extended.cluster is not None:
                    what = "whether the logs of batches are read"
                    read = any(strategy.extended.cluster.agree(what, read))
                batch_logs.are_read = read
            return result

        return on_begin

    return replace


def _get_iterator(original: Callable) -> Callable:
    """`TorchEpochIterator._get_iterator`: several workers agree on their batches."""

    def _get_iterator(self):
        batches = original(self)
        strategy = context.current_scope()
        if strategy is None or strategy.extended.cluster is None:
            return batches
        counts = counts_of_arrays(self.data_adapter)
        return AgreedBatches(batches, strategy.extended.cluster, counts)

    return _get_iterator


# --- what Keras distributes by itself


def _initialize_ddp(original: Callable) -> Callable:
    """`Model._initialize_ddp`: a model of ours is distributed once, by its strategy.

    From 3.16 on Keras wraps every model in DistributedDataParallel where
    torch.distributed is initialised. It would broadcast the weights and sum the
    gradients a second time, and from every replica's thread.
    """

    def _initialize_ddp(self):
        if strategy_of_model(self) is None:
            original(self)

    return _initialize_ddp


def _merged_metrics(original: Callable) -> Callable:
    """`Model.get_metrics_result`: the states of all metrics travel at once.

    Each state that is read on its own is a collective of its own.
    """

    def get_metrics_result(self):
        strategy = strategy_of_model(self)
        if (
            strategy is None
            or strategy.extended.cluster is None
            or thread_hooks.keras_scope() is not None
        ):
            return original(self)
        from keras_strategy.backends.torch.training import sums_and_metrics

        return sums_and_metrics(self, strategy)[1]

    return get_metrics_result


def _get_metrics_result(neutral: Callable) -> Callable[[Callable], Callable]:
    """`Model.get_metrics_result`: the metrics of the strategy's replicas alone.

    Where torch.distributed is initialised, Keras sums them over all of its processes.
    """

    def replace(original: Callable) -> Callable:
        def get_metrics_result(self):
            chosen = original if strategy_of_model(self) is None else neutral
            return chosen(self)

        return get_metrics_result

    return replace


def _require_unwrapped(model: keras.Model) -> None:
    """Raises where Keras wrapped a model of ours in a way that we do not know."""
    for name, value in vars(model).items():
        if isinstance(value, DistributedDataParallel):
            raise changed(
                "Model.make_train_function",
                f"wraps a model in DistributedDataParallel (Model.{name}), though it "
                "is the strategy that distributes it",
            )


def _hooks_on_ddp() -> list[Hook]:
    """None in a Keras that leaves torch.distributed to its user."""
    hooks = []
    if hasattr(keras.Model, "_initialize_ddp"):
        hooks.append(model_hook("_initialize_ddp", "(self)", _initialize_ddp))
    name = "get_metrics_result"
    owners = [cls for cls in keras.Model.__mro__ if name in vars(cls)]
    if len(owners) > 1:
        neutral = _get_metrics_result(getattr(owners[-1], name))
        hooks.append(model_hook(name, "(self)", neutral))
    return hooks


def hooks() -> list[Any]:
    """The hooks of the torch adapter."""
    return [
        *thread_hooks.hooks(),
        *_hooks_on_ddp(),
        Hook(
            keras_random,
            "dropout",
            "(inputs, rate, noise_shape=None, seed=None)",
            _dropout,
        ),
        *(
            Hook(keras_random, name, ("seed",), _one_at_a_time)
            for name in ("gamma", "beta", "binomial")
        ),
        Hook(keras.Variable, "value", None, _variable_value),
        Hook(keras.Variable, "_initialize", "(self, value)", _initialize),
        Hook(keras.Variable, "_direct_assign", "(self, value)", _direct_assign),
        Hook(keras.Layer, "zero_grad", "(self, set_to_none=True)", _zero_grad),
        *(
            Hook(
                keras.callbacks.CallbackList,
                f"on_{kind}_begin",
                ("logs",),
                _on_begin(kind, loop),
            )
            for kind, loop in (("train", "fit"), ("test", "evaluate"))
        ),
        model_hook("get_metrics_result", "(self)", _merged_metrics),
        Hook(TorchEpochIterator, "_get_iterator", "(self)", _get_iterator),
        *(
            model_hook(
                f"make_{kind}_function",
                "(self, force=False)",
                _make_function(kind),
            )
            for kind in ("train", "test", "predict")
        ),
    ]
