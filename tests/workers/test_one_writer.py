"""What several workers write: once, by the chief, and whole."""

import csv
import pathlib
import signal

import keras
import numpy as np
import pytest

from keras_strategy.rules.one_writer import replaced
from keras_strategy.testing import WorkerRunner
from tests.workers import jobs


@pytest.fixture(scope="module")
def written(starter, tmp_path_factory):
    """A training that writes: the folder, what workers return, what they print."""
    folder = tmp_path_factory.mktemp("written")
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(jobs.write_everything, str(folder))
        return folder, results, [runner.output(rank) for rank in (0, 1)]


def test_the_chief_writes_and_all_go_on(written):
    folder, results, printed = written
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


def test_the_others_write_nothing(two_workers, tmp_path):
    """Though the rows that each has counted are added up for the file."""
    chief, other = two_workers.run(jobs.bytes_written, str(tmp_path))
    for name, (count, _) in chief["written"].items():
        assert count > 1_000_000, name
    for name, (count, used) in other["written"].items():
        assert not used, name
        assert count < 10_000, name  # what engines write to pipes
    assert chief["rows"] == other["rows"] == 8
    saved = keras.models.load_model(
        tmp_path / "checkpoint.keras", custom_objects={"Seen": jobs.Seen}
    )
    for one, values in zip(saved.get_weights(), chief["weights"], strict=True):
        np.testing.assert_array_equal(one, values)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_what_the_chief_restores_is_everybodys(written, two_workers, tmp_path):
    _, whole, _ = written
    half = str(tmp_path / "half")
    two_workers.run(jobs.write_everything, half, epochs=1)
    resumed = two_workers.run(jobs.write_everything, half)
    for one, other in zip(resumed, whole, strict=True):
        assert one["epochs"] == [1, 2]
        assert len(one["weights"]) == len(other["weights"])
    for a, b in zip(resumed[0]["weights"], resumed[1]["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_worker_stops_all(two_workers, tmp_path):
    results = two_workers.run(jobs.stop_by_one, str(tmp_path))
    assert [result["steps"] for result in results] == [6, 6]


def test_all_hear_that_the_chief_cannot_write(two_workers, tmp_path):
    chief, other = two_workers.run(jobs.save_where_nobody_can, str(tmp_path))
    for name in ("save", "save_weights", "export"):
        assert chief[name].startswith(("NotADirectoryError", "FileExistsError"))
        said = f"WorkerFailedError: worker 0 failed in `{name}` to"
        assert other[name].startswith(said)


def test_what_a_killed_chief_leaves_is_removed(program, tmp_path):
    folder = tmp_path / "models"
    killed = """
import os, signal, sys
from keras_strategy.rules.one_writer import replaced

with replaced(sys.argv[1]) as path:
    open(path, "w").write("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    target = folder / "model.keras"
    end = program(killed, target)
    assert end.exit_status == -signal.SIGKILL, end.output
    assert [file.name for file in folder.iterdir()] == [".model.keras.part"]
    with replaced(str(target)) as path:
        pathlib.Path(path).write_text("all of it")
    assert [file.name for file in folder.iterdir()] == ["model.keras"]
    assert target.read_text() == "all of it"
