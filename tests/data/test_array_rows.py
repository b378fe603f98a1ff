"""The rows of arrays that a worker reads alone are those that Keras's batches have."""

import keras
import numpy as np
import pytest

from keras_strategy.keras_patches import data_adapters

BACKEND = keras.backend.backend()
READ = {
    "jax": lambda adapter: adapter.get_jax_iterator(),
    "torch": lambda adapter: adapter.get_torch_dataloader(),
    "tensorflow": lambda adapter: adapter.get_tf_dataset(),
}[BACKEND]
X = {"b": np.arange(40, dtype="float32").reshape(20, 2), "a": np.arange(20)}
Y = np.arange(20) % 3


def batches(data):
    return [keras.tree.map_structure(np.asarray, batch) for batch in data]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_rows_are_in_keras_order(shuffle, monkeypatch):
    monkeypatch.setattr(
        data_adapters, "_INDICES_PER_REQUEST", 7
    )  # two batches of three rows

    def adapter():
        keras.utils.set_random_seed(3)
        return data_adapters.keras_adapters.ArrayDataAdapter(
            X, Y, batch_size=3, shuffle=shuffle
        )

    def share(rows):
        return [(min(1, rows - 1), rows)]

    expected = batches(READ(adapter()))
    assert len(expected) == 7
    own = list(data_adapters.read_local_rows(adapter(), share, READ))
    assert [rows.global_rows for rows in own] == [3] * 6 + [2]
    for rows, batch in zip(own, expected, strict=True):
        first = rows.bounds[0][0]
        keras.tree.map_structure(
            lambda mine, whole, first=first: np.testing.assert_array_equal(
                np.asarray(mine), whole[first:]
            ),
            rows.batch,
            batch,
        )


@pytest.mark.skipif(BACKEND != "torch", reason="of torch's adapter")
def test_tensors_of_arrays_match_keras():
    from keras_strategy.backends.torch.group import cpu_tensor

    for kind in ["?", "b", "B", "h", "H", "i", "I", "l", "f", "d", "F", "D"]:
        array = np.ones((3, 2), kind)
        for part in (array, array[1:], array.T, array[0, 0]):
            tensor, expected = cpu_tensor(part), keras.ops.convert_to_tensor(part)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            tensor.zero_()  # as a step may
        assert array.all()
    for other in (None, 1.0, np.array(["text"])):
        assert cpu_tensor(other) is other
