"""Sharding of variables and optimizer slots, and layouts on logical devices.

In one program for all replicas, a variable is split along one dimension into equal
shards. If the number of replicas divides no dimension, its prime factors may divide
some, and there are fewer shards. This follows from the shape alone: all workers agree.

Where each replica updates its shard by itself, the shards are ranges of the flattened
variable. Which optimizers allow that is known for Keras's own classes only: their
subclasses may compute anything.
"""

import contextlib
import difflib
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategy.devices import partition_axes, prime_factors
from keras_strategy.errors import logger
from keras_strategy.training.variable_sync import is_sync_on_read

# Attributes of variables.
_SLOT, _SPEC, _FLAT_SHARDS = "_ks_slot", "_ks_shard_spec", "_ks_flat_shards"
# Attribute of optimizers: an `OptimizerSharding`.
OPTIMIZER_SHARDING = "_ks_optimizer_sharding"


# While an optimizer creates slots: the layout of their weight, in a tuple.
_created_slots: ContextVar[tuple[Any] | None] = ContextVar("slots", default=None)


def dimension_to_shard(shape: Sequence[int], replicas: int) -> int | None:
    """Return the first largest dimension that `replicas` divides, or None."""
    fitting = [i for i, size in enumerate(shape) if size and size % replicas == 0]
    return max(fitting, key=lambda i: (shape[i], -i), default=None)


@dataclass(frozen=True)
class ShardSpec:
    replicas: int  # of all workers
    dimension: int | None  # that is split into `replicas` shards
    # Without it: the dimension that each prime factor of `replicas` divides, or None.
    by_factors: tuple[int | None, ...] = ()

    @classmethod
    def for_shape(
        cls, shape: Sequence[int], replicas: int, logical: Sequence[int] = ()
    ) -> "ShardSpec":
        """Return the spec that splits the `logical` parts into the most shards."""
        sizes, by_factors = list(shape), []
        dimension = dimension_to_shard(shape, replicas)
        if logical:
            sizes = [size // parts for size, parts in zip(shape, logical, strict=True)]
            if dimension is None or sizes[dimension] % replicas:
                dimension = dimension_to_shard(sizes, replicas)
        if dimension is not None:
            return cls(replicas, dimension)
        for factor in prime_factors(replicas):
            divided = dimension_to_shard(sizes, factor)
            if divided is not None:
                sizes[divided] //= factor
            by_factors.append(divided)
        return cls(replicas, None, tuple(by_factors))

    @property
    def num_shards(self) -> int:
        """Number of shards; 1 if every replica keeps the variable."""
        if self.dimension is not None:
            return self.replicas
        factors = prime_factors(self.replicas)
        pairs = zip(factors, self.by_factors, strict=True)
        return math.prod(factor for factor, dimension in pairs if dimension is not None)


@contextlib.contextmanager
def creating_slots(layout: Any = None) -> Iterator[None]:
    """Context manager in which an optimizer creates variables for a weight."""
    token = _created_slots.set((layout,))
    try:
        yield
    finally:
        _created_slots.reset(token)


def layout_of_weight() -> Any:
    """Return the layout of the weight whose slots are being created, if known."""
    (layout,) = _created_slots.get() or (None,)
    return layout


def mark_as_slot(variable: Any) -> None:
    vars(variable)[_SLOT] = True


def shard_spec_of(variable: Any) -> ShardSpec | None:
    return vars(variable).get(_SPEC)


def is_sharded(variable: Any) -> bool:
    """Return True if each replica keeps only a shard of a variable."""
    return shard_spec_of(variable) is not None or _FLAT_SHARDS in vars(variable)


@dataclass(frozen=True)
class FlatShards:
    """Ranges (begin, end) of a flattened variable, one per replica."""

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]

    def size_of(self, replica: int) -> int:
        begin, end = self.bounds[replica]
        return end - begin

    def shape_of(self, replica: int) -> tuple[int, ...]:
        """Return the shape of a replica's shard: the variable's if it is all of it."""
        size = self.size_of(replica)
        return self.shape if size == math.prod(self.shape) else (size,)


def set_flat_shards(variable: Any, shards: FlatShards) -> None:
    vars(variable)[_FLAT_SHARDS] = shards


def flat_shards_of(variable: Any) -> FlatShards | None:
    return vars(variable).get(_FLAT_SHARDS)


class OptimizerSharding:
    """Distribution of an optimizer's state over the replicas."""

    def __init__(self, replicas: int, elementwise: bool):
        self.elementwise = elementwise  # or one replica updates and keeps each weight
        self.slots: list[Any] = []  # the sharded variables
        self._loads = [0] * replicas
        self._owners: dict[int, tuple[Any, int]] = {}

    def shards_for(self, weight: Any, shape: Sequence[int]) -> FlatShards:
        """Return the shards of a weight's state; all workers call it in one order."""
        stored = flat_shards_of(weight)
        if stored is not None and stored.shape == tuple(shape):
            return stored
        if not self.elementwise:
            return self.whole_on_owner(weight, shape)
        replicas, size = len(self._loads), math.prod(shape)
        ends = [size * replica // replicas for replica in range(replicas + 1)]
        return FlatShards(tuple(shape), tuple(itertools.pairwise(ends)))

    def whole_on_owner(self, weight: Any, shape: Sequence[int]) -> FlatShards:
        """Return shards of which the replica that updates a weight has all."""
        owner, size = self.owner_of(weight), math.prod(shape)
        ends = [0] * (owner + 1) + [size] * (len(self._loads) - owner)
        return FlatShards(tuple(shape), tuple(itertools.pairwise(ends)))

    def owner_of(self, weight: Any) -> int:
        """Return the replica that updates a weight."""
        # All workers call it in one order.
        if id(weight) not in self._owners:
            owner = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._loads[owner] += math.prod(weight.shape)
            self._owners[id(weight)] = weight, owner
        return self._owners[id(weight)][1]

    def gradient_indices(self, replica: int, weights: Sequence[Any]) -> list[int]:
        """Return the indices of the gradients that a replica applies."""
        if self.elementwise:
            # Also to empty shards, so that all replicas count the step.
            return list(range(len(weights)))
        shards = [self.shards_for(weight, weight.shape) for weight in weights]
        return [i for i, shard in enumerate(shards) if shard.size_of(replica)]


def gradient_shards(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
) -> list[FlatShards] | None:
    """Return the flat shards of gradients; None if a replica needs them whole."""
    if variables is None or len(variables) != len(gradients):
        return None  # not an optimizer's reduction, or the variables are unknown
    sharding: OptimizerSharding = vars(optimizer)[OPTIMIZER_SHARDING]
    if optimizer.loss_scale_factor is not None or any(
        variable.overwrite_with_gradient
        or tuple(gradient.shape) != tuple(variable.shape)
        for gradient, variable in zip(gradients, variables, strict=True)
    ):
        return None
    return [sharding.shards_for(variable, variable.shape) for variable in variables]


class VariableSharding:
    def __init__(self, shard: str | None, replicas: int):
        self.shard, self.replicas = shard, replicas
        self._logged: set[bool] = set()

    def set_spec(self, variable: Any, logical: Sequence[int]) -> ShardSpec | None:
        """Attach and return a variable's spec; None if it is not sharded."""
        vars(variable)[_SPEC] = None
        if self.shard is None or is_sync_on_read(variable):
            return None
        is_slot = _created_slots.get() is not None or _SLOT in vars(variable)
        if not is_slot and not (variable.trainable and self.shard == "parameters"):
            return None
        shape = tuple(variable.shape)
        spec = ShardSpec.for_shape(shape, self.replicas, logical)
        is_replicated = spec.dimension is None and spec.num_shards == 1
        fate = f"is split into {spec.num_shards} shards"
        if spec.dimension is None and shape and is_replicated not in self._logged:
            self._logged.add(is_replicated)
            logger.info(
                "shard='%s': %d replicas divide no dimension of a variable of the "
                "shape %s, so it %s. `strategy.memory_report(model)` lists all such "
                "variables.",
                *(self.shard, self.replicas, shape),
                "is replicated on all of them" if is_replicated else fate,
            )
        if is_replicated:
            return None
        vars(variable)[_SPEC] = spec
        return spec


def is_elementwise(optimizer: Any) -> bool:
    """Return True if an element's update uses that element's state alone."""
    return type(optimizer) in _classes(
        "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion "
        "ScheduleFreeAdamW"
    )


def is_per_weight(optimizer: Any) -> bool:
    """Return True if a weight's update uses norms or products of it."""
    return type(optimizer) in _classes("Lamb Muon Adafactor")


def is_factored(optimizer: Any) -> bool:
    """Return True if an optimizer keeps sums of a weight's rows and columns."""
    return type(optimizer) in _classes("Adafactor")


@functools.cache
def _classes(names: str) -> frozenset[type]:
    """Return optimizer classes of this backend; some exist in newer Keras only."""
    classes = [getattr(keras.optimizers, name, None) for name in names.split()]
    return frozenset(type(cls.__new__(cls)) for cls in classes if cls is not None)


class VariableLayouts:
    """Layouts of variables on a replica's logical devices: parts per dimension."""

    def __init__(self, layout_map: Any, logical: int):
        self.layout_map, self.logical = layout_map, logical
        is_keras = isinstance(layout_map, keras.distribution.LayoutMap)
        if not is_keras and not isinstance(layout_map, Mapping):
            raise TypeError(
                "Argument `layout_map` must be a dict such as {'dense.*kernel': (1, "
                f"{logical})}}, or a keras.distribution.LayoutMap. Received: "
                f"layout_map={layout_map!r} of type {type(layout_map).__name__}"
            )
        # A LayoutMap matches paths by its own rules.
        self._keras_map = layout_map if is_keras else None
        self.parts: dict[str, tuple[int, ...]] = {}
        for key, parts in dict(layout_map.items()).items():
            if is_keras:
                parts = _parts_by_mesh(layout_map, key)
            self._check(key, parts)
            self.parts[key] = tuple(parts)
        self._unused = dict.fromkeys(self.parts)
        self._trained: dict[str, None] = {}  # paths, in order

    def _check(self, key: Any, parts: Any) -> None:
        received = f"Received: layout_map[{key!r}]={parts!r}"
        try:
            re.compile(key)
        except (TypeError, re.error) as error:
            raise ValueError(
                "A key of `layout_map` must be a regular expression, which is searched "
                f"in the paths of variables. {received}"
            ) from error
        if not isinstance(parts, tuple | list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in parts
        ):
            raise ValueError(
                "A layout must be a number of parts for each dimension of a variable, "
                f"such as (1, {self.logical}). {received}"
            )
        if partition_axes(parts, self.logical) is None:
            raise ValueError(
                "The product of a layout's parts must divide the number of logical "
                f"devices of each replica, which is {self.logical}. {received}"
            )

    def partitions_of(self, variable: Any) -> tuple[int, ...] | None:
        """Return the number of parts per dimension, or None if it is not split."""
        # A trainable variable must fit; another one that does not fit is not split.
        path = variable.path
        if path in self.parts:
            keys = [path]
        elif self._keras_map is None:
            keys = [key for key in self.parts if re.search(key, path)]
        else:
            layout = self._keras_map[path]  # an error if several match
            keys = [key for key in self.parts if layout is self._keras_map[key]][:1]
        for key in keys:
            self._unused.pop(key, None)
        if variable.trainable:
            self._trained[path] = None
        if not keys:
            return None
        parts, shape = self.parts[keys[0]], tuple(variable.shape)
        fits = len(parts) == len(shape) and not any(
            size % n for size, n in zip(shape, parts, strict=True)
        )
        if fits and len(keys) == 1:
            return parts
        if not variable.trainable:
            return None
        if len(keys) > 1:
            raise ValueError(
                f"The path '{path}' must match one key of `layout_map` only. "
                f"It matches {keys}."
            )
        raise ValueError(
            f"layout_map[{keys[0]!r}]={parts} does not fit the variable "
            f"'{path}' of the shape {shape}. A layout must have one number "
            "for each dimension, which divides its size."
        )

    def warn_unused(self) -> None:
        """Warn once of entries that match nothing, when training begins."""
        # It is no error: a model that is made later may use them.
        for key in self._unused:
            nearest = difflib.get_close_matches(key, self._trained, 3, 0.0)
            logger.warning(
                "layout_map[%r] splits nothing: the expression matches no path of the "
                "variables that exist so far. The nearest paths of weights are: %s. "
                "Variables without an entry are replicated on each logical device.",
                *(key, ", ".join(map(repr, nearest)) or "none"),
            )
        self._unused.clear()


def _parts_by_mesh(layout_map: Any, key: str) -> tuple[int, ...]:
    """Return a Keras layout's number of parts per dimension, by its mesh."""
    layout = layout_map[key]
    mesh = layout.device_mesh
    if mesh is None:
        raise ValueError(
            "A keras.distribution.LayoutMap must have a device mesh, whose axes define "
            f"the number of parts. Received none for layout_map[{key!r}]"
        )
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return tuple(1 if axis is None else int(sizes[axis]) for axis in layout.axes)
