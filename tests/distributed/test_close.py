"""Processes that connect to other workers more than once."""

import json
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner

X = np.random.default_rng(0).normal(size=(22, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 22)


def train(scope: Any = None, epochs: int = 2) -> list[np.ndarray]:
    """Train in a scope, with an uneven last batch, and return the weights."""
    keras.utils.set_random_seed(3)
    with scope or keras.name_scope("one_device"):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0)
    return model.get_weights()


def resolver_of(ranks: Sequence[int]) -> ks.cluster_resolver.ClusterResolver | None:
    """Return a resolver of some of the workers; None in the others."""
    configuration = json.loads(os.environ["TF_CONFIG"])
    rank, addresses = configuration["task"]["index"], configuration["cluster"]["worker"]
    if rank not in ranks:
        return None
    return ks.cluster_resolver.SimpleClusterResolver(
        ks.cluster_resolver.ClusterSpec({"worker": [addresses[r] for r in ranks]}),
        task_type="worker",
        task_id=list(ranks).index(rank),
    )


def create_strategy(ranks: Sequence[int]) -> Any:
    resolver = resolver_of(ranks)
    return resolver and ks.MultiWorkerMirroredStrategy(resolver)


def largest_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def connect_often() -> dict[str, Any]:
    """Train on several clusters in a row, each closed in one way."""
    # Each cluster has a chief of its own, so that none waits for another one's port.
    del os.environ["KERAS_STRATEGY_PORT"]
    on_torch = keras.backend.backend() == "torch"
    rounds = [[0, 1, 2], [0, 1], [2, 1], [1, 2, 0], [0, 1, 2]]
    weights, sizes = [], []
    for ranks in rounds if on_torch else [[0, 1, 2]] * 5:
        strategy = create_strategy(ranks)
        if strategy is None:
            continue
        sizes.append(strategy.num_replicas_in_sync)
        weights.append(train(strategy.scope()))
        # The second is closed by the next one, since nothing refers to it any more.
        if len(sizes) != 2:
            strategy.close()
            strategy.close()
        del strategy
    error = None
    if not on_torch:
        with pytest.raises(RuntimeError, match="connects only once") as raised:
            create_strategy([0, 1, 2][::-1])
        error = str(raised.value)
    # After all others: it needs a device, which JAX creates then.
    expected = train()
    return {
        "sizes": sizes,
        "differences": [largest_difference(w, expected) for w in weights],
        "error": error,
    }


@pytest.mark.full(keep_on="jax")
def test_process_trains_with_other_workers(starter):
    with WorkerRunner(3, timeout_seconds=240, starter=starter) as runner:
        results = runner.run(connect_often)
    all_three = [3] * 5
    sizes = [all_three] * 3
    if keras.backend.backend() == "torch":
        sizes = [[3, 2, 3, 3], [3, 2, 2, 3, 3], [3, 2, 3, 3]]
    for result, expected in zip(results, sizes, strict=True):
        assert result["sizes"] == expected
        assert max(result["differences"]) < 2e-5


def use_closed_strategy() -> list[str]:
    environment = dict(os.environ)
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    before = model.get_weights()
    strategy.close()
    if keras.backend.backend() == "torch":
        assert os.environ == environment  # the next workers may use another interface
    errors = []
    for use in (
        lambda: strategy.run(lambda: 1),
        lambda: strategy.scope().__enter__(),
        lambda: model.fit(X, X[:, :3], verbose=0),
        lambda: model.save("closed.keras"),
        lambda: strategy.reduce("sum", ks.PerReplica([1.0])),
    ):
        with pytest.raises(RuntimeError) as error:
            use()
        errors.append(str(error.value))
    assert largest_difference(model.get_weights(), before) == 0
    return errors


@pytest.mark.full(keep_on="jax")
def test_closed_strategy_is_refused(two_workers):
    for errors in two_workers.run(use_closed_strategy):
        for message in errors:
            assert "This strategy was closed" in message


def keep_strategy() -> str:
    """Join another cluster while the first one's strategy is in use."""
    configuration = json.loads(os.environ["TF_CONFIG"])
    rank = configuration["task"]["index"]
    strategy = ks.MultiWorkerMirroredStrategy()
    with pytest.raises(RuntimeError) as error:
        create_strategy([1, 0])
    # It still works.
    assert float(strategy.reduce("sum", strategy.run(lambda: np.float32(1)))) == 2
    return f"{rank}: {error.value}"


@pytest.mark.full(keep_on="jax")
def test_other_workers_are_refused_while_a_strategy_is_in_use(two_workers):
    for message in two_workers.run(keep_strategy):
        assert "already belongs to another cluster" in message
        on_torch = keras.backend.backend() == "torch"
        rule = "Call `close()`" if on_torch else "connects only once"
        assert rule in message


def test_close_without_other_workers_changes_nothing():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.close()
    assert float(strategy.reduce("sum", strategy.run(lambda: np.float32(1)))) == 2
    with pytest.raises(RuntimeError, match="close"):
        strategy.run(strategy.close)
