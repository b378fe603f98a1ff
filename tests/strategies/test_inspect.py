"""`visualize`: which device holds what."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.core.registry import get_engine


def test_inspect_model_and_optimizer(two):
    with two.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    seen = ks.visualize(model)
    assert seen.columns[:3] == ("replica", "device", "trainable")
    assert [row[:3] for row in seen.rows] == [
        ("0", "cpu:0", "80 B"),
        ("1", "cpu:1", "80 B"),
    ]
    # A momentum for each weight, a learning rate and a number of iterations.
    for row in seen.rows:
        assert 84 < int(row[4].removesuffix(" B")) <= 96
    text = repr(seen)
    assert "cpu:1" in text and "MirroredStrategy" in text


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_inspect_shards(shard):
    engine = get_engine()
    if engine.name == "jax" or engine.sharding_unsupported_reason(shard):
        pytest.skip("another layout of shards")
    with ks.MirroredStrategy(["cpu:0", "cpu:1"], shard=shard).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    sharded = model.optimizer.variables[-2:]
    if shard == "parameters":
        sharded += model.trainable_variables
        # 20 elements of the kernel and the bias.
        assert [row[2] for row in ks.visualize(model).rows] == ["40 B", "40 B"]
    for variable in sharded:
        shape = tuple(variable.shape)
        first, second = ks.visualize(variable).rows
        end = int(first[2].split()[2])
        assert first[2] == f"0 to {end} of {shape}"
        assert second[2] == f"{end} to {np.prod(shape)} of {shape}"
        assert first[4] == f"{4 * end} B"


def test_inspect_variable(two):
    with two.scope():
        variable = keras.Variable(np.zeros((250, 4)), name="table", dtype="float32")
    seen = ks.visualize(variable)
    assert [row[1:] for row in seen.rows] == [
        ("cpu:0", "(250, 4)", "float32", "4.0 kB"),
        ("cpu:1", "(250, 4)", "float32", "4.0 kB"),
    ]
    assert "table" in seen.title


def test_inspect_per_replica_values(two):
    rows = np.zeros((5, 2), "float32")
    (batch,) = two.experimental_distribute_dataset([rows])
    with two.scope():
        seen = ks.visualize(batch)
        both = ks.visualize((batch, batch))
    assert [row[1:] for row in seen.rows] == [
        ("cpu:0", "(3, 2)", "float32", "24 B"),
        ("cpu:1", "(2, 2)", "float32", "16 B"),
    ]
    assert [row[2:] for row in both.rows] == [("2", "48 B"), ("2", "32 B")]
    # Outside of a scope nobody knows whose it is.
    assert {row[1] for row in ks.visualize(batch).rows} == {"unknown"}


def test_inspect_values_of_two_strategies(mirrored):
    x = np.zeros((6, 2), "float32")
    batches = [
        next(iter(mirrored(n).experimental_distribute_dataset([x]))) for n in (2, 3)
    ]
    with pytest.raises(ValueError, match=r"different numbers of components: \[2, 3\]"):
        ks.visualize(batches)


def test_inspect_refuses_undistributed_objects():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    (row,) = ks.visualize(model).rows
    assert row == ("0", "this process", "16 B", "0 B", "0 B", "16 B")
    (row,) = ks.visualize(keras.ops.ones((2, 2), dtype="bool")).rows
    assert row[2:] == ("(2, 2)", "bool", "4 B")


def test_strategy_repr_lists_replicas(two, capsys):
    two.summary()
    printed = capsys.readouterr().out
    assert "2 replicas in all" in printed
    assert "cpu:0" in printed and "cpu:1" in printed


def test_notebook_repr(two):
    html = ks.visualize(two)._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") == 3
    with two.scope():
        variable = keras.Variable(0.0, name="a&b")
    assert "a&amp;b" in ks.visualize(variable)._repr_html_()
