"""Row weights, which make N replicas train as one device does.

In a training step each replica carries its *weight*: its rows over the rows of the
global batch. A replica's loss is the mean over its local rows, and the outermost
`optimizer.apply` sums weight * gradient over the replicas. For a loss that is a mean
over rows, sum_r (n_r / n) * grad mean_r = grad mean: exactly the gradient of the global
batch, however unevenly the rows are split. A replica without rows has the weight 0, and
its results are ignored.

Keras divides a sum of losses by a number that it counts on the local batch: its rows,
the sum of its sample weights, the valid entries of its mask. The functions here compute
these denominators so that the weighted sum over the replicas equals one device's loss.

In `strategy.run` there is no weight (None): gradients are summed, as in tf.distribute.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.core import context
from keras_strategy.core.protocols import Replica
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import Bounds, override
from keras_strategy.devices import ReplicaTopology
from keras_strategy.values import ReduceOp

# Returns the bounds for a global batch of so many rows.
LocalBoundsFn = Callable[[int], Bounds]


def limits_for(rows: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the minimum and the maximum of two numbers of rows, as functions."""
    # Numbers are tensors where a trace does not know them.
    return (min, max) if isinstance(rows, int) else (ops.minimum, ops.maximum)


def split_rows(rows: Any, replicas: int) -> list[tuple[Any, Any]]:
    """Return (begin, end) of each replica's rows of a global batch."""
    # As in tf.distribute, every replica gets a block of ceil(rows / replicas) rows; the
    # last ones may get fewer, or none.
    block, (minimum, _) = -(-rows // replicas), limits_for(rows)
    ends = [minimum(replica * block, rows) for replica in range(replicas + 1)]
    return list(itertools.pairwise(ends))


def rows_to_read(bounds: Bounds) -> tuple[int, int]:
    """Return begin and end of the rows to read: one placeholder if there are none."""
    first, end = bounds[0][0], bounds[-1][1]
    return (first, end) if end > first else (0, 1)


def local_bounds(topology: ReplicaTopology, rows: Any) -> Bounds:
    """Return this worker's bounds in a global batch, see `split_rows`."""
    bounds = split_rows(rows, topology.num_replicas)
    local = topology.local_replicas
    return bounds[local.start : local.stop]


# The attribute of a model with the kinds of its steps that run whole.
WHOLE = "_ks_whole"


def kinds_that_run_whole(model: Any) -> set[str]:
    """Return the kinds of a model's steps that run whole, which may be changed."""
    return vars(model).setdefault(WHOLE, set())


def where_has_rows(weight: Any, value: Any, otherwise: Any) -> Any:
    """Return `value` on a replica that has rows, else `otherwise`."""
    if weight is None or (isinstance(weight, float) and weight > 0.0):
        return value
    # Even for a constant weight of 0: without this dependency the replica's gradient
    # would skip collectives of the others.
    return ops.where(weight > 0, value, otherwise)


def apply_row_weight(tensor: Any, weight: Any) -> Any:
    """Return weight * tensor; exactly zero for weight 0, where `tensor` may be NaN."""
    if weight is None:
        return tensor
    if isinstance(weight, float):
        return tensor * weight if weight > 0.0 else ops.zeros_like(tensor)
    weighted = tensor * ops.cast(weight, tensor.dtype)
    return ops.where(weight > 0, weighted, ops.zeros_like(tensor))


def reduce_values(
    replica: Replica, values: Any, sample_weight: Any, reduction: str | None
) -> Any:
    """Reduce one replica's weighted losses, as Keras's `reduce_values` does."""
    if reduction in (None, "none") or len(values.shape) == 0:
        return values
    total, weight = ops.sum(values), replica.step.row_weight
    if reduction == "sum":
        if weight is None:
            return total
        # Cancel the optimizer's multiplication by the weight.
        return ops.divide_no_nan(total, ops.cast(weight, total.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        denominator = ops.cast(ops.sum(sample_weight), total.dtype)
        denominator = _global_denominator(replica, denominator)
    else:
        # Entries are proportional to rows, so in a training step the local count is
        # already weight * global count: no collective is needed.
        shape = tuple(values.shape)
        if weight is not None and all(isinstance(size, int) and size for size in shape):
            return total / math.prod(shape)
        denominator = _count(values, total.dtype)
        if weight is None:
            denominator = _global_denominator(replica, denominator)
    return ops.divide_no_nan(total, denominator)


def mask_weights(replica: Replica, mask: Any, dtype: Any, reduction: str | None) -> Any:
    """Return the factor of each entry's weight that a mask implies."""
    # Where Keras weights valid entries by total / valid, both counts span all replicas.
    valid = ops.cast(mask, dtype)
    if reduction not in ("mean", "sum_over_batch_size"):
        return valid
    total, count = _count(mask, dtype), ops.sum(valid)
    if replica.step.row_weight is None:
        total = _global_denominator(replica, total)
    return valid * ops.divide_no_nan(total, _global_denominator(replica, count))


def gather_global_batch(replica: Replica, structure: Any) -> Any:
    """Gather the rows of the global batch, differentiably; scalars stay."""

    def gather(x):
        if x is None:
            return None
        x = ops.convert_to_tensor(x)
        return x if len(x.shape) == 0 else context.gather_rows(replica, x, 0)

    return tree.map_structure(gather, structure)


def call_on_global_batch(replica: Replica, fn: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function with the rows of all replicas, which are differentiable."""
    inputs = gather_global_batch(replica, inputs)
    strategy = context.get_strategy()
    with override(replica.step, "has_all_rows", True), context.with_all_rows(strategy):
        return fn(*inputs)


def _count(values: Any, dtype: Any) -> Any:
    shape = ops.convert_to_tensor(ops.shape(values), dtype="int32")
    return ops.cast(ops.prod(shape), dtype)


def _global_denominator(replica: Replica, denominator: Any) -> Any:
    """Return the denominator of all replicas, times this replica's weight."""
    # (local sum) / (weight * global denominator), weighted by the optimizer, is the
    # local summand of the global quotient.
    weight = replica.step.row_weight
    denominator = where_has_rows(weight, denominator, ops.zeros_like(denominator))
    total = replica.all_reduce(ReduceOp.SUM, denominator)
    return total if weight is None else total * ops.cast(weight, total.dtype)


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[keras.Variable], has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes `fn` and its gradients.

    You can call it inside and outside of `strategy.run`. Inside, the gradients are
    those of this replica's value; `optimizer.apply` sums them over the replicas.

    Args:
        fn: Returns a scalar, or with `has_aux` a pair of a scalar and a structure.
        variables: The variables to differentiate by.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function of `fn`'s arguments that returns `(value, gradients)`, or
        `((value, aux), gradients)`. The gradients are a list in the order of
        `variables`, each of its variable's shape. On torch and TensorFlow, a gradient
        is None if the value does not depend on the variable.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    v = keras.Variable(3.0)
    value, (gradient,) = ks.value_and_grad(lambda x: x * v * v, [v])(2.0)
    assert float(value) == 18.0 and float(gradient) == 12.0
    ```
    """
    return get_engine().value_and_grad(fn, list(variables), has_aux)


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Sum a replica's losses and divide by the rows of the global batch.

    With gradients that are summed over the replicas, as `optimizer.apply` does in
    `strategy.run`, the result is the mean over the global batch. The formula is that of
    `tf.nn.compute_average_loss`: sum(per_example_loss * sample_weight) /
    global_batch_size. In a step of `fit`, which weights replicas by their rows, the
    result is the same mean.

    Without `global_batch_size`, the replicas sum their numbers of rows, and the result
    equals that of one device for any split. This costs a collective of one number,
    except on JAX with replicas in one program, which have equal numbers of rows.

    Args:
        per_example_loss: Losses of this replica's rows, of rank 1 or more.
        sample_weight: Weights that can be multiplied with the losses, or None.
        global_batch_size: The divisor, a number or an integer scalar. By default the
            rows of `per_example_loss` on all replicas.

    Returns:
        A scalar.

    Raises:
        ValueError: If `per_example_loss` is a scalar, or `global_batch_size` is not.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    losses = np.array([1.0, 2.0, 3.0], "float32")
    assert float(ks.compute_average_loss(losses, global_batch_size=6)) == 1.0

    strategy = ks.MirroredStrategy()
    batches = [np.float32([1, 2, 3, 4]), np.float32([5])]  # the last one is uneven
    dataset = strategy.experimental_distribute_dataset(batches)
    parts = [strategy.run(ks.compute_average_loss, args=(batch,)) for batch in dataset]
    assert [float(strategy.reduce("SUM", part)) for part in parts] == [2.5, 5.0]
    ```
    """
    losses = ops.convert_to_tensor(per_example_loss)
    if len(losses.shape) == 0:
        raise ValueError(
            "Argument `per_example_loss` must have a batch dimension. Use a loss with "
            'reduction="none". Received a scalar.'
        )
    if sample_weight is not None:
        weights = ops.cast(ops.convert_to_tensor(sample_weight), losses.dtype)
        missing = len(losses.shape) - len(weights.shape)
        losses = losses * ops.reshape(weights, tuple(weights.shape) + (1,) * missing)
    replica = context.distributed_replica()
    weight = None if replica is None else replica.step.row_weight
    if global_batch_size is None:
        global_batch_size = ops.shape(losses)[0]
        if weight is not None:
            weight = None  # `fit` weights the mean over a replica's rows
        elif replica is not None:
            global_batch_size = replica.all_reduce(ReduceOp.SUM, global_batch_size)
    size = ops.convert_to_tensor(global_batch_size)
    if len(size.shape) != 0:
        raise ValueError(
            "Argument `global_batch_size` must be a scalar. Received: "
            f"global_batch_size={global_batch_size!r}"
        )
    size = ops.cast(size, losses.dtype)
    if weight is not None:
        size = size * ops.cast(weight, size.dtype)  # `fit` multiplies by the weight
    return ops.divide_no_nan(ops.sum(losses), size)


@contextlib.contextmanager
def weight_by_rows(rows: Any) -> Iterator[None]:
    """Context manager in which `optimizer.apply` weights gradients by rows.

    In `strategy.run`, `optimizer.apply` sums gradients, which suits losses from
    `compute_average_loss`. If your loss is a mean over the replica's rows, each
    gradient must be multiplied by local rows / global rows, as `fit` does. A replica
    with 0 rows is ignored. This costs a collective of one number. Keras's losses need
    no weights: in `run` they divide by the rows of all replicas.

    Args:
        rows: The number of rows of this replica's mean, an integer or integer scalar, 0
            or more.

    Yields:
        Nothing. Call `optimizer.apply` inside. In a step of `fit`, which has row
        weights already, and with one replica it has no effect.

    Raises:
        ValueError: If `rows` is not an integer or integer scalar.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        v = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)

    def step(x):
        mean = lambda: keras.ops.mean(v * x)
        loss, gradients = ks.value_and_grad(mean, [v])()
        with ks.weight_by_rows(keras.ops.shape(x)[0]):
            optimizer.apply(gradients, [v])

    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 6])])
    strategy.run(step, args=(batch,))
    assert float(v) == -3.0  # the mean of the three, on any number of replicas
    ```
    """
    if ops.is_tensor(rows):
        dtype = keras.backend.standardize_dtype(rows.dtype)
        is_integer = len(rows.shape) == 0 and "int" in dtype
    else:
        is_integer = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    if not is_integer:
        raise ValueError(
            "Argument `rows` must be an integer, such as `keras.ops.shape(x)[0]`. "
            f"Received: rows={rows!r}"
        )
    replica = context.distributed_replica()
    if replica is None or replica.step.row_weight is not None:
        yield
        return
    count = ops.cast(rows, "float32")
    total = replica.all_reduce(ReduceOp.SUM, count)
    replica.step.row_weight = ops.divide_no_nan(count, total)
    try:
        yield
    finally:
        replica.step.row_weight = None


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Divide a regularization loss by the number of replicas.

    Every replica computes all of it, and the gradients are summed. The formula is that
    of `tf.nn.scale_regularization_loss`: sum(loss) / replicas. In a step of `fit`,
    which weights replicas by their rows, it is sum(loss).

    Args:
        regularization_loss: A tensor, or a list of scalars such as `model.losses`.

    Returns:
        A scalar.

    Raises:
        RuntimeError: In cross-replica context, where there is nothing to divide.

    Example:

    ```python
    import keras_strategy as ks

    assert float(ks.scale_regularization_loss([1.0, 2.0])) == 3.0
    ```
    """
    if context.in_cross_replica_context():
        raise RuntimeError(
            "`scale_regularization_loss` must be called in replica context, in the "
            "function that you pass to `strategy.run`."
        )
    replica = context.distributed_replica()
    is_in_run = replica is not None and replica.step.row_weight is None
    replicas = context.get_strategy().num_replicas_in_sync if is_in_run else 1
    if isinstance(regularization_loss, list | tuple):
        losses = [ops.sum(ops.convert_to_tensor(loss)) for loss in regularization_loss]
        total = sum(losses[1:], losses[0]) if losses else ops.zeros(())
    else:
        total = ops.sum(ops.convert_to_tensor(regularization_loss))
    return total / replicas
