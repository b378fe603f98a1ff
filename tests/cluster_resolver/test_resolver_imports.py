"""Asking who is in the cluster starts no engine and needs no client library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_strategy
from keras_strategy.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    SlurmClusterResolver,
    TPUClusterResolver,
)

ENGINES = ("keras", "numpy", "jax", "torch", "tensorflow")
CLIENTS = ("kubernetes", "googleapiclient", "google.auth", "hostlist")
ROOT = str(Path(keras_strategy.__file__).parents[1])


def test_import_loads_no_backend():
    heavy = [*ENGINES, *CLIENTS]
    code = (
        "import sys\n"
        "from keras_strategy.cluster_resolver import detect, TPUClusterResolver\n"
        "detect().resolver()\n"
        "TPUClusterResolver('grpc://127.0.0.1:8470').cluster_spec()\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "module, extra, use",
    [
        ("kubernetes", "kubernetes", lambda: KubernetesClusterResolver()),
        (
            "googleapiclient",
            "tpu",
            lambda: TPUClusterResolver("name", "zone", "project").cluster_spec(),
        ),
        ("googleapiclient", "gce", lambda: GCEClusterResolver("p", "z", "g", 8470)),
        ("hostlist", "slurm", lambda: SlurmClusterResolver(gpus_per_node=0)),
    ],
)
def test_missing_library_names_its_extra(monkeypatch, module, extra, use):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n1")
    for name in list(sys.modules):
        if name == module or name.startswith(module + "."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "\.\[{extra}\]"'):
        use()


def test_tpu_by_address_needs_no_library(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] in ("googleapiclient", "httplib2"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    TPUClusterResolver("grpc://127.0.0.1:8470").cluster_spec()
    TPUClusterResolver("local").cluster_spec()
    TPUClusterResolver("name", "zone", "project", service=object())
