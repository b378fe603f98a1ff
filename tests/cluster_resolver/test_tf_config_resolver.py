import json
import os
from unittest import mock

import keras
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keras_strategy.cluster_resolver import ClusterSpec, TFConfigClusterResolver

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


@pytest.fixture
def tf_config(monkeypatch):
    def set_to(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)
        return TFConfigClusterResolver()

    return set_to


def test_reads_the_cluster_and_the_task(tf_config):
    resolver = tf_config(CONFIG)
    assert resolver.cluster_spec() == ClusterSpec(CONFIG["cluster"])
    assert resolver.cluster_spec().jobs == ["chief", "worker", "ps"]
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.rpc_layer == "grpc"
    assert resolver.master() == "grpc://c:1"
    assert resolver.master("chief", 0, "other") == "other://a:1"
    assert resolver.environment is None


def test_arguments_override(tf_config):
    tf_config(CONFIG)
    resolver = TFConfigClusterResolver("chief", 0, "other", "google")
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolver.master() == "other://a:1"
    assert resolver.environment == "google"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", "0", "x"
    assert resolver.task_id == 0
    assert resolver.master() == "x://b:1"


def test_tf_config_is_read_on_each_call(tf_config):
    resolver = tf_config(CONFIG)
    tf_config({**CONFIG, "task": {"type": "chief", "index": 0}})
    assert resolver.task_type == "chief"


def test_without_a_cluster(tf_config):
    for resolver in (TFConfigClusterResolver(), tf_config(""), tf_config({})):
        assert not resolver.cluster_spec()
        assert (resolver.task_type, resolver.task_id) == (None, None)
        assert resolver.master() == ""


def test_one_task_needs_no_master(tf_config):
    assert tf_config({"cluster": {"worker": ["a:1"]}}).master() == ""


def test_session_master(tf_config):
    assert tf_config({**CONFIG, "session_master": "x"}).master() == "x"


def test_evaluator_may_be_outside_the_cluster(tf_config):
    resolver = tf_config({**CONFIG, "task": {"type": "evaluator", "index": 0}})
    assert resolver.task_type == "evaluator"
    assert "evaluator" not in resolver.cluster_spec().jobs


def test_string_indices(tf_config):
    resolver = tf_config(
        {"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": "1"}}
    )
    assert resolver.cluster_spec().as_dict() == {"worker": {1: "b:1"}}
    assert resolver.task_id == 1


def test_master_without_a_task(tf_config):
    resolver = tf_config({"cluster": CONFIG["cluster"]})
    with pytest.raises(RuntimeError, match='"task" of the environment variable TF_CO'):
        resolver.master()


@pytest.mark.parametrize(
    "value, place",
    [
        ("{", "valid JSON.*Received: {"),
        ("[1,", "valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", r"TF_CONFIG to be an object. Received: \[\]"),
        ("null", "TF_CONFIG to be an object"),
        ({"cluster": None}, "TF_CONFIG: cluster to be an object"),
        ({"cluster": ["a:1"]}, "TF_CONFIG: cluster to be an object"),
        ({"cluster": {"worker": "a:1"}}, "TF_CONFIG: .*job 'worker'.*'a:1'"),
        ({"cluster": {"worker": [1]}}, "TF_CONFIG: .*task 0 of 'worker'.*: 1"),
        ({"cluster": {"worker": ["a:1", ""]}}, r"TF_CONFIG: cluster.worker\[1\]"),
        (
            {"cluster": {"worker": {"x": "a:1"}}},
            "TF_CONFIG: .*job 'worker'.*'x'",
        ),
        (
            {"cluster": {"worker": {"1": "a", "01": "b"}}},
            "TF_CONFIG: .*'worker' once.*1 twice",
        ),
        ({"task": 7}, "TF_CONFIG: task to be an object. Received: 7"),
        ({"task": {"type": 7}}, "TF_CONFIG: task.type"),
        ({"task": {"type": None}}, "TF_CONFIG: task.type"),
        ({"task": {"index": "x"}}, "TF_CONFIG: task.index"),
        ({"task": {"index": -1}}, "TF_CONFIG: task.index.*Received: -1"),
        ({"task": {"index": 1.5}}, "TF_CONFIG: task.index"),
        ({"task": {"index": None}}, "TF_CONFIG: task.index"),
        (
            {**CONFIG, "task": {"type": "worker", "index": 2}},
            r"TF_CONFIG: task.index to be one of cluster.worker's indices \[0, 1\]",
        ),
        ({"rpc_layer": 1}, "TF_CONFIG: rpc_layer"),
        ({"session_master": []}, "TF_CONFIG: session_master"),
    ],
)
def test_bad_tf_config_is_refused(tf_config, value, place):
    with pytest.raises(ValueError, match=place):
        tf_config(value).cluster_spec()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
jobs = st.sampled_from(["chief", "worker", "ps", "evaluator", ""])
nearly_right = st.fixed_dictionaries(
    {},
    optional={
        "cluster": json_values
        | st.dictionaries(
            jobs,
            json_values
            | st.lists(st.text(max_size=4) | json_values, max_size=3)
            | st.dictionaries(
                st.sampled_from(["0", "1", "01", "x", "-1"]), st.text(max_size=3)
            ),
        ),
        "task": json_values
        | st.fixed_dictionaries(
            {},
            optional={
                "type": jobs | json_values,
                "index": st.integers(-2, 3) | json_values,
            },
        ),
        "rpc_layer": json_values,
        "session_master": json_values,
    },
)


@given(json_values | nearly_right)
@example({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
@settings(deadline=None, max_examples=200)
def test_any_json_gives_a_spec_or_a_named_error(value):
    with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(value)):
        resolver = TFConfigClusterResolver()
        try:
            spec = resolver.cluster_spec()
            task_type, task_id = resolver.task_type, resolver.task_id
        except ValueError as error:
            assert "TF_CONFIG" in str(error)
            assert "Received: " in str(error)
            return
    assert isinstance(spec, ClusterSpec)
    assert task_type is None or isinstance(task_type, str)
    assert task_id is None or task_id >= 0
    if task_type in spec.jobs and task_id is not None:
        assert spec.task_address(task_type, task_id)


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
@settings(deadline=None)
def test_any_text_gives_a_spec_or_a_named_error(text):
    with mock.patch.dict(os.environ, TF_CONFIG=text):
        try:
            TFConfigClusterResolver().cluster_spec()
        except ValueError as error:
            assert "TF_CONFIG" in str(error)


@on_tensorflow
@pytest.mark.parametrize(
    "config",
    [
        {},
        CONFIG,
        {**CONFIG, "session_master": "x"},
        {**CONFIG, "task": {"type": "ps", "index": "0"}},
        {**CONFIG, "task": {"type": "evaluator", "index": 0}},
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"worker": {"3": "a:1", "1": "b:1"}}},
    ],
)
@pytest.mark.parametrize("overrides", [{}, {"task_type": "chief", "task_id": 0}])
def test_matches_tensorflow(tf_config, config, overrides):
    import tensorflow as tf

    tf_config(config)
    ours = TFConfigClusterResolver(**overrides)
    theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver(**overrides)
    assert ours.cluster_spec().as_dict() == theirs.cluster_spec().as_dict()
    for name in ("task_type", "task_id", "rpc_layer", "environment"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for task in ((), ("chief", 0), ("worker", 1)):
        try:
            expected = theirs.master(*task)
        except ValueError:
            with pytest.raises((ValueError, RuntimeError)):
                ours.master(*task)
        else:
            assert ours.master(*task) == expected
