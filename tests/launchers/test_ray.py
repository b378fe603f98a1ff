"""The recipe of Ray Train."""

import shutil
import tempfile

import keras
import pytest

from tests.launchers import recipes
from tests.launchers.installed import RAY_PYTHON

SETUP = """\
import os
import pathlib
import signal
import time

import ray
from ray.cluster_utils import Cluster


class Fault(keras.callbacks.Callback):
    folder = pathlib.Path("FOLDER")
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        context = ray.train.get_context()
        size = context.get_world_size()
        if context.get_world_rank() == 0:
            with open(self.folder / "steps.txt", "a") as file:
                print(self.epoch, batch, size, file=file)
        marker = self.folder / "fault"
        if context.get_world_rank() == 1 and (self.epoch, batch) == (1, 3):
            if not marker.exists():
                time.sleep(10)  # Ray asks for the checkpoint every 2 seconds
                marker.touch()
                FAULT


class Report("""
ONE_NODE = """\
cluster = None
ray.init(num_cpus=2)
"""
# One worker fits on each of two nodes.
TWO_NODES = """\
cluster = Cluster()
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(cluster.address)
"""
END = """\
ray.shutdown()
if cluster:
    cluster.shutdown()
"""


FAULTS = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="it runs on JAX and torch"
)


@pytest.fixture
def run_recipe(needs, tmp_path):
    """Runs the recipe in a cluster, and returns the steps of the chief."""
    needs("Ray")
    session = tempfile.mkdtemp(prefix="ray")  # Ray's sockets need a short path

    def run(cluster: str, fault: str = "pass", workers: str = "2") -> list:
        program = SETUP.replace("FOLDER", str(tmp_path))
        changes = {
            "class Report(": program.replace("FAULT", fault),
            "with strategy": "keras.utils.set_random_seed(7)\n    with strategy",
            "callbacks = [": "callbacks = [Fault(), ",
            "/shared": str(tmp_path),
            "num_workers=4": f"num_workers={workers}",
            "trainer =": f"{cluster}\ntrainer =",
            "print(trainer.fit())": f"print(trainer.fit())\n{END}",
        }
        code = recipes.read_recipe("# ray_train.py", changes)
        (tmp_path / "ray_train.py").write_text(code)
        command = f"{RAY_PYTHON} ray_train.py"
        variables = {
            "RAY_TMPDIR": session,
            "RAY_USAGE_STATS_ENABLED": "0",
            # So long Ray waits for a node that is gone, before it starts fewer workers.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
        }
        recipes.run_all([command], [tmp_path], variables)
        lines = (tmp_path / "steps.txt").read_text().splitlines()
        return [tuple(map(int, line.split())) for line in lines]

    yield run
    shutil.rmtree(session, ignore_errors=True)


def first_epoch(workers: int) -> list[tuple[int, int, int]]:
    return [(0, batch, workers) for batch in range(8)]


def second_epoch(workers: int) -> list[tuple[int, int, int]]:
    return [(1, batch, workers) for batch in range(8)]


def test_ray_train(run_recipe, tmp_path, compare):
    steps = run_recipe(ONE_NODE)
    assert steps == first_epoch(2) + second_epoch(2)
    compare(keras.saving.load_model(tmp_path / "digits.keras").get_weights())


@FAULTS
def test_killed_worker_resumes_from_checkpoint(run_recipe, tmp_path, compare):
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    steps = run_recipe(ONE_NODE, fault)
    assert (tmp_path / "fault").exists()
    assert steps[:8] == first_epoch(2)
    assert steps[-8:] == second_epoch(2)
    assert 8 + 8 < len(steps) < 8 + 8 + 8
    compare(keras.saving.load_model(tmp_path / "digits.keras").get_weights())


REMOVE = """\
import threading


def remove_node():
    while not pathlib.Path("fault").exists():
        time.sleep(0.1)
    cluster.remove_node(nodes[1])


threading.Thread(target=remove_node, daemon=True).start()
"""


@FAULTS
def test_elastic_training_continues_on_fewer_nodes(run_recipe, tmp_path, compare):
    steps = run_recipe(TWO_NODES + REMOVE, "time.sleep(1000)", workers="(1, 4)")
    assert steps[:8] == first_epoch(2)
    assert steps[-8:] == second_epoch(1)
    compare(keras.saving.load_model(tmp_path / "digits.keras").get_weights())
