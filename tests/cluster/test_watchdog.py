"""When a worker gives up: decisions alone, without a process, a socket or a wait."""

from typing import NamedTuple

import pytest

from keras_strategy.cluster.watchdog import (
    ANSWER_SECONDS,
    DEADLOCK_SECONDS,
    LEFT_SECONDS,
    RELAY_SECONDS,
    Operation,
    OperationTrace,
    Watchdog,
)

NAMES = ["chief", "worker 0", "worker 1"]
TIMEOUT = 10.0
STEP = Operation(7, "step", 0.0)
# Asked once in each operation, long before its time is over.
SUSPECTS = {"type": "inquire", "count": STEP.count}


class Fail(NamedTuple):
    message: str
    details: str = ""


class Watched:
    """The watchdog of worker 0, at the time 0. Its methods return what it did."""

    def __init__(self):
        self._done = []
        fail = lambda *failure: self._done.append(Fail(*failure))  # noqa: E731
        self._watchdog = Watchdog(1, NAMES, TIMEOUT, 0.0, self._done.append, fail)

    def __getattr__(self, name):
        member = getattr(self._watchdog, name)
        if name in ("interval", "waited"):
            return member

        def act(*arguments):
            self._done.clear()
            member(*arguments)
            return list(self._done)

        return act


@pytest.fixture
def watchdog() -> Watched:
    return Watched()


def look(watchdog, operation, begin, end):
    """Return the actions of a watchdog between two times, with their times."""
    done = []
    now = begin
    while now < end:
        actions = [a for a in watchdog.check(operation, now) if a != SUSPECTS]
        done += [(now, action) for action in actions]
        now += watchdog.interval
    return done


def asks(count: int = STEP.count) -> dict:
    return {"type": "inquire", "count": count, "timeout": TIMEOUT}


def test_idle_worker_is_not_checked(watchdog):
    assert look(watchdog, None, 0, 100) == []


def test_coordinator_is_queried_after_timeout(watchdog):
    assert look(watchdog, STEP, 0, TIMEOUT + 2) == [(TIMEOUT + 1, asks())]


def test_deadlock_is_checked_early(watchdog):
    looked = [now for now in range(10) if watchdog.check(STEP, now) == [SUSPECTS]]
    assert looked == [DEADLOCK_SECONDS + 1]


def test_operation_has_its_own_timeout(watchdog):
    for count in range(5):
        begin = 0.9 * TIMEOUT * count
        step = STEP._replace(since=begin)
        assert look(watchdog, step, begin, begin + 0.9 * TIMEOUT) == []


def test_answering_coordinator_is_queried_again(watchdog):
    """All may be there, and the last one have come just now."""
    assert look(watchdog, STEP, 0, 12) == [(11.0, asks())]
    assert watchdog.on_message({"type": "report"}, 11.5) == []
    again = 12 + ANSWER_SECONDS
    assert look(watchdog, STEP, 12, again + 1) == [(again, asks())]


def test_silent_coordinator_is_the_failure(watchdog):
    *_, (when, last) = look(watchdog, STEP, 0, 30)
    assert when == 12 + ANSWER_SECONDS
    assert last.message.startswith(
        "chief does not answer, and worker 0 has been in `step` for more than 10 s"
    )


def test_earlier_message_is_no_answer(watchdog):
    watchdog.on_message({"type": "report"}, 0.5)
    assert isinstance(look(watchdog, STEP, 1, 30)[-1][1], Fail)


@pytest.mark.parametrize("begin", [0.0, 3.0])
def test_departed_worker_has_a_grace_period(watchdog, begin):
    assert look(watchdog, None, 0, 1) == []
    assert watchdog.on_message({"type": "left", "rank": 2}, 1.0) == []
    operation = Operation(7, "step", begin)
    *before, (when, told), (later, failure) = look(watchdog, operation, begin, 20)
    assert before == []
    assert when == max(begin, 1.0) + LEFT_SECONDS + 1
    why = "worker 1 ended while worker 0 was waiting for it in `step`"
    assert told == {"type": "failed", "message": why, "details": ""}
    # The coordinator has not told it back.
    assert later == when + RELAY_SECONDS
    assert failure == Fail(why)


def test_suspended_time_does_not_count(watchdog):
    assert look(watchdog, STEP, 0, 5) == []
    asleep = 5 + 1000
    assert look(watchdog, STEP, asleep, asleep + TIMEOUT) == []
    assert watchdog.waited(STEP, asleep + 3) == 3
    assert look(watchdog, STEP, asleep + TIMEOUT, asleep + 12) == [
        (asleep + TIMEOUT + 1, asks())
    ]


def test_wake_up_message_does_not_hide_suspension(watchdog):
    look(watchdog, STEP, 0, 5)
    watchdog.on_message({"type": "report"}, 1000.0)
    assert watchdog.waited(STEP, 1000.0) == 0
    assert look(watchdog, STEP, 1000.5, 1005) == []


def test_reported_failure_is_final(watchdog):
    told = watchdog.report_failure("worker 0 raised E", "a trace", 3.0)
    message = {"type": "failed", "message": "worker 0 raised E", "details": "a trace"}
    assert told == [message]
    assert watchdog.on_message(message, 3.1) == [Fail("worker 0 raised E", "a trace")]
    assert look(watchdog, STEP, 4, 100) == []


def test_earlier_failure_wins(watchdog):
    watchdog.report_failure("worker 0 raised E", "", 3.0)
    other = {"type": "failed", "message": "worker 1 raised E", "details": ""}
    assert watchdog.on_message(other, 3.1) == [Fail("worker 1 raised E")]
    assert watchdog.on_message(other, 3.2) == []
    assert watchdog.on_disconnect("it ended") == []


def test_no_query_after_failure(watchdog):
    assert watchdog.on_message({"type": "failed", "message": "E", "details": ""}, 1.0)
    assert look(watchdog, STEP, 1.5, 100) == []


def test_first_local_failure_counts(watchdog):
    watchdog.report_failure("the first", "", 3.0)
    watchdog.report_failure("the second", "", 4.0)
    until = 3.0 + RELAY_SECONDS
    assert look(watchdog, None, 3.5, until + 2)[0][1] == Fail("the first")


def test_lost_chief_is_reported(watchdog):
    gone = "chief disconnected without notice (its process was killed or crashed)"
    why = "disconnected without notice (its process was killed or crashed)"
    assert watchdog.on_disconnect(why) == [Fail(gone)]


def test_lost_chief_before_report(watchdog):
    watchdog.report_failure("worker 0 raised E", "", 3.0)
    assert watchdog.on_disconnect("it ended") == [Fail("worker 0 raised E")]


def test_departed_chief_is_reported(watchdog):
    watchdog.on_message({"type": "left", "rank": 0}, 1.0)
    assert watchdog.on_disconnect("it ended") == []
    # Nobody is there to tell it.
    ((when, failure),) = look(watchdog, STEP, 1, 20)
    assert when == 1 + LEFT_SECONDS + 1
    assert failure == Fail("chief ended while worker 0 was waiting for it in `step`")


def test_leaving_worker_does_not_wait(watchdog):
    watchdog._watchdog.leaving = True
    assert look(watchdog, STEP, 0, 100) == []
    assert watchdog.on_disconnect("it ended") == []


def test_trace_counts_operations_since_exchange(watchdog):
    trace = OperationTrace()
    trace.enter("start")
    trace.record_exchange()
    for number in range(70):
        trace.enter(f"step {number}")
    # An operation is entered while the watchdog reads the trace.
    trace._count -= 1
    state = trace.state(watchdog, 0.0)
    assert state.before == 6
    assert state.since[0] == "step 6" and len(state.since) == 64
