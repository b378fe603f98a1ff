"""The policy of a function of `fit`, `evaluate` or `predict`: split rows or run whole.

A step may be split by rows over the replicas if together they compute what one device
does. User code does not show that, so it is measured: an audit compares both on the
first batch. A step that differs *runs whole* from then on: it computes all rows of each
batch at once, as on one device, and every replica gets the variables' new values.

A single process then calls the step once, for all replicas. Several processes, and
replicas that have shards of the weights or slots, each compute all rows, and only the
first replica's results count: the others have the row weight 0.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.audit.comparison import host_copy
from keras_strategy.audit.report import AuditReport
from keras_strategy.audit.snapshot import find_objects, find_user_code, read_settings
from keras_strategy.audit.step import ROWS_PER_REPLICA, StepAudit
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import LocalRows, has_rows, map_rows
from keras_strategy.errors import logger
from keras_strategy.keras_patches.internals import byte_count
from keras_strategy.keras_patches.layers import all_layers
from keras_strategy.keras_patches.random import compute_on_all_rows
from keras_strategy.keras_patches.trainer import build_for_step, first_callbacks
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.row_weights import kinds_that_run_whole
from keras_strategy.values import DistributedValues, PerReplica

# Some differences need more rows than the first ones, such as a maximum over rows.
MORE_ROWS_PER_REPLICA = 16
# Most parts of a model that may compute on gathered rows, before its step runs whole.
MAX_GATHERING_PARTS = 4
# Most bytes of sharded weights that the first step's audit brings together.
MAX_SHARDED_BYTES = 256 << 20

MODES = ("exact", "warn", "raise", "off")
# Set by `config.audit`.
mode = "exact"
# Keras's layers that mix the rows of a batch.
_ROW_MIXERS = (
    *(keras.layers.MixUp, keras.layers.CutMix),
    *(keras.layers.Equalization, keras.layers.RandAugment),
)
# Names of a model's steps, by kind.
STEPS = {"train": "training", "test": "evaluation", "predict": "prediction"}


def gather_row_mixers(model: Any) -> None:
    """Let Keras's layers that mix rows compute on the rows of all replicas."""
    for layer in all_layers(model):
        if type(layer) in _ROW_MIXERS:
            compute_on_all_rows(layer)


def _has_state_of_rows(model: Any) -> bool:
    """Return whether a recurrent layer keeps a state for each row of a batch."""
    layers = all_layers(model)
    return any(isinstance(x, keras.layers.RNN) and x.stateful for x in layers)


def audit_batch(
    model: Any,
    kind: str,
    strategy: Strategy,
    batch: Any,
    counts: tuple[int, ...] = (ROWS_PER_REPLICA, MORE_ROWS_PER_REPLICA),
) -> AuditReport:
    """Audit a step on numbers of rows per replica of a batch, until it differs."""
    report = AuditReport("")
    # What fails on a part of the rows may need a whole batch.
    for count in (*counts, None):
        if count is None and not report.failure:
            break
        what = f"The {STEPS[kind]} step of the model '{model.name}'"
        report = audit_step(model, kind, strategy, batch, count, AuditReport(what))
        if report.differs and not report.failure:
            break
    padded = None if kind == "predict" or report.differs else _pad_first_row(batch)
    if padded is not None:
        what = f"If a row is padding, the {STEPS[kind]} step of the model"
        empty, rows = AuditReport(f"{what} '{model.name}'"), MORE_ROWS_PER_REPLICA
        found = audit_step(model, kind, strategy, padded, rows, empty)
        # What cannot compute on such a row has none.
        if found.differs and not found.failure:
            return found
    return report


def _pad_first_row(batch: Any) -> Any:
    """Return a batch with zeros for a row's integers and targets, or None without."""
    # A loss divided by a mask is a mean over rows if all rows have as many entries.
    arrays = batch.batch if isinstance(batch, LocalRows) else batch
    has_target = isinstance(arrays, tuple | list) and len(arrays) in (2, 3)
    targets = {id(x) for x in tree.flatten(arrays[1:])} if has_target else set()

    def can_be_padded(x: Any) -> bool:
        is_integer = any(kind in str(x.dtype) for kind in ("int", "bool"))
        # A sparse tensor has no slices.
        return hasattr(x, "__getitem__") and (is_integer or id(x) in targets)

    def pad(x: Any) -> Any:
        if not can_be_padded(x):
            return x
        return ops.concatenate([ops.zeros_like(x[:1]), x[1:]])

    if not any(has_rows(x) and can_be_padded(x) for x in tree.flatten(arrays)):
        return None
    padded = map_rows(pad, arrays)
    return replace(batch, batch=padded) if isinstance(batch, LocalRows) else padded


def audit_step(
    model: Any,
    kind: str,
    strategy: Strategy,
    batch: Any,
    count: int | None,
    report: AuditReport,
) -> AuditReport:
    """Audit a step on `count` rows of a batch for each replica, or on all."""
    local, all_rows = take_rows(batch, strategy, count)
    on_replicas, on_device = get_engine().audit.step_functions(model, kind, strategy)
    audit = StepAudit(
        strategy,
        kind,
        lambda: to_arrays(on_replicas(local)),
        lambda: to_arrays(on_device(all_rows)),
        model,
        [model],
    )
    if strategy.extended.cluster is not None and isinstance(local, LocalRows):
        # An error in it leaves no other worker waiting.
        audit.on_own_rows = lambda: to_arrays(on_device(local.batch))
    audit.run(report)
    return report


def take_rows(batch: Any, strategy: Strategy, count: int | None) -> tuple[Any, Any]:
    """Return a few rows, or all, as the replicas and as one device get them."""
    # `count` is the number for each replica. There is one row more or less, so that the
    # replicas have uneven numbers of rows.
    replicas, cluster = strategy.num_replicas_in_sync, strategy.extended.cluster
    first_rows = get_engine().audit.first_rows
    if cluster is None or not isinstance(batch, LocalRows):
        if count is not None:
            given = next(x.shape[0] for x in tree.flatten(batch) if has_rows(x))
            rows = min(count * replicas + 1, given)
            rows -= rows % replicas == 0 and rows > replicas
            batch = map_rows(lambda x: first_rows(x, rows), batch)
        return batch, batch
    local = strategy.extended.topology.local_replicas
    if count is not None:
        available = batch.bounds[-1][1] - batch.bounds[0][0]
        counts = cluster.exchange("audit: rows", available // len(local))
        count = min(count, *counts)
    if count:
        total = count * replicas - (count > 1)
        bounds = [(count * i, min(count * (i + 1), total)) for i in local]
        rows = bounds[-1][1] - bounds[0][0]
        batch = replace(
            batch,
            batch=map_rows(lambda x: first_rows(x, rows), batch.batch),
            bounds=bounds,
            global_rows=total,
        )
    batch = replace(batch, worker_rows=None)  # predictions of all workers are compared
    return batch, gather_rows(batch, strategy)


def gather_rows(batch: LocalRows, strategy: Strategy) -> Any:
    """Return all rows of a global batch, of which each worker has read its own."""
    first, cluster = batch.bounds[0][0], strategy.extended.cluster
    assert cluster is not None

    def gather(x):
        parts = [x[begin - first : end - first] for begin, end in batch.bounds]
        if keras.backend.standardize_dtype(x.dtype) != "string":
            return strategy.gather(PerReplica(parts), axis=0)
        # Any bytes, which JSON sends as text and collectives not at all.
        local = [text for part in parts for text in np.ravel(part.numpy())]
        texts = [text.decode("latin-1") for text in local]
        gathered = cluster.exchange("rows of text", texts)
        joined = [text.encode("latin-1") for part in gathered for text in part]
        return keras.ops.reshape(joined, (-1, *x.shape[1:]))

    return map_rows(gather, batch.batch)


def with_all_rows(batch: Any, strategy: Strategy) -> Any:
    """Return a batch with the rows of all workers, for a step that runs whole."""
    if not isinstance(batch, LocalRows):
        return batch
    bounds = [(0, batch.global_rows)] * len(batch.bounds)
    return replace(batch, batch=gather_rows(batch, strategy), bounds=bounds)


def take_own_rows(predictions: Any, batch: Any, strategy: Strategy) -> Any:
    """Return the predictions of the rows that this worker has read."""
    # All, unless each worker reads its own data.
    if not isinstance(batch, LocalRows) or not batch.worker_rows:
        return predictions
    cluster = strategy.extended.cluster
    assert cluster is not None
    first = sum(batch.worker_rows[: cluster.rank])
    end = first + batch.worker_rows[cluster.rank]
    return tree.map_structure(lambda x: x[first:end], predictions)


def to_arrays(outputs: Any) -> dict[str, Any]:
    """Return outputs by name, as NumPy arrays; of distributed values a list of them."""
    found = {}
    for path, leaf in tree.flatten_with_path(outputs):
        name = "/".join(map(str, path)) or "output"
        if isinstance(leaf, DistributedValues):
            found[name] = list(map(_to_array, leaf.values))
        elif leaf is not None:
            found[name] = _to_array(leaf)
    return found


def _to_array(leaf: Any) -> np.ndarray:
    array = host_copy(leaf)
    return np.asarray(leaf) if array is None else array


# The attribute of a model with its policies, by kind.
_POLICIES = "_ks_policies"


class RowPolicy:
    """Decides whether a function of `fit` splits the rows of its batches."""

    # Only a step with the user's code is audited. `scope` returns a context manager in
    # which workers run collectives. `ask_again` makes a function call `is_due` in its
    # next step, if it does not do so in each.

    ask_again: Callable[[], None] | None = None

    def __init__(
        self,
        model: Any,
        kind: str,
        strategy: Strategy,
        scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self._model, self._kind, self._strategy = model, kind, strategy
        self._scope = scope
        # True if the step runs whole; if the last audit has changed how it runs.
        self.runs_whole = self.has_changed = False
        # True if the next step need not ask `is_due`.
        self.is_done = strategy.num_replicas_in_sync == 1
        self._is_first, self._is_decided = True, False
        self._settings: Any = None  # when the last epoch ended
        self._epochs, self._is_power_of_two = 1, True  # of all calls of `fit`

    def is_due(self) -> bool:
        """Return True if the next step is to be audited."""
        kinds = kinds_that_run_whole(self._model)
        is_split = self._strategy.num_replicas_in_sync > 1
        if is_split and _has_state_of_rows(self._model):
            kinds.add(self._kind)
        self.runs_whole = self._kind in kinds
        if self.runs_whole or mode == "off" or self._is_too_large():
            self.is_done = True
        elif self._is_first:
            gather_row_mixers(self._model)
            self.is_done = find_user_code([self._model]) is None
            if not self.is_done:
                vars(self._model).setdefault(_POLICIES, {})[self._kind] = self
        else:
            cluster = self._strategy.extended.cluster
            due = self._is_power_of_two or self._settings != read_settings(
                [self._model]
            )
            if cluster is not None:
                due = any(cluster.exchange("audit: settings", due))
            self.is_done = not due
        return not self.is_done

    def begin_epoch(self) -> None:
        """Audit the next step if its rows or the model's settings may show more."""
        if not self._is_decided:
            self.is_done = False
            self._epochs += 1
            self._is_power_of_two = self._epochs & (self._epochs - 1) == 0
            if self.ask_again is not None:
                self.ask_again()

    def end_epoch(self) -> None:
        """Note the settings of the model, which callbacks may change next."""
        if not self._is_decided:
            self._settings = read_settings([self._model])

    def _is_too_large(self) -> bool:
        """Return True for a sharded model that an audit would have to gather."""
        size = sum(map(byte_count, self._model.trainable_variables))
        if self._strategy.shard != "parameters" or size <= MAX_SHARDED_BYTES:
            return False
        logger.info(
            "The first step of the model '%s' is not audited, since that needs all of "
            "its %.0f MB on one device. `ks.verify(model, x, y)` does it.",
            *(self._model.name, size / 1e6),
        )
        return True

    def _gather_rows(self, report: AuditReport, batch: Any) -> str:
        """Let parts that differ compute on all rows; return their names if it helps."""
        undo, places, cluster = [], [], self._strategy.extended.cluster
        # If the whole model had to gather rows, running its step whole is cheaper.
        parts = [x for x in find_objects([self._model]) if x is not self._model]
        while len(undo) < MAX_GATHERING_PARTS and not self._model.jit_compile:
            index = next((i for i, x in enumerate(parts) if x is report.part), None)
            if cluster is not None:  # only some workers may have found it
                found = cluster.exchange("audit: part", (index, report.place))
                index, report.place = next((x for x in found if x[0]), (None, ""))
            if index is None or report.place in places:
                break
            places.append(report.place)
            undo.append(compute_on_all_rows(parts[index]))
            with self._scope():
                report = audit_batch(self._model, self._kind, self._strategy, batch)
            if not report.differs:
                return " and ".join(places)
        for restore in reversed(undo):
            restore()
        return ""

    def audit(self, batch: Any) -> None:
        """Audit the step on a global batch, or a worker's rows of it, and decide."""
        self.has_changed = False
        is_first, self._is_first = self._is_first, False
        if is_first and not build_for_step(self._model, self._kind, batch):
            return  # the first step builds layers
        self.is_done = True
        counts = (ROWS_PER_REPLICA,) * is_first + (MORE_ROWS_PER_REPLICA,)
        with self._scope():
            report = audit_batch(self._model, self._kind, self._strategy, batch, counts)
        if not report.differs:
            return
        text = (
            f"{report.message} `ks.verify(model, x, y)` shows the comparison, and "
            '`ks.config.audit("off")` turns it off.'
        )
        self._is_decided = True
        if mode == "raise":
            raise RuntimeError(text)
        if mode == "exact":
            self.has_changed = True
            gathered = self._gather_rows(report, batch)
            if gathered:
                self._is_decided = False
                text = (
                    f"{report.message} Now {gathered} computes on the rows of all "
                    "replicas, on each of them, and the results are exact."
                )
            else:
                self.runs_whole = True
                kinds_that_run_whole(self._model).add(self._kind)
                text = (
                    f"{text} Until then the step runs whole: all rows of a batch at "
                    "once, as on one device and as fast as one, so the results are "
                    "exact. See 'Steps that run whole' in the documentation."
                )
        if self._strategy.is_chief:
            logger.warning(text)


class AuditSchedule(LogFreeCallback):
    """Callback that audits steps again: in epochs 2, 4, 8 ... and with new settings."""

    # It comes before the user's callbacks, whose changes it finds.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Make the next steps ask whether an audit is due."""
        for policy in vars(self.model).get(_POLICIES, {}).values():
            policy.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the settings of the model."""
        for policy in vars(self.model).get(_POLICIES, {}).values():
            policy.end_epoch()


first_callbacks.append(AuditSchedule)
