"""Collectives between the workers.

They are TensorFlow's own, in a group with one device of each worker. TensorFlow leaves
it to the caller to number them, and matches collectives by that number. Here a variable
counts them, so that the numbers agree on all workers wherever a collective is executed:
eagerly, in a tf.function that only some workers have to trace, in a loop or a branch.

Workers compare what they are about to send, in one of two ways. Either each reports a
layout row before: integers with a key of the call, the dtype, the rank and the sizes,
and room for one scalar. All rows have one length, so workers that bring different
tensors still meet in the collective that reports the difference. Or, if the shapes are
known, a checksum of name, shapes and dtype is sent behind the values.
"""

import contextlib
import enum
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow import connection
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import (
    CHECKSUM_TAIL,
    MAX_CHECKSUM_WORKERS,
    WorkerCollectives,
    call_checksum,
    check_nccl,
    checksum_tail,
    operation_kind,
)
from keras_strategy.options import CommunicationImplementation
from keras_strategy.training.sharding import FlatShards

# Group keys; native strategies number theirs from 1, and ours from 100,000.
_HOST_GROUP, _ACCELERATOR_GROUP = 90_001, 90_002
_VALUES_DIFFER = "keras_strategy: the workers bring different values"
_SUMS_DIFFER = "keras_strategy: the workers add up different things:"
# TensorFlow's message when mismatching collectives meet.
_MISMATCH = r"(Shape mismatch in the c|C)ollective instance .*"

# The columns of a layout row: key, dtype and rank, then the sizes, then the scalar.
_MAX_RANK = 12
_FIRST_DIMENSION = 3
_COMPARED_WIDTH = _FIRST_DIMENSION + _MAX_RANK
_SCALAR_WIDTH = 2
# Dtypes whose sums are exact, for scalars in a row and for checksums behind values.
_EXACT_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


class Verify(enum.Enum):
    """When workers compare the layouts of what they add up."""

    # In a collective of its own before the values are sent. All workers learn what
    # differs, and later collectives work.
    BEFORE = enum.auto()
    # In the collective that adds up, if the shapes are known. For values whose layout
    # follows from variables, which are compared on creation. If the sizes differ,
    # TensorFlow aborts all collectives.
    INLINE = enum.auto()
    # The workers have already agreed on the layout.
    NEVER = enum.auto()


class TensorFlowWorkers(WorkerCollectives):
    # In a tf.function a mismatch is reported when the function is executed. After a
    # collective that failed, TensorFlow refuses all later ones.

    def __init__(self, cluster: Cluster, addresses: Sequence[str]):
        super().__init__(cluster)
        self.addresses = tuple(addresses)
        worker = connection.worker_device(self.rank)
        self._host = f"{worker}/device:CPU:0"
        self._accelerator = f"{worker}/device:GPU:0"
        implementation = cluster.options.implementation
        assert isinstance(implementation, CommunicationImplementation)
        gpus = tf.config.list_logical_devices("GPU")
        check_nccl(cluster, bool(gpus), "TensorFlow")
        self.implementation = implementation
        is_ring = implementation is CommunicationImplementation.RING
        self.uses_accelerators = bool(gpus) and not is_ring
        # Our watchdog reports first, because it knows which worker is missing.
        self.timeout_seconds = cluster.client.timeout_seconds + 60
        # What error messages refer to: names by the keys of layout rows, and names and
        # layouts by checksums.
        self._names: dict[int, str] = {}
        self._calls: dict[str, tuple[str, list[Any]]] = {}
        self._scalar_sums: dict[tuple[tf.DType, tf.DType], Callable] = {}
        with tf.init_scope(), tf.device(self._host):
            self._count = tf.Variable(tf.constant(0), trainable=False)

    def sum(self, name: str, tensor: Any, verify: Verify = Verify.BEFORE) -> Any:
        # A mismatch in a tf.function raises `InvalidArgumentError`, which
        # `collective_scope` converts. `sum_values` has checked that these are numbers.
        with self.collective_scope(name):
            return self._sum(name, tf.convert_to_tensor(tensor), verify)

    def sum_all(
        self, name: str, tensors: Sequence[Any], verify: Verify = Verify.BEFORE
    ) -> list[Any]:
        """Return the sums of tensors and `tf.IndexedSlices`."""
        results: list[Any] = [
            x if isinstance(x, tf.IndexedSlices) else tf.convert_to_tensor(x)
            for x in tensors
        ]
        for indices in self._packs(results):
            parts = [results[index] for index in indices]
            if verify is Verify.INLINE and self.can_verify(parts):
                sums = self._sum_with_checksum(name, parts)
            elif len(parts) == 1:
                sums = [self.sum(name, parts[0], verify)]
            else:
                flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
                total = self.sum(name, flat, verify)
                pieces = tf.split(total, [tf.size(part) for part in parts])
                sums = [
                    tf.ensure_shape(tf.reshape(piece, tf.shape(part)), part.shape)
                    for part, piece in zip(parts, pieces, strict=True)
                ]
            for index, total in zip(indices, sums, strict=True):
                results[index] = total
        for index, value in enumerate(results):
            if isinstance(value, tf.IndexedSlices):
                results[index] = tf.IndexedSlices(
                    self.gather(name, value.values, 0)[0],
                    self.gather(name, value.indices, 0)[0],
                    value.dense_shape,
                )
        return results

    def reduce_scatter(
        self, name: str, tensors: Sequence[Any], shares: Sequence[FlatShards]
    ) -> list[Any]:
        """Return this worker's flat shards of the sums of the workers' tensors."""
        # Each worker sends the others their shards and adds up what it receives: half
        # of what an all-reduce sends. TensorFlow has no reduce-scatter for CPUs.
        results: list[Any] = list(tensors)
        for indices in self._packs(tensors):
            parts = [tensors[index] for index in indices]
            flat = [tf.reshape(part, [-1]) for part in parts]
            bounds = [shares[index].bounds for index in indices]
            sizes = [
                [shares[index].size_of(rank) for index in indices]
                for rank in range(self.size)
            ]
            # An all-to-all sends chunks of equal size.
            padding = [max(map(sum, sizes)) - sum(size) for size in sizes]
            key, checksum = self._checksum(name, parts)
            chunks = []
            for rank in range(self.size):
                for tensor, one in zip(flat, bounds, strict=True):
                    begin, end = one[rank]
                    chunks.append(tensor[begin:end])
                chunks += [tf.zeros([padding[rank]], checksum.dtype), checksum]
            sent = tf.reshape(tf.concat(chunks, 0), [self.size, -1])
            exchanged = self._launch(tf.raw_ops.CollectiveAllToAllV2, sent)
            total = tf.reduce_sum(exchanged, 0)
            *sums, _, received = tf.split(
                total, [*sizes[self.rank], padding[self.rank], CHECKSUM_TAIL]
            )
            check = self._verify(key, checksum, received)
            with tf.control_dependencies([check]):
                for index, shard in zip(indices, sums, strict=True):
                    results[index] = tf.identity(shard)
        return results

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[Any, Any]:
        with self.collective_scope(name):
            return self._gather(name, tensor, axis)

    def _gather(self, name: str, tensor: Any, axis: int) -> tuple[Any, Any]:
        axis %= tensor.shape.rank
        rows, check = self._compare(
            self._key(name, tensor), tensor, tensor.dtype, axis=axis
        )
        counts = rows[:, _FIRST_DIMENSION + axis]
        with tf.control_dependencies([check]):
            # Put the axis first, because tensors are padded to the longest.
            sent, decode = _encode(tensor, for_gather=True)
            others = [i for i in range(sent.shape.rank) if i != axis]
            sent = tf.transpose(sent, [axis, *others])
            longest = tf.maximum(tf.reduce_max(counts), 1)
            missing = longest - tf.shape(sent)[0]
            paddings = tf.pad([[0, missing]], [[0, len(others)], [0, 0]])
            sent = tf.pad(sent, paddings)
            gathered = self._launch(tf.raw_ops.CollectiveGatherV2, sent)
            parts = tf.split(gathered, self.size)
        unpadded = [part[: counts[i]] for i, part in enumerate(parts)]
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(others) + 1)]
        result = decode(tf.transpose(tf.concat(unpadded, 0), order))
        dims = tensor.shape.as_list()
        return tf.ensure_shape(result, [*dims[:axis], None, *dims[axis + 1 :]]), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        if self.rank > 0:
            tensors = [tf.zeros_like(tensor) for tensor in tensors]
        with self.collective_scope(name):
            return [self._sum(name, tensor, Verify.BEFORE) for tensor in tensors]

    @contextlib.contextmanager
    def collective_scope(self, name: str) -> Iterator[None]:
        """Context manager that runs collectives and explains why they failed."""
        if tf.inside_function():
            yield
            return
        with self.track_operation(name):
            try:
                yield
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                explanation = self._explain(str(error))
                if explanation is None:
                    raise
                raise explanation from error

    def can_verify(self, tensors: Sequence[Any]) -> bool:
        """Return True if tensors of one dtype can carry a checksum."""
        shapes_are_known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        is_exact = tensors[0].dtype in _EXACT_DTYPES
        return shapes_are_known and is_exact and self.size <= MAX_CHECKSUM_WORKERS

    def _sum(self, name: str, tensor: Any, verify: Verify) -> Any:
        sent, decode = _encode(tensor)
        # Whether the scalar is sent within the row depends only on dtype and rank: a
        # tf.function of one worker may know sizes that another worker's does not.
        is_exact_scalar = sent.shape.rank == 0 and sent.dtype in _EXACT_DTYPES
        if verify is Verify.BEFORE and is_exact_scalar:
            return decode(self._sum_scalar(name, tensor.dtype, sent))
        checks = []
        if verify is not Verify.NEVER:
            key = self._key(name, tensor)
            checks = [self._compare(key, tensor, tensor.dtype)[1]]
        if sent.shape.num_elements() == 0:
            return tensor
        with tf.control_dependencies(checks):
            total = decode(self._all_reduce(tf.identity(sent)))
        return tf.ensure_shape(total, tensor.shape)

    def _sum_scalar(self, name: str, dtype: tf.DType, scalar: Any) -> Any:
        def compute(key, scalar):
            rows, check = self._compare(key, scalar, dtype, has_scalar=True)
            with tf.control_dependencies([check]), tf.device(self._host):
                bits = rows[:, _COMPARED_WIDTH:]
                if scalar.dtype.size == 4:
                    bits = bits[:, 0]
                total = tf.reduce_sum(tf.bitcast(bits, scalar.dtype))
                return tf.ensure_shape(total, ())

        key = self._key(name, scalar)
        if not tf.executing_eagerly():
            return compute(key, scalar)
        # As single operations this would take longer than a small model's step.
        dtypes = dtype, scalar.dtype
        if dtypes not in self._scalar_sums:
            spec = [tf.TensorSpec((), tf.int32), tf.TensorSpec((), scalar.dtype)]
            self._scalar_sums[dtypes] = tf.function(
                compute, input_signature=spec, autograph=False
            )
        return self._scalar_sums[dtypes](key, scalar)

    def _sum_with_checksum(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums of tensors that `can_verify` accepts."""
        key, checksum = self._checksum(name, tensors)
        flat = tf.concat([*(tf.reshape(x, [-1]) for x in tensors), checksum], 0)
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        total = self._all_reduce(flat)
        *sums, received = tf.split(total, [*sizes, CHECKSUM_TAIL])
        with tf.control_dependencies([self._verify(key, checksum, received)]):
            return [
                tf.reshape(total, tensor.shape)
                for total, tensor in zip(sums, tensors, strict=True)
            ]

    def _checksum(self, name: str, tensors: Sequence[Any]) -> tuple[str, Any]:
        """Return the key of a call in error messages, and its checksum."""
        dtype, shapes = tensors[0].dtype, tuple(tuple(x.shape) for x in tensors)
        digest = call_checksum(operation_kind(name), shapes, dtype.name)
        key, layout = digest.hex(), [list(shape) for shape in shapes]
        self._calls[key] = name, [layout if len(layout) > 1 else layout[0], dtype.name]
        return key, tf.constant(checksum_tail(digest), dtype)

    def _verify(self, key: str, checksum: Any, received: Any) -> Any:
        with tf.device(self._host):
            is_same = tf.reduce_all(received == self.size * checksum)
            return tf.debugging.Assert(is_same, [f"{_SUMS_DIFFER} {key}"])

    def _packs(self, tensors: Sequence[Any]) -> Iterator[list[int]]:
        """Yield indices of dense tensors of one dtype, which one collective carries."""
        limit = self.cluster.options.bytes_per_pack
        packs: dict[Any, tuple[list[int], int]] = {}
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                continue
            size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
            indices, pack_size = packs.get(tensor.dtype, ([], 0))
            if indices and limit and pack_size + size > limit:
                yield indices
                indices, pack_size = [], 0
            packs[tensor.dtype] = ([*indices, index], pack_size + size)
        for indices, _ in packs.values():
            yield indices

    def _all_reduce(self, tensor: Any) -> Any:
        reduce = tf.raw_ops.CollectiveReduceV2
        return self._launch(reduce, tensor, merge_op="Add", final_op="Id")

    def _launch(self, collective: Any, tensor: Any, **arguments: Any) -> Any:
        # Integers stay on the host: TensorFlow keeps them in its memory on a GPU, too.
        on_host = not (self.uses_accelerators and tensor.dtype.is_floating)
        with tf.device(self._host):
            number = self._count.assign_add(1)
        with tf.device(self._host if on_host else self._accelerator):
            return collective(
                input=tensor,
                group_size=self.size,
                group_key=_HOST_GROUP if on_host else _ACCELERATOR_GROUP,
                instance_key=number,
                # Makes a tf.function execute collectives in program order.
                ordering_token=[self._count.handle],
                communication_hint=(
                    "ring" if on_host else self.implementation.value.lower()
                ),
                timeout_seconds=self.timeout_seconds,
                **arguments,
            )

    def _key(self, name: str, tensor: Any) -> int:
        """Check the rank of a tensor, and return a number for the name of a call."""
        rank = tensor.shape.rank
        if rank is None or rank > _MAX_RANK:
            raise ValueError(
                f"`{name}` accepts tensors of known rank, of at most "
                f"{_MAX_RANK} dimensions. Received: {tensor!r}"
            )
        key = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self._names[key] = name
        return key

    def _compare(
        self,
        key: Any,
        tensor: Any,
        dtype: tf.DType,
        axis: int | None = None,
        has_scalar: bool = False,
    ) -> tuple[Any, Any]:
        """Return all workers' layout rows, and an assertion that they are equal."""
        # Sizes along `axis` may differ. With `has_scalar` the tensor, a scalar, is sent
        # within the row; `dtype` is the one that it had before it was encoded.
        rank = tensor.shape.rank
        with tf.device(self._host):
            bits: Any = [0] * _SCALAR_WIDTH
            if has_scalar:
                bits = tf.reshape(tf.bitcast(tensor, tf.int32), [-1])
                bits = tf.pad(bits, [[0, _SCALAR_WIDTH - tensor.dtype.size // 4]])
            start = [key, dtype.as_datatype_enum, rank]
            padding = [-1] * (_MAX_RANK - rank)
            row = tf.concat([start, tf.shape(tensor, tf.int32), padding, bits], 0)
            rows = self._launch(tf.raw_ops.CollectiveGatherV2, row[tf.newaxis])
            layouts = rows[:, :_COMPARED_WIDTH]
            ignored_column = -1 if axis is None else _FIRST_DIMENSION + axis
            is_ignored = tf.range(_COMPARED_WIDTH) == ignored_column
            is_same = tf.reduce_all((layouts == layouts[:1]) | is_ignored)
            exception = "" if axis is None else f" other than axis {axis}"
            check = tf.debugging.Assert(
                is_same, [f"{_VALUES_DIFFER}{exception}:", layouts], summarize=10_000
            )
        return rows, check

    def _explain(self, message: str) -> Exception | None:
        """Return the error that explains TensorFlow's; None if it is not ours."""
        found = re.search(rf"{_SUMS_DIFFER} (\w+)", message)
        if found is not None:
            return self.mismatch_error(*self._calls[found[1]])
        found = re.search(_MISMATCH, message)
        if found is not None:
            return RuntimeError(
                "All workers must make the same calls in the same order, with values "
                "of the same dtypes and sizes. TensorFlow, which refuses all later "
                f"collectives, reports: {found[0]}"
            )
        # TensorFlow formats the rows differently eagerly and in a tf.function.
        found = re.search(
            rf"{_VALUES_DIFFER}( other than axis \d+)?:(.*)", message, re.S
        )
        if found is None:
            return None
        exception, text = found.groups()
        numbers = [int(number) for number in re.findall(r"-?\d+", text)]
        keys: list[int] = []
        layouts: list[list[Any]] = []
        for first in range(0, self.size * _COMPARED_WIDTH, _COMPARED_WIDTH):
            key, dtype, rank, *dims = numbers[first : first + _COMPARED_WIDTH]
            keys.append(key)
            layouts.append([dims[:rank], tf.as_dtype(dtype).name])
        name = self._names[keys[self.rank]]
        calls = [name]
        if len(set(keys)) > 1:
            calls = self.cluster.exchange("the comparison of what is sent", name)
        return self.calls_differ_error(name, calls, layouts, exception or "")


_connected: TensorFlowWorkers | None = None


def connect(cluster: Cluster) -> TensorFlowWorkers:
    global _connected
    if _connected is None:
        _connected = TensorFlowWorkers(cluster, connection.start(cluster))
    return _connected


def gather_over_workers(
    workers: WorkerCollectives, name: str, value: Any, axis: int = 0
) -> Any:
    """Concatenate values in rank order; along axis 0 also ragged and sparse ones."""
    ragged: Any = tf.RaggedTensor  # TensorFlow's annotations lack its methods
    if isinstance(value, ragged):
        return ragged.from_nested_row_lengths(
            workers.gather(name, value.flat_values, 0)[0],
            [workers.gather(name, n, 0)[0] for n in value.nested_row_lengths()],
        )
    if not isinstance(value, tf.SparseTensor):
        return workers.gather(name, value, axis)[0]
    shapes, _ = workers.gather(name, value.dense_shape[tf.newaxis], 0)
    first_row = tf.reduce_sum(shapes[: workers.rank, 0])
    rows, columns = value.indices[:, :1], value.indices[:, 1:]
    indices = tf.concat([rows + first_row, columns], 1)
    shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], value.dense_shape[1:]], 0)
    return tf.SparseTensor(
        workers.gather(name, indices, 0)[0],
        workers.gather(name, value.values, 0)[0],
        shape,
    )


def _encode(tensor: Any, for_gather: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """Return a tensor in a dtype that collectives accept, and the inverse."""
    dtype = tensor.dtype
    if dtype == tf.string or dtype == tf.resource or dtype == tf.variant:
        raise ValueError(
            "Only numbers and booleans can be sent between workers. Received a tensor "
            f"of the dtype {dtype.name}."
        )
    if dtype.is_complex:
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return parts, lambda sent: tf.complex(sent[..., 0], sent[..., 1])
    supported = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
    if dtype in supported or (dtype == tf.bfloat16 and not for_gather):
        return tensor, lambda sent: sent
    if dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64), lambda sent: tf.bitcast(sent, tf.uint64)
    wider = tf.int64 if dtype.is_integer else tf.float32
    wider = tf.int32 if dtype.is_bool else wider
    return tf.cast(tensor, wider), lambda sent: tf.cast(sent, dtype)
