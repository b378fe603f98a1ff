"""keras.io's examples of vision that compare images with each other."""

import keras
import numpy as np
from keras import layers, ops

from conformance.compare import scope
from conformance.ports.keras_io_supervised import EXAMPLES, IMAGES, LABELS, encoder_of
from conformance.ports.port import (
    PURE,
    Outcome,
    Tracked,
    compiled,
    fitted,
    port,
    step_of,
    stepped,
    vectors,
)

FLIPPED = IMAGES[:, ::-1]


def with_adam(model, inputs=1):
    model(IMAGES[:1] if inputs == 1 else [IMAGES[:1]] * inputs)
    return compiled(model, keras.optimizers.Adam(1e-2))


class SupervisedContrastiveLoss(keras.losses.Loss):
    """It compares the rows of a batch, and is called in Keras's stead."""

    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):
        features = ops.normalize(feature_vectors, axis=1, order=2)
        logits = ops.matmul(features, ops.transpose(features)) / self.temperature
        return npairs_loss(ops.reshape(labels, (-1,)), logits)


def npairs_loss(y_true, y_pred):
    """N-pairs loss of TensorFlow Addons."""
    same = ops.cast(ops.equal(y_true[:, None], y_true[None]), y_pred.dtype)
    same /= ops.sum(same, axis=1, keepdims=True)
    losses = keras.losses.categorical_crossentropy(same, y_pred, from_logits=True)
    return ops.mean(losses)


@port(f"{EXAMPLES}/vision/supervised-contrastive-learning.py", sample=True)
def supervised_contrastive_learning(strategy):
    """First the encoder, then a classifier on top of it."""

    def make_encoder():
        model, loss = (
            encoder_of(layers.Dense(8, "tanh")),
            SupervisedContrastiveLoss(0.5),
        )
        return compiled(model, keras.optimizers.Adam(1e-2), loss)

    return fitted(strategy, make_encoder, IMAGES, LABELS % 3)


class SimSiam(Tracked):
    def __init__(self, encoder, predictor):
        super().__init__()
        self.encoder, self.predictor = encoder, predictor

    def call(self, x):
        return self.predictor(self.encoder(x))

    def loss_between(self, p, z):
        p = ops.normalize(p, axis=1, order=2)
        z = ops.normalize(ops.stop_gradient(z), axis=1, order=2)
        return -ops.mean(ops.sum(p * z, axis=1))

    def train_step(self, data):
        ds_one, ds_two = data

        def loss_of():
            z1, z2 = self.encoder(ds_one), self.encoder(ds_two)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return self.loss_between(p1, z2) / 2 + self.loss_between(p2, z1) / 2

        variables = [
            *self.encoder.trainable_variables,
            *self.predictor.trainable_variables,
        ]
        return self.apply_step(variables, loss_of)


@port(f"{EXAMPLES}/vision/simsiam.py", not_on=PURE)
def simsiam(strategy):
    def make():
        l2 = keras.regularizers.L2(5e-4)
        predictor = [layers.Dense(4, "tanh", kernel_regularizer=l2), layers.Dense(8)]
        model = SimSiam(
            encoder_of(layers.Dense(8, kernel_regularizer=l2)),
            keras.Sequential([keras.Input((8,)), *predictor]),
        )
        model(IMAGES[:1])
        schedule = keras.optimizers.schedules.CosineDecay(0.03, 6)
        return compiled(model, keras.optimizers.SGD(schedule, momentum=0.6))

    stop = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    return stepped(strategy, make, IMAGES, FLIPPED, callbacks=[stop])


class BarlowLoss(keras.losses.Loss):
    """Return one number for the correlations of features over the batch."""

    def call(self, z_a, z_b):
        def normalized(x):
            return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)

        rows = ops.cast(ops.shape(z_a)[0], z_a.dtype)
        c = ops.matmul(ops.transpose(normalized(z_a)), normalized(z_b)) / rows
        off = ops.square(c) * (1 - ops.eye(4))
        return ops.sum(ops.square(1 - ops.diagonal(c))) + 5e-3 * ops.sum(off)


class BarlowModel(Tracked):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.loss_fn = encoder, BarlowLoss()

    def call(self, x):
        return self.encoder(x)

    def train_step(self, batch):
        y_a, y_b = batch
        return self.apply_step(
            self.encoder.trainable_variables,
            lambda: self.loss_fn(self.encoder(y_a), self.encoder(y_b)),
        )


@port(f"{EXAMPLES}/vision/barlow_twins.py", not_on=PURE)
def barlow_twins(strategy):
    def make():
        # The loss takes the means away, so that a bias would have no gradient.
        model = BarlowModel(encoder_of(layers.Dense(4, use_bias=False)))
        return with_adam(model)

    return stepped(strategy, make, IMAGES, FLIPPED)


class SiameseModel(Tracked):
    """A triplet loss over the distances that a network gives."""

    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network, self.margin = siamese_network, margin

    def call(self, inputs):
        return self.siamese_network(inputs)

    def _compute_loss(self, data):
        ap_distance, an_distance = self.siamese_network(data)
        return ops.mean(ops.maximum(ap_distance - an_distance + self.margin, 0.0))

    def train_step(self, data):
        variables = self.siamese_network.trainable_weights
        return self.apply_step(variables, lambda: self._compute_loss(data[0]))

    def test_step(self, data):
        return self.log(self._compute_loss(data[0]))


@port(f"{EXAMPLES}/vision/siamese_network.py", not_on=PURE)
def siamese_network(strategy):
    def make():
        embedding = encoder_of(layers.Dense(8, "tanh"))
        inputs = [keras.Input((8, 8, 1)) for _ in range(3)]
        anchor, positive, negative = (embedding(x) for x in inputs)
        distances = [
            ops.sum(ops.square(anchor - other), -1) for other in (positive, negative)
        ]
        model = SiameseModel(keras.Model(inputs, distances))
        return with_adam(model, 3)

    triplets = (IMAGES, FLIPPED, IMAGES[::-1])
    return stepped(strategy, make, triplets, validation_data=(triplets,))


class EmbeddingModel(Tracked):
    """Each batch holds an anchor and a positive image of each class: no rows."""

    def __init__(self):
        super().__init__()
        self.body = encoder_of(layers.Dense(4), layers.UnitNormalization())
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        anchors, positives = data[0][0], data[0][1]

        def loss_of():
            similarities = ops.einsum(
                "ae,pe->ap", self(anchors, training=True), self(positives)
            )
            return self.loss_fn(ops.arange(10), similarities / 0.2)

        return self.apply_step(self.trainable_variables, loss_of)


class AnchorPositivePairs(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        images = IMAGES[:10]
        return (np.stack([images, images[:, :, ::-1]]) + 0.1 * index,)


@port(f"{EXAMPLES}/vision/metric_learning.py", not_on=PURE)
def metric_learning(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = with_adam(EmbeddingModel())
    history = model.fit(AnchorPositivePairs(), epochs=2, verbose=0).history
    return Outcome(model.get_weights(), list(history.values()))


class NNCLR(Tracked):
    """Nearest neighbours in a queue of features, which each step fills anew."""

    def __init__(self, aggregation="none"):
        super().__init__()
        self.encoder = encoder_of(layers.Dense(4))
        self.feature_queue = keras.Variable(
            keras.utils.normalize(vectors(6, 4, seed=3)[0], axis=1, order=2),
            trainable=False,
            aggregation=aggregation,
        )

    def call(self, x):
        return self.encoder(x)

    def nearest_neighbour(self, projections):
        similarities = ops.matmul(projections, ops.transpose(self.feature_queue))
        nearest = ops.take(self.feature_queue, ops.argmax(similarities, axis=1), axis=0)
        return projections + ops.stop_gradient(nearest - projections)

    def train_step(self, data):
        one, two = data

        def loss_of():
            z1 = ops.normalize(self.encoder(one), axis=1, order=2)
            z2 = ops.normalize(self.encoder(two), axis=1, order=2)
            return -ops.mean(ops.sum(self.nearest_neighbour(z1) * z2, 1)), z1

        variables = self.encoder.trainable_variables
        loss, z1 = step_of(self.optimizer, variables, loss_of, has_aux=True)
        queue = ops.concatenate([z1, self.feature_queue], axis=0)
        self.feature_queue.assign(queue[:6])
        return self.log(loss)


@port(f"{EXAMPLES}/vision/nnclr.py", not_on=PURE)
def nnclr(strategy):
    return stepped(strategy, lambda: with_adam(NNCLR()), IMAGES, FLIPPED)
