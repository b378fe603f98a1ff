"""Patches that give each replica the random numbers of one device for its rows.

Each Keras function that draws is called with the shape that one device uses, and the
replica takes the slice of its local batch; see `training/random.py`. A dry run of the
step finds the batch dimension of a draw. In `run`, whose function belongs to the user,
only Keras's own layers can be called again, so the dry run covers the outermost Keras
layer that has rows as inputs. Other draws in `run` are independent per replica.
"""

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core import context
from keras_strategy.core.context import DryRun, dry_run_scope
from keras_strategy.core.protocols import Replica
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import RowRange, has_rows, map_rows
from keras_strategy.errors import logger
from keras_strategy.keras_patches.internals import global_state
from keras_strategy.keras_patches.layers import is_purely_keras
from keras_strategy.keras_patches.losses_metrics import NEEDS_ALL_ROWS
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_replica_or_dry_run,
    in_step,
    multi_replica_only,
)
from keras_strategy.training import variable_sync
from keras_strategy.training.random import (
    BatchDim,
    BatchDimCache,
    RandomDraw,
    draw_key,
    global_shape,
    local_slice,
)
from keras_strategy.training.random import settings as random_settings

keras_seeds = find_module(
    "draw_seed global_seed_generator", "keras.src.random.seed_generator"
)
# Access to Keras's global seed generator of this thread, which may be None. Partials
# save a Python call in each run.
_SEED = "global_seed_generator"
global_generator = functools.partial(global_state.get_global_attribute, _SEED)
set_global_generator = functools.partial(global_state.set_global_attribute, _SEED)

_NEXT = "(self, ordered=True)"


@hook(keras.random.SeedGenerator, "next", _NEXT, when=in_replica_or_dry_run)
def _next(original, replica, self, ordered=True):
    """Draw independent numbers on each replica, except for those of its rows."""
    # Only the drawn seed differs; the stored state advances as on one device.
    variable_sync.declare_if_shared(self)  # it assigns its state
    seed = original(self, ordered)
    if isinstance(replica, DryRun) or replica.step.is_drawing:
        return seed  # identical on all replicas
    # A large prime keeps the replicas' seeds apart from each other and from
    # those of other generators, which users number 0, 1, 2...
    offset = ops.cast(ops.multiply(replica.id, 1000003), seed.dtype)
    return seed + ops.stack([offset, ops.zeros_like(offset)])


# Thread state of Keras during a layer call.
_CALL_STATE = ("current_call_ctx", "autocast_scope")


@contextlib.contextmanager
def dry_running() -> Iterator[DryRun]:
    """Context manager for a dry run of a step in the middle of another one."""
    # It ends where a variable is created, gradients are applied, or an error is raised,
    # which is ignored because some functions accept only some batch sizes.
    restore_call_state = call_state_restorer()
    with dry_run_scope() as dry_run:
        dry_run.draws = []
        try:
            for name in _CALL_STATE:
                global_state.set_global_attribute(name, None)
            yield dry_run
        except Exception:
            logger.debug("The dry run of a step ended.", exc_info=True)
        finally:
            restore_call_state()


def call_state_restorer() -> Callable[[], None]:
    """Return a function that restores Keras's thread state as it is now."""
    saved = {name: global_state.get_global_attribute(name) for name in _CALL_STATE}
    names: Any = global_state.get_global_attribute("object_name_uids")
    counts = dict(names or {})

    def restore():
        for name, value in saved.items():
            global_state.set_global_attribute(name, value)
        if names is not None:
            names.clear()
            names.update(counts)

    return restore


_BACKEND = f"keras.src.backend.{keras.backend.backend()}"
_FUNCTIONS = "normal uniform truncated_normal randint gamma beta binomial"
keras_random = find_module(
    f"dropout categorical shuffle {_FUNCTIONS}", f"{_BACKEND}.random"
)


@multi_replica_only
def draws_for_local_rows() -> Replica | DryRun | None:
    """Return the running replica if its rows are known, or the dry run, or None."""
    replica = context.replica_or_dry_run()
    if replica is None or isinstance(replica, DryRun):
        return None if replica is None or replica.is_drawing else replica
    step = replica.step
    if not random_settings.exact or step.is_drawing or step.rows is None:
        return None
    return None if step.draws.for_current_layer(step.rows) is None else replica


_random_hook = functools.partial(
    hook, keras_random, when=draws_for_local_rows, owner_name="keras.random"
)


@_random_hook(tuple(_FUNCTIONS.split()), ("shape",))
def _draw_shape(original, replica, shape, *args, **kwargs):
    """Draw one device's numbers and keep those of this replica's rows."""
    arguments = dict(inspect.signature(original).bind(shape, *args, **kwargs).arguments)
    dims, seed = _dims(shape), arguments.get("seed")
    name = original.__name__
    batch_dim = _find_batch_dim(replica, name, seed, dims)
    # A distribution's parameter may have one value per row.
    parameters = {
        key: _find_batch_dim(replica, f"{name} {key}", seed, _dims(ops.shape(value)))
        for key, value in arguments.items()
        if key != "shape" and has_rows(value)
    }
    if batch_dim is None:
        with identical_draws(replica):
            return original(**arguments)
    for key, parameter_dim in parameters.items():
        if parameter_dim is not None:
            value = ops.convert_to_tensor(arguments[key])
            arguments[key] = context.gather_rows(replica, value, parameter_dim.axis)
    if not parameters:
        numbers = _draw_local(replica, batch_dim, name, {**arguments, "shape": dims})
        if numbers is not None:
            return numbers
    arguments["shape"] = global_dims = global_shape(dims, batch_dim, replica.step.rows)
    return _draw_global(
        replica,
        batch_dim,
        (name, *global_dims, seed),
        lambda: original(**arguments),
        lambda: keras_seeds.draw_seed(seed),
    )


def draws_from_seed(seed: Any, noise_shape: Any) -> bool:
    """Return False if dropout on torch uses the process's generator, as unseeded."""
    # A `SeedGenerator` without a seed is unseeded; its state does not change.
    has_seed = seed is not None and getattr(seed, "_initial_seed", seed) is not None
    return has_seed or noise_shape is not None


@_random_hook("dropout", "(inputs, rate, noise_shape=None, seed=None)")
def _dropout(original, replica, inputs, rate, noise_shape=None, seed=None):
    """Draw one device's dropout mask and keep that of this replica's rows."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return original(inputs, rate, noise_shape, seed)
    inputs = ops.convert_to_tensor(inputs)
    dims = _dims(ops.shape(inputs))
    if noise_shape is not None:
        pairs = zip(dims, noise_shape, strict=True)
        dims = [dim if noise is None else noise for dim, noise in pairs]
    engine = get_engine()
    order = engine.memory_order(inputs)
    batch_dim = _find_batch_dim(replica, "dropout", seed, dims, order)
    is_seeded = draws_from_seed(seed, noise_shape)
    if batch_dim is None:
        with identical_draws(replica):
            if is_seeded or isinstance(replica, DryRun):
                return original(inputs, rate, noise_shape, seed)
            # On torch, the replicas of a process have one generator, so draw once.
            ones = engine.ones(dims, inputs, order)
            mask = replica.draw_once(
                ("dropout", *dims, seed),
                lambda: ops.not_equal(original(ones, rate, noise_shape, seed), 0),
                lambda: None,
            )
            return engine.scale_kept(inputs, mask, 1.0 - rate, is_seeded)
    arguments = {"shape": dims, "rate": rate, "dtype": inputs.dtype, "seed": seed}
    mask = _draw_local(replica, batch_dim, "dropout", arguments)
    if mask is not None:
        return engine.scale_kept(inputs, mask, 1.0 - rate, is_seeded)
    global_dims = global_shape(dims, batch_dim, replica.step.rows)
    if order is not None and dims[batch_dim.axis] == 1 and batch_dim.order is not None:
        order = batch_dim.order  # the stride of one row is arbitrary

    def draw_mask():
        fast = engine.draw_dropout_mask(
            replica,
            global_dims,
            batch_dim.axis,
            inputs,
            order,
            1.0 - rate,
            seed,
            is_seeded,
        )
        if fast is not None:
            return fast
        ones = engine.ones(global_dims, inputs, order)
        noise_dims = None if noise_shape is None else global_dims
        return ops.not_equal(original(ones, rate, noise_dims, seed), 0)

    def skip():
        if is_seeded:
            keras_seeds.draw_seed(seed)

    draw_id = "dropout", *global_dims, seed
    mask = _draw_global(replica, batch_dim, draw_id, draw_mask, skip)
    return engine.scale_kept(inputs, mask, 1.0 - rate, is_seeded)


@_random_hook("categorical", ("logits", "num_samples"))
def _categorical(original, replica, logits, num_samples, *args, **kwargs):
    """Draw from the gathered probabilities of all rows, as one device does."""
    logits = ops.convert_to_tensor(logits)
    call = inspect.signature(original).bind(logits, num_samples, *args, **kwargs)
    seed, dims = call.arguments.get("seed"), _dims(ops.shape(logits))
    batch_dim = _find_batch_dim(replica, "categorical", seed, dims)
    if batch_dim is None or batch_dim.axis > 0:
        with identical_draws(replica):
            return original(logits, num_samples, *args, **kwargs)
    logits = context.gather_rows(replica, logits, 0)
    with identical_draws(replica):
        numbers = original(logits, num_samples, *args, **kwargs)
    return local_slice(numbers, batch_dim, replica.step.rows)


@_random_hook("shuffle", "(x, axis=0, seed=None)")
def _shuffle(original, replica, x, axis=0, seed=None):
    """Shuffle each row as one device does, but not rows among each other."""
    # Shuffled rows may be indices, whose meaning is unknown.
    x = ops.convert_to_tensor(x)
    batch_dim = _find_batch_dim(replica, "shuffle", seed, _dims(ops.shape(x)))
    if batch_dim is None:
        with identical_draws(replica):
            return original(x, axis, seed)
    if batch_dim.axis == axis % len(x.shape):
        replica.step.draws.for_current_layer(replica.step.rows).warn_shuffled_rows(seed)
        return original(x, axis, seed)
    x = context.gather_rows(replica, x, batch_dim.axis)
    with identical_draws(replica):
        return local_slice(original(x, axis, seed), batch_dim, replica.step.rows)


@contextlib.contextmanager
def identical_draws(replica: Replica | DryRun) -> Iterator[None]:
    """Context manager in which all replicas draw the same numbers."""
    state: Any = replica if isinstance(replica, DryRun) else replica.step
    state.is_drawing = True
    try:
        yield
    finally:
        state.is_drawing = False


def _draw_global(
    replica: Replica,
    batch_dim: BatchDim,
    draw_id: Any,
    draw: Callable[[], Any],
    skip: Callable[[], Any],
) -> Any:
    """Draw for the global batch and take the local slice; see `Replica.draw_once`."""
    with identical_draws(replica):
        numbers = replica.draw_once(draw_id, draw, skip)
    rows = replica.step.rows
    assert rows is not None
    return local_slice(numbers, batch_dim, rows)


def _draw_local(
    replica: Replica, batch_dim: BatchDim, name: str, arguments: dict[str, Any]
) -> Any:
    """Draw only the local slice, where the backend can start there."""
    rows = replica.step.rows
    if batch_dim.axis or rows is None:
        return None
    begin, seed = rows.begin * batch_dim.per_row, arguments.pop("seed", None)
    with identical_draws(replica):
        return get_engine().draw_slice(
            name, arguments, begin, lambda: keras_seeds.draw_seed(seed)
        )


def _dims(shape: Any) -> list[Any]:
    if isinstance(shape, int):
        return [shape]
    if hasattr(shape, "shape"):  # a tensor, which has no length while it is traced
        return [shape[axis] for axis in range(shape.shape[0])]
    return list(shape)


def _find_batch_dim(
    replica: Any,
    name: str,
    seed: Any,
    dims: Sequence[Any],
    order: tuple[int, ...] | None = None,
) -> BatchDim | None:
    """Return the batch dimension of a draw, if any, and record it in a dry run."""
    number = get_engine().static_int
    key = draw_key(name, seed, len(dims))
    drawn = RandomDraw(key, tuple(number(dim) for dim in dims), order)
    if isinstance(replica, DryRun):
        if replica.draws is not None:
            replica.draws.append(drawn)
        return None
    step = replica.step
    cache = step.draws.for_current_layer(step.rows)
    count = step.draw_counts.get((cache, drawn.key), 0)
    step.draw_counts[cache, drawn.key] = count + 1
    rows = number(step.rows.count)
    return cache.batch_dim(drawn, count, rows, step.dry_run)


def compute_on_all_rows(part: Any) -> Callable[[], None]:
    """Let a layer, operation or loss compute on gathered rows; return its undoing."""
    # In the steps of `fit`, `evaluate` and `predict`, on each replica.
    attributes = vars(part)
    name, value = "call", functools.partial(_call_on_all_rows, part)
    if isinstance(part, keras.losses.Loss):
        name, value = NEEDS_ALL_ROWS, True
    before = dict(attributes)
    attributes[name] = value

    def undo():
        attributes.pop(name)
        if name in before:
            attributes[name] = before[name]

    return undo


def _call_on_all_rows(part: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer with the rows of all replicas, and return this replica's rows."""
    call, replica = functools.partial(type(part).call, part), in_step()
    if replica is None or replica.step.rows is None:
        return call(*args, **kwargs)
    rows = replica.step.rows
    gather = functools.partial(context.gather_rows, replica, axis=0)
    args, kwargs = map_rows(gather, (args, kwargs))
    with identical_draws(replica), context.with_all_rows(context.get_strategy()):
        outputs = call(*args, **kwargs)

    total = get_engine().static_int(rows.total)

    def take(x):
        # A result such as a mean over rows has none.
        has_all = x.shape[0] is None or x.shape[0] == total
        return local_slice(x, BatchDim(0), rows) if has_all else x

    return map_rows(take, outputs)


# The frame of a layer call has the arguments as Keras completed them.
_LAYER_CALL = inspect.unwrap(keras.Layer.__call__).__code__


class LayerDraws:
    """Batch dimensions of the draws of layers in `run`."""

    def __init__(self) -> None:
        self._caches = weakref.WeakKeyDictionary[Any, BatchDimCache]()

    def for_current_layer(self, rows: RowRange) -> BatchDimCache | None:
        """Return the cache of the outermost Keras layer that is running, or None."""
        call = _outermost_call(rows.count)
        if call is None:
            return None
        layer, _ = call
        cache = self._caches.get(layer)
        if cache is None:
            cache = self._caches[layer] = BatchDimCache(repeated=True)
        return cache


layer_draws = LayerDraws()


def dry_run_layer(num_rows: int) -> DryRun:
    """Run the layer that is drawing again, as a dry run."""
    replica = context.distributed_replica()
    assert replica is not None and replica.step.rows is not None
    rows = replica.step.rows.count
    call = _outermost_call(rows)
    if call is None or rows == 0:
        return DryRun(draws=[])
    layer, arguments = call
    leaves = tree.flatten(arguments)
    indices = [i for i, x in enumerate(leaves) if has_rows(x) and x.shape[0] == rows]

    def call_layer(*tensors):
        for index, tensor in zip(indices, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree.pack_sequence_as(arguments, leaves)
        layer(*args, **kwargs)

    tensors = tuple(leaves[index] for index in indices)
    return get_engine().dry_run(call_layer, tensors, {}, num_rows)


def _outermost_call(rows: int) -> tuple[Any, Any] | None:
    """Return the outermost running Keras layer that gets `rows`, and its arguments."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if frame.f_code is _LAYER_CALL:
            if not is_purely_keras(frame.f_locals["self"]):
                break
            found = frame.f_locals
        frame = frame.f_back
    if found is None:
        return None
    arguments = found["args"], found["kwargs"]
    for leaf in tree.flatten(arguments):
        # `has_rows` inlined: this runs in every draw.
        if len(getattr(leaf, "shape", ())) > 0 and leaf.shape[0] == rows:
            return found["self"], arguments
    return None
