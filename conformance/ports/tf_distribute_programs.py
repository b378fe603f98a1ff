"""Training loops that others wrote for tf.distribute, in their own packages."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import keras_strategy as ks
from conformance.ports.port import Outcome, digits, port, step_of
from conformance.ports.tf_distribute import (
    cnn,
    in_replicas,
    per_example,
    with_optimizer,
)


def arrays(*of):
    """Return the values of variables."""
    return [ops.convert_to_numpy(v) for each in of for v in each]


@port("OpenNMT/OpenNMT-tf: opennmt/training.py, GradientAccumulator")
def gradient_accumulator(strategy):
    """Each replica keeps its own sums of gradients, in variables that are on_read."""
    keras.utils.set_random_seed(1)
    strategy = in_replicas(strategy)
    with strategy.scope():
        model, optimizer = with_optimizer(keras.optimizers.Adam())
        own = {"synchronization": "on_read", "trainable": False}
        steps = keras.Variable(0, dtype="int32", **own)
        sums = [
            keras.Variable(ops.zeros(v.shape), **own) for v in model.trainable_variables
        ]

    def accumulate_on_replica(x, y):
        def loss_of():
            return ops.mean(per_example(y, model(x, training=True)))

        loss, gradients = ks.value_and_grad(loss_of, model.trainable_variables)()
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        steps.assign_add(1)
        return loss, ops.sum(ops.ones_like(y))

    def apply_on_replica():
        scale = ops.cast(steps * strategy.num_replicas_in_sync, "float32")
        gradients = [total / scale for total in sums]
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        steps.assign(0)
        for total in sums:
            total.assign(ops.zeros(total.shape))

    def dataset_fn(context):
        data = tf.data.Dataset.from_tensor_slices(digits(60))
        return data.batch(context.get_per_replica_batch_size(12))

    logs = []
    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    for i, batch in enumerate(dataset):
        losses, rows = strategy.run(accumulate_on_replica, args=batch)
        loss = strategy.reduce(ks.ReduceOp.MEAN, losses, axis=None)
        logs += [float(loss), int(strategy.reduce("SUM", rows, axis=None))]
        if i == 0 or (i + 1) % 2 == 0:
            strategy.run(apply_on_replica)
    return Outcome(arrays(model.variables, optimizer.variables), logs)


@port("tensorflow/agents: tf_agents/bandits/agents/linear_bandit_agent.py")
def linear_bandit(strategy):
    """Reduce the replicas' results in a merge_call, and add them to variables."""
    strategy = in_replicas(strategy)
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(29, 4)).astype("float32")
    actions = rng.integers(0, 2, 29).astype("int32")
    rewards = rng.normal(size=29).astype("float32")
    with strategy.scope():
        covariances = [keras.Variable(np.eye(4, dtype="float32")) for _ in range(2)]
        data = [keras.Variable(np.zeros(4, "float32")) for _ in range(2)]
        counter = keras.Variable(0, trainable=False, dtype="int32", aggregation="sum")

    def added(v, total):
        v.assign_add(total)

    def train_step(observation, action, reward):
        counter.assign_add(ops.shape(reward)[0])
        for arm in range(2):
            mask = ops.cast(action == arm, "float32")
            of_arm = observation * ops.expand_dims(mask, -1)
            found = (
                ops.matmul(ops.transpose(of_arm), of_arm),
                ops.matmul(ops.transpose(of_arm), reward),
            )

            def merged(strategy, covariance, vector, arm=arm):
                reduced = strategy.extended.batch_reduce_to(
                    ks.ReduceOp.SUM,
                    [(covariance, covariances[arm]), (vector, data[arm])],
                )
                pairs = zip((covariances[arm], data[arm]), reduced, strict=True)
                for v, total in pairs:
                    strategy.extended.update(v, added, args=(total,))

            ks.get_replica_context().merge_call(merged, args=found)
        return -ops.sum(reward)

    dataset = tf.data.Dataset.from_tensor_slices((seen, actions, rewards)).batch(8)
    logs = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        losses = strategy.run(train_step, args=batch)
        logs.append(float(strategy.reduce("SUM", losses, axis=None)))
    return Outcome(arrays(covariances, data, [counter]), logs)


@port("tensorflow/models: official/modeling/optimization/ema_optimizer.py")
def ema_optimizer(strategy):
    """Update averages by `extended.update` in a merge_call, and swap them."""
    keras.utils.set_random_seed(1)
    strategy = in_replicas(strategy)
    with strategy.scope():
        model, optimizer = with_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        averages = []
        for v in model.trainable_variables:
            with strategy.extended.colocate_vars_with(v):
                averages.append(keras.Variable(ops.zeros(v.shape), trainable=False))

    def apply_moving(average, value):
        average.assign_sub(0.1 * (average - value))

    def update(strategy):
        for average, v in zip(averages, model.trainable_variables, strict=True):
            strategy.extended.update(average, apply_moving, args=(v,), group=False)

    def train_step(x, y):
        def loss_of():
            return ks.compute_average_loss(per_example(y, model(x, training=True)))

        loss = step_of(optimizer, model.trainable_variables, loss_of)
        ks.get_replica_context().merge_call(update)
        return loss

    def swap_weights():
        for a, b in zip(averages, model.trainable_variables, strict=True):
            strategy.extended.update(a, lambda a, b: a.assign_add(b), args=(b,))
            strategy.extended.update(b, lambda b, a: b.assign(a - b), args=(a,))
            strategy.extended.update(a, lambda a, b: a.assign_sub(b), args=(b,))

    logs = []
    data = tf.data.Dataset.from_tensor_slices(digits(29)).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        losses = strategy.run(train_step, args=batch)
        logs.append(float(strategy.reduce("SUM", losses, axis=None)))
    strategy.run(swap_weights)
    return Outcome(arrays(model.variables, optimizer.variables, averages), logs)


@port("tensorflow/models: research/object_detection/model_lib_v2.py")
def object_detection(strategy):
    """Count steps in a variable whose value is the first replica's."""
    keras.utils.set_random_seed(1)
    strategy = in_replicas(strategy)

    def train_dataset_fn(context):
        data = tf.data.Dataset.from_tensor_slices(digits(60))
        if context.num_input_pipelines > 1:
            data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.repeat().batch(context.get_per_replica_batch_size(12))

    with strategy.scope():
        train_input = strategy.experimental_distribute_datasets_from_function(
            train_dataset_fn
        )
        global_step = keras.Variable(
            0, trainable=False, dtype="int32", aggregation="only_first_replica"
        )
        rate = keras.optimizers.schedules.CosineDecay(0.1, 6)
        sgd = keras.optimizers.SGD(rate, momentum=0.9)
        model, optimizer = with_optimizer(sgd, keras.regularizers.L2(1e-2))

    def train_step_fn(features, labels):
        def losses_of():
            losses = {"class": ops.mean(per_example(labels, model(features)))}
            losses["regularization"] = sum(model.losses)
            replicas = strategy.num_replicas_in_sync
            losses = {key: loss / replicas for key, loss in losses.items()}
            losses["total"] = sum(losses.values())
            return losses["total"], losses

        variables = model.trainable_variables
        _, losses = step_of(optimizer, variables, losses_of, has_aux=True)
        global_step.assign_add(1)
        return losses

    logs, iterator = [], iter(train_input)
    for _ in range(6):
        features, labels = next(iterator)
        losses = strategy.run(train_step_fn, args=(features, labels))
        mean = {
            key: strategy.reduce(ks.ReduceOp.SUM, loss, axis=None)
            for key, loss in losses.items()
        }
        logs += [float(mean[key]) for key in sorted(mean)]
        logs += [int(global_step), float(rate(optimizer.iterations))]
    return Outcome(arrays(model.variables, optimizer.variables), logs)


@port("lyrlyrl/tfcv: tfcv/predictor.py")
def merged_predictions(strategy):
    """Join the structures that a step returns on each replica."""
    keras.utils.set_random_seed(1)
    strategy = in_replicas(strategy)
    with strategy.scope():
        model = cnn()

    def predict_step(x, y):
        logits = model(x, training=False)
        return {"scores": ops.softmax(logits), "wrong": ops.argmax(logits, -1) != y}

    def merge_replica_results(inputs):
        values = strategy.experimental_local_results(inputs)
        # Each is on its replica's device.
        return keras.tree.map_structure(
            lambda *x: np.concatenate([*map(ops.convert_to_numpy, x)]), *values
        )

    found = []
    data = tf.data.Dataset.from_tensor_slices(digits(29)).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        merged = merge_replica_results(strategy.run(predict_step, args=batch))
        found += [merged[key] for key in sorted(merged)]
    return Outcome([], [], found)
