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
def test_names_of_reduce_ops(op):
    assert ks.ReduceOp.parse(op) is ks.ReduceOp.SUM


def test_tf_distributes_enum_is_understood():
    assert ks.ReduceOp.parse(Native.MEAN) is ks.ReduceOp.MEAN


@pytest.mark.parametrize("op", ["max", None, 3, ""])
def test_what_is_no_reduce_op(op):
    with pytest.raises(ValueError, match="reduce_op="):
        ks.ReduceOp.parse(op)


def test_they_print_what_they_hold():
    assert repr(ks.PerReplica([1, "a"])) == "PerReplica:{\n  0: 1,\n  1: 'a'\n}"
    assert repr(ks.Mirrored([1])).startswith("Mirrored")


def test_values_must_not_be_empty():
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


def test_where_replicas_are():
    alone = ReplicaTopology(("cpu:0", "cpu:1"))
    assert (alone.num_replicas, alone.local_replicas) == (2, range(2))
    third = ReplicaTopology(("cpu:0", "cpu:1"), SimpleNamespace(rank=2, size=3))
    assert (third.num_replicas, third.local_replicas, third.first_local_replica) == (
        6,
        range(4, 6),
        4,
    )
