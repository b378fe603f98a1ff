"""The recipe of torchrun."""

import pytest

from tests.launchers import recipes

pytestmark = pytest.mark.full


def test_torchrun(tmp_path, compare):
    """Two agents on this machine stand for two hosts."""
    recipes.write_program(tmp_path)
    port = recipes.free_port()
    changes = {"node1:29500": f"127.0.0.1:{port}", "--nproc-per-node=4": ""}
    command = recipes.read_recipe("--rdzv-id=digits", changes)
    outputs = recipes.run_all([command] * 2, [tmp_path] * 2)
    assert "replicas: 2" in "".join(outputs)
    compare(recipes.read_weights(tmp_path))
