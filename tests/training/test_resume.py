"""A training that is interrupted and started again, as if it had not been."""

import json
import os
import signal

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import largest
from keras_strategy.training.checkpoint import BackupFolder
from keras_strategy.training.resume import (
    decode,
    encode,
    get_random_state,
    set_random_state,
    state_of_this_worker,
)
from tests.training.shared import SharedModels

X = np.random.RandomState(0).randn(13, 3).astype("float32")
Y = np.random.RandomState(1).randn(13, 1).astype("float32")
EPOCHS, BATCHES = 3, 4


class Killed(Exception):
    pass


def compiled():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05, clipnorm=1.0), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def models():
    return SharedModels(compiled, (X[:4], Y[:4]))


def killed_at(epoch, batch):
    """Ends a training after a batch, or at the end of an epoch for None."""
    place = {}

    def begin(epoch, logs):
        place["epoch"] = epoch

    def end_of_batch(at, logs):
        if (place["epoch"], at) == (epoch, batch):
            raise Killed

    def end_of_epoch(at, logs):
        if (at, None) == (epoch, batch):
            raise Killed

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=begin,
        on_train_batch_end=end_of_batch,
        on_epoch_end=end_of_epoch,
    )


def fit(model, *callbacks, x=X, y=Y, **arguments):
    """Trains a model; the variables and logs that it ends with."""
    arguments = {"batch_size": 4, "epochs": EPOCHS, "verbose": 0, **arguments}
    logs = model.fit(x, y, callbacks=list(callbacks), **arguments).history
    state = [*model.variables, *model.optimizer.variables]
    return [v.numpy() for v in state], logs


def started_again(models, strategy, seed):
    """The model as a new process has it, that has drawn other random numbers."""
    model = models.fresh(strategy)
    keras.utils.set_random_seed(seed)
    for variable in model.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    return model


def interrupted(models, strategy, backup, killed, **arguments):
    """Trains, is killed, and trains on."""
    with pytest.raises(Killed):
        fit(models.fresh(strategy), backup(), killed_at(*killed), **arguments)
    batches = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batches.append(batch)
    )
    model = started_again(models, strategy, 99)
    return *fit(model, seen, backup(), **arguments), batches


@pytest.mark.full(keep=2, keep_on="torch")
@pytest.mark.parametrize(
    ("killed", "save_freq", "left"),
    [((1, 2), 1, 6), ((1, 2), 2, 6), ((2, 0), "epoch", 4), ((0, 1), 1, 11)],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_resumes(
    models, mirrored, tmp_path, replicas, killed, save_freq, left
):
    """To the last bit, with rows in another order in each epoch, and Dropout."""
    strategy = mirrored(replicas)
    whole, logs = fit(models.fresh(strategy))

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", save_freq)

    values, resumed, batches = interrupted(models, strategy, backup, killed)
    assert len(batches) == left
    assert largest(whole, values) == 0
    for name, told in resumed.items():
        assert told == logs[name][-len(told) :], name
    assert not (tmp_path / "backup").exists()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_resumes_within_the_epoch_that_it_has_resumed(
    models, mirrored, tmp_path, replicas
):
    strategy = mirrored(replicas)
    whole, _ = fit(models.fresh(strategy))
    # From the beginning of an epoch, and then after its third batch.
    for seed, killed, save_freq in ((1, (1, 0), "epoch"), (2, (1, 3), 1)):
        backup = ks.callbacks.BackupAndRestore(tmp_path / "backup", save_freq)
        with pytest.raises(Killed):
            model = models.fresh(strategy)
            if seed > 1:
                model = started_again(models, strategy, seed)
            fit(model, backup, killed_at(*killed))
    model = started_again(models, strategy, 3)
    values, _ = fit(model, ks.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert largest(whole, values) == 0


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.needs_patch("EpochIterator.__iter__", backend="torch")
def test_keras_callback_in_scope(models, mirrored, tmp_path):
    strategy = mirrored(2)
    whole, _ = fit(models.fresh(strategy))
    values, _, batches = interrupted(
        models,
        strategy,
        lambda: keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3),
        (2, 1),
    )
    assert len(batches) == 3  # after the ninth of twelve
    assert largest(whole, values) == 0


class Endless(keras.utils.PyDataset):
    """Batches without an end, of which it notes the numbers."""

    num_batches = None

    def __init__(self):
        super().__init__()
        self.made = []

    def __getitem__(self, index):
        self.made.append(index)
        rows = slice(index % 3 * 4, index % 3 * 4 + 4)
        return X[rows] * (index % 5), Y[rows]


def test_dataset_continuing_across_epochs_resumes(models, mirrored, tmp_path):
    """And does not make again what was trained on, but for one batch."""
    strategy = mirrored(2)

    def trained(model, *callbacks):
        data = Endless()
        steps = {"batch_size": None, "steps_per_epoch": 3}
        values, _ = fit(model, *callbacks, x=data, y=None, **steps)
        return values, data.made

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", 1)

    whole, _ = trained(models.fresh(strategy))
    with pytest.raises(Killed):
        trained(models.fresh(strategy), backup(), killed_at(1, 2))
    values, made = trained(started_again(models, strategy, 99), backup())
    assert largest(whole, values) == 0
    assert set(range(5, 9)) <= set(made) and not {3, 4} & set(made)


class Counts(keras.callbacks.Callback):
    """Counts all epochs, and says so."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


@pytest.mark.full(keep=1, keep_on="torch")
@pytest.mark.parametrize("killed", [(2, 1), "the end"])
def test_counting_callbacks_resume(models, mirrored, tmp_path, killed):
    """The one stops after the same epoch, the other one makes the same rates."""
    strategy = mirrored(2)

    def callbacks():
        never = {"monitor": "loss", "min_delta": 100.0}
        return (
            keras.callbacks.EarlyStopping(
                **never, patience=3, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau(**never, patience=2),
            Counts(),
        )

    def end(logs):
        raise Killed

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", 1)

    at_end = keras.callbacks.LambdaCallback(on_train_end=end)
    killer = at_end if killed == "the end" else killed_at(*killed)
    whole, logs = fit(models.fresh(strategy), *callbacks(), epochs=6)
    assert len(logs["loss"]) == 4
    with pytest.raises(Killed):
        fit(models.fresh(strategy), killer, *callbacks(), backup(), epochs=6)
    again = callbacks()
    model = started_again(models, strategy, 99)
    values, resumed = fit(model, *again, backup(), epochs=6)
    assert len(resumed.get("loss", ())) == (0 if killed == "the end" else 2)
    assert again[-1].epochs == 4
    assert largest(whole, values) == 0


def test_other_callbacks_resume(models, mirrored, tmp_path):
    strategy = mirrored(2)

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", 1)

    with pytest.raises(Killed):
        fit(models.fresh(strategy), Counts(), backup(), killed_at(1, 2))
    with pytest.raises(ValueError, match="interrupted run, .*: Counts. Received: no"):
        fit(models.fresh(strategy), backup())


def queue():
    """Return a loader that makes each batch once and reports its position."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data

    class Numbers(data.IterableDataset):
        def __iter__(self):
            return iter(())

    class Queue(data.DataLoader):
        def __init__(self):
            super().__init__(Numbers())
            self.at, self.made = 0, []

        def state_dict(self):
            return {"at": np.int64(self.at)}

        def load_state_dict(self, state):
            self.at = int(state["at"])

        def __iter__(self):
            while True:
                self.made.append(self.at)
                x = X[self.at % 3 * 4 :][:4] * (self.at % 5)
                y = Y[self.at % 3 * 4 :][:4]
                self.at += 1
                yield torch.from_numpy(x), torch.from_numpy(y)

    return Queue()


class Rolled(keras.utils.PyDataset):
    """Rows that it rolls after each epoch, and says how far."""

    def __init__(self):
        super().__init__()
        self.rolled, self.made = 0, []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.made.append(3 * self.rolled + index)
        rows = slice(4 * index, 4 * index + 4)
        return np.roll(X, self.rolled, 0)[rows], np.roll(Y, self.rolled, 0)[rows]

    def on_epoch_end(self):
        self.rolled += 1

    def state_dict(self):
        return {"rolled": self.rolled}

    def load_state_dict(self, state):
        self.rolled = state["rolled"]


class Grains:
    """Rows for grain, which notes what is read."""

    def __init__(self):
        grain = pytest.importorskip("grain")
        self.made = []
        rows = grain.MapDataset.source(self).shuffle(seed=1).repeat().batch(4)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        self.data = rows.to_iter_dataset(options)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.made.append(index)
        return X[index], Y[index]


@pytest.mark.full(keep=3, keep_on="jax")
@pytest.mark.parametrize("kind", [queue, Rolled, Grains])
@pytest.mark.parametrize("killed", [(1, 2), (1, None)])
def test_dataset_with_state_dict_resumes(models, mirrored, tmp_path, kind, killed):
    """It is asked, and not read again."""
    strategy = mirrored(2)

    def trained(model, *callbacks):
        source = kind()
        steps = None if kind is Rolled else 3
        data = {"x": getattr(source, "data", source), "y": None, "batch_size": None}
        arguments = {**data, "steps_per_epoch": steps, "shuffle": False}
        values, _ = fit(model, *callbacks, **arguments)
        return values, source.made

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", 1)

    whole, _ = trained(models.fresh(strategy))
    with pytest.raises(Killed):
        trained(models.fresh(strategy), backup(), killed_at(*killed))
    values, made = trained(started_again(models, strategy, 99), backup())
    assert largest(whole, values) == 0
    if kind is queue:
        assert not {2, 3} & set(made)
    if kind is Grains:
        # Of the four batches that are left, and of what is read ahead.
        assert len(made) < 4 * 9


@pytest.mark.full(keep=1, keep_on="tensorflow")
@pytest.mark.parametrize(
    ("repeated", "killed", "seed"),
    [(False, (1, None), 7), (True, (1, 0), 7), (False, (1, 2), 8)],
)
def test_tf_data_resumes(models, mirrored, tmp_path, caplog, repeated, killed, seed):
    """Rows in another order in each epoch, of which the rest comes as it would have."""
    tf = pytest.importorskip("tensorflow")
    strategy = mirrored(2)

    def trained(model, *callbacks, seed=7):
        drawn = get_random_state()
        tf.random.set_seed(seed)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(13)
        data = (data.repeat() if repeated else data).batch(4)
        set_random_state(drawn)
        steps = 3 if repeated else None
        orders = []
        seen = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: orders.append(logs["loss"])
        )
        arguments = {"y": None, "batch_size": None, "steps_per_epoch": steps}
        values, _ = fit(model, seen, *callbacks, x=data, **arguments)
        return values, orders

    def backup():
        freq = "epoch" if killed[1] is None else 1
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", freq)

    whole, orders = trained(models.fresh(strategy))
    with pytest.raises(Killed):
        trained(models.fresh(strategy), backup(), killed_at(*killed))
    model = started_again(models, strategy, 99)
    values, resumed = trained(model, backup(), seed=seed)
    assert ("are in another order" in caplog.text) == (seed != 7)
    if seed == 7:
        assert largest(whole, values) == 0
    else:
        # The epoch that was interrupted is what it would have been.
        assert resumed[0] == orders[1] and resumed[1] != orders[2]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("batch", [1, BATCHES - 1, None])
def test_preempted_training_resumes(models, mirrored, tmp_path, batch):
    """It ends after the batch, with a code of its own, and goes on from there.

    Or after the last validation, for None: nothing is left but what follows `fit`.
    """
    strategy = mirrored(2)

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path, save_before_preemption=True)

    class Asked(keras.callbacks.Callback):
        tests = 0

        def on_train_batch_end(self, at, logs=None):
            if at == batch:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_test_end(self, logs=None):
            self.tests += 1
            if self.tests == EPOCHS:
                os.kill(os.getpid(), signal.SIGTERM)

    arguments = {} if batch is not None else {"validation_data": (X[:4], Y[:4])}
    whole, _ = fit(models.fresh(strategy), **arguments)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        fit(models.fresh(strategy), Asked(), backup(), **arguments)
    assert end.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is handler
    batches = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batches.append(batch)
    )
    values, _ = fit(started_again(models, strategy, 99), seen, backup(), **arguments)
    left = 0 if batch is None else EPOCHS * BATCHES - batch - 1
    assert len(batches) == left
    assert largest(whole, values) == 0


@pytest.mark.full(keep_on="tensorflow")
def test_damaged_backups_are_refused(models, mirrored, tmp_path, caplog):
    """The one before is used; where there is none, nothing is lost unasked."""
    strategy, folder = mirrored(2), tmp_path / "backup"

    def backup():
        return ks.callbacks.BackupAndRestore(folder, 1)

    whole, _ = fit(models.fresh(strategy))
    with pytest.raises(Killed):
        fit(models.fresh(strategy), backup(), killed_at(1, 2))
    *_, last = sorted(folder.iterdir())
    assert [file.name for file in sorted(folder.iterdir())] == [
        "backup-000000005.npz",
        "backup-000000006.npz",
    ]
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    (folder / ".backup-000000007.npz.part").write_bytes(b"killed while it saved")
    values, _ = fit(started_again(models, strategy, 99), backup())
    assert largest(whole, values) == 0
    assert "backup-000000006.npz is damaged" in caplog.text
    assert [f.name for f in folder.iterdir()] == ["backup-000000006.npz.damaged"]
    with pytest.raises(ValueError, match="are damaged"):
        fit(models.fresh(strategy), backup())


def test_random_damage_is_moved_aside(tmp_path):
    """Also what makes a reader ask for a password: the next restart goes on."""
    folder = BackupFolder(tmp_path)
    for epoch in (1, 2):
        folder.save(None, {"epoch": epoch}, {"model/0": np.arange(6)}, [], False)
    before, last = sorted(tmp_path.iterdir())
    good = last.read_bytes()
    # Of the list of contents at the end: each field of its first entry, and its place.
    entry, end = good.index(b"PK\1\2"), good.index(b"PK\5\6")
    places = [*range(entry, entry + 46), *range(end + 12, end + 20)]
    for place, bit in [(place, bit) for place in places for bit in (0, 5, 7)]:
        spoiled = bytearray(good)
        spoiled[place] ^= 1 << bit
        last.write_bytes(spoiled)
        found = folder.read()
        assert found is not None, (place - entry, bit)
        if found.file == before:
            last.with_name(last.name + ".damaged").unlink()
        else:
            np.testing.assert_array_equal(found.arrays["model/0"], np.arange(6))


def test_other_data_or_model_is_refused(models, mirrored, tmp_path):
    strategy = mirrored(2)

    def backup():
        return ks.callbacks.BackupAndRestore(tmp_path / "backup", 1)

    with pytest.raises(Killed):
        fit(models.fresh(strategy), backup(), killed_at(1, 2))
    with pytest.raises(ValueError, match="within an epoch"):
        fit(models.fresh(strategy), backup(), batch_size=5)
    with strategy.scope():
        other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        other.compile("adam", "mse")
    with pytest.raises(ValueError, match="another model"):
        fit(other, backup())


def test_bad_arguments_are_refused(mirrored, tmp_path):
    with pytest.raises(ValueError, match="`save_freq` must be"):
        ks.callbacks.BackupAndRestore(tmp_path, 0)
    with pytest.raises(ValueError, match="`backup_dir` must be"):
        ks.callbacks.BackupAndRestore("gs://bucket/backup")
    model = compiled()
    with pytest.raises(RuntimeError, match="in the scope of a strategy"):
        model.fit(X, Y, callbacks=[ks.callbacks.BackupAndRestore(tmp_path)], verbose=0)
    (tmp_path / "latest.weights.h5").touch()
    with pytest.raises(ValueError, match="Keras.s own callback"):
        BackupFolder(tmp_path).read()


def test_states_are_saved_without_pickle():
    state = {
        "at": (1, [2.5, None]),
        3: b"\x00\xff",
        "order": np.arange(6, dtype="uint16").reshape(2, 3),
        "number": np.int64(7),
        "__": "as it is",
        "nested": {"a": float("inf")},
    }
    back = decode(json.loads(json.dumps(encode(state))))
    assert list(back) == list(state)
    for key in ("at", 3, "__", "nested"):
        assert back[key] == state[key]
    assert isinstance(back["number"], np.int64) and back["number"] == 7
    assert back["order"].dtype == "uint16"
    np.testing.assert_array_equal(back["order"], state["order"])
    with pytest.raises(ValueError, match="of type object"):
        encode([object()])


def test_torch_tensors_are_saved_without_pickle():
    torch = pytest.importorskip("torch")
    state = {"generator": torch.arange(3)}
    back = decode(json.loads(json.dumps(encode(state))))
    assert torch.equal(back["generator"], state["generator"])


def test_changed_worker_count_with_local_data():
    assert state_of_this_worker([[1], [1]], None) == [1]
    with pytest.raises(ValueError, match="Received: 1 workers"):
        state_of_this_worker([[1], [2]], None)


def test_backup_supports_every_dtype(tmp_path):
    """Also those that NumPy does not know by itself, without pickle."""
    folder = BackupFolder(tmp_path)
    arrays = {
        "model/0": np.array(keras.ops.convert_to_numpy(keras.ops.ones(3, "bfloat16"))),
        "model/1": np.float64(3.5).reshape(()),
        "model/2": np.array([True, False]),
    }
    folder.save(None, {"epoch": 1}, arrays, [], False)
    found = folder.read()
    assert found is not None and found.facts == {"epoch": 1}
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
