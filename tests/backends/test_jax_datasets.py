"""Distributed datasets on JAX: one array of all replicas where that can be."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("Tests of the JAX adapter", allow_module_level=True)

import jax

from keras_strategy.backends.jax.collectives import ShardedPerReplica


def test_equal_components_form_one_array(two):
    batches = [np.arange(6.0).reshape(6, 1), np.ones((3, 1))]
    even, uneven = two.experimental_distribute_dataset(batches)
    assert isinstance(even, ShardedPerReplica)
    assert even.array.shape == (6, 1) and even.array.dtype == "float32"
    np.testing.assert_array_equal(even.array, batches[0])
    assert not isinstance(uneven, ShardedPerReplica)
    devices = [x.devices() for x in uneven.values]
    assert devices == [{jax.devices()[0]}, {jax.devices()[1]}]


def test_sharded_arrays_are_accepted_as_data(two):
    (whole,) = two.experimental_distribute_dataset([np.arange(6)])
    (again,) = two.experimental_distribute_dataset([whole.array])
    np.testing.assert_array_equal(again.array, np.arange(6))
