import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_strategy.cluster_resolver import ClusterSpec
from keras_strategy.cluster_resolver.cluster_spec import split_host_port

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.train.ClusterSpec"
)

addresses = st.text("abc0123456789.:", min_size=1, max_size=9)
clusters = st.dictionaries(
    st.sampled_from(["chief", "worker", "ps", "evaluator"]),
    st.lists(addresses, max_size=4)
    | st.dictionaries(st.integers(0, 9), addresses, max_size=4),
)


def test_spec_from_lists():
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ("c:1",)})
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "b:1"
    assert spec.job_tasks("ps") == ["c:1"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    assert repr(spec) == "ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})"


def test_spec_with_gaps():
    spec = ClusterSpec({"worker": {3: "d:1", "1": "b:1"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert spec.as_dict() == {"worker": {1: "b:1", 3: "d:1"}}


def test_dense_dict_becomes_a_list():
    assert ClusterSpec({"w": {1: "b", 0: "a"}}).as_dict() == {"w": ["a", "b"]}


def test_empty_spec():
    assert not ClusterSpec({})
    assert ClusterSpec({"worker": []}).as_dict() == {"worker": {}}
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []


def test_specs_with_equal_tasks_are_equal():
    spec = ClusterSpec({"worker": ["a:1"]})
    assert spec == ClusterSpec({"worker": {0: "a:1"}})
    assert spec == {"worker": {0: "a:1"}}
    assert spec != ClusterSpec({"worker": ["b:1"]})
    assert spec != ClusterSpec({})
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)


def test_copy_is_independent():
    given_tasks = ["a:1"]
    spec = ClusterSpec({"worker": given_tasks})
    given_tasks.append("b:1")
    spec.as_dict()["worker"].append("c:1")
    assert ClusterSpec(spec) == spec == {"worker": {0: "a:1"}}


def test_foreign_specs_are_converted():
    class Other:
        def as_dict(self):
            return {"worker": ["a:1"]}

    assert ClusterSpec(Other()) == ClusterSpec({"worker": ["a:1"]})


@pytest.mark.parametrize(
    "cluster, error, words",
    [
        (None, TypeError, "`cluster`.*Received: None"),
        ([], TypeError, "`cluster`"),
        ({"worker": "a:1"}, TypeError, "job 'worker'.*Received: 'a:1'"),
        ({"worker": None}, TypeError, "job 'worker'"),
        ({"worker": ["a:1", None]}, TypeError, "task 1 of 'worker'.*Received: None"),
        ({"worker": [7]}, TypeError, "task 0 of 'worker'"),
        ({7: ["a:1"]}, TypeError, "job name.*Received: 7"),
        ({"worker": {"x": "a:1"}}, ValueError, "index of job 'worker'.*'x'"),
        ({"worker": {-1: "a:1"}}, ValueError, "Received: -1"),
        ({"worker": {True: "a:1"}}, ValueError, "Received: True"),
        ({"worker": {1: "a:1", "1": "b:1"}}, ValueError, "1 twice"),
    ],
)
def test_bad_specs_are_refused(cluster, error, words):
    with pytest.raises(error, match=words):
        ClusterSpec(cluster)


def test_unknown_jobs_and_tasks_raise():
    spec = ClusterSpec({"worker": {1: "a:1"}})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=r"No such job.*'ps'.*\['worker'\]"):
            ask("ps")
    with pytest.raises(ValueError, match="No such job"):
        spec.task_address("ps", 0)
    with pytest.raises(ValueError, match=r"index 0 in job 'worker'.*\[1\]"):
        spec.task_address("worker", 0)


@given(clusters)
@settings(deadline=None)
def test_dict_round_trip(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec.as_dict()) == spec
    for job in spec.jobs:
        known = [a for a in spec.job_tasks(job) if a is not None]
        assert len(known) == spec.num_tasks(job)


@on_tensorflow
@given(clusters)
@settings(deadline=None, max_examples=50)
def test_matches_tensorflow(cluster):
    import tensorflow as tf

    ours, theirs = ClusterSpec(cluster), tf.train.ClusterSpec(cluster)
    assert ours.as_dict() == theirs.as_dict()
    assert ours.jobs == theirs.jobs
    assert bool(ours) == bool(theirs)
    assert repr(ours) == repr(theirs)
    assert ClusterSpec(theirs) == ours
    assert ours.as_cluster_def() == theirs.as_cluster_def()
    assert ClusterSpec(theirs.as_cluster_def()) == ours
    for job in ours.jobs:
        assert ours.num_tasks(job) == theirs.num_tasks(job)
        assert ours.task_indices(job) == theirs.task_indices(job)
        if ours.num_tasks(job):  # TensorFlow fails on none
            assert ours.job_tasks(job) == theirs.job_tasks(job)
        for index in ours.task_indices(job):
            assert ours.task_address(job, index) == theirs.task_address(job, index)


@pytest.mark.parametrize(
    ("address", "parts"),
    {
        "host:80": ("host", "80"),
        "host": ("host", None),
        "host:": ("host", ""),
        "[::1]:80": ("::1", "80"),
        "[::1]": ("::1", None),
        "fe80::1": ("fe80::1", None),
        "[::1]:": ("::1", ""),
        ":80": ("", "80"),
        "": ("", None),
    }.items(),
)
def test_split_host_port_reads_names_and_ipv6(address, parts):
    assert split_host_port(address) == parts
