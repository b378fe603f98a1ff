"""Programs that run in several workers as users start them."""

import os
import pathlib
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    """Starts two workers and waits for them."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "keras_strategy", "run", "--workers", "2"]
        + ["--devices-per-worker", "1", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_example(two_workers):
    two_workers.start(ROOT / "examples" / "multi_worker.py", "--epochs", 2)
    chief, other = two_workers.wait()
    assert chief.exit_status == other.exit_status == 0, chief.output + other.output
    assert "largest weight difference to one device" in chief.output
    assert "on 2 replicas" in chief.output


def test_a_training_that_is_started_again_ends_where_an_uninterrupted_one_does(
    two_workers, tmp_path
):
    """A worker is killed, then one is preempted; the launcher starts all anew."""
    script = ROOT / "tests" / "workers" / "train_script.py"
    two_workers.start(script, tmp_path / "whole.npz", tmp_path / "a")
    for end in two_workers.wait():
        assert end.exit_status == 0, end.output
    faults = ("killed", "preempted")
    backup = tmp_path / "b"
    arguments = (script, tmp_path / "resumed.npz", backup, *faults)
    resumed = run("--max-restarts", 2, *arguments)
    said = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, said
    assert all(pathlib.Path(f"{backup}.{fault}").exists() for fault in faults)
    for number in (1, 2):
        assert f"All workers start again in 1 s (restart {number} of 2)." in said
    assert "was preempted (exit status 75)." in said
    assert not backup.exists()
    with (
        np.load(tmp_path / "whole.npz") as one,
        np.load(tmp_path / "resumed.npz") as other,
    ):
        assert len(one.files) == len(other.files) > 0
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name])
