"""Programs that one device can run, and the errors of several replicas."""

import contextlib

import keras
import numpy as np
import pytest

import keras_strategy as ks


def per_replica(strategy, *arrays):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.asarray(arrays[c.replica_id_in_sync_group], "float32")
    )


def local(strategy, value):
    return [
        keras.ops.convert_to_numpy(x)
        for x in strategy.experimental_local_results(value)
    ]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [(0, 0), (0, 2)])
def test_gather_of_no_rows(rows, axis, two):
    if axis == 1 and len(set(rows)) > 1:
        rows = (2, 2)
    x = per_replica(two, *(np.ones((n, 3)) for n in rows))

    def step(x):
        gathered = ks.get_replica_context().all_gather(x, axis)
        return gathered, keras.ops.sum(gathered)

    gathered, total = two.run(step, (x,))
    shape = (sum(rows), 3) if axis == 0 else (rows[0], 6)
    assert [x.shape for x in local(two, gathered)] == [shape] * 2
    assert local(two, total) == [3.0 * sum(rows)] * 2


@pytest.mark.needs_patch("backends.threads.patches Layer._maybe_build", backend="torch")
def test_built_property_in_run(two):
    """Replicas take turns, and the first alone finds it unbuilt."""
    with two.scope():
        layer, sgd = keras.layers.Dense(2), keras.optimizers.SGD(0.0)
        count = keras.metrics.Sum()

    def step(x):
        if not layer.built:
            layer(x)
            return keras.ops.sum(x)
        count.update_state(keras.ops.ones(()))
        total, gradients = ks.value_and_grad(
            lambda: keras.ops.sum(layer(x)), layer.trainable_variables
        )()
        sgd.apply(gradients, layer.trainable_variables)
        return total

    x = np.ones((4, 3), "float32")
    if keras.backend.backend() == "torch":
        with pytest.raises(RuntimeError, match="must make the same calls"):
            two.run(step, (x,))
        return
    for _ in range(3):
        (first, second) = local(two, two.run(step, (x,)))
        assert first == second
    # What the first call builds is built in what runs.
    assert float(count.result()) == 2 * 3


def test_gradient_in_scope_outside_run(two):
    x = np.ones((4, 3), "float32")
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        before = model.get_weights()
        value, gradients = ks.value_and_grad(
            lambda: keras.ops.sum(model(x)), model.trainable_variables
        )()
        for variable, gradient in zip(
            model.trainable_variables, gradients, strict=True
        ):
            variable.assign_sub(gradient)
    np.testing.assert_allclose(value, np.sum(x @ before[0]), rtol=1e-5)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(old - new, np.full(old.shape, 4.0), rtol=1e-5)


def stateful(rows):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(rows, 5, 3)),
            keras.layers.LSTM(2, stateful=True, name="remembers"),
        ]
    )
    model.compile("sgd", "mse")
    return model


def test_stateful_layers(two):
    x = np.random.RandomState(0).rand(8, 5, 3).astype("float32")
    results = []
    for scope in (contextlib.nullcontext(), two.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = stateful(4)
        # On torch, autograd refuses a state that a step changes, also on one device.
        if keras.backend.backend() != "torch":
            model.fit(x, np.ones((8, 2)), batch_size=4, shuffle=False, verbose=0)
        seen = [model.predict(x, batch_size=4, verbose=0) for _ in range(2)]
        loss = model.evaluate(x, np.ones((8, 2)), batch_size=4, verbose=0)
        results.append([*seen, np.array(loss), *model.get_weights()])
    for of_two, of_one in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(of_two, of_one, atol=1e-5)


def test_stateful_layers_in_run(two):
    x = np.random.RandomState(0).rand(4, 5, 3).astype("float32")
    keras.utils.set_random_seed(1)
    one = stateful(4)
    expected = [keras.ops.convert_to_numpy(one(x)) for _ in range(2)]
    keras.utils.set_random_seed(1)
    with two.scope():
        model = stateful(2)
    shards = per_replica(two, x[:2], x[2:])
    for rows in expected:
        seen = np.concatenate(local(two, two.run(model, (shards,))))
        np.testing.assert_allclose(seen, rows, atol=1e-5)
