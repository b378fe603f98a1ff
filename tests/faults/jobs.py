"""A worker's program, which goes on at one place until a fault is planted there."""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.links import Links
from tests.distributed.machines import Machine, join_as_worker
from tests.faults.table import CALLED, FAULTS, OF_CHIEF, Planted
from tests.processes import wait_until

# The file with the time of the fault.
HAPPENED = "happened"
# Longer than any test waits.
FOR_EVER = 600.0
# What is drawn once: each worker sees the same rows.
X = np.random.default_rng(3).normal(size=(16, 6)).astype("float32")
Y = (X[:, :3].argmax(axis=1)).astype("int32")


def work(
    planted: dict, folder: str, machines: list[Machine], links: Links | None
) -> None:
    """Calls the program of a worker; see `harness`."""
    if machines:
        join_as_worker([machine.address for machine in machines], machines)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Who forked this process may have asked for the folder already.
    tempfile.tempdir = os.environ["TMPDIR"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = Program(Planted(**planted), pathlib.Path(folder), links)
    make = ks.MultiWorkerMirroredStrategy  # what it needs is imported by now
    program.come("start")
    if program.planted.place != "start":
        program.meet()
    program.strategy = make()
    PLACES[program.planted.place](program)
    print("done", flush=True)


class Program:
    """The fault, as the places see it.

    Attributes:
        planted: The fault.
        folder: Where files go.
        here: Whether it is planted in this worker.
        links: The links between the workers' machines, if they have any.
        strategy: The strategy, once it is there.
        kept: What is not to be closed meanwhile.
    """

    def __init__(self, planted: Planted, folder: pathlib.Path, links: Links | None):
        self.planted, self.folder = planted, folder
        self.links: Any = links
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        self.here = task["index"] == planted.victim
        self.strategy: Any = None
        self.kept: Any = None
        self._rounds = 0

    def meet(self) -> None:
        """Waits for the others, who may be given little time once they have joined."""
        (self.folder / f"started{os.getpid()}").touch()
        count = self.planted.workers
        wait_until(lambda: len(list(self.folder.glob("started*"))) == count, FOR_EVER)

    def does(self, fault: str) -> bool:
        """Return True in the worker that has this planted fault."""
        if not (self.here and self.planted.fault == fault):
            return False
        self.note()
        return True

    def come(self, place: str) -> None:
        """Cause the fault now or soon after, if this is its place."""
        if not self.here or self.planted.place != place:
            return
        self._rounds += 1
        fault, delay = self.planted.fault, self.planted.delay
        # What is called may be on trial, and fails again when it is called in earnest.
        again = place in CALLED and self._rounds > self.planted.round
        if self._rounds != self.planted.round and not (again and fault in FAILS):
            return
        # A machine is cut off before its worker joins, not a random time later.
        is_cut = place == "start" and self.links is not None
        if fault in SUDDEN and (place in OF_CHIEF or is_cut):
            self._suddenly(SUDDEN[fault])
        elif fault in SUDDEN:
            timer = threading.Timer(delay, self._suddenly, [SUDDEN[fault]])
            timer.daemon = True
            timer.start()
        elif fault in IN_THE_PROGRAM:
            self.note()
            IN_THE_PROGRAM[fault](self)

    def rounds(self, place: str) -> Iterator[int]:
        """Rounds at a place, for ever."""
        for count in itertools.count():
            self.come(place)
            yield count

    def note(self) -> None:
        """Says that it happens now."""
        path = self.folder / HAPPENED
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def _suddenly(self, what: Callable[["Program"], object]) -> None:
        self.note()
        what(self)

    @property
    def batch_size(self) -> int:
        """A number of rows that the workers can split evenly, as JAX needs it."""
        return 6 if self.planted.workers == 3 else 8

    @property
    def client(self) -> Any:
        """This worker's connection to the others."""
        return self.strategy.extended.cluster.client


def _signals(number: int) -> Callable[[Program], None]:
    return lambda program: os.kill(os.getpid(), number)


def _interrupt(program: Program) -> None:
    """As who presses Ctrl-C again: Python drops what a destructor is interrupted by."""
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def _cut(program: Program) -> None:
    writer = program.client._writer
    writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _no_message(program: Program) -> None:
    connection = program.client
    connection._thread.call_soon(connection._writer.write, b"\x80\x04 no message\n")


# What comes from outside of the program, at any time.
SUDDEN: dict[str, Callable[[Program], object]] = {
    "SIGKILL": _signals(signal.SIGKILL),
    "SIGTERM": _signals(signal.SIGTERM),
    "SIGINT": _interrupt,
    "SIGSTOP": _signals(signal.SIGSTOP),
    "os._exit(0)": lambda program: os._exit(0),
    "os._exit(3)": lambda program: os._exit(3),
    "segmentation fault": lambda program: ctypes.string_at(0),
    "abort": lambda program: os.abort(),
    "its connection is cut": _cut,
    "it sends an invalid message": _no_message,
    "its machine is cut off": lambda program: program.links.cut(program.planted.victim),
    "its machine cannot send": lambda program: program.links.stop_sending(
        program.planted.victim
    ),
    "its machine cannot receive": lambda program: program.links.stop_receiving(
        program.planted.victim
    ),
    "another worker and it are cut off from each other": (
        lambda program: program.links.separate(1, 2)
    ),
    "the network delays by 50 ms": lambda program: program.links.set_all(delay_ms=50),
    "the network loses 2 %": lambda program: program.links.set_all(loss=0.02),
}


def _raise(error: BaseException) -> None:
    raise error


def _connect_as_foreign_program(program: Program) -> None:
    """Connect to the coordinator many times, and send nothing or an invalid message."""
    address = ("127.0.0.1", int(os.environ["KERAS_STRATEGY_PORT"]))
    connections = []
    messages = b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 70_000, b'{"type": 1}\n'
    for message in messages * 20:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, 1)
            connections.append(connection)
            connection.sendall(message)
    program.kept = connections


def _use_wrong_interface(program: Program) -> None:
    os.environ["KERAS_STRATEGY_INTERFACE"] = "eth1"


# Of what the program does itself, what it does each time.
FAILS = ("ValueError", "MemoryError", "sys.exit(3)")
# What the program does itself.
IN_THE_PROGRAM: dict[str, Callable[[Program], object]] = {
    "ValueError": lambda program: _raise(ValueError("the disk is full")),
    "MemoryError": lambda program: _raise(MemoryError()),
    "sys.exit(3)": lambda program: sys.exit(3),
    "it hangs": lambda program: time.sleep(FOR_EVER),
    "it never comes": lambda program: time.sleep(FOR_EVER),
    "it ends early": lambda program: sys.exit(0),
    "a foreign program connects": _connect_as_foreign_program,
    "the wrong interface": _use_wrong_interface,
}


class Layer(keras.layers.Dense):
    """A layer of somebody's own."""

    program: Any = None

    def call(self, inputs, training=None):
        # Not when Keras builds the model, which says so and not what the error is.
        if self.program is not None and training:
            self.program.come("layer")
        return super().call(inputs)

    def save_own_variables(self, store):
        if self.program is not None:
            self.program.come("save_own_variables")
        super().save_own_variables(store)


class Metric(keras.metrics.Mean):
    """A metric of somebody's own."""

    program: Any = None

    def update_state(self, values, sample_weight=None):
        self.program.come("metric")
        return super().update_state(values, sample_weight)


class Model(keras.Sequential):
    """A model of somebody's own."""

    program: Any = None

    def train_step(self, *arguments):
        self.program.come("train_step")
        return super().train_step(*arguments)

    def test_step(self, *arguments):
        self.program.come("test_step")
        return super().test_step(*arguments)

    def predict_step(self, *arguments):
        self.program.come("predict_step")
        return super().predict_step(*arguments)


OWN = {"Layer": Layer, "Model": Model}


def compiled(program: Program, own: str = "") -> keras.Model:
    """A model, with what the place is in of somebody's own."""
    does = program.does
    steps = own in ("train_step", "test_step", "predict_step")
    with program.strategy.scope():
        layers = [
            keras.Input((6,)),
            (Layer if own in ("layer", "save_own_variables") else keras.layers.Dense)(
                5 if does("another model") else 4,
                activation="relu",
            ),
            keras.layers.Dense(3),
        ]
        model = (Model if steps else keras.Sequential)(layers)
        kind = "SGD" if does("another optimizer") else "Adam"
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def loss(y, p):
            program.come("loss")
            return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)

        metric = Metric(name="own")
        model.compile(
            getattr(keras.optimizers, kind)(0.01),
            loss if own == "loss" or does("another loss") else crossentropy,
        )
        if own == "metric":
            # Its values are those of a layer's metric: Keras compiles those of a model.
            model.compile(
                "adam", crossentropy, metrics=[_of_predictions(metric, program)]
            )
    if steps:
        model.program = program
    for layer in model.layers:
        if isinstance(layer, Layer):
            layer.program = program
    return model


def _of_predictions(metric: Metric, program: Program) -> keras.metrics.Metric:
    class OfPredictions(Metric):
        def update_state(self, y, p, sample_weight=None):
            return super().update_state(p)

    OfPredictions.program = program
    return OfPredictions(name="own")


def fit(program: Program, own: str = "", **arguments: Any) -> None:
    """Trains for ever; the fault comes after batches, or when `own` is called."""
    model = compiled(program, own)
    does, place = program.does, program.planted.place
    callbacks = list(arguments.pop("callbacks", []))

    def batch_end(batch, logs):
        program.come("fit")
        if place in ("ModelCheckpoint", "BackupAndRestore"):
            program.come(place)
        if does("a callback of its own waits for all"):
            model.predict(X, verbose=0)

    if place == "on_epoch_end":
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: program.come("on_epoch_end")
            )
        )
    if place != "on_epoch_end" and not own:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=batch_end))
    if does("another schedule"):
        callbacks.append(
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
        )
    x, y = X, Y
    if does("other rows"):
        x = X + 1
    if program.planted.fault == "batches of other rows":
        rows = 7 if does("batches of other rows") else 8
        arguments["x"] = ((X[:rows], Y[:rows]) for _ in itertools.count())
        arguments["steps_per_epoch"] = 2
    elif "x" not in arguments:
        arguments |= {"x": x, "y": y}
        size = 4 if does("another batch size") else program.batch_size
        arguments["batch_size"] = size
    model.fit(
        epochs=1 if FAULTS[program.planted.fault].survived else 1_000_000,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    )


def fit_twice(program: Program) -> None:
    """Train without the fault, then with it, and require the same weights."""
    found: list[list[np.ndarray]] = []

    def on_batch_end(batch, logs):
        if len(found) == 2:
            program.come("two fits")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)
    # The first fit of a process may sum gradients in another order than later ones.
    for epochs in (1, 4, 4):
        keras.utils.set_random_seed(1)
        model = compiled(program)
        arguments = {"batch_size": program.batch_size, "callbacks": [callback]}
        model.fit(X, Y, epochs=epochs, verbose=0, **arguments)
        found.append(model.get_weights())
    for expected, weight in zip(*found[1:], strict=True):
        np.testing.assert_array_equal(weight, expected)


def fit_of_own(place: str) -> Callable[[Program], None]:
    """Trains with something that Keras calls, which the fault is in."""
    return lambda program: fit(program, place)


def reading(program: Program) -> None:
    """Trains on a generator."""

    def batches():
        while True:
            program.come("reading data")
            yield X[:8], Y[:8]

    fit(program, "data", x=batches(), steps_per_epoch=4)


def own_rows(program: Program) -> None:
    """Run a custom loop over rows that each worker reads by itself."""

    def batches(context):
        while True:
            program.come("own rows")
            yield X[:4]

    dataset = program.strategy.distribute_datasets_from_function(batches)
    for x in dataset:
        program.strategy.run(keras.ops.sum, args=(x,))


def validation(program: Program) -> None:
    """Trains, and evaluates after each batch or so."""
    callback = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: program.come("validation")
    )
    fit(
        program,
        "validation",
        validation_data=(X, Y),
        validation_batch_size=4,
        callbacks=[callback],
    )


def evaluate(program: Program, own: str = "") -> None:
    """Evaluates for ever."""
    model = compiled(program, own)
    for _ in program.rounds("evaluate"):
        model.evaluate(X, Y, batch_size=program.batch_size, verbose=0)


def predict(program: Program, own: str = "") -> None:
    """Predicts for ever."""
    model = compiled(program, own)
    for _ in program.rounds("predict"):
        model.predict(X, batch_size=8, verbose=0)


def making_variables(program: Program) -> None:
    """Makes variables for ever, of which the workers tell each other."""
    for _ in program.rounds("making variables"):
        with program.strategy.scope():
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            keras.Variable(np.ones(3))


def run(program: Program) -> None:
    """Run a custom step for ever."""

    # Of a constant XLA knows the sum without the others.
    value = _value(program)

    def step(value):
        program.come("run's function")
        return ks.get_replica_context().all_reduce("sum", value)

    for _ in program.rounds("run"):
        program.strategy.run(step, args=(value,))


def reduce(program: Program) -> None:
    """Reduces for ever."""
    value = _value(program)
    for _ in program.rounds("reduce"):
        if program.planted.fault == "another call" and program.does("another call"):
            program.strategy.gather(value, axis=0)
        program.strategy.reduce("sum", value, axis=None)


def gather(program: Program) -> None:
    """Gathers for ever."""
    value = _value(program)
    for _ in program.rounds("gather"):
        program.strategy.gather(value, axis=0)


def _value(program: Program) -> Any:
    rows = 4 if program.does("another shape") else 3
    return program.strategy.experimental_distribute_values_from_function(
        lambda context: np.ones((rows, 2), "float32")
    )


def saving(program: Program, own: str = "") -> None:
    """Saves for ever."""
    model = compiled(program, own)
    model.save(program.folder / "first.keras")
    for _ in program.rounds("saving"):
        model.save(program.folder / "model.keras")
        model.save_weights(program.folder / "model.weights.h5")


def checkpoints(program: Program) -> None:
    """Trains, and saves after each batch."""
    path = str(program.folder / "of_epoch.keras")
    weights = str(program.folder / "best.weights.h5")
    fit(
        program,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path, save_freq=1),
            keras.callbacks.ModelCheckpoint(weights, save_weights_only=True),
        ],
    )


def backups(program: Program) -> None:
    """Trains, and backs up after each batch."""
    backup = ks.callbacks.BackupAndRestore(program.folder / "backup", save_freq=1)
    fit(program, callbacks=[backup])


PLACES: dict[str, Callable[[Program], None]] = {
    "start": fit,
    "making variables": making_variables,
    "fit": fit,
    "on_epoch_end": fit,
    "validation": validation,
    "reading data": reading,
    "evaluate": evaluate,
    "predict": predict,
    "run": run,
    "run's function": run,
    "reduce": reduce,
    "gather": gather,
    "saving": saving,
    "save_own_variables": lambda program: saving(program, "save_own_variables"),
    "ModelCheckpoint": checkpoints,
    "BackupAndRestore": backups,
    "own rows": own_rows,
    "two fits": fit_twice,
    "test_step": lambda program: evaluate(program, "test_step"),
    "predict_step": lambda program: predict(program, "predict_step"),
    **{place: fit_of_own(place) for place in ("train_step", "loss", "metric", "layer")},
}
