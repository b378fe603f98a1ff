"""Two Slurm jobs that train on the same node at the same time."""

import concurrent.futures
import json
import os

import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner


def sum_of_job(job: int, number: int) -> tuple[str, float]:
    """Join the job as Slurm describes it, and add up a number on all workers."""
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
    value = strategy.run(lambda: np.float32(number))
    return strategy.cluster_resolver.job_identity, float(strategy.reduce("sum", value))


@pytest.mark.full(keep_on="torch")
def test_jobs_on_one_node_do_not_meet(starter):
    # Other runs of this test, such as another backend's, are other jobs.
    jobs = [2 * os.getpid(), 2 * os.getpid() + 1]

    def run(job: int, number: int) -> list[tuple[str, float]]:
        with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
            return runner.run(sum_of_job, job, number)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, jobs, [70, 71]))
    sums = [140.0, 142.0]
    expected = [[(f"slurm {job}.0", s)] * 2 for job, s in zip(jobs, sums, strict=True)]
    assert results == expected
