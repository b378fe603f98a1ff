"""What a model's variables take on each device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategy.hooks.variables import variables_of
from keras_strategy.rules.ownership import strategy_of_model
from keras_strategy.rules.sharding import is_sharded, shard_spec_of

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model's variables on the devices of this worker.

    Attributes:
        devices: The devices' names, for all that follows.
        parameters: The weights that are trained.
        others: The model's other variables, such as moving statistics and seeds.
        slots: What its optimizers keep.
        shard: What the strategy splits.
        whole: Paths of the variables that are to be split and stay whole, since the
            number of replicas has no factor that divides one of their dimensions.
            Scalars are not listed.
        partly: Paths of those that are split into fewer parts than there are replicas,
            with the number of parts.
    """

    devices: tuple[str, ...]
    parameters: tuple[int, ...]
    others: tuple[int, ...]
    slots: tuple[int, ...]
    shard: str | None
    whole: tuple[str, ...]
    partly: Mapping[str, int]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("device", "parameters", "others", "slots", "total")
        ]
        for device, *numbers in zip(
            self.devices, self.parameters, self.others, self.slots, strict=True
        ):
            rows.append((device, *(f"{n:,}" for n in (*numbers, sum(numbers)))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"Bytes on each device, with shard={self.shard!r}:"]
        for first, *others in rows:
            cells = (text.rjust(w) for text, w in zip(others, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *cells]))
        if self.whole:
            lines.append(f"Whole on every device: {', '.join(self.whole)}")
        if self.partly:
            some = (f"{path} ({parts})" for path, parts in self.partly.items())
            lines.append(f"In fewer parts than devices: {', '.join(some)}")
        return "\n".join(lines)


def report(strategy: "Strategy", model: keras.Model) -> MemoryReport:
    """See `Strategy.memory_report`."""
    owner = strategy_of_model(model)
    if owner is not strategy:
        raise ValueError(
            "`memory_report` tells of a model that was made in the strategy's scope. "
            f"Received: the model '{model.name}' of {owner!r}"
        )
    extended = strategy.extended
    trained = {id(variable) for variable in model.trainable_variables}
    kinds: dict[str, list[Any]] = {"parameters": [], "others": [], "slots": []}
    for name, variable in variables_of(model, metrics=False).items():
        kind = "others" if name.startswith("model/") else "slots"
        kinds["parameters" if id(variable) in trained else kind].append(variable)

    def on_each_device(variables: Iterable[Any]) -> tuple[int, ...]:
        held = [extended.group.local_bytes(variable) for variable in variables]
        nothing = (0,) * len(extended.worker_devices)
        return tuple(map(sum, zip(nothing, *held, strict=True)))

    split = {"optimizer": ("slots",), "parameters": ("slots", "parameters")}
    alone = strategy.num_replicas_in_sync == 1  # with nobody to share with
    to_split = () if alone else split.get(strategy.shard or "", ())
    shared = [variable for kind in to_split for variable in kinds[kind]]
    splits = {variable.path: shard_spec_of(variable) for variable in shared}
    return MemoryReport(
        extended.worker_devices,
        **{kind: on_each_device(variables) for kind, variables in kinds.items()},
        shard=strategy.shard,
        whole=tuple(
            variable.path
            for variable in shared
            if len(variable.shape) and not is_sharded(variable)
        ),
        partly={
            path: split.num_shards
            for path, split in splits.items()
            if split is not None and split.num_shards < split.replicas
        },
    )
