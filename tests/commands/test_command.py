"""The command line itself: bad arguments, `info`, and how it is found."""

import importlib
import json
import runpy
import sys
import tomllib

import keras
import pytest

import keras_strategy as ks
from keras_strategy.commands.cli import main
from keras_strategy.core.registry import get_engine
from tests.commands.scripts import ROOT, finish, start


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: {run,info,doctor,verify,compare}"),
        (["run", __file__], "required: --workers"),
        (["run", "--workers", "2"], "required: program"),
        (
            ["run", "--workers", "0", __file__],
            "argument --workers: Expected a whole number, 1 or more. Received: '0'",
        ),
        (
            ["run", "--workers", "two", __file__],
            "argument --workers: Expected a whole number, 1 or more. Received: 'two'",
        ),
        (
            ["run", "--workers", "1", "--devices-per-worker", "-1", __file__],
            "argument --devices-per-worker: Expected a whole number, 1 or more. "
            "Received: '-1'",
        ),
        (
            ["run", "--workers", "1", "--max-restarts", "1.5", __file__],
            "argument --max-restarts: Expected a whole number, 0 or more. "
            "Received: '1.5'",
        ),
        (
            ["run", "--workers", "1", "--grace-seconds", "inf", __file__],
            "argument --grace-seconds: Expected a number of seconds, 0 or more. "
            "Received: 'inf'",
        ),
        (
            ["run", "--workers", "1", "--min-workers", "2", __file__],
            "argument --min-workers: expected at most --workers 1. Received: 2",
        ),
        (
            ["run", "--workers", "1", "missing.py"],
            "argument program: there is no file 'missing.py'. Give the path of a "
            "Python script, or -m and the name of a module",
        ),
        (["verify", "missing.py"], "argument program: there is no file 'missing.py'"),
        (["run", "--workers", "1", "--unknown", __file__], "--unknown"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_info_lists_versions_and_devices(capsys, monkeypatch):
    config = {
        "cluster": {"worker": ["127.0.0.1:12345", "127.0.0.1:12346"]},
        "task": {"type": "worker", "index": 1},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    backend = keras.backend.backend()
    engine = importlib.import_module(backend).__version__
    assert rows["keras_strategy"] == ks.__version__
    assert rows["keras"] == keras.__version__
    assert rows["backend"] == f"{backend} {engine}"
    assert rows["devices"] == ", ".join(get_engine().list_devices())
    assert rows["cluster"].startswith("TF_CONFIG: this is worker 1 of ")
    assert "127.0.0.1:12346" in rows["cluster"]
    assert "torchrun: no" in out


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("level", [None, "0"])
def test_info_hides_start_up_lines_of_tensorflow(level, monkeypatch):
    """Unless the user has set their level."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    done = finish(start("info"))
    assert done.returncode == 0 and "backend           tensorflow" in done.stdout
    assert done.stderr == "" if level is None else "oneDNN" in done.stderr


def test_info_without_cluster(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    main(["info"])
    assert "none, this process is on its own" in capsys.readouterr().out


def test_info_with_unusable_cluster(capsys, monkeypatch):
    config = {"cluster": {"worker": [7]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert main(["info"]) == 0
    assert (
        "TF_CONFIG, which cannot be used: TF_CONFIG: Expected"
        in capsys.readouterr().out
    )


def test_info_with_numpy_backend(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    done = finish(start("info"))
    assert done.returncode == 0, done.stderr
    assert ks.__version__ in done.stdout
    assert "The backend in use is 'numpy'" in done.stdout


def test_python_m_runs_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["keras-strategy", "run", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("keras_strategy", run_name="__main__")
    assert caught.value.code == 0
    assert "--max-restarts" in capsys.readouterr().out


def test_console_script_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["keras-strategy"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
