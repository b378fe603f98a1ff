"""The recipe of Slurm, on a cluster of one node."""

import threading

import keras
import pytest

from tests.launchers import recipes
from tests.launchers.slurm import call, start_cluster, wait_for

CHANGES = {
    "--nodes=2": "--nodes=1",
    "--ntasks-per-node=4": "--ntasks-per-node=2",
    "#SBATCH --gpus-per-node=4\n": "",
}
# `sbatch --wait` looks at the job every 32 seconds only.
COMMAND = """\
job=$(sbatch --parsable --output=out.txt job.sh)
while squeue -h -j $job -o %T | grep -q .; do sleep 0.3; done
scontrol show job $job | grep -q JobState=COMPLETED || { cat out.txt; false; }
"""
SLOW = """
class Slow(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.3)
        if strategy.is_chief:
            with open("steps.txt", "a") as file:
                print(self.epoch, batch, file=file)


backup ="""


@pytest.fixture(scope="module")
def slurm(needs, tmp_path_factory):
    """The variables of the cluster, which starts with the first test."""
    needs("Slurm")
    with start_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def write_job(folder, changes=None):
    recipes.write_program(folder, changes)
    (folder / "job.sh").write_text(recipes.read_recipe("#SBATCH", CHANGES))


def test_slurm(slurm, tmp_path, compare):
    write_job(tmp_path)
    recipes.run_all([COMMAND], [tmp_path], slurm)
    assert "replicas: 2" in (tmp_path / "out.txt").read_text()
    compare(recipes.read_weights(tmp_path))


def test_two_jobs_on_one_node_do_not_meet(slurm, tmp_path, compare):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_job(folder)
    recipes.run_all([COMMAND] * 2, folders, slurm)
    for folder in folders:
        assert "replicas: 2" in (folder / "out.txt").read_text()
        compare(recipes.read_weights(folder))


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="it runs on torch")
def test_preempted_job_is_requeued_and_resumes(slurm, tmp_path, compare):
    changes = {
        "import keras\n": "import time\nimport keras\n",
        "backup =": SLOW,
        "callbacks=[backup]": "callbacks=[backup, Slow()]",
    }
    write_job(tmp_path, changes)
    steps = tmp_path / "steps.txt"
    command = f"{COMMAND.replace('sbatch', 'sbatch --job-name=preempted')}"
    job = threading.Thread(
        target=recipes.run_all, args=([command], [tmp_path], slurm), daemon=True
    )
    job.start()
    wait_for(lambda: steps.exists() and "1 2" in steps.read_text())
    call(slurm, "scancel", "--signal=TERM", "--name=preempted")
    queue = ("squeue", "-h", "--name=preempted", "-o", "%T")
    wait_for(lambda: "PENDING" in call(slurm, *queue))
    # Slurm starts a requeued job after two minutes.
    (number,) = call(slurm, *queue[:-1], "%A").split()
    call(slurm, "scontrol", "update", f"JobId={number}", "StartTime=now")
    job.join(120)
    assert not job.is_alive()
    output = (tmp_path / "out.txt").read_text()
    assert "replicas: 2" in output
    # Each batch is trained once, so the second run starts within the epoch.
    expected = [f"{epoch} {batch}" for epoch in range(2) for batch in range(8)]
    assert steps.read_text().splitlines() == expected, output
    compare(recipes.read_weights(tmp_path))
