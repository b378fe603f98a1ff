"""Recording of what the replicas of a step compute, and what one device computes."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import keras
import numpy as np
from keras import tree

from keras_strategy.core.context import (
    current_replica,
    distributed_replica,
    thread_state,
)
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_recorder import StepRecorder, active_recorder
from keras_strategy.core.step_state import RowRange


@dataclass
class Call:
    """A finished call of a layer, operation or loss; arrays are None for non-tensors.

    Attributes:
        callee: The called object.
        number: The number of its earlier calls in the step.
        inputs: The tensors in its arguments.
        outputs: The tensors in its result.
        caller: The call inside which it was made, or None.
        caller_of: The callee of `caller`.
    """

    callee: Any
    number: int
    inputs: list[np.ndarray | None]
    outputs: list[np.ndarray | None]
    caller: Any


@dataclass
class Side:
    """Results of one replica, or of one device, in a step."""

    rows: RowRange | None = None
    weight: float = 1.0
    losses: list[np.ndarray] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    callers: list[Any] = field(default_factory=list)


class CallRecorder(StepRecorder):
    """Records gradients and losses and, on request, the results of all calls.

    Attributes:
        sides: By replica index; the key of one device is -1.
    """

    def __init__(self, records_calls: bool = False):
        super().__init__()
        self.sides: dict[int, Side] = {}
        self._records_calls = records_calls

    def _side(self) -> Side | None:
        """Return the side that this thread computes; None for a dry run or a trace."""
        if thread_state.dry_run is not None or get_engine().is_tracing():
            return None
        context, replica = current_replica(), cast("Any", distributed_replica())
        if active_recorder(context and context.strategy) is not self:
            return None
        side = self.sides.setdefault(-1 if replica is None else replica.index, Side())
        if replica is not None:
            step = replica.step
            if step.rows is not None:
                begin, count, total = (
                    int(x) for x in (step.rows.begin, step.rows.count, step.rows.total)
                )
                side.rows = RowRange(begin, count, total)
            side.weight = 1.0 if step.row_weight is None else float(step.row_weight)
        return side

    @contextlib.contextmanager
    def installed(self, model: Any, objects: Iterable[Any]) -> Iterator[None]:
        """Context manager in which losses and, on request, all calls are recorded."""
        if not get_engine().audit.records_steps:
            yield
            return
        with contextlib.ExitStack() as stack:
            if model is not None:
                _replace(stack, vars(model), "compute_loss", self._loss_of(model))
            if self._records_calls:
                original = keras.Operation.__call__

                @functools.wraps(original)
                def call(operation, *args, **kwargs):
                    return self._recorded_call(operation, original, *args, **kwargs)

                stack.callback(setattr, keras.Operation, "__call__", original)
                keras.Operation.__call__ = call
                for loss in objects:
                    if isinstance(loss, keras.losses.Loss):
                        method = type(loss).call
                        bound = functools.partial(self._recorded_call, loss, method)
                        _replace(stack, vars(loss), "call", bound)
            yield

    def _loss_of(self, model: Any) -> Callable[..., Any]:
        compute_loss = model.compute_loss

        @functools.wraps(compute_loss)
        def recorded(*args, **kwargs):
            loss, side = compute_loss(*args, **kwargs), self._side()
            if side is not None and loss is not None:
                side.losses.append(host_copy(loss))
            return loss

        return recorded

    def _recorded_call(self, callee, original, *args, **kwargs):
        side = self._side()
        if side is None:
            return original(callee, *args, **kwargs)
        inputs = _host_copies((args, kwargs))
        caller = side.callers[-1] if side.callers else None
        side.callers.append(callee)
        try:
            result = original(callee, *args, **kwargs)
        finally:
            side.callers.pop()
        number = side.counts[id(callee)]
        side.counts[id(callee)] += 1
        outputs = _host_copies(result)
        side.calls.append(Call(callee, number, inputs, outputs, caller))
        return result


def _replace(
    stack: contextlib.ExitStack, attributes: dict[str, Any], name: str, value: Any
) -> None:
    """Set an instance attribute until the stack is closed."""
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name)
    attributes[name] = value


def _host_copies(structure: Any) -> list[np.ndarray | None]:
    return [host_copy(x) for x in tree.flatten(structure)]


def host_copy(x: Any) -> Any:
    """Return a copy of a tensor as a NumPy array; None for anything else."""
    if isinstance(x, keras.Variable):
        x = x.value
    return get_engine().audit.host_copy(x)
