"""Device names, and lists of devices that are refused."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.cluster_resolver import TFConfigClusterResolver
from keras_strategy.devices import canonical_device, resolve_devices


@pytest.mark.parametrize(
    "name",
    [
        "gpu:0",
        "GPU:0",
        "/gpu:0",
        "/device:GPU:0",
        "cuda:0",
        "cuda",
        "/job:localhost/replica:0/task:0/device:GPU:0",
    ],
)
def test_device_name_spellings(name):
    assert canonical_device(name) == "gpu:0"


@pytest.mark.parametrize("name", ["", "gpu:", "gpu:-1", "1", ":0", 3, None, "gpu:0:1"])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="kind and index"):
        canonical_device(name)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ([], "at least one device"),
        (["cpu:0", "cpu:9"], r"not available: \['cpu:9'\]"),
        (["cpu:0", "/device:CPU:0"], r"more than once: \['cpu:0'\]"),
        ("cpu:0", r"list of device names, such as \['cpu:0'\]"),
        (["cpu:0", "nonsense?"], "kind and index"),
    ],
)
def test_bad_device_lists_are_refused(devices, says):
    with pytest.raises(ValueError, match=says):
        ks.MirroredStrategy(devices)


def test_error_lists_available_devices():
    with pytest.raises(ValueError, match="cpu:0.*cpu:1.*cpu:2.*cpu:3"):
        ks.MirroredStrategy(["tpu:0"])


def test_mixed_kinds():
    with pytest.raises(ValueError, match="one kind"):
        resolve_devices(["cpu:0", "gpu:0"], ["cpu:0", "gpu:0"])


def test_one_device():
    with pytest.raises(ValueError, match="not available"):
        ks.OneDeviceStrategy("cpu:7")
    strategy = ks.OneDeviceStrategy("/cpu:1")
    assert strategy.extended.worker_devices == ("cpu:1",)
    assert strategy.num_replicas_in_sync == 1


def test_all_local_devices():
    strategy = ks.MirroredStrategy()
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.num_replicas_in_sync == 4
    assert strategy.cluster_resolver is None


def test_logical_devices_after_use_are_refused():
    ks.MirroredStrategy()
    with pytest.raises(RuntimeError, match="before"):
        ks.config.set_logical_devices("cpu", 3)
    ks.config.set_logical_devices("cpu", 4)  # what there is may be asked for again
    assert ks.MirroredStrategy().num_replicas_in_sync == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gpu", 2), "device_type='gpu'"),
        (("cpu", 0), "count=0"),
        (("cpu", True), "count=True"),
        (("cpu", "2"), "count='2'"),
    ],
)
def test_set_logical_devices_refuses_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        ks.config.set_logical_devices(*arguments)


def test_resolver_device_description():
    """Accelerators alone, and like TensorFlow where it can be asked."""
    found = TFConfigClusterResolver().num_accelerators()
    assert set(found) <= {"GPU", "TPU"}
    assert all(count > 0 for count in found.values())
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        native = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        assert found == dict(native.num_accelerators())
