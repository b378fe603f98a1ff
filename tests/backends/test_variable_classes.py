"""Variables of a strategy have classes of their own, and others are Keras's."""

import copy
import importlib
import pickle
import types

import keras
import pytest

import keras_strategy as ks
from keras_strategy.errors import KerasVersionError
from keras_strategy.keras_patches.installation import all_patches
from keras_strategy.keras_patches.variable_classes import StrategyVariable
from keras_strategy.keras_patches.variables_optimizers import adopt
from tests.core.test_variables import Doubled

BACKEND = keras.backend.backend()
IS_TORCH = BACKEND == "torch"
variables = importlib.import_module(f"keras_strategy.backends.{BACKEND}.variables")
SHARD = "parameters" if IS_TORCH else "optimizer"
only_torch = pytest.mark.skipif(not IS_TORCH, reason="of torch's variables")
ON_READ = {"aggregation": "sum", "synchronization": "on_read", "trainable": False}


def test_few_methods_of_plain_variables_are_patched(two):
    two.run(lambda: None)
    replaced = {
        name
        for cls in keras.Variable.__mro__
        if cls.__module__.startswith("keras.")
        for name, value in vars(cls).items()
        if isinstance(value, property | types.FunctionType)
        and hasattr(getattr(value, "fget", value), "__wrapped__")
    }
    # A replica of TensorFlow writes to variables of no strategy, too.
    own = {"_direct_assign"} if BACKEND == "tensorflow" else set()
    assert replaced == {"__init__", "assign", "assign_add", "assign_sub", *own}


def test_kinds_of_variables(two):
    outside = keras.Variable(1.0)
    with two.scope():
        mirrored, on_read = keras.Variable(1.0), keras.Variable(1.0, **ON_READ)
    shards = ks.MirroredStrategy(two.extended.worker_devices, shard=SHARD)
    with shards.scope():
        sharded = keras.Variable([1.0, 2.0])
    assert type(outside) is type(keras.Variable(1.0))
    assert not isinstance(outside, StrategyVariable)
    kinds = "MirroredVariable", "SyncOnReadVariable", "ShardedVariable"
    for variable, name in zip((mirrored, on_read, sharded), kinds, strict=True):
        kind = getattr(variables, name if IS_TORCH else kinds[0])
        assert isinstance(variable, kind)
        assert type(variable).__qualname__ == kind.__name__
        assert type(variable).__name__ == "Variable"
    adopt(two, [outside])
    assert isinstance(outside, variables.MirroredVariable)


@only_torch
def test_assignment_to_weight_that_the_scope_will_shard(two):
    shards = ks.MirroredStrategy(two.extended.worker_devices, shard="parameters")
    with shards.scope():
        sharded = keras.Variable([1.0, 2.0])
        sharded.assign([3.0, 4.0])
    assert sharded.numpy().tolist() == [3.0, 4.0]


@only_torch
def test_variable_that_is_initialized_again(two):
    with two.scope():
        v = keras.Variable(1.0)
    two.run(lambda: v.assign(v + 1.0))
    v._initialize(keras.ops.convert_to_tensor(7.0))
    local = two.experimental_local_results(two.run(lambda: v + 1.0))
    assert [float(x) for x in local] == [8.0, 8.0]


# Elsewhere arrays on several devices cannot be pickled.
COPIES = [copy.deepcopy, *([lambda v: pickle.loads(pickle.dumps(v))] * IS_TORCH)]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("is_used", [False, True])
def test_copies_of_variables(is_used, duplicate, two):
    with two.scope():
        originals = keras.Variable(3.0), keras.Variable(4.0, **ON_READ), Doubled(5.0)
    if is_used:
        two.run(lambda: [v + 0.0 for v in originals])
    for original, value in zip(originals, (3.0, 4.0, 10.0), strict=True):
        twin = duplicate(original)
        assert type(twin) is type(original)
        original.assign(0.0)
        assert float(twin) == value


def test_changed_method_of_keras_is_refused(two, monkeypatch):
    changed = lambda self, value, layout: None  # noqa: E731
    monkeypatch.setattr(keras.Variable, "_initialize", changed)
    with pytest.raises(KerasVersionError, match="Variable._initialize` takes"):
        all_patches()


@only_torch
def test_keras_that_keeps_its_settings_elsewhere_is_refused(two, monkeypatch):
    elsewhere = types.SimpleNamespace(GLOBAL_STATE_TRACKER=types.SimpleNamespace())
    monkeypatch.setattr(variables, "global_state", elsewhere)
    with pytest.raises(KerasVersionError, match="Variable.value` reads other settings"):
        all_patches()
