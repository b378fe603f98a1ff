"""The threads that replicas run in, by themselves."""

import subprocess
import sys

import pytest

from keras_strategy.backends.threads import hooks
from keras_strategy.errors import KerasVersionError
from keras_strategy.hooks import hook

SLOW_TO_RELEASE = """
import threading, time
from keras_strategy.backends.threads.pool import Pool

class Slow:
    def __del__(self):
        time.sleep(0.3)
        print("released\\n", end="", flush=True)  # whole lines, from two threads

kept = threading.local()

def call():
    kept.value = Slow()

pool = Pool(["replica 0", "replica 1"])
pool.call([call, call], abort=lambda: None)
"""


def test_the_process_ends_after_its_threads():
    # A thread that the interpreter ends while it releases a tensor aborts the process.
    ended = subprocess.run(
        [sys.executable, "-c", SLOW_TO_RELEASE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["released", "released"]


def test_threads_end_with_their_owner():
    program = SLOW_TO_RELEASE + (
        "del pool\ntime.sleep(0.2)\nprint(len(threading.enumerate()), flush=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    # They are out of Python, and still waited for.
    assert ended.stdout.split() == ["1", "released", "released"]


@pytest.mark.parametrize(
    ("method", "says"),
    [("reset_dropout_mask", "no longer sets _dropout_mask"), ("forget", "is gone")],
)
def test_a_cell_that_keeps_its_mask_elsewhere_is_refused(method, says, monkeypatch):
    class Cell:
        pass

    setattr(Cell, method, lambda self: setattr(self, "_mask", None))
    monkeypatch.setattr(hooks, "DropoutRNNCell", Cell)
    with pytest.raises(KerasVersionError, match=f"reset_dropout_mask` {says}"):
        hook.install(hook.hooks_of(hooks))
