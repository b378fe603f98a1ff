"""keras.io's examples of generative learning, but for GANs."""

import keras
import numpy as np
from keras import layers, ops

from conformance.ports.port import (
    BACKEND,
    LOGITS_LOSS,
    PURE,
    Tracked,
    compiled,
    dense,
    fitted,
    port,
    step_of,
    stepped,
    words,
)

EXAMPLES = "keras-team/keras-io: examples/generative"
RNG = np.random.RandomState(0)
# By batches of 8 the last one has a row for the first replica alone.
IMAGES = RNG.rand(17, 4).astype("float32")
NOISE = RNG.randn(17, 2).astype("float32")


def with_adam(model, inputs=None):
    if inputs is not None:
        model(inputs)
    return compiled(model, keras.optimizers.Adam(0.01))


class NoCall(Tracked):
    """On torch, Keras takes no model for built that it cannot call."""

    def __init__(self):
        super().__init__()
        self.built = BACKEND == "torch"


class VAE(NoCall):
    """It logs under names that no metric has."""

    names = "total_loss", "reconstruction_loss", "kl_loss"

    def __init__(self):
        super().__init__()
        self.encoder = dense(4, 4)
        self.decoder = dense(2, 4)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def train_step(self, data):
        images = data

        def losses():
            encoded = self.encoder(images)
            z_mean, z_log_var = encoded[:, :2], encoded[:, 2:]
            epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seed_generator)
            reconstruction = ops.sigmoid(
                self.decoder(z_mean + ops.exp(0.5 * z_log_var) * epsilon)
            )
            reconstruction_loss = ops.mean(
                keras.losses.binary_crossentropy(images, reconstruction)
            )
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            return reconstruction_loss + kl_loss, (reconstruction_loss, kl_loss)

        total_loss, others = step_of(
            self.optimizer, self.trainable_weights, losses, has_aux=True
        )
        logs = self.log(total_loss, *others)
        return {"loss": logs.pop("total_loss"), **logs}


@port(f"{EXAMPLES}/vae.py", not_on=PURE, sample=True)
def vae(strategy):
    return stepped(strategy, lambda: with_adam(VAE()), IMAGES)


class DiffusionModel(NoCall):
    """Two networks, of which one is a moving average of the other."""

    names = "n_loss", "i_loss"

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(IMAGES)
        self.network = dense(5, 4)
        self.ema_network = keras.models.clone_model(self.network)
        self.loss_fn = keras.losses.MeanAbsoluteError()

    def denoise(self, network, noisy_images, noise_rates, signal_rates, training):
        inputs = ops.concatenate([noisy_images, noise_rates**2], axis=1)
        pred_noises = network(inputs, training=training)
        return pred_noises, (noisy_images - noise_rates * pred_noises) / signal_rates

    def losses_of(self, data, network, training):
        images = self.normalizer(data[0] if isinstance(data, tuple) else data)
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform(
            (ops.shape(images)[0], 1), 0.0, 1.0, seed=self.seed_generator
        )
        angles = 0.3 + times
        signal_rates, noise_rates = ops.cos(angles), ops.sin(angles)
        noisy_images = signal_rates * images + noise_rates * noises
        pred_noises, pred_images = self.denoise(
            network, noisy_images, noise_rates, signal_rates, training
        )
        noise_loss = self.loss_fn(noises, pred_noises)
        return noise_loss, self.loss_fn(images, pred_images)

    def train_step(self, data):
        losses = step_of(
            self.optimizer,
            self.network.trainable_weights,
            lambda: self.losses_of(data, self.network, True),
            has_aux=True,
        )
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, ema_weight in pairs:
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return self.log(*losses)

    def test_step(self, data):
        return self.log(*self.losses_of(data, self.ema_network, False))


@port(f"{EXAMPLES}/ddim.py", not_on=PURE)
def ddim(strategy):
    def make():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=1e-4)
        return compiled(DiffusionModel(), optimizer)

    return stepped(strategy, make, IMAGES, validation_data=(IMAGES,))


class VectorQuantizer(layers.Layer):
    """Adds its losses, and passes gradients straight through."""

    def __init__(self, num_embeddings=5, embedding_dim=2, beta=0.25):
        super().__init__()
        self.embedding_dim, self.beta = embedding_dim, beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings), initializer="random_normal"
        )

    def call(self, x):
        flattened = ops.reshape(x, (-1, self.embedding_dim))
        distances = (
            ops.sum(flattened**2, axis=1, keepdims=True)
            + ops.sum(self.embeddings**2, axis=0)
            - 2 * ops.matmul(flattened, self.embeddings)
        )
        encodings = ops.one_hot(ops.argmin(distances, axis=1), 5)
        quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + ops.stop_gradient(quantized - x)


class VQVAETrainer(Tracked):
    names = "total_loss", "reconstruction_loss", "vq_loss"

    def __init__(self):
        super().__init__()
        self.train_variance = 0.08
        self.vqvae = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), VectorQuantizer(), layers.Dense(4)]
        )

    def call(self, x):
        return self.vqvae(x)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data

        def losses():
            reconstructions = self.vqvae(x)
            error = ops.mean((x - reconstructions) ** 2) / self.train_variance
            return error + sum(self.vqvae.losses), (error, sum(self.vqvae.losses))

        variables = self.vqvae.trainable_variables
        total, others = step_of(self.optimizer, variables, losses, has_aux=True)
        logs = self.log(total, *others)
        logs["vqvae_loss"] = logs.pop("vq_loss")
        return {"loss": logs.pop("total_loss"), **logs}


@port(f"{EXAMPLES}/vq_vae.py", not_on=PURE)
def vq_vae(strategy):
    return stepped(strategy, lambda: with_adam(VQVAETrainer(), IMAGES[:1]), IMAGES)


class RealNVP(Tracked):
    """Affine coupling layers; its loss is a mean of its own."""

    def __init__(self):
        super().__init__()
        self.masks = np.array([[0, 1], [1, 0]] * 2, "float32")
        self.couplings = [dense(2, 4) for _ in self.masks]

    def call(self, x, training=True):
        log_det = 0.0
        direction = -1 if training else 1
        for i in range(4)[::direction]:
            mask = ops.convert_to_tensor(self.masks[i])
            masked, reversed_mask = x * mask, 1 - mask
            s, t = ops.split(self.couplings[i](masked), 2, axis=-1)
            s, t = ops.tanh(s) * reversed_mask, t * reversed_mask
            gate = (direction - 1) / 2
            x = (
                reversed_mask
                * (x * ops.exp(direction * s) + direction * t * ops.exp(gate * s))
                + masked
            )
            log_det += gate * ops.sum(s, axis=1)
        return x, log_det

    def log_loss(self, data):
        x = data[0] if isinstance(data, tuple) else data
        y, log_det = self(x)
        log_likelihood = -0.5 * ops.sum(y**2, axis=1) - np.log(2 * np.pi) + log_det
        return -ops.mean(log_likelihood)

    def train_step(self, data):
        return self.apply_step(self.trainable_variables, lambda: self.log_loss(data))

    def test_step(self, data):
        return self.log(self.log_loss(data))


@port(f"{EXAMPLES}/real_nvp.py", not_on=PURE)
def real_nvp(strategy):
    make, validation = lambda: with_adam(RealNVP(), NOISE[:1]), (NOISE[:11],)
    return stepped(strategy, make, NOISE, validation_data=validation)


class MiniatureGPT(layers.Layer):
    """A block with a causal mask that is made of the inputs' shape."""

    def __init__(self):
        super().__init__()
        self.att = layers.MultiHeadAttention(2, 4)
        self.ffn = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(8)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1, self.dropout2 = layers.Dropout(0.1), layers.Dropout(0.1)

    def call(self, inputs):
        batch, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
        i, j = ops.arange(length)[:, None], ops.arange(length)
        mask = ops.reshape(ops.cast(i >= j, "bool"), (1, length, length))
        mask = ops.tile(mask, (batch, 1, 1))
        attended = self.dropout1(self.att(inputs, inputs, attention_mask=mask))
        out1 = self.layernorm1(inputs + attended)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


def miniature_gpt():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(inputs)
    x = MiniatureGPT()(x)
    outputs = layers.Dense(9)(x)
    model = keras.Model(inputs, [outputs, x])
    # As `port.sgd`, but faster.
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return compiled(model, optimizer, loss=[LOGITS_LOSS, None])


@port(f"{EXAMPLES}/text_generation_with_miniature_gpt.py")
def text_generation_with_miniature_gpt(strategy):
    # On torch, Keras takes 2 rows for the 2 outputs: no replica gets as many.
    text, _ = words(19, 7, 9)
    return fitted(strategy, miniature_gpt, text[:, :-1], text[:, 1:], batch_size=9)
