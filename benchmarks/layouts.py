"""Weights over logical devices, against Keras's own ModelParallel on the same mesh.

    KERAS_BACKEND=jax NPROC=8 python -m benchmarks.layouts

Of one LayoutMap: the largest difference of the weights, and the ratio of the CPU time
of `fit`, theirs over ours, of runs in turns.
"""

import statistics
import time

import keras
import numpy as np

import keras_strategy as ks
from keras_strategy.testing import simulated_tpu

ROWS, WIDTH, BATCH, PAIRS = 64 * 60, 256, 64, 10


def layout_map():
    """Two blocks of a wide layer and a narrow one, split as Megatron does."""
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], [f"cpu:{i}" for i in range(4)]
    )
    found = keras.distribution.LayoutMap(mesh)
    for i in range(2):
        found[f".*up{i}.*kernel"] = (None, "model")
        found[f".*up{i}.*bias"] = ("model",)
        found[f".*down{i}.*kernel"] = ("model", None)
    return found


def model():
    """Return the model, always from the same seed."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((WIDTH,))]
    for i in range(2):
        layers.append(keras.layers.Dense(4 * WIDTH, "gelu", name=f"up{i}"))
        layers.append(keras.layers.Dense(WIDTH, name=f"down{i}"))
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def main():
    """Measure and print."""
    tpu, layouts = simulated_tpu((2, 1, 1, 2)), layout_map()
    parallel = keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )
    strategy = ks.TPUStrategy(tpu, devices_per_replica=2, layout_map=layouts)
    with parallel.scope():
        theirs = model()
    with strategy.scope():
        ours = model()
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    y = x[:, :1].copy()

    def fit(which):
        before = time.process_time()
        if which is theirs:
            with parallel.scope():
                which.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        else:
            which.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return time.process_time() - before

    fit(theirs), fit(ours)  # which compiles
    ratios = []
    for pair in range(PAIRS):
        order = (theirs, ours) if pair % 2 else (ours, theirs)
        seconds = {id(which): fit(which) for which in order}
        ratios.append(seconds[id(theirs)] / seconds[id(ours)])
    difference = max(
        np.abs(a.numpy() - b.numpy()).max()
        for a, b in zip(theirs.weights, ours.weights, strict=True)
    )
    print(
        f"weights differ by {difference:.1e}; CPU time, ModelParallel / ours: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
