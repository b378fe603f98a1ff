"""keras-hub's models, made of small configurations: nothing is downloaded."""

import keras
import numpy as np

from conformance.ports.port import digits, fitted, port, words

GUIDES = "keras-team/keras-io: guides/keras_hub"
HUB = {"needs": "keras_hub"}
ROWS = 21  # by batches of 8 the last one has 5
TEXT, SENTIMENT = words(ROWS, 6, 9)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TRANSFORMER = {
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "dropout": 0.1,
}


def sgd():
    """Return SGD, since the bias of attention keys has no gradient but rounding.

    Adam, which the guides use, scales that up to whole steps.
    """
    return keras.optimizers.SGD(0.05, momentum=0.9)


@port(f"{GUIDES}/getting_started.py, BERT", **HUB)
def bert_text_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=9, max_sequence_length=6, **TRANSFORMER
        )
        model = keras_hub.models.BertTextClassifier(backbone, 2, dropout=0.1)
        model.compile(sgd(), LOSS, metrics=["accuracy"])
        return model

    # Rows of different lengths.
    mask = np.arange(6) < 2 + np.arange(ROWS)[:, np.newaxis] % 5
    inputs = {
        "token_ids": TEXT * mask,
        "segment_ids": np.zeros_like(TEXT),
        "padding_mask": mask,
    }
    return fitted(strategy, make, inputs, SENTIMENT, validation_split=0.2)


@port(f"{GUIDES}/transformer_pretraining.py, masked words", **HUB)
def bert_masked_lm(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=9, max_sequence_length=6, **TRANSFORMER
        )
        model = keras_hub.models.BertMaskedLM(backbone)
        model.compile(sgd(), LOSS, weighted_metrics=["accuracy"])
        return model

    positions = np.stack([np.arange(ROWS) % 6, (np.arange(ROWS) + 2) % 6], axis=1)
    inputs = {
        "token_ids": TEXT,
        "segment_ids": np.zeros_like(TEXT),
        "padding_mask": np.ones_like(TEXT),
        "mask_positions": positions,
    }
    targets = np.take_along_axis(TEXT, positions, axis=1)
    # Some rows have one masked word alone.
    weights = np.stack([np.ones(ROWS), np.arange(ROWS) % 3 > 0], axis=1)
    return fitted(strategy, make, inputs, targets, sample_weight=weights)


@port(
    "keras-team/keras-io: examples/generative/gpt2_text_generation_with_keras_hub.py",
    **HUB,
)
def gpt2_causal_lm(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=9, max_sequence_length=6, **TRANSFORMER
        )
        model = keras_hub.models.GPT2CausalLM(backbone)
        schedule = keras.optimizers.schedules.PolynomialDecay(0.05, 6)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
        model.compile(optimizer, LOSS, weighted_metrics=["accuracy"])
        return model

    inputs = {"token_ids": TEXT, "padding_mask": np.ones_like(TEXT)}
    targets = np.roll(TEXT, -1, axis=1)
    weights = (np.arange(6) < 2 + np.arange(ROWS)[:, np.newaxis] % 5).astype("float32")
    return fitted(strategy, make, inputs, targets, sample_weight=weights)


def images(channels):
    x, y = digits(ROWS)
    return np.repeat(x, channels, axis=-1), y


@port(f"{GUIDES}/classification_with_keras_hub.py, ViT", **HUB)
def vit_image_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(8, 8, 3),
            patch_size=4,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            mlp_dim=16,
        )
        model = keras_hub.models.ViTImageClassifier(backbone, 10)
        model.compile(sgd(), LOSS, metrics=["accuracy"])
        return model

    return fitted(strategy, make, *images(3), validation_split=0.2)


@port(f"{GUIDES}/classification_with_keras_hub.py, ResNet", **HUB)
def resnet_image_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.ResNetBackbone(
            [64],
            [3],
            [64, 8],
            [1, 1],
            [1, 2],
            "basic_block",
            image_shape=(8, 8, 3),
        )
        model = keras_hub.models.ResNetImageClassifier(backbone, 10)
        model.compile(keras.optimizers.SGD(0.01), LOSS, metrics=["accuracy"])
        return model

    return fitted(strategy, make, *images(3))
