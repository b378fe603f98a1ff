"""Operations on replicas' tensors: sums, concatenation, and rows of batches.

Types are checked first, because a collective that fails on unequal shapes makes
TensorFlow refuse all later ones.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.compile_cache import require
from keras_strategy.training.reduction import check_same_dtype
from keras_strategy.training.train_step import count_rows


def check_same_layout(values: Sequence[Any]) -> None:
    """Raise `ValueError` if the replicas' tensors differ in dtype or shape."""
    check_same_dtype(values)
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return
    first = values[0].shape
    if not all(first.is_compatible_with(value.shape) for value in values[1:]):
        raise ValueError(
            "The replicas' values must have the same shape to be combined "
            "elementwise. Pass `axis` to combine rows, or use `gather` or "
            "`all_gather` to concatenate them. Received the shapes "
            f"{[tuple(value.shape) for value in values]}."
        )


def concat_values(values: Sequence[Any], axis: int) -> Any:
    """Concatenate the replicas' tensors along `axis`, where their sizes may differ."""
    values = [convert_to_reducible(value) for value in values]
    check_same_dtype(values)
    shapes = [value.shape for value in values]
    received = f"Received: axis={axis!r} for values of the shapes {shapes}"
    rank = shapes[0].rank
    if any(shape.rank != rank for shape in shapes) or not -rank <= axis < rank:
        raise ValueError(
            "Only tensors of the same rank can be gathered, along a dimension that "
            f"they have; scalars cannot. {received}"
        )
    axis %= rank
    for i in range(rank):
        sizes = {shape[i] for shape in shapes if shape[i] is not None}
        if i != axis and len(sizes) > 1:
            raise ValueError(
                f"Tensors that are gathered along axis {axis} must have the same "
                f"sizes in all other dimensions. {received}"
            )
    return tf.concat(values, axis)


def divide(total: Any, count: Any) -> Any:
    """Divide a sum by a count; the mean of integers is a float."""
    if isinstance(total, tf.IndexedSlices):
        values = divide(total.values, count)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    if not total.dtype.is_floating and not total.dtype.is_complex:
        total = tf.cast(total, tf.float64)
    return total / tf.cast(count, total.dtype)


def sum_values(values: Sequence[Any], add: Any = None) -> Any:
    if not isinstance(values[0], tf.IndexedSlices):
        if not values[0].dtype.is_numeric:
            raise ValueError(
                "Only numbers can be combined over the replicas. Received tensors of "
                f"the dtype {values[0].dtype.name}."
            )
        return (add or tf.add_n)(values)
    return tf.IndexedSlices(
        tf.concat([value.values for value in values], 0),
        tf.concat([value.indices for value in values], 0),
        values[0].dense_shape,
    )


# Values of these ops differ between replicas, or depend on the local number of rows.
_OPS_WITH_ROWS = {"Placeholder", "IteratorGetNext", "Shape", "ShapeN", "Size"}


def _source_ops(tensor: Any) -> set[str]:
    """Return the types of the ops that a tensor's values come from."""
    types, pending, visited = set(), [tensor], set()
    while pending:
        tensor = pending.pop()
        if isinstance(tensor, tf.__internal__.EagerTensor) or tensor.ref() in visited:
            continue
        visited.add(tensor.ref())
        op, inputs = tensor.op, list(tensor.op.inputs)
        if op.type == "Placeholder":
            captures = getattr(tensor.graph, "captures", ())
            inputs = [outer for outer, inner in captures if inner is tensor]
            if inputs:
                pending += inputs
                continue
        if op.type == "StridedSlice" and inputs[0].op.type == "Shape":
            begin = tf.get_static_value(inputs[1])
            if begin is not None and begin.min() > 0:
                continue  # the size of another dimension than that of the rows
        types.add(op.type)
        if op.type != "ReadVariableOp":
            pending += inputs[:1] if op.type == "Reshape" else inputs
    return types


def split_lookups(gradient: Any) -> list[tuple[Any, set[str]]]:
    """Split slices by lookup, with the types of the ops that the indices come from."""
    indices = getattr(gradient, "indices", None)
    if indices is None or isinstance(indices, tf.__internal__.EagerTensor):
        return [(gradient, _OPS_WITH_ROWS)]
    is_joined = indices.op.type == "ConcatV2"  # its last input is the axis
    lookups = list(indices.op.inputs)[:-1] if is_joined else [indices]
    sources = [_source_ops(lookup) for lookup in lookups]
    if len(lookups) == 1 or all(ops & _OPS_WITH_ROWS for ops in sources):
        return [(gradient, set.union(*sources))]
    values = tf.split(gradient.values, [tf.size(lookup) for lookup in lookups])
    return [
        (tf.IndexedSlices(part, lookup, gradient.dense_shape), ops)
        for part, lookup, ops in zip(values, lookups, sources, strict=True)
    ]


def join_lookups(
    parts: Sequence[tuple[Any, set[str]]], totals: Iterator[Any], replicas: int
) -> Any:
    """Join what `split_lookups` returned, with the next totals in its place."""
    joined = [_add_shared(next(totals), ops, replicas) for _, ops in parts]
    return joined[0] if len(joined) == 1 else sum_values(joined)


def _add_shared(total: Any, source_ops: set[str], replicas: int) -> Any:
    """Add up the replicas' slices of a lookup that does not depend on their rows."""
    # One device has one slice for each index, and Keras's optimizers square each slice.
    if source_ops & _OPS_WITH_ROWS:
        return total
    indices, values = total.indices, total.values
    count = tf.size(indices) // replicas
    first = indices[:count]
    is_shared = tf.size(indices) == count * replicas
    repeated = tf.gather(first, tf.range(tf.size(indices)) % count)
    is_shared &= tf.reduce_all(repeated == indices)
    if not any(op.startswith("Stateless") for op in source_ops):
        # Repeated indices may be those of each row. Random ones may repeat.
        is_shared &= tf.size(tf.unique(first).y) == count

    def add():
        shape = tf.concat([[replicas, count], tf.shape(values)[1:]], 0)
        return tf.reduce_sum(tf.reshape(values, shape), 0), first

    values, indices = tf.cond(is_shared, add, lambda: (values, indices))
    return tf.IndexedSlices(values, indices, total.dense_shape)


def convert_to_reducible(value: Any) -> Any:
    """Return a tensor or `tf.IndexedSlices`, or raise `ValueError`."""
    if isinstance(value, tf.IndexedSlices):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Only tensors and numbers can be combined over the replicas. "
            f"Received: {value!r} of type {type(value).__name__}"
        ) from error


def rows_of_tensor(value: Any) -> Any:
    """Return the row count of a dense, ragged or sparse tensor as a scalar tensor."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    if value.shape.rank == 0:
        raise ValueError(
            "A batch must be made of arrays whose first dimension is its rows. "
            "Received a scalar."
        )
    return tf.shape(value)[0]


def common_rows(arrays: Sequence[Any]) -> Any:
    """Return the rows of a batch, after a check that all arrays agree."""
    # The number is a tensor where a trace does not know it.
    leaves = [array for array in arrays if array is not None]
    if all(leaf.shape.rank and leaf.shape[0] is not None for leaf in leaves):
        try:
            return count_rows(leaves)
        except ValueError as error:
            # AutoGraph would put its own traceback before the message.
            setattr(error, "ag_pass_through", True)  # noqa: B010
            raise
    rows = tf.stack([rows_of_tensor(leaf) for leaf in leaves])
    is_equal = tf.reduce_all(rows == rows[0])
    message = (
        "The arrays of a batch must have the same number of rows. Received arrays with "
        "these numbers of rows:"
    )
    with tf.control_dependencies([require(is_equal, message, rows)]):
        return tf.identity(rows[0])  # nothing is computed from the batch before


def slice_rows(value: Any, bounds: tuple[Any, Any]) -> Any:
    """Return rows of a dense, ragged or sparse tensor; None for None."""
    begin, end = bounds
    if value is None:
        return None
    if not isinstance(value, tf.SparseTensor):
        return value[begin:end]
    shape = value.dense_shape
    begin, rows = tf.cast(begin, shape.dtype), tf.cast(end - begin, shape.dtype)
    start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
    part = tf.sparse.slice(value, start, tf.concat([[rows], shape[1:]], 0))
    part.set_shape([None, *value.shape[1:]])
    return part
