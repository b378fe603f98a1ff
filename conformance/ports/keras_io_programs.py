"""keras.io's examples of graphs, policies, speech, images and loops by hand."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import scope
from conformance.ports.keras_io_supervised import EXAMPLES
from conformance.ports.port import (
    TEXT,
    Outcome,
    compiled,
    dense,
    fitted,
    port,
    vectors,
)
from conformance.step_model import StepModel

ATOMS = np.random.RandomState(6).randint(2, 6, 21)  # of each molecule


class Molecules(keras.utils.PyDataset):
    """Each batch is one graph: its inputs have a row for each atom or bond."""

    def __init__(self):
        super().__init__()
        self.atoms = [vectors(n, 4, seed=n)[0] for n in ATOMS]

    def __len__(self):
        return 3

    def __getitem__(self, index):
        first, last = 8 * index, min(8 * index + 8, 21)
        sizes = ATOMS[first:last]
        starts = np.cumsum([0, *sizes[:-1]])
        rings = [
            np.stack([np.arange(n), (np.arange(n) + 1) % n], 1) + start
            for n, start in zip(sizes, starts, strict=True)
        ]
        pairs = np.concatenate(rings).astype("int32")
        owners = np.repeat(np.arange(last - first), sizes).astype("int32")
        atoms = np.concatenate(self.atoms[first:last])
        return (atoms, pairs, owners), np.arange(first, last)[:, None] % 2


class MPNN(keras.Model):
    """Messages along bonds, then one sum for each molecule."""

    def __init__(self):
        super().__init__()
        self.message, self.update = layers.Dense(4), layers.GRUCell(4)
        self.head = layers.Dense(1, "sigmoid")

    def build(self, shapes=None):
        self.message.build((None, 4))
        self.update.build((None, 4))
        self.head.build((None, 4))

    def passed(self, atoms, pairs):
        for _ in range(2):
            sent = ops.take(self.message(atoms), pairs[:, 1], axis=0)
            rows = ops.shape(atoms)[0]
            sums = ops.segment_sum(sent, pairs[:, 0], num_segments=rows)
            atoms, _ = self.update(sums, [atoms])
        return atoms

    def call(self, inputs):
        atoms, pairs, owners = inputs
        atoms = self.passed(atoms, pairs)
        # Molecules of a short last batch are cut off below: they have no atoms.
        return self.head(ops.segment_sum(atoms, owners, num_segments=8))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred[: ops.shape(y)[0]], sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred[: ops.shape(y)[0]], sample_weight)


@port(f"{EXAMPLES}/graph/mpnn-molecular-graphs.py")
def mpnn_molecular_graphs(strategy):
    def make():
        metrics = [keras.metrics.AUC(name="AUC")]
        return compiled(MPNN(), "adam", "binary_crossentropy", metrics=metrics)

    return fitted(strategy, make, Molecules(), class_weight={0: 2.0, 1: 0.5})


class ActorCritic(StepModel):
    """A step is an episode: its returns are normalized, its losses summed."""

    def __init__(self):
        super().__init__()
        self.common = layers.Dense(8, "relu")
        self.actor, self.critic = layers.Dense(2, "softmax"), layers.Dense(1)

    def call(self, states):
        common = self.common(states)
        return self.actor(common), self.critic(common)

    def loss_of(self, forward, x, y, sample_weight):
        states, actions = x
        probabilities, values = forward(states)
        returns = (y - ops.mean(y)) / (ops.std(y) + 1e-7)
        chosen = ops.sum(probabilities * ops.one_hot(actions, 2), axis=-1)
        advantages = returns - values[:, 0]
        actor = ops.sum(-ops.log(chosen) * advantages)
        huber = keras.losses.Huber(reduction="sum")
        return actor + huber(values, returns[:, None]), probabilities

    def log(self, loss, y, y_pred, sample_weight):
        return {"loss": loss, "reward": ops.sum(y) / 10}


RL = f"{EXAMPLES}/rl"


@port(f"{RL}/actor_critic_cartpole.py")
def actor_critic_cartpole(strategy):
    """Play an episode with the model, then train by it."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = ActorCritic()
        model(np.zeros((1, 4), "float32"))
        model.compile(keras.optimizers.Adam(0.01))
    rng, logs = np.random.RandomState(0), []
    for length in (7, 12, 7):
        state, states, actions = np.ones(4, "float32"), [], []
        for _ in range(length):
            probabilities, _ = model(state[None])
            p = float(ops.convert_to_numpy(probabilities)[0, 0])
            actions.append(int(rng.rand() > p))
            states.append(state)
            state = np.roll(state, 1) * (0.9 if actions[-1] else -1.1)
        rewards = [abs(s[0]) for s in states]
        y = np.cumsum(rewards[::-1])[::-1].astype("float32")
        x = np.array(states, "float32"), np.array(actions, "int32")
        fit = model.fit(x, y, batch_size=length, shuffle=False, verbose=0)
        logs += fit.history.values()
    return Outcome([*model.get_weights(), *actions], logs)


@port(f"{RL}/ppo_cartpole.py")
def ppo_cartpole(strategy):
    """Train on the whole buffer, until the policy has moved too far."""
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    keras.utils.set_random_seed(1)
    with scope(strategy):
        actor, critic = dense(4, 2), dense(4, 1)
        optimizers = keras.optimizers.Adam(0.03), keras.optimizers.Adam(0.01)
    average = ks.compute_average_loss

    def logprobabilities(states, actions):
        return ops.sum(ops.log_softmax(actor(states)) * ops.one_hot(actions, 2), axis=1)

    def train_policy(states, actions, before, advantages, _):
        mean = replica_mean(advantages)
        spread = ops.sqrt(replica_mean(ops.square(advantages - mean)))
        scaled = (advantages - mean) / (spread + 1e-8)

        def loss():
            ratio = ops.exp(logprobabilities(states, actions) - before)
            clipped = ops.clip(ratio, 0.8, 1.2) * scaled
            return -average(ops.minimum(ratio * scaled, clipped))

        variables = actor.trainable_variables
        _, gradients = ks.value_and_grad(loss, variables)()
        optimizers[0].apply(gradients, variables)
        return average(before - logprobabilities(states, actions))

    def train_value(states, returns):
        def loss():
            return average(ops.square(returns - critic(states)[:, 0]))

        variables = critic.trainable_variables
        value, gradients = ks.value_and_grad(loss, variables)()
        optimizers[1].apply(gradients, variables)
        return value

    def replica_mean(x):
        replica: Any = ks.get_replica_context()
        return replica.all_reduce("sum", average(x))

    states, noise = vectors(13, 4, 1)
    actions, logs = np.arange(13, dtype="int32") % 2, []
    for epoch in range(2):
        before = ops.convert_to_numpy(logprobabilities(states, actions))
        values = ops.convert_to_numpy(critic(states))[:, 0]
        returns = np.float32(noise[:, 0] + epoch)
        buffer = states, actions, before, returns - values, returns
        (batch,) = strategy.experimental_distribute_dataset([buffer])
        for _ in range(5):
            kl = strategy.reduce("sum", strategy.run(train_policy, batch))
            logs.append(float(kl))
            if logs[-1] > 1.5 * 0.01:
                break
        for _ in range(3):
            loss = strategy.run(train_value, (batch[0], batch[4]))
            logs.append(float(strategy.reduce("sum", loss)))
    weights = [v.numpy() for v in [*actor.variables, *critic.variables]]
    return Outcome(weights, [len(logs), *logs])


class DecodesSpeech(keras.callbacks.Callback):
    """Predict each validation batch after an epoch, and decode it."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset, self.decoded = dataset, []

    def on_epoch_end(self, epoch, logs=None):
        for spectrogram, _ in self.dataset:
            y = self.model.predict(spectrogram, verbose=0)
            lengths = np.full(len(y), y.shape[1], "int32")
            decoded, scores = ops.ctc_decode(y, lengths, "greedy", mask_index=0)
            self.decoded += [decoded[0], scores]


@port(f"{EXAMPLES}/audio/ctc_asr.py", needs="tensorflow")
def ctc_asr(strategy):
    """Pad each batch to its longest spectrogram and text."""
    import tensorflow as tf

    spectrograms = [vectors(6 + i % 5, 4, seed=i)[0] for i in range(21)]
    texts = [row[: 1 + i % 3] for i, row in enumerate(TEXT.astype("int32"))]
    rows = lambda: zip(spectrograms, texts, strict=True)  # noqa: E731
    spec = tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32)
    data = tf.data.Dataset.from_generator(rows, output_signature=spec)
    data = data.padded_batch(8).prefetch(tf.data.AUTOTUNE)

    def ctc_loss(y_true, y_pred):
        y_true = ops.cast(y_true, "int32")
        frames = ops.shape(y_pred)[1] * ops.ones_like(y_true[:, 0])
        lengths = ops.sum(ops.cast(y_true > 0, "int32"), axis=1)
        return ops.ctc_loss(y_true, y_pred, lengths, frames)

    def make():
        inputs = keras.Input((None, 4))
        x = layers.Conv1D(6, 3, strides=1, padding="same", use_bias=False)(inputs)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
        outputs = layers.Dense(9)(layers.Dropout(0.5)(x))
        return compiled(keras.Model(inputs, outputs), "adam", ctc_loss)

    decodes = DecodesSpeech(data)
    done = fitted(strategy, make, data, validation_data=data, callbacks=[decodes])
    return Outcome(done.weights, done.logs, [*done.predictions, *decodes.decoded])


@port("keras-team/keras: keras.losses.CTC")
def ctc_of_keras(strategy):
    def make():
        gru = layers.Bidirectional(layers.GRU(4, return_sequences=True))
        model = keras.Sequential([keras.Input((8, 4)), gru, layers.Dense(9)])
        return compiled(model, "adam", keras.losses.CTC())

    x = vectors(21, 32)[0].reshape(21, 8, 4)
    y = TEXT[:, :3] * (np.arange(3) <= np.arange(21)[:, None] % 3)
    return fitted(strategy, make, x, y, validation_split=0.2)
