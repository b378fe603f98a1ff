"""The coordinator of JAX and torch: tf.distribute's behaviour, on Dask's workers."""

import json
import pathlib

import keras
import pytest

import keras_strategy as ks
from tests.backends import coordinator_program
from tests.backends.test_parameter_servers import ROOT, check_shared

pytestmark = [
    pytest.mark.full(keep=1),
    pytest.mark.skipif(
        keras.backend.backend() == "tensorflow",
        reason="it is tf.distribute's own there, see test_parameter_servers.py",
    ),
]


@pytest.mark.full(keep_on="jax")
def test_coordinator_schedules_functions_on_workers(program):
    pytest.importorskip("distributed")
    end = program(pathlib.Path(coordinator_program.__file__), PYTHONPATH=str(ROOT))
    assert end.exit_status == 0, end.output
    # Python may tell, at the end, what the worker that was killed has left open.
    (line,) = [line for line in end.output.splitlines() if line.startswith("{")]
    told = json.loads(line)
    check_shared(told, 200)
    assert "new futures" not in end.output, end.output
    assert told["listens"] == ["127.0.0.1"] and told["strangers"] == ["404", "nothing"]
    assert told["error"] == told["fetched"] == "ValueError: the disk is full"
    # A value's own error is the coordinator's too: the next call raises it, once.
    assert told["scheduled"] == told["error"] and told["again"] == 3
    assert told["arguments"] == [[3.0, 5.0], True, "ndarray"] and told["get"]
    assert told["chained"] == [6.0, 6.0]
    assert "uses Sequential" in told["model"] and "TypeError" in told["model"]
    assert "uses Variable" in told["variable"]
    assert told["lock"].startswith("TypeError: The function or arguments of <lambda>")
    assert told["own"] == [1] and told["page"] == [12, True]
    assert "the iterator of this worker is exhausted" in told["ended"]
    assert told["cluster"].startswith("ValueError: Argument `cluster` must be omitted")


def test_coordinator_refuses_bad_arguments():
    strategy = ks.OneDeviceStrategy("cpu:0")
    coordinator = ks.coordinator.ClusterCoordinator
    with pytest.raises(TypeError, match="`strategy` must be a strategy.*'x'"):
        coordinator("x")
    with pytest.raises(ValueError, match="at least 1 worker.*cluster=0"):
        coordinator(strategy, 0)
    with pytest.raises(TypeError, match="a number of workers.*cluster=True"):
        coordinator(strategy, True)
    with pytest.raises(TypeError, match="`values` must be a list or tuple.*3"):
        ks.coordinator.PerWorkerValue(3)
    with pytest.raises(ValueError, match="1 values, and none for worker 1"):
        ks.coordinator.PerWorkerValue([0]).of_worker(1)
    with pytest.raises(RuntimeError, match="outside of one"):
        ks.coordinator.experimental_get_current_worker_index()
    pytest.importorskip("distributed")
    with pytest.raises(ValueError, match="starts with 'tls://'.*tcp://10.0.0.1"):
        coordinator(strategy, "tcp://10.0.0.1:8786")
    with pytest.raises(ValueError, match="certificates, but has none.*tls://10.0"):
        coordinator(strategy, "tls://10.0.0.1:8786")
