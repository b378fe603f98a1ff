import keras
import pytest

from keras_strategy.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    UnionResolver,
)

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
SPEC = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}


def test_simple_returns_its_arguments():
    resolver = SimpleClusterResolver(
        ClusterSpec(SPEC), "a:1", "worker", 1, "google", {"GPU": 8}, "grpc"
    )
    assert resolver.cluster_spec() == ClusterSpec(SPEC)
    assert resolver.master() == "grpc://a:1"
    assert resolver.master("worker", 1) == "grpc://b:1"
    assert resolver.master("worker", 1, rpc_layer="other") == "other://b:1"
    assert resolver.master("worker") == "grpc://a:1"
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.environment == "google"
    assert resolver.num_accelerators("ps", 0) == {"GPU": 8}
    assert resolver.rpc_layer == "grpc"


def test_simple_defaults_and_setters():
    resolver = SimpleClusterResolver(ClusterSpec({}))
    assert resolver.master() == ""
    assert resolver.num_accelerators() == {}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None,) * 3
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "grpc"
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.rpc_layer == "grpc"


@on_tensorflow
def test_simple_takes_spec_of_tensorflow():
    import tensorflow as tf

    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": {1: "c:1"}})
    ours = SimpleClusterResolver(spec, task_type="worker", task_id=1)
    theirs = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="worker", task_id=1
    )
    assert ours.cluster_spec().as_dict() == theirs.cluster_spec().as_dict()
    assert ours.master("ps", 1) == theirs.master("ps", 1) == "c:1"


def test_simple_refuses_bad_arguments():
    with pytest.raises(TypeError, match="`cluster_spec`.*type dict"):
        SimpleClusterResolver(SPEC)
    with pytest.raises(TypeError, match="`master`.*Received: 7"):
        SimpleClusterResolver(ClusterSpec({}), master=7)
    with pytest.raises(ValueError, match="No task with index 5"):
        SimpleClusterResolver(ClusterSpec(SPEC)).master("worker", 5)


def simple(cluster, **kwargs):
    return SimpleClusterResolver(ClusterSpec(cluster), **kwargs)


def test_union_concatenates_lists():
    union = UnionResolver(
        simple({"worker": ["a:1", "b:1"]}), simple({"worker": ["c:1"], "ps": ["d:1"]})
    )
    assert union.cluster_spec().as_dict() == {
        "worker": ["a:1", "b:1", "c:1"],
        "ps": ["d:1"],
    }


@pytest.mark.parametrize("turned", [False, True])
def test_union_merges_by_index_where_one_has_gaps(turned):
    parts = [simple({"worker": ["a:1"]}), simple({"worker": {2: "c:1"}})]
    union = UnionResolver(*reversed(parts) if turned else parts)
    assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 2: "c:1"}}


def test_union_refuses_the_same_index_twice():
    union = UnionResolver(
        simple({"worker": ["a:1", "b:1"]}), simple({"worker": {1: "c:1"}})
    )
    with pytest.raises(KeyError, match=r"'worker'.*\[1\]"):
        union.cluster_spec()


def test_union_uses_first_resolver_for_the_rest():
    first = simple(
        SPEC,
        task_type="worker",
        task_id=1,
        environment="google",
        num_accelerators={"GPU": 2},
        rpc_layer="grpc",
        master="a:1",
    )
    union = UnionResolver(first, simple({}, task_type="ps", task_id=0))
    assert (union.task_type, union.task_id) == ("worker", 1)
    assert union.environment == "google"
    assert union.num_accelerators() == {"GPU": 2}
    assert union.rpc_layer == "grpc"
    assert union.master() == "grpc://a:1"


def test_union_accepts_zero_overrides():
    first = simple(SPEC, task_type="worker", task_id=1)
    union = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="grpc")
    assert (union.task_type, union.task_id) == ("ps", 0)
    assert union.master("worker", 0) == "grpc://a:1"
    union.task_id = 1
    assert union.task_id == 1


def test_union_of_empty_resolvers():
    class Bare(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    union = UnionResolver(Bare())
    assert (union.task_type, union.task_id, union.rpc_layer) == (None, None, None)
    assert union.environment == ""


def test_union_refuses_bad_arguments():
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="type dict"):
        UnionResolver({})
    with pytest.raises(ValueError, match="'task'"):
        UnionResolver(simple({}), task=1)


@on_tensorflow
@pytest.mark.parametrize("task", [(), ("worker", 1), ("ps", 0)])
@pytest.mark.parametrize("rpc_layer", [None, "grpc"])
def test_simple_and_union_match_tensorflow(task, rpc_layer):
    import tensorflow as tf

    native = tf.distribute.cluster_resolver
    arguments = {"master": "a:1", "task_type": "worker", "rpc_layer": rpc_layer}
    ours = SimpleClusterResolver(ClusterSpec(SPEC), **arguments)
    theirs = native.SimpleClusterResolver(tf.train.ClusterSpec(SPEC), **arguments)
    pairs = [
        (ours, theirs),
        (UnionResolver(ours, ours), native.UnionResolver(theirs, theirs)),
        (
            UnionResolver(ours, task_id=2, rpc_layer="x"),
            native.UnionResolver(theirs, task_id=2, rpc_layer="x"),
        ),
    ]
    for our, their in pairs:
        assert our.cluster_spec().as_dict() == their.cluster_spec().as_dict()
        assert our.master(*task) == their.master(*task)
        assert our.master(*task, rpc_layer="y") == their.master(*task, rpc_layer="y")
        for name in ("task_type", "task_id", "environment", "rpc_layer"):
            assert getattr(our, name) == getattr(their, name), name
        assert our.num_accelerators() == their.num_accelerators()
