"""The ratio of two programs that are timed in turn."""

import itertools

import pytest

from benchmarks.paired_timing import SHORT, WALL, compare, warm


class Machine:
    """Where programs take turns, and each round finds it twice as slow or as fast."""

    def __init__(self):
        self.turns = []
        self.pace = itertools.cycle([1.0] * 4 + [2.0] * 4)

    def program(self, name, seconds_per_step, once=0.0):
        def turn(steps):
            self.turns.append((name, steps))
            return {WALL: (once + steps * seconds_per_step) * next(self.pace)}

        return turn


def test_ratio_pairs_neighbouring_runs():
    """Though the machine changes its pace by two, the ratio is that of the programs."""
    machine = Machine()
    ours, peer = machine.program("ours", 0.01), machine.program("peer", 0.02)
    speed = compare(ours, peer, steps=64, rounds=8).speeds[WALL]
    assert speed.ratio == pytest.approx(2)
    assert speed.spread == pytest.approx((2, 2))


def test_fixed_cost_is_not_counted_per_step():
    machine = Machine()
    machine.pace = itertools.repeat(1.0)
    ours, peer = machine.program("ours", 0.01, once=3.0), machine.program("peer", 0.01)
    pairing = compare(ours, peer, steps=64, rounds=3)
    assert pairing.speeds[WALL].ours == pytest.approx(100)
    assert pairing.speeds[WALL].ratio == pytest.approx(1)
    assert pairing.fixed_seconds == pytest.approx((3.0, 0.0))


def test_paired_programs_train_alike():
    """As many steps and as often, ours first; all that a round is made of."""
    machine = Machine()
    ours, peer = machine.program("ours", 0.01), machine.program("peer", 0.03)
    compare(ours, peer, warm(ours, peer, seconds=3.0), rounds=3)
    of_ours, of_peer = (
        [steps for who, steps in machine.turns if who == name]
        for name in ("ours", "peer")
    )
    assert of_ours == of_peer
    assert [who for who, _ in machine.turns[-4:]] == ["ours"] * 2 + ["peer"] * 2


@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0, 30.0])
def test_lengths_are_multiples_of_eight_steps(seconds):
    """Where it is fewer than 64, a step is too long for that to matter."""
    machine = Machine()
    machine.pace = itertools.repeat(1.0)
    program = machine.program("both", 0.01)
    steps = warm(program, program, seconds)
    assert steps == pytest.approx(100 * seconds, abs=64)
    assert steps >= SHORT
    assert steps < 64 or (steps % 8, steps // SHORT % 8) == (0, 0)


def test_long_turn_has_a_minimum():
    program = Machine().program("both", 0.01)
    assert warm(program, program, 0.1, min_steps=128) == 128
