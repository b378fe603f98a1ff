"""Models of users: several inputs, branches, and rows that meet in a `call`."""

import keras
from keras import layers, ops

from conformance import models
from conformance.models import with_sgd
from conformance.program import program


def _built(model, *shapes):
    """Build a subclassed model, so that its weights exist before `fit`."""
    inputs = [ops.zeros((1, *shape)) for shape in shapes]
    model(inputs if len(inputs) > 1 else inputs[0])
    return model


class Mlp(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.out = layers.Dense(1)

    def call(self, x, training=None):
        return self.out(self.hidden(x))


@program(models.regression)
def subclassed_model():
    return with_sgd(_built(Mlp(), (models.FEATURES,)))


def _pairs(rows):
    x, y = models.binary(rows)
    return {"left": x, "right": x[:, ::-1].copy()}, y


@program(_pairs)
def siamese_network():
    tower = keras.Sequential([keras.Input((models.FEATURES,)), layers.Dense(8, "tanh")])
    inputs = {name: keras.Input((models.FEATURES,)) for name in ("left", "right")}
    apart = tower(inputs["left"]) - tower(inputs["right"])
    output = layers.Dense(1, "sigmoid")(ops.abs(apart))
    return with_sgd(keras.Model(inputs, output), loss="binary_crossentropy")


@program(models.words)
def transformer_block():
    inputs = keras.Input((models.STEPS,), dtype="int32")
    x = layers.Embedding(models.WORDS, 8)(inputs)
    # The bias of the keys has no gradient but rounding.
    x += layers.MultiHeadAttention(2, 4, use_bias=False, dropout=0.1, seed=3)(x, x)
    x = layers.LayerNormalization()(x)
    x += layers.Dense(8)(layers.Dense(16, "gelu")(x))
    outputs = layers.Dense(models.CLASSES)(layers.LayerNormalization()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return with_sgd(keras.Model(inputs, outputs), loss=loss, metrics=["accuracy"])


class Sampling(layers.Layer):
    """Draw from a normal distribution, and add its divergence to the loss."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_var = inputs[:, :2], inputs[:, 2:]
        divergence = 1 + log_var - ops.square(mean) - ops.exp(log_var)
        self.add_loss(-0.05 * ops.mean(ops.sum(divergence, axis=1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_var) * noise


def _itself(rows):
    x, _ = models.regression(rows)
    return x, x


@program(_itself)
def variational_autoencoder():
    inputs = keras.Input((models.FEATURES,))
    hidden = layers.Dense(4)(layers.Dense(8, "tanh")(inputs))
    decoded = layers.Dense(models.FEATURES)(Sampling()(hidden))
    return with_sgd(keras.Model(inputs, decoded))


class Retrieval(keras.Model):
    """Two towers, of which the other rows of the batch are the negatives."""

    def __init__(self):
        super().__init__()
        self.query = layers.Dense(4)
        self.item = layers.Dense(4)

    def call(self, x, training=None):
        return ops.stack([self.query(x), self.item(ops.flip(x, axis=1))], axis=1)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        scores = ops.matmul(y_pred[:, 0], ops.transpose(y_pred[:, 1]))
        labels = ops.arange(ops.shape(scores)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, scores, from_logits=True
            )
        )


@program(models.regression)
def retrieval_with_negatives_of_the_batch():
    return with_sgd(_built(Retrieval(), (models.FEATURES,)))


class Factorization(keras.Model):
    """Score of a user and an item, summed over the batch as keras.io's example does.

    https://keras.io/examples/structured_data/collaborative_filtering_movielens/
    """

    def __init__(self):
        super().__init__()
        self.user = layers.Embedding(models.WORDS, 3)
        self.item = layers.Embedding(models.WORDS, 3)

    def call(self, inputs, training=None):
        users, items = self.user(inputs[:, 0]), self.item(inputs[:, 1])
        return ops.sigmoid(ops.tensordot(users, items, 2) + 0 * users[:, :1])


@program(lambda rows: (models.words(rows)[0][:, :2], models.binary(rows)[1]))
def factorization_that_sums_over_rows():
    model = Factorization()
    model(ops.zeros((1, 2), "int32"))
    return with_sgd(model, loss="binary_crossentropy")


class Experts(layers.Layer):
    """Mixture of experts with the load-balancing loss of the Switch transformer."""

    def build(self, shape):
        self.gate = layers.Dense(3, "softmax")
        self.experts = layers.Dense(3 * 4)
        self.gate.build(shape)
        self.experts.build(shape)

    def call(self, x):
        gates = self.gate(x)
        chosen = ops.one_hot(ops.argmax(gates, axis=-1), 3)
        load = ops.mean(ops.cast(chosen, x.dtype), axis=0)
        self.add_loss(0.1 * 3 * ops.sum(load * ops.mean(gates, axis=0)))
        outputs = ops.reshape(self.experts(x), (-1, 3, 4))
        return ops.sum(ops.expand_dims(gates, -1) * outputs, axis=1)


@program(models.regression)
def mixture_of_experts_with_balancing_loss():
    return with_sgd(models.mlp(Experts()))


class Distilled(keras.Model):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = Mlp(), Mlp()
        self.teacher.trainable = False

    def call(self, x, training=None):
        return self.student(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.5 * ops.mean(ops.square(self.teacher(x) - y_pred))

    def build_both(self):
        _built(self.teacher, (models.FEATURES,))
        return _built(self, (models.FEATURES,))


@program(models.regression)
def distillation():
    return with_sgd(Distilled().build_both())


class TripletLoss(keras.losses.Loss):
    """Batch-hard triplet loss: farthest row of the class, nearest of the others."""

    def call(self, y_true, y_pred):
        rows = models.normalized(y_pred)
        squares = ops.sum(ops.square(rows[:, None] - rows[None]), axis=-1)
        apart = ops.sqrt(squares + 1e-6)
        same = ops.equal(ops.reshape(y_true, (-1, 1)), ops.reshape(y_true, (1, -1)))
        farthest = ops.max(ops.where(same, apart, 0.0), axis=1)
        nearest = ops.min(ops.where(same, 10.0, apart), axis=1)
        return ops.mean(ops.relu(farthest - nearest + 0.5))


@program(models.classes)
def batch_hard_triplet_loss():
    return with_sgd(models.mlp(outputs=models.CLASSES), loss=TripletLoss())


@program(models.images)
def convolutional_network():
    return models.image_classifier(
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.3, seed=3),
    )
