"""Audit of a step: run it on several replicas and on one device, and compare.

Both start from the same state with the same few rows, and all state is restored. This
knows no kinds of user code: whatever differs in gradients, changes of variables, logs
and predictions is found. Then the outputs of all calls are recorded to name the first
that differs. Three causes are not findings: other numbers by rounding, which steps can
make large, so a step on slightly changed weights must differ less; half precision,
which the audit replaces by float32; and local batch statistics, which are declared.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_strategy.audit import comparison
from keras_strategy.audit.comparison import CallRecorder, host_copy
from keras_strategy.audit.report import AuditReport, ComparedValue
from keras_strategy.audit.snapshot import (
    Snapshot,
    find_user_code,
    is_keras,
    read_settings,
)
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.core.step_state import (
    override,
    recording_replicas,
    thread_recording,
)
from keras_strategy.errors import logger
from keras_strategy.keras_patches.layers import compute_in_float32
from keras_strategy.keras_patches.random import global_generator, set_global_generator
from keras_strategy.options import GLOBAL
from keras_strategy.training.random import settings
from keras_strategy.training.variable_sync import is_sync_on_read

# Rows for each replica; one more makes them uneven.
ROWS_PER_REPLICA = 3
# Relative changes of weights that stand for rounding, and how often they are drawn.
_NUDGE, _NUDGES = 3e-7, 3

# In a step, what comes first causes the rest.
_ORDER = "loss", "gradient", "state", "prediction", "log"

Step = Callable[[], dict[str, Any]]
"""Runs a step and returns its logs or predictions by name, as NumPy arrays."""


class StepAudit:
    """Audit of a step of kind "train", "test", "predict" or "run"."""

    # `roots` are the objects whose state the step may change.

    # Runs one device's step on the rows of this worker, if there are others.
    on_own_rows: Step | None = None

    def __init__(
        self,
        strategy: Strategy,
        kind: str,
        on_replicas: Step,
        on_device: Step,
        model: Any,
        roots: Sequence[Any],
    ):
        self._strategy, self._kind, self._model = strategy, kind, model
        self._roots = list(roots)
        self._on_replicas, self._on_device = on_replicas, on_device
        # Unseeded draws must be equal in both steps.
        self._callers_generator = global_generator()
        self._generator = self._callers_generator or keras.random.SeedGenerator(1)
        self._snapshot = Snapshot(strategy, [*roots, self._generator])
        self._before = self._snapshot.values()
        objects = self._snapshot.objects
        self._layers = [x for x in objects if isinstance(x, keras.Layer)]
        halves = "float16", "bfloat16"
        self._batch_statistics = GLOBAL if kind == "run" else None
        self._is_half = any(x.compute_dtype in halves for x in self._layers)

    def run(self, report: AuditReport) -> None:
        """Fill a report."""
        # First what needs no other worker, as an error may be of one worker alone.
        steps = [self._on_device, self._on_replicas]
        if self.on_own_rows is not None:
            steps.insert(0, self.on_own_rows)
        results: list[_Result] = []
        for step in steps:
            try:
                results.append(self._run(step))
                failures = results[-1].recorder.failures
                report.failure = failures[0] if failures else ""
            except Exception as error:
                logger.debug("A step of an audit failed.", exc_info=True)
                report.failure = f"{type(error).__name__}: {error}"
            report.failure = self._agree(report.failure)
            if report.failure:
                return
        *_, device, replicas = results
        report.values += self._compare(replicas, device)
        if self._agree(report.differs):
            self._widen_by_rounding(report, device)
        if self._agree(report.differs):
            self._locate(report)
            message = self._agree(report.message if report.differs else "")
            if not report.differs:
                report.failure = message

    def _agree(self, finding: Any) -> Any:
        """Return what a worker has found, the same on all: they run the same steps."""
        cluster = self._strategy.extended.cluster
        if cluster is None:
            return finding
        return next(filter(None, cluster.exchange("audit", finding)), finding)

    def _run(
        self, step: Step, records_calls: bool = False, nudge: int | None = None
    ) -> "_Result":
        recorder, snapshot = CallRecorder(records_calls), self._snapshot
        adapter, strategy = get_engine().audit, self._strategy
        try:
            if nudge is not None:
                self._nudge_weights(nudge)
            with (
                preserve_random_states(),
                adapter.preserve_generators(),
                # Differences that are declared.
                override(strategy, "_batch_statistics", self._batch_statistics),
                override(settings, "exact", True),
                compute_in_float32(self._layers),
                recorder.installed(self._model, snapshot.objects),
            ):
                set_global_generator(self._generator)
                if step is self.on_own_rows:
                    self._run_without_collectives(step)
                    return _Result(recorder, {}, [], [])
                if step is not self._on_replicas:
                    if adapter.records_steps:
                        step = override(thread_recording, "recorder", recorder)(step)
                    result = adapter.run_on_device(strategy, step, snapshot.variables)
                    outputs, values = result
                    values = snapshot.values() if values is None else values
                    plain = read_settings(self._roots)
                    return _Result(recorder, outputs, values, [], plain)
                recording = recording_replicas(strategy, recorder)
                with recording if adapter.records_steps else contextlib.nullcontext():
                    outputs = step()
                return _Result(
                    recorder,
                    outputs,
                    snapshot.values(),
                    snapshot.differing_components(),
                    read_settings(self._roots),
                )
        finally:
            set_global_generator(self._callers_generator)
            snapshot.restore()

    def _run_without_collectives(self, step: Step) -> None:
        """Run one device's step on rows that differ between workers."""
        adapter, variables = get_engine().audit, self._snapshot.variables
        if not adapter.records_steps:  # it reads only values that it has got before
            adapter.run_on_device(self._strategy, step, variables)
            return
        components = self._strategy.extended.group.components
        local = [(v, components(v)[0]) for v in variables if is_sync_on_read(v)]

        def run():
            with keras.StatelessScope(state_mapping=local):
                return step()

        run = override(thread_recording, "recorder", CallRecorder())(run)
        adapter.run_on_device(self._strategy, run, variables)

    def _compare(self, replicas: "_Result", device: "_Result") -> list[ComparedValue]:
        variables = self._snapshot.variables
        states = replicas.state, device.state
        skip = ()
        if self._kind == "run":  # of metrics only the result counts
            metrics = (x for x in self._snapshot.objects if isinstance(x, keras.Metric))
            skip = [variable for metric in metrics for variable in metric.variables]
        tolerance = comparison.TOLERANCES["state"]
        values = [
            *comparison.compare_losses(replicas.recorder, device.recorder),
            *comparison.compare_gradients(replicas.recorder, device.recorder),
            *comparison.compare_states(variables, self._before, *states, skip),
            *(
                ComparedValue("state", f"{v.path} on each replica", math.inf, tolerance)
                for v in replicas.differing
            ),
            *comparison.compare_outputs(self._kind, replicas.outputs, device.outputs),
        ]
        pairs = itertools.zip_longest(
            replicas.plain, device.plain, fillvalue=("", None)
        )
        values += [
            ComparedValue("state", theirs[0] or ours[0], math.inf, tolerance)
            for ours, theirs in pairs
            if ours != theirs and get_engine().audit.records_steps
        ][:1]
        return _tolerate_half(values) if self._is_half else values

    def _widen_by_rounding(self, report: AuditReport, device: "_Result") -> None:
        """Raise the tolerances of values that rounding changes as much."""
        noise: dict[tuple[str, str], float] = {}
        lasting: dict[tuple[str, str], float] = {}
        try:
            again = self._compare(self._run(lambda: self._on_device()), device)
            if self._agree(any(value.differs for value in again)):
                return  # it does not repeat, so noise says nothing
            for seed in range(_NUDGES):
                nudged = self._run(self._on_device, nudge=seed)
                for value in self._compare(nudged, device):
                    key = value.kind, value.name
                    noise[key] = max(noise.get(key, 0.0), value.difference)
                replicas = self._run(self._on_replicas, nudge=seed)
                for value in self._compare(replicas, nudged):
                    key = value.kind, value.name
                    lasting[key] = min(lasting.get(key, math.inf), value.difference)
        except Exception:
            logger.debug("A step with nudged weights failed.", exc_info=True)
            return
        for number, value in enumerate(report.values):
            key = value.kind, value.name
            changed = noise.get(key, 0.0)
            least = max(comparison.TOLERANCES[value.kind], value.difference / 10)
            if value.differs and (
                changed > least
                # Split rows make it differ with any weights, rounding only with some.
                or lasting.get(key, math.inf) <= value.tolerance
                or self._has_equal_variables(value, report)
            ):
                tolerance = max(10 * changed, value.difference)
                report.values[number] = dataclasses.replace(value, tolerance=tolerance)

    def _nudge_weights(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for variable in self._snapshot.variables:
            if variable.trainable and "float" in variable.dtype:
                value = host_copy(variable)
                noise = _NUDGE * generator.standard_normal(value.shape)
                variable.assign((value * (1 + noise)).astype(value.dtype))

    def _has_equal_variables(self, value: ComparedValue, report: AuditReport) -> bool:
        """Return True for the result of a Keras metric whose variables are equal."""
        # The result can differ by rounding, which decides about thresholds, such as
        # those of `SensitivityAtSpecificity`.
        if value.kind != "log":
            return False
        metric = comparison.find_metric(self._snapshot.objects, value.name)
        if metric is None or find_user_code([metric]) is not None:
            return False
        paths = {variable.path for variable in metric.variables}
        states = [x for x in report.values if x.kind == "state" and x.name in paths]
        largest = max((x.difference for x in states), default=math.inf)
        return largest < comparison.TOLERANCES["log"]

    def _locate(self, report: AuditReport) -> None:
        """Name what differs first."""
        try:
            replicas = self._run(self._on_replicas, records_calls=True)
            device = self._run(self._on_device, records_calls=True)
        except Exception:
            logger.debug("A recorded step failed.", exc_info=True)
            return
        call, origin = comparison.find_first_difference(
            replicas.recorder, device.recorder
        )
        if call is not None:
            callee = _describe(call.callee)
            step = self._users_method() if origin is comparison.STEP else ""
            if call.number < 0:
                report.place, report.cause = f"`add_loss` of {callee}", "loss"
            elif step:
                report.place, report.cause = f"the code of {step}", "call"
            elif origin not in (None, comparison.STEP):
                report.place, report.cause = f"the code of {_describe(origin)}", "call"
            elif (
                isinstance(call.callee, keras.Layer)
                and find_user_code([call.callee]) is None
            ):
                # It keeps rows apart, and its inputs are equal.
                report.place, report.cause = f"the weights of {callee}", "state"
            else:
                report.place, report.cause = callee, "call"
                report.part = call.callee
            return
        kinds = {value.kind for value in report.values if value.differs}
        kind = next((k for k in _ORDER if k in kinds), None)
        if kind is None:
            return  # another worker has found a difference
        report.cause, report.place = kind, self._method(f"{self._kind}_step")
        worst = report.largest(kind)
        assert worst is not None
        if kind == "loss":
            report.place = self._method("compute_loss")
        elif kind == "gradient":
            report.cause += " in run" * (self._kind == "run")
            report.place = f"the gradients of {report.place}"
        elif kind in ("state", "log"):
            metric = comparison.find_metric(self._snapshot.objects, worst.name)
            report.place = f"the {kind} '{worst.name}'"
            if metric is not None:
                report.cause, report.place = "metric", f"the metric '{metric.name}'"

    def _method(self, name: str) -> str:
        if self._model is None:
            return "the function"
        return f"`{type(self._model).__name__}.{name}`"

    def _users_method(self) -> str:
        """Describe the user's method that makes the outermost calls; "" if Keras's."""
        if self._model is None:
            return self._method("run")
        names = f"{self._kind}_step", "compute_loss"
        found = [x for x in names if not is_keras(getattr(type(self._model), x))]
        return self._method(found[0]) if found else ""


class _Result(NamedTuple):
    """Results of a step."""

    recorder: CallRecorder
    outputs: dict[str, Any]
    state: list[Any]
    differing: list[Any]  # mirrored variables whose components differ
    plain: Sequence[tuple[str, Any]] = ()  # values that it left in Python objects


def _tolerate_half(values: list[ComparedValue]) -> list[ComparedValue]:
    """Return values with half precision's tolerances; drop overflowing gradients."""
    return [
        dataclasses.replace(value, tolerance=10 * value.tolerance)
        if value.kind in ("gradient", "state")
        else value
        for value in values
        if value.kind != "gradient" or math.isfinite(value.difference)
    ]


def _describe(part: Any) -> str:
    if isinstance(part, keras.Model):
        return f"`{type(part).__name__}.call`"
    kinds = {keras.Layer: "layer", keras.losses.Loss: "loss", object: "operation"}
    kind = next(kind for base, kind in kinds.items() if isinstance(part, base))
    return f"the {kind} '{part.name}' ({type(part).__name__})"
