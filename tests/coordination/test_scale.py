"""Many members, and many agreements; `python -m tests.coordination.scale` has more."""

from tests.coordination import scale


def test_many_members_join_agree_and_learn_of_a_failure_soon(port):
    for what, seconds in scale.many_members(port, 512).items():
        assert seconds < 3, what


def test_agreements_leave_nothing(port):
    grown, _ = scale.memory_growth(port, 3_000)
    # What each left, of as little as a hundred bytes, would be 600 000 together.
    assert grown < 500_000
