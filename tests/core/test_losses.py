"""compute_average_loss and scale_regularization_loss, as tf.nn has them."""

import keras
import numpy as np
import pytest

import keras_strategy as ks

LOSSES = np.float32([[1.0, 2.0], [3.0, 5.0]])
WEIGHTS = np.float32([1.0, 0.5])


def number(value):
    return keras.ops.convert_to_numpy(value).tolist()


@pytest.mark.parametrize(
    ("weights", "size", "expected"),
    [(None, None, 5.5), (None, 4, 2.75), (WEIGHTS, None, 3.5), (WEIGHTS, 7, 1.0)],
)
def test_compute_average_loss(weights, size, expected):
    assert number(ks.compute_average_loss(LOSSES, weights, size)) == expected
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        native = tf.nn.compute_average_loss(LOSSES, weights, size)
        assert native.numpy() == expected


def test_compute_average_loss_on_replicas(two):
    per_replica = two.run(lambda: ks.compute_average_loss(LOSSES))
    assert number(two.reduce("SUM", per_replica)) == 5.5


def test_what_compute_average_loss_refuses():
    with pytest.raises(ValueError, match="per_example_loss"):
        ks.compute_average_loss(np.float32(3.0))
    with pytest.raises(ValueError, match="global_batch_size"):
        ks.compute_average_loss(LOSSES, global_batch_size=np.array([4]))


def test_scale_regularization_loss(two):
    scaled = two.run(lambda: ks.scale_regularization_loss([1.0, 2.0]))
    assert number(two.reduce("SUM", scaled)) == 3.0
    assert number(ks.scale_regularization_loss(np.float32([1.0, 4.0]))) == 5.0
    assert number(ks.scale_regularization_loss([])) == 0.0
    with two.scope(), pytest.raises(RuntimeError, match="strategy.run"):
        ks.scale_regularization_loss([1.0])
