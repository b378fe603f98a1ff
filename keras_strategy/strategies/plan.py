"""Prediction of a training step's memory, before anything is trained."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core import context
from keras_strategy.core.protocols import PlannedStep
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.keras_patches.installation import install_for
from keras_strategy.keras_patches.internals import byte_count

_CHOICES = (None, "optimizer", "parameters")


@dataclass(frozen=True)
class PlannedChoice:
    """Bytes on the fullest device with one `shard` option.

    Attributes:
        shard: The strategy's `shard` option.
        parameters: The trainable weights. Their gradients take as many bytes.
        slots: The optimizer's variables.
        others: The model's other variables.
        peak: The most bytes at once in a step, or None if it was not measured.
        fits: False if the memory is too small or `shard` is unsupported; None if
            unknown.
        note: Why `shard` is unsupported, or the peak was not measured.
    """

    shard: str | None
    parameters: int = 0
    slots: int = 0
    others: int = 0
    peak: int | None = None
    fits: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Predictions of a training step, as returned by `plan`. Prints as a table.

    Attributes:
        title: What was planned.
        choices: A prediction for each `shard` option. Sizes are in bytes.
        cheapest: The first choice that is not known to exceed the memory, which shards
            the least of them; None if nothing fits.
    """

    title: str
    choices: tuple[PlannedChoice, ...]
    cheapest: PlannedChoice | None

    def __str__(self) -> str:
        names = ["shard", "parameters", "slots", "others"]
        for name in ("peak", "fits"):
            if any(getattr(choice, name) is not None for choice in self.choices):
                names.append(name)
        rows = [names]
        for choice in self.choices:
            values = [getattr(choice, name) for name in names[1:]]
            rows.append([str(choice.shard), *map(_text, values)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.title]
        for row in rows:
            cells = [text.rjust(w) for text, w in zip(row, widths, strict=True)]
            lines.append("  ".join(cells))
        lines += dict.fromkeys([c.note for c in self.choices if c.note])
        best = "nothing" if self.cheapest is None else f"shard={self.cheapest.shard!r}"
        return "\n".join([*lines, f"Cheapest that fits: {best}"])


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}"


def plan(
    build: Callable[[], keras.Model],
    batch_size: int,
    devices: int,
    shard: str | None = "all",
    memory: float | None = None,
) -> Plan:
    """Predict the memory of a training step, before anything is trained.

    No tensor of the model takes memory, so it may be larger than a device. The bytes of
    variables equal those of a strategy's `memory_report`. The peak is measured: on JAX
    by the compiler, where this process has as many devices; on torch on fake tensors,
    with `shard=None`. ZeRO's stages (Rajbhandari et al., 2020,
    https://arxiv.org/abs/1910.02054) 1 and 3 are "optimizer" and "parameters".

    Args:
        build: A function without arguments that returns a new, compiled model whose
            input shape is known. It must not enter a strategy's scope.
        batch_size: Rows of a global batch. The fullest device has
            `batch_size / devices` of them, rounded up.
        devices: The number of replicas, each with one device.
        shard: One of the strategies' options, or "all" for a line of each.
        memory: Bytes of a device's memory.

    Returns:
        A `Plan`, which prints as a table.

    Raises:
        RuntimeError: If it is called in the scope of a strategy.
        TypeError: If `build` is no function or returns no model.
        ValueError: If an argument is invalid, or the model is not compiled or built.

    Example:

    ```python
    import keras
    import keras_strategy as ks


    def build():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
        model.compile("adam", "mse")
        return model


    plan = ks.plan(build, batch_size=64, devices=8, memory=16e9)
    print(plan)
    assert plan.choices[0].parameters == 4 * 513 * 512
    ```
    """
    for name, value in (("batch_size", batch_size), ("devices", devices)):
        _check(name, value, isinstance(value, int) and value > 0, "an integer from 1")
    is_valid = memory is None or (isinstance(memory, int | float) and memory > 0)
    _check("memory", memory, is_valid, "a positive number of bytes, or None")
    is_choice = shard in (*_CHOICES, "all")
    _check("shard", shard, is_choice, "None, 'optimizer', 'parameters' or 'all'")
    if context.has_strategy():
        raise RuntimeError(
            "`plan` must be called outside of scopes, since a strategy creates "
            "variables on its devices. Received a call in the scope of "
            f"{context.get_strategy()!r}"
        )
    if isinstance(build, keras.Model) or not callable(build):
        raise TypeError(
            "Argument `build` must be a function without arguments that returns a "
            f"Keras model, such as `lambda: make_model()`. Received: build={build!r}"
        )
    install_for(2)  # the patches that mark slots
    planner = get_engine().planner

    def predict() -> Plan:
        model = build()
        _check_model(model)
        weights, optimizer = model.trainable_variables, model.optimizer
        if not optimizer.built:
            optimizer.build(weights)
        trained = {id(variable) for variable in weights}
        others = sum([byte_count(v) for v in model.variables if id(v) not in trained])
        step = PlannedStep(
            _loss_of(model),
            weights,
            model.non_trainable_variables,
            functools.partial(_inputs_of, model),
            -(-batch_size // devices),
            optimizer,
            devices,
        )
        choices = []
        for option in _CHOICES if shard == "all" else (shard,):
            applied = replace(step, shard=option if devices > 1 else None)
            choices.append(_choose(option, applied, others, memory))
        cheapest = next((c for c in choices if c.fits is not False), None)
        title = (
            f"Bytes on each of {devices} devices in a step of {batch_size} rows, for "
            f"the model '{model.name}' on {keras.backend.backend()}:"
        )
        return Plan(title, tuple(choices), cheapest)

    with preserve_random_states():
        return planner.without_memory(predict)


def _choose(
    option: str | None, step: PlannedStep, others: int, memory: float | None
) -> PlannedChoice:
    engine, planner = get_engine(), get_engine().planner
    reason = option and engine.sharding_unsupported_reason(option)
    if reason:
        reason = f"shard={option!r} is unsupported: {reason}"
        return PlannedChoice(option, fits=False, note=reason)
    try:
        parameters, slots = planner.local_bytes(step)
    except ValueError as error:
        return PlannedChoice(option, fits=False, note=str(error))
    stored, peak, fits, note = parameters + slots + others, None, None, ""
    try:
        measured = planner.measure_step(step)
    except Exception as error:  # a layer may need values
        measured = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(measured, str):
        note = f"The peak is unknown: {measured}"
        least = stored + parameters  # as many bytes as the gradients take
    else:
        peak = least = stored + measured
    if memory is not None and (peak is not None or least > memory):
        fits = least <= memory
    return PlannedChoice(option, parameters, slots, others, peak, fits, note)


def _check(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(
            f"Argument `{name}` must be {expected}. Received: {name}={value!r}"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `build` must return a Keras model. Received a function that "
            f"returns {model!r}"
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        raise ValueError(
            f"`build` must return a compiled model whose input shape is known. "
            f"Received: the model '{model.name}' with optimizer={optimizer!r} and "
            f"built={model.built}. Call `model.compile`, and begin the model with "
            "`keras.Input` or call `model.build(input_shape)`."
        )


def _inputs_of(model: Any, rows: int) -> Any:
    """Return symbolic inputs of a model with a number of rows."""
    if isinstance(model, keras.Sequential):
        symbolic = model.inputs[0]
    elif getattr(model, "inputs", None):
        symbolic = model.input
    else:
        shape = (model.get_build_config() or {}).get("input_shape")
        symbolic = keras.KerasTensor(shape, model.compute_dtype)

    def with_rows(x: Any) -> Any:
        if None in x.shape[1:]:
            raise ValueError(
                "Expected an input shape with only the number of rows unknown. "
                f"Received: shape={x.shape}"
            )
        return keras.KerasTensor((rows, *x.shape[1:]), x.dtype)

    return tree.map_structure(with_rows, symbolic)


def _loss_of(model: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Return a function of variables' values and inputs, for the loss and outputs."""

    def loss_of(values: Any, states: Any, inputs: Any) -> tuple[Any, Any]:
        pairs = zip(model.trainable_variables, values, strict=True)
        others = zip(model.non_trainable_variables, states, strict=True)
        with keras.StatelessScope([*pairs, *others]):
            outputs = model(inputs, training=True)
            # The targets of most losses are like outputs, or are classes.
            for like in (ops.zeros_like, lambda x: ops.zeros(x.shape[:-1], "int32")):
                targets = tree.map_structure(like, outputs)
                with contextlib.suppress(Exception):
                    return model.compute_loss(inputs, targets, outputs), outputs
            return sum(map(ops.sum, tree.flatten(outputs))), outputs

    return loss_of
