"""The ratio of two programs that are timed in turn."""

import itertools
import time

import pytest

from benchmarks.pairing import Clock, compare


class Machine:
    """A clock that two programs move on, twice as slow every other round."""

    def __init__(self):
        self.now = 0.0
        self.pace = itertools.cycle([1.0, 1.0, 2.0, 2.0])

    def program(self, seconds_per_step):
        def train(steps):
            self.now += steps * seconds_per_step * next(self.pace)
            time.sleep(1e-4)  # for the clock that finds the number of steps

        return train


def test_the_ratio_is_that_of_neighbours():
    """Though the machine changes its pace by two, the ratio is that of the programs."""
    machine = Machine()
    clock = Clock("steps/s", lambda: machine.now)
    (speed,) = compare(
        machine.program(0.01),
        machine.program(0.02),
        rounds=8,
        seconds=0.001,
        clocks=(clock,),
    )
    assert speed.ratio == pytest.approx(2)
    assert speed.spread == pytest.approx((2, 2))
    assert speed.unit == "steps/s"


def test_both_programs_train_alike():
    """As many steps and as often, ours first; all that a round is made of."""
    calls = []
    compare(
        lambda steps: calls.append(("ours", steps)),
        lambda steps: calls.append(("peer", steps)),
        rounds=3,
        seconds=1e-9,
    )
    assert calls[::2] == [("ours", steps) for _, steps in calls[::2]]
    assert [steps for _, steps in calls[::2]] == [steps for _, steps in calls[1::2]]
    assert len(calls) == 2 * (3 + 1 + 3)


def test_processes_go_by_what_all_of_them_measured():
    seen = []

    def together(value):
        seen.append(value)
        return 2 * value

    machine = Machine()
    machine.pace = itertools.repeat(1.0)
    clock = Clock("steps/s", lambda: machine.now)
    program = machine.program(0.5)
    (speed,) = compare(program, program, 2, 1e-9, (clock,), together)
    assert speed.ours == pytest.approx(1.0)  # two processes: 2 * 0.5 s a step
    assert 0.0 in seen  # where they wait for each other before a round
