"""TensorFlow's own ways to save, and losses, with a strategy of this package."""

import keras
import numpy as np
import pytest

import keras_strategy as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow's own", allow_module_level=True)

import tensorflow as tf

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model_of(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def train(model):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)


def state_of(model):
    values = [*model.get_weights(), *model.optimizer.variables]
    return [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_checkpoint_restores_two_replicas(two, replicas, tmp_path):
    """tf.train.Checkpoint brings weights and slots to any number of replicas."""
    model = model_of(two)
    train(model)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(tmp_path / "checkpoint")
    train(model)

    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    again = model_of(strategy)
    restored = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    for variable in again.trainable_variables:
        parts = strategy.experimental_local_results(variable)
        assert len({np.asarray(part).tobytes() for part in parts}) == 1
    train(again)
    for mine, theirs in zip(state_of(again), state_of(model), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_checkpoint_manager_restores(two, tmp_path):
    model = model_of(two)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(saved, str(tmp_path), max_to_keep=2)
    for _ in range(3):
        train(model)
        manager.save()
    expected = state_of(model)
    assert len(manager.checkpoints) == 2
    train(model)
    saved.restore(manager.latest_checkpoint)
    for mine, theirs in zip(state_of(model), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_saved_model_serves(two, tmp_path):
    """`tf.saved_model.save` of a model, loaded with no strategy and in a scope."""
    model = model_of(two)
    train(model)
    expected = model.predict(X, verbose=0)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32)])
    def serve(x):
        return model(x)

    path = str(tmp_path / "saved")
    tf.saved_model.save(model, path, signatures=serve)
    signature = tf.saved_model.load(path).signatures["serving_default"]
    (found,) = signature(tf.constant(X)).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with ks.OneDeviceStrategy("cpu:0").scope():
        signature = tf.saved_model.load(path).signatures["serving_default"]
    (found,) = signature(tf.constant(X)).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_losses_of_tf_nn_match_one_device(two):
    """tf.nn.compute_average_loss and tf.nn.scale_regularization_loss, in `run`."""

    def losses(x):
        loss = tf.nn.compute_average_loss(x, global_batch_size=4)
        return loss + tf.nn.scale_regularization_loss(3.0)

    rows = ks.PerReplica([tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0])])
    total = two.reduce("sum", two.run(losses, (rows,)))
    assert float(total) == 12.0 / 4 + 3.0
