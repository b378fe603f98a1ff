"""A TPU of several hosts: one mesh over the cores of all, the weights of one device."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner, simulated_tpu
from tests.distributed import jobs, local_rows_jobs, sharding_jobs
from tests.distributed.test_training import equal

MESH = (2, 2, 1, 2)
# Of all dense layers here the rows of the kernel can be halved.
LAYOUTS = {"kernel": (2, 1)}
FITTED = {"rows": 29, "batch_size": 8}


def strategy_of(layout_map: Any = None, **kwargs: Any) -> ks.TPUStrategy:
    """Two replicas on each host, of two cores each."""
    kwargs = {"devices_per_replica": 2, "layout_map": layout_map, **kwargs}
    hosts = ks.cluster_resolver.TFConfigClusterResolver()
    return ks.TPUStrategy(simulated_tpu(MESH, hosts), **kwargs)


def on_hosts(folder: str) -> dict[str, Any]:
    """Trains with and without layouts of weights.

    Args:
        folder: Where files go.
    """
    result = {"topology": _topology()}
    jobs.make_strategy = functools.partial(strategy_of, LAYOUTS)
    result["fitted"] = jobs.fit_arrays(**FITTED)
    result["looped"] = jobs.custom_loop()
    result["shared"] = sharding_jobs.train("parameters", folder)
    result["factors"] = of_factors()
    jobs.make_strategy = strategy_of
    result["own"] = local_rows_jobs.of_tables(["equal"], 2)
    result["refused"] = _refused()
    return result


def _topology() -> list:
    """Topology of a TPU whose hosts exchange the positions of their cores."""
    resolver = ks.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_id is not None
    engine: Any = get_engine()
    known = engine.tpu_coordinates
    engine.tpu_coordinates = lambda: [
        (4, 2 + resolver.task_id, 0, core) for core in (0, 1)
    ]
    try:
        found = ks.tpu.experimental.initialize_tpu_system(resolver)
    finally:
        engine.tpu_coordinates = known
    return [found.mesh_shape.tolist(), found.device_coordinates.tolist()]


def _refused() -> list[str]:
    """Return the errors of replicas that the hosts cannot have."""
    resolver = strategy_of().cluster_resolver
    topology = ks.tpu.experimental.initialize_tpu_system(resolver)
    build = ks.tpu.experimental.DeviceAssignment.build
    across = build(topology, computation_shape=[2, 1, 1, 1], num_replicas=4)
    cores = build(topology, num_replicas=8).core_assignment
    mixed = ks.tpu.experimental.DeviceAssignment(topology, np.roll(cores, 1, axis=0))
    said = []
    for kwargs in (
        {"devices_per_replica": 8},
        {"devices_per_replica": None, "experimental_device_assignment": across},
        {"devices_per_replica": None, "experimental_device_assignment": mixed},
        {"layout_map": {"kernel": (1, 2 if resolver.task_id else 1)}},
    ):
        try:
            strategy_of(**kwargs)
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def of_factors(alone: bool = False) -> dict[str, Any]:
    """Trains where the replicas divide no dimension of some weights.

    Args:
        alone: Whether on one device, as the reference.
    """
    strategy: Any = ks.OneDeviceStrategy("cpu:0")
    if not alone:
        strategy = strategy_of({"split": (1, 2)}, shard="parameters")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((10,)),
                layers.Dense(6, "tanh", use_bias=False, name="apart"),
                layers.Dense(10, "tanh", use_bias=False, name="split"),
                layers.Dense(5, use_bias=False, name="few"),
            ]
        )
        model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.1), "mse")
    x = np.random.RandomState(0).randn(29, 10).astype("float32")
    model.fit(x, x[:, :5], batch_size=12, verbose=0)

    def step(x):
        def loss():
            return ks.compute_average_loss(keras.ops.mean((model(x) - 1) ** 2, -1))

        _, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)

    for batch in strategy.experimental_distribute_dataset([x[:12], x[12:24]]):
        strategy.run(step, (batch,))
    state = [*model.variables, *model.optimizer.variables]
    return {
        "trained": [variable.numpy() for variable in state],
        "lies": {v.path: _lies(v.value) for v in state if len(v.shape) == 2},
    }


def _lies(array: Any) -> tuple[tuple[int, ...], int]:
    """The shape of an array's parts, and how many different ones there are."""
    parts = array.sharding.devices_indices_map(array.shape).values()
    return array.sharding.shard_shape(array.shape), len(set(map(str, parts)))


pytestmark = pytest.mark.full


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="TPUStrategy is there on JAX"
)
def test_two_hosts_equal_one_device(starter, tmp_path):
    with WorkerRunner(2, 4, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(on_hosts, str(tmp_path))
    fitted = jobs.fit_arrays(alone=True, **FITTED)
    looped = jobs.custom_loop(alone=True)
    shared = sharding_jobs.train(None, str(tmp_path), alone=True)["fitted"]
    factors = of_factors(alone=True)["trained"]
    (own,) = local_rows_jobs.of_tables(["equal"], 2, alone=True)
    for rank, result in enumerate(results):
        assert result["topology"] == [
            [1, 2, 1, 2],
            [[[0, y, 0, core] for core in (0, 1)] for y in (0, 1)],
        ]
        assert equal(result["fitted"], fitted, 2e-5)
        assert equal(result["looped"], looped, 2e-5)
        found = result["shared"]
        assert equal(found["fitted"], shared, 2e-5)
        for a, b in zip(found["fitted"], found["loaded"], strict=True):
            np.testing.assert_array_equal(a, b)
        assert found["apart"] == 0
        assert found["loss"] == results[0]["shared"]["loss"]
        # Of kernels of 72 and 12 the logical devices have halves. Besides, 4 replicas
        # share the 12 columns of the first one, and the bias of 12; the 6 rows that are
        # left of the other one can be halved.
        assert found["bytes"].parameters == (4 * (9 + 3 + 3 + 1),) * 2
        assert equal(result["factors"]["trained"], factors, 2e-5)
        # Kernels of (10, 6) in 2 by 2 parts, of (6, 10) in 2 of the halves that the
        # logical devices have, and of (10, 5) in 2.
        parts = {"apart": ((5, 3), 4), "split": ((3, 5), 4), "few": ((5, 5), 2)}
        for path, lies in result["factors"]["lies"].items():
            assert lies == next(parts[name] for name in parts if name in path), path
        assert len(result["factors"]["lies"]) == 9  # with two slots of each
        (found,) = result["own"]
        predicted = {rank: own["same"]["predicted"][rank]}
        assert equal(found["same"], {**own["same"], "predicted": predicted}, 2e-5)
        assert found["gathered"] == []
        cores, across, mixed, layouts = result["refused"]
        assert "each host's cores, which is 4" in cores
        assert "one host" in across and "[0, 1]" in across
        assert "in host order" in mixed
        assert "same `layout_map`" in layouts and "worker 1" in layouts
