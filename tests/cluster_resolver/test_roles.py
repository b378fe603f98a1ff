import keras
import pytest

from keras_strategy.cluster_resolver import ClusterSpec
from keras_strategy.cluster_resolver.cluster_spec import training_tasks, validate_task

CHIEF = ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"], "ps": ["d:1"]})
WORKERS = ClusterSpec({"worker": ["b:1", "c:1"], "evaluator": ["e:1"]})


def test_chief_is_rank_0():
    assert training_tasks(CHIEF) == [("chief", 0), ("worker", 0), ("worker", 1)]


def test_worker_0_is_rank_0_without_chief():
    assert training_tasks(WORKERS) == [("worker", 0), ("worker", 1)]


def test_ranks_are_dense_where_indices_have_gaps():
    spec = ClusterSpec({"worker": {1: "b:1", 5: "f:1"}})
    assert training_tasks(spec) == [("worker", 1), ("worker", 5)]


def test_evaluator_may_be_outside_the_cluster():
    validate_task(CHIEF, "evaluator", 0)


@pytest.mark.parametrize(
    "cluster, task, words",
    [
        ({"master": ["a:1"]}, ("worker", 0), r"jobs among .*\['master'\]"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one 'chief'.*2"),
        ({"worker": ["a:1"]}, ("boss", 0), "`task_type`.*'boss'"),
        ({"worker": ["a:1"]}, ("ps", 0), r"cluster's jobs \['worker'\].*'ps'"),
        ({"worker": ["a:1"]}, ("worker", 1), r"`task_id`.*\[0\].*Received: 1"),
        ({"worker": ["a:1"]}, ("worker", None), "Received: None"),
    ],
)
def test_bad_tasks_are_refused(cluster, task, words):
    with pytest.raises(ValueError, match=words):
        validate_task(ClusterSpec(cluster), *task)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
@pytest.mark.parametrize("spec", [CHIEF, WORKERS])
def test_ranks_match_tensorflow(spec):
    from tensorflow.python.distribute import multi_worker_util as native

    for rank, task in enumerate(training_tasks(spec)):
        assert native.id_in_cluster(spec.as_dict(), *task) == rank
        assert native.worker_count(spec.as_dict(), task[0]) == len(training_tasks(spec))
        assert native.is_chief(spec.as_dict(), *task) == (rank == 0)
