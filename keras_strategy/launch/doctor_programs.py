"""Programs that `keras-strategy doctor` runs in their own processes.

`python -m keras_strategy.launch.doctor_programs replicas` trains on two replicas and on
one device, and prints the largest difference of the weights. `... workers` sums a
number over the processes that `keras-strategy run` starts.
"""

import sys

import keras
import numpy as np

import keras_strategy as ks
from keras_strategy.launch.doctor import DIFFERENCE, SUM


def replicas() -> None:
    ks.config.set_logical_devices("cpu", 2)
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    weights = []
    for strategy in (
        ks.MirroredStrategy(["cpu:0", "cpu:1"]),
        ks.OneDeviceStrategy("cpu:0"),
    ):
        # Not `keras.utils.set_random_seed`, which takes seconds to import TensorFlow.
        kernel = keras.initializers.GlorotUniform(seed=1)
        dense = keras.layers.Dense(2, kernel_initializer=kernel)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense])
            model.compile("sgd", "mse")
        model.fit(rows, rows[:, :2], batch_size=5, verbose=0)
        weights.append(model.get_weights()[0])
    print(DIFFERENCE, float(np.abs(weights[0] - weights[1]).max()))


def workers() -> None:
    strategy = ks.MultiWorkerMirroredStrategy()
    ones = strategy.run(lambda: keras.ops.ones(()))
    print(SUM, float(strategy.reduce("sum", ones)))


if __name__ == "__main__":
    {"replicas": replicas, "workers": workers}[sys.argv[1]]()
