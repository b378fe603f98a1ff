"""Search hyperparameters with Optuna; two workers train each trial together.

The chief has the study. It asks for the parameters of a trial and sends them to the
other workers, so that all build the same model. The chief alone reports results and
prunes trials. Install Optuna with `pip install optuna`. The data are scikit-learn's
digits. The file is the same for every backend, and also runs on one device, without a
launcher:

    KERAS_BACKEND=torch keras-strategy run --workers 2 examples/optuna_study.py
"""

import argparse
import sys

import keras
import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_strategy as ks

SEED = 7
EPOCHS = 5
TRIALS = 6
BATCH_SIZE = 64  # 1,437 rows: the last batch has 29, which two does not divide
ACCURACY_WANTED = 0.95
SPACE = {
    "units": optuna.distributions.IntDistribution(16, 64, step=16),
    "learning_rate": optuna.distributions.FloatDistribution(1e-3, 3e-2, log=True),
}


def load():
    """Return training images, test images, training labels and test labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int32")
    return train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )


def build(units, learning_rate):
    """Return the compiled network of a trial."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def send_from_chief(strategy, numbers):
    """Return the chief's numbers on every worker.

    Args:
        strategy: The strategy of the workers.
        numbers: The numbers on the chief, as many on the others.
    """
    row = np.array([numbers], "float32")
    rows = strategy.experimental_distribute_values_from_function(lambda _: row)
    return keras.ops.convert_to_numpy(strategy.gather(rows, axis=0))[0]


class Report(keras.callbacks.Callback):
    """Reports each epoch to a trial, and ends a training that does not look good."""

    def __init__(self, trial):
        super().__init__()
        self.trial = trial
        self.pruned = False

    def on_epoch_end(self, epoch, logs):
        self.trial.report(logs["val_accuracy"], epoch)
        self.pruned = self.trial.should_prune()
        if self.pruned:
            self.model.stop_training = True  # every worker stops with the chief


def main():
    """Search, print the trials and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--storage", help="a database of the chief, sqlite:///FILE")
    options = parser.parse_args()

    # Before anything else that uses devices.
    strategy = ks.MultiWorkerMirroredStrategy()
    is_chief = strategy.is_chief
    x_train, x_test, y_train, y_test = load()

    study = None
    if is_chief:
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=SEED),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
            storage=options.storage,
        )

    for _ in range(TRIALS):
        trial = study.ask(SPACE) if study else None
        chosen = [trial.params[name] for name in SPACE] if trial else [0] * len(SPACE)
        units, learning_rate = send_from_chief(strategy, chosen)

        keras.utils.set_random_seed(SEED)
        with strategy.scope():
            model = build(int(units), float(learning_rate))
        callbacks = [Report(trial)] if trial else []
        history = model.fit(
            x_train,
            y_train,
            batch_size=BATCH_SIZE,
            epochs=options.epochs,
            validation_data=(x_test, y_test),
            callbacks=callbacks,
            verbose=0,
        )
        accuracy = history.history["val_accuracy"][-1]
        if trial and callbacks[0].pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif trial:
            study.tell(trial, accuracy)

    if study:
        for trial in study.trials:
            values = ", ".join(f"{name} {v:.4g}" for name, v in trial.params.items())
            print(f"{values}: {trial.state.name.lower()}, accuracy {trial.value:.3f}")
        print(f"the best of {TRIALS}: accuracy {study.best_value:.3f}")
        if options.epochs >= EPOCHS and not study.best_value >= ACCURACY_WANTED:
            print(f"FAILED: expected {ACCURACY_WANTED} or more")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
