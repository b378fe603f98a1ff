"""Search for the best learning rate and width, each trial on two devices.

keras-tuner asks for the strategy (`pip install keras-tuner`), and makes and trains the
model of each trial in its scope. The data are scikit-learn's digits. The file is the
same for every backend:

    KERAS_BACKEND=jax python examples/hyperparameters.py
"""

import argparse
import os
import sys
import tempfile

# XLA's pool of threads for CPU devices follows NPROC, or else the number of cores; on
# few cores it can be too small for two devices that wait for each other.
os.environ.setdefault("NPROC", "8")

import keras
import keras_tuner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 5
TRIALS = 4
BATCH_SIZE = 64  # 1,437 rows: the last batch has 29, which two does not divide
ACCURACY_WANTED = 0.95


def load():
    """Return training images, test images, training labels and test labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int32")
    return train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )


def build(choices):
    """Return the compiled network of a trial."""
    units = choices.Choice("units", [16, 64])
    rate = choices.Choice("learning_rate", [1e-2, 1e-3])
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    """Search, say what was found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    epochs = parser.parse_args().epochs

    ks.config.set_logical_devices("cpu", 2)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    print(f"{keras.backend.backend()} on {strategy.num_replicas_in_sync} devices")
    keras.utils.set_random_seed(SEED)
    x_train, x_test, y_train, y_test = load()

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.GridSearch(
            build,
            objective="val_accuracy",
            max_trials=TRIALS,
            distribution_strategy=strategy,
            directory=folder,
        )
        # A number of each epoch is enough; the tuner prints more.
        tuner.search(
            x_train,
            y_train,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            validation_data=(x_test, y_test),
            verbose=0,
        )
        trials = tuner.oracle.get_best_trials(TRIALS)
        for trial in trials:
            values = trial.hyperparameters.values
            told = ", ".join(f"{name} {value:g}" for name, value in values.items())
            print(f"{told}: accuracy {trial.score:.3f}")
        (best,) = tuner.get_best_models(1)
    _, accuracy = best.evaluate(x_test, y_test, batch_size=512, verbose=0)
    print(f"the best of {len(trials)} again: accuracy {accuracy:.3f}")
    if epochs >= EPOCHS and not accuracy >= ACCURACY_WANTED:
        print(f"FAILED: expected {ACCURACY_WANTED} or more")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
