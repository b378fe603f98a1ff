"""Dropout masks on torch: its bits, and the state in which it leaves a generator."""

import keras
import numpy as np
import pytest
from keras import layers

if keras.backend.backend() != "torch":
    pytest.skip("tests of the torch adapter", allow_module_level=True)

import torch

import keras_strategy as ks
from keras_strategy.backends.torch import random
from keras_strategy.testing import WorkerRunner
from tests.equality.compare import scope

# More numbers than are drawn at once.
SHAPE = 30, 1237


def drawn(generator, part=None, keep=0.7, is_tensor=False, torchs=False):
    """Return a mask and the generator's next number."""
    if not torchs:
        mask = random.draw_mask(SHAPE, keep, generator, is_tensor, part)
    elif is_tensor:
        mask = torch.bernoulli(torch.full(SHAPE, keep), generator=generator)
    else:
        mask = torch.empty(SHAPE).bernoulli_(keep, generator=generator)
    return mask.bool(), torch.rand(1, generator=generator)


@pytest.mark.skipif(not random.draws_like_torch(), reason="this torch draws otherwise")
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("keep", [1e-9, 0.1, 0.7, 1 - 1e-9])
def test_mask_has_bits_of_torch(is_tensor, keep):
    call = {"keep": keep, "is_tensor": is_tensor}
    new = torch.Generator().manual_seed
    mask, after = drawn(new(3), torchs=True, **call)
    for part in (None, (0, 13, 30), (13, 14, 30), (14, 30, 30), (5, 15, 15)):
        found, found_after = drawn(new(3), part, **call)
        begin, end, size = part or (0, 1, 1)
        rows = slice(begin * 30 // size, end * 30 // size)
        assert torch.equal(found[rows], mask[rows])
        # Keras does not use the generator of a seed again.
        assert is_tensor or torch.equal(found_after, after)


class Always(layers.Dropout):
    """Monte Carlo dropout."""

    def call(self, inputs, training=False):
        return super().call(inputs, training=True)


class ByColumns(keras.layers.Layer):
    """Keeps values, with those of a column next to each other in memory."""

    def call(self, inputs):
        return inputs.t().contiguous().t()

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


def predicted(strategy, dropout, before=()):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        layers = [keras.Input((700,)), *[make() for make in before]]
        model = keras.Sequential([*layers, Always(0.3, **dropout)])
    x = np.random.default_rng(0).normal(size=(61, 700)).astype("float32")
    return model.predict(x, batch_size=48, verbose=0), float(torch.rand(()))


@pytest.mark.parametrize("has_bits", [True, False])
@pytest.mark.parametrize(
    "dropout", [{}, {"seed": 3}, {"noise_shape": (None, 1)}], ids=str
)
def test_dropout_has_bits_of_one_device(dropout, has_bits, two, monkeypatch):
    if not has_bits:  # as on a CPU where torch takes MKL's numbers
        monkeypatch.setattr(random, "_has_same_bits", False)
    one, after_one = predicted(None, dropout)
    many, after_many = predicted(two, dropout)
    np.testing.assert_array_equal(one, many)
    assert after_one == after_many and 0.5 < np.mean(one != 0) < 0.9


OF_WORKERS = [({},), ({"seed": 3},), ({}, [ByColumns])]


def job():
    strategy = ks.MultiWorkerMirroredStrategy()
    return [predicted(strategy, *arguments) for arguments in OF_WORKERS]


def test_dropout_of_workers_has_bits_of_one_device(starter):
    with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
        results = runner.run(job)
    for result in results:
        for arguments, (found, after) in zip(OF_WORKERS, result, strict=True):
            one, after_one = predicted(None, *arguments)
            np.testing.assert_array_equal(one, found)
            assert after == after_one


def draw_in_run():
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    ones = keras.ops.ones((64,))
    mask = strategy.run(lambda: keras.random.dropout(ones, 0.5))
    (mask,) = strategy.experimental_local_results(mask)
    return keras.ops.convert_to_numpy(mask), float(torch.rand(()))


@pytest.mark.needs_patch(
    "backends.torch.patches keras.src.backend.torch.random.dropout", backend="torch"
)
def test_workers_draw_different_masks_in_run(starter):
    with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
        (one, after_one), (other, after_other) = runner.run(draw_in_run)
    assert not np.array_equal(one, other)
    assert after_one == after_other
