"""keras.io's examples of vision, language and other supervised learning."""

import keras
import numpy as np
from keras import layers, ops

from conformance.ports.port import (
    LOGITS_LOSS,
    PURE,
    ROWS,
    SENTIMENT,
    TEXT,
    compiled,
    digits,
    fitted,
    port,
    sgd,
    step_of,
)

EXAMPLES = "keras-team/keras-io: examples"
IMAGES, LABELS = digits(ROWS)
VALIDATION = (IMAGES[:11], LABELS[:11])


def encoder_of(*head):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="tanh"),
            layers.Flatten(),
            *head,
        ]
    )


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@port(f"{EXAMPLES}/vision/knowledge_distillation.py")
def knowledge_distillation(strategy):
    def make():
        teacher, student = encoder_of(layers.Dense(10)), encoder_of(layers.Dense(10))
        teacher.trainable = False
        return compiled(
            Distiller(student, teacher),
            keras.optimizers.Adam(1e-2),
            [keras.metrics.SparseCategoricalAccuracy()],
            LOGITS_LOSS,
            keras.losses.KLDivergence(),
            temperature=10,
        )

    return fitted(strategy, make, IMAGES, LABELS, validation_data=VALIDATION)


class Patches(layers.Layer):
    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        size = self.patch_size
        batch_size, height, width, channels = ops.shape(images)
        patches = ops.image.extract_patches(images, size=size)
        count = (height // size) * (width // size)
        return ops.reshape(patches, (batch_size, count, size * size * channels))


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(dim)
        self.position_embedding = layers.Embedding(num_patches, dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(0, self.num_patches), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


@port(f"{EXAMPLES}/vision/image_classification_with_vision_transformer.py")
def vision_transformer(strategy):
    def make():
        inputs = keras.Input((8, 8, 1))
        x = PatchEncoder(4, 8)(Patches(4)(inputs))
        x1 = layers.LayerNormalization(epsilon=1e-6)(x)
        x2 = layers.Add()([layers.MultiHeadAttention(2, 4, dropout=0.1)(x1, x1), x])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        x3 = layers.Dropout(0.1)(layers.Dense(8, "gelu")(x3))
        x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x3, x2]))
        x = layers.Dropout(0.5)(layers.Flatten()(x))
        metrics = [
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(5, name="top-5-accuracy"),
        ]
        model = keras.Model(inputs, layers.Dense(10)(x))
        return compiled(model, sgd(), LOGITS_LOSS, metrics=metrics)

    return fitted(strategy, make, IMAGES, LABELS, validation_split=0.2)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, "tanh"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1, self.dropout2 = layers.Dropout(0.1), layers.Dropout(0.1)

    def call(self, inputs):
        out1 = self.layernorm1(inputs + self.dropout1(self.att(inputs, inputs)))
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)


@port(f"{EXAMPLES}/nlp/text_classification_with_transformer.py")
def text_classification_with_transformer(strategy):
    def make():
        inputs = keras.Input((6,), dtype="int32")
        x = TokenAndPositionEmbedding(6, 9, 8)(inputs)
        x = layers.GlobalAveragePooling1D()(TransformerBlock(8, 2, 8)(x))
        x = layers.Dropout(0.1)(x)
        x = layers.Dropout(0.1)(layers.Dense(8, "tanh")(x))
        model = keras.Model(inputs, layers.Dense(2, "softmax")(x))
        loss = "sparse_categorical_crossentropy"
        return compiled(model, sgd(), loss, metrics=["accuracy"])

    return fitted(strategy, make, TEXT, SENTIMENT, validation_split=0.2)


@port(f"{EXAMPLES}/nlp/lstm_seq2seq.py")
def lstm_seq2seq(strategy):
    def make():
        encoder_inputs = keras.Input((6, 9))
        _, *states = layers.LSTM(4, return_state=True)(encoder_inputs)
        decoder_inputs = keras.Input((5, 9))
        decoder_lstm = layers.LSTM(4, return_sequences=True, return_state=True)
        outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=states)
        outputs = layers.Dense(9, "softmax")(outputs)
        model = keras.Model([encoder_inputs, decoder_inputs], outputs)
        loss = "categorical_crossentropy"
        return compiled(model, "rmsprop", loss, metrics=["accuracy"])

    text = keras.utils.to_categorical(TEXT, 9)
    inputs = (text, text[:, :-1])
    return fitted(strategy, make, inputs, text[:, 1:], validation_split=0.2)


class RecommenderNet(keras.Model):
    """Four embeddings, and a dot product over whole batches."""

    def __init__(self, num_users, num_movies, embedding_size):
        super().__init__()
        l2 = keras.regularizers.l2(1e-6)
        regularized = {"embeddings_regularizer": l2}
        self.user = layers.Embedding(num_users, embedding_size, **regularized)
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie = layers.Embedding(num_movies, embedding_size, **regularized)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        users, movies = inputs[:, 0], inputs[:, 1]
        # Over all rows, as the source has it: it is one number for the batch.
        dot = ops.tensordot(self.user(users), self.movie(movies), 2)
        return ops.nn.sigmoid(dot + self.user_bias(users) + self.movie_bias(movies))


@port(f"{EXAMPLES}/structured_data/collaborative_filtering_movielens.py")
def collaborative_filtering(strategy):
    def make():
        model = RecommenderNet(5, 7, 3)
        loss = keras.losses.BinaryCrossentropy()
        return compiled(model, keras.optimizers.Adam(1e-2), loss)

    pairs = np.stack([np.arange(ROWS) % 5, np.arange(ROWS) % 7], axis=1)
    ratings = np.linspace(0, 1, ROWS, dtype="float32")[:, np.newaxis]
    return fitted(strategy, make, pairs, ratings)


class MyTrainer(keras.Model):
    """A model that trains another one, and is called as it is."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy()
        self.accuracy_metric = keras.metrics.SparseCategoricalAccuracy()

    @property
    def metrics(self):
        return [self.accuracy_metric]

    def call(self, x):
        return self.model(x)

    def loss_of(self, data, training):
        x, y = data
        predictions = self.model(x, training=training)
        return self.loss_fn(y, predictions), predictions

    def log(self, data, loss, predictions):
        self.accuracy_metric.update_state(data[1], predictions)
        return {"loss": loss, "accuracy": self.accuracy_metric.result()}

    def train_step(self, data):
        variables, loss_of = self.model.trainable_variables, self.loss_of
        results = step_of(
            self.optimizer, variables, lambda: loss_of(data, True), has_aux=True
        )
        return self.log(data, *results)

    def test_step(self, data):
        return self.log(data, *self.loss_of(data, False))


@port(f"{EXAMPLES}/keras_recipes/trainer_pattern.py", not_on=PURE)
def trainer_pattern(strategy):
    def make():
        model = MyTrainer(encoder_of(layers.Dense(10, "softmax")))
        return compiled(model, keras.optimizers.Adam(1e-2))

    return fitted(strategy, make, IMAGES, LABELS, validation_data=VALIDATION)
