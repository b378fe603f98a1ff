"""Every input that fit, evaluate and predict take gives what it gives on one device."""

import importlib.util

import keras
import numpy as np
import pytest

from tests.equality.compare import assert_equal, largest, scope, train
from tests.training.shared import SharedModels

BACKEND = keras.backend.backend()
BATCH, ROWS = 4, 13  # the last batch has one row
X = np.random.RandomState(0).randn(ROWS, 3).astype("float32")
Y = np.random.RandomState(1).randn(ROWS, 1).astype("float32")
WEIGHTS = np.random.RandomState(2).rand(ROWS).astype("float32")


def compiled():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


@pytest.fixture(scope="module")
def models():
    return SharedModels(compiled, (X[:BATCH], Y[:BATCH]))


def batches(*arrays):
    for begin in range(0, ROWS, BATCH):
        yield tuple(array[begin : begin + BATCH] for array in arrays)


class Rows(keras.utils.PyDataset):
    """The rows as a PyDataset."""

    def __init__(self, *arrays, **options):
        super().__init__(**options)
        self.arrays = arrays

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(array[rows] for array in self.arrays)


def tf_data(*arrays):
    tf = pytest.importorskip("tensorflow")

    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def loader(*arrays):
    torch = pytest.importorskip("torch")

    data = torch.utils.data.TensorDataset(*map(torch.tensor, arrays))
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def iterable_loader(*arrays):
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(*arrays, strict=True))

    return torch.utils.data.DataLoader(Stream(), batch_size=BATCH)


def shuffled_loader(*arrays):
    torch = pytest.importorskip("torch")

    data = torch.utils.data.TensorDataset(*map(torch.tensor, arrays))
    torch.manual_seed(5)
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)


def grain_data(*arrays):
    grain = pytest.importorskip("grain")

    rows = list(zip(*arrays, strict=True))
    return grain.MapDataset.source(rows).batch(BATCH, drop_remainder=False)


SOURCES = {
    "tf.data": tf_data,
    "torch DataLoader": loader,
    "torch DataLoader of a stream": iterable_loader,
    "torch DataLoader that shuffles": shuffled_loader,
    "PyDataset": Rows,
    "PyDataset of 2 threads": lambda *a: Rows(*a, workers=2),
    "grain": grain_data,
}


@pytest.mark.full(keep=7, keep_on="tensorflow")
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "sample weights"])
def test_fit_evaluate_and_predict(name, weighted, mirrored, models):
    arrays = (X, Y, WEIGHTS) if weighted else (X, Y)

    def trained(strategy):
        model = models.fresh(strategy)
        data = SOURCES[name](*arrays)
        history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
        logs = model.evaluate(data, verbose=0)
        only_x = SOURCES[name](X)
        return model.get_weights(), [*history.values(), logs, model.predict(only_x)]

    one, many = trained(None), trained(mirrored(3))
    assert largest(one[0], many[0]) < 2e-5
    if "shuffles" in name:  # what is predicted is in another order each time
        one[1].pop(), many[1].pop()
    assert largest(one[1], many[1]) < 1e-5


@pytest.mark.full(keep_on="jax")
def test_generator(mirrored):
    """Used up after an epoch; and an endless one, with steps_per_epoch."""

    def endless():
        while True:
            yield from batches(X, Y)

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = compiled()
        logs = [
            model.fit(batches(X, Y), verbose=0).history,
            model.fit(endless(), steps_per_epoch=5, epochs=2, verbose=0).history,
        ]
        predictions = model.predict(batches(X), verbose=0)
        return model.get_weights(), [v for h in logs for v in h.values()], predictions

    one, many = trained(None), trained(mirrored(3))
    assert largest(one[0], many[0]) < 2e-5
    assert largest(one[1], many[1]) < 1e-5
    assert largest([one[2]], [many[2]]) < 1e-5


class Endless(Rows):
    """Without a length: Keras asks for batch after batch."""

    num_batches = None

    def __getitem__(self, index):
        return super().__getitem__(index % len(self))


def endless_loader(*arrays):
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield from zip(*arrays, strict=True)

    return torch.utils.data.DataLoader(Stream(), batch_size=5)


ENDLESS = {
    "tf.data, shuffled": lambda *a: (
        tf_data(*a).unbatch().shuffle(ROWS, seed=3).batch(5).repeat()
    ),
    "PyDataset": Endless,
    "PyDataset of 2 threads": lambda *a: Endless(*a, workers=2),
    "torch DataLoader of a stream": endless_loader,
}
# Every epoch begins to validate anew, while what the last one had read ahead may still
# draw the next orders of one shuffled dataset: a matter of timing, on one device too.
ENDLESS_VALIDATION = {**ENDLESS, "tf.data, shuffled": lambda *a: tf_data(*a).repeat()}


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_data(name, two, models):
    """The steps of an epoch are given; the next one goes on where it stopped."""
    if "tf" in name:
        pytest.importorskip("tensorflow")

    def trained(strategy):
        model = models.fresh(strategy)
        history = model.fit(
            ENDLESS[name](X, Y),
            steps_per_epoch=3,
            epochs=2,
            shuffle=False,
            validation_data=ENDLESS_VALIDATION[name](Y * X, Y),
            validation_steps=2,
            verbose=0,
        ).history
        logs = model.evaluate(ENDLESS[name](X, Y), steps=3, verbose=0)
        predicted = model.predict(ENDLESS[name](X), steps=3, verbose=0)
        return [*model.get_weights(), *history.values(), logs, predicted]

    assert largest(trained(None), trained(two)) < 2e-5


@pytest.mark.full(keep_on="torch")
def test_shuffled_py_dataset(two, models):
    """The order of the batches is drawn as on one device, from the seed."""

    def trained(strategy):
        model = models.fresh(strategy)
        history = model.fit(Rows(X, Y), epochs=3, shuffle=True, verbose=0).history
        return [*model.get_weights(), *history.values()]

    one, again, many = trained(None), trained(None), trained(two)
    assert largest(one, again) == 0  # else there is no order to keep
    assert largest(one, many) < 2e-5


@pytest.mark.full(keep_on="tensorflow")
def test_validation_arguments(two, models):
    options = {
        "validation_data": (X[:7], Y[:7], WEIGHTS[:7]),
        "validation_freq": 2,
        "validation_batch_size": 3,
        "validation_steps": 2,
    }
    one = models.equal(two, X, Y, BATCH, epochs=4, **options)
    assert len([key for key in one.logs if key.startswith("val_loss")]) == 2


ARRAYS = {
    "validation_split": {"validation_split": 0.3},
    "shuffle": {"shuffle": True},
    "class_weight": {},
    "steps_per_epoch": {"steps_per_epoch": 2},
}


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("name", ["validation_split", "shuffle", "steps_per_epoch"])
def test_fit_arguments(name, mirrored, models):
    models.equal(mirrored(3), X, Y, BATCH, **ARRAYS[name])


def test_pandas(mirrored, models):
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame(X), pandas.Series(Y[:, 0])
    models.equal(mirrored(3), x, y, BATCH)


def test_tensors(mirrored, models):
    x, y = keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)
    models.equal(mirrored(3), x, y, BATCH)


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch(
    "keras.src.backend.jax.trainer._distribute_data", backend="jax"
)
def test_sparse_matrices(mirrored, models):
    scipy = pytest.importorskip("scipy.sparse")
    x = scipy.csr_matrix(np.where(X > 0, X, 0))
    models.equal(mirrored(3), x, Y, BATCH)


def nested():
    """Two inputs in a structure, two outputs by name."""
    inputs = {"a": keras.Input((3,), name="a"), "b": [keras.Input((3,), name="b")]}
    both = keras.layers.Concatenate()([inputs["a"], inputs["b"][0]])
    outputs = {
        "p": keras.layers.Dense(1, name="p")(both),
        "q": keras.layers.Dense(2, name="q")(both),
    }
    model = keras.Model(inputs, outputs)
    model.compile("adam", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]})
    return model


@pytest.mark.full(keep_on="tensorflow")
def test_nested_inputs_and_outputs(mirrored):
    x = {"a": X, "b": [X[::-1].copy()]}
    y = {"p": Y, "q": np.concatenate([Y, -Y], axis=1)}
    one = train(None, nested, x, y, BATCH)
    assert_equal(one, train(mirrored(3), nested, x, y, BATCH))


STRUCTURED = {
    "tf.data": lambda *trees: tf_data(*trees),
    "generator": lambda *trees: (
        keras.tree.map_structure(lambda a, i=i: a[i : i + BATCH], trees)
        for i in range(0, ROWS, BATCH)
    ),
}


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("source", STRUCTURED)
def test_batches_with_several_inputs_outputs_and_weights(source, two):
    if "tf" in source:
        pytest.importorskip("tensorflow")

    def make():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((3,), name="b")}
        both = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        outputs = {n: keras.layers.Dense(1, name=n)(both) for n in ("p", "q")}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"p": "mse", "q": "mae"}, weighted_metrics={"q": ["mse"]})
        return model

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = make()
        x, y = {"a": X, "b": X * X}, {"p": Y, "q": Y + 1}
        weights = {"p": WEIGHTS, "q": 1 - WEIGHTS}
        history = model.fit(STRUCTURED[source](x, y, weights), verbose=0).history
        if BACKEND == "tensorflow" and source == "generator":
            # One device logs them too small there: as if there were a batch more.
            del history["p_loss"], history["q_loss"]
        predicted = model.predict(STRUCTURED[source](x), verbose=0)
        return [*model.get_weights(), *history.values(), predicted["p"], predicted["q"]]

    assert largest(trained(None), trained(two)) < 2e-5


@pytest.mark.full(keep_on="jax")
def test_py_dataset_with_two_processes(mirrored, models):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("reads with torch's worker processes")
    import torch

    def trained(strategy):
        model = models.fresh(strategy)
        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        reader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=2)
        model.fit(reader, verbose=0)
        return model.get_weights()

    assert largest(trained(None), trained(mirrored(3))) < 2e-5
