"""RunOptions, and the choice of how values are combined."""

import logging
import pickle

import keras
import pytest

import keras_strategy as ks

BACKEND = keras.backend.backend()


def results(strategy, value):
    return [
        keras.ops.convert_to_numpy(v).tolist()
        for v in strategy.experimental_local_results(value)
    ]


def test_run_options_are_a_tuple_of_tf_distributes():
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


def test_options_that_are_refused(two):
    for options in (False, {"compile": False}, (True, False, None, None)):
        with pytest.raises(TypeError, match="`options` of `run`"):
            two.run(lambda: 1, options=options)
    with pytest.raises(ValueError, match="compile='no'"):
        two.run(lambda: 1, options=ks.RunOptions(compile="no"))


CHOICES = [
    ks.ReductionToOneDevice(),
    ks.ReductionToOneDevice("/cpu:1"),
    ks.HierarchicalCopyAllReduce(num_packs=2),
    ks.NcclAllReduce(),
]


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_cross_device_ops(choice, caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        if BACKEND == "tensorflow" and isinstance(choice, ks.NcclAllReduce):
            with pytest.raises(ValueError, match="needs GPUs"):
                ks.MirroredStrategy(["cpu:0", "cpu:1"], choice)
            return
        strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=choice)
    if BACKEND == "tensorflow":
        native = strategy.extended.group.native.extended._cross_device_ops
        assert type(native).__name__ == type(choice).__name__
    else:
        assert f"{choice!r} has no effect on {BACKEND}" in caplog.text
    total = strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert results(strategy, total) == [4.0, 4.0]
    again = pickle.loads(pickle.dumps(strategy))
    assert repr(again._cross_device_ops) == repr(choice)


def test_cross_device_ops_with_one_device(caplog):
    with caplog.at_level(logging.INFO, "keras_strategy"):
        ks.MirroredStrategy(["cpu:0"], ks.ReductionToOneDevice())
    assert "no effect on one device" in caplog.text


def test_an_accumulation_function():
    calls = []

    def add(tensors):
        calls.append(len(tensors))
        return sum(tensors[1:], tensors[0])

    choice = ks.ReductionToOneDevice(accumulation_fn=add)
    if BACKEND != "tensorflow":
        with pytest.raises(ValueError, match="accumulation_fn"):
            ks.MirroredStrategy(["cpu:0", "cpu:1"], choice)
        return
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], choice)
    total = strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", 2.0))
    assert results(strategy, total) == [4.0, 4.0] and calls


def test_cross_device_ops_that_are_refused():
    class Own(ks.CrossDeviceOps):
        pass

    for choice in (3, ks.CrossDeviceOps(), Own(), ks.NcclAllReduce):
        with pytest.raises(TypeError, match="`cross_device_ops` must be"):
            ks.MirroredStrategy(["cpu:0", "cpu:1"], choice)
    with pytest.raises(ValueError, match="num_packs=-1"):
        ks.NcclAllReduce(num_packs=-1)
    with pytest.raises(TypeError, match="num_packs=1.5"):
        ks.HierarchicalCopyAllReduce(1.5)
    with pytest.raises(ValueError, match="kind and index"):
        ks.ReductionToOneDevice("?")
    with pytest.raises(TypeError, match="accumulation_fn=3"):
        ks.ReductionToOneDevice(accumulation_fn=3)
