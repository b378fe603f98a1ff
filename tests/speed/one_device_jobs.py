"""What is counted in a process that has a strategy of one device and no other."""

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.figures import python_calls
from benchmarks.ours import fit_in_scope


def calls_of_a_step(name: str) -> float:
    """The Python functions of ours that a step of `fit` enters.

    Args:
        name: That of the strategy.
    """
    device = "cpu:0" if name == "OneDeviceStrategy" else ["cpu:0"]
    train = fit_in_scope(getattr(ks, name)(device), CASES[0])
    train(2)  # builds and compiles
    return (python_calls(train, 8) - python_calls(train, 3)) / 5
