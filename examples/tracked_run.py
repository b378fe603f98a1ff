"""Record the training of two workers as one run of Weights & Biases.

The chief alone starts the run and has the callback. The logs of `fit` are those of the
global batch, so its run has everything. Install the package with `pip install wandb`.
The run is offline: it is written to a folder, and `wandb sync` uploads it. The data are
scikit-learn's digits. The file is the same for every backend, and also runs on one
device, without a launcher:

    KERAS_BACKEND=torch keras-strategy run --workers 2 examples/tracked_run.py
"""

import argparse
import sys

import keras
import wandb
from sklearn.datasets import load_digits
from wandb.integration.keras import WandbMetricsLogger

import keras_strategy as ks

SEED = 7
EPOCHS = 5
BATCH_SIZE = 64  # 1,797 rows: the last batch has 5, which two does not divide


def main():
    """Train, record and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--folder", default=".", help="where the run is written")
    options = parser.parse_args()

    strategy = ks.MultiWorkerMirroredStrategy()  # before anything else uses devices
    is_chief = strategy.is_chief
    images, labels = load_digits(return_X_y=True)

    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        hidden, logits = keras.layers.Dense(64, "gelu"), keras.layers.Dense(10)
        model = keras.Sequential([keras.Input((64,)), hidden, logits])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])

    run, callbacks = None, []
    if is_chief:
        run = wandb.init(project="digits", mode="offline", dir=options.folder)
        callbacks = [WandbMetricsLogger()]
    history = model.fit(
        images / 16.0,
        labels,
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=0,
    )
    if run:
        recorded = run.summary["epoch/accuracy"]
        run.finish()
        print(
            f"recorded {options.epochs} epochs, the last with accuracy {recorded:.3f}"
        )
        if recorded != history.history["accuracy"][-1]:
            print("FAILED: the run has another accuracy than fit")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
