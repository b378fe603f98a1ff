"""Programs that run in several workers as users start them."""

import contextlib
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from keras_strategy.commands import launcher
from keras_strategy.commands.launcher import Launcher
from keras_strategy.testing.worker_runner import base_environment

ROOT = pathlib.Path(__file__).parents[2]


def warm(starter):
    """What starts a launcher's workers where Keras and the engine are imported."""

    def start(name, command, environment, stdout, stderr, descriptors=()):
        _, script, *arguments = command
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        with contextlib.ExitStack() as ends:
            files = [ends.enter_context(open(end, "wb")) for end in theirs]
            process = starter.start(name, script, arguments, environment, *files)
        # The launcher closes them.
        process.stdout, process.stderr = (open(end, "rb", 0) for end in ours)  # noqa: SIM115
        return process

    return start


@pytest.mark.full(keep_on="torch")
def test_launcher_runs_example(two_workers):
    two_workers.start(ROOT / "examples" / "multi_worker.py", "--epochs", 2)
    chief, other = two_workers.wait()
    assert chief.exit_status == other.exit_status == 0, chief.output + other.output
    assert "largest weight difference to one device" in chief.output
    assert "on 2 replicas" in chief.output


@pytest.mark.full
def test_restarted_training_matches_uninterrupted_run(
    two_workers, starter, tmp_path, monkeypatch, capsys
):
    """A worker is killed, then one is preempted; the launcher starts all anew."""
    script = ROOT / "tests" / "distributed" / "train_script.py"
    two_workers.start(script, tmp_path / "whole.npz", tmp_path / "a")
    for end in two_workers.wait():
        assert end.exit_status == 0, end.output
    faults = ("killed", "preempted")
    backup = tmp_path / "b"
    arguments = (script, tmp_path / "resumed.npz", backup, *faults)
    monkeypatch.setattr(launcher, "WorkerProcess", warm(starter))
    for name, value in base_environment().items():
        monkeypatch.setenv(name, value)
    command = (sys.executable, *map(str, arguments))
    report = str(tmp_path / "fingerprint.json")
    options: dict[str, Any] = {"devices_per_worker": 1, "fingerprint": report}
    status = Launcher(command, 2, max_restarts=2, **options).run()
    said = "".join(capsys.readouterr())
    assert status == 0, said
    assert all(pathlib.Path(f"{backup}.{fault}").exists() for fault in faults)
    for number in (1, 2):
        assert f"All workers start again in 1 s (restart {number} of 2)." in said
    assert "was preempted (exit status 75)." in said
    assert not backup.exists()
    found = json.loads(pathlib.Path(report).read_text())
    assert f"The trained model has the fingerprint {found['sha256']}" in said
    assert all(len(variable["sha256"]) == 64 for variable in found["variables"])
    with (
        np.load(tmp_path / "whole.npz") as one,
        np.load(tmp_path / "resumed.npz") as other,
    ):
        assert len(one.files) == len(other.files) > 0
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name])
