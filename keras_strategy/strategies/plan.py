"""Prediction of a training step's memory and traffic, before anything is trained."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.protocols import PlannedChoice, StepTrace
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.keras_patches.installation import install_for
from keras_strategy.keras_patches.variables_optimizers import byte_count, stored_dtype

_CHOICES = (None, "optimizer", "parameters")


@dataclass(frozen=True)
class Plan:
    """Predictions of a training step, as returned by `plan`. Prints as a table.

    Attributes:
        title: What was planned.
        choices: A prediction for each `shard` option. Sizes are in bytes.
        cheapest: The choice that fits and sends the fewest bytes, of equal ones that
            with the lowest peak; None if nothing fits.
    """

    title: str
    choices: tuple[PlannedChoice, ...]
    cheapest: PlannedChoice | None

    def __str__(self) -> str:
        names = [name for name in vars(self.choices[0]) if name != "note"]
        rows = [[name.replace("_", " ") for name in names]]
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
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def plan(
    build: Callable[[], keras.Model],
    batch_size: int,
    devices: int,
    shard: str | None = "all",
    memory: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Predict the memory and traffic of a training step, before anything is trained.

    No tensor of the model takes memory, so it may be larger than a device. The bytes of
    variables equal those of a strategy's `memory_report`. The time is that of
    communication alone. ZeRO's stages (Rajbhandari et al., 2020,
    https://arxiv.org/abs/1910.02054) 1 and 3 are "optimizer" and "parameters".

    Args:
        build: A function without arguments that returns a new, compiled model whose
            input shape is known. It must not enter a strategy's scope.
        batch_size: Rows of a global batch. The fullest device has
            `batch_size / devices` of them, rounded up.
        devices: The number of replicas, each with one device.
        shard: One of the strategies' options, or "all" for a line of each.
        memory: Bytes of a device's memory.
        bandwidth: Bytes that a device sends in a second.

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


    plan = ks.plan(build, batch_size=64, devices=8, bandwidth=10e9)
    print(plan)
    assert plan.choices[0].parameters == 4 * 513 * 512
    ```
    """
    for name, value in (("batch_size", batch_size), ("devices", devices)):
        _check(name, value, isinstance(value, int) and value > 0, "an integer from 1")
    for name, value in (("memory", memory), ("bandwidth", bandwidth)):
        is_valid = value is None or (isinstance(value, int | float) and value > 0)
        _check(name, value, is_valid, "a positive number of bytes, or None")
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
    return plan_step(None, build, batch_size, devices, shard, memory, bandwidth)


def plan_step(
    model: Any,
    build: Callable[[], Any] | None,
    rows: int,
    devices: int,
    shard: str | None,
    memory: float | None,
    bandwidth: float | None,
) -> Plan:
    """Plan a new model, or one that exists and is not used afterwards."""
    install_for(2)  # the patches that mark slots
    planner = get_engine().planner
    config = None if model is None else model.optimizer.get_config()

    def predict() -> Plan:
        known: Any = model if build is None else build()
        _check_model(known)
        weights, optimizer = known.trainable_variables, known.optimizer
        if config is not None:
            weights = list(map(_copy, weights))
            optimizer = type(optimizer).from_config(config)
        if not optimizer.built:
            optimizer.build(weights)
        trained = {id(variable) for variable in known.trainable_variables}
        others = sum([byte_count(v) for v in known.variables if id(v) not in trained])
        trace, note = _trace(known, weights, optimizer, -(-rows // devices))
        choices = []
        for option in _CHOICES if shard == "all" else (shard,):
            reason = option and get_engine().sharding_unsupported_reason(option)
            if reason:
                reason = f"shard={option!r} is unsupported: {reason}"
                choices.append(PlannedChoice(option, fits=False, note=reason))
                continue
            choice = planner.predict(
                *(weights, optimizer.variables, optimizer, devices),
                *(option if devices > 1 else None, trace),
            )
            choice = replace(choice, shard=option, others=others)
            choices.append(_complete(choice, trace, note, memory, bandwidth))
        fitting = [choice for choice in choices if choice.fits is not False]
        cheapest = min(fitting, key=lambda c: (c.sent, c.peak or 0), default=None)
        title = (
            f"Bytes on each of {devices} devices in a step of {rows} rows, for the "
            f"model '{known.name}' on {keras.backend.backend()}:"
        )
        return Plan(title, tuple(choices), cheapest)

    with preserve_random_states():
        return planner.without_memory(predict)


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


def _copy(variable: Any) -> Any:
    """Return a variable of the same path, shape and dtype, without a value."""
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        dtype = stored_dtype(variable)
        copy = keras.Variable("zeros", variable.shape, dtype, name=name)
    copy.overwrite_with_gradient = variable.overwrite_with_gradient
    return copy


def _trace(
    model: Any, weights: Any, optimizer: Any, rows: int
) -> tuple[StepTrace | None, str]:
    """Return the trace of a replica's step, or why there is none."""

    def zeros(x: Any) -> Any:
        return keras.ops.zeros(x.shape, stored_dtype(x))

    def rows_of(x: Any) -> Any:
        if None in x.shape[1:]:
            raise ValueError(
                "Expected an input shape with only the number of rows unknown. "
                f"Received: shape={x.shape}"
            )
        return keras.ops.zeros((rows, *x.shape[1:]), x.dtype)

    def forward(values: Any) -> Iterator[Any]:
        """Yield the outputs, and the loss."""
        pairs = [*zip(model.trainable_variables, values, strict=True), *others]
        with keras.StatelessScope(pairs):
            outputs = loss = model(inputs, training=True)
            yield outputs
            # The targets of most losses are like outputs, or are classes.
            for like in (keras.ops.zeros_like, classes_like):
                targets = tree.map_structure(like, outputs)
                with contextlib.suppress(Exception):
                    loss = model.compute_loss(inputs, targets, outputs)
                    break
            yield loss

    def classes_like(x: Any) -> Any:
        return keras.ops.zeros(x.shape[:-1], "int32")

    if isinstance(model, keras.Sequential):
        symbolic = model.inputs[0]
    elif getattr(model, "inputs", None):
        symbolic = model.input
    else:
        shape = (model.get_build_config() or {}).get("input_shape")
        symbolic = keras.KerasTensor(shape, model.compute_dtype)
    try:
        inputs = tree.map_structure(rows_of, symbolic)
        others = [(v, zeros(v)) for v in model.non_trainable_variables]
        apply = lambda gradients: optimizer.apply(gradients, weights)  # noqa: E731
        values = list(map(zeros, weights))
        return get_engine().planner.trace_step(forward, values, apply), ""
    except Exception as error:  # a layer may need values
        text = f"The activations are unknown: {type(error).__name__}: {error}"
        return None, text.partition("\n")[0]


def _complete(
    choice: PlannedChoice,
    trace: StepTrace | None,
    note: str,
    memory: float | None,
    bandwidth: float | None,
) -> PlannedChoice:
    """Return a choice with all variables in its peak, compared with the memory."""
    if choice.fits is False:
        return choice
    variables, peak = choice.parameters + choice.slots + choice.others, None
    if choice.peak is not None:
        peak = variables + choice.peak
    least = variables + choice.gradients if peak is None else peak
    fits = None
    if memory is not None and (peak is not None or least > memory):
        fits = least <= memory
    return replace(
        choice,
        activations=None if trace is None else trace.activations,
        peak=peak,
        communication_seconds=None if bandwidth is None else choice.sent / bandwidth,
        fits=fits,
        note=note or choice.note,
    )
