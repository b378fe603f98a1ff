"""What several workers write: once, by the chief, and whole."""

import csv

import keras
import numpy as np

from tests.workers import jobs


def test_the_chief_writes_and_all_go_on(two_workers, tmp_path):
    results = two_workers.run(jobs.write_everything, str(tmp_path))
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert files == [
        "backup",
        "backup/latest.weights.h5",
        "backup/training_metadata.json",
        "best.keras",
        "epoch1.weights.h5",
        "epoch2.weights.h5",
        "epoch3.weights.h5",
        "last.keras",
        "log.csv",
    ]
    with open(tmp_path / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    # One process loads what two have saved.
    model = keras.models.load_model(tmp_path / "last.keras")
    predicted = model.predict(jobs.digits(29)[0], verbose=0)
    for result in results:
        np.testing.assert_allclose(result["predicted"], predicted, atol=1e-6)
    # The progress is the chief's to print.
    assert "accuracy" in two_workers.output(0)
    assert "accuracy" not in two_workers.output(1)


def test_what_the_chief_restores_is_everybodys(two_workers, tmp_path):
    whole = two_workers.run(jobs.write_everything, str(tmp_path / "whole"))
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
    assert chief.startswith(("NotADirectoryError", "FileExistsError"))
    assert other.startswith("WorkerFailedError: worker 0 failed in `save` to")
