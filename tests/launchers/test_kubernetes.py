"""The variables of the manifest for a Job, with processes for pods."""

import pytest

from tests.launchers import recipes

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.full

MANIFEST = recipes.ROOT / "docs" / "manifests" / "job.yaml"


def read_variables() -> dict[str, str]:
    """Return the variables of the pods that have the same value in each."""
    (job,) = [
        document
        for document in yaml.safe_load_all(MANIFEST.read_text())
        if document["kind"] == "Job"
    ]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    entries = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert [name for name, value in entries.items() if value is None] == [
        "RANK",
        "KERAS_STRATEGY_SECRET",
    ]
    # Two pods of this machine, on whose host names no service answers.
    changes = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RANK": ""}
    changes["MASTER_PORT"] = str(recipes.free_port())
    changes["KERAS_STRATEGY_SECRET"] = "of this run"
    del entries["KERAS_BACKEND"]
    assert set(changes) == set(entries)
    return changes


def test_pods_of_a_job(tmp_path, compare):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        recipes.write_program(folder)
    commands = [f"RANK={rank} python train.py" for rank in range(2)]
    outputs = recipes.run_all(commands, folders, read_variables())
    assert "replicas: 2" in outputs[0]
    compare(recipes.read_weights(folders[0]))
