"""Files of several workers: the chief alone writes them, once and completely."""

import contextlib
import csv
import importlib.util
import os
import pathlib
import signal
import tempfile
import time

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.training.saving import atomic_write_path
from tests.distributed import jobs
from tests.distributed.jobs import classifier, digits, weights

# On JAX and TensorFlow, Keras exports models with it.
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


def write_everything(folder: str, epochs: int = 3) -> dict:
    """Trains with callbacks that write, and saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    path = pathlib.Path(folder)
    path.mkdir(exist_ok=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(path / "best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint(
            str(path / "epoch{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.CSVLogger(path / "log.csv"),
        keras.callbacks.BackupAndRestore(path / "backup", delete_checkpoint=False),
    ]
    if HAS_TENSORFLOW:
        callbacks.append(keras.callbacks.TensorBoard(path / "board"))
    x, y = digits(29)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        validation_data=digits(7, seed=4),
        callbacks=callbacks,
        verbose=2,
    )
    model.save(path / "last.keras")
    return {
        "weights": weights(model),
        "epochs": history.epoch,
        "predicted": model.predict(x, verbose=0),
    }


def download_on_chief(folder: str) -> tuple[bool, str]:
    """Return `is_chief`, and the file that the chief alone writes, slowly."""
    strategy = ks.MultiWorkerMirroredStrategy()
    file = pathlib.Path(folder, "download")
    if strategy.is_chief:
        time.sleep(0.5)
        file.write_text("once")
    one = strategy.experimental_distribute_values_from_function(
        lambda _: np.ones(1, "float32")
    )
    strategy.reduce("sum", one, axis=None)  # a barrier
    return strategy.is_chief, file.read_text()


def stop_by_some(folder: str) -> list[int]:
    """Return the numbers of batches of `fit`, of which some workers want fewer."""
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start

    class Stop(keras.callbacks.Callback):
        batches = 0

        def __init__(self, ranks, wanted):
            super().__init__()
            self.wanted = wanted if rank in ranks else 1000

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches >= self.wanted:
                self.model.stop_training = True

    with strategy.scope():
        model = classifier()
    x, y = digits(29)
    stops = [Stop([1], 6), Stop([0, 1], 6), Stop([1], 8)]
    for stop in stops:
        model.fit(x, y, batch_size=8, epochs=5, callbacks=[stop], verbose=0)
    return [stop.batches for stop in stops]


class Seen(keras.layers.Layer):
    """Counts the rows that it has seen: each replica its own, until somebody reads."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rows = keras.Variable(
            0.0, trainable=False, aggregation="sum", synchronization="on_read"
        )

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


def bytes_written(folder: str) -> dict:
    """Return the bytes that this worker writes while all save 1 MB.

    Returns:
        By what saved it: the bytes, and whether the temporary folder was used.
    """
    strategy = ks.MultiWorkerMirroredStrategy()
    rank = strategy.extended.local_replicas.start
    tempfile.tempdir = str(pathlib.Path(folder, f"temporary{rank}"))
    os.mkdir(tempfile.tempdir)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), Seen(), keras.layers.Dense(4096), Seen()]
        )
        model.compile("sgd", "mse")
    written = {}

    @contextlib.contextmanager
    def counted(name):
        before = _bytes_written(), os.stat(tempfile.gettempdir()).st_mtime_ns
        yield
        used = os.stat(tempfile.gettempdir()).st_mtime_ns != before[1]
        written[name] = _bytes_written() - before[0], used

    path = pathlib.Path(folder)
    x, y = np.ones((4, 64), "float32"), np.ones((4, 4096), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    with counted("save"), strategy.scope():
        model.save(path / "model.keras")
    with counted("save_weights"):
        model.save_weights(path / "model.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path / "checkpoint.keras")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[checkpoint])
    with counted("ModelCheckpoint"):
        checkpoint.on_epoch_end(1, {})
    # On torch, Keras exports nothing by itself.
    if keras.backend.backend() != "torch" and HAS_TENSORFLOW:
        with strategy.scope():
            plain = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096)])
        plain(x)
        with counted("export"):
            plain.export(path / "exported", verbose=False)
    rows = float(model.layers[0].rows.value)
    return {"written": written, "rows": rows, "weights": model.get_weights()}


def _bytes_written() -> int:
    """The bytes of all calls of `write` of this process."""
    with open("/proc/self/io") as file:
        return int(file.read().split("wchar:")[1].split()[0])


def save_where_nobody_can(folder: str) -> dict[str, str]:
    """The chief cannot write; what is raised on each worker, by what saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
    place = pathlib.Path(folder) / "a_file"
    place.touch()
    said = {}
    for name, file in (
        ("save", "model.keras"),
        ("save_weights", "model.weights.h5"),
        ("export", "exported"),
    ):
        try:
            getattr(model, name)(place / file)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def written(in_turns, tmp_path_factory):
    """The folders that workers write to, what they return, what they print."""
    names = ("whole", "half", "bytes", "stopped", "nowhere", "download")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    to = {name: {"folder": str(folder)} for name, folder in folders.items()}
    results, printed = in_turns(
        whole=(write_everything, to["whole"]),
        half=(write_everything, {**to["half"], "epochs": 1}),
        resumed=(write_everything, to["half"]),
        stopped=(stop_by_some, to["stopped"]),
        nowhere=(save_where_nobody_can, to["nowhere"]),
        download=(download_on_chief, to["download"]),
        # The last: what is temporary is in this folder from then on.
        bytes=(bytes_written, to["bytes"]),
    )
    return folders, results, printed


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("Model.save", backend="torch")
def test_only_chief_writes(written):
    folders, results, printed = written
    folder, results = folders["whole"], results["whole"]
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
    events = [name for name in files if ".tfevents." in name]
    parts = ["board/train", "board/validation"] * HAS_TENSORFLOW
    assert [name.rpartition("/")[0] for name in events] == parts
    assert [name for name in files if not name.startswith("board")] == [
        "backup",
        "backup/backup-000000002.npz",
        "backup/backup-000000003.npz",
        "best.keras",
        "epoch1.weights.h5",
        "epoch2.weights.h5",
        "epoch3.weights.h5",
        "last.keras",
        "log.csv",
    ]
    with open(folder / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    # One process loads what two have saved.
    model = keras.models.load_model(folder / "last.keras")
    predicted = model.predict(jobs.digits(29)[0], verbose=0)
    for result in results:
        np.testing.assert_allclose(result["predicted"], predicted, atol=1e-6)
    # The progress is the chief's to print.
    assert "accuracy" in printed[0]
    assert "accuracy" not in printed[1]


def test_one_worker_is_chief_and_others_read_its_file(written):
    assert written[1]["download"] == [(True, "once"), (False, "once")]


@pytest.mark.parametrize(
    "make", [lambda: ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy]
)
def test_process_without_workers_is_chief(make):
    assert make().is_chief is True


def test_other_workers_write_nothing(written):
    """Though the rows that each has counted are added up for the file."""
    folders, results, _ = written
    chief, other = results["bytes"]
    for name, (count, _) in chief["written"].items():
        assert count > 1_000_000, name
    for name, (count, used) in other["written"].items():
        assert not used, name
        assert count < 10_000, name  # what engines write to pipes
    assert chief["rows"] == other["rows"] == 8
    saved = keras.models.load_model(
        folders["bytes"] / "checkpoint.keras", custom_objects={"Seen": Seen}
    )
    for one, values in zip(saved.get_weights(), chief["weights"], strict=True):
        np.testing.assert_array_equal(one, values)
    assert not any(path.name.startswith(".") for path in folders["bytes"].iterdir())


def test_restored_weights_reach_all_workers(written):
    whole, resumed = (written[1][name] for name in ("whole", "resumed"))
    for one, other in zip(resumed, whole, strict=True):
        assert one["epochs"] == [1, 2]
        assert len(one["weights"]) == len(other["weights"])
    for a, b in zip(resumed[0]["weights"], resumed[1]["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_workers_stop_together(written):
    for late, together, at_end_of_epoch in written[1]["stopped"]:
        # One worker alone wants to stop, when the other has begun the next batch.
        assert late == 7
        assert together == 6
        assert at_end_of_epoch == 8


@pytest.mark.needs_patch("Model.save_weights", "Model.export", backend="torch")
def test_write_error_of_chief_reaches_all_workers(written):
    chief, other = written[1]["nowhere"]
    for name in ("save", "save_weights", *["export"] * HAS_TENSORFLOW):
        assert chief[name].startswith(("NotADirectoryError", "FileExistsError"))
        said = f"WorkerFailedError: worker 0 failed in `{name}` to"
        assert other[name].startswith(said)


def test_temporary_files_of_killed_chief_are_removed(program, tmp_path):
    folder = tmp_path / "models"
    killed = """
import os, signal, sys
from keras_strategy.training.saving import atomic_write_path

with atomic_write_path(sys.argv[1]) as path:
    open(path, "w").write("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = folder / "model.keras"
    end = program(killed, target)
    assert end.exit_status == -signal.SIGKILL, end.output
    assert [file.name for file in folder.iterdir()] == [".model.keras.part"]
    with atomic_write_path(str(target)) as path:
        pathlib.Path(path).write_text("all of it")
    assert [file.name for file in folder.iterdir()] == ["model.keras"]
    assert target.read_text() == "all of it"
