"""The tutorials of tf.distribute, from the repository tensorflow/docs.

Their datasets are scikit-learn's digits here.
"""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_strategy as ks
from conformance.compare import scope
from conformance.ports.port import (
    BACKEND,
    LOGITS_LOSS,
    Outcome,
    compiled,
    digits,
    folder,
    port,
    step_of,
)

TUTORIALS = "tensorflow/docs: site/en/tutorials/distribute"
BATCH = 8
ROWS = 29  # the last batch has 5


per_example = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none"
)


def batches(rows, size=BATCH):
    return tf.data.Dataset.from_tensor_slices(digits(rows)).batch(size)


def cnn(regularizer=None):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="tanh", kernel_regularizer=regularizer),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


def compiled_cnn():
    adam = keras.optimizers.Adam()
    return compiled(cnn(), adam, LOGITS_LOSS, metrics=["accuracy"])


def with_optimizer(optimizer, regularizer=None):
    """Return a CNN, and its optimizer with slots."""
    model = cnn(regularizer)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def trained_step(model, optimizer, accuracy):
    """Return the training step of the tutorials on loops."""

    def train_step(inputs):
        images, labels = inputs

        def loss_of():
            predictions = model(images, training=True)
            loss = ks.compute_average_loss(per_example(labels, predictions))
            return loss + ks.scale_regularization_loss(model.losses), predictions

        variables = model.trainable_variables
        loss, predictions = step_of(optimizer, variables, loss_of, has_aux=True)
        accuracy.update_state(labels, predictions)
        return loss

    return train_step


def weights_of(model):
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def logs_of(history):
    return list(history.history.values())


@port(f"{TUTORIALS}/keras.ipynb")
def keras_fit(strategy):
    keras.utils.set_random_seed(1)
    rates = []

    def decay(epoch):
        return 1e-2 if epoch < 1 else 1e-3

    class PrintLR(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(model.optimizer.learning_rate.numpy()))

    train = batches(ROWS).cache()
    with scope(strategy):
        model = compiled_cnn()
    with folder() as path:
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                path / "ckpt_{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.LearningRateScheduler(decay),
            PrintLR(),
        ]
        history = model.fit(train, epochs=2, callbacks=callbacks, verbose=0)
        trained = weights_of(model)
        model.load_weights(path / "ckpt_1.weights.h5")
        logs = [*logs_of(history), rates, model.evaluate(train, verbose=0)]
        model.save(path / "my_model.keras")
        unreplicated = keras.models.load_model(path / "my_model.keras")
        with scope(strategy):
            replicated = keras.models.load_model(path / "my_model.keras")
    for loaded in (unreplicated, replicated):
        logs.append(loaded.evaluate(train, verbose=0))
    return Outcome(trained, logs, [replicated.predict(train, verbose=0)])


def in_replicas(strategy):
    """Return the strategy of the tutorial, which is never None."""
    return strategy or ks.OneDeviceStrategy("cpu:0")


@port(f"{TUTORIALS}/custom_training.ipynb", sample=True)
def custom_training(strategy):
    keras.utils.set_random_seed(1)
    strategy = in_replicas(strategy)
    train = strategy.experimental_distribute_dataset(batches(ROWS))
    test = strategy.experimental_distribute_dataset(batches(19))
    with strategy.scope():
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        adam = keras.optimizers.Adam()
        model, optimizer = with_optimizer(adam, keras.regularizers.L2(1e-2))
    train_step = trained_step(model, optimizer, train_accuracy)

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        test_loss.update_state(per_example(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    logs = []

    def epoch_of(inputs):
        total = 0.0
        for x in inputs:
            losses = strategy.run(train_step, args=(x,))
            total += float(strategy.reduce(ks.ReduceOp.SUM, losses, axis=None))
        logs.extend([total, float(train_accuracy.result())])
        train_accuracy.reset_state()

    with folder() as path:
        for _ in range(2):
            epoch_of(train)
            for x in test:
                strategy.run(test_step, args=(x,))
            logs.extend([float(test_loss.result()), float(test_accuracy.result())])
            test_loss.reset_state()
            test_accuracy.reset_state()
        model.save_weights(path / "checkpoint.weights.h5")
        new_model = cnn()
        new_model.load_weights(path / "checkpoint.weights.h5")
    predictions = new_model.predict(batches(19), verbose=0)
    # An iterator that ends before its dataset.
    iterator = iter(train)
    epoch_of(next(iterator) for _ in range(2))
    weights = [*model.variables, *optimizer.variables]
    return Outcome([w.numpy() for w in weights], logs, [predictions])


@port(f"{TUTORIALS}/input.ipynb")
def distributed_input(strategy):
    strategy = in_replicas(strategy)
    n = strategy.num_replicas_in_sync
    found = []

    def rows_of(value):
        """Return the rows of a distributed value, in order."""
        parts = strategy.experimental_local_results(value)
        return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])

    pairs = tf.data.Dataset.from_tensor_slices(
        (np.arange(29.0, dtype="float32"), np.ones(29, "float32"))
    )

    def train_step(inputs):
        features, labels = inputs
        return labels - 0.3 * features

    def dataset_fn(context):
        assert context.num_input_pipelines == 1
        return pairs.batch(context.get_per_replica_batch_size(12)).prefetch(2)

    distributed = strategy.experimental_distribute_dataset(pairs.batch(BATCH))
    for x in distributed:
        found.append(rows_of(strategy.run(train_step, args=(x,))))
    for _ in range(2):
        iterator = iter(distributed)
        for _ in range(2):
            inputs = iterator.get_next()
            found.append(rows_of(strategy.run(train_step, args=(inputs,))))
    # Batches are those of a replica here, so their number differs.
    of_function = strategy.distribute_datasets_from_function(dataset_fn)
    losses = [rows_of(strategy.run(train_step, args=(x,))) for x in of_function]
    found.append(np.concatenate(losses))

    iterator = iter(
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4))
    )
    while (optional := iterator.get_next_as_optional()).has_value():
        found.append(rows_of(strategy.run(lambda x: x, args=(optional.get_value(),))))

    def value_fn(context):
        return np.int32(context.replica_id_in_sync_group)

    ids = strategy.experimental_distribute_values_from_function(value_fn)
    result = strategy.run(lambda x: x, args=(ids,))
    assert [int(i) for i in strategy.experimental_local_results(result)] == [*range(n)]

    result = {}
    indexed = tf.data.Dataset.range(24).enumerate().batch(5)
    for index, inputs in strategy.experimental_distribute_dataset(indexed):
        index, outputs = strategy.run(lambda i, x: (i, 2 * x), args=(index, inputs))
        result.update(zip(rows_of(index), rows_of(outputs), strict=True))
    return Outcome([], [np.array(sorted(result.items()))], found)


@port(f"{TUTORIALS}/save_and_load.ipynb")
def save_and_load(strategy):
    keras.utils.set_random_seed(1)
    train = batches(ROWS)
    with scope(strategy):
        model = compiled_cnn()
    logs = [*logs_of(model.fit(train, epochs=2, verbose=0))]
    weights, predictions = weights_of(model), []
    another = ks.OneDeviceStrategy("cpu:0")
    with folder() as path:
        model.save(path / "save.keras")
        for restoring in (None, another, strategy):
            with scope(restoring):
                restored = keras.models.load_model(path / "save.keras")
            logs += logs_of(restored.fit(train, epochs=2, verbose=0))
            weights += weights_of(restored)
        if BACKEND != "torch":  # whose exporter fails on one device, too
            model.export(path / "exported", verbose=False)
            loaded = tf.saved_model.load(os.fspath(path / "exported"))
            predictions = [loaded.serve(images).numpy() for images, _ in train]
    return Outcome(weights, logs, predictions)


def is_chief(strategy):
    if strategy is None:
        return True
    task = strategy.cluster_resolver
    return task.task_type == "worker" and task.task_id == 0


@port(f"{TUTORIALS}/multi_worker_with_keras.ipynb", workers=True)
def multi_worker_with_keras(strategy):
    keras.utils.set_random_seed(1)
    train = batches(ROWS)
    with scope(strategy):
        model = compiled_cnn()
    with folder() as path:
        history = model.fit(
            train,
            epochs=2,
            callbacks=[keras.callbacks.BackupAndRestore(path / "backup")],
            verbose=0,
        )
        logs = [*logs_of(history), model.evaluate(train, verbose=0)]
        # The chief alone writes, so the others need no folder of their own.
        model.save(path / "model.keras")
        if is_chief(strategy):
            restored = keras.models.load_model(path / "model.keras")
            evaluated = restored.evaluate(train, verbose=0)
            np.testing.assert_allclose(evaluated, logs[-1], 1e-5)
    return Outcome(weights_of(model), logs, [model.predict(train, verbose=0)])


@port(f"{TUTORIALS}/multi_worker_with_ctl.ipynb", workers=True)
def multi_worker_with_ctl(strategy):
    keras.utils.set_random_seed(1)
    strategy = strategy or in_replicas(None)

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(12)
        dataset = tf.data.Dataset.from_tensor_slices(digits(60))
        shard = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return shard.repeat().batch(size)

    with strategy.scope():
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        rmsprop = keras.optimizers.RMSprop(0.001)
        model, optimizer = with_optimizer(rmsprop, keras.regularizers.L2(1e-2))
        train_accuracy = keras.metrics.SparseCategoricalAccuracy()
    step_fn = trained_step(model, optimizer, train_accuracy)

    logs = []
    for _ in range(2):
        iterator, total = iter(dataset), 0.0
        for _ in range(4):
            losses = strategy.run(step_fn, args=(next(iterator),))
            total += float(strategy.reduce("SUM", losses))
        logs += [total, float(train_accuracy.result())]
        train_accuracy.reset_state()
    weights = [*model.variables, *optimizer.variables]
    return Outcome([keras.ops.convert_to_numpy(w) for w in weights], logs)
