"""What the torch adapter does beside what all backends do."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.errors import KerasVersionError
from keras_strategy.testing.equality.compare import largest, scope

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

X = np.random.RandomState(0).randn(10, 3).astype("float32")
Y = np.random.RandomState(1).randn(10, 1).astype("float32")


@pytest.fixture
def process_group():
    """torch.distributed, initialised with this process alone."""
    distributed = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model_of(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def results(model):
    fit = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(X, Y, batch_size=4, verbose=0)
    prediction = model.predict(X, batch_size=4, verbose=0)
    return [*fit.history["loss"], *evaluated, prediction, *model.get_weights()]


def wrapped_in(model):
    wrapper = torch.nn.parallel.DistributedDataParallel
    return [name for name, value in vars(model).items() if isinstance(value, wrapper)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_keras_does_not_distribute_a_model_of_ours(
    replicas, process_group, monkeypatch
):
    expected = results(model_of(None))

    def all_reduce(*args, **kwargs):
        raise AssertionError("Keras reduced over the processes")

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    strategy = (
        ks.OneDeviceStrategy("cpu:0")
        if replicas == 1
        else ks.MirroredStrategy(["cpu:0", "cpu:1"])
    )
    model = model_of(strategy)
    assert largest(expected, results(model)) < 2e-5
    assert wrapped_in(model) == []


def test_keras_distributes_a_model_of_no_strategy(process_group, two):
    # `two` has installed the hooks, which must leave such a model to Keras.
    model = model_of(None)
    results(model)
    if not hasattr(model, "_initialize_ddp"):
        pytest.skip("this Keras leaves torch.distributed to its user")
    assert wrapped_in(model) == ["ddp_model"]


def test_a_model_that_keras_wrapped_is_refused(process_group, two):
    model = model_of(two)
    wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    vars(model)["parallel_model"] = wrapper
    with pytest.raises(KerasVersionError, match="Model.parallel_model"):
        model.fit(X, Y, verbose=0)
