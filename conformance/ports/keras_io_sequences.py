"""keras.io's examples of sequences, graphs, physics and reinforcement learning."""

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import scope
from conformance.ports.keras_io_supervised import EXAMPLES
from conformance.ports.port import (
    BACKEND,
    LOGITS_LOSS,
    PURE,
    ROWS,
    TEXT,
    Outcome,
    compiled,
    fitted,
    gradient_by,
    port,
    sgd,
    vectors,
)
from conformance.step_model import gradients_of

RNG = np.random.RandomState(3)
SOURCE = RNG.randint(1, 9, (ROWS, 6)) * (np.arange(6) < RNG.randint(2, 7, (ROWS, 1)))
TARGET = RNG.randint(1, 9, (ROWS, 7)) * (np.arange(7) < RNG.randint(3, 8, (ROWS, 1)))
(STEPS,) = vectors(ROWS, 40, seed=4)
STEPS = STEPS.reshape(ROWS, 10, 4)


class PositionalEmbedding(layers.Layer):
    """Positions are the same for all rows, so all replicas look up the same."""

    def __init__(self, length=7, words=9, width=8):
        super().__init__()
        self.words = layers.Embedding(words, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return ops.not_equal(x, 0)


class Attending(layers.Layer):
    """The source's encoder without `context`, and its decoder with it."""

    def __init__(self, width=8):
        super().__init__()
        self.supports_masking = True
        self.own = layers.MultiHeadAttention(2, width)
        self.cross = layers.MultiHeadAttention(2, width)
        self.first, self.second = layers.LayerNormalization(), layers.Dense(width)

    def build(self, x_shape, context_shape=None):
        self.own.build(x_shape, x_shape)
        if context_shape is not None:
            self.cross.build(x_shape, context_shape)
        self.first.build(x_shape)
        self.second.build(x_shape)

    def call(self, x, context=None, mask=None, context_mask=None):
        allowed = None if mask is None else mask[:, None, :]
        causal = context is not None
        own = self.own(x, x, attention_mask=allowed, use_causal_mask=causal)
        x = self.first(x + own)
        if context is not None:
            allowed = None if context_mask is None else context_mask[:, None, :]
            x = x + self.cross(x, context, attention_mask=allowed)
        return x + self.second(x)


@port(f"{EXAMPLES}/nlp/neural_machine_translation_with_transformer.py", sample=True)
def neural_machine_translation(strategy):
    def make():
        source = keras.Input((None,), dtype="int32", name="source")
        target = keras.Input((None,), dtype="int32", name="target")
        encoded = Attending()(PositionalEmbedding()(source))
        decoded = Attending()(PositionalEmbedding()(target), encoded)
        outputs = layers.Dense(9, "softmax")(layers.Dropout(0.5)(decoded))
        model = keras.Model({"source": source, "target": target}, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
        return compiled(model, sgd(), loss, metrics=["accuracy"])

    x = {"source": SOURCE, "target": TARGET[:, :-1]}
    return fitted(strategy, make, x, TARGET[:, 1:], validation_split=0.3)


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        ones = ops.ones_like(y_true[:, 0])
        lengths = ones * y_true.shape[1], ones * y_pred.shape[1]
        self.add_loss(ops.mean(ops.ctc_loss(y_true, y_pred, *lengths)))
        return y_pred


@port(f"{EXAMPLES}/vision/captcha_ocr.py")
def captcha_ocr(strategy):
    def make():
        image = keras.Input((10, 4), name="image")
        label = keras.Input((3,), dtype="int32", name="label")
        lstm = layers.LSTM(4, return_sequences=True, dropout=0.25)
        outputs = layers.Dense(9)(layers.Bidirectional(lstm)(image))
        outputs = CTCLayer()(label, outputs)
        return compiled(keras.Model([image, label], outputs), "adam")

    return fitted(strategy, make, {"image": STEPS, "label": TEXT[:, :3]})


class TransformerASR(keras.Model):
    """Padding has no weight in the loss, and there are no other targets."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 4)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.classifier = layers.Dense(9)
        self.loss_metric = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_metric]

    def call(self, inputs):
        x = self.embedding(inputs["target"][:, :-1])
        return self.classifier(x + self.attention(x, inputs["source"]))

    def _loss(self, batch):
        target = batch["target"][:, 1:]
        one_hot = ops.one_hot(target, 9)
        weight = ops.not_equal(target, 0)
        return self.compute_loss(None, one_hot, self(batch), weight), None

    def train_step(self, batch):
        loss, _, gradients = gradients_of(self, lambda: self._loss(batch))
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


@port(
    f"{EXAMPLES}/audio/transformer_asr.py",
    not_on={**PURE, "torch": "one device builds its loss from targets in the data"},
)
def transformer_asr(strategy):
    def make():
        model = TransformerASR()
        model({"source": STEPS[:1], "target": TARGET[:1]})
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        )
        return compiled(model, sgd(), loss)

    return fitted(strategy, make, {"source": STEPS, "target": TARGET})


class SasRec(keras.Model):
    """Divides its loss by the weights of the batch."""

    def __init__(self):
        super().__init__()
        self.items = PositionalEmbedding()
        self.attention = layers.MultiHeadAttention(1, 4)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def call(self, x):
        x = self.items(x)
        return x + self.attention(x, x, use_causal_mask=True)

    def total(self, weight):
        return ops.sum(weight)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = [ops.sum(self.items.words(y[k]) * y_pred, -1) for k in ("pos", "neg")]
        labels = [ops.ones_like(logits[0]), ops.zeros_like(logits[1])]
        labels, logits = (ops.concatenate(z, 1)[..., None] for z in (labels, logits))
        weight = ops.concatenate([sample_weight["pos"], sample_weight["neg"]], 1)
        loss = self.loss_fn(labels, logits, weight)
        return ops.divide_no_nan(ops.sum(loss), self.total(weight))


class SasRecOfAllRows(SasRec):
    """Divides by the mean weight of all rows, times the local rows."""

    def total(self, weight):
        replica, rows = ks.get_replica_context(), ops.shape(weight)[0]
        total, rows = ops.sum(weight), ops.cast(rows, weight.dtype)
        if replica is None or BACKEND == "jax":
            return total
        of_all = replica.all_reduce("sum", ops.stack([total, rows]))
        return of_all[0] / of_all[1] * rows


def retrieval(strategy, cls):
    x, positive = TARGET[:, :-1], TARGET[:, 1:]
    y = {"pos": positive, "neg": np.roll(positive, 1, axis=0)}
    weight = (positive > 0).astype("float32")
    weights = {"pos": weight, "neg": weight}
    make = lambda: compiled(cls(), sgd())  # noqa: E731
    return fitted(strategy, make, x, y, sample_weight=weights)


@port(f"{EXAMPLES}/keras_rs/sas_rec.py")
def sas_rec(strategy):
    return retrieval(strategy, SasRec)


@port(f"{EXAMPLES}/keras_rs/sas_rec.py")
def sas_rec_that_reduces(strategy):
    return retrieval(strategy, SasRecOfAllRows)


@port(f"{EXAMPLES}/keras_recipes/approximating_non_function_mappings.py")
def mixture_density_network(strategy):
    def loss(y, y_pred):
        means, sigmas, logits = ops.split(y_pred, 3, axis=-1)
        z = -ops.square((y - means) / sigmas) / 2 - ops.log(sigmas)
        return -ops.mean(ops.logsumexp(ops.log_softmax(logits) + z, axis=-1))

    def make():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, "relu")(inputs)
        sigmas = layers.Dense(5, lambda x: ops.elu(x) + 1.01)(hidden)
        parts = layers.Dense(5)(hidden), sigmas, layers.Dense(5)(hidden)
        outputs = layers.Concatenate()(parts)
        return compiled(keras.Model(inputs, outputs), "adam", loss)

    x, y = vectors(ROWS, 4, 1)
    stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    rate = keras.callbacks.ReduceLROnPlateau("loss", patience=0)
    rest = {"validation_split": 0.3, "callbacks": [stop, rate]}
    return fitted(strategy, make, x, y, **rest)


class NodeClassifier(keras.Model):
    """Its input are the numbers of nodes of one graph, which the model holds."""

    def __init__(self, features, edges):
        super().__init__()
        self.features, self.edges = features, edges
        self.prepare, self.update = layers.Dense(6, "gelu"), layers.Dense(6, "gelu")
        self.dropout, self.logits = layers.Dropout(0.5), layers.Dense(3)

    def call(self, nodes, training=False):
        x = self.prepare(ops.convert_to_tensor(self.features))
        messages = self.dropout(ops.take(x, self.edges[1], axis=0), training=training)
        total = ops.segment_sum(messages, self.edges[0], num_segments=30)
        x = self.update(ops.concatenate([x, total], axis=-1))
        return self.logits(ops.take(x, nodes, axis=0))


@port(f"{EXAMPLES}/graph/gnn_citations.py")
def gnn_citations(strategy):
    (features,) = vectors(30, 5)
    edges = np.random.RandomState(1).randint(0, 30, (2, 60)).astype("int32")

    def make():
        model = NodeClassifier(features, edges)
        return compiled(model, "adam", LOGITS_LOSS, metrics=["accuracy"])

    nodes = np.arange(ROWS, dtype="int32")
    return fitted(strategy, make, nodes, nodes % 3, validation_split=0.15)


class Eikonal(keras.Model):
    """The residual of the eikonal equation, by the gradient of inputs in `call`."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(1, "sigmoid")

    def build(self, shape):
        self.hidden.build((None, 4))
        self.out.build((None, 8))

    def time(self, receiver, source):
        distance = ops.norm(receiver - source, axis=-1, keepdims=True)
        x = ops.concatenate([receiver, source], axis=-1)
        return self.out(self.hidden(x)) * distance

    def gradient(self, receiver, source):
        return gradient_by(lambda r: self.time(r, source), receiver)

    def call(self, x):
        receiver, source, velocity = x[:, :2], x[:, 2:4], x[:, 4:]
        norm = ops.norm(self.gradient(receiver, source), axis=-1, keepdims=True)
        return (ops.square(norm * velocity) - 1) / 2


@port(f"{EXAMPLES}/keras_recipes/eikonal.py")
def eikonal(strategy):
    def make():
        return compiled(Eikonal(), keras.optimizers.Adam(2.5e-3), "mae")

    (x,) = vectors(ROWS, 5)
    return fitted(strategy, make, x, np.zeros((ROWS, 1), "float32"))


@port(f"{EXAMPLES}/rl/ddpg_pendulum.py")
def ddpg_pendulum(strategy):
    """Train two networks from a replay buffer, with slowly moving targets."""
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    keras.utils.set_random_seed(1)

    def network(size, activation):
        hidden, out = layers.Dense(8, "relu"), layers.Dense(1, activation)
        return keras.Sequential([keras.Input((size,)), hidden, out])

    with scope(strategy):
        models = [network(*x) for x in ((3, "tanh"), (4, None)) * 2]
        actor, critic, target_actor, target_critic = models
        actor_optimizer = keras.optimizers.Adam(0.001)
        critic_optimizer = keras.optimizers.Adam(0.002)
    target_actor.set_weights(actor.get_weights())
    target_critic.set_weights(critic.get_weights())

    def value(critic, states, actions):
        return critic(ops.concatenate([states, actions], axis=-1))

    def update(batch):
        states, actions, rewards, following = batch
        y = rewards + 0.9 * value(target_critic, following, target_actor(following))

        def critic_loss():
            error = ops.stop_gradient(y) - value(critic, states, actions)
            return ks.compute_average_loss(ops.square(error)[:, 0])

        def actor_loss():
            return -ks.compute_average_loss(value(critic, states, actor(states))[:, 0])

        variables = critic.trainable_variables
        loss, gradients = ks.value_and_grad(critic_loss, variables)()
        critic_optimizer.apply(gradients, variables)
        variables = actor.trainable_variables
        _, gradients = ks.value_and_grad(actor_loss, variables)()
        actor_optimizer.apply(gradients, variables)
        for target, model in ((target_actor, actor), (target_critic, critic)):
            for a, b in zip(target.variables, model.variables, strict=True):
                a.assign(0.05 * b + 0.95 * a)
        return loss

    rng, memory, losses = np.random.RandomState(5), vectors(40, 3, 1, 1, 3), []
    for _ in range(6):
        rows = rng.choice(40, 7)
        batch = tuple(part[rows] for part in memory)
        for local in strategy.experimental_distribute_dataset([batch]):
            losses.append(strategy.reduce("sum", strategy.run(update, (local,))))
    weights = [w for model in models for w in model.get_weights()]
    return Outcome(
        weights, [float(x) for x in losses], actor.predict_on_batch(memory[0])
    )
