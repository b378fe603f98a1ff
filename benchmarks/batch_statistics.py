"""Speed of `fit` with BatchNormalization, relative to `batch_statistics="local"`.

    KERAS_BACKEND=torch keras-strategy run --workers 2 -m benchmarks.batch_statistics
    KERAS_BACKEND=tensorflow KERAS_STRATEGY_LOGICAL_CPUS=2 NPROC=8 \
        python -m benchmarks.batch_statistics

Both models are in the same processes and train in turn. A ratio is that of neighbours:
in time, and in the CPU time of this process, which other programs change less.
"""

import statistics
import time

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.cases import loss

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
    build = keras.applications.ResNet50
    return build(weights=None, input_shape=(32, 32, 3), classes=10)


# Models, rows of a batch, and steps of a turn.
CASES = {"CNN": (cnn, 64, 20), "ResNet50": (resnet50, 64, 3)}


def measure(models: list[keras.Model], batch: int, steps: int) -> str:
    """Train in turn, and describe the ratios."""
    rows = batch * steps
    x = np.random.default_rng(0).random((rows, 32, 32, 3), "float32")
    y = np.arange(rows) % 10

    def turn(model):
        before = time.perf_counter(), time.process_time()
        model.fit(x, y, batch_size=batch, verbose=0)
        return time.perf_counter() - before[0], time.process_time() - before[1]

    list(map(turn, models))  # which compiles them
    rounds = [tuple(map(turn, models)) for _ in range(ROUNDS)]
    texts = []
    for kind in (0, 1):
        ratios = [local[kind] / exact[kind] for exact, local in rounds]
        low, median, high = statistics.quantiles(ratios, n=4)
        texts.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
    step = statistics.median(exact[0] for exact, _ in rounds) / steps
    return f"steps/s {texts[0]}, steps/CPU-s {texts[1]}, {1000 * step:.0f} ms per step"


def main() -> None:
    """Measure and print."""
    strategies = [
        ks.MultiWorkerMirroredStrategy(batch_statistics=choice)
        for choice in (None, "local")
    ]
    for name, (build, batch, steps) in CASES.items():
        models = []
        for strategy in strategies:
            with strategy.scope():
                models.append(build())
                models[-1].compile("sgd", loss())
        print(f"{name}: {measure(models, batch, steps)}", flush=True)


if __name__ == "__main__":
    main()
