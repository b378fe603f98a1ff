"""`benchmarks.local_devices`, on the devices of this process."""

import json

import pytest

import keras_strategy as ks
from benchmarks import local_devices
from benchmarks.local_devices import main
from keras_strategy.training.ownership import strategy_of_model

pytestmark = pytest.mark.full


def test_bench_compares_devices(capsys, monkeypatch):
    """Both sides train as much; its numbers are those of the machine."""
    programs, create = [], local_devices.create_programs
    monkeypatch.setattr(
        local_devices,
        "create_programs",
        lambda *size: programs.append(create(*size)) or programs[-1],
    )
    short = ["--units", "8", "--batch-size", "64", "--rounds", "2", "--seconds", "0"]
    assert main([*short, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == list(ks.MirroredStrategy().extended.worker_devices)
    ((_, *fits),) = programs
    ours, alone = models = [fit.model for fit in fits]
    assert strategy_of_model(ours) is not None and strategy_of_model(alone) is None
    trained = [int(model.optimizer.iterations) for model in models]
    assert trained[0] == trained[1] > 2 * told["steps"]
    low, high = told["quartiles"]
    assert low <= told["ratio"] <= high
    assert told["weights"] == 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
    assert 0 <= told["others"] <= 1


def test_bench_of_missing_devices_is_refused(capsys, monkeypatch):
    def refuse(kind, count):
        raise RuntimeError(f"no {count} of {kind}")

    monkeypatch.setattr(ks.config, "set_logical_devices", refuse)
    assert main(["--devices", "64"]) == 1
    assert capsys.readouterr().err == "no 64 of cpu\n"
