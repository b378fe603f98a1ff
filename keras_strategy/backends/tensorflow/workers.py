"""Collectives between the processes of a cluster.

They are TensorFlow's own, in a group with one device of each worker. What TensorFlow
leaves to its caller is the number by which the workers recognise a collective. Here a
variable counts them, so that the numbers are the same on all workers wherever the
collective is executed: eagerly, in a tf.function that only some workers have to trace,
in a loop or in a branch.
"""

import contextlib
import enum
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow import connection, layouts
from keras_strategy.backends.tensorflow.along import SumsThatTell
from keras_strategy.core.workers import Workers
from keras_strategy.options.communication import CommunicationImplementation
from keras_strategy.rules.sharding import Shares
from keras_strategy.workers.cluster import Cluster

# Groups of collectives; native strategies number theirs from 1, and ours from 100 000.
_HOST_GROUP, _ACCELERATOR_GROUP = 90_001, 90_002
_DIFFERENT = "keras_strategy: the workers bring different values"
# How TensorFlow says that workers meet in collectives that do not fit together.
_REFUSED = r"(Shape mismatch in the c|C)ollective instance .*"


class Compare(enum.Enum):
    """When workers compare what they add up.

    Attributes:
        BEFORE: Before it travels, in a collective of its own: all learn what differs,
            and later collectives work.
        ALONG: In the collective that adds it up, where the shapes are known: for what
            follows from variables, which are compared when they are made. TensorFlow
            ends all collectives where the sizes differ.
        NEVER: They have agreed on it.
    """

    BEFORE = enum.auto()
    ALONG = enum.auto()
    NEVER = enum.auto()


class TensorFlowWorkers(Workers):
    """See `core.workers.Workers`. In a tf.function a refusal comes when it is executed.

    After a collective that fails, TensorFlow refuses all others.

    Args:
        cluster: The workers.
        addresses: The addresses of TensorFlow's servers, by rank.

    Attributes:
        along: Sums of what tells, while it travels, what it is.
    """

    def __init__(self, cluster: Cluster, addresses: Sequence[str]):
        super().__init__(cluster)
        self.addresses = tuple(addresses)
        here = connection.worker_device(self.rank)
        self._host = f"{here}/device:CPU:0"
        implementation = cluster.options.implementation
        assert isinstance(implementation, CommunicationImplementation)
        gpus = tf.config.list_logical_devices("GPU")
        if implementation is CommunicationImplementation.NCCL and not gpus:
            raise ValueError(
                "CommunicationImplementation.NCCL needs GPUs, and TensorFlow sees "
                "none. Use AUTO or RING."
            )
        self.implementation = implementation
        ring = implementation is CommunicationImplementation.RING
        self._accelerator = f"{here}/device:GPU:0" if gpus and not ring else None
        self._hint = implementation.value.lower()
        # Our watchdog knows who is missing, and shall speak first.
        self.timeout_seconds = cluster.member.timeout_seconds + 60
        self._names: dict[int, str] = {}
        self._sums_of_scalars: dict[tuple[tf.DType, tf.DType], Callable] = {}
        self.along = SumsThatTell(self.rank, self.size, self._host, self._launch)
        with tf.init_scope(), tf.device(self._host):
            self._count = tf.Variable(tf.constant(0), trainable=False)

    @property
    def on_accelerators(self) -> bool:
        """Whether floats travel between accelerators."""
        return self._accelerator is not None

    def sum(self, name: str, tensor: Any, compare: Compare = Compare.BEFORE) -> Any:
        """The sum of the workers' tensors.

        Args:
            name: What the sum is for.
            tensor: A tensor of the same shape and dtype on all workers.
            compare: When to make sure of that; `ALONG` is for `sum_all`.

        Raises:
            ValueError: If it cannot be summed, or the shapes or dtypes differ. In a
                tf.function an `InvalidArgumentError`, which `calling` makes one.
        """
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_numeric:
            raise ValueError(
                "Only numbers can be combined over the replicas. Received a tensor of "
                f"the dtype {tensor.dtype.name} for `{name}`."
            )
        return self._sum(name, tensor, compare)

    def sum_all(
        self,
        name: str,
        tensors: Sequence[Any],
        compare: Compare = Compare.BEFORE,
    ) -> list[Any]:
        """The sums of several tensors; those of a dtype travel together."""
        results: list[Any] = list(tensors)
        for indices in self._packs(tensors):
            parts = [tensors[index] for index in indices]
            if compare is Compare.ALONG and self.along.may_add_up(parts):
                for index, total in zip(
                    indices, self.along.sums(name, parts), strict=True
                ):
                    results[index] = total
                continue
            if len(parts) == 1:
                results[indices[0]] = self.sum(name, parts[0], compare)
                continue
            flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
            pieces = tf.split(
                self.sum(name, flat, compare), [tf.size(part) for part in parts]
            )
            for index, part, piece in zip(indices, parts, pieces, strict=True):
                results[index] = tf.ensure_shape(
                    tf.reshape(piece, tf.shape(part)), part.shape
                )
        return results

    def sum_shares(
        self, name: str, tensors: Sequence[Any], shares: Sequence[Shares]
    ) -> list[Any]:
        """See `SumsThatTell.shares`; those of a dtype travel together."""
        results: list[Any] = list(tensors)
        for indices in self._packs(tensors):
            pairs = [(tensors[index], shares[index]) for index in indices]
            found = self.along.shares(name, *zip(*pairs, strict=True))
            for index, share in zip(indices, found, strict=True):
                results[index] = share
        return results

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[Any, Any]:
        axis %= tensor.shape.rank
        key = self._key(name, tensor)
        rows, same = self._compared(key, tensor, tensor.dtype, axis)
        counts = rows[:, layouts.FIRST_DIMENSION + axis]
        with tf.control_dependencies(same):
            # The axis comes first, since what is sent is padded to the longest.
            sent, back = _sendable(tensor, gathered=True)
            others = [i for i in range(sent.shape.rank) if i != axis]
            sent = tf.transpose(sent, [axis, *others])
            longest = tf.maximum(tf.reduce_max(counts), 1)
            missing = longest - tf.shape(sent)[0]
            paddings = tf.pad([[0, missing]], [[0, len(others)], [0, 0]])
            sent = tf.pad(sent, paddings)
            parts = tf.split(self._launch("gather", sent), self.size)
        cut = [part[: counts[i]] for i, part in enumerate(parts)]
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(others) + 1)]
        joined = back(tf.transpose(tf.concat(cut, 0), order))
        dims = tensor.shape.as_list()
        return tf.ensure_shape(joined, [*dims[:axis], None, *dims[axis + 1 :]]), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        if self.rank > 0:
            tensors = [tf.zeros_like(tensor) for tensor in tensors]
        with self.calling(name):
            return [self._sum(name, tensor, Compare.BEFORE) for tensor in tensors]

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Surrounds what runs collectives, and explains why they were refused.

        Args:
            name: What messages call it.

        Raises:
            ValueError: If the workers bring values that do not fit together.
            RuntimeError: If they make different calls.
        """
        if tf.inside_function():
            yield
            return
        with self.waiting(name):
            try:
                yield
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                explained = self._explained(str(error))
                if explained is None:
                    raise
                raise explained from error

    def _sum(self, name: str, tensor: Any, compare: Compare) -> Any:
        sent, back = _sendable(tensor)
        if compare is Compare.BEFORE and layouts.has_room(sent):
            return back(self._sum_of_scalars(name, tensor.dtype, sent))
        same = []
        if compare is not Compare.NEVER:
            key = self._key(name, tensor)
            _, same = self._compared(key, tensor, tensor.dtype)
        if sent.shape.num_elements() == 0:
            return tensor
        with tf.control_dependencies(same):
            total = back(self._launch("reduce", tf.identity(sent)))
        return tf.ensure_shape(total, tensor.shape)

    def _sum_of_scalars(self, name: str, dtype: tf.DType, scalar: Any) -> Any:
        """The sum of numbers, which travel with what the workers compare.

        Args:
            name: What the sum is for.
            dtype: Of what is summed, which may travel as another one.
            scalar: What travels.
        """

        def total(key, scalar):
            rows, same = self._compared(key, scalar, dtype, scalar=scalar)
            with tf.control_dependencies(same), tf.device(self._host):
                return layouts.sum_of_scalars(rows, scalar.dtype)

        key = self._key(name, scalar)
        if not tf.executing_eagerly():
            return total(key, scalar)
        # As single operations it would take longer than a small model's step.
        kind = dtype, scalar.dtype
        if kind not in self._sums_of_scalars:
            spec = [tf.TensorSpec((), tf.int32), tf.TensorSpec((), scalar.dtype)]
            self._sums_of_scalars[kind] = tf.function(
                total, input_signature=spec, autograph=False
            )
        return self._sums_of_scalars[kind](key, scalar)

    def _packs(self, tensors: Sequence[Any]) -> Iterator[list[int]]:
        """Which tensors travel together, by their numbers."""
        most = self.cluster.options.bytes_per_pack
        packs: dict[Any, tuple[list[int], int]] = {}
        for index, tensor in enumerate(tensors):
            size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
            indices, so_far = packs.get(tensor.dtype, ([], 0))
            if indices and most and so_far + size > most:
                yield indices
                indices, so_far = [], 0
            packs[tensor.dtype] = ([*indices, index], so_far + size)
        for indices, _ in packs.values():
            yield indices

    def _launch(self, kind: str, tensor: Any) -> Any:
        # Whole numbers stay with the host: on a GPU they are in its memory, too.
        on_host = self._accelerator is None or not tensor.dtype.is_floating
        with tf.device(self._host):
            number = self._count.assign_add(1)
        launch: Any = tf.raw_ops.CollectiveGatherV2
        arguments: dict[str, Any] = {}
        if kind == "reduce":
            launch = tf.raw_ops.CollectiveReduceV2
            arguments = {"merge_op": "Add", "final_op": "Id"}
        elif kind == "exchange":
            launch = tf.raw_ops.CollectiveAllToAllV2
        with tf.device(self._host if on_host else self._accelerator):
            return launch(
                input=tensor,
                group_size=self.size,
                group_key=_HOST_GROUP if on_host else _ACCELERATOR_GROUP,
                instance_key=number,
                # Makes a tf.function execute them in the order of the program.
                ordering_token=[self._count.handle],
                communication_hint="ring" if on_host else self._hint,
                timeout_seconds=self.timeout_seconds,
                **arguments,
            )

    def _key(self, name: str, tensor: Any) -> int:
        """The number of what a tensor is for which can be compared."""
        rank = tensor.shape.rank
        if rank is None or rank > layouts.MOST_DIMENSIONS:
            raise ValueError(
                f"`{name}` takes tensors of at most {layouts.MOST_DIMENSIONS} "
                f"dimensions, whose number is known. Received: {tensor!r}"
            )
        key = zlib.crc32(name.encode()) & 0x7FFFFFFF
        self._names[key] = name
        return key

    def _compared(
        self,
        key: Any,
        tensor: Any,
        dtype: tf.DType,
        axis: int | None = None,
        scalar: Any = None,
    ) -> tuple[Any, list[Any]]:
        """What every worker says of its tensor, and what fails where that differs.

        Args:
            key: Of what the tensor is for.
            tensor: The tensor.
            dtype: Its dtype, or the one it had.
            axis: Along which the sizes may differ.
            scalar: What travels along.
        """
        with tf.device(self._host):
            row = layouts.row_of(key, tensor, dtype, scalar)
            rows = self._launch("gather", row[tf.newaxis])
            told, same = layouts.compared(rows, axis)
            place = "" if axis is None else f" other than axis {axis}"
            check = tf.debugging.Assert(
                same, [f"{_DIFFERENT}{place}:", told], summarize=10_000
            )
        return rows, [] if check is None else [check]

    def _explained(self, message: str) -> Exception | None:
        # TensorFlow writes it in one way eagerly and in another in a tf.function.
        found = self.along.what_differs(message)
        if found is not None:
            return self.difference(*found)
        found = re.search(_REFUSED, message)
        if found is not None:
            return RuntimeError(
                "All workers must make the same calls in the same order, of values "
                "whose dtypes and sizes are the same. TensorFlow, which refuses all "
                f"later collectives, says: {found[0]}"
            )
        found = re.search(rf"{_DIFFERENT}( other than axis \d+)?:(.*)", message, re.S)
        if found is None:
            return None
        which, text = found.groups()
        told = layouts.read(text, self.size)
        own = self._names[told[self.rank][0]]
        calls = [own]
        if len({key for key, _ in told}) > 1:
            calls = self.cluster.agree("the comparison of what is sent", own)
        return self.refusal(own, calls, [layout for _, layout in told], which or "")


def _sendable(tensor: Any, gathered: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """A tensor of a dtype that collectives take, and the way back."""
    dtype = tensor.dtype
    if dtype == tf.string or dtype == tf.resource or dtype == tf.variant:
        raise ValueError(
            "Only numbers and booleans travel between workers. Received a tensor of "
            f"the dtype {dtype.name}."
        )
    if dtype.is_complex:
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return parts, lambda sent: tf.complex(sent[..., 0], sent[..., 1])
    travels = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
    if dtype in travels or (dtype == tf.bfloat16 and not gathered):
        return tensor, lambda sent: sent
    if dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64), lambda sent: tf.bitcast(sent, tf.uint64)
    other = tf.int64 if dtype.is_integer else tf.float32
    other = tf.int32 if dtype.is_bool else other
    return tf.cast(tensor, other), lambda sent: tf.cast(sent, dtype)


_connected: TensorFlowWorkers | None = None


def connect(cluster: Cluster) -> TensorFlowWorkers:
    """Connects this process with the others of a cluster, once."""
    global _connected
    if _connected is None:
        _connected = TensorFlowWorkers(cluster, connection.start(cluster))
    return _connected
