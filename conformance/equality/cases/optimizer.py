"""Optimizers, and what they do beside their rule."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import layers, optimizers

from conformance import models
from conformance.equality.cases.case import BFLOAT16, FLOAT16, Case, shipped
from conformance.models import compiled, mlp

# These are made of other optimizers.
_OF_OTHERS = {"LossScaleOptimizer", "MultiOptimizer"}

adam = functools.partial(optimizers.Adam, 0.01)


def each() -> Iterator[Case]:
    """Every optimizer that Keras ships."""
    for cls in shipped(optimizers, optimizers.Optimizer, _OF_OTHERS):
        yield Case(
            f"optimizer {cls.__name__}",
            lambda cls=cls: _built(cls(learning_rate=0.01)),
        )
    if hasattr(optimizers, "MultiOptimizer"):  # not before Keras 3.15
        yield Case(
            "optimizer MultiOptimizer",
            lambda: _built(optimizers.MultiOptimizer(_kernels_apart(adam()))),
        )


def at_once() -> Iterator[Case]:
    """All of them in one model: each updates a layer of its own."""
    if not hasattr(optimizers, "MultiOptimizer"):
        yield from each()
        return
    classes = list(shipped(optimizers, optimizers.Optimizer, _OF_OTHERS))
    yield Case(f"{len(classes)} optimizers", lambda: _each_for_a_layer(classes))


def _each_for_a_layer(classes):
    each = {cls.__name__.lower(): cls(learning_rate=0.01) for cls in classes}
    x = keras.Input((models.FEATURES,))
    y = layers.Add()([layers.Dense(1, name=name)(x) for name in each])

    def of_variable(variable):
        return each[variable.path.split("/")[0]]

    return _built(optimizers.MultiOptimizer(of_variable), keras.Model(x, y))


def _built(optimizer, model=None):
    model = compiled(model, optimizer)
    # Built while it is traced, ScheduleFreeAdamW would on TensorFlow copy the
    # weights into its averages in every step, on one device.
    model.optimizer.build(model.trainable_variables)
    return model


def _kernels_apart(kernels):
    others = optimizers.SGD(0.01, momentum=0.9)
    return lambda variable: kernels if "kernel" in variable.path else others


def trained_by(optimizer: Callable[[], Any]) -> Callable[[], keras.Model]:
    """Return a function that compiles an MLP with a new optimizer."""
    return lambda: compiled(optimizer=optimizer())


def beside_the_rule(briefly: bool = False) -> Iterator[Case]:
    """Yield the options of optimizers.

    Args:
        briefly: Whether several of their options share a row.
    """
    scaled_sums = {"gradient_accumulation_steps": 3, "loss_scale_factor": 8.0}
    overwriting = {"use_ema": True, "ema_overwrite_frequency": 2}
    alone: dict[str, dict[str, Any]] = {
        "clipnorm": {"clipnorm": 0.1},
        "global_clipnorm": {"global_clipnorm": 0.1},
        "clipvalue": {"clipvalue": 0.01},
        "weight_decay": {"weight_decay": 0.1},
        "EMA": {"use_ema": True},
        "EMA, overwriting every 2 steps": overwriting,
        "accumulation over 2 steps": {"gradient_accumulation_steps": 2},
        "accumulation over 3 steps": {"gradient_accumulation_steps": 3},
        "loss_scale_factor": {"loss_scale_factor": 8.0},
    }
    together: dict[str, dict[str, Any]] = {
        "clipnorm and decay": {"clipnorm": 0.1, "weight_decay": 0.1},
        "clipvalue and EMA": {"clipvalue": 0.01, "use_ema": True},
        "accumulation over 3 steps, with a loss_scale_factor": scaled_sums,
    }
    options: dict[str, dict[str, Any]] = {
        **(together if briefly else alone),
        "clipping, decay, EMA and accumulation at once": {
            **{"global_clipnorm": 0.1, "weight_decay": 0.1, **overwriting},
            "gradient_accumulation_steps": 2,
        },
    }
    for name, arguments in options.items():
        yield Case(name, trained_by(functools.partial(adam, **arguments)))
    schedules = optimizers.schedules
    decay = functools.partial(schedules.ExponentialDecay, 0.05, 2, 0.5)
    warm_up = {"warmup_target": 0.05, "warmup_steps": 2}
    cosine = functools.partial(schedules.CosineDecay, 0.0, 4, **warm_up)
    yield Case("learning rate schedule", trained_by(lambda: optimizers.Adam(decay())))
    yield Case(
        "learning rate schedule with a warm-up",
        trained_by(lambda: optimizers.Adam(cosine())),
    )
    yield from _loss_scales()


def _loss_scales() -> Iterator[Case]:
    """Yield loss scales and half floats."""

    def scaled(optimizer, **arguments):
        return optimizers.LossScaleOptimizer(optimizer, **arguments)

    accumulated = {"gradient_accumulation_steps": 2}
    for name, arguments in {"": {}, " over accumulation": accumulated}.items():
        yield Case(
            f"LossScaleOptimizer{name}, NaN on one replica",
            lambda arguments=arguments: compiled(
                mlp(models.NotANumberAtZero),
                scaled(adam(**arguments), initial_scale=2.0**10),
            ),
            data=models.with_a_row_of_zeros,
        )
    yield Case(
        # Both are conditions on TensorFlow, where one in the other may not synchronize.
        "LossScaleOptimizer over EMA, overwriting every 2 steps",
        trained_by(lambda: scaled(adam(use_ema=True, ema_overwrite_frequency=2))),
    )
    yield Case(
        "LossScaleOptimizer, a scale that grows",
        trained_by(lambda: scaled(adam(), initial_scale=8.0, dynamic_growth_steps=2)),
    )
    yield Case(
        "mixed_float16",
        # A replica's gradients, of means over its rows alone, are larger than those
        # of the batch before they are weighted. From this scale neither overflows.
        trained_by(lambda: scaled(adam(), initial_scale=2.0**8)),
        policy="mixed_float16",
        **FLOAT16,
    )
    yield Case("mixed_bfloat16", compiled, policy="mixed_bfloat16", **BFLOAT16)
