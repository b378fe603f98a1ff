"""Fingerprints of models: a digest of all bits, and the conditions that they need."""

import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_strategy.core.collectives import array_digest
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.saving import run_on_chief

# The file for the fingerprint of the model that `fit` has trained last.
_FILE = "KERAS_STRATEGY_FINGERPRINT"


class VariableFingerprint(NamedTuple):
    """The fingerprint of one variable.

    Attributes:
        path: The variable's path in the model, which is not part of the fingerprint.
        shape: Its shape.
        dtype: Its dtype.
        sha256: The digest of these and its bits, in hexadecimal digits.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a model. Two are equal if all bits of the models are.

    `str()` returns `sha256`.

    Attributes:
        sha256: The digest of all variables, 64 hexadecimal digits.
        variables: A `VariableFingerprint` of each variable, in the model's order.
        conditions: What the bits depend on beside the program: the versions of the
            libraries, the processor and how it computes.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    found = ks.fingerprint(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    assert str(found) == found.sha256 and len(found.variables) == 2
    found.save("model.json")  # for `keras-strategy compare`
    ```
    """

    sha256: str
    variables: tuple[VariableFingerprint, ...] = field(compare=False)
    conditions: Mapping[str, Any] = field(compare=False)

    def __str__(self) -> str:
        return self.sha256

    def save(self, path: str | os.PathLike) -> None:
        """Write a report for `keras-strategy compare`.

        Args:
            path: The JSON file to write.
        """
        report = asdict(self) | {
            "variables": [variable._asdict() for variable in self.variables]
        }
        pathlib.Path(path).write_text(json.dumps(report, indent=1), encoding="utf-8")


def fingerprint(model: keras.Model, optimizer: bool = True) -> Fingerprint:
    """Return a digest of all bits of a model's variables.

    Of a model that was trained with `virtual_replicas` it is the same on any number of
    devices. The variables are the weights, the states of seed generators and those of
    optimizers, in the model's order; not those of metrics. Their names have no effect.

    Args:
        model: A built model, of any strategy or none. With several workers, all of them
            call this.
        optimizer: Whether the variables of its optimizers are included.

    Returns:
        A `Fingerprint`, which prints as 64 hexadecimal digits.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If the model has no variables yet.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before = ks.fingerprint(model)
    assert before == ks.fingerprint(model)
    model.layers[0].bias.assign([1e-30])
    assert before != ks.fingerprint(model)
    ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `model` must be a keras.Model. Received: "
            f"model={model!r} of type {type(model).__name__}"
        )
    named = variables_of(model, metrics=False)
    if not optimizer:
        named = {k: v for k, v in named.items() if k.startswith("model/")}
    if not model.built or not named:
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Call it on a batch, or "
            "create it with the shape of its inputs."
        )
    found = []
    for variable in named.values():  # one after the other, as they may be sharded
        array = keras.ops.convert_to_numpy(variable)
        digest = array_digest(array)
        found.append(
            VariableFingerprint(variable.path, array.shape, str(array.dtype), digest)
        )
    total = _join([variable.sha256 for variable in found])
    return Fingerprint(total, tuple(found), _conditions(strategy_of_model(model)))


def fingerprint_of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Return what `fingerprint` does, given the values of `variables_of`."""
    values = [v for k, v in arrays.items() if not k.startswith("metrics/")]
    return _join(map(array_digest, values))


def write_report_if_requested(model: keras.Model) -> None:
    """Write a trained model's report where `keras-strategy run` reads it."""
    file = os.environ.get(_FILE)
    if file:
        strategy: Any = strategy_of_model(model)
        cluster = strategy and strategy.extended.cluster
        report = fingerprint(model)
        run_on_chief(cluster, "the fingerprint", functools.partial(report.save, file))


def _join(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _conditions(strategy: Strategy) -> dict[str, Any]:
    engine = get_engine()
    library = sys.modules.get(engine.name)
    virtual_replicas = getattr(strategy, "virtual_replicas", None)
    return {
        "Keras backend": f"{engine.name} {getattr(library, '__version__', '')}".strip(),
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        "processor": _processor(),
        "virtual_replicas": virtual_replicas,
        **engine.describe_arithmetic(virtual_replicas is not None),
    }


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
