"""Ctrl-C ends a run whose replicas wait for each other."""

import contextlib
import os
import signal
import threading
import time

import keras
import pytest

import keras_strategy as ks

EAGER = ks.RunOptions(compile=False)


def forever(over):
    while True:
        time.sleep(0.01)


def asleep(over):
    time.sleep(8)  # without running Python
    over.set()


@contextlib.contextmanager
def ctrl_c(begun):
    """Interrupts the main thread when a replica has begun to wait."""

    def press():
        begun.wait(60)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


WAITS = [forever]
if keras.backend.backend() != "tensorflow":
    WAITS.append(asleep)  # native tf.distribute would wait for two minutes


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("which", [0, 1])
def test_ctrl_c_ends_a_waiting_run(which, waits, two):
    begun, over = threading.Event(), threading.Event()

    def step():
        context = ks.get_replica_context()
        if context.replica_id_in_sync_group == which:
            begun.set()
            waits(over)
        return context.all_reduce("sum", keras.ops.ones(()))

    with ctrl_c(begun), pytest.raises(KeyboardInterrupt):
        two.run(step, options=EAGER)
    assert not over.is_set()
    # And the strategy goes on.
    total = two.run(
        lambda: ks.get_replica_context().all_reduce("sum", keras.ops.ones(())),
        options=EAGER,
    )
    assert float(two.experimental_local_results(total)[0]) == 2.0
