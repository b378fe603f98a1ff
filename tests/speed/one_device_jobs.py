"""What is counted in a process that has a strategy of one device and no other."""

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import MLP
from benchmarks.programs.ours import fit_under
from tests.speed.figures import python_calls


def calls_of_a_step(name: str) -> float:
    """The Python functions of ours that a step of `fit` enters.

    Args:
        name: That of the strategy.
    """
    device = "cpu:0" if name == "OneDeviceStrategy" else ["cpu:0"]
    train = fit_under(getattr(ks, name)(device), CASES[MLP])
    train(2)  # builds and compiles
    return (python_calls(train, 8) - python_calls(train, 3)) / 5
