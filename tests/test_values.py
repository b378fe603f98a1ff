"""ReduceOp and distributed values."""

import enum
from types import SimpleNamespace

import pytest

import keras_strategy as ks
from keras_strategy.devices import ReplicaTopology
from keras_strategy.values import regroup, select_replica


class Native(enum.Enum):
    MEAN = "MEAN"


@pytest.mark.parametrize("op", ["SUM", "sum", "Sum", ks.ReduceOp.SUM])
def test_reduce_op_names(op):
    assert ks.ReduceOp.parse(op) is ks.ReduceOp.SUM


def test_native_reduce_op_is_accepted():
    assert ks.ReduceOp.parse(Native.MEAN) is ks.ReduceOp.MEAN


@pytest.mark.parametrize("op", ["max", None, 3, ""])
def test_bad_reduce_op_is_refused(op):
    with pytest.raises(ValueError, match="reduce_op="):
        ks.ReduceOp.parse(op)


def test_repr_shows_values():
    assert repr(ks.PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
    assert repr(ks.Mirrored([1])).startswith("Mirrored")


def test_empty_values_are_refused():
    with pytest.raises(ValueError, match="values"):
        ks.PerReplica([])


def test_select_replica():
    structure = {"a": ks.PerReplica([1, 2]), "b": [3, None]}
    assert select_replica(structure, 1, 2) == {"a": 2, "b": [3, None]}


def test_regroup():
    outputs = [{"same": 1, "none": None, "own": 0}, {"same": 1, "none": None, "own": 1}]
    joined = regroup(outputs, lambda x: False)
    assert (joined["same"], joined["none"]) == (1, None)
    assert joined["own"].values == (0, 1)
    assert regroup([3], lambda x: True) == 3


def test_regroup_refuses_different_structures():
    with pytest.raises(ValueError, match="same structure.*replica 1"):
        regroup([[1], {"a": 1}], lambda x: False)


def test_replica_devices():
    alone = ReplicaTopology(("cpu:0", "cpu:1"))
    assert (alone.num_replicas, alone.local_replicas) == (2, range(2))
    third = ReplicaTopology(("cpu:0", "cpu:1"), SimpleNamespace(rank=2, size=3))
    assert (third.num_replicas, third.local_replicas) == (6, range(4, 6))
