"""Cost of exact `BatchNormalization`: `fit` beside `batch_statistics="local"`.

    KERAS_BACKEND=torch python -m keras_strategy run --workers 2 \
        benchmarks/batch_statistics.py
    KERAS_BACKEND=tensorflow KERAS_STRATEGY_LOGICAL_CPUS=2 \
        python benchmarks/batch_statistics.py

Both models train in turn in the same processes; a ratio is one of two neighbours.
"""

import statistics
import time

import keras
import numpy as np

import keras_strategy as ks

ROUNDS = 15


def cnn() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for filters in (32, 64, 128):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dense(10)):
        model.add(layer)
    return model


def resnet50() -> keras.Model:
    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10
    )


CASES = {"CNN": (cnn, 64, 20), "ResNet50": (resnet50, 32, 4)}


def main() -> None:
    """Measure and print."""
    strategies = [
        ks.MultiWorkerMirroredStrategy(batch_statistics=choice)
        for choice in (None, "local")
    ]
    for name, (build, batch, steps) in CASES.items():
        x = np.random.default_rng(0).normal(size=(steps * batch, 32, 32, 3))
        y, models = np.arange(len(x)) % 10, []
        for strategy in strategies:
            with strategy.scope():
                model = build()
                model.compile("sgd", "sparse_categorical_crossentropy")
            models.append(model)

        def seconds(model, x=x.astype("float32"), y=y, batch=batch):
            begin = time.perf_counter()
            model.fit(x, y, batch_size=batch, verbose=0)
            return time.perf_counter() - begin

        list(map(seconds, models))  # which compiles them
        ratios, exact = [], []
        for _ in range(ROUNDS):
            first, local = map(seconds, models)
            exact.append(first / steps)
            ratios.append(local / first)
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name}: {median:.2f} ({low:.2f} to {high:.2f}) of the steps/s of local "
            f"statistics, {1000 * statistics.median(exact):.0f} ms per step",
            flush=True,
        )


if __name__ == "__main__":
    main()
