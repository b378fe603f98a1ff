"""`info --json`, `doctor` and `verify`."""

import importlib.machinery
import importlib.util
import json
import pathlib
import socket
import sys

import keras
import pytest

import keras_strategy as ks
from keras_strategy.cluster import process_exit
from keras_strategy.commands import doctor
from keras_strategy.commands.cli import main
from keras_strategy.commands.findings import report
from keras_strategy.core.registry import get_engine


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["keras_strategy"] == ks.__version__
    assert told["keras"] == keras.__version__
    assert told["devices"] == list(ks.MirroredStrategy().extended.worker_devices)
    assert told["cluster"]["found"] is None
    assert any("torchrun: no" in line for line in told["cluster"]["looked_for"])


@pytest.mark.full
def test_doctor_of_healthy_machine(capsys, monkeypatch):
    """On the backend with the fastest import: four processes import it."""
    there = importlib.util.find_spec("jax") is not None
    monkeypatch.setenv("KERAS_BACKEND", "jax" if there else keras.backend.backend())
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "OK    training step: 2 replicas match 1 device (largest difference" in out
    returned = "OK    collectives: all-reduce over 2 processes returned 2.0 on each"
    assert returned in out
    assert "FAIL" not in out


def test_versions_are_those_of_the_project():
    """The bounds of what pip installs are those that doctor and info compare with."""
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in ("jax", "torch", "tensorflow"):
        first, last = doctor._TESTED[name]
        major, minor = last.split(".")
        bounds = f">={first},<{major}.{int(minor) + 1}"
        assert f'\n{name} = ["{name}{bounds}"]\n' in text
    assert f'"keras>={doctor._TESTED["keras"][0]}"' in text
    assert f'requires-python = ">={doctor._TESTED["python"][0]}"' in text


@pytest.mark.parametrize(
    ("found", "outside"),
    [
        (("3.15.1", "torch", "2.13.0+cpu"), []),
        (("3.16.0.dev2026", "jax", "0.12.0.1"), []),
        (("3.17.0", "torch", "2.99.1"), ["keras 3.17.0", "torch 2.99.1"]),
        (("3.12.0", "jax", "1.0"), ["keras 3.12.0", "jax 1.0"]),
    ],
)
def test_doctor_and_info_warn_of_untested_versions(found, outside, capsys, monkeypatch):
    finding = doctor.versions(*found)
    assert finding.ok is (None if outside else True)
    assert all(version in finding.detail for version in outside)
    assert report([("backend", finding)]) == 0
    told = capsys.readouterr().out
    assert ("WARN  backend" in told) == bool(outside) and "python 3.11 to 3." in told

    version, backend, _ = found
    if backend == keras.backend.backend():
        monkeypatch.setattr(keras, "__version__", version)
        monkeypatch.setattr(sys.modules[backend], "__version__", found[2])
        assert main(["info", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["untested"] == outside
        assert main(["info"]) == 0
        assert ("not tested with" in capsys.readouterr().out) == bool(outside)


def wrong(finding, seen, do):
    assert not finding.ok
    assert seen in finding.detail and do in finding.advice


def test_doctor_explains_problems(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    ((_, only),) = doctor.findings(0)
    wrong(only, "'numpy', which does not train", "set KERAS_BACKEND to one of jax")
    wrong(doctor.versions("3.15.1", "numpy", "2.4"), "on numpy 2.4", "KERAS_BACKEND")
    monkeypatch.setenv("NPROC", "1")
    wrong(doctor.threads(), "1 for 2 logical CPU devices", "set NPROC=8")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": 7}')
    wrong(doctor.cluster(), "TF_CONFIG cannot be used", "correct what it names")


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_doctor_checks(backend, monkeypatch):
    """One after the other; at GPUs on torch alone."""
    first = doctor.versions("3.15.1", backend, "99")  # which warns and goes on
    monkeypatch.setattr(doctor, "backend", lambda: first)
    names = ["torch_gpus", "cluster", "replicas", "workers"]
    for name in names:
        found = doctor.Finding(True, name)
        monkeypatch.setattr(doctor, name, lambda *_, found=found: found)
    checks, found = zip(*doctor.findings(1), strict=True)
    of_torch = backend == "torch"
    assert checks[:2] == ("backend", "threads") and ("GPUs" in checks) == of_torch
    assert [finding.detail for finding in found[2:]] == names[not of_torch :]


def test_doctor_reports_torch_gpus():
    assert doctor.gpus(0, nccl=False) is None
    assert doctor.gpus(1, nccl=True).detail == "1, with NCCL"
    several = doctor.gpus(4, nccl=True)
    assert several.ok and "keras-strategy run --workers 4 with" in several.detail
    wrong(doctor.gpus(1, nccl=False), "no NCCL", "with CUDA and NCCL")


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="it asks torch")
def test_doctor_queries_torch_for_gpus():
    import torch

    nccl = torch.distributed.is_nccl_available()
    assert doctor.torch_gpus() == doctor.gpus(torch.cuda.device_count(), nccl)


@pytest.mark.parametrize(("gpus", "place"), [(1, ", on CPUs"), (0, ""), (2, "")])
def test_doctor_connects_workers_on_cpus_beside_one_gpu(gpus, place, monkeypatch):
    """NCCL refuses two processes on one GPU."""
    environments = []

    def run(arguments, *args, more, **options):
        environments.append(more)
        return f"{doctor._SUM} 2.0\n" * 2, 0

    monkeypatch.setattr(doctor, "_count_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "_run", run)
    finding = doctor.workers(10)
    assert finding.ok and place in finding.detail
    assert environments == [doctor._CPUS_ONLY if gpus == 1 else {}]


def test_doctor_counts_gpus():
    assert doctor._count_gpus() == len(get_engine().list_devices("gpu"))


def test_doctor_reports_port_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        task = {"type": "worker", "index": 0}
        cluster = {"worker": [f"127.0.0.1:{port}"]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        wrong(
            doctor.cluster(),
            f"at port {port} of 127.0.0.1",
            "end the program that listens",
        )


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("trial", [doctor.replicas, doctor.workers])
def test_doctor_program_times_out(trial):
    wrong(trial(0), "no result within 0 s", "--timeout-seconds")


PROGRAM = """
import sys
import keras, numpy as np
import keras_strategy as ks

class Centered(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0) * float(sys.argv[1])

x, y = np.eye(8, 4, dtype="float32"), np.ones((8, 1), "float32")
batches = [(x, y)] * 2
with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([Centered(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit({data}, epochs=1, verbose=0)
raise AssertionError("the program goes on")
"""


@pytest.mark.parametrize("data", ["x, y", "iter(batches), steps_per_epoch=2"])
def test_verify_reports_first_fit(data, tmp_path, capsys, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.replace("{data}", data))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    for share, text in (("1", "differs from"), ("0", "equals")):
        # On JAX `fit` computes all rows in one program.
        differs = share == "1" and keras.backend.backend() != "jax"
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(program), share])
        assert ended.value.code == int(differs)
        out = capsys.readouterr().out
        assert (text if differs else "equals") + " one device's" in out
    assert keras.Model.fit.__qualname__.endswith("Trainer.fit")


def test_verify_of_program_without_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "train.py").write_text("")
    assert main(["verify", str(tmp_path / "train.py")]) == 1
    assert "train.py calls no `fit`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "info", "doctor", "verify", "compare"])
def test_help_has_examples(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"keras-strategy {name}" in capsys.readouterr().out.split("examples:")[1]


def test_help_lists_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.split("exit codes:")[1]
    codes = [v for k, v in vars(process_exit).items() if k.isupper() and type(v) is int]
    assert codes and all(f"\n  {code} " in listed for code in codes)
