"""How often replicas speak to each other for the statistics of a global batch."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from keras_strategy.core.registry import get_engine

NORMALIZATIONS = 3


@pytest.mark.usefixtures("compiled_here")
def test_one_collective_per_layer_and_pass():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics="global")
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,))])
        for _ in range(NORMALIZATIONS):
            model.add(layers.Dense(5, "tanh"))
            model.add(layers.BatchNormalization())
    x = np.random.RandomState(0).rand(8, 5).astype("float32")
    (batch,) = strategy.experimental_distribute_dataset([x])

    def forward(x):
        return ops.sum(ops.square(model(x, training=True)))

    def both(x):
        return ks.value_and_grad(forward, model.trainable_variables)(x)[1]

    for step, passes in ((forward, 1), (both, 2)):

        def train(steps, step=step):
            for _ in range(steps):
                result = strategy.run(step, args=(batch,))
            # Not done before it was waited for.
            for value in strategy.experimental_local_results(result):
                keras.tree.map_structure(ops.convert_to_numpy, value)

        train(1)
        short, long = (
            get_engine().count_operations(train, steps)[0] for steps in (2, 4)
        )
        assert (long - short) / 2 == passes * NORMALIZATIONS
