"""Scopes and contexts, as tf.distribute has them."""

import copy
import pickle
import threading

import keras
import pytest

import keras_strategy as ks


def test_outside_scopes():
    context = ks.get_replica_context()
    assert (context.num_replicas_in_sync, context.replica_id_in_sync_group) == (1, 0)
    assert not ks.in_cross_replica_context()
    assert not ks.has_strategy()
    assert ks.get_strategy().num_replicas_in_sync == 1
    assert ks.get_strategy() is ks.get_strategy()


def test_inside_scope(two):
    with two.scope() as entered:
        assert entered is two
        assert ks.get_replica_context() is None
        assert ks.in_cross_replica_context()
        assert ks.has_strategy()
        assert ks.get_strategy() is two


def test_inside_scope_of_default_strategy():
    with ks.get_strategy().scope() as default:
        assert not ks.has_strategy()
        assert not ks.in_cross_replica_context()
        assert ks.get_strategy() is default
        context = ks.get_replica_context()
        assert float(context.all_reduce("SUM", keras.ops.ones(()))) == 1


def test_inside_run(two):
    def where():
        return (
            ks.in_cross_replica_context(),
            ks.get_strategy() is two,
            ks.get_replica_context().strategy is two,
            ks.get_replica_context().num_replicas_in_sync,
        )

    assert two.run(where) == (False, True, True, 2)
    assert not ks.has_strategy()


def test_scope_can_be_nested_and_reentered(two):
    scope = two.scope()
    for _ in range(2):
        with scope, scope, two.scope():
            assert ks.get_strategy() is two
        assert not ks.has_strategy()


def test_scope_in_another_strategys_scope_is_refused(mirrored):
    first, second = mirrored(2), mirrored(3)
    mixing = pytest.raises(RuntimeError, match="Mixing different strategies")
    with first.scope():
        with mixing, second.scope():
            pass
        with mixing:
            second.run(lambda: 1)
        assert ks.get_strategy() is first
    assert not ks.has_strategy()


def test_scope_inside_run(two):
    def enter():
        with two.scope():
            pass

    with pytest.raises(RuntimeError, match=r"merge_call\(\)"):
        two.run(enter)


def test_cross_replica_methods_are_refused_in_run(two):
    with pytest.raises(RuntimeError, match=r"merge_call\(\)"):
        two.run(lambda: two.run(lambda: 1))
    with pytest.raises(RuntimeError, match=r"all_reduce\(\)"):
        two.run(lambda: two.reduce("SUM", keras.ops.ones(()), axis=None))
    assert two.run(lambda: 1) == 1


def test_exception_leaves_scope(two):
    with pytest.raises(KeyError), two.scope():
        raise KeyError
    assert not ks.has_strategy()


def test_scopes_are_thread_local(two):
    seen = []
    with two.scope():
        thread = threading.Thread(target=lambda: seen.append(ks.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_experimental_set_strategy(two):
    ks.experimental_set_strategy(two)
    try:
        assert ks.get_strategy() is two and ks.in_cross_replica_context()
        variable = keras.Variable(1.0)
    finally:
        ks.experimental_set_strategy(None)
    assert not ks.has_strategy()
    assert two.extended.variable_created_in_scope(variable)


def test_experimental_set_strategy_in_scope_is_refused(two):
    with two.scope(), pytest.raises(RuntimeError, match="Leave the scope first"):
        ks.experimental_set_strategy(two)
    assert not ks.has_strategy()


def test_strategies_pickle_and_copy(two):
    again = pickle.loads(pickle.dumps(two))
    assert again.extended.worker_devices == two.extended.worker_devices
    assert copy.deepcopy(two) is two
    one = pickle.loads(pickle.dumps(ks.OneDeviceStrategy("cpu:1")))
    assert one.extended.worker_devices == ("cpu:1",)
