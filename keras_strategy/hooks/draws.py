"""Where a replica draws one device's random numbers for its rows.

Each function of Keras's that draws is called with the shape that one device gives it,
and what belongs to the replica's rows is taken of the result; see `rules/draws.py`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.context import DryRun
from keras_strategy.core.protocol import Replica
from keras_strategy.core.registry import get_engine
from keras_strategy.hooks.hook import home_of, hook, of_several
from keras_strategy.hooks.random import keras_seeds
from keras_strategy.rules import draws
from keras_strategy.rules.draws import BatchDim

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
    if not draws.settings.exact or step.is_drawing or step.rows is None:
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
            given[key] = draws.gather_rows(at, value, of_parameter.axis)
    numbers = None if parameters else _part(at, follows, name, {**given, "shape": dims})
    if numbers is not None:
        return numbers
    given["shape"] = total = draws.global_shape(dims, follows, at.step.rows)
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
    total = draws.global_shape(dims, follows, at.step.rows)
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
    logits = draws.gather_rows(at, logits, 0)
    with drawing_for_all(at):
        numbers = original(logits, num_samples, *args, **kwargs)
    return draws.local_slice(numbers, follows, at.step.rows)


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
        at.depends_on_replicas = True  # what it does to rows is warned of when they are known
    follows = _follows(at, "shuffle", seed, _dims(ops.shape(x)))
    if follows is None:
        return _plainly(at, original, x, axis, seed)
    if follows.axis == axis % len(x.shape):
        at.step.draws.for_current_layer(at.step.rows).warn_shuffled_rows(seed)
        return original(x, axis, seed)
    x = draws.gather_rows(at, x, follows.axis)
    with drawing_for_all(at):
        return draws.local_slice(original(x, axis, seed), follows, at.step.rows)


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
    return draws.local_slice(numbers, follows, rows)


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
    drawn = draws.RandomDraw(draws.draw_key(name, seed, len(dims)), known, order)
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
