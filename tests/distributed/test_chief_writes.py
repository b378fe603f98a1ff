"""What several workers write: once, by the chief, and whole."""

import csv
import pathlib
import signal

import keras
import numpy as np
import pytest

from keras_strategy.training.saving import atomic_write_path
from tests.distributed import jobs


@pytest.fixture(scope="module")
def written(in_turns, tmp_path_factory):
    """The folders that workers write to, what they return, what they print."""
    names = ("whole", "half", "bytes", "stopped", "nowhere")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    to = {name: {"folder": str(folder)} for name, folder in folders.items()}
    results, printed = in_turns(
        whole=(jobs.write_everything, to["whole"]),
        half=(jobs.write_everything, {**to["half"], "epochs": 1}),
        resumed=(jobs.write_everything, to["half"]),
        stopped=(jobs.stop_by_some, to["stopped"]),
        nowhere=(jobs.save_where_nobody_can, to["nowhere"]),
        # The last: what is temporary is in this folder from then on.
        bytes=(jobs.bytes_written, to["bytes"]),
    )
    return folders, results, printed


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("Model.save", backend="torch")
def test_only_chief_writes(written):
    folders, results, printed = written
    folder, results = folders["whole"], results["whole"]
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
    assert files == [
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
        folders["bytes"] / "checkpoint.keras", custom_objects={"Seen": jobs.Seen}
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
    for name in ("save", "save_weights", *["export"] * jobs.HAS_TENSORFLOW):
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
