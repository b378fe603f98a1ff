"""Plain Keras on one device."""

from conformance.program import Program
from conformance.systems.training import Outcome, build, fit


def run(program: Program, replicas: int, initial: None = None) -> Outcome:
    del replicas
    return fit(build(program, initial), program)
