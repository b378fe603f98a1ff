"""CentralStorageStrategy: variables on one device, and one device's weights."""

import pickle

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import WEIGHTS, assert_equal, train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(37, 6)).astype("float32")
Y = RNG.normal(size=(37, 1)).astype("float32")
BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def strategy():
    return ks.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")


def compiled():
    # As one device's, by a word that Keras takes in a scope alone on some backends.
    whole = {"synchronized": True} if ks.has_strategy() else {}
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(**whole),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(1),
        ]
    )
    metrics = ["mae", keras.metrics.CosineSimilarity(name="cosine")]
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse", metrics=metrics)
    return model


def places(variables):
    """Return the devices that hold variables, as the backend reports."""
    if BACKEND == "jax":
        return {device.id for v in variables for device in v._value.devices()}
    if BACKEND == "tensorflow":
        parts = [part for v in variables for part in v._value.values]
        return {int(part.device.rpartition(":")[2]) for part in parts}
    # Its CPUs are one device: a variable is one tensor there, not one for each replica.
    shared = [{t.data_ptr() for t in v._ks_components.tensors} for v in variables]
    return {2} if all(len(memory) == 1 for memory in shared) else {0, 1}


class Looking(keras.callbacks.Callback):
    """Record where the variables are between two steps."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND != "jax":  # there Keras keeps them to itself while it trains
            self.places |= places(kept(self.model))


def kept(model):
    return [*model.trainable_variables, *model.optimizer.variables]


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.needs_patch("Model._get_state_sharding_spec", backend="jax")
def test_fit_evaluate_predict_and_save(strategy, tmp_path):
    """The last of the batches has 5 rows, for two replicas."""
    looking = Looking()
    one = train(None, compiled, X, Y, 8)
    ours = train(strategy, compiled, X, Y, 8, callbacks=[looking])
    assert_equal(one, ours)
    assert looking.places | places(kept(ours.model)) == {2}
    evaluated = [
        trained.model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
        for trained in (one, ours)
    ]
    assert evaluated[0].keys() == evaluated[1].keys()
    for name, value in evaluated[0].items():
        assert abs(value - evaluated[1][name]) < 1e-5, name
    # A batch that is not split evenly, in another way of Keras's.
    for model in (one.model, ours.model):
        model.train_on_batch(X[:5], Y[:5])
    ours.model.save(tmp_path / "model.keras")
    with strategy.scope():
        back = keras.models.load_model(tmp_path / "model.keras")
    for model in (ours.model, back):
        for mine, its in zip(one.model.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(its, mine, rtol=0, atol=WEIGHTS)
        predicted = model.predict_on_batch(X[:5])
        np.testing.assert_allclose(
            predicted, one.model.predict_on_batch(X[:5]), rtol=0, atol=WEIGHTS
        )
    back.train_on_batch(X[:5], Y[:5])
    assert places(kept(back)) == {2}
    report = strategy.memory_report(ours.model)
    assert report.devices == ("cpu:0", "cpu:1") and set(report.slots) == {0}


def test_custom_loop_equals_one_device(strategy):
    """Batches of 8 rows and one of 5, with a variable that replicas add to."""

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
            rows = keras.Variable(0.0, trainable=False, aggregation="sum")

        def step(x, y):
            def loss_fn():
                errors = keras.losses.mean_squared_error(y, model(x))
                return ks.compute_average_loss(errors)

            loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)()
            optimizer.apply_gradients(
                zip(grads, model.trainable_variables, strict=True)
            )
            rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            return loss

        batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 37, 8)]
        losses = []
        for batch in strategy.experimental_distribute_dataset(batches):
            loss = strategy.reduce("sum", strategy.run(step, args=batch))
            # The result can be computed with where the variables are.
            with strategy.scope():
                losses.append(float(loss + 0 * rows.value))
        return model, losses, float(rows)

    one, losses, rows = trained(ks.OneDeviceStrategy("cpu:0"))
    ours, ours_losses, ours_rows = trained(strategy)
    np.testing.assert_allclose(ours_losses, losses, atol=1e-5)
    assert ours_rows == rows == 37
    for mine, its in zip(one.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(its, mine, atol=WEIGHTS)
    assert places(ours.trainable_variables) == {2}


def test_variable_has_one_value(strategy):
    with strategy.scope():
        v = keras.Variable(1.0, trainable=False)
        first = keras.Variable(1.0, trainable=False, aggregation="only_first_replica")
        norm = keras.layers.BatchNormalization(momentum=0.0)
        norm.build((None, 1))

    def assign(variable):
        replica = ks.get_replica_context().replica_id_in_sync_group
        variable.assign(keras.ops.cast(replica, "float32") + 5.0)

    with pytest.raises(ValueError, match="stored once for several replicas") as caught:
        strategy.run(assign, (v,))
    assert f"'{v.path}'" in str(caught.value) and "aggregation=" in str(caught.value)
    assert float(v) == 1.0
    strategy.run(assign, (first,))
    assert float(first) == 5.0
    # What Keras assigns itself is the mean over the replicas, as in tf.distribute.
    rows = iter([np.float32([[2.0]]), np.float32([[4.0]])])
    values = strategy.experimental_distribute_values_from_function(
        lambda context: next(rows)
    )
    strategy.run(lambda x: norm(x, training=True), (values,))
    np.testing.assert_allclose(norm.moving_mean.numpy(), [3.0])
    # Outside of replicas it is assigned and updated as any.
    v.assign(2.0)
    strategy.extended.update(v, lambda c, x: c.assign_add(x), args=(3.0,))
    assert [float(c) for c in strategy.experimental_local_results(v)] == [5.0, 5.0]
    assert strategy.extended.parameter_devices == ("cpu:2",)
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")


def test_bad_arguments_are_refused():
    central = ks.experimental.CentralStorageStrategy
    assert central().parameter_device == "cpu:0"
    assert central(["cpu:1"]).parameter_device == "cpu:1"
    back = pickle.loads(pickle.dumps(central(["cpu:1", "cpu:2"], "/cpu:3")))
    assert back.parameter_device == "cpu:3" and back.num_replicas_in_sync == 2
    with pytest.raises(
        ValueError, match=r"names devices that are not available: \['gpu:7"
    ):
        central(None, "gpu:7")
    with pytest.raises(ValueError, match="parameter_device='cpu:0' with compute_dev"):
        central(["cpu:1"], "cpu:0")
