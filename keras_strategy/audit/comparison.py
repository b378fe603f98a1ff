"""Recording and comparison of what replicas and one device compute in a step."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.audit.report import ComparedValue
from keras_strategy.audit.snapshot import find_objects
from keras_strategy.core.context import (
    current_replica,
    distributed_replica,
    thread_state,
)
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import RowRange, StepRecorder, active_recorder

# Tolerances relative to the largest entry. Exact programs differ by 1e-5 at most, since
# their sums have another order; logs and losses by 3e-7.
TOLERANCES = {"output": 1e-4, "loss": 1e-4, "log": 1e-4, "prediction": 1e-4}
TOLERANCES |= {"gradient": 1e-3, "state": 1e-3}
# Gradients are compared relative to this fraction of the step's largest one, at least.
_SMALL_GRADIENT = 1e-2
# Numbers smaller than this are compared absolutely.
_SMALL_NUMBER = 1e-2
# Stands for the step, which makes the outermost calls.
STEP = object()


@dataclass
class Call:
    """A finished call of a layer, operation or loss; None stands for non-tensors."""

    callee: Any
    number: int  # how often it was called before in the step; negative: `add_loss`
    inputs: list[np.ndarray | None]
    outputs: list[np.ndarray | None]
    caller: Any  # the object whose call made this one, or None


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
    """Records gradients and losses and, on request, the results of all calls."""

    def __init__(self, records_calls: bool = False):
        super().__init__()
        self.sides: dict[int, Side] = {}  # by replica index; -1 of one device
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
                add_loss = keras.Layer.add_loss

                def add(layer, loss):
                    if (side := self._side()) is not None:
                        parts = -1 - len(side.calls), [], _host_copies(loss), None
                        side.calls.append(Call(layer, *parts))
                    add_loss(layer, loss)

                stack.callback(setattr, keras.Layer, "add_loss", add_loss)
                keras.Layer.add_loss = add
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


def difference(a: Any, b: Any, scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest entry, or to `scale`."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return float("inf")
    if a.dtype.kind in "OSU" or b.dtype.kind in "OSU":
        return float(not (a == b).all())
    a, b = (x if x.dtype.kind == "c" else x.astype("float64") for x in (a, b))
    with np.errstate(all="ignore"):
        apart = np.where((a == b) | ((a != a) & (b != b)), 0.0, np.abs(a - b))
        largest = float(np.max(apart, initial=0.0))
        sizes = np.abs(b)[np.isfinite(b)]
    if largest == 0:
        return 0.0
    size = max(float(np.max(sizes, initial=0.0)), scale)
    # Not a number where the other has one.
    return largest / size if np.isfinite(largest) and size > 0 else float("inf")


def compare_losses(
    replicas: CallRecorder, device: CallRecorder
) -> Iterator[ComparedValue]:
    """Compare the values of `compute_loss`, as means of the local rows'."""
    sides = [side for index, side in replicas.sides.items() if index >= 0]
    if not sides:  # on one device, too
        sides = list(replicas.sides.values())
    elif sum(s.weight for s in sides) < 1 - 1e-6:
        return  # the other workers have the other rows
    for number, loss in enumerate(device.sides.get(-1, Side()).losses):
        if sides and all(number < len(side.losses) for side in sides):
            # A mean, since a loss may have one number for each row.
            parts = (np.mean(s.losses[number]) * np.float64(s.weight) for s in sides)
            apart = difference(sum(parts), np.mean(loss), _SMALL_NUMBER)
            name = "the loss" if number == 0 else f"loss {number + 1} of the step"
            yield ComparedValue("loss", name, apart, TOLERANCES["loss"])


def compare_gradients(
    replicas: CallRecorder, device: CallRecorder
) -> Iterator[ComparedValue]:
    """Compare the gradients of each call of `optimizer.apply`."""
    counts = len(replicas.applied), len(device.applied)
    if counts[0] != counts[1]:
        what = f"gradients applied {counts[0]} times, on one device {counts[1]} times"
        yield ComparedValue("gradient", what, float("inf"), TOLERANCES["gradient"])
    for ours, theirs in zip(replicas.applied, device.applied, strict=False):
        ours_, theirs_ = (
            [None if g is None else host_copy(ops.convert_to_tensor(g)) for g in x]
            for x in (ours.gradients, theirs.gradients)
        )
        sizes = (np.max(np.abs(x), initial=0) for x in theirs_ if x is not None)
        largest = float(max(sizes, default=0))
        scale = _SMALL_GRADIENT * largest if np.isfinite(largest) else 0.0
        for number, (a, b) in enumerate(zip(ours_, theirs_, strict=False)):
            if a is None and b is None:
                continue
            absent = a is None or b is None
            apart = float("inf") if absent else difference(a, b, scale)
            named = (theirs.variables or [])[number : number + 1]
            name = named[0].path if named else f"gradient {number}"
            yield ComparedValue("gradient", name, apart, TOLERANCES["gradient"])


def compare_states(
    variables: Sequence[Any],
    before: Sequence[np.ndarray | None],
    replicas: Sequence[np.ndarray | None],
    device: Sequence[np.ndarray | None],
    skip: Sequence[Any] = (),
) -> Iterator[ComparedValue]:
    """Compare how a step has changed variables."""
    skipped = {id(variable) for variable in skip}
    for variable, old, ours, theirs in zip(
        variables, before, replicas, device, strict=True
    ):
        if old is None or ours is None or theirs is None or id(variable) in skipped:
            continue
        if theirs.dtype.kind in "iub":
            apart = float(not np.array_equal(ours, theirs))
        else:
            old, ours, theirs = (x.astype("float64") for x in (old, ours, theirs))
            # A change by rounding alone has no size of its own.
            sizes = np.abs(theirs)[np.isfinite(theirs)]
            scale = 1e-4 * float(np.max(sizes, initial=0.0))
            with np.errstate(invalid="ignore"):
                apart = difference(ours - old, theirs - old, scale)
        yield ComparedValue("state", variable.path, apart, TOLERANCES["state"])


def compare_outputs(
    kind: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> Iterator[ComparedValue]:
    """Compare logs or predictions by name."""
    kind = "prediction" if kind == "predict" else "log"
    for name, value in theirs.items():
        apart = float("inf")
        if isinstance(ours.get(name), list):
            forms = _joined_forms(ours[name])
            apart = min(difference(form, value, _SMALL_NUMBER) for form in forms)
        elif name in ours:
            apart = difference(ours[name], value, _SMALL_NUMBER)
        yield ComparedValue(kind, name, apart, TOLERANCES[kind])


def _joined_forms(parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield what the replicas' results may stand for."""
    if len({part.shape for part in parts}) == 1:
        yield sum(parts[1:], parts[0])
        yield np.mean(parts, axis=0)
        if all(np.array_equal(parts[0], part) for part in parts[1:]):
            yield parts[0]
    if parts[0].ndim > 0:
        yield np.concatenate(parts)


def find_first_difference(
    replicas: CallRecorder, device: CallRecorder
) -> tuple[Call | None, Any]:
    """Return the first call whose result differs, and in whose code its input did."""
    # Calls are in the order in which they end, so inner ones come first. If the inputs
    # of a call differ already, it was in the code of an outer object, which called it.
    calls = device.sides.get(-1, Side()).calls
    # A layer that adds another loss is the cause only if no result differs.
    calls = sorted(calls, key=lambda call: call.number < 0)
    sides = [side for index, side in replicas.sides.items() if index >= 0]
    theirs = [{(id(c.callee), c.number): c for c in side.calls} for side in sides]

    def differs(call: Call, part: str) -> bool:
        for number, whole in enumerate(getattr(call, part)):
            found = [calls.get((id(call.callee), call.number)) for calls in theirs]
            values = [getattr(c, part)[number : number + 1] for c in found if c]
            if whole is None or not values or len(values) < len(sides):
                continue
            parts = [value[0] if value else None for value in values]
            present = [part for part in parts if part is not None]
            if len(present) == len(sides) and _parts_differ(present, whole, sides):
                return True
        return False

    for call in calls:
        if not differs(call, "outputs"):
            continue
        origin, outer = None, call
        while outer is not None and differs(outer, "inputs"):
            origin = STEP if outer.caller is None else outer.caller
            outer = next((c for c in calls if c.callee is origin), None)
        return call, origin
    return None, None


def _parts_differ(
    parts: Sequence[np.ndarray], whole: np.ndarray, sides: Sequence[Side]
) -> bool:
    """Return True if the replicas' parts of an array are not those of one device's."""
    tolerance, pairs = TOLERANCES["output"], []
    for part, side in zip(parts, sides, strict=True):
        if side.rows is None or part.ndim != whole.ndim:
            return False
        if side.weight == 0:
            continue
        begin, count, total = side.rows.begin, side.rows.count, side.rows.total
        for axis, size in enumerate(part.shape):
            all_size = whole.shape[axis]
            per_row = all_size // total
            rest = part.shape[:axis] + part.shape[axis + 1 :]
            others = whole.shape[:axis] + whole.shape[axis + 1 :]
            sizes = per_row * count, per_row * total
            if per_row and (size, all_size) == sizes and rest == others:
                end = (begin + count) * per_row
                local = whole.take(range(begin * per_row, end), axis)
                pairs.append((part, local))
                break
        else:
            if part.shape != whole.shape:
                return False
            pairs.append((part, whole))
    scale = np.max(np.abs(whole), initial=0.0) if whole.dtype.kind in "fiu" else 0.0
    if not any(difference(a, b, scale) > tolerance for a, b in pairs):
        return False
    if whole.ndim > 0:
        return True
    # One number may be a mean over rows.
    mean = sum(p * side.weight for p, side in zip(parts, sides, strict=True))
    return difference(mean, whole) > tolerance


def find_metric(objects: Sequence[Any], name: str) -> Any:
    """Return the innermost metric of a variable's path or a log's name, or None."""

    def is_log(metric: Any) -> bool:
        # Keras puts the name of a model's output before that of a metric.
        return "/" not in name and f"_{name}".endswith(f"_{metric.name}")

    def rank(metric: Any) -> tuple:
        # Keras's containers of metrics have these variables, too.
        parts = len(metric.variables), len(find_objects([metric]))
        return -len(metric.name) * is_log(metric), *parts

    metrics = [
        part
        for part in objects
        if isinstance(part, keras.metrics.Metric)
        and (is_log(part) or any(v.path == name for v in part.variables))
    ]
    return min(metrics, key=rank, default=None)
