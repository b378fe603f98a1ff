"""keras-hub's models, made of small configurations: nothing is downloaded."""

import keras
import numpy as np

from conformance.ports.keras_io_supervised import IMAGES, LABELS
from conformance.ports.port import (
    LOGITS_LOSS,
    ROWS,
    SENTIMENT,
    TEXT,
    compiled,
    fitted,
    port,
    sgd,
)

GUIDES = "keras-team/keras-io: guides/keras_hub"
HUB = {"needs": "keras_hub"}
TRANSFORMER = {
    "vocabulary_size": 9,
    "max_sequence_length": 6,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "dropout": 0.1,
}
# Rows of different lengths.
MASK = np.arange(6) < 2 + np.arange(ROWS)[:, np.newaxis] % 5


@port(f"{GUIDES}/getting_started.py, BERT", **HUB)
def bert_text_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(**TRANSFORMER)
        model = keras_hub.models.BertTextClassifier(backbone, 2, dropout=0.1)
        return compiled(model, sgd(), LOGITS_LOSS, metrics=["accuracy"])

    inputs = {
        "token_ids": TEXT * MASK,
        "segment_ids": np.zeros_like(TEXT),
        "padding_mask": MASK,
    }
    return fitted(strategy, make, inputs, SENTIMENT, validation_split=0.2)


@port(f"{GUIDES}/transformer_pretraining.py, masked words", **HUB)
def bert_masked_lm(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(**TRANSFORMER)
        model = keras_hub.models.BertMaskedLM(backbone)
        return compiled(model, sgd(), LOGITS_LOSS, weighted_metrics=["accuracy"])

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
        backbone = keras_hub.models.GPT2Backbone(**TRANSFORMER)
        model = keras_hub.models.GPT2CausalLM(backbone)
        schedule = keras.optimizers.schedules.PolynomialDecay(0.05, 6)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
        return compiled(model, optimizer, LOGITS_LOSS, weighted_metrics=["accuracy"])

    inputs = {"token_ids": TEXT, "padding_mask": np.ones_like(TEXT)}
    targets = np.roll(TEXT, -1, axis=1)
    weights = MASK.astype("float32")
    return fitted(strategy, make, inputs, targets, sample_weight=weights)


COLOURED = np.repeat(IMAGES, 3, axis=-1)


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
        return compiled(model, sgd(), LOGITS_LOSS, metrics=["accuracy"])

    return fitted(strategy, make, COLOURED, LABELS, validation_split=0.2)


@port(f"{GUIDES}/classification_with_keras_hub.py, ResNet", **HUB)
def resnet_image_classifier(strategy):
    import keras_hub

    def make():
        sizes = [64], [3], [64, 8], [1, 1], [1, 2]
        backbone = keras_hub.models.ResNetBackbone(
            *sizes, "basic_block", image_shape=(8, 8, 3)
        )
        model = keras_hub.models.ResNetImageClassifier(backbone, 10)
        optimizer = keras.optimizers.SGD(0.01)
        return compiled(model, optimizer, LOGITS_LOSS, metrics=["accuracy"])

    return fitted(strategy, make, COLOURED, LABELS)
