"""Where Keras's random numbers are extended on every backend.

Calling a step as on one device, so that nothing is left of it but what it drew.

Where a replica draws one device's random numbers for its rows.

Each function of Keras's that draws is called with the shape that one device gives it,
and what belongs to the replica's rows is taken of the result; see `rules/draws.py`.

Where augmentation looks at the rows of a batch beside each other.

Which random numbers belong to rows, where a step cannot be called to find out.

A function that `run` calls is a user's, and is called once where it is not compiled:
what it prints or counts must not be there twice. Keras's own layers can be called
again. So of a draw the outermost layer is rehearsed that is Keras's, with all layers in
it, and that is called with the replica's rows; see `rules/draws.py`. What is drawn
elsewhere is each replica's own.
"""

import contextlib
import inspect
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core import context
from keras_strategy.core.context import DryRun, dry_run_scope
from keras_strategy.core.per_replica_attributes import discard_attribute_changes
from keras_strategy.core.protocols import Replica
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.core.step_state import RowRange
from keras_strategy.keras_patches.layers import is_keras_throughout
from keras_strategy.keras_patches.patch import (
    home_of,
    hook,
    in_replica_or_dry_run,
    of_several,
)
from keras_strategy.training import random as training_random
from keras_strategy.training import variable_sync
from keras_strategy.training.random import BatchDim, BatchDimCache

global_state = home_of(
    "get_global_attribute set_global_attribute", "keras.src.backend.common.global_state"
)
keras_seeds = home_of(
    "draw_seed global_seed_generator", "keras.src.random.seed_generator"
)
# Under which name Keras keeps a thread's own seed generator.
_SEED = "global_seed_generator"


@hook(
    keras.random.SeedGenerator,
    "next",
    "(self, ordered=True)",
    when=in_replica_or_dry_run,
)
def _next(original, replica, self, ordered=True):
    """Every replica draws its own numbers, unless they are those of its rows.

    Only the drawn seed differs; the stored state advances as on one device.
    """
    variable_sync.declare_if_central(self)  # it assigns its state
    seed = original(self, ordered)
    if isinstance(replica, DryRun):
        replica.drew_random = True
        return seed
    if replica.step.is_drawing:
        return seed  # see hooks/draws.py
    # A large prime keeps the replicas' seeds apart from each other and from
    # those of other generators, which users number 0, 1, 2...
    offset = ops.cast(ops.multiply(replica.id, 1000003), seed.dtype)
    return seed + ops.stack([offset, ops.zeros_like(offset)])


def kept_generator() -> Any:
    """The seed generator that Keras has for this thread, or None."""
    return global_state.get_global_attribute(_SEED)


def keep_generator(generator: Any) -> None:
    """Makes Keras have another seed generator for this thread."""
    global_state.set_global_attribute(_SEED, generator)


logger = logging.getLogger("keras_strategy")
# What Keras keeps for a thread while a layer is called.
_OF_A_CALL = ("current_call_ctx", "autocast_scope")


@contextlib.contextmanager
def rehearsing() -> Iterator[DryRun]:
    """Surrounds a call of a step, in the middle of another one.

    What it assigns to variables, sets on layers and draws is forgotten. It ends where a
    variable is made or an optimizer applies gradients, and at the first error, which
    is no matter: some functions take a batch of a certain size alone.

    Yields:
        What becomes known: what was drawn until then.
    """
    before = {name: global_state.get_global_attribute(name) for name in _OF_A_CALL}
    with (
        preserve_random_states(),
        dry_run_scope() as trial,
        discard_attribute_changes(),
        keras.StatelessScope(),
    ):
        trial.draws = []
        try:
            for name in _OF_A_CALL:
                global_state.set_global_attribute(name, None)
            yield trial
        except Exception:
            logger.debug("A rehearsal of a step ended.", exc_info=True)
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


def with_rows(take: Callable[[Any], Any], structure: Any) -> Any:
    """Arguments of a step with other rows.

    Args:
        take: Makes of a tensor one with these rows.
        structure: The arguments.
    """
    return keras.tree.map_structure(
        lambda x: take(x) if len(getattr(x, "shape", ())) > 0 else x, structure
    )


_FUNCTIONS = "normal uniform truncated_normal randint gamma beta binomial"
keras_random = home_of(
    f"dropout categorical shuffle {_FUNCTIONS}",
    f"keras.src.backend.{keras.backend.backend()}.random",
)


@of_several
def of_own_rows() -> Replica | DryRun | None:
    """The replica that is running, where its rows are known; or the trial."""
    at = context.replica_or_dry_run()
    if at is None or isinstance(at, DryRun):
        return None if at is None or at.is_drawing else at
    step = at.step
    if not training_random.settings.exact or step.is_drawing or step.rows is None:
        return None
    return None if step.draws.for_current_layer(step.rows) is None else at


_KERAS = "keras.random"


@hook(
    keras_random,
    tuple(_FUNCTIONS.split()),
    ("shape",),
    when=of_own_rows,
    owner_name=_KERAS,
)
def _of_a_shape(original, at, shape, *args, **kwargs):
    """A replica gets the numbers that one device draws for its rows."""
    given = dict(inspect.signature(original).bind(shape, *args, **kwargs).arguments)
    dims, seed = _dims(shape), given.get("seed")
    name = original.__name__
    follows = _follows(at, name, seed, dims)
    # A parameter of the distribution may have a value for each row.
    parameters = {
        key: _follows(at, f"{name} {key}", seed, _dims(ops.shape(value)))
        for key, value in given.items()
        if key != "shape" and len(getattr(value, "shape", ())) > 0
    }
    if follows is None:
        return _plainly(at, original, **given)
    for key, of_parameter in parameters.items():
        if of_parameter is not None:
            value = ops.convert_to_tensor(given[key])
            given[key] = training_random.gather_rows(at, value, of_parameter.axis)
    numbers = None if parameters else _part(at, follows, name, {**given, "shape": dims})
    if numbers is not None:
        return numbers
    given["shape"] = total = training_random.global_shape(dims, follows, at.step.rows)
    return _of_all(
        at,
        follows,
        (name, *total, seed),
        lambda: original(**given),
        lambda: keras_seeds.draw_seed(seed),
    )


@hook(
    keras_random,
    "dropout",
    "(inputs, rate, noise_shape=None, seed=None)",
    when=of_own_rows,
    owner_name=_KERAS,
)
def _dropout(original, at, inputs, rate, noise_shape=None, seed=None):
    """A replica's mask is that which one device draws for its rows."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return original(inputs, rate, noise_shape, seed)
    inputs = ops.convert_to_tensor(inputs)
    dims = _dims(ops.shape(inputs))
    if _is_tried_by_rows() and noise_shape is None:
        noise_shape = dims  # which has torch go by the seed, so that it repeats itself
    if noise_shape is not None:
        pairs = zip(dims, noise_shape, strict=True)
        dims = [own if given is None else given for own, given in pairs]
    engine = get_engine()
    order = engine.memory_order(inputs)
    follows = _follows(at, "dropout", seed, dims, order)
    if follows is None:
        return _plainly(at, original, inputs, rate, noise_shape, seed)
    given = {"shape": dims, "rate": rate, "dtype": inputs.dtype, "seed": seed}
    kept = _part(at, follows, "dropout", given)
    if kept is not None:
        return ops.where(kept, inputs / (1.0 - rate), 0)
    total = training_random.global_shape(dims, follows, at.step.rows)
    if order is not None and dims[follows.axis] == 1 and follows.order is not None:
        order = follows.order  # of one row, its stride may be any

    def scales():
        ones = engine.ones(total, inputs, order)
        return original(ones, rate, None if noise_shape is None else total, seed)

    def skip():
        # Torch, which alone asks for it, draws others from the process's generator.
        seeded = seed is not None and getattr(seed, "_initial_seed", seed) is not None
        if seeded or noise_shape is not None:
            keras_seeds.draw_seed(seed)

    what = "dropout", *total, seed
    kept = ops.not_equal(_of_all(at, follows, what, scales, skip), 0)
    return ops.where(kept, inputs / (1.0 - rate), 0)


@hook(
    keras_random,
    "categorical",
    ("logits", "num_samples"),
    when=of_own_rows,
    owner_name=_KERAS,
)
def _categorical(original, at, logits, num_samples, *args, **kwargs):
    """One device draws of the probabilities of all rows, which are gathered."""
    logits = ops.convert_to_tensor(logits)
    seed = inspect.signature(original).bind(logits, num_samples, *args, **kwargs)
    follows = _follows(
        at, "categorical", seed.arguments.get("seed"), _dims(ops.shape(logits))
    )
    if follows is None or follows.axis > 0:
        return _plainly(at, original, logits, num_samples, *args, **kwargs)
    logits = training_random.gather_rows(at, logits, 0)
    with drawing_for_all(at):
        numbers = original(logits, num_samples, *args, **kwargs)
    return training_random.local_slice(numbers, follows, at.step.rows)


@hook(
    keras_random,
    "shuffle",
    "(x, axis=0, seed=None)",
    when=of_own_rows,
    owner_name=_KERAS,
)
def _shuffle(original, at, x, axis=0, seed=None):
    """Each row is shuffled as on one device; rows among each other are not.

    These may be numbers of rows, and what they are taken for is not known.
    """
    x = ops.convert_to_tensor(x)
    if _is_tried_by_rows():
        at.depends_on_replicas = (
            True  # what it does to rows is warned of when they are known
        )
    follows = _follows(at, "shuffle", seed, _dims(ops.shape(x)))
    if follows is None:
        return _plainly(at, original, x, axis, seed)
    if follows.axis == axis % len(x.shape):
        at.step.draws.for_current_layer(at.step.rows).warn_shuffled_rows(seed)
        return original(x, axis, seed)
    x = training_random.gather_rows(at, x, follows.axis)
    with drawing_for_all(at):
        return training_random.local_slice(
            original(x, axis, seed), follows, at.step.rows
        )


def _is_tried_by_rows() -> bool:
    """Whether this is called by `rules.row_trials`."""
    trial = context.thread_state.dry_run
    return trial is not None and trial.tests_row_independence


@contextlib.contextmanager
def drawing_for_all(at: Replica | DryRun) -> Iterator[None]:
    """Surrounds what draws the same on all replicas, in its own way."""
    place: Any = at if isinstance(at, DryRun) else at.step
    place.drawing = True
    try:
        yield
    finally:
        place.drawing = False


def _plainly(at: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What all replicas draw alike."""
    with drawing_for_all(at):
        return original(*args, **kwargs)


def _of_all(
    at: Replica,
    follows: BatchDim,
    what: Any,
    draw: Callable[[], Any],
    skip: Callable[[], Any],
) -> Any:
    """Draws for all rows, and takes the replica's; see `Replica.draw_once`."""
    with drawing_for_all(at):
        numbers = at.draw_once(what, draw, skip)
    rows = at.step.rows
    assert rows is not None
    return training_random.local_slice(numbers, follows, rows)


def _part(at: Replica, follows: BatchDim, name: str, given: dict[str, Any]) -> Any:
    """Draws for the replica's rows alone, where the engine can begin there."""
    rows = at.step.rows
    if follows.axis or rows is None:
        return None
    begin, seed = rows.begin * follows.per_row, given.pop("seed", None)
    with drawing_for_all(at):
        return get_engine().draw_slice(
            name, given, begin, lambda: keras_seeds.draw_seed(seed)
        )


def _dims(shape: Any) -> list[Any]:
    if isinstance(shape, int):
        return [shape]
    if isinstance(shape, Sequence):
        return list(shape)
    return [shape[axis] for axis in range(shape.shape[0])]


def _follows(
    at: Any,
    name: str,
    seed: Any,
    dims: Sequence[Any],
    order: tuple[int, ...] | None = None,
) -> BatchDim | None:
    """Which dimension of a draw follows the rows, if one does; notes a rehearsal's."""
    number = get_engine().static_int
    known = tuple(number(dim) for dim in dims)
    drawn = training_random.RandomDraw(
        training_random.draw_key(name, seed, len(dims)), known, order
    )
    if isinstance(at, DryRun):
        at.drew_random = True  # also from a seed that is a number
        if at.draws is not None:
            at.draws.append(drawn)
        if at.step is None:
            return None
    step = at.step
    known = step.draws.for_current_layer(step.rows)
    before = step.draw_counts.get((known, drawn.key), 0)
    step.draw_counts[known, drawn.key] = before + 1
    rows = number(step.rows.count)
    return known.batch_dim(drawn, before, rows, step.dry_run)


_BACKEND = f"keras.src.backend.{keras.backend.backend()}"
keras_image = home_of("elastic_transform", f"{_BACKEND}.image", f"{_BACKEND}.ops.image")


@hook(keras.layers.MixUp, "call", "(self, data, training=True)", when=of_own_rows)
@hook(keras.layers.CutMix, "call", "(self, data, training=True)", when=of_own_rows)
def _mixed(original, at, self, data, training=True):
    """Rows are mixed with rows of all replicas, which are gathered."""
    images = data["images"] if isinstance(data, dict) else data
    if isinstance(at, DryRun) or len(ops.shape(images)) < 4:
        return original(self, data, training=training)
    if not training:
        with drawing_for_all(at):  # what is not used
            return original(self, data, training=training)
    data = _of_all_rows(at, data)
    with drawing_for_all(at):
        return _own(at, original(self, data, training=training))


@dataclass(frozen=True)
class _Chance:
    """Where Python's `random` is."""

    state: Any


@hook(keras.layers.AugMix, "call", "(self, data, training=True)", when=of_own_rows)
def _chained(original, at, self, data, training=True):
    """Replicas choose the same chains, and make those of all rows, which are gathered.

    Python's `random` chooses: each replica begins where one device would, and leaves it
    where one device would.
    """
    images = data["images"] if isinstance(data, dict) else data
    if isinstance(at, DryRun) or not training or len(ops.shape(images)) < 4:
        return original(self, data, training=training)
    chance = at.merge_call(lambda strategy: _Chance(random.getstate()), (), {})
    data = _of_all_rows(at, data)
    random.setstate(chance.state)
    with drawing_for_all(at):
        return _own(at, original(self, data, training=training))


@hook(
    keras.layers.Equalization,
    "transform_images",
    "(self, images, transformation, training=True)",
    when=of_own_rows,
)
def _equalized(original, at, self, images, *args, **kwargs):
    """All rows make one histogram."""
    if isinstance(at, DryRun) or len(ops.shape(images)) < 4:
        return original(self, images, *args, **kwargs)
    return _own(at, original(self, _of_all_rows(at, images), *args, **kwargs))


@hook(
    keras_image,
    "elastic_transform",
    ("images",),
    when=of_own_rows,
    owner_name="keras.ops.image",
)
def _elastic(original, at, images, *args, **kwargs):
    """It draws by itself, on torch from the process's generator."""
    images = ops.convert_to_tensor(images)
    if isinstance(at, DryRun) or len(images.shape) < 4:
        return original(images, *args, **kwargs)
    images = _of_all_rows(at, images)

    def skip():
        """A seed is drawn on the other engines alone."""

    with drawing_for_all(at):
        whole = at.draw_once(
            "elastic_transform", lambda: original(images, *args, **kwargs), skip
        )
    if whole.shape[0] == 1:
        return whole  # where TensorFlow does not know the rows, Keras makes one of all
    return _own(at, whole)


def _of_all_rows(at: Any, structure: Any) -> Any:
    return tree.map_structure(
        lambda x: training_random.gather_rows(at, ops.convert_to_tensor(x), 0),
        structure,
    )


def _own(at: Any, structure: Any) -> Any:
    return tree.map_structure(
        lambda x: training_random.local_slice(x, BatchDim(0), at.step.rows), structure
    )


# The frame of a call of a layer has the arguments as Keras completed them.
_CALL = inspect.unwrap(keras.Layer.__call__).__code__

_known: weakref.WeakKeyDictionary[Any, BatchDimCache] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Call:
    """A call of a layer of Keras's.

    Attributes:
        layer: The layer.
        leaves: Its arguments.
        structure: Their structure.
        rows: The places in `leaves` of tensors of the replica's rows.
    """

    layer: Any
    leaves: list[Any]
    structure: Any
    rows: list[int]

    def dry_run(self, few: int) -> DryRun:
        """See `rules.draws.Rehearse`."""

        def call(*tensors):
            leaves = list(self.leaves)
            for place, tensor in zip(self.rows, tensors, strict=True):
                leaves[place] = tensor
            args, kwargs = tree.pack_sequence_as(self.structure, leaves)
            self.layer(*args, **kwargs)

        tensors = tuple(self.leaves[place] for place in self.rows)
        return get_engine().dry_run(call, tensors, {}, few)


class DrawsOfLayers:
    """In the place of `BatchDimCache`, what is known of the layers that draw in a run."""

    def for_current_layer(self, rows: RowRange) -> BatchDimCache | None:
        """See `BatchDimCache.for_current_layer`."""
        call = _outermost_call(rows.count)
        if call is None:
            return None
        known = _known.get(call.layer)
        if known is None:
            known = _known[call.layer] = BatchDimCache(repeated=True)
        return known


of_layers = DrawsOfLayers()


def rehearse_layer(few: int) -> DryRun:
    """See `rules.draws.Rehearse`; it calls the layer that is drawing."""
    replica = context.distributed_replica()
    assert replica is not None and replica.step.rows is not None
    call = _outermost_call(replica.step.rows.count)
    if call is None or replica.step.rows.count == 0:
        return DryRun(draws=[])
    return call.dry_run(few)


def _outermost_call(rows: int) -> _Call | None:
    """The outermost call of a layer of Keras's; None if that is given no rows."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is _CALL:
            given = frame.f_locals
            if not is_keras_throughout(given["self"]):
                break
            found = given
        frame = frame.f_back
    if found is None:
        return None
    structure = found["args"], found["kwargs"]
    leaves = tree.flatten(structure)
    of_rows = [
        place
        for place, leaf in enumerate(leaves)
        if len(getattr(leaf, "shape", ())) > 0 and leaf.shape[0] == rows
    ]
    return _Call(found["self"], leaves, structure, of_rows) if of_rows else None
