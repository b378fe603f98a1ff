"""RunOptions."""

import logging
import weakref

import keras
import pytest

import keras_strategy as ks
from keras_strategy.values import ValueContext
from tests.core.apis import results

BACKEND = keras.backend.backend()


def test_run_options_match_native_tuple():
    options = ks.RunOptions()
    assert options[:3] == (True, False, None) and options.compile is None


@pytest.mark.parametrize("compile", [None, True])
def test_run_with_options(compile, two):
    options = ks.RunOptions(compile=compile)
    ones = two.run(lambda: keras.ops.ones(()), options=options)
    assert results(two, ones) == [1.0, 1.0]


def test_run_without_compiling(two):
    calls = []
    with two.scope():
        v = keras.Variable(0.0, aggregation="sum")

    def step(x):
        calls.append(1)
        v.assign_add(x)

    two.run(step, args=(1.0,), options=ks.RunOptions(compile=False))
    calls.clear()
    for _ in range(2):
        two.run(step, args=(1.0,), options=ks.RunOptions(compile=False))
    assert len(calls) == 4 and float(v.numpy()) == 6.0  # 3 runs of 2 replicas

    def branches():
        replica = ks.get_replica_context().replica_id_in_sync_group
        return keras.ops.ones(()) if replica == 0 else keras.ops.zeros(())

    out = two.run(branches, options=ks.RunOptions(compile=False))
    assert results(two, out) == [1.0, 0.0]

    one = ks.OneDeviceStrategy("cpu:0")
    assert one.run(lambda: 3, options=ks.RunOptions(compile=False)) == 3


def test_options_without_effect_are_logged(two, caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        two.run(lambda: 1, options=ks.RunOptions())
        assert "no effect" not in caplog.text
        two.run(lambda: 1, options=ks.RunOptions(experimental_xla_options="x"))
    assert "experimental_xla_options='x'" in caplog.text


def test_bad_options_are_refused(two):
    for options in (False, {"compile": False}, (True, False, None, None)):
        with pytest.raises(TypeError, match="`options` of `run`"):
            two.run(lambda: 1, options=options)
    with pytest.raises(ValueError, match="compile='no'"):
        two.run(lambda: 1, options=ks.RunOptions(compile="no"))


def test_contexts_can_be_weakly_referenced():
    for context in (ks.InputContext(1, 0, 2), ValueContext(0, 2)):
        assert weakref.ref(context)() is context
