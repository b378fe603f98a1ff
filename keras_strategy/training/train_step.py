"""The functions that every replica runs: a Keras training step, or the user's in `run`.

Keras's loop keeps epochs, callbacks and logs. Its function for a batch becomes
`strategy.run` of the model's step, followed by a merge of the results.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun, distributed_replica, with_all_rows
from keras_strategy.core.protocols import ReplicaGroup, Strategy
from keras_strategy.core.registry import SUPPORTED, get_engine
from keras_strategy.core.step_state import (
    BatchRows,
    RowRange,
    StepState,
    has_rows,
    map_rows,
)
from keras_strategy.options import RunOptions, check_call
from keras_strategy.training.random import BatchDimCache, settings
from keras_strategy.training.reduction import is_float
from keras_strategy.training.row_weights import apply_row_weight
from keras_strategy.training.variable_sync import is_sync_on_read, sync_state
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    select_replica,
)


def has_batch_rows(value: Any) -> bool:
    """Return True for a value from an element of a distributed dataset."""
    return isinstance(value, PerReplica) and value.batch is not None


def find_batch_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> BatchRows | None:
    """Return the rows of the one distributed dataset element in the arguments."""
    # None if there is none, or several (ambiguous), or if replicas draw independently.
    if not settings.exact:
        return None
    found = None
    # This runs in every `run`, so it flattens only nested arguments.
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, PerReplica):
            if leaf.batch is None or leaf.batch is found:
                continue
            if found is not None:
                return None
            found = leaf.batch
        elif isinstance(leaf, tuple | list | dict):
            return find_batch_rows(tree.flatten((args, kwargs)), {})
    return found


def traced_step_state(
    rows: RowRange,
    draws: BatchDimCache,
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    places: Sequence[int],
) -> StepState:
    """Return the step state of a replica whose function is traced."""
    # `call` calls the function with replacements of `leaves`, its arguments; `places`
    # are the indices of those with batch rows.

    def dry_run(num_rows: int) -> DryRun:
        def with_batch(*batch):
            replaced = dict(zip(places, batch, strict=True))
            call([replaced.get(place, leaf) for place, leaf in enumerate(leaves)])

        batch = tuple(leaves[place] for place in places)
        return get_engine().dry_run(with_batch, batch, {}, num_rows)

    return StepState(rows=rows, draws=draws, dry_run=dry_run)


def traced_run_state(
    fn: Callable[..., Any],
    arguments: Any,
    rows: RowRange,
    index: int,
    draws: BatchDimCache,
) -> StepState:
    """Return `traced_step_state` of a local replica, for the arguments of `run`."""
    leaves = tree.flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if has_batch_rows(leaf)]
    local = [
        leaf.values[index] if isinstance(leaf, DistributedValues) else leaf
        for leaf in leaves
    ]

    def call(local_leaves):
        args, kwargs = tree.pack_sequence_as(arguments, local_leaves)
        fn(*args, **kwargs)

    return traced_step_state(rows, draws, call, local, places)


def has_torch_modules(layers: Iterable[Any]) -> bool:
    wrapper = keras.layers.TorchModuleWrapper
    return any(isinstance(layer, wrapper) for layer in layers)


_INSTEAD = (
    "Compute gradients with `keras_strategy.value_and_grad`, which works on every "
    "backend, instead of a gradient tape, `backward` or a library's `grad`. Remove "
    "`tf.function` and `jax.jit`, because `strategy.run` and `fit` compile. Use "
    "`keras.ops` for other functions."
)
# Texts of errors that have no frame of the library.
_SIGNS = {"jax": "JAX has removed its internal frames", "torch": "attribute '?backward"}


def _foreign_library(name: Any) -> str | None:
    """Return the other backend that a module name belongs to, or None."""
    library = str(name).partition(".")[0]
    is_foreign = library in SUPPORTED and library != keras.backend.backend()
    return library if is_foreign else None


def check_function(fn: Any, args: Any) -> None:
    """Raise unless `run` can call `fn` with `args`."""
    check_call(fn, args)
    library = _foreign_library(type(fn).__module__)
    if library is not None:
        raise TypeError(
            f"Argument `fn` must be a Python function. Received a function of {library}"
            f", but the Keras backend is {keras.backend.backend()}: {fn!r}. {_INSTEAD}"
        )


def add_backend_hint(error: Exception) -> None:
    """Add a note to an error of a step that code of another backend has raised."""
    library = caller = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        library = _foreign_library(module)
        if library is not None:
            break
        if module.partition(".")[0] not in SUPPORTED:
            caller = f"{frame.f_code.co_filename}:{line}"
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    for name, sign in _SIGNS.items():
        if library is None and re.search(sign, text):
            library = _foreign_library(name)
    if library is not None:
        error.add_note(
            f"The step uses {library} at {caller}, but the Keras backend is "
            f"{keras.backend.backend()}. {_INSTEAD}"
        )


_LOCAL_BATCH_HINT = (
    "A replica gets its part of a batch, which is split along the first dimension of "
    "its arrays. If that is not the batch dimension, move the batch dimension there."
)
_SHAPE_WORDS = re.compile(r"shape|dimension|\bdims?\b|\brank\b|size of tensor|\baxis\b")


def add_shape_hint(error: Exception, data: Any = None) -> None:
    """Add a note on local batches to an error that shapes may have caused."""
    # Keras appends the arguments of a layer to each of its errors.
    text, _, _ = str(error).lower().partition("arguments received by")
    is_other = isinstance(error, KeyError | NameError | AttributeError)
    if is_other or not _SHAPE_WORDS.search(text):
        return
    shapes = [str(getattr(x, "shape", None)) for x in tree.flatten(data)]
    known = "" if data is None else f" The arrays had the shapes {shapes}."
    error.add_note(_LOCAL_BATCH_HINT + known)


def make_weighted_step(
    step: Callable[[Any], Any],
    logs_are_metrics: bool,
    layers: Callable[[], Sequence[Any]],
    require: Callable[[Any, str], None],
    count_rows: Callable[[Sequence[Any]], Any] | None = None,
) -> Callable[[Any, Any, RowRange | None], Any]:
    """Return a model's step as `fn(data, weight, rows)` for a replica."""
    # `require` is that of `sync_state`. With `count_rows`, of tensors, the outputs must
    # have the rows of the data, as in `predict`.
    draws = BatchDimCache()

    def dry_run(data, num_rows):
        if has_torch_modules(layers()):
            return DryRun(draws=[])  # their state cannot be restored in a dry run
        return get_engine().dry_run(step, (data,), {}, num_rows)

    def replica_step(data, weight, rows):
        replica = distributed_replica()
        assert replica is not None
        replica.step = StepState(
            weight,
            logs_are_metrics=logs_are_metrics,
            rows=rows,
            draws=draws,
            dry_run=functools.partial(dry_run, data),
        )
        try:
            outputs = step(data)
            sync_state(replica, layers, require)
            if count_rows is not None:
                _check_output_rows(outputs, data, count_rows, require)
            return outputs
        except Exception as error:
            add_shape_hint(error, data)
            raise
        finally:
            replica.step = StepState()

    return replica_step


def run_whole(
    strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a function on the rows of all replicas, as one device does."""

    def join(leaf):
        if not isinstance(leaf, DistributedValues):
            return leaf
        is_mirrored = isinstance(leaf, Mirrored)
        return leaf.values[0] if is_mirrored else strategy.gather(leaf, axis=0)

    arguments = tree.map_structure(join, (tuple(args), dict(kwargs)))
    is_one_process = strategy.extended.cluster is None and strategy.shard is None
    if is_one_process or not get_engine().has_replicas_in_fit:
        with strategy.scope():
            return strategy.extended.group.call_once(fn, *arguments)
    # Every replica calls it, as it has a shard or is in another process. The first one
    # has all of the weight.
    local = strategy.extended.topology.local_replicas
    weights = [float(replica == 0) for replica in local]
    # Keras's losses write to weights that have a mask.
    copies = [arguments, *(map_rows(ops.copy, arguments) for _ in local[1:])]
    rows = next((x.shape[0] for x in tree.flatten(arguments) if has_rows(x)), None)

    def call(data):
        with with_all_rows(strategy):
            return fn(*data[0], **data[1])

    step = make_weighted_step(call, False, list, lambda *check: None)
    outputs = strategy.run(
        lambda data, weight: step(data, weight, rows and RowRange(0, rows, rows)),
        args=(PerReplica(copies), PerReplica(weights)),
        options=RunOptions(compile=False),
    )
    return select_replica(outputs, 0, len(local))


def _check_output_rows(
    outputs: Any,
    data: Any,
    count_rows: Callable[[Sequence[Any]], Any],
    require: Callable[[Any, str], None],
) -> None:
    """Check that each output of `predict_step` has the local batch's rows."""
    expected = count_rows(tree.flatten(data))
    for path, output in tree.flatten_with_path(outputs):
        if output is None:
            continue
        shape = getattr(output, "shape", ())
        where = "".join(f"[{key!r}]" for key in path)
        message = (
            "`predict` concatenates the replicas' outputs, so each output must have "
            "one row for each row of the batch. Received the output"
            f"{where and ' ' + where} of shape {shape} from one replica. Give it as "
            "many rows, for example with `ops.broadcast_to`, or remove it from the "
            "outputs of the model."
        )
        if shape == ():
            raise ValueError(message)
        require(count_rows([output]) == expected, message)


def returns_only_metrics(model: keras.Model, kind: str) -> bool:
    """Return True if a step returns exactly `model.get_metrics_result()`."""
    return kind != "predict" and all(
        getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)
        for name in (f"{kind}_step", "compute_metrics", "get_metrics_result")
    )


def count_rows(data: Any) -> int:
    """Return the number of rows of a batch: its arrays' first dimension."""
    return count_array_rows(tree.flatten(data))


def count_array_rows(arrays: Sequence[Any]) -> int:
    shapes = [tuple(leaf.shape) for leaf in arrays if leaf is not None]
    if not shapes or any(len(shape) == 0 for shape in shapes):
        raise ValueError(
            "A batch must consist of arrays whose first dimension is the batch "
            f"dimension. Received arrays of the shapes {shapes}."
        )
    rows = {shape[0] for shape in shapes}
    if len(rows) > 1:
        raise differing_rows_error(shapes)
    return rows.pop()


def differing_rows_error(shapes: Sequence[tuple[int, ...]]) -> ValueError:
    return ValueError(
        "The arrays of a batch must have the same number of rows, their first "
        f"dimension. Received arrays of the shapes {list(shapes)}. If these are single "
        "rows, batch them first, for example with `dataset.batch(batch_size)`."
    )


@contextlib.contextmanager
def report_differing_rows(batches: Sequence[Any]) -> Iterator[None]:
    """Raise `differing_rows_error` for an error while one of `batches` is used."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        for batch in batches:
            leaves = [leaf for leaf in tree.flatten(batch) if hasattr(leaf, "shape")]
            shapes = [tuple(leaf.shape) for leaf in leaves]
            if len({shape[:1] for shape in shapes}) > 1:
                raise differing_rows_error(shapes) from error
        raise


def average_logs(
    logs: Any,
    weights: Sequence[Any],
    sum_all: Callable[[Sequence[Sequence[Any]]], Sequence[Any]],
) -> Any:
    """Return the mean of the replicas' logs, weighted by rows."""
    # `sum_all` returns the sums over all replicas, given the local ones' summands.

    def summand(value, weight):
        value = ops.convert_to_tensor(value)
        if not is_float(value):
            value = ops.cast(value, "float32")
        return apply_row_weight(value, weight)

    replicas = len(weights)
    local = [select_replica(logs, replica, replicas) for replica in range(replicas)]
    summands = [
        [summand(value, weight) for value in tree.flatten(logs)]
        for logs, weight in zip(local, weights, strict=True)
    ]
    return tree.pack_sequence_as(local[0], sum_all(list(zip(*summands, strict=True))))


def merge_worker_metrics(model: keras.Model, group: ReplicaGroup) -> dict[str, Any]:
    """Return `get_metrics_result` over all workers, with one reduction."""
    states = [
        variable
        for variable in model.metrics_variables
        if is_sync_on_read(variable) and variable.aggregation != "none"
    ]
    sums = group.sum_logs([group.local_summands(variable) for variable in states])
    with keras.StatelessScope(state_mapping=list(zip(states, sums, strict=True))):
        return model.get_metrics_result()
