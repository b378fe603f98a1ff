"""Two Slurm jobs that train on the same node at the same time."""

import concurrent.futures
import json
import os

import numpy as np

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner


def sum_of_job(job: int) -> tuple[str, float]:
    """Join the job as Slurm describes it, and add up its number on all workers."""
    rank = str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    for name in "TF_CONFIG", "KERAS_STRATEGY_PORT", "KERAS_STRATEGY_SECRET":
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID=str(job),
        SLURM_STEP_ID="0",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="localhost",
        SLURM_STEP_TASKS_PER_NODE="2",
    )
    strategy = ks.MultiWorkerMirroredStrategy()
    value = strategy.run(lambda: np.float32(job))
    return strategy.cluster_resolver.job_identity, float(strategy.reduce("sum", value))


def test_jobs_on_one_node_do_not_meet(starter):
    def run(job: int) -> list[tuple[str, float]]:
        with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
            return runner.run(sum_of_job, job)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, [70, 71]))
    assert results == [[("slurm 70.0", 140.0)] * 2, [("slurm 71.0", 142.0)] * 2]
