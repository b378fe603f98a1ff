"""Audits of a model's step and of `run` on request."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.audit.policy import (
    STEPS,
    audit_batch,
    gather_row_mixers,
    to_arrays,
)
from keras_strategy.audit.report import AuditReport
from keras_strategy.audit.snapshot import find_objects
from keras_strategy.audit.step import ROWS_PER_REPLICA, StepAudit
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import has_rows
from keras_strategy.keras_patches.trainer import build_from_batch
from keras_strategy.options import RunOptions
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.train_step import count_rows
from keras_strategy.values import DistributedValues, map_leaves


def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    kind: str = "train",
) -> AuditReport:
    """Compare a model's step on its strategy's replicas with that of one device.

    Both steps start from the same state and compute the same rows: 3 for each replica
    and one more, so that the replicas have uneven numbers of rows. Compared are the
    loss, the gradients that optimizers receive, the changes of all variables, and the
    logs or predictions. Afterwards all variables, the attributes of layers and models,
    and the random generators are as before. What the step changes elsewhere is not
    restored: globals, iterators that it advances, files, what it prints.

    Gradients are not applied. Local batch statistics, which `run` and the strategy's
    `batch_statistics="local"` compute, and half precision are replaced by global ones
    and float32. A branch that these rows do not take is not seen.

    Args:
        model: A compiled model of a strategy with several replicas. It is built from
            the batch if it is not built.
        x: The inputs: an array, or a structure of arrays, with the batch dimension
            first. At least one row; further rows than needed are ignored.
        y: The targets, as `x`; None for none.
        sample_weight: The sample weights, as `x`; None for none.
        kind: The step: `"train"`, `"test"` or `"predict"`.

    Returns:
        An `AuditReport`; `print` shows it as a table.

    Raises:
        ValueError: If `kind` is unknown, or the model has no strategy of several
            replicas, or the arrays have no rows or different numbers of rows.

    Example:

    ```python
    import keras
    import keras_strategy as ks
    import numpy as np

    with ks.MirroredStrategy().scope():  # of several devices
        inputs = keras.Input((4,))
        centered = inputs - keras.ops.mean(inputs, axis=0, keepdims=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(centered))
        model.compile("sgd", "mse")
    report = ks.verify(model, np.eye(8, 4), np.ones((8, 1)))
    if keras.backend.backend() != "jax":  # where `fit` computes all rows in one program
        assert report.differs and "mean" in report.place
    ```
    """
    if kind not in STEPS:
        raise ValueError(
            f"Argument `kind` must be one of {', '.join(map(repr, STEPS))}. "
            f"Received: kind={kind!r}"
        )
    strategy = strategy_of_model(model)
    if (
        strategy is None
        or strategy.num_replicas_in_sync == 1
        or strategy.extended.cluster is not None
    ):
        raise ValueError(
            "`verify` compares several replicas of one process with one device. "
            f"Received: a model of {strategy!r}. Create it in the scope of a strategy "
            "with several devices in one process: on CPUs, set "
            "KERAS_STRATEGY_LOGICAL_CPUS=2."
        )
    parts = (x,) if kind == "predict" else (x, y, sample_weight)
    while parts[-1] is None and len(parts) > 1:
        parts = parts[:-1]

    def to_array(leaf):
        leaf = _join_rows(strategy, leaf)
        return leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)

    batch = map_leaves(lambda x: None if x is None else to_array(x), parts)
    if count_rows(batch) == 0:
        raise ValueError(
            "`verify` needs at least one row. Received arrays without rows."
        )
    with strategy.scope():
        build_from_batch(model, batch)
        gather_row_mixers(model)
        return audit_batch(model, kind, strategy, batch)


def verify_run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    objects: Sequence[Any] | None = None,
) -> AuditReport:
    """Compare `strategy.run(fn, args)` with one call of `fn` on one device.

    The call on one device has the rows of all replicas. Compared are the gradients that
    optimizers receive (which `optimizer.apply` sums over the replicas, so `fn` has to
    divide its loss by the global batch size), the changes of variables, the results of
    metrics, and what `fn` returns: the replicas' sum, mean or concatenation, or each
    of them, whichever is closest. All state is restored, see `verify`. On JAX gradients
    are applied, and what differs is not located.

    Args:
        strategy: A strategy with several replicas in one process.
        fn: The function.
        args: Its positional arguments: global batches, arrays or structures of arrays
            with the batch dimension first, or distributed values, such as an element of
            a distributed dataset. Of arrays, 3 rows for each replica are used.
        kwargs: Its keyword arguments, as `args`.
        objects: The models, metrics, optimizers and variables that `fn` uses; by
            default those that it names.

    Returns:
        An `AuditReport`; `print` shows it as a table.

    Raises:
        ValueError: If the strategy has one replica or several workers, or the arrays
            have fewer rows than there are replicas.

    Example:

    ```python
    import keras
    import keras_strategy as ks
    import numpy as np

    strategy = ks.MirroredStrategy()  # of several devices
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        loss, gradients = ks.value_and_grad(
            lambda: ks.compute_average_loss(keras.ops.square(y - model(x))[:, 0]),
            model.trainable_variables,
        )()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    x, y = np.eye(8, 4, dtype="float32"), np.ones((8, 1), "float32")
    report = ks.verify_run(strategy, step, (x, y))
    assert not report.differs, report
    ```
    """
    if strategy.num_replicas_in_sync == 1 or strategy.extended.cluster is not None:
        raise ValueError(
            "`verify_run` compares several replicas of one process with one device. "
            f"Received: strategy={strategy!r}"
        )
    given = tuple(args), dict(kwargs or {})
    leaves = [_join_rows(strategy, leaf) for leaf in tree.flatten(given)]
    places = [place for place, leaf in enumerate(leaves) if has_rows(leaf)]
    replicas = strategy.num_replicas_in_sync
    rows = count_rows([leaves[place] for place in places]) if places else 0
    rows = min(ROWS_PER_REPLICA, rows // replicas) * replicas
    if places and rows == 0:
        raise ValueError(
            "`verify_run` needs a row for each replica in each array. Received "
            f"arrays with fewer rows than {replicas} replicas."
        )
    few = tuple(np.asarray(leaves[place])[:rows] for place in places)

    def with_rows(values):
        replaced = dict(zip(places, values, strict=True))
        found = [replaced.get(place, leaf) for place, leaf in enumerate(leaves)]
        return tree.pack_sequence_as(given, found)

    roots = _find_named_objects(fn) if objects is None else list(objects)
    # Without those of `compile` that are not built yet.
    built = [x for x in find_objects(roots) if getattr(x, "built", True)]
    metrics = [x for x in built if isinstance(x, keras.metrics.Metric)]

    def with_metrics(outputs):
        results = {f"{metric.name}.result()": metric.result() for metric in metrics}
        return to_arrays(results) | to_arrays({"output": outputs})

    def run_on_replicas():
        local = ()
        if places:
            (local,) = strategy.experimental_distribute_dataset([few])
        options = RunOptions(compile=False)
        local_args, local_kwargs = with_rows(local)
        return with_metrics(strategy.run(fn, local_args, local_kwargs, options))

    def run_on_device():
        all_args, all_kwargs = with_rows([ops.convert_to_tensor(x) for x in few])
        return with_metrics(fn(*all_args, **all_kwargs))

    report = AuditReport(f"`run` of `{getattr(fn, '__name__', type(fn).__name__)}`")
    StepAudit(strategy, "run", run_on_replicas, run_on_device, None, roots).run(report)
    return report


def _join_rows(strategy: Strategy, leaf: Any) -> Any:
    return strategy.gather(leaf, 0) if isinstance(leaf, DistributedValues) else leaf


def _find_named_objects(fn: Callable[..., Any]) -> list[Any]:
    """Return the objects that a function names, and that of a method."""
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    found = [getattr(fn, "__self__", None)]
    function = getattr(fn, "__func__", fn)
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        found += [*named.nonlocals.values(), *named.globals.values()]
    return found
