import sys
import types

import pytest

from keras_strategy.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)


@pytest.fixture
def devices(monkeypatch):
    """Puts a backend with the given devices in the place of the one in use."""

    def have(*names):
        module = types.ModuleType("keras_strategy.core.registry")
        backend = types.SimpleNamespace(list_devices=lambda device_type=None: names)
        module.get_engine = lambda: backend
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return have


@pytest.mark.parametrize(
    "names, expected",
    [
        ((), {}),
        (("cpu:0",), {}),
        (("cpu:0", "cpu:1"), {}),
        (("gpu:0", "gpu:1"), {"GPU": 2}),
        (("cpu:0", "gpu:0"), {"GPU": 1}),
        (("tpu:0", "tpu:1"), {"TPU": 2}),
    ],
)
def test_active_backend_is_queried(devices, names, expected):
    devices(*names)
    resolver = TFConfigClusterResolver()
    assert resolver.num_accelerators() == expected
    assert resolver.num_accelerators("worker", 3) == expected
    assert UnionResolver(resolver).num_accelerators() == expected


def test_explicit_count_is_not_queried(devices):
    devices("gpu:0")
    resolver = SimpleClusterResolver(ClusterSpec({}), num_accelerators={"GPU": 8})
    assert resolver.num_accelerators() == {"GPU": 8}


def test_tpu_cores_are_counted(devices):
    devices("tpu:0", "tpu:1", "tpu:2", "tpu:3")
    resolver = TPUClusterResolver("grpc://10.0.0.1:1,grpc://10.0.0.2:1")
    assert resolver.num_accelerators() == {"TPU": 4}
    metadata = resolver.get_tpu_system_metadata()
    assert (metadata.num_cores, metadata.num_hosts) == (8, 2)
    assert metadata.num_of_cores_per_host == 4
    assert metadata.devices == ("tpu:0", "tpu:1", "tpu:2", "tpu:3")
    assert TPUClusterResolver("local").get_tpu_system_metadata().num_hosts == 1
    devices("cpu:0")
    assert resolver.num_accelerators() == {"TPU": 0}
