import keras
import pytest

from keras_strategy.cluster_resolver import ClusterSpec, cluster_spec

CHIEF = ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"], "ps": ["d:1"]})
WORKERS = ClusterSpec({"worker": ["b:1", "c:1"], "evaluator": ["e:1"]})


def test_the_chief_comes_first_and_writes():
    assert cluster_spec.training_addresses(CHIEF) == ["a:1", "b:1", "c:1"]
    assert cluster_spec.task_rank(CHIEF, "chief", 0) == 0
    assert cluster_spec.task_rank(CHIEF, "worker", 1) == 2
    assert cluster_spec.is_chief(CHIEF, "chief", 0)
    assert not cluster_spec.is_chief(CHIEF, "worker", 0)
    assert cluster_spec.worker_count(CHIEF, "worker") == 3


def test_without_a_chief_worker_0_writes():
    assert cluster_spec.is_chief(WORKERS, "worker", 0)
    assert not cluster_spec.is_chief(WORKERS, "worker", 1)
    assert cluster_spec.task_rank(WORKERS, "worker", 1) == 1
    assert cluster_spec.worker_count(WORKERS, "worker") == 2


def test_servers_take_no_part():
    assert not cluster_spec.is_chief(CHIEF, "ps", 0)
    with pytest.raises(ValueError, match="that trains.*'ps'"):
        cluster_spec.task_rank(CHIEF, "ps", 0)
    with pytest.raises(ValueError, match="'ps'"):
        cluster_spec.worker_count(CHIEF, "ps")


@pytest.mark.parametrize("spec", [CHIEF, WORKERS])
def test_the_evaluator_stands_alone(spec):
    assert cluster_spec.is_chief(spec, "evaluator", 0)
    assert cluster_spec.worker_count(spec, "evaluator") == 1
    assert cluster_spec.task_rank(spec, "evaluator", 0) == 0
    assert "e:1" not in cluster_spec.training_addresses(spec)


def test_ranks_are_dense_where_indices_have_gaps():
    spec = ClusterSpec({"worker": {1: "b:1", 5: "f:1"}})
    assert [cluster_spec.task_rank(spec, "worker", index) for index in (1, 5)] == [0, 1]


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
def test_refused(cluster, task, words):
    with pytest.raises(ValueError, match=words):
        cluster_spec.validate_task(ClusterSpec(cluster), *task)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
@pytest.mark.parametrize("spec", [CHIEF, WORKERS])
@pytest.mark.parametrize(
    "task", [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
)
def test_like_tensorflow(spec, task):
    from tensorflow.python.distribute import multi_worker_util as native

    def answer(function, *args):
        try:
            return function(*args)
        except ValueError:
            return ValueError

    theirs = spec.as_dict()
    expected = answer(native.is_chief, theirs, *task)
    assert answer(cluster_spec.is_chief, spec, *task) == expected
    assert answer(cluster_spec.task_rank, spec, *task) == answer(
        native.id_in_cluster, theirs, *task
    )
    if task[0] in spec.jobs:
        expected = answer(native.worker_count, theirs, task[0])
        assert answer(cluster_spec.worker_count, spec, task[0]) == expected
