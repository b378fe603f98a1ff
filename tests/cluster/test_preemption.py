"""Times at which preempted workers save and end."""

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from keras_strategy.cluster.preemption import NextAction, Preemption, TerminationNotice
from keras_strategy.options import TerminationConfig

HOUR = 3600.0


def alone(**config) -> Preemption:
    return Preemption(TerminationConfig(**config), None)


def test_preemption_saves_once_and_ends():
    preemption = alone()
    assert preemption.after_step() is NextAction.CONTINUE
    preemption.notice.since = time.monotonic()
    assert preemption.after_step() is NextAction.SAVE_AND_END
    # The user's function has it go on.
    assert preemption.after_step() is NextAction.CONTINUE


def test_grace_period_is_used():
    preemption = alone(grace_period=HOUR)
    preemption.notice.since = time.monotonic()
    assert preemption.after_step() is NextAction.SAVE
    assert preemption.after_step() is NextAction.CONTINUE
    preemption.notice.since -= HOUR
    assert preemption.after_step() is NextAction.SAVE_AND_END


def test_uninformed_worker_follows():
    told = [[False, False], [True, False]]
    cluster: Any = SimpleNamespace(exchange=lambda operation, says: told)
    preemption = Preemption(TerminationConfig(), cluster)
    assert preemption.after_step() is NextAction.SAVE
    told[1] = [True, True]
    assert preemption.after_step() is NextAction.SAVE_AND_END


@pytest.mark.parametrize(("exit_fn", "code"), [(None, 75), (lambda: exit(3), 3)])
def test_exit_function_is_called(exit_fn, code):
    with pytest.raises(SystemExit) as end:
        alone(exit_fn=exit_fn).end()
    assert end.value.code == code


def test_signal_handler_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    notice = TerminationNotice()
    with notice.listening():
        assert notice.since is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.since is not None
    assert signal.getsignal(signal.SIGTERM) is before


def test_watcher_function_replaces_signals():
    before, asked = signal.getsignal(signal.SIGTERM), threading.Event()
    told = iter([False, True])

    def watch():
        answer = next(told)
        if answer:
            asked.set()
        return answer

    notice = TerminationNotice(watch)
    with notice.listening():
        assert signal.getsignal(signal.SIGTERM) is before
        assert asked.wait(30)
        while notice.since is None:
            time.sleep(0.01)


@pytest.mark.parametrize(
    "argument", [{"grace_period": -1}, {"grace_period": "1"}, {"exit_fn": 3}]
)
def test_bad_arguments_are_refused(argument):
    with pytest.raises(ValueError, match="Argument `"):
        TerminationConfig(**argument)
