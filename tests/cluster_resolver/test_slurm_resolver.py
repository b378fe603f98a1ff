import logging
import os
import stat

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_strategy.cluster_resolver import SlurmClusterResolver, slurm
from keras_strategy.cluster_resolver.slurm import expand_hostlist, expand_tasks_per_node

on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="asks tf.distribute"
)
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "t[02-03],t01",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.fixture
def env(monkeypatch, tmp_path):
    # No nvidia-smi but the one a test makes.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "_previous_devices", {})

    def set_to(**changes):
        for name, value in {**STEP, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    set_to()
    return set_to


def test_tasks_follow_the_node_list(env):
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["t02:8888", "t02:8889", "t03:8888", "t03:8889", "t01:8888"]
    }
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "grpc://t03:8889"
    assert resolver.master("worker", 0, "x") == "x://t02:8888"
    assert resolver.num_accelerators() == {"GPU": 0}


def test_job_identity_is_of_the_step(env):
    env(SLURM_JOB_ID="70", SLURM_STEP_ID="0")
    first = SlurmClusterResolver().job_identity
    env(SLURM_STEP_ID="1", SLURM_PROCID="2")
    second = SlurmClusterResolver().job_identity
    assert first == "slurm 70.0" and second == "slurm 70.1"


def test_jobs_are_assigned_by_name(env):
    resolver = SlurmClusterResolver({"worker": 4, "ps": 1}, port_base=1000)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["t02:1000"],
        "worker": ["t02:1001", "t03:1000", "t03:1001", "t01:1000"],
    }
    assert resolver.get_task_info() == ("worker", 2)


def test_tasks_per_node(env):
    env(SLURM_STEP_TASKS_PER_NODE=None, SLURM_STEP_NODELIST="t[1-2]")
    resolver = SlurmClusterResolver({"worker": 4}, tasks_per_node=2)
    assert resolver.cluster_spec().num_tasks("worker") == 4
    env(SLURM_STEP_TASKS_PER_NODE=None, SLURM_STEP_NODELIST=None)
    resolver = SlurmClusterResolver({"worker": 4}, tasks_per_node={"b": 1, "a": 3})
    assert resolver.cluster_spec().task_address("worker", 0) == "b:8888"


def test_ranks_in_other_order_are_refused(env):
    env(SLURM_LOCALID="1")
    assert SlurmClusterResolver().task_id == 3
    env(SLURM_LOCALID="0")
    with pytest.raises(RuntimeError, match="SLURM_LOCALID=0.*--distribution=block"):
        SlurmClusterResolver()


def test_each_task_gets_its_gpus(env):
    for rank, gpus in enumerate(["0,1", "2,3", "0,1", "2,3", "0,1"]):
        env(SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES=None)
        resolver = SlurmClusterResolver(gpus_per_node=4)
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
        assert resolver.num_accelerators() == {"GPU": 2}


def test_gpus_per_task(env):
    resolver = SlurmClusterResolver(gpus_per_node=4, gpus_per_task=1)
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert resolver.num_accelerators() == {"GPU": 1}


def test_granted_gpus_are_divided(env):
    env(CUDA_VISIBLE_DEVICES="6,7")
    SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_second_resolver_divides_the_same_gpus(env):
    env(CUDA_VISIBLE_DEVICES="6,7")
    for _ in range(3):
        resolver = SlurmClusterResolver()
        resolver.cluster_spec()
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
        assert resolver.num_accelerators() == {"GPU": 1}


def test_auto_set_gpu_can_be_off(env):
    SlurmClusterResolver(gpus_per_node=4, auto_set_gpu=False).cluster_spec()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_without_gpus_nothing_is_set(env):
    SlurmClusterResolver().cluster_spec()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_too_few_gpus_are_not_divided(env, caplog):
    env(CUDA_VISIBLE_DEVICES="7")
    with caplog.at_level(logging.WARNING, "keras_strategy"):
        resolver = SlurmClusterResolver()
    assert "2 tasks on one node see 1 GPU(s)" in caplog.text
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_task_with_zero_gpus(env):
    SlurmClusterResolver(gpus_per_node=2, gpus_per_task=0).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    "binding, gpus",
    [
        ({"SLURM_GPUS_PER_TASK": "2"}, "0,1"),
        ({"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=2"}, "0,1"),
        ({"SLURM_GPU_BIND": "single:1"}, "0,1"),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GPU_BIND": "none"}, "1"),
        ({"SLURM_TRES_PER_TASK": "cpu=2"}, "1"),
    ],
)
def test_gpus_bound_to_the_task(env, binding, gpus):
    env(CUDA_VISIBLE_DEVICES="0,1", **binding)
    resolver = SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
    assert resolver.num_accelerators() == {"GPU": len(gpus.split(","))}


def nvidia_smi(folder, text):
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def test_gpus_from_nvidia_smi(env, tmp_path):
    nvidia_smi(tmp_path, "echo 'GPU 0: A'; echo 'GPU 1: A'; echo '  MIG 1'")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 1}


def test_failing_nvidia_smi_is_ignored(env, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, "echo 'GPU 0: A'; exit 9")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 0}
    monkeypatch.setattr(slurm, "_NVIDIA_SMI_SECONDS", 0.2)
    nvidia_smi(tmp_path, "exec /bin/sleep 20")
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 0}


@pytest.mark.parametrize("missing", STEP)
def test_outside_a_job_step(env, missing):
    env(**{missing: None})
    with pytest.raises(RuntimeError, match=f"{missing} not found.*srun"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    "changes, arguments, error, words",
    [
        ({"SLURM_PROCID": "x"}, {}, ValueError, "SLURM_PROCID.*'x'"),
        ({"SLURM_PROCID": "5"}, {}, RuntimeError, "SLURM_PROCID.*5 tasks.*Received: 5"),
        (
            {"SLURM_STEP_NODELIST": "t[1"},
            {},
            ValueError,
            r"SLURM_STEP_NODELIST.*'t\[1'",
        ),
        ({"SLURM_STEP_NODELIST": "t1"}, {}, ValueError, "TASKS_PER_NODE.*1 nodes"),
        ({"SLURM_STEP_NODELIST": "t1,t2,t1"}, {}, ValueError, "every node once"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, {}, ValueError, "TASKS_PER_NODE.*2.3"),
        ({}, {"jobs": {"worker": 4}}, RuntimeError, "5 tasks. Received: 4 tasks"),
        ({}, {"gpus_per_node": 1, "gpus_per_task": 1}, RuntimeError, "more GPUs"),
        ({}, {"tasks_per_node": 0}, ValueError, "tasks_per_node"),
        ({}, {"tasks_per_node": {}}, ValueError, "tasks_per_node"),
        ({}, {"port_base": 0}, ValueError, "port_base"),
    ],
)
def test_bad_variables_are_refused(env, changes, arguments, error, words):
    env(**changes)
    with pytest.raises(error, match=words):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", ["n1"]),
        (
            "n[1-2],m5,o[3-4,6,7-9]",
            ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"],
        ),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("b,a", ["b", "a"]),
        ("n-1-[2-3]-x", ["n-1-2-x", "n-1-3-x"]),
    ],
)
def test_host_lists_are_expanded(text, hosts):
    assert expand_hostlist(text) == hosts


def test_huge_expressions_are_refused():
    for text in ("n[0-999999999999]", "n[0-99999][0-99999]", "n[" + "9" * 5000 + "]"):
        try:
            assert len(expand_hostlist(text)) <= 100_001
        except ValueError as error:
            assert "SLURM_STEP_NODELIST" in str(error)
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node("1(x99999999999)")
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node(",".join(["1(x99999)"] * 99))


@st.composite
def host_parts(draw):
    """A host list's text, and its hosts as written out by hand."""
    texts, hosts = [], []
    for number in range(draw(st.integers(1, 4))):
        # Each part has a prefix of its own, so that no host comes twice.
        prefix = draw(st.sampled_from(["n", "gpu-", "a.b-"])) + "xyzw"[number]
        if draw(st.booleans()):
            texts.append(prefix)
            hosts.append(prefix)
            continue
        ranges, first = [], 0
        width = draw(st.integers(1, 4))
        for _ in range(draw(st.integers(1, 3))):
            first += draw(st.integers(1, 30))
            last = first + draw(st.integers(0, 12))
            one = last == first and draw(st.booleans())
            bounds = [f"{first:0{width}}"] + ([] if one else [f"{last:0{width}}"])
            ranges.append("-".join(bounds))
            hosts += [f"{prefix}{i:0{width}}" for i in range(first, last + 1)]
            first = last
        texts.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(texts), hosts


@given(host_parts())
@settings(deadline=None)
def test_any_host_list_is_expanded_in_order(parts):
    text, hosts = parts
    assert expand_hostlist(text) == hosts


@given(st.text("n1[],-0x( )", max_size=12) | st.text(max_size=6))
@settings(deadline=None, max_examples=200)
def test_any_text_gives_tasks_or_a_named_error(text):
    try:
        assert all(isinstance(host, str) for host in expand_hostlist(text))
    except ValueError as error:
        assert "SLURM_STEP_NODELIST" in str(error)
    try:
        assert all(count > 0 for count in expand_tasks_per_node(text))
    except ValueError as error:
        assert "SLURM_STEP_TASKS_PER_NODE" in str(error)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1))
@settings(deadline=None)
def test_any_task_counts_are_parsed(parts):
    text = ",".join(f"{n}(x{r})" if r > 1 else str(n) for n, r in parts)
    assert expand_tasks_per_node(text) == [n for n, r in parts for _ in range(r)]


@on_tensorflow
@given(host_parts())
@settings(deadline=None, max_examples=50)
def test_host_lists_match_tensorflow(parts):
    from tensorflow.python.distribute.cluster_resolver import (
        slurm_cluster_resolver as native,
    )

    assert expand_hostlist(parts[0]) == native.expand_hostlist(parts[0])
    for text in ("3(x2),2,1", "1", "4(x3)"):
        assert expand_tasks_per_node(text) == native.expand_tasks_per_node(text)


@on_tensorflow
@pytest.mark.parametrize("rank", range(5))
@pytest.mark.parametrize("jobs", [None, {"ps": 1, "worker": 4}])
def test_matches_tensorflow(env, rank, jobs):
    import tensorflow as tf

    # TensorFlow sorts the nodes by name, so these come sorted.
    env(SLURM_STEP_NODELIST="t[1-3]", SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES=None)
    arguments = {"jobs": jobs, "gpus_per_node": 4, "gpus_per_task": 2}
    ours = SlurmClusterResolver(**arguments)
    theirs = tf.distribute.cluster_resolver.SlurmClusterResolver(**arguments)
    expected = theirs.cluster_spec().as_dict()
    gpus = os.environ.pop("CUDA_VISIBLE_DEVICES")
    assert ours.cluster_spec().as_dict() == expected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus
    assert ours.get_task_info() == theirs.get_task_info()
    assert ours.master() == theirs.master()
    assert ours.num_accelerators() == theirs.num_accelerators()
