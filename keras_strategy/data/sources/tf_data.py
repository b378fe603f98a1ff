"""Sources of `tf.data.Dataset`: their shards of files, and their state in `fit`.

A `tf.data.Dataset` has only a checkpointable iterator. It is saved when it is new and
holds no rows: its shuffle seeds are drawn by then, and resuming reads up to the saved
batch. Later passes follow from it if the shuffle has the same seeds.
"""

import contextlib
import hashlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.data.sources.iterable import FitState, Shard, Source, replaced_iter
from keras_strategy.errors import logger
from keras_strategy.options import AutoShardPolicy
from keras_strategy.training.resume import decode, encode

_SEED_HELP = (
    "Pass a `seed` to `shuffle`, or call `keras.utils.set_random_seed` before you "
    "create the dataset."
)
_NO_STATE = (
    "This tf.data.Dataset has no state that can be saved and restored: it calls "
    "Python, or is split or transformed before it is read. It is read again up to the "
    "batch where training resumes, which is exact if each pass gives the same batches."
)
State = dict[str, Any]
_folder_ids = itertools.count()


class TfDataSource(Source):
    """A `tf.data.Dataset`."""

    tf_dataset = property(lambda self: self.data)

    def batches(self, first: int = 0) -> Iterator[Any]:
        return iter(self.data.as_numpy_iterator())

    @property
    def has_fixed_shapes(self) -> bool:
        specs = tree.flatten(self.data.element_spec)
        shapes = [getattr(spec, "shape", None) for spec in specs]
        return all(shape is not None and shape.is_fully_defined() for shape in shapes)

    @property
    def policy(self) -> AutoShardPolicy:
        policy = self.data.options().experimental_distribute.auto_shard_policy
        return AutoShardPolicy[getattr(policy, "name", "AUTO")]

    def declared_shards(self) -> Iterator[Shard]:
        return _shards(self.data)

    def shard(self, policy: AutoShardPolicy, cluster: Cluster) -> Source:
        """Shard global batches as native tf.distribute does."""
        if policy is AutoShardPolicy.OFF:
            return self
        tf: Any = sys.modules["tensorflow"]
        flat = tf.nest.flatten(self.data.element_spec)
        if not all(isinstance(spec, tf.TensorSpec) for spec in flat):
            raise ValueError(
                f"AutoShardPolicy.{policy.name} is for datasets of dense tensors. "
                "Shard this one with `dataset.shard`, and use AutoShardPolicy.OFF. "
                f"Received: element_spec={self.data.element_spec}"
            )
        layout: dict[str, Any] = {
            "output_types": [spec.dtype for spec in flat],
            "output_shapes": [spec.shape for spec in flat],
        }
        native = tf.data.experimental.AutoShardPolicy[policy.name]
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(self.data),
            num_workers=cluster.size,
            index=cluster.rank,
            auto_shard_policy=native.value,
            num_replicas=cluster.size,
            **layout,
        )
        # Batches of an unknown number of rows keep it.
        layout["output_shapes"] = [[None, *spec.shape[1:]] for spec in flat]
        variant = tf.raw_ops.RebatchDataset(
            input_dataset=variant, num_replicas=cluster.size, **layout
        )
        spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype),
            self.data.element_spec,
        )
        shard = tf.data.experimental.from_variant(variant, spec)
        shard = shard.filter(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0] > 0)
        return TfDataSource(shard)

    def fit_state(self, each_batch: bool) -> "TfFitState":
        return TfFitState(self.data)


def _shards(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "_ShardDataset":
        shard = [int(dataset._num_shards), int(dataset._index)]
        if min(shard) >= 0:  # negative: a hint
            yield shard
    for source in dataset._inputs():
        yield from _shards(source)


class TfFitState(FitState):
    """State of the `tf.data.Dataset` of one `fit`."""

    def __init__(self, data: Any):
        self._data, self._cls = data, type(data)
        # Of the iterator that the loop reads, and of the next one.
        self._current: State | None = None
        self._following: State | None = None
        # The next iterator, if it was created early.
        self._created: tuple[Any, State] | None = None
        # What the next iterator starts from.
        self._pending: State | None = None
        # Fingerprint of the first iterator, compared between processes.
        self._fingerprint = ""

    def start_pass(self, continues: bool) -> None:
        self._warn_if_unused()
        self._current, self._following = self._following if continues else None, None

    def state_at(self, read: int, continues: bool) -> list[Any] | None:
        self._warn_if_unused()
        if read:
            state = self._current
        else:
            state = self._following if continues else None
            if state is None:
                self._created = self._created or self._create_iterator()
                state = self._created and self._created[1]
        if state is None:
            return None
        return [0, {"first": self._fingerprint, "begin": state}]

    def restore(self, saved: list[Any] | None) -> int:
        """Restore the state of a pass, whose batches must all be read again."""
        if saved is None:
            logger.warning(_NO_STATE)
            return 0
        state = saved[1]
        self._pending, first = state["begin"], state["first"]
        if not self._fingerprint:
            self._create_iterator()
        if self._fingerprint != first:
            logger.warning(
                "The tf.data.Dataset shuffles with other seeds than before training "
                "was interrupted. The rest of the epoch is as without the "
                "interruption, but later epochs are in another order. %s",
                _SEED_HELP,
            )
        return 0

    def warn_other_reads(self) -> None:
        """Warn that resuming reads the data in a different way than before."""
        logger.warning(
            "Another backend, or one process instead of several workers, may start to "
            "read a tf.data.Dataset more or less often. The rest of the epoch is as "
            "without the interruption; later epochs may be in another order if the "
            "dataset reshuffles in each."
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with replaced_iter(self._data, lambda data, cls: self._iterate()):
            yield
            self._warn_if_unused()

    def _warn_if_unused(self) -> None:
        """Warn if the state was not restored because other data is read."""
        if self._pending is not None:
            self._pending = None
            logger.warning(_NO_STATE)

    def _iterate(self) -> Any:
        created, self._created = self._created or self._create_iterator(), None
        if created is None:
            return self._cls.__iter__(self._data)
        iterator, state = created
        if self._pending is not None:
            state, self._pending = self._pending, None
            _restore_iterator(iterator, state)
        if self._current is None:
            self._current = state
        else:
            self._following = state
        return iterator

    def _create_iterator(self) -> tuple[Any, State] | None:
        """Return a new iterator and its state; None if it has no state."""
        iterator = self._cls.__iter__(self._data)
        # The files in which tf.data saves an iterator, encoded for JSON.
        state = {}
        with _in_memory_folder() as (tf, folder):
            try:
                tf.train.Checkpoint(iterator=iterator).write(f"{folder}/state")
            except tf.errors.OpError:
                return None  # Python code, or another op with external state
            for name in sorted(tf.io.gfile.listdir(folder)):
                with tf.io.gfile.GFile(f"{folder}/{name}", "rb") as file:
                    state[name] = encode(file.read())
        if not self._fingerprint:
            content = repr(sorted(state.items())).encode()
            self._fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        return iterator, state


def _restore_iterator(iterator: Any, state: State) -> None:
    with _in_memory_folder() as (tf, folder):
        for name, content in state.items():
            with tf.io.gfile.GFile(f"{folder}/{name}", "wb") as file:
                file.write(decode(content))
        tf.train.Checkpoint(iterator=iterator).read(f"{folder}/state").assert_consumed()


@contextlib.contextmanager
def _in_memory_folder() -> Iterator[tuple[Any, str]]:
    """Yield TensorFlow and an in-memory folder, so a killed process leaves nothing."""
    tf = sys.modules["tensorflow"]
    folder = f"ram://keras_strategy/{next(_folder_ids)}"
    tf.io.gfile.makedirs(folder)
    try:
        yield tf, folder
    finally:
        tf.io.gfile.rmtree(folder)
