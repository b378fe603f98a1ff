"""The names and signatures of tf.distribute.cluster_resolver, kept as data."""

import enum
import inspect

import pytest

from keras_strategy import cluster_resolver

MASTER = "(self, task_type=None, task_id=None, rpc_layer=None)"
ACCELERATORS = "(self, task_type=None, task_id=None, config_proto=None)"
COMMON = {
    "cluster_spec": "(self)",
    "environment": "property",
    "master": MASTER,
    "num_accelerators": ACCELERATORS,
    "task_id": "settable",
    "task_type": "settable",
}
WITH_RPC_LAYER = {**COMMON, "rpc_layer": "settable"}

API = {
    "ClusterResolver": COMMON,
    "GCEClusterResolver": {
        **WITH_RPC_LAYER,
        "__init__": "(self, project, zone, instance_group, port, task_type='worker', "
        "task_id=0, rpc_layer='grpc', credentials='default', service=None)",
    },
    "KubernetesClusterResolver": {
        **COMMON,
        "__init__": "(self, job_to_label_mapping=None, tf_server_port=8470, "
        "rpc_layer='grpc', override_client=None, executable_location="
        "<KubernetesExecutableLocation.WITHIN_CLUSTER: 0>)",
    },
    "SageMakerClusterResolver": {
        **WITH_RPC_LAYER,
        "__init__": "(self, port=2223, task_type=None, task_id=None, rpc_layer=None, "
        "environment=None)",
    },
    "SimpleClusterResolver": {
        **WITH_RPC_LAYER,
        "__init__": "(self, cluster_spec, master='', task_type=None, task_id=None, "
        "environment='', num_accelerators=None, rpc_layer=None)",
    },
    "SlurmClusterResolver": {
        **COMMON,
        "__init__": "(self, jobs=None, port_base=8888, gpus_per_node=None, "
        "gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, "
        "rpc_layer='grpc')",
        "get_task_info": "(self)",
    },
    "TFConfigClusterResolver": {
        **WITH_RPC_LAYER,
        "__init__": "(self, task_type=None, task_id=None, rpc_layer=None, "
        "environment=None)",
    },
    "TPUClusterResolver": {
        **COMMON,
        "__init__": "(self, tpu=None, zone=None, project=None, job_name='worker', "
        "coordinator_name=None, coordinator_address=None, credentials='default', "
        "service=None, discovery_url=None)",
        "__enter__": "(self)",
        "connect": "static (tpu=None, zone=None, project=None)",
        "get_coordination_service_leader": "(self)",
        "get_job_name": "(self)",
        "get_master": "(self)",
        "get_tpu_system_metadata": "(self)",
    },
    "UnionResolver": {**WITH_RPC_LAYER, "__init__": "(self, *args, **kwargs)"},
}
OURS = {
    "ClusterSpec": {
        "__init__": "(self, cluster)",
        "as_dict": "(self)",
        "jobs": "property",
        "num_tasks": "(self, job_name)",
        "task_indices": "(self, job_name)",
        "task_address": "(self, job_name, task_index)",
        "job_tasks": "(self, job_name)",
    },
    "TorchrunClusterResolver": WITH_RPC_LAYER,
    "MPIClusterResolver": WITH_RPC_LAYER,
}


def described(owner, name):
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        return "settable" if member.fset else "property"
    static = isinstance(member, staticmethod)
    signature = inspect.signature(member.__func__ if static else member)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(
        signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    )
    return f"static {text}" if static else text


@pytest.mark.parametrize(
    "owner, member, expected",
    [
        (owner, member, expected)
        for owner, members in {**API, **OURS}.items()
        for member, expected in members.items()
    ],
)
def test_signatures_match_tensorflow(owner, member, expected):
    assert described(getattr(cluster_resolver, owner), member) == expected


def test_executable_location():
    location = cluster_resolver.KubernetesExecutableLocation
    assert issubclass(location, enum.Enum)
    assert [(m.name, m.value) for m in location] == [
        ("WITHIN_CLUSTER", 0),
        ("OFF_CLUSTER", 1),
    ]


def test_public_names_are_documented():
    assert set(cluster_resolver.__all__) == {
        *API,
        *OURS,
        "KubernetesExecutableLocation",
        "detect",
    }
    for name in cluster_resolver.__all__:
        assert "Example:\n" in inspect.getdoc(getattr(cluster_resolver, name)), name


@pytest.mark.parametrize(
    "name", [n for n in (*API, *OURS) if n not in ("ClusterResolver", "ClusterSpec")]
)
def test_resolvers_subclass_the_base(name):
    resolver = getattr(cluster_resolver, name)
    assert issubclass(resolver, cluster_resolver.ClusterResolver)


def test_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        cluster_resolver.ClusterResolver()
